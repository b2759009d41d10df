// What the agent said and did, folded into messages with parts. Its texts came out of a box; their shape is the log's.

const byName = ([a], [b]) => (a < b ? -1 : 1);

export class Transcript {
  constructor() {
    this.session = "";
    this.errors = [];
    this.notes = [];
    this.printed = [];
    this._messages = new Map();
    this._count = 0;
  }

  add(event) {
    this._count += 1;
    this.session ||= event.session;
    if (event.type === "error") this.errors.push([event.name, event.text].filter(Boolean).join(": ") || "error");
    else if (event.type === "note") this.notes.push(event.text);
    else if (event.type === "output") this.printed.push(event);
    else if (event.session !== this.session) return;
    else if (event.type === "delta") this._append(event);
    else if (["text", "reasoning", "tool_call", "file_edit"].includes(event.type)) this._put(event);
  }

  /** The messages with something in them, oldest first. A message that did not change is the same value as before. */
  messages() {
    return [...this._messages.entries()].map(([id, message]) => folded(id, message)).filter((message) => message.parts.length);
  }

  _put(part) {
    let message = this._messages.get(part.message);
    if (!message) this._messages.set(part.message, (message = { role: part.role ?? "assistant", parts: new Map() }));
    message.value = null;
    // One without a name stands alone.
    message.parts.set(part.id || `#${String(this._count).padStart(9, "0")}`, part);
  }

  _append({ message: name, id, text }) {
    const message = this._messages.get(name);
    const part = message?.parts.get(id);
    if (!part) return;
    message.value = null;
    message.parts.set(id, { ...part, text: (part.text ?? "") + text });
  }
}

function folded(id, message) {
  message.value ??= { id, role: message.role, parts: [...message.parts.entries()].sort(byName).map(([, part]) => part).filter(visible) };
  return message.value;
}

const visible = (part) => part.type === "tool_call" || part.type === "file_edit" || Boolean(part.text);

// What the agent said, folded into messages with parts. Never trusts the shape of it: it came out of a box.

const text = (value) => (typeof value === "string" ? value : "");
const table = (value) => (value && typeof value === "object" && !Array.isArray(value) ? value : {});
const byName = ([a], [b]) => (a < b ? -1 : 1);

export class Transcript {
  constructor() {
    this.session = "";
    this.errors = [];
    this.notes = [];
    this.printed = [];
    this._messages = new Map();
    this._order = null;
  }

  add(data) {
    const session = text(data.sessionID);
    this.session ||= session;
    if (data.type === "error") this.errors.push(errorLine(data.error));
    else if (data.type === "note") this.notes.push(text(data.text));
    else if (data.type === "stdout" || data.type === "stderr") this.printed.push({ stream: data.type, text: text(data.text) });
    if (session !== this.session) return;
    if (data.type === "message") this._message(text(table(data.info).id)).info = table(data.info);
    else if (data.type === "delta") this._append(data);
    else if (data.part && typeof data.part === "object") this._put(data.part);
  }

  /** The messages with something in them, oldest first. A message that did not change is the same value as before. */
  messages() {
    this._order ??= [...this._messages.entries()].sort(byName);
    return this._order.map(([id, message]) => folded(id, message)).filter((message) => message.parts.length);
  }

  _message(id) {
    let message = this._messages.get(id);
    if (!message) {
      this._messages.set(id, (message = { info: {}, parts: new Map(), value: null }));
      this._order = null;
    }
    message.value = null;
    return message;
  }

  _put(part) {
    this._message(text(part.messageID)).parts.set(text(part.id), part);
  }

  _append(data) {
    const parts = this._message(text(data.messageID)).parts;
    const part = parts.get(text(data.partID));
    const field = text(data.field);
    if (part && field) parts.set(text(data.partID), { ...part, [field]: text(part[field]) + text(data.text) });
  }
}

function folded(id, message) {
  message.value ??= {
    id,
    role: text(message.info.role) || "assistant",
    parts: [...message.parts.entries()].sort(byName).map(([, part]) => part).filter(visible),
  };
  return message.value;
}

const visible = (part) => part.type === "tool" || ((part.type === "text" || part.type === "reasoning") && Boolean(text(part.text)));

function errorLine(error) {
  const data = table(table(error).data);
  return [text(table(error).name), text(data.message)].filter(Boolean).join(": ") || "error";
}

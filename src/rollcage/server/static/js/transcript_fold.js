// What the agent said, folded into messages with parts. Never trusts the shape of it: it came out of a box.

const text = (value) => (typeof value === "string" ? value : "");
const table = (value) => (value && typeof value === "object" && !Array.isArray(value) ? value : {});

export class Transcript {
  constructor() {
    this.session = "";
    this.errors = [];
    this.lines = [];
    this._messages = new Map();
  }

  add(data) {
    const session = text(data.sessionID);
    this.session ||= session;
    if (data.type === "error") this.errors.push(errorLine(data.error));
    else if (data.type === "stdout") this.lines.push(text(data.text));
    if (session !== this.session) return;
    if (data.type === "message") this._message(text(table(data.info).id)).info = table(data.info);
    else if (data.type === "delta") this._append(data);
    else if (data.part && typeof data.part === "object") this._put(data.part);
  }

  /** The agent's messages, oldest first, each with its parts in order. */
  messages() {
    return [...this._messages.entries()]
      .sort(([a], [b]) => (a < b ? -1 : 1))
      .map(([id, message]) => ({
        id,
        role: text(message.info.role) || "assistant",
        parts: [...message.parts.entries()].sort(([a], [b]) => (a < b ? -1 : 1)).map(([, part]) => part),
      }));
  }

  _message(id) {
    let message = this._messages.get(id);
    if (!message) this._messages.set(id, (message = { info: {}, parts: new Map() }));
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

function errorLine(error) {
  const data = table(table(error).data);
  return [text(table(error).name), text(data.message)].filter(Boolean).join(": ") || "error";
}

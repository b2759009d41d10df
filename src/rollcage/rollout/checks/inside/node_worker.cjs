// In a box, as the judged: holds the agent's modules, and does with them what the tests in the judge ask for.
// One JSON line for each request and answer. Objects that are no data stay here; the judge knows them by number.
"use strict";
const fs = require("node:fs");
const { pathToFileURL } = require("node:url");
const input = fs.openSync("/proc/self/fd/0", "r");
const output = fs.openSync("/proc/self/fd/1", "w");
process.stdout.write = process.stderr.write.bind(process.stderr); // what code under test prints is no answer
const objects = [];
const numbers = new Map();
let buffer = "";

function receive() {
  const chunk = Buffer.alloc(65536);
  while (!buffer.includes("\n")) {
    const size = fs.readSync(input, chunk);
    if (!size) process.exit(0);
    buffer += chunk.toString("latin1", 0, size);
  }
  const end = buffer.indexOf("\n");
  const line = Buffer.from(buffer.slice(0, end), "latin1").toString("utf8");
  buffer = buffer.slice(end + 1);
  return JSON.parse(line);
}

function send(message) {
  let data = Buffer.from(`${JSON.stringify(message)}\n`);
  while (data.length) data = data.subarray(fs.writeSync(output, data));
}

function handle(value) {
  if (!numbers.has(value)) numbers.set(value, objects.push(value) - 1);
  return { h: numbers.get(value), f: typeof value === "function", p: value instanceof Promise };
}

function known(data) {
  if ("h" in data) return objects[data.h];
  return (...values) => {
    send({ call: data.callback, with: values.map((each) => pack(each, handle)) });
    for (;;) {
      const message = receive();
      if ("do" in message) answer(message);
      else if ("ok" in message) return unpack(message.ok, known);
      else throw Object.assign(new Error(message.raised.message), { name: message.raised.name });
    }
  };
}

const acts = {
  get: (owner, name) => owner[name],
  set: (owner, name, value) => void (owner[name] = value),
  delete: (owner, name) => delete owner[name],
  has: (owner, name) => name in owner,
  keys: (owner) => Object.keys(owner),
  call: (owner, self, ...values) => Reflect.apply(owner, self, values),
  construct: (owner, ...values) => Reflect.construct(owner, values),
  iterate: (owner) => owner[Symbol.iterator](),
  iterable: (owner) => typeof owner[Symbol.iterator] === "function",
  primitive: (owner, hint) => (hint === "number" ? Number(owner) : String(owner)),
  instance: (value, kind) => value instanceof kind,
  require: (path) => require(path),
};

function raised(error) {
  const told = { name: "Error", message: "", own: {}, as: null };
  if (error !== null && (typeof error === "object" || typeof error === "function")) {
    const names = ["TypeError", "RangeError", "SyntaxError", "ReferenceError", "EvalError", "URIError"];
    told.name = names.find((name) => error instanceof globalThis[name]) ?? "Error";
    told.called = String(error.name);
    told.message = String(error.message);
    for (const key of Object.keys(error)) if (typeof error[key] !== "object" && typeof error[key] !== "function") told.own[key] = pack(error[key], () => null);
    told.as = handle(error);
  } else told.thrown = pack(error, () => null);
  return told;
}

function answer(request) {
  let message;
  try {
    message = { ok: pack(acts[request.do](...request.with.map((each) => unpack(each, known))), handle) };
  } catch (error) {
    message = { raised: raised(error) };
  }
  send(message);
}

async function main() {
  for (;;) {
    const request = receive();
    if (request.do === "await" || request.do === "import") {
      let message;
      try {
        const [value] = request.with.map((each) => unpack(each, known));
        message = { ok: pack(request.do === "await" ? await value : await import(pathToFileURL(value)), handle) };
      } catch (error) {
        message = { raised: raised(error) };
      }
      send(message);
    } else answer(request);
  }
}

main();

// In a box, in the judge, loaded before each test file: the agent's modules become stubs, whose code runs in a worker of
// the judged. What the test expects is never handed over, and the judge compares. A worker that dies, hangs or talks
// nonsense ends the test file: in JavaScript no exception is safe from `assert.throws`.
import child_process from "node:child_process";
import fs from "node:fs";
import module from "node:module";
import os from "node:os";
import path from "node:path";

const CALL_MS = 20_000;
const LINE = 8 << 20;
const COMMAND = [CONFIG.launcher, "--timeout", String(CONFIG.seconds), "--max-output", "1G", "--"];
const inside = (file) => CONFIG.outside.some((folder) => file === folder || file.startsWith(`${folder}/`));

function fail(why) {
  fs.writeSync(2, `${why}\n`);
  process.reallyExit(97);
}

class Worker {
  constructor() {
    const folder = fs.mkdtempSync(path.join(os.tmpdir(), "judge-"));
    const names = ["to", "from"].map((name) => path.join(folder, name));
    start.execFileSync("mkfifo", names);
    const held = names.map((name) => fs.openSync(name, "r+"));
    this.input = fs.openSync(names[0], "w");
    this.output = fs.openSync(names[1], fs.constants.O_RDONLY | fs.constants.O_NONBLOCK);
    const [program, ...words] = [...COMMAND, CONFIG.node, "-e", CONFIG.worker];
    const child = start.spawn(program, words, { cwd: CONFIG.workdir, stdio: [held[0], held[1], "ignore"] });
    child.unref();
    held.forEach((file) => fs.closeSync(file));
    fs.rmSync(folder, { recursive: true });
    this.buffer = Buffer.alloc(0);
    this.callbacks = [];
    this.proxies = new Map();
    this.asked = 0;
    this.begun = false;
  }

  ask(what, ...values) {
    this.asked += 1;
    this.send({ do: what, with: values.map((each) => pack(each, give)) });
    let deadline = Date.now() + CALL_MS;
    for (;;) {
      const message = this.receive(deadline);
      const started = Date.now();
      if ("call" in message) this.called(message);
      else if (this.failed) throw this.failedOnce();
      else if ("ok" in message) return taken(message.ok);
      else throw exception(message.raised);
      deadline += Date.now() - started;
    }
  }

  send(message) {
    let data = Buffer.from(`${JSON.stringify(message)}\n`);
    try {
      while (data.length) data = data.subarray(fs.writeSync(this.input, data));
    } catch {
      fail("code under test ended its process");
    }
  }

  receive(deadline) {
    const chunk = Buffer.alloc(65536);
    while (!this.buffer.includes(10)) {
      let size = -1;
      try {
        size = fs.readSync(this.output, chunk);
      } catch (error) {
        if (error.code !== "EAGAIN") throw error;
      }
      if (size > 0) {
        this.begun = true;
        this.buffer = Buffer.concat([this.buffer, chunk.subarray(0, size)]);
        if (this.buffer.length > LINE) fail("code under test answered with too much");
        continue;
      }
      if (size === 0 && this.begun) fail("code under test ended its process");
      if (Date.now() > deadline) fail("code under test took too long");
      Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 0.3);
    }
    const end = this.buffer.indexOf(10);
    const line = this.buffer.subarray(0, end).toString("utf8");
    this.buffer = this.buffer.subarray(end + 1);
    try {
      const message = JSON.parse(line);
      if (message === null || typeof message !== "object") throw new Error();
      return message;
    } catch {
      return fail("code under test answered with nonsense");
    }
  }

  failedOnce() {
    const error = this.failed;
    this.failed = undefined;
    return error;
  }

  called(message) {
    const callback = Number.isInteger(message.call) && this.callbacks[message.call];
    if (typeof callback !== "function") fail("code under test answered with nonsense");
    let answer;
    const values = message.with.map(taken);
    try {
      answer = { ok: pack(callback(...values), give) };
    } catch (error) {
      if (error?.code === "ERR_ASSERTION") this.failed ??= error; // code under test may keep it for itself
      answer = { raised: { name: String(error?.name), message: String(error?.message) } };
    }
    this.send(answer);
  }
}

const start = { spawn: child_process.spawn, execFileSync: child_process.execFileSync };
const numbers = new WeakMap(); // of proxies, and of errors that came from over there
let worker;
const ask = (...words) => (worker ??= new Worker()).ask(...words);

class Ref {
  constructor(number) {
    this.number = number;
  }
}

function give(value) {
  if (value instanceof Ref) return { h: value.number };
  if (numbers.has(value)) return { h: numbers.get(value) };
  if (typeof value === "function") return { callback: worker.callbacks.push(value) - 1 };
  return fail(`a ${typeof value} of the test cannot be handed to code under test`);
}

function taken(data) {
  try {
    return unpack(data, made, coercible);
  } catch {
    return fail("code under test answered with nonsense");
  }
}

function exception(told) {
  try {
    if ("thrown" in told) return taken(told.thrown);
    const names = ["TypeError", "RangeError", "SyntaxError", "ReferenceError", "EvalError", "URIError"];
    const error = new (names.includes(told.name) ? globalThis[told.name] : Error)(String(told.message));
    if (told.called !== error.name) Object.defineProperty(error, "name", { value: String(told.called), configurable: true });
    for (const [key, item] of Object.entries(told.own)) if (!(key in error)) error[key] = taken(item);
    numbers.set(error, Number(told.as.h));
    return error;
  } catch {
    return fail("code under test answered with nonsense");
  }
}

function made(told) {
  const ref = new Ref(told.h);
  if (!Number.isInteger(ref.number)) fail("code under test answered with nonsense");
  if (!worker.proxies.has(ref.number)) {
    const target = told.f ? function () {}.bind() : {}; // bound: it can be constructed, and has no prototype of its own
    const value = told.p ? promised(ref) : new Proxy(target, traps(ref, told.f));
    numbers.set(value, ref.number);
    worker.proxies.set(ref.number, value);
  }
  return worker.proxies.get(ref.number);
}

function promised(ref) {
  const value = new Promise((resolve) => setImmediate(resolve)).then(() => ask("await", ref));
  value.catch(() => {}); // whoever waits for it hears of it
  return value;
}

const foreign = Object.freeze({ __proto__: null });

// Whatever an object is worth, it is worth until something else is asked for: not above one bound and then below another.
function steady(coerce) {
  const worth = new Map();
  let at = -1;
  return (hint) => {
    if (at !== worker.asked) worth.clear();
    at = worker.asked;
    if (!worth.has(hint)) worth.set(hint, primitive(coerce(hint)));
    worker.asked = at;
    return worth.get(hint);
  };
}

function coercible(plain) {
  const ways = ["valueOf", "toString"];
  if (!ways.some((name) => typeof plain[name] === "function" && Object.hasOwn(plain, name))) return plain;
  const coerce = (hint) => {
    const [first, second] = hint === "string" ? ["toString", "valueOf"] : ways;
    const value = plain[first]();
    return value !== null && typeof value === "object" ? plain[second]() : value;
  };
  return Object.defineProperty(plain, Symbol.toPrimitive, { value: steady(coerce) });
}

function traps(ref, callable) {
  const worth = steady((hint) => ask("primitive", ref, hint));
  return {
    get(target, name) {
      if (name === Symbol.hasInstance) return (value) => numbers.has(value) && ask("instance", value, ref) === true;
      if (name === Symbol.toPrimitive) return worth;
      if (name === Symbol.iterator) return ask("iterable", ref) === true ? () => ask("iterate", ref) : undefined;
      return typeof name === "symbol" || name === "then" ? undefined : ask("get", ref, name);
    },
    set: (target, name, value) => (ask("set", ref, String(name), value), true),
    apply: (target, self, values) => ask("call", ref, numbers.has(self) ? self : undefined, ...values),
    construct: (target, values) => object(ask("construct", ref, ...values)),
    has: (target, name) => typeof name === "string" && ask("has", ref, name) === true,
    deleteProperty: (target, name) => ask("delete", ref, String(name)) === true,
    ownKeys: () => Array.from(ask("keys", ref), String),
    getOwnPropertyDescriptor(target, name) {
      if (typeof name !== "string" || ask("has", ref, name) !== true) return undefined;
      return { value: ask("get", ref, name), writable: true, enumerable: true, configurable: true };
    },
    getPrototypeOf: () => (callable ? Function.prototype : foreign),
  };
}

function primitive(value) {
  if (value !== null && (typeof value === "object" || typeof value === "function")) fail("code under test gave no value");
  return value;
}

function object(value) {
  if (value === null || (typeof value !== "object" && typeof value !== "function")) fail("code under test gave no object");
  return value;
}

function install() {
  globalThis[Symbol.for("rollcage.judged")] = (file, name) => ask("get", ask("import", file), name);
  const load = module._load;
  module._load = function (request, parent, ...more) {
    const file = path.isAbsolute(request) ? request : path.resolve(path.dirname(parent?.filename ?? "/"), request);
    const local = path.isAbsolute(request) || request.startsWith(".");
    if (local && inside(file)) return ask("require", file);
    const found = module.isBuiltin(request) ? request : module._resolveFilename(request, parent);
    return inside(found) ? ask("require", found) : Reflect.apply(load, this, [request, parent, ...more]);
  };
  for (const name of ["spawn", "spawnSync", "exec", "execSync", "execFile", "execFileSync", "fork"]) {
    const run = child_process[name];
    child_process[name] = (program, ...more) => {
      if (path.basename(String(program)) === "untrusted") return run(program, ...more);
      return fail("start programs by `untrusted`: here they would run beside the judge");
    };
  }
  module.syncBuiltinESMExports();
  module.register(`data:text/javascript;base64,${btoa(CONFIG.hooks)}`);
}

if (process.env.NODE_TEST_CONTEXT) install();

// Talks to the server: plain requests, and streams of events that survive a lost connection. A copy without a server
// has what they answered beside it, one small script each, fetched when it is looked at.
import { signal } from "../vendor/preact.js";

/** "serve"; "view": nothing can be started or stopped; "copy": there is no server. */
export const MODE = document.querySelector('meta[name="rollcage-mode"]')?.content ?? "serve";
const ROOT = new URL("../", document.baseURI.split("#")[0]);
const KEY = "rollcage-key";

/** Whether the server wants a key that we do not have. */
export const locked = signal(false);
/** Whether it refused the one that was given. */
export const unfit = signal(false);
/** Grows with each log-in; what was asked before is asked again. */
export const visit = signal(0);
/** "live", "connecting" or "lost": the state of the page's own stream. */
export const link = signal("connecting");

export const address = (path) => new URL(path.replace(/^\//, ""), ROOT);
export const hasKey = () => Boolean(sessionStorage.getItem(KEY));

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  locked.value = false;
  visit.value += 1;
}

function lock() {
  unfit.value = hasKey();
  locked.value = true;
}

const headers = (more = {}) => {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
};

/** What the server refused, with the argument it is about where there is one. */
export class Refused extends Error {
  constructor(status, body) {
    super(typeof body?.error === "string" ? body.error : `The server answered ${status}.`);
    this.status = status;
    this.argument = body?.argument ?? null;
    this.code = body?.error_code ?? "";
  }
}

const recorded = new Map();
globalThis.rollcagePut = (path, value) => recorded.get(path)?.resolve(value);

/** The file that holds what the server answered at a path; the same in Python. */
const fileOf = (path) => `data/${path.replace(/^\//, "").replace(/[^A-Za-z0-9/-]/gu, (sign) => `_${sign.codePointAt(0).toString(16)}_`)}.js`;

function fromCopy(path) {
  const known = recorded.get(path);
  if (known) return known.promise;
  const found = Promise.withResolvers ? Promise.withResolvers() : {};
  found.promise ??= new Promise((resolve, reject) => Object.assign(found, { resolve, reject }));
  recorded.set(path, found);
  const script = document.createElement("script");
  script.src = fileOf(path);
  script.onerror = () => {
    recorded.delete(path);
    found.reject(new Refused(404, { error: "This is not part of the copy." }));
  };
  script.onload = () => script.remove();
  document.head.append(script);
  return found.promise;
}

/** Give the browser a file to keep. */
export function download(name, parts, type) {
  const url = URL.createObjectURL(new Blob(parts, { type }));
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** What the server answers, as bytes. */
export async function fetched(path, body) {
  const init = { method: "POST", body: JSON.stringify(body), headers: headers({ "Content-Type": "application/json" }) };
  const answer = await fetch(address(path), init);
  if (!answer.ok) throw new Refused(answer.status, await answer.json().catch(() => null));
  return answer.blob();
}

export async function request(path, { method = "GET", body, signal: stop } = {}) {
  if (MODE === "copy") return fromCopy(path);
  const init = { method, signal: stop, headers: headers({ Accept: "application/json" }), cache: "no-store" };
  if (body !== undefined) {
    init.body = JSON.stringify(body);
    init.headers["Content-Type"] = "application/json";
  }
  const answer = await fetch(address(path), init);
  if (answer.status === 401) lock();
  const text = await answer.text();
  let value = null;
  try {
    value = text ? JSON.parse(text) : null;
  } catch {
    if (answer.ok) throw new Error("The server's answer was no JSON.");
  }
  if (!answer.ok) throw new Refused(answer.status, value);
  return value;
}

const SILENCE_MS = 45_000;
const LONGEST_MS = 8_000;

/**
 * Follow a stream of server-sent events until `end` or until the returned function is called.
 * Resumes after the last id that was seen; an id that was seen already is not told twice.
 */
export function follow(path, { onEvent, onState = () => {}, after = 0 }) {
  if (MODE === "copy") {
    fromCopy(path).then(
      (told) => (told.forEach(([event, data]) => onEvent(event, data)), onState("ended")),
      (error) => onState("refused", error),
    );
    return () => {};
  }
  let last = after;
  let stopped = false;
  let pause = 400;
  let controller = new AbortController();
  let hurry = () => {};

  // What the browser knows sooner than a silent connection tells.
  const offline = () => controller.abort();
  const online = () => hurry();
  addEventListener("offline", offline);
  addEventListener("online", online);

  const tell = ({ event, id, data }) => {
    if (id) {
      const seq = Number(id);
      if (!(seq > last)) return false;
      last = seq;
    }
    if (event === "end") return true;
    onEvent(event, data ? JSON.parse(data) : null);
    return false;
  };

  const once = async () => {
    controller = new AbortController();
    const more = last ? { "Last-Event-ID": String(last) } : {};
    const answer = await fetch(address(path), {
      headers: headers({ Accept: "text/event-stream", ...more }),
      signal: controller.signal,
      cache: "no-store",
    });
    if (answer.status === 401) lock();
    if (!answer.ok) throw new Refused(answer.status, await answer.json().catch(() => null));
    onState("live");
    pause = 400;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let timer;
    const alive = () => {
      clearTimeout(timer);
      timer = setTimeout(() => controller.abort(), SILENCE_MS);
    };
    let buffer = "";
    try {
      for (;;) {
        alive();
        const { value, done } = await reader.read();
        if (done) return false;
        buffer += value;
        const blocks = buffer.split(/\r?\n\r?\n/);
        buffer = blocks.pop();
        for (const block of blocks) if (tell(parse(block))) return true;
      }
    } finally {
      clearTimeout(timer);
    }
  };

  (async () => {
    while (!stopped) {
      try {
        if (await once()) {
          onState("ended");
          return;
        }
      } catch (error) {
        if (stopped) return;
        if (error instanceof Refused && error.status >= 400 && error.status < 500 && error.status !== 429) {
          onState("refused", error);
          return;
        }
      }
      if (stopped) return;
      onState("lost");
      await new Promise((done) => {
        hurry = done;
        setTimeout(done, pause * (0.7 + Math.random() * 0.6));
      });
      pause = Math.min(pause * 2, LONGEST_MS);
    }
  })();

  return () => {
    stopped = true;
    removeEventListener("offline", offline);
    removeEventListener("online", online);
    controller.abort();
  };
}

export function parse(block) {
  const found = { event: "message", id: "", data: "" };
  for (const line of block.split(/\r?\n/)) {
    if (!line || line.startsWith(":")) continue;
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") found.data += (found.data ? "\n" : "") + value;
    else if (name === "event" || name === "id") found[name] = value;
  }
  return found;
}

// In a box: how values cross between tests in the judge and code under test in its worker, as JSON.
// Plain values cross as data; for everything else the caller decides: `other`. `whole` is given each plain object.
function pack(value, other, depth = 64) {
  if (value === null || typeof value === "string" || typeof value === "boolean") return value;
  if (typeof value === "number") return Number.isFinite(value) && !Object.is(value, -0) ? value : { n: Object.is(value, -0) ? "-0" : String(value) };
  if (value === undefined) return { u: 0 };
  if (typeof value === "bigint") return { i: String(value) };
  if (!depth) throw new Error("nested too deeply to be carried");
  const inner = (each) => pack(each, other, depth - 1);
  if (typeof value === "object") {
    const kind = Object.getPrototypeOf(value);
    if (kind === Array.prototype) return { l: Array.from(value, inner) };
    if (kind === Date.prototype) return { D: Number(value) };
    if (kind === Map.prototype) return { m: Array.from(value, ([key, item]) => [inner(key), inner(item)]) };
    if (kind === Set.prototype) return { s: Array.from(value, inner) };
    if (kind === Buffer.prototype || kind === Uint8Array.prototype) return { b: Buffer.from(value).toString("hex"), k: kind === Buffer.prototype };
    if (kind === Object.prototype || kind === null) return { o: Object.entries(value).map(([key, item]) => [key, inner(item)]) };
  }
  return other(value);
}

function unpack(data, other, whole = (plain) => plain) {
  if (data === null || typeof data !== "object") return data;
  const inner = (each) => unpack(each, other, whole);
  if ("n" in data) return Number(data.n);
  if ("u" in data) return undefined;
  if ("i" in data) return BigInt(data.i);
  if ("l" in data) return data.l.map(inner);
  if ("D" in data) return new Date(data.D ?? NaN);
  if ("m" in data) return new Map(data.m.map(([key, item]) => [inner(key), inner(item)]));
  if ("s" in data) return new Set(data.s.map(inner));
  if ("b" in data) return data.k ? Buffer.from(data.b, "hex") : new Uint8Array(Buffer.from(data.b, "hex"));
  if ("o" in data) {
    const made = {};
    for (const [key, item] of data.o) Object.defineProperty(made, String(key), { value: inner(item), writable: true, enumerable: true, configurable: true });
    return whole(made);
  }
  return other(data);
}

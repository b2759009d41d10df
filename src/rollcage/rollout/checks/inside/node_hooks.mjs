// In a box, in the judge, in the thread that loads modules: the agent's modules become stubs with the same names.
import { execFileSync } from "node:child_process";
import { fileURLToPath } from "node:url";

const inside = (file) => CONFIG.outside.some((folder) => file === folder || file.startsWith(`${folder}/`));
const NAMES = `import(require("node:url").pathToFileURL(process.argv[1]))
  .then((found) => require("node:fs").writeSync(1, JSON.stringify(Object.keys(found))))`;

const stub = (url) =>
  url.protocol === "file:" && inside(fileURLToPath(url)) && { url: `judged:${encodeURIComponent(fileURLToPath(url))}`, shortCircuit: true };

export async function resolve(specifier, context, next) {
  const local = /^(\.{0,2}\/|file:)/.test(specifier) && stub(new URL(specifier, context.parentURL));
  if (local) return local;
  const found = await next(specifier, context);
  return (URL.canParse(found.url) && stub(new URL(found.url))) || found; // a package may be a link to the workdir
}

export async function load(url, context, next) {
  if (!url.startsWith("judged:")) return next(url, context);
  const file = decodeURIComponent(url.slice("judged:".length));
  const words = ["--timeout", "20", "--max-output", "1M", "--", CONFIG.node, "-e", NAMES, file];
  const said = execFileSync(CONFIG.launcher, words, { cwd: CONFIG.workdir, stdio: ["ignore", "pipe", "ignore"] });
  const names = JSON.parse(said).filter((name) => /^[A-Za-z_$][\w$]*$/.test(name));
  const get = `globalThis[Symbol.for("rollcage.judged")]`;
  const lines = names.map((name, at) => `const $${at} = ${get}(${JSON.stringify(file)}, "${name}"); export { $${at} as ${name} };`);
  return { format: "module", source: lines.join("\n"), shortCircuit: true };
}

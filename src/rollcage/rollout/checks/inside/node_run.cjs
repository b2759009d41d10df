// In a box: runs test files with Node's own runner, each in a process of its own, and tells the outcome of every test.
// The nonce is only in this process, which runs no code under test.
"use strict";
const fs = require("node:fs");
const path = require("node:path");

const tell = (what) => fs.writeSync(1, `${ORDER.nonce} ${JSON.stringify(what)}\n`);

function lay(folder, files) {
  fs.rmSync(folder, { recursive: true, force: true });
  for (const [name, text] of Object.entries(files)) {
    const place = path.join(folder, name);
    fs.mkdirSync(path.dirname(place), { recursive: true });
    fs.writeFileSync(place, text, { flag: "wx" });
  }
}

function testFiles(target) {
  if (fs.statSync(target).isFile()) return [target];
  const names = fs.readdirSync(target, { recursive: true }).map(String).sort();
  return names.filter((name) => /[._-]test\.[cm]?js$|(^|\/)test[-_.][^/]*\.[cm]?js$/.test(name)).map((name) => path.join(target, name));
}

function main() {
  tell({ begun: true });
  let run;
  try {
    ({ run } = require("node:test"));
  } catch {}
  if (typeof run !== "function") {
    tell({ missing: "node 18.9 or later" });
    process.exit(3);
  }
  if (ORDER.tests) lay(ORDER.tests_dir, ORDER.tests);
  const target = path.join(ORDER.tests_dir, ORDER.path);
  const above = new Map();
  let bad = 0;
  const stream = run({ files: testFiles(target), concurrency: 1 });
  const names = (data) => {
    const stack = above.get(data.file) ?? [];
    return [path.relative(ORDER.tests_dir, data.file ?? ""), ...stack.slice(0, data.nesting), data.name].join(" > ");
  };
  stream.on("test:start", (data) => {
    const stack = above.get(data.file) ?? [];
    above.set(data.file, [...stack.slice(0, data.nesting), data.name]);
  });
  stream.on("test:pass", (data) => {
    if (data.name !== data.file) tell({ test: names(data), outcome: data.skip || data.todo ? "skipped" : "passed" });
  });
  stream.on("test:fail", (data) => {
    bad += 1;
    const error = data.details?.error;
    const why = String(error?.cause?.message ?? error?.message ?? "").slice(0, 300);
    if (data.name === data.file) tell({ problem: `${path.relative(ORDER.tests_dir, data.file)}: ${why}` });
    else tell({ test: names(data), outcome: data.skip || data.todo ? "skipped" : "failed", why });
  });
  stream.on("end", () => {
    tell({ end: bad ? 1 : 0 });
    process.exit(bad ? 1 : 0);
  });
  stream.resume();
}

main();

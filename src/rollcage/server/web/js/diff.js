// Differences between texts, and patches as git writes them, shown line by line.
import { html } from "../vendor/preact.js";
import { Fold } from "./fold.js";

const MOST_LINES = 400;

/** Line by line: [" ", "-", "+"][i] and the text. The common start and end are found first; the rest by length of match. */
export function lines(before, after) {
  const a = before === "" ? [] : before.split("\n");
  const b = after === "" ? [] : after.split("\n");
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const head = a.slice(0, start).map((line) => [" ", line]);
  const tail = a.slice(a.length - end).map((line) => [" ", line]);
  const left = a.slice(start, a.length - end);
  const right = b.slice(start, b.length - end);
  const middle =
    left.length * right.length > 250_000
      ? [...left.map((line) => ["-", line]), ...right.map((line) => ["+", line])]
      : matched(left, right);
  return [...head, ...middle, ...tail];
}

function matched(a, b) {
  const table = Array.from({ length: a.length + 1 }, () => new Uint32Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i -= 1)
    for (let j = b.length - 1; j >= 0; j -= 1)
      table[i][j] = a[i] === b[j] ? table[i + 1][j + 1] + 1 : Math.max(table[i + 1][j], table[i][j + 1]);
  const rows = [];
  let i = 0;
  let j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      rows.push([" ", a[i]]);
      i += 1;
      j += 1;
    } else if (i < a.length && (j >= b.length || table[i + 1][j] >= table[i][j + 1])) {
      rows.push(["-", a[i]]);
      i += 1;
    } else {
      rows.push(["+", b[j]]);
      j += 1;
    }
  }
  return rows;
}

const KIND = { "+": "added", "-": "removed", "@": "place", " ": "" };

export function DiffLines({ rows }) {
  const shown = rows.slice(0, MOST_LINES);
  return html`<pre class="diff" tabindex="0">${shown.map(([sign, line]) => html`<span class=${KIND[sign] ?? "place"}><i aria-hidden="true">${sign === "@" ? "" : sign}</i>${line}\n</span>`)}${rows.length > MOST_LINES && html`<span class="place">… ${rows.length - MOST_LINES} more lines\n</span>`}</pre>`;
}

/** A patch, file by file. */
export function files(patch) {
  const found = [];
  for (const line of patch.split("\n")) {
    if (line.startsWith("diff --git ")) {
      const name = line.match(/ b\/(.*)$/)?.[1] ?? line.slice(11);
      found.push({ name, note: "", rows: [], added: 0, removed: 0 });
      continue;
    }
    const file = found.at(-1);
    if (!file) continue;
    if (!file.rows.length && !line.startsWith("@@")) {
      if (/^(new file|deleted file|rename|Binary|similarity)/.test(line)) file.note += `${file.note ? ", " : ""}${line}`;
      continue;
    }
    const sign = line[0] ?? " ";
    if (sign === "+") file.added += 1;
    if (sign === "-") file.removed += 1;
    file.rows.push(["+", "-", " ", "@"].includes(sign) ? [sign, sign === "@" ? line : line.slice(1)] : ["@", line]);
  }
  return found;
}

export function Patch({ patch }) {
  return files(patch).map(
    (file) => html`<${Fold} class="file" open=${true} key=${file.name} name=${`patch/${file.name}`} data-step>
      <summary><code>${file.name}</code> <span class="sums"><b class="added">+${file.added}</b> <b class="removed">−${file.removed}</b></span>${file.note && html`<small>${file.note}</small>`}</summary>
      ${file.rows.length > 0 && html`<${DiffLines} rows=${file.rows.at(-1)[1] === "" ? file.rows.slice(0, -1) : file.rows} />`}
    <//>`,
  );
}

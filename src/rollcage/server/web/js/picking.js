// Rollouts that were picked from the list, and what can be done with them: keep them as a file.
import { html, signal, useState } from "../vendor/preact.js";
import { MODE, download, fetched } from "./api.js";
import { exact } from "./text.js";

/** Ids, in the order in which they were picked. */
export const picked = signal(new Set());

export function pick(ids, on) {
  const next = new Set(picked.value);
  for (const id of ids) on ? next.add(id) : next.delete(id);
  picked.value = next;
}

const COLUMNS = ["rollout_id", "task_id", "batch", "agent", "model", "outcome", "reward", "blame", "proxy_turns_so_far", "tokens_so_far", "started_at", "finished_at", "error"];
// A cell that a spreadsheet would take for a formula is text.
const cell = (value) => {
  const text = value === null || value === undefined ? "" : String(value);
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
};
export const csv = (rows) => [COLUMNS.join(","), ...rows.map((row) => COLUMNS.map((name) => cell(row[name])).join(","))].join("\n") + "\n";

const FORMATS = [
  ["csv", "Table, CSV"],
  ["sequences", "Training sequences"],
  ["turns", "Turns with tokens"],
  ["messages", "Messages"],
  ["sft", "Fine-tuning"],
  ["atif", "Trajectories, ATIF"],
];

/** Says how many are picked, and gives them as a file. */
export function PickBar({ rows }) {
  const [format, setFormat] = useState("csv");
  const [state, setState] = useState("");
  const ids = picked.value;
  if (!ids.size) return null;
  const chosen = rows.filter((row) => ids.has(row.rollout_id));
  const save = async () => {
    setState("busy");
    try {
      if (format === "csv") download("rollouts.csv", [csv(chosen)], "text/csv");
      else download(`${format}.jsonl`, [await fetched("/page/export", { ids: chosen.map((row) => row.rollout_id), format })], "application/x-ndjson");
      setState("");
    } catch (error) {
      setState(error.message);
    }
  };
  return html`<div class="pickbar" role="region" aria-label="Selected rollouts">
    <b>${exact(ids.size)} selected</b>
    <label>as <select value=${format} onChange=${(event) => setFormat(event.target.value)}>${FORMATS.filter(([name]) => MODE !== "copy" || name === "csv").map(([name, label]) => html`<option value=${name}>${label}</option>`)}</select></label>
    <button class="main" disabled=${state === "busy"} onClick=${save}>${state === "busy" ? "Writing…" : "Export"}</button>
    <button class="quiet" onClick=${() => (picked.value = new Set())}>Clear</button>
    ${state && state !== "busy" && html`<span class="wrong" role="alert">${state}</span>`}
  </div>`;
}

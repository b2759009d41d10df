// Which rollouts are shown, and in what order: every column can be filtered and sorted by. All of it is in the address.
import { html, useMemo, useState } from "../vendor/preact.js";
import { clip, standing, words } from "./text.js";

export const nameOf = (row) => row.batch_task || row.task_id || clip(row.instruction, 90);
export const modelOf = (row) => row.batch_model || row.model;

export const SHOW = [
  ["", "All", "Every rollout"],
  ["open", "Running", "Those that have not ended"],
  ["scored", "Scored", "Those with a reward"],
  ["broken", "Broken", "Those without a reward because something broke"],
];

/** What can be chosen by name: the field's word in the address, its label, and what a row has there. */
const FACETS = [
  ["agent", "Agent", (row) => row.agent],
  ["model", "Model", modelOf],
  ["batch", "Batch", (row) => row.batch],
  ["outcome", "Outcome", (row) => row.outcome],
  ["blame", "Blame", (row) => row.blame],
];
const RANGES = ["min", "max", "from", "to"];
export const FILTERED = [...FACETS.map(([name]) => name), ...RANGES];

const day = (text, more = 0) => {
  const [year, month, date] = text.split("-").map(Number);
  return new Date(year, month - 1, date + more).getTime() / 1000;
};

/** A function that says whether a row is wanted. */
export function wanted(asked) {
  const { show = "", task = "", q = "" } = asked;
  const needle = q.trim().toLowerCase();
  const facets = FACETS.filter(([name]) => asked[name]).map(([name, , of]) => [asked[name], of]);
  const number = (name) => (asked[name] === undefined || asked[name] === "" || Number.isNaN(Number(asked[name])) ? null : Number(asked[name]));
  const [min, max] = [number("min"), number("max")];
  const from = asked.from ? day(asked.from) : null;
  const to = asked.to ? day(asked.to, 1) : null;
  return (row) => {
    if (show === "open" && row.outcome) return false;
    if (show === "scored" && row.reward === null) return false;
    if (show === "broken" && standing(row) !== "broken") return false;
    if (task && nameOf(row) !== task) return false;
    if (facets.some(([value, of]) => of(row) !== value)) return false;
    if ((min !== null || max !== null) && row.reward === null) return false;
    if ((min !== null && row.reward < min) || (max !== null && row.reward > max)) return false;
    if ((from && row.started_at < from) || (to && row.started_at >= to)) return false;
    if (!needle) return true;
    return [row.rollout_id, row.task_id, row.instruction, row.agent, row.model, row.batch, words(row.outcome ?? row.status), row.outcome, row.blame, row.error]
      .some((text) => text && String(text).toLowerCase().includes(needle));
  };
}

const time = (row) => (row.finished_at ? row.finished_at - row.started_at : null);
export const SORTS = {
  task: nameOf,
  agent: (row) => row.agent,
  model: modelOf,
  stage: (row) => words(row.outcome ?? row.stage),
  reward: (row) => row.reward,
  turns: (row) => row.proxy_turns_so_far,
  tokens: (row) => row.tokens_so_far,
  time,
  age: (row) => row.started_at,
};

/** Rows in the order of a column, "-column" downwards; what has no value comes last. Newest first is the list's own. */
export function sorted(rows, sort, keys = SORTS) {
  const down = sort.startsWith("-");
  const key = keys[down ? sort.slice(1) : sort];
  if (!key) return rows;
  const none = (value) => value === null || value === undefined || value === "";
  return [...rows].sort((first, second) => {
    const [a, b] = [key(first), key(second)];
    if (none(a) || none(b)) return none(a) - none(b);
    const order = typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
    return down ? -order : order;
  });
}

/** The title of a column; each press sorts by it: upwards, downwards, not at all. Numbers begin with the largest. */
export function SortHead({ name, label, sort, onSort, numeric = false, ...more }) {
  const [first, second] = numeric ? [`-${name}`, name] : [name, `-${name}`];
  const next = sort === first ? second : sort === second ? "" : first;
  const state = sort === name ? "ascending" : sort === `-${name}` ? "descending" : undefined;
  return html`<button class="sort" aria-label=${`Sort by ${label}`} data-sort=${state} onClick=${() => onSort(next)} ...${more}>${label}<i aria-hidden="true">${state === "ascending" ? "↑" : state === "descending" ? "↓" : ""}</i></button>`;
}

/** Fields for every filter; the choices are those that there are. */
export function Filters({ rows, asked, set }) {
  const choices = useMemo(
    () => FACETS.map(([name, label, of]) => [name, label, [...new Set(rows.map(of).filter(Boolean))].sort()]),
    [rows],
  );
  const used = FILTERED.filter((name) => asked[name]).length;
  const clear = () => set(Object.fromEntries(FILTERED.map((name) => [name, ""])));
  const input = (name, label, more) => html`<label>${label}<input value=${asked[name] ?? ""} onChange=${(event) => set({ [name]: event.target.value })} ...${more} /></label>`;
  // What was opened stays so when its last filter is taken away.
  const [open, setOpen] = useState(used > 0);
  return html`<details class="filters" open=${open} onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>Filters${used > 0 && html` <b>${used}</b>`}</summary>
    <div>
      ${choices.map(([name, label, values]) => (values.length > 0 || asked[name]) && html`<label>${label}<select value=${asked[name] ?? ""} onChange=${(event) => set({ [name]: event.target.value })}>
        <option value="">any</option>${values.concat(asked[name] && !values.includes(asked[name]) ? [asked[name]] : []).map((value) => html`<option value=${value}>${clip(words(value), 60)}</option>`)}</select></label>`)}
      ${input("min", "Reward from", { type: "number", step: "any" })}${input("max", "to", { type: "number", step: "any" })}
      ${input("from", "Started from", { type: "date" })}${input("to", "to", { type: "date" })}
      ${used > 0 && html`<button class="quiet" onClick=${clear}>Clear</button>`}
    </div>
  </details>`;
}

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

const time = (row) => (row.finished_at ? row.finished_at - row.started_at : null);

/** What a list can be filtered by: what is chosen by name, what is a number, and when it began. Each has the field's
 * word in the address, its label, and what a row has there; of what is chosen, a row may have several. */
export const RUN_FILTERS = {
  facets: [
    ["agent", "Agent", (row) => row.agent],
    ["model", "Model", modelOf],
    ["batch", "Batch", (row) => row.batch],
    ["stage", "Stage", (row) => (row.outcome ? "" : row.stage)],
    ["outcome", "Outcome", (row) => row.outcome],
    ["blame", "Blame", (row) => row.blame],
  ],
  ranges: [
    ["", "Reward", (row) => row.reward],
    ["turns_", "Turns", (row) => row.proxy_turns_so_far],
    ["tokens_", "Tokens", (row) => row.tokens_so_far],
    ["time_", "Seconds", time],
  ],
  date: ["Started", (row) => row.started_at],
};
const ends = (prefix) => [`${prefix}min`, `${prefix}max`];
const filterNames = ({ facets, ranges }) => [...facets.map(([name]) => name), ...ranges.flatMap(([prefix]) => ends(prefix)), "from", "to"];

const day = (text, more = 0) => {
  const [year, month, date] = text.split("-").map(Number);
  return new Date(year, month - 1, date + more).getTime() / 1000;
};

/** A function that says whether a row fits the filters. */
export function fitting(asked, { facets, ranges, date: [, begun] }) {
  const within = (of, from, to) => (row) => {
    const value = of(row) ?? null;
    return value !== null && value >= from && value <= to;
  };
  const bound = (text, none) => (text === undefined || text.trim() === "" || Number.isNaN(Number(text)) ? none : Number(text));
  const tests = facets.filter(([name]) => asked[name]).map(([name, , of]) => (row) => [of(row)].flat().includes(asked[name]));
  for (const [prefix, , of] of ranges) {
    const [min, max] = ends(prefix);
    const [from, to] = [bound(asked[min], -Infinity), bound(asked[max], Infinity)];
    if (from > -Infinity || to < Infinity) tests.push(within(of, from, to));
  }
  if (asked.from) tests.push((row) => begun(row) >= day(asked.from));
  if (asked.to) tests.push((row) => begun(row) < day(asked.to, 1));
  return (row) => tests.every((test) => test(row));
}

/** A function that says whether a rollout is wanted. */
export function wanted(asked) {
  const { show = "", task = "", q = "" } = asked;
  const needle = q.trim().toLowerCase();
  const fits = fitting(asked, RUN_FILTERS);
  return (row) => {
    if (show === "open" && row.outcome) return false;
    if (show === "scored" && row.reward === null) return false;
    if (show === "broken" && standing(row) !== "broken") return false;
    if ((task && nameOf(row) !== task) || !fits(row)) return false;
    if (!needle) return true;
    return [row.rollout_id, row.task_id, row.instruction, row.agent, row.model, row.batch, words(row.outcome ?? row.status), row.outcome, row.blame, row.error]
      .some((text) => text && String(text).toLowerCase().includes(needle));
  };
}

export const SORTS = {
  task: nameOf,
  agent: (row) => row.agent,
  model: modelOf,
  stage: (row) => words(row.outcome ?? row.stage),
  blame: (row) => row.blame,
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
export function Filters({ rows, asked, set, by }) {
  const choices = useMemo(
    () => by.facets.map(([name, label, of]) => [name, label, [...new Set(rows.flatMap(of).filter(Boolean))].sort()]),
    [rows, by],
  );
  const names = filterNames(by);
  const used = names.filter((name) => asked[name]).length;
  const clear = () => set(Object.fromEntries(names.map((name) => [name, ""])));
  const input = (name, label, more) => html`<label>${label}<input value=${asked[name] ?? ""} onChange=${(event) => set({ [name]: event.target.value })} ...${more} /></label>`;
  const range = ([from, to], label, more) => html`<span class="range">${input(from, `${label} from`, more)}${input(to, "to", more)}</span>`;
  // What was opened stays so when its last filter is taken away.
  const [open, setOpen] = useState(used > 0);
  return html`<details class="filters" open=${open} onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>Filters${used > 0 && html` <b>${used}</b>`}</summary>
    <div>
      ${choices.map(([name, label, values]) => (values.length > 0 || asked[name]) && html`<label>${label}<select value=${asked[name] ?? ""} onChange=${(event) => set({ [name]: event.target.value })}>
        <option value="">any</option>${values.concat(asked[name] && !values.includes(asked[name]) ? [asked[name]] : []).map((value) => html`<option value=${value}>${clip(words(value), 60)}</option>`)}</select></label>`)}
      ${by.ranges.map(([prefix, label]) => range(ends(prefix), label, { type: "number", step: "any" }))}
      ${range(["from", "to"], by.date[0], { type: "date" })}
      ${used > 0 && html`<button class="quiet" onClick=${clear}>Clear</button>`}
    </div>
  </details>`;
}

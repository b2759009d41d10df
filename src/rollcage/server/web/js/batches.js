// Every batch there is: what it came to, and which two are to be compared.
import { html, useState } from "../vendor/preact.js";
import { MODE, locked } from "./api.js";
import { batchAddress, useBatches } from "./batches_store.js";
import { Interval } from "./charts.js";
import { replace } from "./route.js";
import { Filters, SortHead, fitting, sorted } from "./runs_filter.js";
import { clock, count, exact, plural, reward, seconds, when, words } from "./text.js";

const SORTS = {
  name: (batch) => batch.name,
  status: (batch) => batch.status,
  done: (batch) => batch.overall.done,
  mean: (batch) => batch.overall.mean,
  pass: (batch) => batch.overall.pass_at_1,
  broken: (batch) => batch.overall.broken,
  tokens: (batch) => batch.overall.tokens,
  time: (batch) => batch.overall.seconds,
  date: (batch) => batch.created_at,
};

const models = (batch) => [...new Set(batch.models.map((each) => each.model))];
const agents = (batch) => [...new Set(batch.models.map((each) => each.agent).filter(Boolean))];
const FILTERS = {
  facets: [["status", "Status", (batch) => batch.status], ["model", "Model", models], ["agent", "Agent", agents]],
  ranges: [
    ["done_", "Rollouts", SORTS.done],
    ["", "Mean", SORTS.mean],
    ["pass_", "pass@1", SORTS.pass],
    ["broken_", "Broken", SORTS.broken],
    ["tokens_", "Tokens", SORTS.tokens],
    ["time_", "Seconds each", SORTS.time],
  ],
  date: ["Made", SORTS.date],
};

const percent = (value) => (value === null || value === undefined ? "–" : `${(value * 100).toFixed(value === 0 || value === 1 ? 0 : 1)} %`);

export function BatchStatus({ report }) {
  const mood = { running: "running", paused: "partial", done: "passed", stopped: "partial", interrupted: "broken", cancelled: "unscored" }[report.status] ?? "running";
  return html`<span class="progress ${mood}"><i class="mark" aria-hidden="true"></i>${words(report.status)}</span>`;
}

function Line({ batch, checked, onCheck }) {
  const { overall } = batch;
  return html`<tr>
    <td class="pick"><input type="checkbox" aria-label=${`Compare ${batch.name}`} checked=${checked} onChange=${(event) => onCheck(event.target.checked)} /></td>
    <td class="name"><a href=${batchAddress(batch.name)}><b>${batch.name}</b></a><small>${models(batch).join(", ")}${agents(batch).length > 0 && ` · ${agents(batch).join(", ")}`}</small></td>
    <td title=${batch.why}><${BatchStatus} report=${batch} /></td>
    <td class="number" data-label="Rollouts">${exact(overall.done)}<small> of ${exact(batch.size)}</small></td>
    <td class="mean" data-label="Mean"><b>${reward(overall.mean)}</b><${Interval} low=${overall.low} mean=${overall.mean} high=${overall.high} /></td>
    <td class="number" data-label="pass@1">${percent(overall.pass_at_1)}</td>
    <td class="number ${overall.broken ? "broken" : ""}" data-label="Broken">${exact(overall.broken)}</td>
    <td class="number" data-label="Tokens">${count(overall.tokens)}</td>
    <td class="number" data-label="Time each">${seconds(overall.seconds)}</td>
    <td class="number" data-label="Made"><time title=${clock(batch.created_at)}>${when(batch.created_at, Date.now() / 1000)}</time></td>
  </tr>`;
}

function totalsOf(shown) {
  const sum = (of) => shown.reduce((total, batch) => total + of(batch), 0);
  const scored = sum((batch) => batch.overall.scored);
  return {
    done: sum((batch) => batch.overall.done),
    broken: sum((batch) => batch.overall.broken),
    tokens: sum((batch) => batch.overall.tokens),
    mean: scored ? sum((batch) => (batch.overall.mean ?? 0) * batch.overall.scored) / scored : null,
  };
}

export function Batches({ query }) {
  const { value, problem } = useBatches();
  const [chosen, setChosen] = useState([]);
  const asked = Object.fromEntries(new URLSearchParams(query));
  const { q = "", sort = "" } = asked;
  const set = (changes) => {
    const next = new URLSearchParams(Object.entries({ ...asked, ...changes }).filter(([, each]) => each)).toString();
    replace(next ? `#/batches?${next}` : "#/batches");
  };
  if (locked.value) return html`<section class="state"><h1>Batches</h1><p>They are shown to those who have a key.</p></section>`;
  if (!value) return html`<section class="state">${problem ? html`<h1>No answer from the server</h1><p role="alert">${problem.message}</p>` : html`<p class="spin" role="status">Reading the log…</p>`}</section>`;
  if (!value.batches.length)
    return html`<section class="state"><h1>No batches yet</h1><p>A batch is a task set x models x samples. ${MODE === "copy" ? "This copy has none." : html`<code>rollcage eval examples -m scripted -n 2 --name first</code> makes one.`}</p></section>`;
  const needle = q.trim().toLowerCase();
  const filtered = fitting(asked, FILTERS);
  const fits = (batch) => filtered(batch) && (!needle || [batch.name, ...models(batch)].some((text) => text.toLowerCase().includes(needle)));
  const shown = sorted(value.batches.filter(fits), sort, SORTS);
  const totals = totalsOf(shown);
  const head = (name, label, numeric) => html`<th class=${numeric ? "number" : ""}><${SortHead} name=${name} label=${label} numeric=${numeric} sort=${sort} onSort=${(next) => set({ sort: next })} /></th>`;
  const check = (name) => (on) => setChosen(on ? [...chosen, name].slice(-2) : chosen.filter((each) => each !== name));
  const [first, second] = [...chosen].sort((a, b) => made(value, a) - made(value, b));
  return html`<section class="batches">
    <div class="tools">
      <h1>Batches</h1>
      <input type="search" placeholder="Search name, model" aria-label="Search batches" aria-keyshortcuts="/" value=${q} onInput=${(event) => set({ q: event.target.value })} />
      <a class="button ${chosen.length === 2 ? "main" : "off"}" aria-disabled=${chosen.length !== 2} href=${chosen.length === 2 ? `#/compare/${encodeURIComponent(first)}/${encodeURIComponent(second)}` : undefined} title=${chosen.length === 2 ? `${second} against ${first}` : "Tick two of them"}>Compare${chosen.length ? ` ${chosen.length} of 2` : ""}</a>
      <${Filters} rows=${value.batches} asked=${asked} set=${set} by=${FILTERS} />
      <span class="found" role="status">${shown.length === value.batches.length ? plural(shown.length, "batch", "batches") : `${exact(shown.length)} of ${exact(value.batches.length)}`}: ${exact(totals.done)} rollouts, mean ${reward(totals.mean)}, ${exact(totals.broken)} broken, ${count(totals.tokens)} tokens</span>
    </div>
    <div class="sheet"><table>
      <thead><tr><th class="pick"></th>${head("name", "Name")}${head("status", "Status")}${head("done", "Rollouts", true)}${head("mean", "Mean reward", false)}${head("pass", "pass@1", true)}${head("broken", "Broken", true)}${head("tokens", "Tokens", true)}${head("time", "Time each", true)}${head("date", "Made", true)}</tr></thead>
      <tbody>${shown.map((batch) => html`<${Line} key=${batch.name} batch=${batch} checked=${chosen.includes(batch.name)} onCheck=${check(batch.name)} />`)}</tbody>
    </table></div>
    ${!shown.length && html`<p class="nothing">Nothing fits. <button class="quiet" onClick=${() => replace("#/batches")}>Show all</button></p>`}
  </section>`;
}

const made = (value, name) => value.batches.find((batch) => batch.name === name)?.created_at ?? 0;
export { percent };

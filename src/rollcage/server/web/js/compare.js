// Two batches side by side, paired by task: the difference and how sure it is, and which tasks flipped.
import { html, useEffect, useMemo } from "../vendor/preact.js";
import { batchAddress, useAsked } from "./batches_store.js";
import { Interval } from "./charts.js";
import { listAddress, replace } from "./route.js";
import { SortHead, sorted } from "./runs_filter.js";
import { count, exact, plural, reward, seconds } from "./text.js";

const signed = (value) => (value === null ? "–" : `${value > 0 ? "+" : value < 0 ? "−" : ""}${reward(Math.abs(value))}`);
const KEYS = { task: (each) => each.task, before: (each) => each.before, after: (each) => each.after, change: (each) => each.after - each.before };
/** So many tasks are drawn; the others are searched for. */
const MOST = 500;
const FLIPS = [["", "All tasks"], ["fixed", "Fixed"], ["broke", "Broke"], ["changed", "Changed"]];

/** From the middle to the right what is better now, to the left what is worse. */
function Change({ value }) {
  const wide = Math.min(1, Math.abs(value)) * 50;
  return html`<svg class="change" viewBox="0 0 100 14" preserveAspectRatio="none" role="img" aria-label=${signed(value)}><line x1="50" x2="50" y1="0" y2="14" class="axis" /><rect class=${value > 0 ? "o-passed" : "o-failed"} x=${value > 0 ? 50 : 50 - wide} y="3" width=${wide} height="8" /></svg>`;
}

function Verdict({ found }) {
  if (found.difference === null) return html`<p class="problem warn">They share no task that counts in both.</p>`;
  const none = found.by_task.every((each) => each.before === each.after);
  const sure = found.low !== null && (found.low > 0 || found.high < 0);
  return html`<div class="verdictline">
    <p class="big">${signed(found.difference)}</p>
    <div><${Interval} low=${found.low} mean=${found.difference} high=${found.high} from=${-1} wide=${true} />
      <p>${reward(found.before)} → ${reward(found.after)} over ${plural(found.tasks, "task")}${found.low !== null && `; 95 %: ${signed(found.low)} to ${signed(found.high)}`}</p>
      <p class="hint">${none ? "No task differs." : found.low === null ? `${found.tasks > 1 ? "All tasks differ by the same: that" : "One task"} is too little to tell how sure this is.` : sure ? "The interval does not hold 0." : "The interval holds 0: this difference may be chance."}</p></div>
  </div>`;
}

export function Compare({ first, second, query }) {
  const { value: found, problem } = useAsked(`/batches/${encodeURIComponent(first)}/compare/${encodeURIComponent(second)}`);
  const asked = Object.fromEntries(new URLSearchParams(query));
  const { q = "", show = "", sort = "" } = asked;
  useEffect(() => void (document.title = `${second} against ${first} · rollcage`), [first, second]);
  const here = `#/compare/${encodeURIComponent(first)}/${encodeURIComponent(second)}`;
  const set = (changes) => {
    const next = new URLSearchParams(Object.entries({ ...asked, ...changes }).filter(([, each]) => each)).toString();
    replace(next ? `${here}?${next}` : here);
  };
  const needle = q.trim().toLowerCase();
  const fits = (each) => (!needle || each.task.toLowerCase().includes(needle)) && (!show || (show === "changed" ? each.before !== each.after : each.flipped === show));
  const shown = useMemo(() => (found ? sorted(found.by_task.filter(fits), sort, KEYS) : []), [found, query]);
  if (!found) return html`<section class="state">${problem ? html`<h1>They cannot be compared</h1><p role="alert">${problem.message}</p><a class="button" href="#/batches">All batches</a>` : html`<p class="spin" role="status">Comparing…</p>`}</section>`;
  const mean = (name) => (shown.length ? shown.reduce((sum, each) => sum + each[name], 0) / shown.length : null);
  const head = (name, label, numeric) => html`<th class=${numeric ? "number" : ""}><${SortHead} name=${name} label=${label} numeric=${numeric} sort=${sort} onSort=${(next) => set({ sort: next })} /></th>`;
  const only = [[`Only in ${found.first}`, found.only_first], [`Only in ${found.second}`, found.only_second], ["Not the same task in both", found.changed]].filter(([, names]) => names.length);
  const names = ([a, b]) => html`<td class="number">${a}</td><td class="number">${b}</td>`;
  return html`<section class="compare">
    <header class="title"><a href="#/batches" class="back" aria-label="All batches">←</a><div><h1><a href=${batchAddress(second)}>${second}</a> <small>against</small> <a href=${batchAddress(first)}>${first}</a></h1></div>
      <div class="actions"><a class="button quiet" href=${`#/compare/${encodeURIComponent(second)}/${encodeURIComponent(first)}`}>Swap</a></div></header>
    <${Verdict} found=${found} />
    <table class="plainly"><thead><tr><th>Per rollout</th><th class="number">${first}</th><th class="number">${second}</th></tr></thead><tbody>
      <tr><td>Tokens</td>${names(found.tokens.map((value) => count(Math.round(value))))}</tr><tr><td>Time</td>${names(found.seconds.map((value) => seconds(value)))}</tr></tbody></table>
    ${found.by_model.length > 0 && html`<div class="sheet"><table>
      <thead><tr><th>Model and agent</th><th class="number">${first}</th><th class="number">${second}</th><th class="number">Change</th><th class="number">95 %</th><th class="number">Tasks</th></tr></thead>
      <tbody>${found.by_model.map((each) => html`<tr><td class="model"><b>${each.model}${each.agent && ` · ${each.agent}`}</b></td><td class="number" data-label=${first}>${reward(each.before)}</td><td class="number" data-label=${second}>${reward(each.after)}</td><td class="number" data-label="Change">${signed(each.difference)}</td><td class="number" data-label="95 %">${each.low === null ? "–" : `${signed(each.low)} to ${signed(each.high)}`}</td><td class="number" data-label="Tasks">${exact(each.tasks)}</td></tr>`)}</tbody></table></div>`}
    <div class="tools"><h2>Tasks</h2>
      <input type="search" placeholder="Search tasks" aria-label="Search tasks" aria-keyshortcuts="/" value=${q} onInput=${(event) => set({ q: event.target.value })} />
      <div class="chips" role="group" aria-label="Show">${FLIPS.map(([value, name]) => html`<button aria-pressed=${show === value} onClick=${() => set({ show: value })}>${name} <small>${exact(value === "" ? found.by_task.length : found.by_task.filter((each) => (value === "changed" ? each.before !== each.after : each.flipped === value)).length)}</small></button>`)}</div>
      <span class="found" role="status">${exact(shown.length)} shown: ${reward(mean("before"))} → ${reward(mean("after"))}</span>
    </div>
    <div class="sheet"><table>
      <thead><tr>${head("task", "Task")}${head("before", first, true)}${head("after", second, true)}${head("change", "Change", true)}<th></th><th></th></tr></thead>
      <tbody>${shown.slice(0, MOST).map((each) => html`<tr key=${each.task}>
        <td class="name"><b>${each.task}</b></td>
        <td class="number" data-label=${first}><a href=${listAddress({ batch: first, task: each.task })}>${reward(each.before)}</a></td>
        <td class="number" data-label=${second}><a href=${listAddress({ batch: second, task: each.task })}>${reward(each.after)}</a></td>
        <td class="number" data-label="Change">${signed(each.after - each.before)}</td>
        <td class="changes"><${Change} value=${each.after - each.before} /></td>
        <td>${each.flipped && html`<span class="tag ${each.flipped === "fixed" ? "good" : "bad"}">${each.flipped}</span>`}</td>
      </tr>`)}</tbody></table></div>
    ${shown.length > MOST && html`<p class="nothing">And ${exact(shown.length - MOST)} more: search, or sort.</p>`}
    ${only.map(([label, tasks]) => html`<details class="limits"><summary>${label}: ${exact(tasks.length)}</summary><p class="hint">${tasks.join(", ")}</p></details>`)}
  </section>`;
}

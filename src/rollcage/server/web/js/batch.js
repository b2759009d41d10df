// One batch: what it came to by model, and a matrix of its tasks and models with a small distribution in each cell.
import { html, useEffect, useMemo, useState } from "../vendor/preact.js";
import { MODE, locked, request } from "./api.js";
import { BatchStatus, percent } from "./batches.js";
import { batchAddress, isGoing, useBatch, useBatches } from "./batches_store.js";
import { Interval, Mini } from "./charts.js";
import { Asking } from "./dialog.js";
import { listAddress, replace } from "./route.js";
import { SortHead, sorted } from "./runs_filter.js";
import { clip, clock, count, exact, plural, reward, seconds, words } from "./text.js";
import { Virtual } from "./virtual.js";

const columnName = ({ model, agent }) => (agent ? `${model} · ${agent}` : model);
const keyOf = ({ model, agent }) => `${model}\n${agent}`;
const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

/** A row for each task: its cells by column, and what they come to together. */
function rowsOf(report) {
  const rows = new Map();
  for (const cell of report.tasks) {
    const row = rows.get(cell.task) ?? { task: cell.task, cells: new Map(), rewards: [], broken: 0, running: 0 };
    rows.set(cell.task, row);
    row.cells.set(keyOf(cell), cell);
    row.rewards.push(...cell.rewards);
    row.broken += cell.broken;
    row.running += cell.running;
  }
  for (const row of rows.values()) {
    const means = [...row.cells.values()].map((cell) => cell.mean).filter((value) => value !== null);
    row.mean = mean(row.rewards);
    row.gap = means.length > 1 ? Math.max(...means) - Math.min(...means) : null;
  }
  return [...rows.values()];
}

const SHOW = [
  ["", "All tasks"],
  ["failing", "Never passed"],
  ["mixed", "Sometimes"],
  ["passing", "Always"],
  ["differs", "Models differ"],
  ["broken", "Broken"],
];

function fits(row, show, needle) {
  if (needle && !row.task.toLowerCase().includes(needle)) return false;
  const passed = row.rewards.filter((value) => value >= 1).length;
  if (show === "failing") return row.rewards.length > 0 && passed === 0;
  if (show === "passing") return row.rewards.length > 0 && passed === row.rewards.length;
  if (show === "mixed") return passed > 0 && passed < row.rewards.length;
  if (show === "differs") return row.gap > 0;
  if (show === "broken") return row.broken > 0;
  return true;
}

/** Means and sums of what is shown, a column at a time. */
function sumsOf(shown, column) {
  const cells = shown.map((row) => row.cells.get(keyOf(column))).filter(Boolean);
  const rewards = cells.flatMap((cell) => cell.rewards);
  const passes = cells.map((cell) => cell.pass_at_1).filter((value) => value !== null);
  return { mean: mean(rewards), scored: rewards.length, pass: mean(passes), broken: cells.reduce((sum, cell) => sum + cell.broken, 0), tokens: cells.reduce((sum, cell) => sum + cell.tokens, 0) };
}

function MatrixCell({ cell, href, name }) {
  if (!cell) return html`<span role="cell" class="cell"></span>`;
  const told = `${name}: mean ${reward(cell.mean)}, ${exact(cell.done)} of ${exact(cell.total)} ended${cell.broken ? `, ${exact(cell.broken)} broken` : ""}`;
  return html`<a role="cell" class="cell" href=${href} title=${told} aria-label=${told}>
    <${Mini} rewards=${cell.rewards} broken=${cell.broken} waiting=${cell.total - cell.done} />
    <b class=${cell.mean === null ? "none" : cell.mean >= 1 ? "passed" : cell.mean > 0 ? "partial" : "failed"}>${reward(cell.mean)}</b>
  </a>`;
}

function Matrix({ report, asked, set }) {
  const { q = "", show = "", sort = "" } = asked;
  const columns = report.models;
  const rows = useMemo(() => rowsOf(report), [report]);
  const keys = useMemo(
    () => ({ task: (row) => row.task, mean: (row) => row.mean, gap: (row) => row.gap, ...Object.fromEntries(columns.map((column, at) => [`c${at}`, (row) => row.cells.get(keyOf(column))?.mean ?? null])) }),
    [columns],
  );
  const needle = q.trim().toLowerCase();
  const shown = useMemo(() => sorted(rows.filter((row) => fits(row, show, needle)), sort, keys), [rows, show, needle, sort, keys]);
  const onSort = (next) => set({ sort: next });
  const more = columns.length > 1;
  // Every line is a grid of its own: what it holds must not decide how wide its columns are.
  const grid = {
    gridTemplateColumns: `minmax(var(--first), 2fr) repeat(${columns.length}, minmax(var(--cell), 1fr)) ${more ? "4.5rem 4.5rem" : ""}`,
    minWidth: `calc(var(--first) + ${columns.length} * (var(--cell) + 10px) + ${more ? "9rem + 20px" : "0px"} + 32px)`,
  };
  const to = (row, column) => listAddress({ batch: report.name, task: row.task, model: column.model, agent: column.agent });
  const sums = columns.map((column) => sumsOf(shown, column));
  return html`<div class="tools">
      <h2>Tasks</h2>
      <input type="search" placeholder="Search tasks" aria-label="Search tasks" aria-keyshortcuts="/" value=${q} onInput=${(event) => set({ q: event.target.value })} />
      <div class="chips" role="group" aria-label="Show">${SHOW.filter(([value]) => value !== "differs" || columns.length > 1).map(([value, name]) => html`<button aria-pressed=${show === value} onClick=${() => set({ show: value })}>${name}</button>`)}</div>
      <span class="found" role="status">${shown.length === rows.length ? plural(rows.length, "task") : `${exact(shown.length)} of ${exact(rows.length)} tasks`}</span>
    </div>
    <${Virtual} label="Tasks and models" count=${shown.length} items=${shown} view=${`${q}/${show}/${sort}`} keyOf=${(index) => shown[index]?.task} height=${46} className="matrix" most=${76 + shown.length * 46}
      draw=${(index) => {
        const row = shown[index];
        return html`<div class="line" role="row" key=${row.task} aria-rowindex=${index + 2} style=${grid}>
          <a role="rowheader" class="task" title=${row.task} href=${listAddress({ batch: report.name, task: row.task })}>${row.task}</a>
          ${columns.map((column) => html`<${MatrixCell} cell=${row.cells.get(keyOf(column))} name=${`${row.task}, ${columnName(column)}`} href=${to(row, column)} />`)}
          ${columns.length > 1 && html`<span role="cell" class="number">${reward(row.mean)}</span><span role="cell" class="number">${reward(row.gap)}</span>`}
        </div>`;
      }}
    >
      <div class="line top" role="row" aria-rowindex="1" style=${grid}>
        <span role="columnheader"><${SortHead} name="task" label="Task" sort=${sort} onSort=${onSort} /></span>
        ${columns.map((column, at) => html`<span role="columnheader"><${SortHead} name=${`c${at}`} label=${columnName(column)} numeric=${true} sort=${sort} onSort=${onSort} /></span>`)}
        ${columns.length > 1 && html`<span role="columnheader" class="number"><${SortHead} name="mean" label="Mean" numeric=${true} sort=${sort} onSort=${onSort} /></span><span role="columnheader" class="number"><${SortHead} name="gap" label="Gap" numeric=${true} sort=${sort} onSort=${onSort} /></span>`}
      </div>
      <div class="line top sums" role="row" style=${grid}>
        <span role="rowheader">${shown.length === rows.length ? "All tasks" : `${exact(shown.length)} shown`}</span>
        ${sums.map((sum) => html`<span role="cell" title=${`${exact(sum.scored)} scored, ${count(sum.tokens)} tokens`}><b>${reward(sum.mean)}</b> <small>pass@1 ${percent(sum.pass)}${sum.broken > 0 && html` · <i class="broken">${exact(sum.broken)} broken</i>`}</small></span>`)}
        ${columns.length > 1 && html`<span></span><span></span>`}
      </div>
    <//>
    ${!shown.length && html`<p class="nothing">Nothing fits. <button class="quiet" onClick=${() => set({ q: "", show: "" })}>Show all</button></p>`}`;
}

function Models({ report }) {
  return html`<div class="sheet"><table class="models">
    <thead><tr><th>Model${report.models.some((each) => each.agent) && " and agent"}</th><th class="number">Ended</th><th>Mean reward, 95 %</th><th class="number">pass@1</th>${report.n > 1 && html`<th class="number">pass@${report.n}</th>`}<th class="number">Broken</th><th class="number">Tokens</th><th class="number">Time each</th></tr></thead>
    <tbody>${report.models.map((each) => html`<tr>
      <td class="name"><a href=${listAddress({ batch: report.name, model: each.model, agent: each.agent })}><b>${columnName(each)}</b></a></td>
      <td class="number" data-label="Ended">${exact(each.done)}<small> of ${exact(each.total)}</small></td>
      <td class="mean" data-label="Mean"><b>${reward(each.mean)}</b><${Interval} low=${each.low} mean=${each.mean} high=${each.high} /><small>${each.low === null ? "" : `${reward(each.low)} to ${reward(each.high)}`}</small></td>
      <td class="number" data-label="pass@1">${percent(each.pass_at_1)}</td>${report.n > 1 && html`<td class="number" data-label=${`pass@${report.n}`}>${percent(each.pass_at_k)}</td>`}
      <td class="number ${each.broken ? "broken" : ""}" data-label="Broken">${exact(each.broken)}</td><td class="number" data-label="Tokens">${count(each.tokens)}</td><td class="number" data-label="Time each">${seconds(each.seconds)}</td>
    </tr>`)}</tbody>
  </table></div>`;
}

function Broken({ report }) {
  const skipped = Object.entries(report.skipped);
  return html`${report.broken.length > 0 && html`<details class="limits"><summary>Without a reward: ${exact(report.broken.length)}${report.broken.length >= 100 ? " and more" : ""}</summary>
    <ul class="plain left">${report.broken.map((each) => html`<li><a href=${`#/rollouts/${encodeURIComponent(each.rollout_id)}`}>${each.task}</a> <small>${each.model}, sample ${each.sample}</small> ${each.blame && html`<span class="tag">${each.blame}</span>`} ${clip(each.error, 300)}</li>`)}</ul></details>`}
    ${skipped.length > 0 && html`<details class="limits" open><summary>Cannot be run here: ${exact(skipped.length)}</summary><ul class="plain left">${skipped.map(([task, why]) => html`<li><b>${task}</b> ${why}</li>`)}</ul></details>`}`;
}

function sizeOf(report) {
  const different = (of) => new Set(report.models.map(of)).size;
  const agents = different((each) => each.agent);
  const sizes = [plural(new Set(report.tasks.map((each) => each.task)).size, "task"), plural(different((each) => each.model), "model"), agents > 1 && plural(agents, "agent"), plural(report.n, "sample")];
  return sizes.filter(Boolean).join(" × ");
}

/** All rollouts of the batch as one bar: what ended by what it came to, what runs, what is to come. */
function Meter({ report }) {
  const { size, overall } = report;
  const rewards = report.tasks.flatMap((each) => each.rewards);
  const passed = rewards.filter((value) => value >= 1).length;
  const failed = rewards.filter((value) => value <= 0).length;
  const parts = [["passed", passed], ["partial", rewards.length - passed - failed], ["failed", failed], ["unscored", overall.unscored], ["broken", overall.broken], ["running", overall.running]].filter(([, number]) => number > 0);
  const told = `${exact(overall.done)} of ${exact(size)} ended${parts.map(([name, number]) => `, ${exact(number)} ${name}`).join("")}`;
  const left = size - overall.done - overall.running;
  return html`<div class="meter" role="img" aria-label=${told} title=${told}>${parts.map(([name, number]) => html`<i class=${`o-${name}`} style=${{ flexGrow: number }}></i>`)}${left > 0 && html`<i style=${{ flexGrow: left }}></i>`}</div>`;
}

function Head({ report }) {
  const { value } = useBatches();
  const [wrong, setWrong] = useState("");
  const others = (value?.batches ?? []).filter((each) => each.name !== report.name);
  const cancel = () => request(`/batches/${encodeURIComponent(report.name)}/cancel`, { method: "POST" }).catch((error) => setWrong(error.message));
  return html`<header class="title">
      <a href="#/batches" class="back" aria-label="All batches">←</a>
      <div>
        <h1>${report.name}</h1>
        <p class="facts"><span>${sizeOf(report)}</span><span>${exact(report.overall.done)} of ${exact(report.size)} ended</span>${report.overall.running > 0 && html`<span>${exact(report.overall.running)} running</span>`}<time>${clock(report.created_at)}</time>${report.eta_s !== null && html`<span>about ${seconds(report.eta_s)} more</span>`}${report.cost !== null && html`<span>cost ${report.cost.toFixed(2)}</span>`}</p>
      </div>
      <div class="verdict"><${BatchStatus} report=${report} /><span class="what">mean</span><span class="reward">${reward(report.overall.mean)}</span></div>
      <div class="actions">
        ${others.length > 0 && html`<select aria-label="Compare with" value="" onChange=${(event) => event.target.value && (location.hash = `#/compare/${encodeURIComponent(event.target.value)}/${encodeURIComponent(report.name)}`)}><option value="">Compare with…</option>${others.map((each) => html`<option value=${each.name}>${each.name}</option>`)}</select>`}
        <a class="button quiet" href=${listAddress({ batch: report.name })}>Rollouts</a>
        ${MODE === "serve" && isGoing(report) && html`<${Asking} label="Cancel" title=${`Cancel ${report.name}?`} yes="Cancel it" no="Let it run" onYes=${cancel}>What runs of it is stopped, and nothing more is begun. What has ended stays.<//>`}
      </div>
    </header>
    ${wrong && html`<p class="wrong" role="alert">${wrong}</p>`}
    ${report.why && html`<p class="problem warn">${words(report.status)}: ${report.why}</p>`}
    <${Meter} report=${report} />`;
}

export function BatchPage({ name, query }) {
  const { value: report, problem } = useBatch(name);
  const asked = Object.fromEntries(new URLSearchParams(query));
  useEffect(() => void (document.title = `${name} · rollcage`), [name]);
  if (locked.value) return html`<section class="state"><h1>A batch</h1><p>It is shown to those who have a key.</p></section>`;
  if (!report) return html`<section class="state">${problem ? html`<h1>No such batch</h1><p role="alert">${problem.message}</p><a class="button" href="#/batches">All batches</a>` : html`<p class="spin" role="status">Reading the log…</p>`}</section>`;
  const set = (changes) => replace(batchAddress(name, new URLSearchParams(Object.entries({ ...asked, ...changes }).filter(([, each]) => each)).toString()));
  return html`<section class="batch">
    <${Head} report=${report} />
    <${Models} report=${report} />
    <${Matrix} report=${report} asked=${asked} set=${set} />
    <${Broken} report=${report} />
  </section>`;
}

// The list of rollouts, live.
import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { link } from "./api.js";
import { Outcomes, Spread, Throughput } from "./charts.js";
import { all, loading, now, problem } from "./runs_store.js";
import { age, clip, clock, count, reward, tone, words } from "./text.js";
import { Virtual } from "./virtual.js";

const FILTERS = [
  ["", "All"],
  ["open", "Running"],
  ["scored", "Scored"],
  ["broken", "Broken"],
];
const SCORED = ["succeeded", "agent_timeout", "agent_failed", "limit_reached"];

function fits(row, kind, needle) {
  if (kind === "open" && row.outcome) return false;
  if (kind === "scored" && row.reward === null) return false;
  if (kind === "broken" && (!row.outcome || SCORED.includes(row.outcome))) return false;
  if (!needle) return true;
  return [row.rollout_id, row.task_id, row.instruction, row.agent, row.model, row.outcome ?? row.status, row.error]
    .some((text) => text && String(text).toLowerCase().includes(needle));
}

export function Progress({ row }) {
  const steps = ["starting", "running", "verifying", "done"];
  const at = steps.indexOf(row.status);
  const name = row.outcome ? words(row.outcome) : row.queue_position ? `queued, place ${row.queue_position}` : row.status;
  return html`<span class="progress ${tone(row)}">
    <span class="dots" aria-hidden="true">${steps.slice(0, 3).map((_, index) => html`<i class=${index < at || row.outcome ? "past" : index === at ? "here" : ""}></i>`)}</span>
    ${name}
  </span>`;
}

function Row({ row, selected, time }) {
  const name = row.task_id || clip(row.instruction, 90);
  return html`<div class="row ${selected ? "selected" : ""}" role="row" title=${clock(row.started_at)}>
    <span role="cell" class="task"><a class="cover" href=${`#/rollouts/${row.rollout_id}`}><b>${name}</b></a>${row.task_id && html`<small>${clip(row.instruction, 120)}</small>`}</span>
    <span role="cell" class="who"><span>${row.agent}</span><small>${row.model}</small></span>
    <span role="cell" class="stage"><${Progress} row=${row} /></span>
    <span role="cell" class="number reward ${row.reward === null ? "none" : ""}">${reward(row.reward)}</span>
    <span role="cell" class="number turns">${count(row.proxy_turns_so_far)}</span>
    <span role="cell" class="number tokens">${count(row.tokens_so_far)}</span>
    <span role="cell" class="number age">${age(row.started_at, time)}</span>
  </div>`;
}

function groupsOf(rows) {
  const groups = new Map();
  for (const row of rows) {
    const name = row.task_id || clip(row.instruction, 90);
    const group = groups.get(name) ?? { name, rows: [] };
    group.rows.push(row);
    groups.set(name, group);
  }
  return [...groups.values()];
}

function Group({ group, time, onOpen }) {
  const rewards = group.rows.map((row) => row.reward);
  const known = rewards.filter((value) => value !== null);
  const mean = known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  const open = group.rows.filter((row) => !row.outcome).length;
  return html`<div class="row group" role="row">
    <span role="cell" class="task"><button class="cover" onClick=${() => onOpen(group.name)}><b>${clip(group.name, 90)}</b></button><small>${clip(group.rows[0].instruction, 120)}</small></span>
    <span role="cell" class="who"><${Spread} rewards=${rewards} /></span>
    <span role="cell" class="stage">${open ? html`<span class="progress busy">${open} running</span>` : html`<span class="progress">all ended</span>`}</span>
    <span role="cell" class="number reward">${reward(mean)}</span>
    <span role="cell" class="number turns">${count(group.rows.length)}</span>
    <span role="cell" class="number tokens">${count(group.rows.reduce((sum, row) => sum + row.tokens_so_far, 0))}</span>
    <span role="cell" class="number age">${age(group.rows[0].started_at, time)}</span>
  </div>`;
}

const narrow = matchMedia("(max-width: 720px)");

export function Runs() {
  const [kind, setKind] = useState("");
  const [text, setText] = useState("");
  const [grouped, setGrouped] = useState(false);
  const [selected, setSelected] = useState(-1);
  const [phone, setPhone] = useState(narrow.matches);
  const rows = all.value;
  const time = now.value;
  const needle = text.trim().toLowerCase();
  const shown = useMemo(() => rows.filter((row) => fits(row, kind, needle)), [rows, kind, needle]);
  const groups = useMemo(() => (grouped ? groupsOf(shown) : []), [shown, grouped]);
  // Charts change with what ends, not with each second.
  const charts = useMemo(
    () => html`<${Throughput} rows=${shown} now=${Date.now() / 1000} toneOf=${tone} /><${Outcomes} rows=${shown} toneOf=${tone} />`,
    [shown],
  );
  const state = useRef({});
  state.current = { shown, selected };

  useEffect(() => {
    const change = () => setPhone(narrow.matches);
    const step = (event) =>
      setSelected((at) => Math.max(0, Math.min(state.current.shown.length - 1, at + event.detail)));
    const enter = () => {
      const row = state.current.shown[state.current.selected];
      if (row) location.hash = `#/rollouts/${row.rollout_id}`;
    };
    narrow.addEventListener("change", change);
    addEventListener("rollcage-step", step);
    addEventListener("rollcage-enter", enter);
    return () => {
      narrow.removeEventListener("change", change);
      removeEventListener("rollcage-step", step);
      removeEventListener("rollcage-enter", enter);
    };
  }, []);

  if (loading.value === "loading" && link.value !== "lost")
    return html`<section class="state"><p class="spin">Reading the log…</p></section>`;
  if (loading.value !== "ready" && !rows.length)
    return html`<section class="state"><h1>No answer from the server</h1><p>${problem.value || "It may be starting again."} This page tries again by itself.</p></section>`;
  if (!rows.length)
    return html`<section class="state">
      <h1>No rollouts yet</h1>
      <p>Start one here, and watch a real agent work on it. No account, no key: the scripted model answers.</p>
      <a class="button main" href="#/try">Try one</a>
    </section>`;

  const running = rows.filter((row) => !row.outcome);
  const queued = running.filter((row) => row.status === "queued").length;
  const scored = shown.filter((row) => row.reward !== null);
  const mean = scored.length ? scored.reduce((sum, row) => sum + row.reward, 0) / scored.length : null;
  return html`<section class="runs">
    <h1 class="hidden">Runs</h1>
    <div class="totals">
      <dl>
        <div><dt>Running</dt><dd>${count(running.length - queued)}</dd></div>
        <div><dt>Queued</dt><dd>${count(queued)}</dd></div>
        <div><dt>Ended</dt><dd>${count(rows.length - running.length)}</dd></div>
        <div><dt>Mean reward</dt><dd>${reward(mean)}</dd></div>
        <div><dt>Tokens</dt><dd>${count(shown.reduce((sum, row) => sum + row.tokens_so_far, 0))}</dd></div>
      </dl>
      ${charts}
    </div>
    <div class="tools">
      <input type="search" placeholder="Search task, model, outcome, id  ( / )" aria-label="Search rollouts" value=${text} onInput=${(event) => { setText(event.target.value); setSelected(-1); }} />
      <div class="chips" role="group" aria-label="Show">
        ${FILTERS.map(([value, name]) => html`<button aria-pressed=${kind === value} onClick=${() => { setKind(value); setSelected(-1); }}>${name}</button>`)}
      </div>
      <label class="check"><input type="checkbox" checked=${grouped} onChange=${(event) => setGrouped(event.target.checked)} /> Group by task</label>
      <span class="found" role="status">${shown.length === rows.length ? `${count(rows.length)} ${rows.length === 1 ? "rollout" : "rollouts"}` : `${count(shown.length)} of ${count(rows.length)}`}</span>
    </div>
    <${Virtual}
      label="Rollouts"
      count=${grouped ? groups.length : shown.length}
      height=${phone ? 84 : 52}
      focus=${grouped ? -1 : selected}
      draw=${(index) =>
        grouped
          ? html`<${Group} key=${groups[index].name} group=${groups[index]} time=${time} onOpen=${(name) => { setText(name); setGrouped(false); }} />`
          : html`<${Row} key=${shown[index].rollout_id} row=${shown[index]} selected=${index === selected} time=${time} />`}
    >
      <div class="head" role="row">
        <span role="columnheader" class="task">Task</span>
        <span role="columnheader" class="who">${grouped ? "Rewards" : "Agent and model"}</span>
        <span role="columnheader" class="stage">Stage</span>
        <span role="columnheader" class="number">${grouped ? "Mean" : "Reward"}</span>
        <span role="columnheader" class="number turns">${grouped ? "Runs" : "Turns"}</span>
        <span role="columnheader" class="number tokens">Tokens</span>
        <span role="columnheader" class="number age">Age</span>
      </div>
    <//>
    ${!shown.length && html`<p class="nothing">Nothing fits. <button class="quiet" onClick=${() => { setText(""); setKind(""); }}>Show all</button></p>`}
  </section>`;
}

// The list of rollouts, live.
import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { MODE, link, locked } from "./api.js";
import { Outcomes, Share, Spread, Throughput } from "./charts.js";
import { Nodes } from "./nodes.js";
import { PickBar, pick, picked } from "./picking.js";
import { listAddress, replace } from "./route.js";
import { Filters, RUN_FILTERS, SHOW, SortHead, modelOf, nameOf, sorted, wanted } from "./runs_filter.js";
import { all, loading, now, problem } from "./runs_store.js";
import { DOING, age, clip, clock, count, exact, plural, reward, seconds, standing, words } from "./text.js";
import { Virtual } from "./virtual.js";

const STEPS = ["provision", "setup", "agent", "verify"];
/** Where the list was left, for whoever comes back to it. */
const kept = { view: null, top: 0, selected: "" };

function Progress({ row }) {
  if (row.outcome) return html`<span class="progress ${standing(row)}"><i class="mark" aria-hidden="true"></i>${words(row.outcome)}</span>`;
  const at = STEPS.indexOf(row.stage);
  return html`<span class="progress running">
    <span class="dots" aria-hidden="true">${STEPS.map((_, index) => html`<i class=${index < at ? "past" : index === at ? "here" : ""}></i>`)}</span>
    ${row.queue_position ? `queued, place ${row.queue_position}` : (DOING[row.stage] ?? row.status)}
  </span>`;
}

function Pick({ row }) {
  return html`<span role="cell" class="pick"><input type="checkbox" aria-label=${`Select ${row.rollout_id}`} checked=${picked.value.has(row.rollout_id)} onChange=${(event) => pick([row.rollout_id], event.target.checked)} /></span>`;
}

function Row({ row, selected, time, index }) {
  const took = row.finished_at ? row.finished_at - row.started_at : time - row.started_at;
  return html`<div class="row ${selected ? "selected" : ""}" role="row" aria-rowindex=${index + 2} aria-current=${selected ? "true" : undefined} title=${row.error || `Started ${clock(row.started_at)}`}>
    <${Pick} row=${row} />
    <span role="cell" class="task"><a class="cover" href=${`#/rollouts/${encodeURIComponent(row.rollout_id)}`}><b>${nameOf(row)}</b></a>${(row.task_id || row.batch) && html`<small>${row.origin_how && `${row.origin_how} · `}${clip(row.instruction, 120)}</small>`}</span>
    <span role="cell" class="who"><span>${row.agent}</span><small>${modelOf(row)}</small></span>
    <span role="cell" class="stage"><${Progress} row=${row} />${row.blame && html`<small>by the ${row.blame}</small>`}</span>
    <span role="cell" class="number reward ${row.reward === null ? "none" : standing(row)}">${reward(row.reward)}</span>
    <span role="cell" class="number turns">${count(row.proxy_turns_so_far)}</span>
    <span role="cell" class="number tokens">${count(row.tokens_so_far)}</span>
    <span role="cell" class="number time">${seconds(Math.max(0, took))}</span>
    <span role="cell" class="number age">${age(row.started_at, time)}</span>
  </div>`;
}

function groupsOf(rows) {
  const groups = new Map();
  for (const row of rows) {
    const name = nameOf(row);
    const group = groups.get(name);
    if (group) group.rows.push(row);
    else groups.set(name, { name, rows: [row] });
  }
  return [...groups.values()];
}

function Group({ group, time, selected, href, index }) {
  const rewards = group.rows.map((row) => row.reward);
  const known = rewards.filter((value) => value !== null);
  const mean = known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  const open = group.rows.filter((row) => !row.outcome).length;
  return html`<div class="row group ${selected ? "selected" : ""}" role="row" aria-rowindex=${index + 2} aria-current=${selected ? "true" : undefined}>
    <span role="cell" class="pick"></span>
    <span role="cell" class="task"><a class="cover" href=${href}><b>${group.name}</b></a>${group.rows[0].task_id && html`<small>${clip(group.rows[0].instruction, 120)}</small>`}</span>
    <span role="cell" class="who"><${Spread} rewards=${rewards} open=${open} /></span>
    <span role="cell" class="stage"><${Share} rows=${group.rows} /><small>${open ? `${exact(open)} running` : "all ended"}</small></span>
    <span role="cell" class="number reward ${mean === null ? "none" : ""}">${reward(mean)}</span>
    <span role="cell" class="number turns">${count(group.rows.length)}</span>
    <span role="cell" class="number tokens">${count(group.rows.reduce((sum, row) => sum + row.tokens_so_far, 0))}</span>
    <span role="cell" class="number time"></span>
    <span role="cell" class="number age">${age(group.rows[0].started_at, time)}</span>
  </div>`;
}

/** Totals of what is shown, whatever that is. */
function Totals({ shown, time }) {
  const open = shown.filter((row) => !row.outcome);
  const queued = open.filter((row) => row.status === "queued").length;
  const scored = shown.filter((row) => row.reward !== null);
  const mean = scored.length ? scored.reduce((sum, row) => sum + row.reward, 0) / scored.length : null;
  const lately = shown.filter((row) => row.finished_at && row.finished_at > time - 300).length / 5;
  // Charts change with what ends, and slowly with time, not with each second.
  const charts = useMemo(
    () => html`<${Throughput} rows=${shown} now=${Date.now() / 1000} /><${Outcomes} rows=${shown} />`,
    [shown, Math.floor(time / 20)],
  );
  return html`<div class="totals">
    <dl>
      <div><dt>Running</dt><dd>${exact(open.length - queued)}</dd></div>
      <div><dt>Queued</dt><dd>${exact(queued)}</dd></div>
      <div><dt>Ended</dt><dd>${exact(shown.length - open.length)}</dd></div>
      <div title="Over the last five minutes"><dt>Ended per min</dt><dd>${reward(lately)}</dd></div>
      <div title="Of what is shown below, where it was scored"><dt>Mean reward</dt><dd>${reward(mean)}</dd></div>
      <div title="Sampled, in what is shown below"><dt>Tokens</dt><dd>${count(shown.reduce((sum, row) => sum + row.tokens_so_far, 0))}</dd></div>
    </dl>
    ${charts}
  </div>`;
}

function Head({ grouped, sort, onSort, ids }) {
  const title = (name, label, numeric) => (grouped ? label : html`<${SortHead} name=${name} label=${label} numeric=${numeric} sort=${sort} onSort=${onSort} />`);
  const way = (...names) => (names.includes(sort) ? "ascending" : names.includes(sort.slice(1)) && sort.startsWith("-") ? "descending" : undefined);
  const all = ids.length > 0 && ids.every((id) => picked.value.has(id));
  return html`<div class="head" role="row" aria-rowindex="1">
    <span role="columnheader" class="pick">${!grouped && html`<input type="checkbox" aria-label="Select all that are shown" checked=${all} onChange=${(event) => pick(ids, event.target.checked)} />`}</span>
    <span role="columnheader" class="task" aria-sort=${way("task")}>${title("task", "Task")}</span>
    <span role="columnheader" class="who" aria-sort=${way("agent", "model")}>${grouped ? "Rewards, least to most" : html`${title("agent", "Agent")} ${title("model", "Model")}`}</span>
    <span role="columnheader" class="stage" aria-sort=${way("stage", "blame")}>${grouped ? "Results" : html`${title("stage", "Stage")} ${title("blame", "Blame")}`}</span>
    <span role="columnheader" class="number" aria-sort=${way("reward")}>${grouped ? "Mean" : title("reward", "Reward", true)}</span>
    <span role="columnheader" class="number turns" aria-sort=${way("turns")}>${grouped ? "Runs" : title("turns", "Turns", true)}</span>
    <span role="columnheader" class="number tokens" aria-sort=${way("tokens")}>${title("tokens", "Tokens", true)}</span>
    <span role="columnheader" class="number time" aria-sort=${way("time")}>${grouped ? "" : title("time", "Time", true)}</span>
    <span role="columnheader" class="number age" aria-sort=${way("age")}>${grouped ? "Age" : title("age", "Age", true)}</span>
  </div>`;
}

const narrow = matchMedia("(max-width: 720px)");

/** j, k and Enter, and whether this is a phone. */
function useKeys(state, setSelected) {
  const [phone, setPhone] = useState(narrow.matches);
  useEffect(() => {
    const change = () => setPhone(narrow.matches);
    const step = ({ detail }) => {
      const { names } = state.current;
      const at = names.indexOf(kept.selected);
      const next = names[Math.max(0, Math.min(names.length - 1, at + detail))];
      if (next !== undefined) setSelected((kept.selected = next));
    };
    const enter = () => {
      const { names, addressOf } = state.current;
      const at = names.indexOf(kept.selected);
      if (at >= 0) location.hash = addressOf(at);
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
  return phone;
}

function Emptiness() {
  if (locked.value) return html`<section class="state"><h1>Rollouts</h1><p>They are shown to those who have a key.</p></section>`;
  if (loading.value === "loading" && link.value !== "lost") return html`<section class="state"><p class="spin" role="status">Reading the log…</p></section>`;
  if (loading.value !== "ready")
    return html`<section class="state"><h1>No answer from the server</h1><p role="status">${problem.value || "It may be starting again."} This page tries again by itself.</p></section>`;
  return html`<section class="state">
    <h1>No rollouts yet</h1>
    <p>Start one here, and watch a real agent work on it. No account, no key: the scripted model answers.</p>
    <a class="button main" href="#/try">Try one</a>
  </section>`;
}

export function Runs({ query }) {
  const asked = Object.fromEntries(new URLSearchParams(query));
  const { q = "", show = "", group = "", task = "", sort = "" } = asked;
  const grouped = group === "1";
  const rows = all.value;
  const time = now.value;
  const shown = useMemo(() => sorted(rows.filter(wanted(asked)), grouped ? "" : sort), [rows, query]);
  const groups = useMemo(() => (grouped ? groupsOf(shown) : []), [shown, grouped]);
  const names = useMemo(() => (grouped ? groups.map((each) => each.name) : shown.map((row) => row.rollout_id)), [groups, shown, grouped]);
  const groupAddress = (name) => listAddress({ ...asked, group: "", task: name });
  const addressOf = (at) => (grouped ? groupAddress(names[at]) : `#/rollouts/${encodeURIComponent(names[at])}`);
  const [selected, setSelected] = useState(kept.selected);
  const state = useRef({});
  state.current = { names, addressOf };
  const phone = useKeys(state, setSelected);
  const back = useRef(kept.view === query ? kept.top : 0);

  if (!rows.length) return html`<${Emptiness} />`;
  const set = (changes) => replace(listAddress({ ...asked, ...changes }));
  const found = shown.length === rows.length ? plural(rows.length, "rollout") : `${exact(shown.length)} of ${exact(rows.length)}`;
  return html`<section class="runs">
    <h1 class="hidden">Runs</h1>
    <${Totals} shown=${shown} time=${time} />
    ${MODE === "serve" && html`<${Nodes} />`}
    <div class="tools">
      <input type="search" placeholder="Search task, model, outcome, id" aria-label="Search rollouts" aria-keyshortcuts="/" value=${q} onInput=${(event) => set({ q: event.target.value })} />
      <kbd aria-hidden="true">/</kbd>
      <div class="chips" role="group" aria-label="Show">
        ${SHOW.map(([value, name, about]) => html`<button aria-pressed=${show === value} title=${about} onClick=${() => set({ show: value })}>${name}</button>`)}
      </div>
      <label class="check"><input type="checkbox" checked=${grouped} onChange=${(event) => set({ group: event.target.checked ? "1" : "" })} /> Group by task</label>
      ${task && html`<button class="only" onClick=${() => set({ task: "" })} aria-label=${`Only ${task}; show all tasks`}>${clip(task, 40)} <span aria-hidden="true">×</span></button>`}
      <${Filters} rows=${rows} asked=${asked} set=${set} by=${RUN_FILTERS} />
      <span class="found" role="status">${found}${grouped && ` in ${plural(groups.length, "group")}`}</span>
    </div>
    <${Virtual}
      label="Rollouts"
      count=${names.length}
      items=${names}
      view=${query}
      keyOf=${(index) => names[index]}
      top=${back.current}
      onTop=${(top) => ((kept.view = query), (kept.top = top))}
      height=${phone ? 84 : 52}
      focus=${names.indexOf(selected)}
      draw=${(index) =>
        grouped
          ? html`<${Group} key=${names[index]} index=${index} group=${groups[index]} time=${time} selected=${names[index] === selected} href=${groupAddress(names[index])} />`
          : html`<${Row} key=${names[index]} index=${index} row=${shown[index]} selected=${names[index] === selected} time=${time} />`}
    >
      <${Head} grouped=${grouped} sort=${sort} ids=${names} onSort=${(next) => set({ sort: next })} />
    <//>
    ${!shown.length && html`<p class="nothing">Nothing fits. <button class="quiet" onClick=${() => replace("#/")}>Show all</button></p>`}
    <${PickBar} rows=${rows} />
    <p class="keys" aria-hidden="true"><kbd>j</kbd> <kbd>k</kbd> walk <kbd>Enter</kbd> opens <kbd>/</kbd> searches <kbd>Esc</kbd> back</p>
  </section>`;
}

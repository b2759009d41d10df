// One rollout: where it is, what happened, what it came to.
import { html, useEffect, useMemo, useState } from "../vendor/preact.js";
import { request } from "./api.js";
import { Patch } from "./diff.js";
import { RolloutStore } from "./rollout_store.js";
import { now } from "./runs_store.js";
import { clip, clock, reward, seconds, tone, words } from "./text.js";
import { TokensView } from "./tokens.js";
import { TranscriptView } from "./transcript.js";

const PARTS = [
  ["transcript", "Transcript"],
  ["tokens", "Tokens"],
  ["commands", "Commands"],
  ["files", "Files and patch"],
  ["reward", "Reward"],
];

const ADVICE = {
  setup_failed: "See what the command printed under Commands. Setup runs without a network unless the task allows hosts.",
  setup_timeout: "Give setup more time, or bake what it installs into an image.",
  model_unreachable: "See whether the model's server is up, and whether its address, name and key are right.",
  machine_not_ready: "Run `rollcage doctor` on the server's machine: it says what is missing.",
  sandbox_failed: "Run `rollcage doctor` on the server's machine: it says what is missing.",
  sandbox_lost: "The box went away while it was used. Start the rollout again.",
  environment_failed: "The remote environment could not be had. See whether the server's key and the environment's name are right.",
  environment_lost: "The remote environment went away, so nothing was scored. Start the rollout again.",
  reset_failed: "The remote environment refused to go to its start. Try without environment_seed.",
  verify_timeout: "The verifier hung. Give its commands a time limit of their own.",
  bad_reward: "The verifier wrote something that is no finite number. See Commands for what it printed.",
  timed_out: "Raise timeout_s, or make setup shorter.",
  crashed: "The server died while this ran. Start it again.",
  agent_timeout: "What the agent left was scored. Raise agent_timeout_s to give it longer.",
};

/** In a tab of its own. A plain link could not carry the key. */
async function openRaw(id) {
  const tab = open("about:blank");
  const result = await request(`/rollouts/${encodeURIComponent(id)}/result`);
  const blob = new Blob([JSON.stringify(result, null, 2)], { type: "application/json" });
  if (tab) tab.location = URL.createObjectURL(blob);
}

function Timeline({ store }) {
  store.version.value;
  const time = now.value;
  const from = store.createdAt;
  const to = store.endedAt ?? Math.max(time, from + 1);
  const share = (value) => `${Math.max(0, Math.min(100, ((value - from) / (to - from || 1)) * 100))}%`;
  return html`<ol class="timeline" aria-label="Stages">
    ${store.stages.map((stage) => {
      const took = (stage.to ?? time) - stage.from;
      return html`<li class="${stage.name} ${stage.to ? "" : "here"}" key=${stage.name + stage.from}>
        <span class="label">${stage.name}</span>
        <span class="track"><i style=${{ left: share(stage.from), width: `max(3px, calc(${share(stage.to ?? time)} - ${share(stage.from)}))` }}></i></span>
        <span class="took">${seconds(Math.max(0, took))}</span>
      </li>`;
    })}
  </ol>`;
}

function Commands({ store }) {
  store.version.value;
  if (!store.commands.length) return html`<p class="nothing">${store.ended ? "This rollout ran no commands of its own." : "No command has run yet."}</p>`;
  return html`<div class="commands">
    ${store.commands.map(({ stage, command, result }, index) => html`<details key=${index} open=${!result || result.exit_code !== 0}>
      <summary>
        <span class="tag">${stage}</span><code>${clip(command, 160)}</code>
        <span class="how ${result && result.exit_code !== 0 ? "bad" : ""}">${result ? (result.timed_out ? "out of time" : `exit ${result.exit_code}`) : "running…"}${result ? `, ${seconds(result.seconds)}` : ""}</span>
      </summary>
      <pre class="command">${command}</pre>
      ${result?.stdout && html`<pre class="output" tabindex="0">${result.stdout}</pre>`}
      ${result?.stderr && html`<pre class="output error" tabindex="0">${result.stderr}</pre>`}
      ${result && !result.stdout && !result.stderr && html`<p class="nothing">It printed nothing.</p>`}
    </details>`)}
  </div>`;
}

function Files({ store }) {
  store.version.value;
  const { files } = store;
  if (!files) return html`<p class="nothing">${store.ended ? "No files were collected: verification was never reached." : "Files are collected when the agent is gone."}</p>`;
  const names = Object.keys(files.files).sort();
  return html`<div class="files">
    <h2>Patch</h2>
    ${files.patch === null || files.patch === undefined ? html`<p class="nothing">There is no patch: the workdir was too large to be kept twice, or the box has no git.</p>` : files.patch === "" ? html`<p class="nothing">The agent changed nothing.</p>` : html`<${Patch} patch=${files.patch} />`}
    ${files.patch_truncated && html`<p class="nothing">The patch was longer; this is its beginning.</p>`}
    <h2>Files in the workdir</h2>
    ${names.map((name) => html`<details class="file" key=${name}><summary><code>${name}</code><small>${files.files[name].length.toLocaleString("en")} characters</small></summary><pre class="output" tabindex="0">${files.files[name]}</pre></details>`)}
    ${!names.length && html`<p class="nothing">None.</p>`}
    ${files.extra?.length > 0 && html`<h2>Not collected</h2><ul class="plain">${files.extra.map((name) => html`<li><code>${name}</code> <small>${files.why?.[name] ?? ""}</small></li>`)}</ul>`}
  </div>`;
}

const MADE = {
  commands: "The share of verify commands that passed.",
  reward_file: "The number that the verifier wrote to its reward file.",
  reward_json: "From the named parts that the verifier wrote.",
  environment: "What the remote environment judged.",
};

function RewardView({ store }) {
  store.version.value;
  const verify = store.commands.filter((each) => each.stage === "verify" && each.result);
  const passed = verify.filter((each) => each.result.exit_code === 0).length;
  const parts = Object.entries(store.reward?.parts ?? {});
  return html`<div class="rewardview">
    <p class="big">${store.reward ? reward(store.reward.total) : "–"}</p>
    <p>${store.reward ? (MADE[store.reward.source] ?? `Made by: ${words(store.reward.source)}.`) : store.ended ? "Not scored. A reward of null is not a zero: nothing was judged." : "Scored at the end, when the agent is gone."}</p>
    ${verify.length > 0 &&
    html`<h2>Verify commands: ${passed} of ${verify.length} passed</h2>
      <ul class="checks">${verify.map((each) => html`<li class=${each.result.exit_code === 0 ? "good" : "bad"}><span>${each.result.exit_code === 0 ? "passed" : each.result.timed_out ? "out of time" : `exit ${each.result.exit_code}`}</span><code>${each.command}</code></li>`)}</ul>`}
    ${parts.length > 0 && html`<table><thead><tr><th>Part</th><th>Value</th></tr></thead><tbody>${parts.map(([name, value]) => html`<tr><td>${name}</td><td class="number">${reward(value)}</td></tr>`)}</tbody></table>`}
    ${store.noticed.map((each) => html`<div class="noticed"><b>Noticed</b> ${each.what}<ul class="plain">${each.paths.map((path) => html`<li><code>${path}</code></li>`)}</ul></div>`)}
    ${store.boxes.flatMap((box) => box.notes ?? []).map((note) => html`<p class="nothing">${note}</p>`)}
  </div>`;
}

export function RolloutView({ id, part }) {
  const store = useMemo(() => new RolloutStore(id), [id]);
  const [stopping, setStopping] = useState("");
  useEffect(() => store.open(), [store]);
  store.version.value;
  const state = store.state.value;
  if (state === "refused")
    return html`<section class="state"><h1>No such rollout</h1><p>${store.problem.value}</p><a class="button" href="#/">All rollouts</a></section>`;
  if (!store.job) return html`<section class="state"><p class="spin">${state === "lost" ? "The server does not answer; trying again…" : "Reading its log…"}</p></section>`;

  const { job, ended } = store;
  const at = ended ? "ended" : store.stages.at(-1)?.name ?? "queued";
  const abort = async () => {
    setStopping("stopping");
    try {
      await request(`/rollouts/${encodeURIComponent(id)}`, { method: "DELETE" });
    } catch (error) {
      setStopping(error.message);
    }
  };
  const mood = tone({ outcome: ended?.outcome ?? null, reward: store.reward?.total ?? null });
  return html`<section class="rollout">
    <header class="title">
      <a href="#/" class="back" aria-label="All rollouts">←</a>
      <div>
        <h1>${job.task.id || clip(job.task.instruction, 80)}</h1>
        <p class="facts"><code>${id}</code><span>${job.agent.name}${store.agent ? ` ${store.agent.version}` : ""}</span><span>${job.model.model}</span><span>${job.sandbox.backend}</span><time>${clock(store.createdAt)}</time></p>
      </div>
      <div class="verdict ${mood}">
        <span class="outcome">${ended ? words(ended.outcome) : store.aborting ? "stopping…" : words(at)}</span>
        <span class="reward" title="Reward">${reward(store.reward?.total ?? null)}</span>
      </div>
      <div class="actions">
        ${!ended && html`<button class="danger" disabled=${stopping === "stopping" || store.aborting} onClick=${abort}>Abort</button>`}
        <button class="quiet" onClick=${() => openRaw(id)}>Raw JSON</button>
      </div>
    </header>
    ${job.model.kind === "scripted" && html`<p class="scripted">Scripted: no model is running; every answer comes from the task’s own script. The agent and the box are real.</p>`}
    ${stopping && stopping !== "stopping" && html`<p class="wrong" role="alert">${stopping}</p>`}
    ${state === "lost" && html`<p class="wrong" role="status">The connection was lost. What happens meanwhile is not lost; this page tries again.</p>`}
    ${ended?.error && html`<div class="problem ${mood}" role="alert"><b>${ended.error}</b>${ADVICE[ended.error_code] && html`<p>${ADVICE[ended.error_code]}</p>`}</div>`}
    <${Timeline} store=${store} />
    <nav class="tabs" aria-label="Parts">
      ${PARTS.map(([name, label]) => html`<a href=${`#/rollouts/${id}/${name}`} aria-current=${part === name ? "page" : undefined}>${label}${name === "tokens" && store.turns.length ? html` <small>${store.turns.length}</small>` : name === "commands" && store.commands.length ? html` <small>${store.commands.length}</small>` : ""}</a>`)}
    </nav>
    ${part === "tokens" ? html`<${TokensView} store=${store} />` : part === "commands" ? html`<${Commands} store=${store} />` : part === "files" ? html`<${Files} store=${store} />` : part === "reward" ? html`<${RewardView} store=${store} />` : html`<${TranscriptView} store=${store} />`}
  </section>`;
}

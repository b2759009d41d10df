// One rollout: where it is, what happened, what it came to.
import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { MODE, address, hasKey, locked, request } from "./api.js";
import { Asking } from "./dialog.js";
import { Patch } from "./diff.js";
import { Fold, Opened } from "./fold.js";
import { ForksView, useTree } from "./forks.js";
import { highlighted, languageOf } from "./markdown.js";
import { MergeView } from "./merge.js";
import { PromptView } from "./prompt.js";
import { RolloutStore } from "./rollout_store.js";
import { list } from "./route.js";
import { now } from "./runs_store.js";
import { DOING, SCORED, clip, clock, exact, plural, reward, seconds, standing, words } from "./text.js";
import { TokensView } from "./tokens.js";
import { Output, TranscriptView } from "./transcript.js";

const PARTS = [
  ["transcript", "Transcript"],
  ["prompt", "Prompts"],
  ["tokens", "Tokens"],
  ["merge", "Merge"],
  ["commands", "Commands"],
  ["files", "Files"],
  ["reward", "Reward"],
  ["forks", "Forks"],
];

const ADVICE = {
  setup_failed: "Commands shows what it printed. Setup runs without a network unless the task allows hosts.",
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
  agent_timeout: "What the agent left was scored. Raise agent_timeout_s to give it longer.",
};

/** Everything about it, in a tab of its own. A plain link cannot carry a key; with one, the page fetches it. */
function RawJson({ id }) {
  const [problem, setProblem] = useState("");
  const path = `/rollouts/${encodeURIComponent(id)}/result`;
  const fetched = async (event) => {
    if (!hasKey() && MODE !== "copy") return;
    event.preventDefault();
    const tab = open("about:blank");
    try {
      const blob = new Blob([JSON.stringify(await request(path), null, 2)], { type: "application/json" });
      const url = URL.createObjectURL(blob);
      if (tab) tab.location = url;
      setTimeout(() => URL.revokeObjectURL(url), 60_000);
      setProblem("");
    } catch (error) {
      tab?.close();
      setProblem(error.message);
    }
  };
  return html`<a class="button quiet" href=${address(path)} target="_blank" rel="noopener" onClick=${fetched}>Raw JSON</a>${problem && html`<span class="wrong" role="alert">${problem}</span>`}`;
}

const STAGES = ["queued", "provision", "setup", "agent", "verify"];

/** A bar per stage. All of them are there from the start, so that nothing moves when one begins. */
function Timeline({ store }) {
  store.version.value;
  const time = now.value;
  const from = store.createdAt;
  const to = store.endedAt ?? Math.max(time, from + 1);
  const share = (value) => `${Math.max(0, Math.min(100, ((value - from) / (to - from || 1)) * 100))}%`;
  const waited = { name: "queued", from, to: store.stages[0]?.from ?? store.endedAt };
  const bars = STAGES.map((name) => (name === "queued" ? waited : store.stages.findLast((stage) => stage.name === name)) ?? { name });
  return html`<ol class="timeline" aria-label="Stages">
    ${bars.map(({ name, from: begun, to: over }) => {
      const here = begun !== undefined && !over;
      const end = over ?? time;
      return html`<li class="${name} ${here ? "here" : begun === undefined ? "never" : ""}" key=${name}>
        <span class="label">${name}</span>
        <span class="track">${begun !== undefined && html`<i style=${{ left: share(begun), width: `max(3px, calc(${share(end)} - ${share(begun)}))` }}></i>`}</span>
        <span class="took">${begun === undefined ? "–" : seconds(Math.max(0, end - begun))}</span>
      </li>`;
    })}
  </ol>`;
}

function Commands({ store }) {
  store.version.value;
  if (!store.commands.length) return html`<p class="nothing">${store.ended ? "This rollout ran no commands of its own." : "No command has run yet."}</p>`;
  return html`<div class="commands">
    ${store.commands.map(({ stage, command, result }, index) => html`<${Fold} key=${index} name=${`command/${index}`} data-step open=${Boolean(result) && result.exit_code !== 0}>
      <summary>
        <span class="tag">${stage}</span><code>${clip(command, 200)}</code>
        <span class="how ${result && result.exit_code !== 0 ? "bad" : ""}">${result ? (result.timed_out ? "out of time" : `exit ${result.exit_code}`) : "running…"}${result ? `, ${seconds(result.seconds)}` : ""}</span>
      </summary>
      ${(command.includes("\n") || command.length > 100) && html`<pre class="command">${command}</pre>`}
      ${result?.truncated && html`<p class="nothing">Its output was longer; this is the end of it.</p>`}
      ${result?.stdout && html`<${Output} name=${`command/${index}/out`} text=${result.stdout} />`}
      ${result?.stderr && html`<${Output} name=${`command/${index}/err`} text=${result.stderr} bad=${true} />`}
      ${result && !result.stdout && !result.stderr && html`<p class="nothing">It printed nothing.</p>`}
    <//>`)}
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
    <h2>Files in the workdir${names.length > 0 && html` <small>${exact(names.length)}</small>`}</h2>
    ${names.map((name) => html`<${Fold} class="file" key=${name} name=${`file/${name}`} data-step><summary><code>${name}</code><span class="how">${plural(files.files[name].length, "character")}</span></summary>${files.files[name] ? html`<${Output} name=${`file/${name}/text`} text=${files.files[name]} draw=${(text) => highlighted(text, languageOf(name))} />` : html`<p class="nothing">It is empty.</p>`}<//>`)}
    ${!names.length && html`<p class="nothing">None.</p>`}
    ${files.extra?.length > 0 && html`<h2>Not collected</h2><ul class="plain">${files.extra.map((name) => html`<li><code>${name}</code> <small>${files.why?.[name] ?? ""}</small></li>`)}</ul>`}
  </div>`;
}

const MADE = {
  commands: "The share of verify commands that passed.",
  reward_file: "The number that the verifier wrote to its reward file.",
  reward_json: "From the named parts that the verifier wrote.",
  checks: "The share of expected tests that passed; verify commands count as one test each.",
  environment: "What the remote environment judged.",
};

const TRUSTED = {
  isolated: "No code under test was within the verifier's reach.",
  in_process: "A test framework reported it from inside the code's own process.",
  shared: "The verifier may have run the code under test beside itself.",
};

function RewardView({ store }) {
  store.version.value;
  const verify = store.commands.filter((each) => each.stage === "verify" && each.result);
  const passed = verify.filter((each) => each.result.exit_code === 0).length;
  const parts = Object.entries(store.reward?.parts ?? {});
  const how = store.reward
    ? (MADE[store.reward.source] ?? `Made by: ${words(store.reward.source)}.`)
    : store.ended
      ? "Not scored. No reward is not a zero: nothing was judged."
      : "Scored at the end, when the agent is gone.";
  return html`<div class="rewardview">
    <p class="big">${store.reward ? reward(store.reward.total) : "–"}</p>
    <p>${how}</p>
    ${store.reward?.trust && html`<p class="hint trust">Trust: <b>${words(store.reward.trust)}</b>. ${TRUSTED[store.reward.trust] ?? ""}</p>`}
    ${!store.reward && store.ended?.blame && html`<p class="hint blame">Blame: <b>${words(store.ended.blame)}</b>.</p>`}
    ${store.origin && html`<p class="hint">${store.origin.how === "fork" ? `Forked at turn ${store.origin.turn} from` : "A replay of"} <a href=${`#/rollouts/${encodeURIComponent(store.origin.rollout_id)}`}><code>${store.origin.rollout_id}</code></a>${store.origin.edited ? ", with the answer of that turn given by hand" : ""}.</p>`}
    ${store.reverifies && html`<p class="hint">It judges the stored work of <a href=${`#/rollouts/${encodeURIComponent(store.reverifies)}`}><code>${store.reverifies}</code></a> again.</p>`}
    ${store.environment && html`<p class="hint">It worked on <b>${store.environment.name}</b>${store.environment.instance_id && html` <code>${store.environment.instance_id}</code>`}, with ${plural(store.environment.tools.length, "tool")} and ${plural(store.calls, "call")}.</p>`}
    ${verify.length > 0 &&
    html`<h2>${store.reward?.source === "checks" ? "Checks and verify commands" : "Verify commands"}: ${passed} of ${verify.length} passed</h2>
      <ul class="checks">${verify.map(({ command, result }) => html`<li data-step class=${result.exit_code === 0 ? "good" : "bad"}><span>${result.exit_code === 0 ? "passed" : result.timed_out ? "out of time" : `exit ${result.exit_code}`}</span><code>${command}</code><small>${seconds(result.seconds)}</small></li>`)}</ul>
      <p><a href=${`#/rollouts/${encodeURIComponent(store.id)}/commands`}>What they printed</a></p>`}
    ${parts.length > 0 && html`<table><thead><tr><th>Part</th><th>Value</th></tr></thead><tbody>${parts.map(([name, value]) => html`<tr><td>${name}</td><td class="number">${reward(value)}</td></tr>`)}</tbody></table>`}
    ${store.suspicions.map((each) => html`<div class="suspicion"><b>Suspicion</b> ${each.code && html`<code>${each.code}</code> `}${each.what}<ul class="plain">${each.paths.map((path) => html`<li><code>${path}</code></li>`)}</ul></div>`)}
    ${store.boxes.flatMap((box) => box.notes ?? []).map((note) => html`<p class="hint">${note}</p>`)}
  </div>`;
}

/** j and k go from one piece of what is shown to the next. */
function useSteps() {
  useEffect(() => {
    const step = ({ detail }) => {
      const line = 120;
      const stops = [...document.querySelectorAll(".rollout [data-step]")];
      const tops = stops.map((stop) => stop.getBoundingClientRect().top);
      const marked = stops.findIndex((stop) => stop.classList.contains("at") && stop.getBoundingClientRect().bottom > 0);
      const first = tops.findIndex((top) => top > line - 2);
      const here = marked >= 0 ? marked + detail : detail > 0 ? first : first < 0 ? stops.length - 1 : first - 1;
      const to = stops[Math.max(0, Math.min(stops.length - 1, here < 0 && detail > 0 ? stops.length - 1 : here))];
      for (const stop of stops) stop.classList.toggle("at", stop === to);
      to?.scrollIntoView({ block: "start" });
    };
    addEventListener("rollcage-step", step);
    return () => removeEventListener("rollcage-step", step);
  }, []);
}

function Refusal({ store }) {
  store.version.value;
  if (locked.value) return html`<section class="state"><h1>A rollout</h1><p>It is shown to those who have a key.</p></section>`;
  return html`<section class="state"><h1>No such rollout</h1><p>${store.problem.value}</p><a class="button" href="#/">All rollouts</a></section>`;
}

function Title({ store }) {
  const [stopping, setStopping] = useState("");
  store.version.value;
  const { id, job, ended } = store;
  const at = store.stages.at(-1)?.name ?? "queued";
  const result = standing({ outcome: ended?.outcome ?? null, reward: store.reward?.total ?? null });
  const outcome = ended ? words(ended.outcome) : store.aborting || stopping === "stopping" ? "stopping…" : store.doing || DOING[at];
  const abort = async () => {
    setStopping("stopping");
    try {
      await request(`/rollouts/${encodeURIComponent(id)}`, { method: "DELETE" });
    } catch (error) {
      setStopping(error.message);
    }
  };
  return html`<header class="title">
      <a href=${list.value} class="back" aria-label="All rollouts">←</a>
      <div>
        <h1>${job.task.id || clip(job.task.instruction, 80)}</h1>
        <p class="facts">
          <code title="Its id">${id}</code><span title="Agent">${job.agent.name}${store.agent ? ` ${store.agent.version}` : ""}</span><span title="Model">${job.model.model}</span><span title="Kind of box">${job.sandbox.backend}</span>
          ${store.environment && html`<span title="Remote environment">${store.environment.name}</span>`}
          <time title="Started">${clock(store.createdAt)}</time>${ended && html`<span title="From its start to its end">took ${seconds(store.endedAt - store.createdAt)}</span>`}
        </p>
      </div>
      <div class="verdict ${result}">
        <span class="outcome" role="status">${outcome}</span>
        ${ended && (store.reward ? html`<span class="what">reward</span><span class="reward">${reward(store.reward.total)}</span>` : html`<span class="what">not scored</span>`)}
      </div>
      <div class="actions">
        ${!ended && MODE === "serve" && html`<${Asking} label="Abort" title="Abort this rollout?" yes="Abort it" no="Let it run" disabled=${stopping === "stopping" || store.aborting} onYes=${abort}>The agent is stopped and its box is gone. Nothing is scored.<//>`}
        <${RawJson} id=${id} />
      </div>
    </header>
    ${stopping && stopping !== "stopping" && !ended && html`<p class="wrong" role="alert">${stopping}</p>`}`;
}

const VIEWS = { prompt: PromptView, forks: ForksView, tokens: TokensView, merge: MergeView, commands: Commands, files: Files, reward: RewardView };

/** Where the tabs are wider than the screen, the one that is shown is in view. */
function Tabs({ id, here, numbers, forked }) {
  const bar = useRef();
  useEffect(() => {
    const tab = bar.current.querySelector("[aria-current]");
    bar.current.scrollLeft = tab.offsetLeft + (tab.offsetWidth - bar.current.clientWidth) / 2;
  }, [here]);
  return html`<nav class="tabs" aria-label="Parts" ref=${bar}>
    ${PARTS.filter(([each]) => each !== "forks" || forked || here === "forks").map(([each, label]) => html`<a href=${`#/rollouts/${encodeURIComponent(id)}/${each}`} aria-current=${here === each ? "page" : undefined}>${label}${numbers[each] > 0 && html` <small>${exact(numbers[each])}</small>`}</a>`)}
  </nav>`;
}

export function RolloutView({ id, part, at }) {
  const store = useMemo(() => new RolloutStore(id), [id]);
  useEffect(() => store.open(), [store]);
  useSteps();
  const forked = Boolean(useTree(id));
  store.version.value;
  const state = store.state.value;
  const name = store.job ? store.job.task.id || clip(store.job.task.instruction, 60) : id;
  useEffect(() => void (document.title = `${name} · rollcage`), [name]);
  if (state === "refused") return html`<${Refusal} store=${store} />`;
  if (!store.job) return html`<section class="state"><p class="spin" role="status">${state === "lost" ? "The server does not answer; trying again…" : "Reading its log…"}</p></section>`;

  const { job, ended } = store;
  const View = VIEWS[part] ?? TranscriptView;
  const mood = SCORED.includes(ended?.outcome) ? "warn" : ended?.outcome === "aborted" ? "dull" : "";
  const numbers = { prompt: store.turns.length, tokens: store.turns.length, commands: store.commands.length, files: store.files ? Object.keys(store.files.files).length : 0 };
  const here = VIEWS[part] ? part : "transcript";
  return html`<section class="rollout">
    <${Title} store=${store} />
    ${job.model.kind === "scripted" && html`<p class="scripted">Scripted: no model is running, the answers are the task’s own script. The agent and the box are real.</p>`}
    ${store.restarts > 0 && html`<p class="scripted">Begun anew: the server that ran it first died before its agent began.</p>`}
    ${state === "lost" && html`<p class="wrong" role="status">The connection was lost. What happens meanwhile is not lost; this page tries again.</p>`}
    ${ended?.error && html`<div class="problem ${mood}" role="alert"><b>${ended.error}</b>${ADVICE[ended.error_code] && html`<p>${ADVICE[ended.error_code]}</p>`}</div>`}
    <${Timeline} store=${store} />
    <${Tabs} id=${id} here=${here} numbers=${numbers} forked=${forked} />
    <${Opened.Provider} value=${store.opened}><${View} key=${here} store=${store} at=${at} /><//>
  </section>`;
}

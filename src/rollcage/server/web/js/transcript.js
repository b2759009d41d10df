// What the agent said and did, as it happens.
import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { DiffLines, lines } from "./diff.js";
import { Fold, useWhole } from "./fold.js";
import { Markdown } from "./markdown.js";
import { clip, plural, reward, seconds, standing, words } from "./text.js";
import { useNear } from "./virtual.js";

const json = (value) => JSON.stringify(value, null, 2);
const SHOWN = 10;
/** Shorter transcripts are drawn in whole, so that the browser's own search finds everything. */
const LONG = 60;

/** Printed text; of a long one the beginning, until somebody wants the rest. */
export function Output({ text, name, bad = false, draw = (shown) => shown }) {
  const [whole, setWhole] = useWhole(name);
  const rows = text.replace(/\s+$/, "").split("\n");
  const long = rows.length > SHOWN + 3 || text.length > 4000;
  const shown = whole || !long ? text.slice(0, 400_000) : rows.slice(0, SHOWN).join("\n").slice(0, 3500);
  return html`<pre class="output ${bad ? "error" : ""} ${long && !whole ? "cut" : ""}" tabindex="0">${draw(shown)}</pre>
    ${long && html`<button class="quiet more" aria-expanded=${whole} onClick=${() => setWhole(!whole)}>${whole ? "Show less" : rows.length > SHOWN ? `Show all ${plural(rows.length, "line")}` : "Show all of it"}</button>`}`;
}

/** What a call was asked for: what tells most about it, or all of it. */
function gist({ title, arguments: given }) {
  return title || Object.entries(given).map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`).join(", ");
}

/** A change to a file: as lines that come and go, or as the patch that the agent wrote. */
function Edit({ edit, at }) {
  const rows = useMemo(() => (edit.removed || edit.added ? lines(edit.removed, edit.added) : null), [edit.removed, edit.added]);
  return rows ? html`<${DiffLines} rows=${rows} />` : html`<${Output} name=${`${at}/patch`} text=${edit.diff} />`;
}

function Tool({ part, at }) {
  const command = part.kind === "execute" ? part.title : "";
  const running = part.status === "running" || part.status === "pending";
  const failed = part.status === "error";
  const shown = part.edits.some((edit) => edit.removed || edit.added);
  return html`<${Fold} name=${at} class="tool ${failed ? "error" : ""}" open=${Boolean(part.edits.length || command)}>
    <summary>
      <span class="name">${part.name || "tool"}</span>
      <code>${clip(gist(part), 200)}</code>
      <span class="how">${running ? html`<span class="spin">running</span>` : failed ? "failed" : part.seconds !== null ? seconds(part.seconds) : ""}</span>
    </summary>
    ${(command.includes("\n") || command.length > 100) && html`<pre class="command">${command}</pre>`}
    ${part.edits.map((edit, index) => html`<${Edit} key=${index} edit=${edit} at=${`${at}/${index}`} />`)}
    ${!part.edits.length && !command && Object.keys(part.arguments).length > 0 && html`<${Output} name=${`${at}/input`} text=${json(part.arguments)} />`}
    ${!shown && part.result && html`<${Output} name=${`${at}/output`} text=${part.result} />`}
    ${part.error && html`<p class="wrong">${part.error}</p>`}
  <//>`;
}

function Part({ part, at }) {
  if (part.type === "text") return html`<${Markdown} text=${part.text} />`;
  if (part.type === "reasoning")
    return html`<${Fold} name=${at} class="thought"><summary>Thought <small>${clip(part.text, 90)}</small></summary><${Markdown} text=${part.text} /><//>`;
  if (part.type === "file_edit")
    return html`<${Fold} name=${at} class="tool" open=${true}><summary><span class="name">${part.change}</span><code>${clip(part.path, 200)}</code></summary><${Edit} edit=${part} at=${at} /><//>`;
  return html`<${Tool} part=${part} at=${at} />`;
}

/** One message; far from what is seen it is only its height. */
function Message({ message, speaker, first, lazy }) {
  const place = useRef();
  const [near, height] = useNear(place, 120, lazy);
  // The same value drawn before is not compared again: a long transcript grows at the end only.
  return useMemo(
    () => html`<article ref=${place} class="message ${message.role === "user" ? "user" : "agent"}" data-step data-drawn=${near ? "1" : undefined} style=${{ height: near ? "" : `${height}px` }}>
      ${near && first && html`<header>${speaker}</header>`}
      ${near && message.parts.map((part, index) => html`<${Part} key=${part.id || index} part=${part} at=${`${message.id}/${part.id || index}`} />`)}
    </article>`,
    [message, near, speaker, first],
  );
}

/** What the model is saying at this moment. */
function Live({ turn, speaker, first }) {
  return html`<article class="message live" aria-busy="true" data-step>
    <header>${first && speaker}<span class="how">${plural(turn.tokens, "token")} so far</span></header>
    ${turn.reasoning && html`<div class="words thought">${turn.reasoning.slice(-4000)}</div>`}
    ${turn.content && html`<div class="words">${turn.content.slice(-20_000)}</div>`}
    ${turn.calls && html`<pre class="output">${turn.calls.slice(-8000)}</pre>`}
    <span class="caret" aria-hidden="true"></span>
  </article>`;
}

/** The agent repeats what its model says, a little later: what is in a running turn is not shown twice. */
function withoutEchoes(messages, live) {
  const last = messages.at(-1);
  if (!last || last.role === "user" || !live.length) return messages;
  const same = (part, said) => said && (said.trim().startsWith(part.text.trim()) || part.text.trim().startsWith(said.trim()));
  const echo = (part) => live.some((turn) => (part.type === "text" && same(part, turn.content)) || (part.type === "reasoning" && same(part, turn.reasoning)));
  if (!last.parts.some(echo)) return messages;
  const parts = last.parts.filter((part) => !echo(part));
  return [...messages.slice(0, -1), ...(parts.length ? [{ ...last, parts }] : [])];
}

const holds = (message, needle) => JSON.stringify(message.parts).toLowerCase().includes(needle);

const HANDS = ["wheel", "touchmove", "pointerdown", "keydown"];

/** Keeps the end in view while it grows, until the reader goes elsewhere. */
function useFollowing(running, box) {
  const [following, setFollowing] = useState(null);
  const toEnd = () => scrollTo({ top: document.documentElement.scrollHeight });
  useEffect(() => {
    const near = () => innerHeight + scrollY > document.documentElement.scrollHeight - 160;
    let last = scrollY;
    let touched = 0;
    // The page scrolls by itself too; only what a hand did a moment ago leaves the end.
    const hand = () => (touched = performance.now());
    const look = () => {
      if (near()) setFollowing(true);
      else if (scrollY < last && performance.now() - touched < 1000) setFollowing(false);
      last = scrollY;
    };
    setFollowing(near());
    addEventListener("scroll", look, { passive: true });
    for (const name of HANDS) addEventListener(name, hand, { passive: true });
    return () => {
      removeEventListener("scroll", look);
      for (const name of HANDS) removeEventListener(name, hand);
    };
  }, []);
  const began = useRef(running);
  useEffect(() => {
    // Also once at its end; a rollout that had ended before is read from its beginning.
    if (!following || !began.current) return;
    toEnd();
    if (!running) return;
    const sizes = new ResizeObserver(toEnd);
    sizes.observe(box.current);
    return () => sizes.disconnect();
  }, [running, following]);
  return [following, () => (setFollowing(true), toEnd())];
}

function Ending({ store }) {
  store.version.value;
  const { errors, notes, printed } = store.transcript;
  const end = store.agentEnd;
  return html`${printed.length > 0 && html`<article class="message agent" data-step><header>Printed</header>${printed.map(({ stream, text }, index) => html`<div class="tool"><${Output} name=${`printed/${index}`} text=${text} bad=${stream === "stderr"} /></div>`)}</article>`}
    ${notes.map((note) => html`<p class="nothing">${note}</p>`)}
    ${errors.map((error) => html`<p class="wrong" data-step>${error}</p>`)}
    ${end?.error && !errors.length && html`<p class="wrong" data-step>${end.error}</p>`}
    ${end?.log_tail && Boolean(end.error || end.exit_code) && html`<${Fold} name="log" class="tool"><summary><span class="name">The end of the agent’s log</span><span class="how">${end.exit_code === null ? "" : `exit ${end.exit_code}`}</span></summary><${Output} name="log/text" text=${end.log_tail} /><//>`}`;
}

/** Who followed to the end sees here what it came to. */
function Closing({ store }) {
  const total = store.reward?.total ?? null;
  const result = standing({ outcome: store.ended.outcome, reward: total });
  return html`<p class="closing" data-step>
    <span class="progress ${result}"><i class="mark" aria-hidden="true"></i>${words(store.ended.outcome)}</span>
    <span>${total === null ? "not scored" : html`reward <b>${reward(total)}</b>`}</span>
    ${total !== null && html`<a href=${`#/rollouts/${encodeURIComponent(store.id)}/reward`}>How it was made</a>`}
  </p>`;
}

export function TranscriptView({ store }) {
  const [text, setText] = useState("");
  store.version.value;
  const running = !store.ended;
  const box = useRef();
  const [following, toEnd] = useFollowing(running, box);
  const live = [...store.live.values()];
  const all = withoutEchoes(store.transcript.messages(), live);
  const needle = text.trim().toLowerCase();
  const messages = needle ? all.filter((message) => holds(message, needle)) : all;
  const told = all.some((message) => message.role === "user");
  const agent = store.job?.agent.name ?? "Agent";
  const silent = !all.length && !live.length && !store.transcript.printed.length;
  const instruction = store.job?.task.instruction.trim();

  return html`<div class="transcript" ref=${box}>
    ${all.length > 3 && html`<div class="find"><input type="search" placeholder="Find in this transcript" aria-label="Find in this transcript" aria-keyshortcuts="/" value=${text} onInput=${(event) => setText(event.target.value)} /><small role="status">${needle ? `${messages.length} of ${plural(all.length, "message")}` : plural(all.length, "message")}</small></div>`}
    ${!told && !needle && instruction && html`<article class="message user" data-step><header>Instruction</header><${Markdown} text=${instruction} /></article>`}
    ${messages.map((message, index) => html`<${Message} key=${message.id} message=${message} speaker=${message.role === "user" ? "Instruction" : agent} first=${message.role !== messages[index - 1]?.role} lazy=${messages.length > LONG} />`)}
    ${live.map((turn, index) => html`<${Live} key=${index} turn=${turn} speaker=${agent} first=${!all.length || all.at(-1).role === "user"} />`)}
    ${!needle && html`<${Ending} store=${store} />`}
    ${silent && running && html`<p class="nothing spin" role="status">${store.agent ? "The agent has started; it has not said anything yet." : "The agent has not started yet."}</p>`}
    ${silent && !running && html`<p class="nothing">${store.agent ? "The agent said nothing." : "The agent never started."}</p>`}
    ${store.ended && !needle && html`<${Closing} store=${store} />`}
    ${running && following === false && html`<button class="latest" onClick=${toEnd}>To the latest ↓</button>`}
  </div>`;
}

// What the agent said and did, as it happens.
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { DiffLines, Patch, lines } from "./diff.js";
import { clip, seconds } from "./text.js";

const string = (value) => (typeof value === "string" ? value : value === undefined ? "" : JSON.stringify(value, null, 2));

function Output({ text }) {
  const [whole, setWhole] = useState(false);
  const rows = text.replace(/\s+$/, "").split("\n");
  const long = rows.length > 14 || text.length > 4000;
  const shown = whole || !long ? text : `${rows.slice(0, 12).join("\n").slice(0, 3500)}`;
  return html`<pre class="output" tabindex="0">${shown.slice(0, 400_000)}</pre>
    ${long && html`<button class="quiet more" onClick=${() => setWhole(!whole)}>${whole ? "Show less" : `Show all ${rows.length} lines`}</button>`}`;
}

function Tool({ part }) {
  const state = part.state && typeof part.state === "object" ? part.state : {};
  const input = state.input && typeof state.input === "object" ? state.input : {};
  const name = string(part.tool) || "tool";
  const status = string(state.status);
  const took = state.time?.end && state.time?.start ? (state.time.end - state.time.start) / 1000 : null;
  const title = input.command ?? input.filePath ?? input.pattern ?? input.url ?? state.title ?? "";
  const edit = typeof input.oldString === "string" && typeof input.newString === "string";
  const write = name === "write" && typeof input.content === "string";
  return html`<details class="tool ${status}" open=${edit || write || name === "bash"}>
    <summary>
      <span class="name">${name}</span>
      <code>${clip(string(title), 140)}</code>
      <span class="how">${status === "running" || status === "pending" ? "running…" : status === "error" ? "failed" : took !== null ? seconds(took) : ""}</span>
    </summary>
    ${name === "bash" && input.command && html`<pre class="command">${string(input.command)}</pre>`}
    ${edit && html`<${DiffLines} rows=${lines(input.oldString, input.newString)} />`}
    ${write && html`<${DiffLines} rows=${lines("", input.content)} />`}
    ${name === "apply_patch" && typeof input.patchText === "string" && html`<pre class="output">${input.patchText}</pre>`}
    ${!edit && !write && name !== "bash" && Object.keys(input).length > 0 && html`<${Output} text=${string(input)} />`}
    ${!edit && !write && state.output && html`<${Output} text=${string(state.output)} />`}
    ${state.error && html`<p class="wrong">${string(state.error)}</p>`}
  </details>`;
}

function Part({ part }) {
  if (part.type === "text") return part.text ? html`<div class="words">${string(part.text)}</div>` : null;
  if (part.type === "reasoning")
    return part.text ? html`<details class="thought"><summary>Thought</summary><div class="words">${string(part.text)}</div></details>` : null;
  if (part.type === "tool") return html`<${Tool} part=${part} />`;
  return null;
}

/** What the model is saying at this moment. */
function Live({ turn }) {
  return html`<article class="message live" aria-live="polite" aria-busy="true">
    <header>The model speaks<span class="how">${turn.tokens} tokens</span></header>
    ${turn.reasoning && html`<div class="words thought">${turn.reasoning.slice(-4000)}</div>`}
    ${turn.content && html`<div class="words">${turn.content.slice(-20_000)}</div>`}
    ${turn.calls && html`<pre class="output">${turn.calls.slice(-8000)}</pre>`}
    <span class="caret" aria-hidden="true"></span>
  </article>`;
}

export function TranscriptView({ store }) {
  const end = useRef();
  const follow = useRef(true);
  store.version.value;
  const messages = store.transcript.messages();
  const live = [...store.live.values()];
  const told = messages.some((message) => message.role === "user" && message.parts.length);

  useEffect(() => {
    const look = () => {
      follow.current = innerHeight + scrollY > document.documentElement.scrollHeight - 160;
    };
    addEventListener("scroll", look, { passive: true });
    return () => removeEventListener("scroll", look);
  }, []);
  useEffect(() => {
    if (follow.current && !store.ended && scrollY > 0) end.current?.scrollIntoView({ block: "end" });
  });

  return html`<div class="transcript">
    ${!told &&
    store.job &&
    html`<article class="message user"><header>Instruction</header><div class="words">${store.job.task.instruction.trim()}</div></article>`}
    ${messages.map(
      (message) => html`<article class="message ${message.role === "user" ? "user" : "agent"}" key=${message.id}>
        <header>${message.role === "user" ? "Instruction" : store.job?.agent.name ?? "Agent"}</header>
        ${message.parts.map((part, index) => html`<${Part} key=${part.id ?? index} part=${part} />`)}
      </article>`,
    )}
    ${store.transcript.lines.length > 0 && html`<article class="message agent"><header>Printed</header><${Output} text=${store.transcript.lines.join("\n")} /></article>`}
    ${live.map((turn, index) => html`<${Live} key=${index} turn=${turn} />`)}
    ${store.transcript.errors.map((error) => html`<p class="wrong">${error}</p>`)}
    ${!messages.length && !live.length && !store.ended && html`<p class="nothing spin">${store.agent ? "The agent has started; it has not said anything yet." : "The agent has not started yet."}</p>`}
    ${!messages.length && store.ended && html`<p class="nothing">The agent said nothing.</p>`}
    <div ref=${end}></div>
  </div>`;
}
export { Patch };

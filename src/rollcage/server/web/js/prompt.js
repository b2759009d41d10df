// What the model saw in a turn: system prompt, messages, tools, parameters, and the raw prompt token by token.
import { html, useEffect, useState } from "../vendor/preact.js";
import { MODE, request } from "./api.js";
import { Fold } from "./fold.js";
import { Code, Markdown } from "./markdown.js";
import { clip, count, exact, plural } from "./text.js";
import { TokenText } from "./token_text.js";
import { Tip, loadTurn, useTip } from "./tokens.js";

const json = (value) => JSON.stringify(value, null, 2);
const isObject = (value) => value && typeof value === "object" && !Array.isArray(value);
const list = (value) => (Array.isArray(value) ? value : []);

/** The messages of a request, whichever API it speaks: chat, Anthropic's messages, OpenAI's responses. */
function messagesOf(asked) {
  const system = asked.system ?? asked.instructions;
  const first = system ? [{ role: "system", content: system }] : [];
  const rest = Array.isArray(asked.messages) ? asked.messages : Array.isArray(asked.input) ? asked.input : typeof asked.input === "string" ? [{ role: "user", content: asked.input }] : typeof asked.prompt === "string" ? [{ role: "prompt", content: asked.prompt }] : [];
  return [...first, ...rest.filter(isObject)];
}

/** A piece of a message: {text}, or what it is called and its JSON. */
function pieces(message) {
  const content = message.content ?? message.output ?? message.arguments ?? "";
  const found = [];
  for (const each of typeof content === "string" ? [content] : Array.isArray(content) ? content : [content]) {
    if (typeof each === "string") found.push({ text: each });
    else if (typeof each?.text === "string") found.push({ text: each.text });
    else if (typeof each?.thinking === "string") found.push({ text: each.thinking, label: "thinking" });
    else if (typeof each?.content === "string") found.push({ text: each.content, label: each.type });
    else if (/image|audio|file/.test(each?.type ?? "")) found.push({ label: each.type, text: `${exact(JSON.stringify(each).length)} characters, not shown` });
    else if (each !== null && each !== undefined) found.push({ label: each.type ?? "part", code: json(each) });
  }
  if (typeof message.reasoning_content === "string" && message.reasoning_content) found.unshift({ label: "reasoning", text: message.reasoning_content });
  for (const call of list(message.tool_calls)) found.push({ label: `calls ${call?.function?.name ?? "a tool"}`, code: pretty(call?.function?.arguments) });
  return found.filter((piece) => piece.text || piece.code);
}

function pretty(text) {
  try {
    return json(typeof text === "string" ? JSON.parse(text) : text);
  } catch {
    return String(text);
  }
}

const roleOf = (message) => message.role ?? message.type ?? "message";
const TOOLISH = ["tool", "function_call_output"];

function Message({ message, index, open }) {
  const parts = pieces(message);
  const size = parts.reduce((sum, part) => sum + (part.text ?? part.code).length, 0);
  const name = message.name ?? message.tool_call_id ?? message.call_id;
  return html`<${Fold} class="tool said ${roleOf(message)}" name=${`message/${index}`} open=${open} data-step>
    <summary><span class="name">${roleOf(message)}</span><code>${clip(parts.map((part) => part.text ?? part.label).join(" "), 160)}</code><span class="how">${name && `${clip(name, 24)} · `}${exact(size)}</span></summary>
    <div class="inside">${parts.map((part) => html`${part.label && html`<p class="hint">${part.label}</p>`}${part.code ? html`<${Code} text=${part.code} language="json" />` : TOOLISH.includes(roleOf(message)) ? html`<${Code} text=${part.text} />` : html`<${Markdown} text=${part.text} />`}`)}${!parts.length && html`<p class="nothing">It is empty.</p>`}</div>
  <//>`;
}

function Tools({ tools }) {
  if (!tools.length) return html`<p class="hint">No tools were offered.</p>`;
  return tools.map((tool, index) => {
    const it = isObject(tool.function) ? tool.function : tool;
    const schema = it.parameters ?? it.input_schema ?? null;
    return html`<${Fold} class="tool" name=${`tool/${index}`}><summary><span class="name">${it.name ?? tool.type ?? "tool"}</span><code>${clip(it.description, 160)}</code><span class="how">${plural(Object.keys(schema?.properties ?? {}).length, "argument")}</span></summary>
      <div class="inside">${it.description && html`<${Markdown} text=${String(it.description)} />`}${schema && html`<${Code} text=${json(schema)} language="json" />`}</div><//>`;
  });
}

const SHOWN_ELSEWHERE = ["messages", "input", "system", "instructions", "tools", "prompt"];

function Parameters({ asked }) {
  const rows = Object.entries(asked).filter(([name]) => !SHOWN_ELSEWHERE.includes(name));
  return html`<table class="plainly"><tbody>${rows.map(([name, value]) => html`<tr><td><code>${name}</code></td><td>${isObject(value) || Array.isArray(value) ? html`<${Code} text=${json(value)} language="json" />` : String(value)}</td></tr>`)}</tbody></table>`;
}

/** The prompt as the engine counted it. What the log cannot spell is shown by its number, and can be asked for. */
function RawPrompt({ id, turn, onTip }) {
  const [found, setFound] = useState(null);
  const [wrong, setWrong] = useState("");
  const path = `/page/rollouts/${encodeURIComponent(id)}/turns/${turn.seq}/prompt`;
  const ask = (method) => request(path, { method }).then((value) => (setFound(value), setWrong(value.problem)), (error) => setWrong(error.message));
  useEffect(() => void ask("GET"), [path]);
  if (!found) return wrong ? html`<p class="wrong" role="alert">${wrong}</p>` : html`<p class="nothing" role="status">Reading…</p>`;
  if (!found.ids.length) return html`<p class="hint">The engine did not tell the ids of this prompt.</p>`;
  const missing = new Set(found.ids.filter((each) => found.texts[each] === undefined)).size;
  const tokens = found.ids.map((each) => [found.texts[each] ?? `⟨${each}⟩`, each, null, []]);
  return html`<p class="hint">${exact(found.ids.length)} tokens.${missing > 0 && html` The log does not spell ${plural(missing, "of their ids", "of their ids")}; they stand as ⟨numbers⟩.${MODE !== "copy" && html` <button class="quiet" onClick=${() => ask("POST")}>Ask the engine</button>`}`}</p>
    ${wrong && html`<p class="wrong" role="alert">${wrong}</p>`}
    <${TokenText} tokens=${tokens} onTip=${onTip} name="the prompt" />`;
}

function Seen({ id, turn, onTip }) {
  const [whole, setWhole] = useState(null);
  const [wrong, setWrong] = useState("");
  useEffect(() => {
    let gone = false;
    setWhole(null);
    loadTurn(id, turn).then((found) => !gone && (setWhole(found), setWrong("")), (error) => !gone && setWrong(error.message));
    return () => (gone = true);
  }, [turn.seq]);
  const [raw, setRaw] = useState(false);
  if (wrong) return html`<p class="wrong" role="alert">${wrong}</p>`;
  if (!whole) return html`<p class="nothing" role="status">Reading…</p>`;
  const asked = whole.request ?? {};
  const messages = messagesOf(asked);
  const tools = list(asked.tools).filter(isObject);
  return html`<div class="seen">
    <section aria-label="Messages">
      <h2>Messages <small>${exact(messages.length)}</small></h2>
      ${messages.map((message, index) => html`<${Message} key=${`${turn.seq}/${index}`} message=${message} index=${`${turn.seq}/${index}`} open=${index === messages.length - 1 || roleOf(message) === "system"} />`)}
      ${!messages.length && html`<p class="nothing">The request of this turn was not kept.</p>`}
      <h2>Answer</h2>
      <${Message} message=${{ role: "assistant", ...whole.message }} index=${`${turn.seq}/answer`} open=${true} />
    </section>
    <aside aria-label="Request">
      <h2>Parameters</h2><${Parameters} asked=${asked} />
      <h2>Tools <small>${exact(tools.length)}</small></h2><${Tools} tools=${tools} />
    </aside>
    <section class="raw" aria-label="Raw prompt"><h2>Raw prompt <small>${count(turn.prompt_count)} tokens</small></h2>
      ${raw ? html`<${RawPrompt} id=${id} turn=${turn} onTip=${onTip} />` : html`<button onClick=${() => setRaw(true)}>Show it token by token</button>`}</section>
  </div>`;
}

export function PromptView({ store, at }) {
  const [tip, setTip] = useTip();
  store.version.value;
  const { turns } = store;
  if (!turns.length) return html`<p class="nothing">${store.ended ? "The model was never asked." : "No model call has ended yet."}</p>`;
  const here = Math.max(0, turns.findIndex((turn) => turn.index + 1 === Number(at)));
  const turn = turns[at ? here : turns.length - 1] ?? turns[0];
  const place = turns.indexOf(turn);
  const to = (each) => `#/rollouts/${encodeURIComponent(store.id)}/prompt/${each.index + 1}`;
  return html`<div class="promptview">
    <nav class="turnpick" aria-label="Turns">
      ${place > 0 ? html`<a class="button" href=${to(turns[place - 1])} aria-label="The turn before">←</a>` : html`<span class="button off">←</span>`}
      <label>Turn <select aria-label="Turn" value=${String(turn.index + 1)} onChange=${(event) => (location.hash = to({ index: Number(event.target.value) - 1 }))}>${turns.map((each) => html`<option value=${String(each.index + 1)}>${each.index + 1}: ${each.purpose}${each.recorded ? ", recorded" : ""}, ${count(each.prompt_count)} tokens in, ${count(each.token_count)} out</option>`)}</select></label>
      ${place < turns.length - 1 ? html`<a class="button" href=${to(turns[place + 1])} aria-label="The next turn">→</a>` : html`<span class="button off">→</span>`}
      <a href=${`#/rollouts/${encodeURIComponent(store.id)}/tokens`}>Its tokens</a>
    </nav>
    ${turn.error && html`<p class="wrong">${turn.error}</p>`}
    <${Seen} key=${turn.seq} id=${store.id} turn=${turn} onTip=${setTip} />
    ${tip?.at && html`<${Tip} ...${tip} />`}
  </div>`;
}

// Every token the model said, coloured by how sure it was.
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { request } from "./api.js";
import { count, seconds } from "./text.js";

const cache = new Map();
const KEPT = 60;

function load(id, seq) {
  const name = `${id}/${seq}`;
  const found = cache.get(name);
  if (found) {
    cache.delete(name);
    cache.set(name, found);
    return found;
  }
  const asked = request(`/page/rollouts/${encodeURIComponent(id)}/turns/${seq}`);
  asked.catch(() => cache.delete(name));
  cache.set(name, asked);
  if (cache.size > KEPT) cache.delete(cache.keys().next().value);
  return asked;
}

/** How unsure the model was, in nats, from the alternatives it was asked for; what they leave out counts as one more. */
export function entropy(token) {
  const top = token[3] ?? [];
  if (!top.length) return null;
  let left = 1;
  let sum = 0;
  for (const [, , logprob] of top) {
    const chance = Math.exp(logprob);
    left -= chance;
    sum -= chance * logprob;
  }
  return left > 1e-6 ? sum - left * Math.log(left) : sum;
}

function EntropyLine({ tokens }) {
  const values = tokens.map(entropy);
  if (!values.some((value) => value !== null)) return null;
  const most = Math.max(0.5, ...values.map((value) => value ?? 0));
  const width = 600;
  const step = width / Math.max(1, values.length - 1);
  const path = values.map((value, index) => `${index ? "L" : "M"}${(index * step).toFixed(1)} ${(34 - ((value ?? 0) / most) * 32).toFixed(1)}`).join("");
  const mean = values.reduce((sum, value) => sum + (value ?? 0), 0) / values.length;
  return html`<figure class="entropy">
    <svg viewBox="0 0 ${width} 36" preserveAspectRatio="none" role="img" aria-label=${`Entropy along the turn: mean ${mean.toFixed(2)}, at most ${most.toFixed(2)} nats`}>
      <path d=${`${path}L${width} 36L0 36Z`} class="under" /><path d=${path} class="line" />
    </svg>
    <figcaption>entropy, mean ${mean.toFixed(2)}, highest ${most.toFixed(2)} nats</figcaption>
  </figure>`;
}

function shade(logprob) {
  if (logprob === null || logprob === undefined) return "none";
  const chance = Math.exp(logprob);
  return String(Math.min(9, Math.floor((1 - chance) * 10)));
}

function Tip({ token, at }) {
  const [text, id, logprob, top] = token;
  return html`<div class="tip" role="tooltip" style=${{ left: `${at.x}px`, top: `${at.y}px` }}>
    <b>${JSON.stringify(text)}</b>
    <span>id ${id ?? "unknown"}</span>
    <span>${logprob === null ? "no logprob" : `logprob ${logprob.toFixed(4)}, ${(Math.exp(logprob) * 100).toFixed(1)} %`}</span>
    ${top?.length > 0 &&
    html`<table><tbody>${top.map(([other, otherId, value]) => html`<tr class=${otherId === id && other === text ? "chosen" : ""}><td>${JSON.stringify(other)}</td><td>${otherId ?? ""}</td><td>${(Math.exp(value) * 100).toFixed(1)} %</td></tr>`)}</tbody></table>`}
  </div>`;
}

function TokenText({ tokens, onTip }) {
  const box = useRef();
  const [at, setAt] = useState(-1);
  const show = (index) => {
    const element = box.current?.querySelector(`[data-i="${index}"]`);
    if (!element) return onTip(null);
    const place = element.getBoundingClientRect();
    const x = Math.max(8, Math.min(place.left, innerWidth - 300));
    onTip({ token: tokens[index], at: { x, y: place.bottom + 6 > innerHeight - 190 ? place.top - 190 : place.bottom + 6 } });
  };
  const over = (event) => {
    const index = event.target.dataset?.i;
    if (index === undefined) return;
    setAt(Number(index));
    show(Number(index));
  };
  const key = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(tokens.length - 1, at + step));
    setAt(next);
    show(next);
  };
  return html`<div class="tokentext" ref=${box} tabindex="0" role="group" aria-label="Tokens; arrow keys go from one to the next" onMouseOver=${over} onClick=${over} onMouseLeave=${() => onTip(null)} onKeyDown=${key} onBlur=${() => onTip(null)}>
    ${tokens.map(([text, , logprob], index) => html`<span data-i=${index} class=${`t${shade(logprob)}${index === at ? " at" : ""}`}>${text === "" ? "␀" : text.includes("\n") ? text.replaceAll("\n", "↵\n") : text}</span>`)}
  </div>`;
}

function Turn({ id, turn, onTip }) {
  const place = useRef();
  const [near, setNear] = useState(false);
  const [whole, setWhole] = useState(null);
  const [wrong, setWrong] = useState("");

  useEffect(() => {
    const watch = new IntersectionObserver((seen) => setNear(seen.some((each) => each.isIntersecting)), { rootMargin: "600px" });
    watch.observe(place.current);
    return () => watch.disconnect();
  }, []);
  useEffect(() => {
    let gone = false;
    if (!near) setWhole(null);
    else load(id, turn.seq).then((found) => !gone && setWhole(found), (error) => !gone && setWrong(error.message));
    return () => (gone = true);
  }, [near]);

  // The height of what is not drawn is guessed, so that the page does not jump when it is.
  const guess = Math.max(40, Math.ceil(turn.token_count / 16) * 22);
  return html`<article class="turn" ref=${place} id=${`turn-${turn.index}`}>
    <header>
      <b>Turn ${turn.index}</b>
      <span class="tag">${turn.purpose}</span>
      <span>${count(turn.prompt_count)} in, ${count(turn.token_count)} out</span>
      <span>${seconds(turn.seconds)}${turn.first_token_s !== null && turn.first_token_s !== undefined ? `, first token ${seconds(turn.first_token_s)}` : ""}</span>
      <span>${turn.finish_reason ?? "cut"}</span>
      ${turn.trainable ? html`<span class="tag good">trainable</span>` : html`<span class="tag warn" title=${turn.untrainable_reason}>not trainable: ${turn.untrainable_reason || "unknown"}</span>`}
    </header>
    ${turn.error && html`<p class="wrong">${turn.error}</p>`}
    ${wrong && html`<p class="wrong">${wrong}</p>`}
    ${whole
      ? html`<${EntropyLine} tokens=${whole.tokens} /><${TokenText} tokens=${whole.tokens} onTip=${onTip} />`
      : html`<div class="guess" style=${{ height: `${guess + (turn.token_count ? 56 : 0)}px` }}></div>`}
  </article>`;
}

export function TokensView({ store }) {
  const [tip, setTip] = useState(null);
  store.version.value;
  const turns = store.turns;
  if (!turns.length)
    return html`<p class="nothing">${store.ended ? (store.job?.mode === "black_box" ? "This rollout was not recorded: its mode is black_box." : "The model was never asked.") : "No model call has ended yet."}</p>`;
  const trained = turns.filter((turn) => turn.trainable).reduce((sum, turn) => sum + turn.token_count, 0);
  return html`<div class="tokenview" onWheel=${() => setTip(null)}>
    <div class="keyrow">
      <span>${count(turns.length)} turns, ${count(turns.reduce((sum, turn) => sum + turn.token_count, 0))} tokens sampled, ${count(trained)} of them trainable</span>
      <span class="scale" aria-label="Colour: from sure to surprising">sure ${[0, 2, 4, 6, 8, 9].map((level) => html`<i class=${`t${level}`}></i>`)} surprising</span>
    </div>
    ${turns.map((turn) => html`<${Turn} key=${turn.index} id=${store.id} turn=${turn} onTip=${setTip} />`)}
    ${tip && html`<${Tip} ...${tip} />`}
  </div>`;
}

// Every token the model said, coloured by how sure it was.
import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { request } from "./api.js";
import { count, plural, seconds } from "./text.js";
import { TokenText, placeBeside } from "./token_text.js";
import { useNear } from "./virtual.js";

const cache = new Map();
const KEPT = 60;
const KEPT_TOKENS = 100_000;

/** A turn with its tokens. Those looked at last are kept; a few huge ones push out many small ones. */
export function loadTurn(id, turn) {
  const name = `${id}/${turn.seq}`;
  const found = cache.get(name);
  cache.delete(name);
  const asked = found?.asked ?? request(`/page/rollouts/${encodeURIComponent(id)}/turns/${turn.seq}`);
  if (!found) asked.catch(() => cache.delete(name));
  cache.set(name, { asked, tokens: turn.token_count });
  let sum = [...cache.values()].reduce((all, each) => all + each.tokens, 0);
  for (const [old, each] of cache) {
    if (old === name || (cache.size <= KEPT && sum <= KEPT_TOKENS)) break;
    cache.delete(old);
    sum -= each.tokens;
  }
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

const WIDE = 600;

/** One value for each place on the line; where many tokens share a place, the most unsure of them. */
function peaks(values) {
  if (values.length <= WIDE) return values;
  const found = new Array(WIDE).fill(0);
  values.forEach((value, index) => {
    const place = Math.floor((index / values.length) * WIDE);
    found[place] = Math.max(found[place], value ?? 0);
  });
  return found;
}

function EntropyLine({ tokens }) {
  const values = useMemo(() => tokens.map(entropy), [tokens]);
  if (!values.some((value) => value !== null)) return null;
  const highest = values.reduce((a, b) => Math.max(a, b ?? 0), 0);
  const most = Math.max(0.5, highest);
  const drawn = peaks(values);
  const step = WIDE / Math.max(1, drawn.length - 1);
  const path = drawn.map((value, index) => `${index ? "L" : "M"}${(index * step).toFixed(1)} ${(34 - ((value ?? 0) / most) * 32).toFixed(1)}`).join("");
  const mean = values.reduce((sum, value) => sum + (value ?? 0), 0) / values.length;
  return html`<figure class="entropy">
    <svg viewBox="0 0 ${WIDE} 36" preserveAspectRatio="none" role="img" aria-label=${`Entropy along the turn: mean ${mean.toFixed(2)}, at most ${highest.toFixed(2)} nats`}>
      <path d=${`${path}L${WIDE} 36L0 36Z`} class="under" /><path d=${path} class="line" />
    </svg>
    <figcaption>Entropy along the turn: mean ${mean.toFixed(2)}, highest ${highest.toFixed(2)} nats</figcaption>
  </figure>`;
}

const percent = (logprob) => {
  const chance = Math.exp(logprob) * 100;
  return chance < 0.1 ? "< 0.1 %" : `${chance.toFixed(1)} %`;
};
const known = (logprob) => logprob !== null && logprob !== undefined;

export function Tip({ token, at }) {
  const [text, id, logprob, top] = token;
  // Below the token where there is room, else above it.
  const place = at.below ? { left: `${at.x}px`, top: `${at.y}px` } : { left: `${at.x}px`, bottom: `${innerHeight - at.y}px` };
  const line = `${JSON.stringify(text)}, id ${id ?? "unknown"}, ${known(logprob) ? `logprob ${logprob.toFixed(4)}, ${percent(logprob)}` : "no logprob"}`;
  return html`<div class="tip" style=${place} aria-hidden="true">
      <b>${JSON.stringify(text)}</b>
      <span>id ${id ?? "unknown"}</span>
      <span>${known(logprob) ? `logprob ${logprob.toFixed(4)}, ${percent(logprob)}` : "no logprob"}</span>
      ${top?.length > 0 &&
      html`<table><thead><tr><th>instead</th><th>id</th><th>logprob</th><th></th></tr></thead>
        <tbody>${top.map(([other, otherId, value]) => html`<tr class=${otherId === id && other === text ? "chosen" : ""}><td>${JSON.stringify(other)}</td><td>${otherId ?? ""}</td><td>${value.toFixed(2)}</td><td>${percent(value)}</td></tr>`)}</tbody></table>`}
    </div>
    <p class="hidden" role="status">${line}${top?.length > 0 && `; instead ${top.map(([other, , value]) => `${JSON.stringify(other)} ${percent(value)}`).join(", ")}`}</p>`;
}

function Turn({ id, turn, onTip }) {
  const place = useRef();
  const perLine = Math.max(6, Math.floor((Math.min(innerWidth, 1760) - 80) / 38));
  const [near, height] = useNear(place, 34 + (turn.token_count ? 80 + Math.ceil(turn.token_count / perLine) * 22 : 0));
  const [whole, setWhole] = useState(null);
  const [wrong, setWrong] = useState("");

  useEffect(() => {
    let gone = false;
    if (!near) setWhole(null);
    else loadTurn(id, turn).then((found) => !gone && (setWhole(found), setWrong("")), (error) => !gone && setWrong(error.message));
    return () => (gone = true);
  }, [near]);

  const waiting = near && !whole;
  return html`<article class="turn ${waiting ? "waiting" : ""}" ref=${place} id=${`turn-${turn.index}`} aria-label=${`Turn ${turn.index + 1}`} data-step data-drawn=${whole ? "1" : undefined} style=${{ minHeight: whole ? "" : `${height}px` }}>
    ${near && html`<${Facts} id=${id} turn=${turn} />`}
    ${near && turn.error && html`<p class="wrong">${turn.error}</p>`}
    ${near && wrong && html`<p class="wrong">${wrong}</p>`}
    ${near && whole && whole.tokens.length > 0 && html`<${EntropyLine} tokens=${whole.tokens} /><${TokenText} tokens=${whole.tokens} onTip=${onTip} name=${`turn ${turn.index + 1}`} />`}
    ${near && whole && !whole.tokens.length && html`<p class="hint">Nothing was sampled.</p>`}
    ${waiting && html`<div class="guess" aria-hidden="true"></div>`}
  </article>`;
}

function Facts({ id, turn }) {
  return html`<header>
    <b>Turn ${turn.index + 1}</b>
    <span class="tag">${turn.purpose}</span>
    ${turn.recorded && html`<span class="tag" title="Given before, to the rollout that this one is a replay or a fork of">recorded</span>`}
    <span>${count(turn.prompt_count)} tokens in, ${count(turn.token_count)} out</span>
    <span>${seconds(turn.seconds)}${known(turn.first_token_s) ? `, first token after ${seconds(turn.first_token_s)}` : ""}</span>
    <a href=${`#/rollouts/${encodeURIComponent(id)}/prompt/${turn.index + 1}`}>what it saw</a>
    <span title="Why it ended">${turn.finish_reason ?? "cut"}</span>
    ${known(turn.replaces) && html`<span class="tag">repeats turn ${turn.replaces + 1}</span>`}
    ${turn.trainable ? html`<span class="tag good">trainable</span>` : html`<span class="tag warn" title=${turn.untrainable_reason}>not trainable: ${turn.untrainable_reason || "unknown"}</span>`}
  </header>`;
}

/** What is told about the token that is pointed at. It goes where the token goes, and away with it or by Escape. */
export function useTip() {
  const [tip, setTip] = useState(null);
  useEffect(() => {
    if (!tip) return;
    const close = () => setTip(null);
    const scrolled = () => {
      const at = placeBeside(tip.element);
      setTip(at && { ...tip, at });
    };
    addEventListener("scroll", scrolled, { passive: true });
    addEventListener("rollcage-close", close);
    return () => {
      removeEventListener("scroll", scrolled);
      removeEventListener("rollcage-close", close);
    };
  }, [tip]);
  return [tip, setTip];
}

export function TokensView({ store }) {
  const [tip, setTip] = useTip();
  store.version.value;
  const turns = store.turns;
  const sampled = turns.reduce((sum, turn) => sum + turn.token_count, 0);
  const trained = turns.filter((turn) => turn.trainable).reduce((sum, turn) => sum + turn.token_count, 0);
  // Turns never change once they are there: only new ones are drawn.
  const drawn = useMemo(() => turns.map((turn) => html`<${Turn} key=${turn.seq} id=${store.id} turn=${turn} onTip=${setTip} />`), [store, turns.length]);
  if (!turns.length)
    return html`<p class="nothing">${store.ended ? (store.job?.mode === "black_box" ? "This rollout was not recorded: its mode is black_box." : "The model was never asked.") : "No model call has ended yet."}</p>`;
  return html`<div class="tokenview">
    <div class="keyrow">
      <span>${plural(turns.length, "turn")}, ${count(sampled)} tokens sampled, ${trained === sampled ? "all" : count(trained)} of them trainable</span>
      <span class="scale" role="img" aria-label="Colour: from sure to surprising">sure ${[0, 2, 4, 6, 8, 9].map((level) => html`<i class=${`t${level}`}></i>`)} surprising</span>
    </div>
    ${drawn}
    ${tip?.at && html`<${Tip} ...${tip} />`}
  </div>`;
}

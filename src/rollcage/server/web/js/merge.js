// How a rollout's turns join into sequences: what is trained, where and why a sequence breaks.
import { html, useEffect, useState } from "../vendor/preact.js";
import { request } from "./api.js";
import { count, exact, plural, words } from "./text.js";

const KINDS = {
  answer: "The next prompt has other tokens where the answer was.",
  prompt: "What came before the answer changed.",
  shorter: "The next prompt ends before the answer does.",
  branch: "Another turn continues the same one further.",
  untrainable: "It cannot be trained on.",
};

const known = (value) => value !== null && value !== undefined;
const link = (id, turn) => html`<a href=${`#/rollouts/${encodeURIComponent(id)}/tokens`}>turn ${turn + 1}</a>`;

/** A stretch of tokens. Short ones stay visible; the numbers are in its title and beside it. */
function Part({ part, most }) {
  const what = part.trained ? `Turn ${part.turn + 1}: ${plural(part.tokens, "token")}, trained` : `${plural(part.tokens, "token")} of context before turn ${part.turn + 1}`;
  return html`<i class=${part.trained ? "trained" : "context"} style=${{ flexGrow: Math.max(part.tokens, most / 60) }} title=${what}></i>`;
}

/** Where it breaks, and what stood there. */
function Break({ each }) {
  const shown = (text, ids) => (text ? JSON.stringify(text) : ids.join(" "));
  return html`<li class="break" data-step>
    <b>Turn ${each.turn + 1}</b> <span class="tag warn">${each.kind}</span>
    <p>${each.reason || KINDS[each.kind]}</p>
    ${known(each.position) && each.kind !== "untrainable" && html`<p class="hint">${KINDS[each.kind]} At token ${exact(each.position)}${known(each.after) ? `, compared with turn ${each.after + 1}` : ""}.</p>`}
    ${(each.expected.length > 0 || each.found.length > 0) &&
    html`<dl><dt>would go on</dt><dd><code>${shown(each.expected_text, each.expected) || "–"}</code></dd><dt>was found</dt><dd><code>${shown(each.found_text, each.found) || "–"}</code></dd></dl>`}
  </li>`;
}

function Joined({ sequence, id }) {
  const length = sequence.parts.reduce((sum, part) => sum + part.tokens, 0);
  const turns = sequence.parts.filter((part) => part.trained).map((part) => part.turn);
  const versions = [...new Set(sequence.policy_versions.filter(Boolean))];
  return html`<article class="joined" data-step aria-label=${`Sequence ${sequence.index}`}>
    <header>
      <b>Sequence ${sequence.index}</b>
      ${sequence.purpose !== "agent" && html`<span class="tag">${sequence.purpose}</span>`}
      <span>${plural(turns.length, "turn")}: ${turns.map((turn, at) => html`${at > 0 && " → "}${turn + 1}`)}</span>
      <span>${count(length)} tokens, ${count(sequence.trained_tokens)} trained</span>
      ${versions.length > 0 && html`<span title="Weights">weights ${versions.join(", ")}</span>`}
      ${sequence.truncated && html`<span class="tag warn">truncated</span>`}
    </header>
    <div class="stretch" role="img" aria-label=${`${count(sequence.trained_tokens)} of ${count(length)} tokens trained`}>${sequence.parts.map((part) => html`<${Part} part=${part} most=${length} />`)}</div>
    ${sequence.breaks.length > 0 && html`<ul class="plain breaks">${sequence.breaks.map((each) => html`<${Break} each=${each} id=${id} />`)}</ul>`}
  </article>`;
}

export function MergeView({ store }) {
  const [view, setView] = useState(null);
  const [wrong, setWrong] = useState("");
  store.version.value;
  const turns = store.turns.length;
  useEffect(() => {
    let gone = false;
    request(`/rollouts/${encodeURIComponent(store.id)}/merge`).then((found) => !gone && (setView(found), setWrong("")), (error) => !gone && setWrong(error.message));
    return () => (gone = true);
  }, [store, turns, Boolean(store.ended)]);
  if (wrong) return html`<p class="wrong" role="alert">${wrong}</p>`;
  if (!turns) return html`<p class="nothing">${store.ended ? "There is nothing to merge: no model call was recorded." : "No model call has ended yet."}</p>`;
  if (!view) return html`<p class="nothing" role="status">Merging…</p>`;
  const { report, sequences } = view;
  const left = view.turns.filter((turn) => turn.fate !== "trained");
  return html`<div class="mergeview">
    <dl class="numbers">
      <div><dt>Turns</dt><dd>${exact(report.turns)}</dd></div>
      <div><dt>Sequences</dt><dd>${exact(report.sequences)}</dd></div>
      <div><dt>Clean turns</dt><dd>${exact(report.clean)} of ${exact(report.policy_turns)}</dd></div>
      <div><dt>Trained</dt><dd>${count(report.trained_tokens)} of ${count(report.sampled_tokens)}</dd></div>
      <div class=${report.delivered_fraction === 1 ? "good" : "warn"}><dt>Delivered</dt><dd>${(report.delivered_fraction * 100).toFixed(report.delivered_fraction === 1 ? 0 : 1)} %</dd></div>
    </dl>
    <p class="legend"><i class="trained"></i> trained <i class="context"></i> context: prompts and what tools said</p>
    ${sequences.map((sequence) => html`<${Joined} key=${sequence.index} sequence=${sequence} id=${store.id} />`)}
    ${!sequences.length && html`<p class="nothing">Nothing of it can be trained on.</p>`}
    ${left.length > 0 &&
    html`<h2>Not trained</h2>
      <ul class="plain left">${left.map((turn) => html`<li data-step>${link(store.id, turn.index)} <span class="tag">${words(turn.fate)}</span> ${turn.tokens > 0 && html`<small>${plural(turn.tokens, "token")}</small>`} ${turn.reason}</li>`)}</ul>`}
  </div>`;
}

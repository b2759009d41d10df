// The tokens of one turn as text. A long turn is drawn in pieces, those near what is seen.
import { html, useEffect, useMemo, useRef } from "../vendor/preact.js";
import { useNear } from "./virtual.js";

const PIECE = 1000;
const LINE_PX = 21.3;
const CHARACTER_PX = 7.75;

/** From, to: after the end of a line where there is one, so that nobody sees the cut. */
export function pieces(tokens) {
  const found = [];
  let from = 0;
  let line = 0;
  for (let index = 1; index <= tokens.length; index += 1) {
    if (tokens[index - 1][0].endsWith("\n")) line = index;
    if (index - from < PIECE) continue;
    const to = line > from + PIECE / 2 ? line : index;
    found.push([from, to]);
    from = to;
  }
  if (from < tokens.length) found.push([from, tokens.length]);
  return found;
}

function guess(tokens, from, to) {
  const wide = Math.max(10, Math.floor((Math.min(innerWidth, 1760) - 78) / CHARACTER_PX));
  const lines = tokens.slice(from, to).map(([text]) => text).join("").replace(/\n$/, "").split("\n");
  return lines.reduce((sum, text) => sum + Math.max(1, Math.ceil(text.length / wide)), 0) * LINE_PX;
}

function shade(logprob) {
  if (logprob === null || logprob === undefined) return "none";
  return String(Math.min(9, Math.floor((1 - Math.exp(logprob)) * 10)));
}

const shown = (text) => (text === "" ? "␀" : text.includes("\n") ? text.replaceAll("\n", "↵\n") : text);

function Piece({ tokens, from, to, lazy, onDrawn }) {
  const place = useRef();
  const [near, height] = useNear(place, useMemo(() => (lazy ? guess(tokens, from, to) : 0), [tokens, lazy]), lazy);
  useEffect(() => {
    if (near) onDrawn(from, to);
  }, [near]);
  const drawn = useMemo(
    () => near && tokens.slice(from, to).map(([text, , logprob], index) => html`<span data-i=${from + index} class=${`t${shade(logprob)}`}>${shown(text)}</span>`),
    [tokens, near],
  );
  return html`<div ref=${place} class=${near ? "" : "guess"} data-from=${from} data-drawn=${near ? "1" : undefined} style=${{ height: near ? "" : `${height}px` }}>${drawn}</div>`;
}

/** Where on the screen to tell about a token: below it where there is room; null where it is out of sight. */
export function placeBeside(element) {
  const place = element.getClientRects()[0];
  if (!place || place.bottom < 0 || place.top > innerHeight) return null;
  const below = place.bottom + 220 < innerHeight || place.top < 220;
  const x = Math.max(8, Math.min(place.left, innerWidth - 318));
  return { x, y: below ? place.bottom + 6 : place.top - 6, below };
}

/** `onTip` gets the token that is pointed at, with its place on the screen, or null. */
export function TokenText({ tokens, onTip, name }) {
  const box = useRef();
  const at = useRef(-1);
  const awaited = useRef(-1);
  const parts = useMemo(() => pieces(tokens), [tokens]);
  const find = (index) => box.current?.querySelector(`[data-i="${index}"]`);
  // Marked by hand: drawing thousands of tokens again for one outline is what makes a pointer stutter.
  const unmark = () => box.current?.querySelector(".at")?.classList.remove("at");
  const show = (index) => {
    unmark();
    const element = find(index);
    at.current = index;
    if (!element) return onTip(null);
    element.classList.add("at");
    onTip({ token: tokens[index], element, at: placeBeside(element) });
  };
  const go = (index) => {
    find(index).scrollIntoView({ block: "nearest" });
    show(index);
  };
  const drawn = (from, to) => {
    const index = awaited.current;
    if (index < from || index >= to) return;
    awaited.current = -1;
    go(index);
  };
  const over = (event) => {
    const index = event.target.dataset?.i;
    if (index !== undefined) show(Number(index));
  };
  const leave = () => {
    unmark();
    onTip(null);
  };
  const key = (event) => {
    const next = { ArrowRight: at.current + 1, ArrowLeft: at.current - 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const index = Math.max(0, Math.min(tokens.length - 1, next));
    awaited.current = -1;
    if (find(index)) return go(index);
    // It is in a piece that is not drawn yet: that one is brought near first.
    awaited.current = at.current = index;
    const [from] = parts.findLast(([first]) => first <= index);
    box.current.querySelector(`[data-from="${from}"]`).scrollIntoView({ block: index - from > PIECE / 2 ? "end" : "start" });
  };
  return html`<div class="tokentext" ref=${box} tabindex="0" role="group" aria-label=${`Tokens of ${name}; the arrow keys go from one to the next`} onMouseOver=${over} onClick=${over} onMouseLeave=${leave} onKeyDown=${key} onBlur=${leave}>
    ${parts.map(([from, to]) => html`<${Piece} key=${from} tokens=${tokens} from=${from} to=${to} lazy=${parts.length > 1} onDrawn=${drawn} />`)}
  </div>`;
}

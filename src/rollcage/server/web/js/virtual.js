// Long lists: only what can be seen is drawn.
import { html, useEffect, useLayoutEffect, useRef, useState } from "../vendor/preact.js";

const SPARE = 8;

/**
 * Rows of one height. `draw(index)` gives a row and `keyOf(index)` its name; `focus` is kept in view.
 * Rows that come above what is looked at do not move it; a change of `view` begins at the top again.
 */
export function Virtual({ count, height, draw, keyOf, items, view, top = 0, onTop, focus = -1, label, className = "", most, children }) {
  const box = useRef();
  const [span, setSpan] = useState([0, 40]);
  const anchor = useRef(null);
  const shown = useRef(view);

  useLayoutEffect(() => {
    const element = box.current;
    let waiting = false;
    const look = () => {
      waiting = false;
      const first = Math.floor(element.scrollTop / height);
      const last = Math.ceil((element.scrollTop + element.clientHeight) / height) + SPARE;
      setSpan(([a, b]) => (a === Math.max(0, first - SPARE) && b === last ? [a, b] : [Math.max(0, first - SPARE), last]));
      anchor.current = first;
      onTop?.(element.scrollTop);
    };
    const soon = () => {
      if (!waiting) {
        waiting = true;
        requestAnimationFrame(look);
      }
    };
    if (top) element.scrollTop = top;
    look();
    element.addEventListener("scroll", soon, { passive: true });
    const sizes = new ResizeObserver(soon);
    sizes.observe(element);
    return () => {
      element.removeEventListener("scroll", soon);
      sizes.disconnect();
    };
  }, [height]);

  const before = useRef(null);
  useLayoutEffect(() => {
    const element = box.current;
    const at = anchor.current;
    if (shown.current !== view) {
      shown.current = view;
      element.scrollTop = 0;
    } else if (at && before.current && element.scrollTop > 0) {
      const name = before.current(at);
      let index = at;
      if (name !== undefined && keyOf(at) !== name) {
        for (index = 0; index < count; index += 1) if (keyOf(index) === name) break;
        if (index < count) element.scrollTop += (index - at) * height;
      }
    }
    before.current = keyOf;
  }, [items, view]);

  // Only a step of the reader's scrolls: the same row at another place does not.
  const name = focus < 0 ? undefined : keyOf(focus);
  const stepped = useRef(name);
  useEffect(() => {
    const element = box.current;
    if (focus < 0 || stepped.current === name) return;
    stepped.current = name;
    const row = focus * height;
    if (row < element.scrollTop) element.scrollTop = row;
    else if (row + height > element.scrollTop + element.clientHeight - 40)
      element.scrollTop = row + height - element.clientHeight + 40;
  }, [name, height]);

  const last = Math.min(span[1], count);
  const first = Math.min(span[0], count);
  const rows = [];
  for (let index = first; index < last; index += 1) rows.push(draw(index));
  return html`<div class="virtual ${className}" style=${{ maxHeight: most ? `${most}px` : "" }} ref=${box} tabindex="0" role="table" aria-label=${label} aria-rowcount=${count + 1}>
    ${children}
    <div class="virtual-space" role="rowgroup" style=${{ height: `${count * height}px` }}>
      <div class="virtual-rows" style=${{ transform: `translateY(${first * height}px)` }}>${rows}</div>
    </div>
  </div>`;
}

const callbacks = new WeakMap();
const watch = new IntersectionObserver(
  (seen) => {
    for (const each of seen) callbacks.get(each.target)?.(each.isIntersecting);
  },
  { rootMargin: "900px 0px" },
);

/** Whether an element is in view or nearly so (always, where not `lazy`), and the height it had when it last was. */
export function useNear(place, guess, lazy = true) {
  const [near, setNear] = useState(false);
  const height = useRef(guess);
  useEffect(() => {
    if (!lazy) return;
    const element = place.current;
    callbacks.set(element, (is) => {
      // What leaves keeps its place: the page must not jump.
      if (!is && element.dataset.drawn) height.current = element.offsetHeight;
      setNear(is);
    });
    watch.observe(element);
    return () => watch.unobserve(element);
  }, [lazy]);
  return [near || !lazy, height.current];
}

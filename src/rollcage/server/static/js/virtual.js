// Shows the visible rows of a long list and nothing else.
import { html, useEffect, useLayoutEffect, useRef, useState } from "../vendor/preact.js";

const SPARE = 8;

/** `draw(index)` gives one row; rows are `height` pixels high. `focus` is kept in view. */
export function Virtual({ count, height, draw, focus = -1, label, children }) {
  const box = useRef();
  const [span, setSpan] = useState([0, 40]);

  useLayoutEffect(() => {
    const element = box.current;
    let waiting = false;
    const look = () => {
      waiting = false;
      const first = Math.max(0, Math.floor(element.scrollTop / height) - SPARE);
      const last = Math.ceil((element.scrollTop + element.clientHeight) / height) + SPARE;
      setSpan(([a, b]) => (a === first && b === last ? [a, b] : [first, last]));
    };
    const soon = () => {
      if (!waiting) {
        waiting = true;
        requestAnimationFrame(look);
      }
    };
    look();
    element.addEventListener("scroll", soon, { passive: true });
    const sizes = new ResizeObserver(soon);
    sizes.observe(element);
    return () => {
      element.removeEventListener("scroll", soon);
      sizes.disconnect();
    };
  }, [height]);

  useEffect(() => {
    const element = box.current;
    if (focus < 0) return;
    const top = focus * height;
    if (top < element.scrollTop) element.scrollTop = top;
    else if (top + height > element.scrollTop + element.clientHeight - 40)
      element.scrollTop = top + height - element.clientHeight + 40;
  }, [focus, height]);

  const last = Math.min(span[1], count);
  const rows = [];
  for (let index = Math.min(span[0], count); index < last; index += 1) rows.push(draw(index));
  return html`<div class="virtual" ref=${box} tabindex="0" role="table" aria-label=${label} aria-rowcount=${count + 1}>
    ${children}
    <div class="virtual-space" role="rowgroup" style=${{ height: `${count * height}px` }}>
      <div class="virtual-rows" style=${{ transform: `translateY(${Math.min(span[0], count) * height}px)` }}>${rows}</div>
    </div>
  </div>`;
}

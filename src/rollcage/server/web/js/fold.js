// What the reader opened or closed stays so, also where it is drawn anew: far away a long transcript is not drawn at all.
import { createContext, html, useContext, useState } from "../vendor/preact.js";

/** By name, what was opened (true) or closed (false) by hand. */
export const Opened = createContext(new Map());

/** A `<details>` that is `open` until the reader says otherwise. */
export function Fold({ name, open = false, children, ...more }) {
  const opened = useContext(Opened);
  const toggled = ({ currentTarget }) => {
    if (currentTarget.open === open) opened.delete(name);
    else opened.set(name, currentTarget.open);
  };
  return html`<details ...${more} open=${opened.get(name) ?? open} onToggle=${toggled}>${children}</details>`;
}

/** Whether the reader wanted all of something, and how to say so. */
export function useWhole(name) {
  const opened = useContext(Opened);
  const [whole, setWhole] = useState(opened.get(name) ?? false);
  const set = (value) => {
    opened.set(name, value);
    setWhole(value);
  };
  return [whole, set];
}

// Batches as the server reports them: asked again while something runs, less often the longer an answer takes.
import { useEffect, useState } from "../vendor/preact.js";
import { MODE, request, visit } from "./api.js";

const SOON_MS = 1500;
const LATER_MS = 15_000;
const GOING = ["new", "running", "paused"];

/** What is at a path: {value, problem}. `going(value)` says whether it may change soon. */
export function useAsked(path, going = () => false) {
  const [state, setState] = useState({ value: null, problem: null });
  useEffect(() => {
    let timer;
    let gone = false;
    const ask = async () => {
      const began = performance.now();
      let wait = LATER_MS;
      try {
        const value = await request(path);
        if (gone) return;
        setState({ value, problem: null });
        if (going(value)) wait = Math.max(SOON_MS, 9 * (performance.now() - began));
      } catch (problem) {
        if (gone) return;
        setState((before) => ({ ...before, problem }));
      }
      if (MODE !== "copy") timer = setTimeout(ask, document.hidden ? LATER_MS : wait);
    };
    setState({ value: null, problem: null });
    ask();
    return () => {
      gone = true;
      clearTimeout(timer);
    };
  }, [path, visit.value]);
  return state;
}

export const isGoing = (report) => GOING.includes(report.status);
export const useBatches = () => useAsked("/batches?limit=100", (page) => page.batches.some(isGoing));
export const useBatch = (name) => useAsked(`/batches/${encodeURIComponent(name)}`, isGoing);
export const batchAddress = (name, query = "") => `#/batches/${encodeURIComponent(name)}${query ? `?${query}` : ""}`;

// Every rollout the page knows, kept up to date by one stream.
import { computed, signal } from "../vendor/preact.js";
import { follow, link } from "./api.js";

const rows = new Map();
/** Grows with each change of `rows`; whoever reads rows reads this first. */
const version = signal(0);
/** "loading", "ready" or "failed". */
export const loading = signal("loading");
export const problem = signal("");
export const now = signal(Date.now() / 1000);
setInterval(() => (now.value = Date.now() / 1000), 1000);

let scheduled = false;
function changed() {
  if (scheduled) return;
  scheduled = true;
  // A page in the background gets no frames, and must be right when somebody looks again.
  setTimeout(() => {
    scheduled = false;
    version.value += 1;
  }, 50);
}

function take(list) {
  for (const row of list) rows.set(row.rollout_id, row);
  if (list.length) changed();
}

/** Newest first. */
export const all = computed(() => {
  version.value;
  return [...rows.values()].sort((a, b) => b.started_at - a.started_at || (a.rollout_id < b.rollout_id ? 1 : -1));
});

let stop = null;
export function open() {
  stop ??= follow("/page/board", {
    onEvent: (event, data) => {
      if (event === "rollouts") take(data);
      if (event === "ready" || data?.length) loading.value = "ready";
    },
    onState: (state, error) => {
      link.value = ({ live: "live", ended: "copy", refused: "refused" })[state] ?? "lost";
      if (state === "refused") {
        problem.value = error.message;
        loading.value = "failed";
      }
    },
  });
}

/** Begin again, with another key: what the one before saw is forgotten. */
export function restart() {
  stop?.();
  stop = null;
  rows.clear();
  loading.value = "loading";
  changed();
  open();
}

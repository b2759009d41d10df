// Rollouts that came from one another: replays and forks, as a tree.
import { html, useMemo } from "../vendor/preact.js";
import { all } from "./runs_store.js";
import { plural, reward, standing, words } from "./text.js";

/** The turn, from 1, at which a fork begins: its group names it. A replay of a fork is in that group, too. */
const turnOf = (row) => (row.origin_how === "replay" ? 0 : Number(/^fork:.*:(\d+)(?::|$)/.exec(row.group_id)?.[1] ?? 0));

/** Everything that is related to a rollout: the first of them, with what came from each. Null where it stands alone. */
export function treeOf(rows, id) {
  const byId = new Map(rows.map((row) => [row.rollout_id, row]));
  const children = new Map();
  for (const row of rows) if (row.origin) children.set(row.origin, [...(children.get(row.origin) ?? []), row]);
  let root = id;
  const seen = new Set();
  while (byId.get(root)?.origin && !seen.has(root)) {
    seen.add(root);
    root = byId.get(root).origin;
  }
  if (!children.has(root)) return null;
  const grow = (name, depth) => {
    const under = depth > 30 ? [] : (children.get(name) ?? []);
    const turns = [...new Set(under.map(turnOf))].sort((a, b) => a - b);
    return { id: name, row: byId.get(name), points: turns.map((turn) => ({ turn, nodes: under.filter((row) => turnOf(row) === turn).map((row) => grow(row.rollout_id, depth + 1)) })) };
  };
  return grow(root, 0);
}

function Node({ node, here }) {
  const { row } = node;
  return html`<div class="node ${node.id === here ? "here" : ""}">
      <a href=${`#/rollouts/${encodeURIComponent(node.id)}`} aria-current=${node.id === here ? "page" : undefined}><code>${node.id}</code></a>
      ${row ? html`<span class="progress ${standing(row)}"><i class="mark" aria-hidden="true"></i>${words(row.outcome ?? row.stage)}</span><b>${reward(row.reward)}</b><small>${row.model}, ${plural(row.proxy_turns_so_far, "turn")}</small>` : html`<small>not in this list</small>`}
    </div>
    ${node.points.length > 0 && html`<ul>${node.points.map((point) => {
      const known = point.nodes.map((each) => each.row.reward).filter((value) => value !== null);
      const mean = known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
      return html`<li><p class="point">${point.turn ? `at turn ${point.turn}` : "replayed"}${point.nodes.length > 1 && html`: <small>${point.nodes.length} continuations, mean reward ${reward(mean)}</small>`}</p><ul>${point.nodes.map((each) => html`<li key=${each.id}><${Node} node=${each} here=${here} /></li>`)}</ul></li>`;
    })}</ul>`}`;
}

export const useTree = (id) => useMemo(() => treeOf(all.value, id), [all.value, id]);

export function ForksView({ store }) {
  const tree = useTree(store.id);
  if (!tree) return html`<p class="nothing">Nothing was forked from it. <code>rollcage fork ${store.id.slice(0, 8)} --at 2 -n 4 -m MODEL</code> goes on live from its second turn.</p>`;
  return html`<div class="tree"><${Node} node=${tree} here=${store.id} /></div>`;
}

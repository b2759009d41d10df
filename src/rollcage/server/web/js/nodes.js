// The machines of a cluster, above the list of rollouts; nothing where the server runs them itself.
import { html, useEffect, useState } from "../vendor/preact.js";
import { request, visit } from "./api.js";
import { exact, plural } from "./text.js";

const LOOK_MS = 3000;

export function Nodes() {
  const [nodes, setNodes] = useState([]);
  useEffect(() => {
    let timer = 0;
    let stopped = false;
    const look = async () => {
      try {
        const found = await request("page/nodes");
        if (stopped) return;
        setNodes(found.nodes);
        // A server without a cluster never gets one.
        if (found.cluster) timer = setTimeout(look, LOOK_MS);
      } catch {
        if (!stopped) timer = setTimeout(look, 4 * LOOK_MS);
      }
    };
    look();
    return () => ((stopped = true), clearTimeout(timer));
  }, [visit.value]);
  if (!nodes.length) return null;
  const sum = (name) => nodes.reduce((total, node) => total + node[name], 0);
  return html`<details class="nodes">
    <summary>${plural(nodes.length, "node")}, ${exact(sum("running"))} of ${exact(sum("places"))} places taken</summary>
    <table>
      <thead><tr><th>Node</th><th>Address</th><th>State</th><th>Rollouts</th><th>Calls</th><th>Load</th><th>Images</th></tr></thead>
      <tbody>
        ${nodes.map(
          (node) => html`<tr key=${node.id} title=${node.problem || node.id}>
            <td><code>${node.id.slice(0, 12)}</code></td><td>${node.address}</td><td>${node.state}</td>
            <td>${exact(node.running)} of ${exact(node.places)}</td><td>${exact(node.calls)}</td><td>${node.load.toFixed(1)}</td>
            <td>${node.problem || node.images.join(", ") || "–"}</td>
          </tr>`,
        )}
      </tbody>
    </table>
  </details>`;
}

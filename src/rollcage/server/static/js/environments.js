// Remote environments: what tools they offer, and a form to call one.
import { html } from "../vendor/preact.js";

export function Environments() {
  return html`<section class="state"><h1>Environments</h1><p>No remote environment is connected to this server.</p></section>`;
}

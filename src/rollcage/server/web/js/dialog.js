// A button that asks before it does something that cannot be undone.
import { html, useRef } from "../vendor/preact.js";

export function Asking({ label, title, yes, no, onYes, disabled = false, children }) {
  const dialog = useRef();
  const answer = (event) => {
    event.preventDefault();
    dialog.current.close();
    onYes();
  };
  return html`<button class="danger" disabled=${disabled} onClick=${() => dialog.current.showModal()}>${label}</button>
    <dialog ref=${dialog} class="login" aria-label=${title} onClick=${(event) => event.target === dialog.current && dialog.current.close()}>
      <form onSubmit=${answer}><h2>${title}</h2><p>${children}</p>
        <div class="answersrow"><button type="button" autofocus onClick=${() => dialog.current.close()}>${no}</button><button class="danger">${yes}</button></div>
      </form>
    </dialog>`;
}

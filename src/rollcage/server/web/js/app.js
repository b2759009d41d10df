// The shell: which view is shown, the bar above it, the keyboard.
import { html, render, signal, useEffect, useRef } from "../vendor/preact.js";
import { MODE, hasKey, link, locked, setKey, unfit, visit } from "./api.js";
import { BatchPage } from "./batch.js";
import { Batches } from "./batches.js";
import { Compare } from "./compare.js";
import { Environments } from "./environments.js";
import { RolloutView } from "./rollout.js";
import { list, route } from "./route.js";
import { Runs } from "./runs.js";
import { open, restart } from "./runs_store.js";
import { Try } from "./try.js";

const THEMES = ["auto", "light", "dark"];
const theme = signal(localStorage.getItem("rollcage-theme") ?? "auto");
function applyTheme() {
  const chosen = theme.value === "auto" ? "light dark" : theme.value;
  document.documentElement.style.colorScheme = chosen;
  localStorage.setItem("rollcage-theme", theme.value);
}
applyTheme();

const NAV = [
  ["#/", "Runs"],
  ["#/batches", "Batches"],
  ...(MODE === "serve" ? [["#/try", "Try"], ["#/environments", "Environments"]] : []),
];

function Bar({ at }) {
  const next = THEMES[(THEMES.indexOf(theme.value) + 1) % THEMES.length];
  const said = { live: "Live", connecting: "Connecting", lost: "Connection lost, trying again", refused: "Refused", copy: "A copy" };
  return html`<header class="bar">
    <a class="brand" href="#/"><img src="icon.svg" alt="" width="24" height="24" />rollcage</a>
    <nav aria-label="Views">
      ${NAV.map(
        ([href, name]) => html`<a href=${href} aria-current=${at === href ? "page" : undefined}>${name}</a>`,
      )}
    </nav>
    <span class="link ${link.value}" role="status" title=${said[link.value]}><i></i><span>${said[link.value]}</span></span>
    <button
      class="quiet"
      title=${`Colours: ${theme.value}; switch to ${next}`}
      aria-label=${`Colours: ${theme.value}; switch to ${next}`}
      onClick=${() => {
        theme.value = next;
        applyTheme();
      }}
    >
      ${{ auto: "◐", light: "☀", dark: "☾" }[theme.value]}
    </button>
    ${hasKey() &&
    html`<button class="quiet" onClick=${() => (setKey(""), location.reload())}>Log out</button>`}
  </header>`;
}

function Login() {
  const dialog = useRef();
  const input = useRef();
  useEffect(() => dialog.current.showModal(), []);
  const enter = (event) => {
    event.preventDefault();
    dialog.current.close();
    setKey(input.current.value.trim());
    restart();
  };
  return html`<dialog ref=${dialog} class="login" onCancel=${(event) => event.preventDefault()}>
    <form onSubmit=${enter}>
      <h2>This server asks for a key</h2>
      <p>Whoever runs it has one for you. It stays in this tab.</p>
      <label>API key <input ref=${input} type="password" autocomplete="off" required autofocus aria-invalid=${unfit.value} aria-describedby=${unfit.value ? "unfit" : undefined} /></label>
      ${unfit.value && html`<p class="wrong" id="unfit" role="alert">The server does not know that key.</p>`}
      <button class="main">Log in</button>
    </form>
  </dialog>`;
}

const decoded = (text) => {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
};

function view(path) {
  const [address, query = ""] = path.split(/\?(.*)/s);
  const [, name = "", id = "", part = "", at = ""] = address.split("/").map(decoded);
  if (name === "rollouts" && id) return html`<${RolloutView} key=${`${visit.value}/${id}`} id=${id} part=${part || "transcript"} at=${at} />`;
  if (name === "batches") return id ? html`<${BatchPage} key=${id} name=${id} query=${query} />` : html`<${Batches} query=${query} />`;
  if (name === "compare" && id && part) return html`<${Compare} key=${address} first=${id} second=${part} query=${query} />`;
  if (name === "try" && MODE === "serve") return html`<${Try} />`;
  if (name === "environments" && MODE === "serve") return html`<${Environments} key=${visit.value} name=${id} />`;
  return html`<${Runs} query=${query} />`;
}

const TITLES = { "#/": "Runs", "#/batches": "Batches", "#/try": "Try", "#/environments": "Environments" };

function App() {
  const path = route.value;
  const at = path.startsWith("#/try") ? "#/try" : path.startsWith("#/env") ? "#/environments" : /^#\/(batches|compare)/.test(path) ? "#/batches" : "#/";
  useEffect(() => open(), []);
  // A rollout gives its own title once it knows its task.
  useEffect(() => {
    if (!/^#\/(rollouts|batches|compare)\//.test(path)) document.title = `${TITLES[at]} · rollcage`;
  }, [path]);
  return html`<${Bar} at=${at} />
    <main>${view(path)}</main>
    ${locked.value && html`<${Login} key=${visit.value} />`}`;
}

const typing = (target) => target.closest?.("input, textarea, select, [contenteditable]");

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") {
    if (typing(event.target)) event.target.blur();
    else if (document.querySelector(".tip")) dispatchEvent(new CustomEvent("rollcage-close"));
    else if (location.hash.startsWith("#/rollouts/")) location.hash = list.value;
    else if (/^#\/(batches|compare)\//.test(location.hash)) location.hash = "#/batches";
    else if (location.hash.startsWith("#/environments/")) location.hash = "#/environments";
    return;
  }
  if (typing(event.target)) return;
  if (event.key === "/") {
    const search = document.querySelector("input[type=search]");
    if (search) {
      event.preventDefault();
      search.focus();
    }
  } else if (event.key === "j" || event.key === "k") {
    dispatchEvent(new CustomEvent("rollcage-step", { detail: event.key === "j" ? 1 : -1 }));
  } else if (event.key === "Enter" && !event.target.closest?.("a, button, summary")) {
    dispatchEvent(new CustomEvent("rollcage-enter"));
  }
});

const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);

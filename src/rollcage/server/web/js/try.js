// A form for one rollout.
import { html, useEffect, useState } from "../vendor/preact.js";
import { Refused, request } from "./api.js";
import { SchemaField, argumentsOf, fieldsOf } from "./schema_form.js";

/** The arguments that are laid out; all others are below "All arguments". What each is comes from the server. */
const LAID_OUT = ["instruction", "setup", "verify", "endpoint", "task_id", "base_url", "model", "api_key", "agent_timeout_s", "timeout_s", "max_turns", "max_tokens_cap", "temperature"];
const LIMITS = ["agent_timeout_s", "timeout_s", "max_turns", "max_tokens_cap", "temperature"];

const typeOf = (field) => field.type ?? field.anyOf?.find((one) => one.type !== "null")?.type;
const choicesOf = (field) => Object.entries(field["x-choices"] ?? {});

/** The form before anything is typed: each argument's default, as text. */
function emptyForm(schema) {
  const text = (field) => (typeOf(field) === "array" ? "" : String(field.default ?? ""));
  const form = Object.fromEntries(LAID_OUT.map((name) => [name, text(schema.properties[name])]));
  const choices = choicesOf(schema.properties.endpoint).map(([value]) => value);
  return { ...form, endpoint: choices.includes("scripted") ? "scripted" : choices[0] };
}

/** What was typed, for whoever looks at something else and comes back; a key is not kept. */
let draft = null;

const commands = (text) => text.split("\n").map((line) => line.trimEnd()).filter((line) => line.trim());

/** The body of the request, and what of the form is no number. */
function bodyOf(form, hidden, schema) {
  const body = { ...hidden, instruction: form.instruction };
  const wrong = {};
  for (const name of LAID_OUT.slice(1)) {
    const type = typeOf(schema.properties[name]);
    const text = form[name].trim();
    if (type === "array") body[name] = commands(form[name]);
    else if (type === "string" && text) body[name] = text;
    else if (type !== "string" && text) {
      if (Number.isFinite(Number(text))) body[name] = Number(text);
      else wrong[name] = "This is no number.";
    }
  }
  if (form.endpoint !== "scripted") delete body.solution;
  if (!form.instruction.trim()) wrong.instruction = "Say what the agent should do.";
  return { body, wrong };
}

/** What the server finds wrong, in the words of this form: arguments are called what their fields are called. */
function inOurWords({ message, remedy }, schema) {
  const spelled = (remedy ?? "").replace(/\{(\w+)\}/g, (whole, name) => `“${schema.properties[name]?.title ?? name}”`);
  const said = message.charAt(0).toUpperCase() + message.slice(1);
  return spelled ? `${said}; ${spelled}.` : /[.!?]$/.test(said) ? said : `${said}.`;
}

/** One argument: its title and its words are the server's. */
function Field({ name, field, wrong, children }) {
  const id = `field-${name}`;
  return html`<div class="field ${wrong ? "invalid" : ""}">
    <label for=${id}>${field.title ?? name}</label>
    <p class="hint" id=${`${id}-hint`}>${(field.description ?? "").replaceAll("`", "")}</p>
    ${children(id, wrong ? `${id}-wrong` : `${id}-hint`)}
    ${wrong && html`<p class="wrong" id=${`${id}-wrong`} role="alert">${wrong}</p>`}
  </div>`;
}

const examplesOf = () => fetch(new URL("examples.json", document.baseURI)).then((answer) => answer.json());

/** The form, once all that goes into it is there: nothing is put into a field in which somebody may be typing. */
export function Try() {
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    Promise.all([request("/page/arguments"), examplesOf().catch(() => [])]).then(setFound, (error) => setProblem(error.message));
  }, []);
  if (!found) return html`<section class="try"><h1>Try a rollout</h1><p class="lead">${problem || "…"}</p></section>`;
  return html`<${Form} schema=${found[0]} list=${found[1]} />`;
}

/** What an example puts into the form. */
function filled({ about, request: body }, empty) {
  const { instruction, task_id, setup = [], verify = [], agent_timeout_s, ...hidden } = body;
  const form = { ...empty, task_id, instruction, setup: setup.join("\n"), verify: verify.join("\n"), agent_timeout_s: String(agent_timeout_s ?? empty.agent_timeout_s) };
  return { form, hidden, typed: {}, picked: about.name };
}

function Form({ schema, list }) {
  const empty = emptyForm(schema);
  const nothing = { form: empty, hidden: {}, typed: {}, picked: "" };
  const [first] = useState(() => draft ?? (list.length ? filled(list[0], empty) : nothing));
  const others = fieldsOf(schema).filter((field) => !LAID_OUT.includes(field.name));
  const [form, setForm] = useState(first.form);
  const [hidden, setHidden] = useState(first.hidden);
  const [typed, setTyped] = useState(first.typed);
  const [showAll, setShowAll] = useState(false);
  const [examples, setExamples] = useState(list.filter((example) => !example.request.environment));
  const [picked, setPicked] = useState(first.picked);
  const [wrong, setWrong] = useState({});
  const [busy, setBusy] = useState(false);
  useEffect(() => void (draft = { form: { ...form, api_key: "" }, hidden, typed: { ...typed, hf_token: undefined }, picked }), [form, hidden, typed, picked]);

  const pick = (next) => {
    setPicked(next.picked);
    setForm(next.form);
    setHidden(next.hidden);
    setTyped(next.typed);
    setWrong({});
  };

  useEffect(() => {
    // Those that work on a remote environment are offered where the server reaches it.
    const known = ({ environments }) => ["", ...environments.map((one) => one.name)];
    request("/environments").then((answer) => setExamples(list.filter((example) => known(answer).includes(example.request.environment ?? ""))), () => {});
  }, []);

  const set = (name) => (event) => {
    setForm({ ...form, [name]: event.target.value });
    setWrong({ ...wrong, [name]: undefined });
  };

  const run = async (event) => {
    event.preventDefault();
    setBusy(true);
    setWrong({});
    try {
      const { body, wrong: ours } = bodyOf(form, { ...hidden, ...argumentsOf(others, typed) }, schema);
      const { problems } = await request("/page/check", { method: "POST", body });
      const found = Object.fromEntries(problems.map((each) => [each.argument || "form", inOurWords(each, schema)]));
      const all = { ...found, ...ours };
      if (!Object.keys(all).length) {
        const started = await request("/rollouts", { method: "POST", body });
        location.hash = `#/rollouts/${started.rollout_id}`;
        return;
      }
      show(all);
    } catch (error) {
      show({ [String(error.argument ?? "").split(".")[0] || "form"]: error instanceof Refused ? error.message : `No answer from the server: ${error.message}` });
    } finally {
      setBusy(false);
    }
  };

  /** Each beside its field; a field that is folded away is shown. What has no field is said below. */
  const show = (all) => {
    const known = (name) => LAID_OUT.includes(name) || others.some((field) => field.name === name);
    const beside = Object.fromEntries(Object.entries(all).filter(([name]) => known(name)));
    const rest = Object.entries(all).filter(([name]) => !known(name)).map(([, text]) => text);
    if (Object.keys(beside).some((name) => !LAID_OUT.includes(name))) setShowAll(true);
    setWrong({ ...beside, form: rest.join(" ") || (Object.keys(beside).length > 1 ? `${Object.keys(beside).length} fields need another look.` : "") });
    requestAnimationFrame(() => {
      for (const name of Object.keys(beside)) (document.getElementById(`field-${name}`) ?? document.getElementById(`argument-${name}`))?.closest("details")?.setAttribute("open", "");
      document.querySelector(".try [aria-invalid=true]")?.focus();
    });
  };

  const input = (name, more = {}) => (id, described) =>
    html`<input id=${id} name=${name} value=${form[name]} onInput=${set(name)} aria-describedby=${described} aria-invalid=${Boolean(wrong[name])} ...${more} />`;
  const area = (name, rows) => (id, described) =>
    html`<textarea id=${id} name=${name} rows=${rows} value=${form[name]} onInput=${set(name)} aria-describedby=${described} aria-invalid=${Boolean(wrong[name])} spellcheck=${name === "instruction"}></textarea>`;
  const field = (name, control) => html`<${Field} name=${name} field=${schema.properties[name]} wrong=${wrong[name]}>${control}<//>`;
  const files = Object.keys(hidden.upload_files ?? {});
  const tests = Object.keys(hidden.tests ?? {});

  return html`<section class="try">
    <h1>Try a rollout</h1>
    <p class="lead">A real agent works on this in a box of its own, and you watch. The examples bring their own scripted answers, so no model is needed.</p>
    <div class="examples" role="group" aria-label="Examples">
      ${examples.map((example) => html`<button type="button" aria-pressed=${picked === example.about.name} onClick=${() => pick(filled(example, empty))}><b>${example.about.name}</b><span>${example.about.says}</span></button>`)}
      <button type="button" aria-pressed=${picked === ""} onClick=${() => pick(nothing)}><b>empty</b><span>Your own task, from nothing.</span></button>
    </div>
    <form onSubmit=${run} novalidate>
      ${field("instruction", area("instruction", 5))}
      <div class="two">${field("setup", area("setup", 4))}${field("verify", area("verify", 4))}</div>
      ${hidden.environment && html`<p class="hint">The agent works on <code>${hidden.environment}</code> through its tools, and the environment gives the reward.</p>`}
      ${(files.length > 0 || tests.length > 0) && html`<p class="hint">The example also brings ${files.length} ${files.length === 1 ? "file" : "files"}${tests.length ? ` and ${tests.length} hidden ${tests.length === 1 ? "test" : "tests"}` : ""}: ${[...files, ...tests].map((name) => html`<code>${name}</code> `)}</p>`}
      <div class="two">
        ${field("endpoint", (id, described) => html`<select id=${id} name="endpoint" value=${form.endpoint} onChange=${set("endpoint")} aria-describedby=${described}>${choicesOf(schema.properties.endpoint).map(([value, says]) => html`<option value=${value}>${value}: ${says}</option>`)}</select>`)}
        ${field("task_id", input("task_id"))}
      </div>
      ${form.endpoint !== "scripted" &&
      html`<div class="three">
        ${field("base_url", input("base_url", { inputmode: "url", placeholder: "http://host:8000/v1" }))}
        ${field("model", input("model"))}
        ${field("api_key", input("api_key", { type: "password", autocomplete: "off" }))}
      </div>`}
      <details class="limits">
        <summary>Limits and sampling</summary>
        <div class="three">${LIMITS.map((name) => field(name, input(name, { inputmode: "decimal" })))}</div>
      </details>
      <details class="limits" open=${showAll} onToggle=${(event) => setShowAll(event.currentTarget.open)}>
        <summary>All arguments</summary>
        ${showAll && others.map((entry) => html`<${SchemaField} key=${entry.name} entry=${entry} root=${schema} value=${typed[entry.name]} errors=${wrong} onChange=${(value) => setTyped({ ...typed, [entry.name]: value })} />`)}
      </details>
      <div class="runbar">
        <button class="main" disabled=${busy}>${busy ? "Starting…" : "Run"}</button>
        ${wrong.form ? html`<p class="wrong" role="alert">${wrong.form}</p>` : html`<small>You are taken to the rollout as it begins.</small>`}
      </div>
    </form>
  </section>`;
}

// A form for one rollout.
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { Refused, request } from "./api.js";

const ENDPOINTS = [
  ["scripted", "Scripted (no model; the example’s own answers)"],
  ["local", "Local (ROLLCAGE_BASE_URL of the server)"],
  ["vllm", "vLLM (VLLM_URL of the server)"],
  ["openai", "OpenAI (OPENAI_API_KEY of the server)"],
  ["hf_router", "Hugging Face router"],
  ["custom", "An address of your own"],
];
const EMPTY = {
  task_id: "",
  instruction: "",
  setup: "",
  verify: "",
  endpoint: "scripted",
  base_url: "",
  model: "",
  api_key: "",
  agent_timeout_s: "600",
  timeout_s: "",
  max_turns: "0",
  max_tokens_cap: "4096",
  temperature: "",
};

/** What was typed, for whoever looks at something else and comes back; a key is not kept. */
let draft = null;

const LIMITS = ["agent_timeout_s", "timeout_s", "max_turns", "max_tokens_cap", "temperature"];

const commands = (text) => text.split("\n").map((line) => line.trimEnd()).filter((line) => line.trim());

/** The body of the request; a number that is none is an error beside its field. */
function bodyOf(form, hidden) {
  const body = { ...hidden, instruction: form.instruction, endpoint: form.endpoint };
  if (form.task_id) body.task_id = form.task_id;
  body.setup = commands(form.setup);
  body.verify = commands(form.verify);
  for (const name of ["base_url", "model", "api_key"]) if (form[name].trim()) body[name] = form[name].trim();
  for (const name of LIMITS) {
    if (form[name] === "") continue;
    const number = Number(form[name]);
    if (!Number.isFinite(number)) throw Object.assign(new Error("This is no number."), { argument: name });
    body[name] = number;
  }
  if (form.endpoint !== "scripted") delete body.solution;
  return body;
}

function Field({ name, label, hint, wrong, children }) {
  const id = `field-${name}`;
  return html`<div class="field ${wrong ? "invalid" : ""}">
    <label for=${id}>${label}</label>
    ${hint && html`<p class="hint" id=${`${id}-hint`}>${hint}</p>`}
    ${children(id, wrong ? `${id}-wrong` : hint ? `${id}-hint` : undefined)}
    ${wrong && html`<p class="wrong" id=${`${id}-wrong`} role="alert">${wrong}</p>`}
  </div>`;
}

export function Try() {
  const [form, setForm] = useState(draft?.form ?? EMPTY);
  const [hidden, setHidden] = useState(draft?.hidden ?? {});
  const [examples, setExamples] = useState([]);
  const [picked, setPicked] = useState(draft?.picked ?? "");
  const [wrong, setWrong] = useState({});
  const [busy, setBusy] = useState(false);
  const touched = useRef(Boolean(draft));
  useEffect(() => {
    if (touched.current) draft = { form: { ...form, api_key: "" }, hidden, picked };
  }, [form, hidden, picked]);

  const pick = (example) => {
    const { about, request: body } = example;
    const { instruction, task_id, setup = [], verify = [], agent_timeout_s, ...rest } = body;
    touched.current = true;
    setPicked(about.name);
    setForm({ ...EMPTY, task_id, instruction, setup: setup.join("\n"), verify: verify.join("\n"), agent_timeout_s: String(agent_timeout_s ?? 600) });
    setHidden(rest);
    setWrong({});
  };

  useEffect(() => {
    fetch(new URL("../examples.json", import.meta.url))
      .then((answer) => answer.json())
      .then(async (list) => {
        setExamples(list.filter((example) => !example.request.environment));
        // Whoever was quicker than the examples keeps what they typed.
        if (!touched.current) pick(list[0]);
        // Those that work on a remote environment are offered where the server reaches it.
        const { environments } = await request("/environments");
        const known = ["", ...environments.map((one) => one.name)];
        setExamples(list.filter((example) => known.includes(example.request.environment ?? "")));
      })
      .catch(() => setExamples((before) => before));
  }, []);

  const set = (name) => (event) => {
    touched.current = true;
    setForm({ ...form, [name]: event.target.value });
    setWrong({ ...wrong, [name]: undefined });
  };

  const run = async (event) => {
    event.preventDefault();
    setBusy(true);
    setWrong({});
    try {
      if (!form.instruction.trim()) throw Object.assign(new Error("Say what the agent should do."), { argument: "instruction" });
      const started = await request("/rollouts", { method: "POST", body: bodyOf(form, hidden) });
      location.hash = `#/rollouts/${started.rollout_id}`;
    } catch (error) {
      const argument = String(error.argument ?? "").split(".")[0];
      const name = Object.hasOwn(EMPTY, argument) ? argument : "form";
      setWrong({ [name]: error instanceof Refused || error.argument ? error.message : `No answer from the server: ${error.message}` });
      const field = document.getElementById(`field-${name}`);
      field?.closest("details")?.setAttribute("open", "");
      field?.focus();
    } finally {
      setBusy(false);
    }
  };

  const input = (name, more = {}) => (id, described) =>
    html`<input id=${id} name=${name} value=${form[name]} onInput=${set(name)} aria-describedby=${described} aria-invalid=${Boolean(wrong[name])} ...${more} />`;
  const area = (name, rows) => (id, described) =>
    html`<textarea id=${id} name=${name} rows=${rows} value=${form[name]} onInput=${set(name)} aria-describedby=${described} aria-invalid=${Boolean(wrong[name])} spellcheck=${name === "instruction"}></textarea>`;
  const files = Object.keys(hidden.upload_files ?? {});
  const tests = Object.keys(hidden.tests ?? {});

  return html`<section class="try">
    <h1>Try a rollout</h1>
    <p class="lead">A real agent works on this in a box of its own, and you watch. The examples bring their own scripted answers, so no model is needed.</p>
    <div class="examples" role="group" aria-label="Examples">
      ${examples.map((example) => html`<button type="button" aria-pressed=${picked === example.about.name} onClick=${() => pick(example)}><b>${example.about.name}</b><span>${example.about.says}</span></button>`)}
      <button type="button" aria-pressed=${picked === ""} onClick=${() => { touched.current = true; setPicked(""); setHidden({}); setForm(EMPTY); setWrong({}); }}><b>empty</b><span>Your own task, from nothing.</span></button>
    </div>
    <form onSubmit=${run} novalidate>
      <${Field} name="instruction" label="Instruction" hint="Handed to the agent as it is." wrong=${wrong.instruction}>${area("instruction", 5)}<//>
      <div class="two">
        <${Field} name="setup" label="Setup" hint="Bash, one per line, before the agent starts." wrong=${wrong.setup}>${area("setup", 4)}<//>
        <${Field} name="verify" label="Verify" hint="Bash, one per line, after it. Reward: the share that passes." wrong=${wrong.verify}>${area("verify", 4)}<//>
      </div>
      ${hidden.environment && html`<p class="hint">The agent works on <code>${hidden.environment}</code> through its tools, and the environment gives the reward.</p>`}
      ${(files.length > 0 || tests.length > 0) && html`<p class="hint">The example also brings ${files.length} ${files.length === 1 ? "file" : "files"}${tests.length ? ` and ${tests.length} hidden ${tests.length === 1 ? "test" : "tests"}` : ""}: ${[...files, ...tests].map((name) => html`<code>${name}</code> `)}</p>`}
      <div class="two">
        <${Field} name="endpoint" label="Model" wrong=${wrong.endpoint}>${(id) => html`<select id=${id} name="endpoint" value=${form.endpoint} onChange=${set("endpoint")}>${ENDPOINTS.map(([value, label]) => html`<option value=${value}>${label}</option>`)}</select>`}<//>
        <${Field} name="task_id" label="Name of the task" wrong=${wrong.task_id}>${input("task_id")}<//>
      </div>
      ${form.endpoint !== "scripted" &&
      html`<div class="three">
        <${Field} name="base_url" label="Address" hint="Empty: the server’s own setting." wrong=${wrong.base_url}>${input("base_url", { inputmode: "url", placeholder: "http://host:8000/v1" })}<//>
        <${Field} name="model" label="Model name" wrong=${wrong.model}>${input("model")}<//>
        <${Field} name="api_key" label="Key" hint="Used for this rollout, never stored." wrong=${wrong.api_key}>${input("api_key", { type: "password", autocomplete: "off" })}<//>
      </div>`}
      <details class="limits">
        <summary>Limits and sampling</summary>
        <div class="three">
          <${Field} name="agent_timeout_s" label="Time for the agent (s)" wrong=${wrong.agent_timeout_s}>${input("agent_timeout_s", { inputmode: "decimal" })}<//>
          <${Field} name="timeout_s" label="Time in all (s)" wrong=${wrong.timeout_s}>${input("timeout_s", { inputmode: "decimal", placeholder: "the server’s own" })}<//>
          <${Field} name="max_turns" label="Most turns (0: any)" wrong=${wrong.max_turns}>${input("max_turns", { inputmode: "numeric" })}<//>
          <${Field} name="max_tokens_cap" label="Tokens per answer (0: any)" wrong=${wrong.max_tokens_cap}>${input("max_tokens_cap", { inputmode: "numeric" })}<//>
          <${Field} name="temperature" label="Temperature" wrong=${wrong.temperature}>${input("temperature", { inputmode: "decimal", placeholder: "the model’s own" })}<//>
        </div>
      </details>
      <div class="runbar">
        <button class="main" disabled=${busy}>${busy ? "Starting…" : "Run"}</button>
        ${wrong.form ? html`<p class="wrong" role="alert">${wrong.form}</p>` : html`<small>You are taken to the rollout as it begins.</small>`}
      </div>
    </form>
  </section>`;
}

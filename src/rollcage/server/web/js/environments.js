// Remote environments: what tools they offer, and a form to call one.
import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { Refused, locked, request } from "./api.js";
import { SchemaField, argumentsOf, fieldsOf } from "./schema_form.js";
import { clip, seconds } from "./text.js";

const path = (name, ...more) => ["/environments", name, ...more].map((part, at) => (at ? encodeURIComponent(part) : part)).join("/");
const IMAGES = ["image/png", "image/jpeg", "image/gif", "image/webp"];
const KEPT = 20;

const reason = (error) => (error instanceof Refused ? error.message : `No answer from the server: ${error.message}`);

/** Ask once, and again when a key was given; null while there is no answer yet. */
function useAnswer(address, again = 0) {
  const shut = locked.value;
  const [answer, setAnswer] = useState({ address: "", value: null, error: null });
  useEffect(() => {
    const stop = new AbortController();
    setAnswer({ address, value: null, error: null });
    request(address, { signal: stop.signal })
      .then((value) => setAnswer({ address, value, error: null }))
      .catch((error) => stop.signal.aborted || setAnswer({ address, value: null, error }));
    return () => stop.abort();
  }, [address, again, shut]);
  return answer.address === address ? answer : { value: null, error: null };
}

function List() {
  const { value, error } = useAnswer("/environments");
  if (error) return html`<section class="state"><h1>Environments</h1><p class="wrong" role="alert">${reason(error)}</p></section>`;
  if (!value) return html`<section class="state"><p class="spin" role="status">Looking for environments…</p></section>`;
  if (!value.environments.length) {
    return html`<section class="state">
      <h1>Environments</h1>
      <p>No remote environment is connected to this server.</p>
      <p>Start it with <code>--fleet-demo</code> to try one without a key, with <code>FLEET_API_KEY</code> set, or with <code>--environment NAME=ADDRESS</code>.</p>
      ${value.problem && html`<p class="wrong">${value.problem}</p>`}
    </section>`;
  }
  return html`<section class="environments">
    <h1>Environments</h1>
    <p class="lead">Remote environments that a rollout can be given: the agent gets their tools and nothing else, and they give the reward.</p>
    ${value.problem && html`<p class="wrong" role="alert">${value.problem}</p>`}
    <ul class="places">
      ${value.environments.map(
        (one) => html`<li key=${one.name}>
          <p class="top"><a class="cover" href=${`#/environments/${encodeURIComponent(one.name)}`}><b>${one.name}</b></a>
          <span class="tag">${one.kind}</span> ${one.version && html`<small>${one.version}</small>`}</p>
          <p>${one.description}</p>
        </li>`,
      )}
    </ul>
  </section>`;
}

function Picture({ block }) {
  const good = IMAGES.includes(block.mimeType) && typeof block.data === "string" && /^[A-Za-z0-9+/=\s]*$/.test(block.data);
  return good ? html`<img alt="What the tool showed" src=${`data:${block.mimeType};base64,${block.data}`} />` : null;
}

function Answer({ call }) {
  const { answer, error } = call;
  const bad = error || answer?.is_error;
  const took = answer ? seconds(answer.seconds) : "";
  const written = answer && (answer.structured === null || answer.structured === undefined ? answer.text : JSON.stringify(answer.structured, null, 2));
  return html`<article class="answer ${bad ? "bad" : ""}" aria-label=${`Answer of ${call.tool}`}>
    <header><code>${call.tool}</code> <small>${clip(JSON.stringify(call.given), 160)}</small> <small>${took}</small></header>
    ${error && html`<p class="wrong" role="alert">${error}</p>`}
    ${answer && html`<pre tabindex="0">${answer.is_error ? answer.text : written || "(it said nothing)"}</pre>`}
    ${answer?.content.filter((block) => block.type === "image").map((block) => html`<${Picture} block=${block} />`)}
  </article>`;
}

function Caller({ name, tool, onCalled }) {
  const fields = useMemo(() => fieldsOf(tool.input_schema), [tool]);
  const [typed, setTyped] = useState({});
  const [wrong, setWrong] = useState({});
  const [busy, setBusy] = useState(false);

  const call = async (event) => {
    event.preventDefault();
    let given;
    try {
      given = argumentsOf(fields, typed);
    } catch (error) {
      setWrong({ [error.argument]: error.message });
      document.getElementById(`argument-${error.argument}`)?.focus();
      return;
    }
    setWrong({});
    setBusy(true);
    try {
      onCalled({ tool: tool.name, given, answer: await request(path(name, "tools", tool.name), { method: "POST", body: given }) });
    } catch (error) {
      onCalled({ tool: tool.name, given, error: reason(error) });
    } finally {
      setBusy(false);
    }
  };

  return html`<form onSubmit=${call} novalidate aria-label=${`Call ${tool.name}`}>
    <h2><code>${tool.name}</code></h2>
    <p class="lead">${tool.description}</p>
    ${!fields.length && html`<p class="hint">It takes no arguments.</p>`}
    ${fields.map(
      (entry) => html`<${SchemaField}
        key=${entry.name}
        entry=${entry}
        root=${tool.input_schema ?? {}}
        value=${Object.hasOwn(typed, entry.name) ? typed[entry.name] : undefined}
        errors=${wrong}
        onChange=${(value) => {
          setTyped((before) => ({ ...before, [entry.name]: value }));
          setWrong({});
        }}
      />`,
    )}
    <button class="main" disabled=${busy}>${busy ? "Calling…" : "Call"}</button>
    <details class="schema"><summary><small>Its schema</small></summary><pre>${JSON.stringify(tool.input_schema, null, 2)}</pre></details>
  </form>`;
}

function One({ name }) {
  const [again, setAgain] = useState(0);
  const [picked, setPicked] = useState("");
  const [calls, setCalls] = useState([]);
  const [released, setReleased] = useState(false);
  const { value, error } = useAnswer(path(name, "tools"), again);

  const release = async () => {
    try {
      await request(path(name), { method: "DELETE" });
      setReleased(true);
      setCalls([]);
    } catch (failure) {
      called({ tool: "release", given: {}, error: reason(failure) });
    }
  };
  const answers = useRef();
  const called = (call) => {
    setCalls((before) => [{ ...call, number: (before[0]?.number ?? 0) + 1 }, ...before].slice(0, KEPT));
    // Where the answer is below the form, it is brought into view.
    if (answers.current?.getBoundingClientRect().top > innerHeight - 160) answers.current.scrollIntoView({ block: "start" });
  };
  const renew = () => {
    setReleased(false);
    setAgain(again + 1);
  };

  const back = html`<a href="#/environments">All environments</a>`;
  if (error) return html`<section class="state"><h1>${name}</h1><p class="wrong" role="alert">${reason(error)}</p><button onClick=${renew}>Try again</button>${back}</section>`;
  if (released) return html`<section class="state"><h1>${name}</h1><p>Your instance was given back.</p><button class="main" onClick=${renew}>Get a new one</button>${back}</section>`;
  if (!value) return html`<section class="state"><h1>${name}</h1><p class="spin" role="status">Getting an instance of your own…</p></section>`;
  const tool = value.tools.find((one) => one.name === picked) ?? value.tools[0];
  return html`<section class="environments">
    <header class="place">
      <div>
        <p class="crumb"><a href="#/environments">Environments</a></p>
        <h1>${name}</h1>
        <p class="lead">${value.title} ${value.instance_id && html`<code>${value.instance_id}</code>`} · yours until you give it back, or ${seconds(value.idle_s)} after the last call</p>
      </div>
      <button onClick=${release}>Give it back</button>
    </header>
    <div class="workbench">
      <nav aria-label="Tools">
        ${value.tools.map((one) => html`<button key=${one.name} aria-pressed=${one === tool} onClick=${() => setPicked(one.name)}><code>${one.name}</code><small>${clip(one.description, 90)}</small></button>`)}
      </nav>
      ${tool ? html`<${Caller} key=${tool.name} name=${name} tool=${tool} onCalled=${called} />` : html`<p class="nothing">It offers no tools.</p>`}
      <div class="answers" aria-live="polite" aria-label="Answers" role="region" ref=${answers}>
        ${calls.length ? calls.map((call) => html`<${Answer} key=${call.number} call=${call} />`) : html`<p class="blank">Answers appear here.</p>`}
      </div>
    </div>
  </section>`;
}

export function Environments({ name }) {
  return name ? html`<${One} key=${name} name=${name} />` : html`<${List} />`;
}

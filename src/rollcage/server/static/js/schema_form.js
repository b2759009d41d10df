// A form out of a JSON schema. The schema is somebody else's: nothing of it is trusted, all of it is text.
import { html } from "../vendor/preact.js";

const PLAIN = ["string", "integer", "number", "boolean"];
const DEEPEST = 8;

/** Follow `$ref` within the schema itself, and look through `anyOf` with null: what a field really is. */
export function resolved(schema, root, depth = 0) {
  if (!schema || typeof schema !== "object" || depth > DEEPEST) return {};
  if (typeof schema.$ref === "string") {
    const name = /^#\/(?:\$defs|definitions)\/([^/]+)$/.exec(schema.$ref)?.[1];
    const defs = root.$defs ?? root.definitions;
    const found = name && defs && Object.hasOwn(defs, name) ? defs[name] : {};
    const { $ref, ...own } = schema;
    return { ...resolved(found, root, depth + 1), ...own };
  }
  const choices = Array.isArray(schema.anyOf) ? schema.anyOf : Array.isArray(schema.oneOf) ? schema.oneOf : null;
  const real = choices?.filter((one) => one && one.type !== "null");
  if (real?.length === 1) {
    const { anyOf, oneOf, ...own } = schema;
    return { ...resolved(real[0], root, depth + 1), ...own };
  }
  return schema;
}

/** What kind of field it gets: enum, boolean, string, integer, number, or json for all that is nested. */
export function kindOf(schema) {
  if (Array.isArray(schema.enum) && schema.enum.length && schema.enum.length <= 200) return "enum";
  const types = Array.isArray(schema.type) ? schema.type.filter((type) => type !== "null") : [schema.type];
  return types.length === 1 && PLAIN.includes(types[0]) ? types[0] : "json";
}

/** The fields of an object schema, in its own order. */
export function fieldsOf(schema) {
  const root = schema && typeof schema === "object" ? schema : {};
  const required = Array.isArray(root.required) ? root.required : [];
  return Object.entries(root.properties ?? {}).map(([name, raw]) => {
    const field = resolved(raw, root);
    return { name, field, kind: kindOf(field), required: required.includes(name), has: "default" in field };
  });
}

/** The arguments that were typed; an error with `argument` where one makes no sense. Empty fields are left out. */
export function argumentsOf(fields, typed) {
  const found = {};
  const wrong = (name, message) => {
    throw Object.assign(new Error(message), { argument: name });
  };
  for (const { name, field, kind, required } of fields) {
    const text = typed[name] ?? "";
    if (text === "") {
      if (required && kind === "string") found[name] = "";
      else if (required) wrong(name, "This one is needed.");
      continue;
    }
    if (kind === "enum") found[name] = field.enum[Number(text)];
    else if (kind === "boolean") found[name] = text === "true";
    else if (kind === "string") found[name] = text;
    else if (kind === "json") {
      try {
        found[name] = JSON.parse(text);
      } catch (error) {
        wrong(name, `This is no JSON: ${error.message}`);
      }
    } else {
      const number = Number(text);
      if (!Number.isFinite(number) || (kind === "integer" && !Number.isInteger(number))) {
        wrong(name, kind === "integer" ? "This is no whole number." : "This is no number.");
      }
      found[name] = number;
    }
  }
  return found;
}

const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value));

/** One field with its label, its hint and what is wrong with it. */
export function SchemaField({ entry, root, value, onChange, wrong }) {
  const { name, field, kind, required, has } = entry;
  const id = `argument-${name}`;
  const described = [wrong && `${id}-wrong`, `${id}-hint`].filter(Boolean).join(" ");
  const common = { id, name, "aria-describedby": described, "aria-invalid": Boolean(wrong) };
  const set = (event) => onChange(event.target.value);
  const hint = [field.description, has && field.default !== null && `default ${shown(field.default)}`].filter(Boolean).join(" · ");
  return html`<div class="field ${wrong ? "invalid" : ""}">
    <label for=${id}><code>${name}</code> <small>${kind === "json" ? "JSON" : kind}${required ? "" : ", optional"}</small></label>
    <p class="hint" id=${`${id}-hint`}>${hint}</p>
    ${kind === "enum" || kind === "boolean"
      ? html`<select ...${common} value=${value} onChange=${set}>
          <option value="">${required ? "choose…" : "not given"}</option>
          ${kind === "enum"
            ? field.enum.map((choice, index) => html`<option value=${String(index)}>${shown(choice)}</option>`)
            : ["true", "false"].map((choice) => html`<option value=${choice}>${choice}</option>`)}
        </select>`
      : kind === "json"
        ? html`<textarea ...${common} rows="4" spellcheck="false" value=${value} placeholder=${"{ }"} onInput=${set}></textarea>`
        : kind === "string"
          ? html`<textarea ...${common} rows=${value.includes("\n") ? 4 : 1} value=${value} onInput=${set}></textarea>`
          : html`<input ...${common} inputmode=${kind === "integer" ? "numeric" : "decimal"} value=${value} onInput=${set} />`}
    ${kind === "json" && html`<details><summary><small>its schema</small></summary><pre>${JSON.stringify({ ...field, $defs: root.$defs }, null, 2)}</pre></details>`}
    ${wrong && html`<p class="wrong" id=${`${id}-wrong`} role="alert">${wrong}</p>`}
  </div>`;
}

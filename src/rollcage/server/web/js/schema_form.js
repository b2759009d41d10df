// A form out of a JSON schema. The schema is somebody else's: nothing of it is trusted, all of it is text.
import { html, useState } from "../vendor/preact.js";
import { clip } from "./text.js";

const PLAIN = ["string", "integer", "number", "boolean"];
const DEEPEST = 8;
/** What is nested deeper than this is typed as JSON. */
const FORMS_DEEP = 4;
/** Fields and options that one form may have; a schema that asks for more is nested less deep. */
const MOST = 1000;
const SHOWN = 1000;

const table = (value) => (value && typeof value === "object" && !Array.isArray(value) ? value : {});
// Names are anybody's, `__proto__` too: only what was put there counts.
const own = (value, name) => (value && typeof value === "object" && Object.hasOwn(value, name) ? value[name] : undefined);

/** Follow `$ref` within the schema itself, and look through `anyOf` with null: what a field really is. */
function resolved(schema, root, depth = 0) {
  if (!schema || typeof schema !== "object" || depth > DEEPEST) return {};
  if (typeof schema.$ref === "string") {
    const name = /^#\/(?:\$defs|definitions)\/([^/]+)$/.exec(schema.$ref)?.[1];
    const { $ref, ...rest } = schema;
    return { ...resolved(name && own(root.$defs ?? root.definitions, name), root, depth + 1), ...rest };
  }
  const choices = choicesOf(schema);
  if (choices?.length === 1) {
    const { anyOf, oneOf, allOf, ...rest } = schema;
    return { ...resolved(choices[0], root, depth + 1), ...rest };
  }
  return schema;
}

function choicesOf(schema) {
  const choices = [schema.anyOf, schema.oneOf, schema.allOf?.length === 1 && schema.allOf].find(Array.isArray);
  return choices?.filter((one) => one && one.type !== "null");
}

/** What a schema asks for: a kind, and what is inside it. */
function nodeOf(schema, root, depth, room) {
  if (room.left < 0) return { field: table(schema), kind: "json" };
  const field = resolved(schema, root);
  const node = { field, kind: "json" };
  // Twenty words that mean nothing to us cost as much as a field: they are gone through as well.
  room.left -= 1 + (Array.isArray(field.enum) ? field.enum.length : 0) + Math.floor(Object.keys(field).length / 20);
  if (room.left < 0) return node;
  if (Object.hasOwn(field, "const")) return { ...node, kind: "enum", options: [field.const] };
  if (Array.isArray(field.enum) && field.enum.length && field.enum.length <= 200) return { ...node, kind: "enum", options: field.enum };
  const types = Array.isArray(field.type) ? field.type.filter((type) => type !== "null") : [field.type];
  if (types.length === 1 && PLAIN.includes(types[0])) return { ...node, kind: types[0] };
  if (depth >= room.deepest) return node;
  const choices = choicesOf(field);
  if (choices?.length > 1 && choices.length <= 20)
    return { ...node, kind: "choice", choices: choices.map((one) => nodeOf(one, root, depth + 1, room)) };
  if (types[0] === "object" && Object.keys(table(field.properties)).length)
    return { ...node, kind: "object", fields: fieldsIn(field, root, depth + 1, room) };
  if (types[0] === "array" && field.items && typeof field.items === "object")
    return { ...node, kind: "array", item: nodeOf(field.items, root, depth + 1, room) };
  return node;
}

/** The fields of an object schema, in its own order. A few lines of schema can ask for millions: see MOST. */
export function fieldsOf(schema) {
  for (let deepest = FORMS_DEEP; ; deepest--) {
    const room = { left: MOST, deepest };
    const fields = fieldsIn(schema, table(schema), 0, room);
    if (room.left >= 0 || deepest === 0) return fields;
  }
}

function fieldsIn(schema, root, depth, room) {
  const object = table(schema);
  const required = new Set(Array.isArray(object.required) ? object.required : []);
  return Object.entries(table(object.properties)).slice(0, MOST).map(([name, raw]) => ({
    name,
    required: required.has(name),
    ...nodeOf(raw, root, depth, room),
  }));
}

const wrong = (path, message) => {
  throw Object.assign(new Error(message), { argument: path });
};

/** The arguments that were typed; an error with `argument` where one makes no sense. Empty fields are left out. */
export function argumentsOf(fields, typed, path = "") {
  const found = [];
  for (const field of fields) {
    const at = path ? `${path}.${field.name}` : field.name;
    const value = valueOf(field, own(typed, field.name), at, field.required);
    if (value !== undefined) found.push([field.name, value]);
  }
  return Object.fromEntries(found);
}

function valueOf(node, typed, path, required) {
  if (node.kind === "object") return touched(typed) || required ? argumentsOf(node.fields, typed, path) : undefined;
  if (node.kind === "array") {
    if (!typed?.length) return required ? [] : undefined;
    return typed.map((each, index) => valueOf(node.item, each, `${path}.${index}`, true));
  }
  if (node.kind === "choice") {
    const chosen = node.choices[Number(typed?.at || "NaN")];
    if (chosen) return valueOf(chosen, typed.typed, `${path}.value`, true);
    return required ? wrong(path, "This one is needed.") : undefined;
  }
  const text = typed ?? "";
  if (text === "") {
    if (required && node.kind === "string") return "";
    return required ? wrong(path, "This one is needed.") : undefined;
  }
  return scalarOf(node, text, path);
}

function scalarOf({ kind, options }, text, path) {
  if (kind === "enum") return options[Number(text)];
  if (kind === "boolean") return text === "true";
  if (kind === "string") return text;
  if (kind === "json") {
    try {
      return JSON.parse(text);
    } catch (error) {
      return wrong(path, `This is no JSON: ${error.message}`);
    }
  }
  const number = Number(text);
  if (!Number.isFinite(number) || (kind === "integer" && !Number.isInteger(number)))
    wrong(path, kind === "integer" ? "This is no whole number." : "This is no number.");
  return number;
}

/** Whether anything was typed in it. */
function touched(typed) {
  if (typeof typed === "string") return typed !== "";
  if (Array.isArray(typed)) return typed.length > 0;
  return Boolean(typed) && (Boolean(typed.at) || Object.keys(typed).some((name) => touched(own(typed, name))));
}

const shown = (value) => clip(typeof value === "string" ? value : JSON.stringify(value), SHOWN);
const NAMES = { json: "JSON", choice: "one of several kinds", enum: "one of these", boolean: "true or false" };
const kindName = (node) => (node.kind === "array" ? `list of ${kindName(node.item)}` : (NAMES[node.kind] ?? node.kind));

/** One field, whatever is inside it, with its label, its hint and what is wrong with it. */
export function SchemaField({ entry, root, path = entry.name, label = entry.name, value, errors, onChange }) {
  const id = `argument-${path}`;
  const problem = own(errors, path);
  const { field, required } = entry;
  // A nested default is told by the fields inside.
  const standard = Object.hasOwn(field, "default") && field.default !== null && entry.kind !== "object" ? field.default : undefined;
  const about = [typeof field.description === "string" && clip(field.description, SHOWN), standard !== undefined && `default ${shown(standard)}`].filter(Boolean).join(" · ");
  const ids = [problem && `${id}-wrong`, about && `${id}-hint`].filter(Boolean).join(" ") || undefined;
  const given = { entry, root, path, value, errors, onChange, id, ids, label };
  const title = html`<code>${label}</code> <small>${kindName(entry)}${required ? "" : ", optional"}</small>`;
  const nested = entry.kind === "object" || entry.kind === "array";
  const inside = html`${about && html`<p class="hint" id=${`${id}-hint`}>${about}</p>`}
    ${entry.kind === "object" ? html`<${Inner} ...${given} />` : entry.kind === "array" ? html`<${Items} ...${given} />` : entry.kind === "choice" ? html`<${Choice} ...${given} />` : html`<${Control} ...${given} invalid=${Boolean(problem)} />`}
    ${problem && html`<p class="wrong" id=${`${id}-wrong`} role="alert">${problem}</p>`}`;
  return nested
    ? html`<fieldset class="field ${problem ? "invalid" : ""}" id=${id} aria-describedby=${ids}><legend>${title}</legend>${inside}</fieldset>`
    : html`<div class="field ${problem ? "invalid" : ""}"><label for=${id}>${title}</label>${inside}</div>`;
}

function Inner({ entry, root, path, value, errors, onChange }) {
  return entry.fields.map(
    (each) => html`<${SchemaField} key=${each.name} entry=${each} root=${root} path=${`${path}.${each.name}`} value=${own(value, each.name)} errors=${errors} onChange=${(typed) => onChange({ ...value, [each.name]: typed })} />`,
  );
}

function Items({ entry, root, path, value, errors, onChange, label }) {
  const items = Array.isArray(value) ? value : [];
  const changed = (index, typed) => onChange(items.map((each, at) => (at === index ? typed : each)));
  return html`${items.map(
      (each, index) => html`<div class="item" key=${index}>
        <${SchemaField} entry=${{ ...entry.item, name: String(index), required: true }} root=${root} path=${`${path}.${index}`} label=${`${label} ${index + 1}`} value=${each} errors=${errors} onChange=${(typed) => changed(index, typed)} />
        <button type="button" class="quiet" aria-label=${`Remove ${label} ${index + 1}`} onClick=${() => onChange(items.filter((_, at) => at !== index))}>×</button>
      </div>`,
    )}
    <button type="button" class="add" onClick=${() => onChange([...items, undefined])}>Add ${kindName(entry.item)}</button>`;
}

function Choice({ entry, root, path, value, errors, onChange, id, ids, label }) {
  const at = value?.at ?? "";
  const chosen = entry.choices[Number(at || "NaN")];
  return html`<select id=${id} aria-describedby=${ids} value=${at} onChange=${(event) => onChange({ at: event.target.value, typed: undefined })}>
      <option value="">${entry.required ? "choose…" : "not given"}</option>
      ${entry.choices.map((one, index) => html`<option value=${String(index)}>${typeof one.field.title === "string" ? one.field.title : kindName(one)}</option>`)}
    </select>
    ${chosen && html`<${SchemaField} key=${at} entry=${{ ...chosen, name: "value", required: true }} root=${root} path=${`${path}.value`} label=${`${label} value`} value=${value.typed} errors=${errors} onChange=${(typed) => onChange({ at, typed })} />`}`;
}

function Control({ entry, root, value, onChange, id, ids, path, invalid }) {
  const { kind, field, required, options } = entry;
  const text = typeof value === "string" ? value : "";
  const common = { id, name: path, "aria-describedby": ids, "aria-invalid": invalid };
  const set = (event) => onChange(event.target.value);
  if (kind === "enum" || kind === "boolean") {
    const choices = kind === "enum" ? options.map((choice, index) => [String(index), shown(choice)]) : [["true", "true"], ["false", "false"]];
    return html`<select ...${common} value=${text} onChange=${set}>
      <option value="">${required ? "choose…" : "not given"}</option>
      ${choices.map(([name, said]) => html`<option value=${name}>${said}</option>`)}
    </select>`;
  }
  if (kind === "string") return html`<textarea ...${common} rows=${text.includes("\n") || text.length > 60 ? 4 : 1} value=${text} onInput=${set}></textarea>`;
  if (kind !== "json") return html`<input ...${common} inputmode=${kind === "integer" ? "numeric" : "decimal"} value=${text} onInput=${set} />`;
  return html`<textarea ...${common} rows="4" spellcheck="false" value=${text} placeholder="{ }" onInput=${set}></textarea>
    <${Schema} field=${field} root=${root} />`;
}

/** A schema as it is. Written when it is looked at: each has all that it may refer to. */
function Schema({ field, root }) {
  const [open, setOpen] = useState(false);
  return html`<details onToggle=${(event) => setOpen(event.currentTarget.open)}><summary><small>its schema</small></summary>
    ${open && html`<pre>${JSON.stringify({ ...field, $defs: root.$defs }, null, 2)}</pre>`}</details>`;
}

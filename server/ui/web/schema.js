// An editor of JSON schemas: fields with types, nested as objects and lists, or the schema as text.

/** @import {Edited, Field, On, Schema, Shape} from "../src/types.js" */
import {reason} from "./api.js";
import {IconButton, Switch} from "./parts.js";
import {object} from "./shapes.js";
import {html, useEffect, useState} from "./vendor/preact.js";

export const TYPES = /** @type {const} */ (["string", "number", "integer", "boolean", "enum", "object", "array"]);
/** @typedef {(typeof TYPES)[number]} FieldKind */

export const /** @type {Shape<Schema>} */ schemaShape = (value, at) => object(value, at); // fieldOf looks at what is in it

const KNOWN = ["type", "properties", "required", "additionalProperties", "items", "enum", "description"];

export const /** @type {Schema} */ EMPTY = {type: "object", properties: {}, required: [], additionalProperties: false};

const isObject = (/** @type {unknown} */ value) => typeof value === "object" && value !== null && !Array.isArray(value);

/**
 * The field of a schema; null: only text can say it.
 * @returns {Field | null}
 */
export function fieldOf(/** @type {Schema} */ schema, name = "", optional = false) {
  if (!isObject(schema) || Object.keys(schema).some(key => !KNOWN.includes(key))) return null;
  if (![schema.enum, schema.required].every(value => value === undefined || Array.isArray(value))) return null;
  if (!isObject(schema.properties ?? {}) || typeof (schema.description ?? "") !== "string") return null;
  const kind = schema.enum ? "enum" : schema.type;
  if (!kind || !TYPES.includes(kind)) return null;
  const /** @type {Field} */ field = {name, kind, description: schema.description ?? "", optional};
  if (schema.enum) return schema.enum.every(value => typeof value === "string") ? {...field, values: schema.enum} : null;
  if (field.kind === "array") {
    const item = fieldOf(schema.items ?? {type: "string"});
    return item && {...field, item};
  }
  if (field.kind !== "object") return field;
  const required = schema.required ?? [];
  const fields = Object.entries(schema.properties ?? {}).map(([key, value]) => fieldOf(value, key, !required.includes(key)));
  return fields.every(one => one !== null) ? {...field, fields} : null;
}

/**
 * The schema of a field.
 * @returns {Schema}
 */
export function schemaOf(/** @type {Field} */ field) {
  const about = field.description ? {description: field.description} : {};
  if (field.kind === "enum") return {enum: field.values ?? [], ...about};
  if (field.kind === "array") return {type: "array", items: field.item ? schemaOf(field.item) : {}, ...about};
  if (field.kind !== "object") return {type: field.kind, ...about};
  const named = (field.fields ?? []).filter(one => one.name);
  return {
    type: "object",
    properties: Object.fromEntries(named.map(one => [one.name, schemaOf(one)])),
    required: named.filter(one => !one.optional).map(one => one.name),
    additionalProperties: false,
    ...about,
  };
}

/** @returns {Field} */
const fresh = (/** @type {string} */ name, /** @type {FieldKind} */ kind = "string") =>
  ({name, kind, description: "", optional: false, ...(kind === "object" && {fields: []}), ...(kind === "array" && {item: fresh("")}), ...(kind === "enum" && {values: ["yes", "no"]})});

function KindChoice(/** @type {Edited & {label: string}} */ {field, change, label}) {
  return html`<select aria-label=${label} value=${field.kind} onChange=${(/** @type {On<HTMLSelectElement>} */ event) => change({...fresh(field.name, /** @type {FieldKind} */ (event.target.value)), description: field.description, optional: field.optional})}>
    ${TYPES.map(kind => html`<option value=${kind}>${kind === "array" ? "list" : kind}</option>`)}</select>`;
}

function Inner(/** @type {Edited & {name: string}} */ {field, change, name}) {
  if (field.kind === "enum")
    return html`<label class="field">Values of ${name}, one a line<textarea rows="2" value=${field.values?.join("\n")} onChange=${(/** @type {On<HTMLTextAreaElement>} */ event) => change({...field, values: event.target.value.split("\n").filter(Boolean)})}></textarea></label>`;
  if (field.kind === "array")
    return html`<div class="nest"><span>each is a</span> <${KindChoice} field=${field.item} label=${`Type of the items of ${name}`} change=${(/** @type {Field} */ item) => change({...field, item})} />
      <${Inner} field=${field.item} name=${`${name}’s items`} change=${(/** @type {Field} */ item) => change({...field, item})} /></div>`;
  if (field.kind === "object") return html`<div class="nest"><${Fields} fields=${field.fields} within=${name} change=${(/** @type {Field[]} */ fields) => change({...field, fields})} /></div>`;
  return null;
}

function Fields(/** @type {{fields: Field[]; change: (fields: Field[]) => void; within: string}} */ {fields, change, within}) {
  const put = (/** @type {number} */ i, /** @type {Field} */ field) => change(fields.map((old, j) => (j === i ? field : old)));
  let n = fields.length + 1;
  while (fields.some(field => field.name === `field${n}`)) n += 1;
  return html`${fields.map((field, i) => html`<div class="schema-field">
      <div class="row">
        <input type="text" class="name" aria-label=${`Name of field ${i + 1} of ${within}`} value=${field.name} placeholder="name" spellcheck="false" onChange=${(/** @type {On} */ event) => put(i, {...field, name: event.target.value.trim()})} />
        <${KindChoice} field=${field} label=${`Type of ${field.name}`} change=${(/** @type {Field} */ changed) => put(i, changed)} />
        <${IconButton} icon="bin" label=${`Remove ${field.name}`} onClick=${() => change(fields.filter((_, j) => j !== i))} />
      </div>
      <div class="row">
        <input type="text" class="about" aria-label=${`Description of ${field.name}`} value=${field.description} placeholder="description (optional)" onChange=${(/** @type {On} */ event) => put(i, {...field, description: event.target.value})} />
        <${Switch} label="optional" checked=${field.optional} change=${(/** @type {boolean} */ optional) => put(i, {...field, optional})} />
      </div>
      <${Inner} field=${field} name=${field.name} change=${(/** @type {Field} */ changed) => put(i, changed)} />
    </div>`)}
    <button type="button" class="link" onClick=${() => change([...fields, fresh(`field${n}`)])}>Add a field</button>`;
}

/** Edits the schema `value`, an object's. */
export function SchemaEditor(/** @type {{value: Schema; change: (schema: Schema) => void; label: string}} */ {value, change, label}) {
  const field = fieldOf(value), [asText, setAsText] = useState(!field), [text, setText] = useState(""), [bad, setBad] = useState("");
  useEffect(() => { if (!bad) setText(JSON.stringify(value, null, 2)); }, [value]);
  const take = (/** @type {string} */ written) => {
    setText(written);
    try {
      const /** @type {unknown} */ parsed = JSON.parse(written), fits = typeof parsed === "object" && parsed !== null && !Array.isArray(parsed);
      setBad(fits ? "" : "A schema is an object.");
      if (fits) change(parsed);
    } catch (error) {
      setBad(reason(error));
    }
  };
  return html`<div class="schema" role="group" aria-label=${label}>
    ${asText || !field
      ? html`<textarea class="mono" rows="10" aria-label=${`${label} as text`} spellcheck="false" value=${text} onInput=${(/** @type {On<HTMLTextAreaElement>} */ event) => take(event.target.value)}></textarea>${bad && html`<p class="bad" role="alert">${bad}</p>`}`
      : html`<${Fields} fields=${field.fields ?? []} within=${label} change=${(/** @type {Field[]} */ fields) => change(schemaOf({...field, kind: "object", fields}))} />`}
    ${field && !bad && html`<button type="button" class="link" onClick=${() => setAsText(!asText)}>${asText ? "Edit as fields" : "Edit as JSON"}</button>`}
  </div>`;
}

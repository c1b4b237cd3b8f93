// The settings of a conversation: system prompt and presets, sampling, reasoning, structured output, tools, adapters;
// and those of the page: theme, keys, export and import.

/** @import {Adapter, Props} from "../src/bodies.js" */
/** @import {Limits, On, Schema, Shown, Tool} from "../src/types.js" */
import {apiKey, reason} from "./api.js";
import {exported, imported, joined} from "./exchange.js";
import {newId} from "./generate.js";
import {connect, named, needsKey} from "./models.js";
import {download, IconButton, NumberField, Switch} from "./parts.js";
import {EMPTY, SchemaEditor} from "./schema.js";
import {DEFAULTS, get, set, setSettings, settingsOf, useStore} from "./store.js";
import {ServerTools} from "./tools.js";
import {html, useRef, useState} from "./vendor/preact.js";

const /** @type {[string, string, Limits][]} */ SAMPLING = [ // name of the API, label, limits
  ["temperature", "Temperature", {min: 0, max: 100}],
  ["max_tokens", "Tokens at most", {min: -1, step: 1}],
  ["top_k", "Top-k", {min: 0, step: 1}],
  ["top_p", "Top-p", {min: 0, max: 1}],
  ["min_p", "Min-p", {min: 0, max: 1}],
  ["typical_p", "Typical-p", {min: 0, max: 1}],
  ["repeat_penalty", "Repeat penalty", {min: 0}],
  ["presence_penalty", "Presence penalty", {min: -2, max: 2}],
  ["frequency_penalty", "Frequency penalty", {min: -2, max: 2}],
  ["seed", "Seed", {min: -1, step: 1}],
];

/** The sampling settings with one changed; null: as the server does it. */
export function withSampling(/** @type {Record<string, number>} */ sampling, /** @type {string} */ name, /** @type {number | null} */ value) {
  const {[name]: _, ...others} = sampling;
  return value === null || Number.isNaN(value) ? others : {...others, [name]: value};
}

function Presets(/** @type {Shown} */ {settings}) {
  const presets = useStore(state => state.presets), [name, setName] = useState("");
  const [picked, setPicked] = useState("");
  const save = (/** @type {Event} */ event) => {
    event.preventDefault();
    const text = name.trim();
    if (!text) return;
    set({presets: [...presets.filter(one => one.name !== text), {name: text, settings}].sort((a, b) => a.name.localeCompare(b.name))});
    setPicked(text);
    setName("");
  };
  const pick = (/** @type {string} */ text) => {
    setPicked(text);
    const found = presets.find(one => one.name === text);
    setSettings(found ? {...DEFAULTS, ...found.settings} : DEFAULTS);
  };
  const drop = () => {
    const gone = presets.find(one => one.name === picked);
    const back = () => gone && set(now => ({presets: [...now.presets.filter(one => one.name !== gone.name), gone].sort((a, b) => a.name.localeCompare(b.name))}));
    set({presets: presets.filter(one => one.name !== picked), undo: {text: `The preset “${picked}” is deleted.`, act: back}});
    setPicked("");
  };
  return html`<section class="card"><h3>Preset</h3>
    <div class="row"><select id="preset" aria-label="Preset" value=${picked} onChange=${(/** @type {On<HTMLSelectElement>} */ event) => pick(event.target.value)}>
        <option value="">The server’s defaults</option>${presets.map(one => html`<option>${one.name}</option>`)}</select>
      ${picked && html`<${IconButton} icon="bin" label=${`Delete the preset ${picked}`} onClick=${drop} />`}</div>
    <form class="row" onSubmit=${save}><input type="text" id="preset-name" aria-label="Name of a preset" placeholder="Save these settings as…" value=${name} onInput=${(/** @type {On} */ event) => setName(event.target.value)} />
      <button type="submit" class="button" disabled=${!name.trim()}>Save</button></form>
  </section>`;
}

function Sampling(/** @type {Shown & {params: Partial<Record<string, unknown>>}} */ {settings, params}) {
  const told = (/** @type {string} */ name) => {
    const value = params[name];
    return name === "seed" ? "random" : typeof value === "number" ? String(+value.toFixed(4)) : "";
  };
  return html`<details class="card"><summary><h3>Sampling</h3></summary>
    <p class="note">An empty field means the server’s default, which it shows in grey.</p>
    <div class="grid">${SAMPLING.map(([name, label, limits]) => html`<${NumberField} key=${name} label=${label} name=${name} ...${limits} placeholder=${told(name)}
        value=${settings.sampling[name]} change=${(/** @type {number | null} */ value) => setSettings({sampling: withSampling(settings.sampling, name, value)})} />`)}
      <${NumberField} label="Alternatives shown" min="1" max="20" step="1" value=${settings.alternatives} change=${(/** @type {number | null} */ value) => setSettings({alternatives: Math.max(1, Math.min(20, value || 5))})} /></div>
    <label class="field">Stop texts, one a line<textarea id="halt" rows="1" spellcheck="false" value=${settings.stop} onInput=${(/** @type {On<HTMLTextAreaElement>} */ event) => setSettings({stop: event.target.value})}></textarea></label>
  </details>`;
}

function Reasoning(/** @type {Shown} */ {settings}) {
  return html`<details class="card"><summary><h3>Reasoning</h3></summary>
    <label class="field">Reasoning<select value=${settings.thinking} onChange=${(/** @type {On<HTMLSelectElement>} */ event) => setSettings({thinking: event.target.value})}>
      <option value="auto">as the model does it</option><option value="on">on</option><option value="off">off</option></select></label>
    <label class="field">Effort<select id="effort" value=${settings.effort} disabled=${settings.thinking === "off"} onChange=${(/** @type {On<HTMLSelectElement>} */ event) => setSettings({effort: event.target.value})}>
      <option value="">as the model does it</option>${["minimal", "low", "medium", "high"].map(one => html`<option>${one}</option>`)}</select></label>
  </details>`;
}

function Structured(/** @type {Shown} */ {settings}) {
  const {schema} = settings;
  return html`<details class="card" open=${Boolean(schema?.on)}><summary><h3>Structured output</h3></summary>
    <${Switch} label="Answers follow this JSON schema" id="structured" checked=${Boolean(schema?.on)} change=${(/** @type {boolean} */ on) => setSettings({schema: {value: EMPTY, ...schema, on}})} />
    ${schema && html`<${SchemaEditor} label="the answer" value=${schema.value} change=${(/** @type {Schema} */ value) => setSettings({schema: {...schema, value}})} />`}
  </details>`;
}

function Tools(/** @type {Shown & {caps: Props["chat_template_caps"]}} */ {settings, caps}) {
  const {tools} = settings, put = (/** @type {number} */ i, /** @type {Tool} */ tool) => setSettings({tools: tools.map((old, j) => (j === i ? tool : old))});
  const add = () => setSettings({tools: [...tools, {name: `tool${tools.length + 1}`, description: "", parameters: EMPTY}]});
  const drop = (/** @type {Tool} */ tool) => {
    setSettings({tools: tools.filter(one => one !== tool)});
    set({undo: {text: `The tool “${tool.name}” is removed.`, act: () => setSettings({tools: [...settingsOf().tools, tool]})}});
  };
  return html`<details class="card" open=${tools.length + (settings.serverTools?.length ?? 0) > 0}><summary><h3>Tools</h3></summary>
    <p class="note">Functions that the model may call. You type what they return.${caps.supports_tools === false ? " This model’s template has no place for tools; they are told in words." : ""}</p>
    ${tools.map((tool, i) => html`<fieldset class="tool"><legend>${tool.name}</legend>
      <div class="row"><input type="text" aria-label=${`Name of tool ${i + 1}`} value=${tool.name} spellcheck="false" onChange=${(/** @type {On} */ event) => put(i, {...tool, name: event.target.value.trim() || tool.name})} />
        <${IconButton} icon="bin" label=${`Remove ${tool.name}`} onClick=${() => drop(tool)} /></div>
      <input type="text" aria-label=${`Description of ${tool.name}`} placeholder="what it does" value=${tool.description} onChange=${(/** @type {On} */ event) => put(i, {...tool, description: event.target.value})} />
      <${SchemaEditor} label=${`arguments of ${tool.name}`} value=${tool.parameters} change=${(/** @type {Schema} */ parameters) => put(i, {...tool, parameters})} />
    </fieldset>`)}
    <button type="button" class="link" onClick=${add}>Add a tool</button>
    <${ServerTools} settings=${settings} />
  </details>`;
}

function Adapters(/** @type {Shown & {adapters: Adapter[]}} */ {settings, adapters: all}) {
  const adapters = all.filter(one => !one.model?.includes("@")); // no checkpoints
  if (!adapters.length) return null;
  const move = (/** @type {number} */ id, /** @type {number} */ value) => setSettings({lora: {...settings.lora, [id]: value}});
  return html`<details class="card" open><summary><h3>Adapters</h3></summary>
    ${adapters.map(one => {
      const scale = settings.lora[one.id] ?? one.scale, name = one.model ?? named(one.path);
      return html`<label class="field slider"><span>${name}<output>${scale.toFixed(2)}</output></span>
        <input type="range" min="0" max="2" step="0.05" value=${scale} aria-label=${`Scale of ${name}`} onInput=${(/** @type {On} */ event) => move(one.id, event.target.valueAsNumber)} /></label>`;
    })}
    ${Object.keys(settings.lora).length > 0 && html`<button type="button" class="link" onClick=${() => setSettings({lora: {}})}>As the server has them</button>`}
  </details>`;
}

function Saved() {
  const picker = useRef(/** @type {HTMLInputElement | null} */ (null)), [told, setTold] = useState("");
  /** @param {File} [file] */
  const bring = async (file) => {
    if (!file) return;
    try {
      const found = imported(await file.text());
      set(now => ({conversations: joined(now.conversations, found, newId)}));
      setTold(`${found.length} conversations imported.`);
    } catch (error) {
      setTold(reason(error));
    }
  };
  return html`<p class="row"><button type="button" class="button" id="export" onClick=${() => download("logitless-conversations.json", exported(get().conversations))}>Export</button>
      <button type="button" class="button" onClick=${() => picker.current?.click()}>Import</button>
      <input type="file" id="import" class="unseen" tabindex="-1" aria-label="Import conversations" accept=".json,application/json" ref=${picker} onChange=${(/** @type {On} */ event) => { bring(event.target.files?.[0]); event.target.value = ""; }} /></p>
    <p class="note" role="status" id="imported">${told || "Conversations and settings stay in this browser."}</p>`;
}

export function Key() {
  return html`<form class="field" onSubmit=${(/** @type {On<HTMLFormElement>} */ event) => { event.preventDefault(); apiKey.set(String(new FormData(event.target).get("key")).trim()); connect(); }}>
    <label for="key">API key</label>
    <span class="row"><input id="key" name="key" type="password" autocomplete="off" spellcheck="false" value=${apiKey.get()} /><button type="submit" class="button">Use</button></span></form>`;
}

function Page() {
  const theme = useStore(state => state.theme), enterSends = useStore(state => state.enterSends), refusal = useStore(state => state.refusal);
  return html`<details class="card" open><summary><h3>This page</h3></summary>
    <label class="field">Colours<select id="theme" value=${theme} onChange=${(/** @type {On<HTMLSelectElement>} */ event) => set({theme: event.target.value})}>
      <option value="auto">as the system</option><option value="light">light</option><option value="dark">dark</option></select></label>
    <${Switch} label="Enter sends, Shift+Enter begins a line" checked=${enterSends} change=${(/** @type {boolean} */ value) => set({enterSends: value})} />
    ${!needsKey(refusal) && html`<${Key} />`}
    <${Saved} />
  </details>`;
}

export function Settings() {
  const settings = useStore(settingsOf), props = useStore(state => state.props), adapters = useStore(state => state.adapters);
  return html`<aside class="drawer" aria-label="Settings">
    <header><h2>Settings</h2><${IconButton} icon="close" label="Close" onClick=${() => set({drawer: ""})} /></header>
    <${Presets} settings=${settings} />
    <section class="card"><h3><label for="system">System prompt</label></h3>
      <textarea id="system" rows="3" value=${settings.system} placeholder="How the model is to answer" onInput=${(/** @type {On<HTMLTextAreaElement>} */ event) => setSettings({system: event.target.value})}></textarea></section>
    <${Adapters} settings=${settings} adapters=${adapters} />
    <${Sampling} settings=${settings} params=${props?.default_generation_settings?.params ?? {}} />
    <${Reasoning} settings=${settings} />
    <${Structured} settings=${settings} />
    <${Tools} settings=${settings} caps=${props?.chat_template_caps ?? {}} />
    <${Page} />
  </aside>`;
}

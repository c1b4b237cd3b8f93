// The settings of a conversation: system prompt and presets, sampling, reasoning, structured output, tools, adapters;
// and those of the page: theme, keys, export and import.

import {apiKey, reason} from "./api.js";
import type {Adapter, Props} from "./bodies.js";
import {exported, imported, joined} from "./exchange.js";
import {newId} from "./generate.js";
import {connect, named, needsKey} from "./models.js";
import type {Limits, On} from "./parts.js";
import {download, IconButton, NumberField, Switch} from "./parts.js";
import type {Schema} from "./schema.js";
import {EMPTY, SchemaEditor} from "./schema.js";
import type {Settings as Values, Tool} from "./store.js";
import {DEFAULTS, get, set, setSettings, settingsOf, useStore} from "./store.js";
import {ServerTools} from "./tools.js";
import {html, useRef, useState} from "./vendor/preact.js";

const SAMPLING: [string, string, Limits][] = [ // name of the API, label, limits
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
export function withSampling(sampling: Record<string, number>, name: string, value: number | null) {
  const {[name]: _, ...others} = sampling;
  return value === null || Number.isNaN(value) ? others : {...others, [name]: value};
}

interface Shown {
  settings: Values;
}

function Presets({settings}: Shown) {
  const presets = useStore(state => state.presets), [name, setName] = useState("");
  const [picked, setPicked] = useState("");
  const save = (event: Event) => {
    event.preventDefault();
    const text = name.trim();
    if (!text) return;
    set({presets: [...presets.filter(one => one.name !== text), {name: text, settings}].sort((a, b) => a.name.localeCompare(b.name))});
    setPicked(text);
    setName("");
  };
  const pick = (text: string) => {
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
    <div class="row"><select id="preset" aria-label="Preset" value=${picked} onChange=${(event: On<HTMLSelectElement>) => pick(event.target.value)}>
        <option value="">The server’s defaults</option>${presets.map(one => html`<option>${one.name}</option>`)}</select>
      ${picked && html`<${IconButton} icon="bin" label=${`Delete the preset ${picked}`} onClick=${drop} />`}</div>
    <form class="row" onSubmit=${save}><input type="text" id="preset-name" aria-label="Name of a preset" placeholder="Save these settings as…" value=${name} onInput=${(event: On) => setName(event.target.value)} />
      <button type="submit" class="button" disabled=${!name.trim()}>Save</button></form>
  </section>`;
}

function Sampling({settings, params}: Shown & {params: Partial<Record<string, unknown>>}) {
  const told = (name: string) => {
    const value = params[name];
    return name === "seed" ? "random" : typeof value === "number" ? String(+value.toFixed(4)) : "";
  };
  return html`<details class="card"><summary><h3>Sampling</h3></summary>
    <p class="note">An empty field means the server’s default, which it shows in grey.</p>
    <div class="grid">${SAMPLING.map(([name, label, limits]) => html`<${NumberField} key=${name} label=${label} name=${name} ...${limits} placeholder=${told(name)}
        value=${settings.sampling[name]} change=${(value: number | null) => setSettings({sampling: withSampling(settings.sampling, name, value)})} />`)}
      <${NumberField} label="Alternatives shown" min="1" max="20" step="1" value=${settings.alternatives} change=${(value: number | null) => setSettings({alternatives: Math.max(1, Math.min(20, value || 5))})} /></div>
    <label class="field">Stop texts, one a line<textarea id="halt" rows="1" spellcheck="false" value=${settings.stop} onInput=${(event: On<HTMLTextAreaElement>) => setSettings({stop: event.target.value})}></textarea></label>
  </details>`;
}

function Reasoning({settings}: Shown) {
  return html`<details class="card"><summary><h3>Reasoning</h3></summary>
    <label class="field">Reasoning<select value=${settings.thinking} onChange=${(event: On<HTMLSelectElement>) => setSettings({thinking: event.target.value})}>
      <option value="auto">as the model does it</option><option value="on">on</option><option value="off">off</option></select></label>
    <label class="field">Effort<select id="effort" value=${settings.effort} disabled=${settings.thinking === "off"} onChange=${(event: On<HTMLSelectElement>) => setSettings({effort: event.target.value})}>
      <option value="">as the model does it</option>${["minimal", "low", "medium", "high"].map(one => html`<option>${one}</option>`)}</select></label>
  </details>`;
}

function Structured({settings}: Shown) {
  const {schema} = settings;
  return html`<details class="card" open=${Boolean(schema?.on)}><summary><h3>Structured output</h3></summary>
    <${Switch} label="Answers follow this JSON schema" id="structured" checked=${Boolean(schema?.on)} change=${(on: boolean) => setSettings({schema: {value: EMPTY, ...schema, on}})} />
    ${schema && html`<${SchemaEditor} label="the answer" value=${schema.value} change=${(value: Schema) => setSettings({schema: {...schema, value}})} />`}
  </details>`;
}

function Tools({settings, caps}: Shown & {caps: Props["chat_template_caps"]}) {
  const {tools} = settings, put = (i: number, tool: Tool) => setSettings({tools: tools.map((old, j) => (j === i ? tool : old))});
  const add = () => setSettings({tools: [...tools, {name: `tool${tools.length + 1}`, description: "", parameters: EMPTY}]});
  const drop = (tool: Tool) => {
    setSettings({tools: tools.filter(one => one !== tool)});
    set({undo: {text: `The tool “${tool.name}” is removed.`, act: () => setSettings({tools: [...settingsOf().tools, tool]})}});
  };
  return html`<details class="card" open=${tools.length + (settings.serverTools?.length ?? 0) > 0}><summary><h3>Tools</h3></summary>
    <p class="note">Functions that the model may call. You type what they return.${caps.supports_tools === false ? " This model’s template has no place for tools; they are told in words." : ""}</p>
    ${tools.map((tool, i) => html`<fieldset class="tool"><legend>${tool.name}</legend>
      <div class="row"><input type="text" aria-label=${`Name of tool ${i + 1}`} value=${tool.name} spellcheck="false" onChange=${(event: On) => put(i, {...tool, name: event.target.value.trim() || tool.name})} />
        <${IconButton} icon="bin" label=${`Remove ${tool.name}`} onClick=${() => drop(tool)} /></div>
      <input type="text" aria-label=${`Description of ${tool.name}`} placeholder="what it does" value=${tool.description} onChange=${(event: On) => put(i, {...tool, description: event.target.value})} />
      <${SchemaEditor} label=${`arguments of ${tool.name}`} value=${tool.parameters} change=${(parameters: Schema) => put(i, {...tool, parameters})} />
    </fieldset>`)}
    <button type="button" class="link" onClick=${add}>Add a tool</button>
    <${ServerTools} settings=${settings} />
  </details>`;
}

function Adapters({settings, adapters: all}: Shown & {adapters: Adapter[]}) {
  const adapters = all.filter(one => !one.model?.includes("@")); // no checkpoints
  if (!adapters.length) return null;
  const move = (id: number, value: number) => setSettings({lora: {...settings.lora, [id]: value}});
  return html`<details class="card" open><summary><h3>Adapters</h3></summary>
    ${adapters.map(one => {
      const scale = settings.lora[one.id] ?? one.scale, name = one.model ?? named(one.path);
      return html`<label class="field slider"><span>${name}<output>${scale.toFixed(2)}</output></span>
        <input type="range" min="0" max="2" step="0.05" value=${scale} aria-label=${`Scale of ${name}`} onInput=${(event: On) => move(one.id, event.target.valueAsNumber)} /></label>`;
    })}
    ${Object.keys(settings.lora).length > 0 && html`<button type="button" class="link" onClick=${() => setSettings({lora: {}})}>As the server has them</button>`}
  </details>`;
}

function Saved() {
  const picker = useRef<HTMLInputElement>(null), [told, setTold] = useState("");
  const bring = async (file?: File) => {
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
      <input type="file" id="import" class="unseen" tabindex="-1" aria-label="Import conversations" accept=".json,application/json" ref=${picker} onChange=${(event: On) => { bring(event.target.files?.[0]); event.target.value = ""; }} /></p>
    <p class="note" role="status" id="imported">${told || "Conversations and settings stay in this browser."}</p>`;
}

export function Key() {
  return html`<form class="field" onSubmit=${(event: On<HTMLFormElement>) => { event.preventDefault(); apiKey.set(String(new FormData(event.target).get("key")).trim()); connect(); }}>
    <label for="key">API key</label>
    <span class="row"><input id="key" name="key" type="password" autocomplete="off" spellcheck="false" value=${apiKey.get()} /><button type="submit" class="button">Use</button></span></form>`;
}

function Page() {
  const theme = useStore(state => state.theme), enterSends = useStore(state => state.enterSends), refusal = useStore(state => state.refusal);
  return html`<details class="card" open><summary><h3>This page</h3></summary>
    <label class="field">Colours<select id="theme" value=${theme} onChange=${(event: On<HTMLSelectElement>) => set({theme: event.target.value})}>
      <option value="auto">as the system</option><option value="light">light</option><option value="dark">dark</option></select></label>
    <${Switch} label="Enter sends, Shift+Enter begins a line" checked=${enterSends} change=${(value: boolean) => set({enterSends: value})} />
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
      <textarea id="system" rows="3" value=${settings.system} placeholder="How the model is to answer" onInput=${(event: On<HTMLTextAreaElement>) => setSettings({system: event.target.value})}></textarea></section>
    <${Adapters} settings=${settings} adapters=${adapters} />
    <${Sampling} settings=${settings} params=${props?.default_generation_settings?.params ?? {}} />
    <${Reasoning} settings=${settings} />
    <${Structured} settings=${settings} />
    <${Tools} settings=${settings} caps=${props?.chat_template_caps ?? {}} />
    <${Page} />
  </aside>`;
}

// Two models, or an adapter and its base, answer the same messages side by side.

/** @import {Adapter} from "../src/bodies.js" */
/** @import {Answer as AnswerNode, Choice, Conversation, On, Pair, Settings, SideProps} from "../src/types.js" */
import {stream} from "./api.js";
import {Answer, Thought} from "./chat.js";
import {follow, newId} from "./generate.js";
import {named} from "./models.js";
import {Copy, count, Icon, IconButton, rate} from "./parts.js";
import {requestFor} from "./request.js";
import {get, set, settingsOf, useStore} from "./store.js";
import {added, answerOf, changed, newConversation, path} from "./tree.js";
import {html, useEffect, useRef, useState} from "./vendor/preact.js";

let /** @type {{sides: Pair<Choice> | null; talks: Pair<Conversation> | null}} */ kept = {sides: null, talks: null}; // what is compared stays while other views are shown

/** Show this view with these two models. */
export function compare(/** @type {string} */ left, /** @type {string} */ right) {
  kept = {sides: [{model: left, adapter: ""}, {model: right, adapter: ""}], talks: null};
  set({view: "compare", side: false});
}

const fresh = () => newConversation(`compare-${Math.random()}`, settingsOf());

/**
 * @template T
 * @template R
 * @param {Pair<T>} pair
 * @param {(one: T, side: 0 | 1) => R} change
 * @returns {Pair<R>}
 */
const both = ([left, right], change) => [change(left, 0), change(right, 1)];

/**
 * Settings with one adapter alone, or with none; "" leaves them to the model's name.
 * @returns {Settings}
 */
function withAdapter(/** @type {Settings} */ settings, /** @type {Adapter[]} */ adapters, /** @type {Choice} */ {adapter, scale}) {
  if (adapter === "") return {...settings, lora: {}};
  return {...settings, lora: Object.fromEntries(adapters.map(one => [one.id, String(one.id) === adapter ? scale ?? 1 : 0]))};
}

function Side(/** @type {SideProps} */ {side, change, models, adapters, name}) {
  return html`<div class="row side-choice">
    <select aria-label=${`Model on the ${name}`} value=${side.model} onChange=${(/** @type {On<HTMLSelectElement>} */ event) => change({...side, model: event.target.value})}>
      ${models.map(one => html`<option key=${one.id} value=${one.id}>${named(one.id)}</option>`)}</select>
    ${adapters.length > 0 && html`<select aria-label=${`Adapter on the ${name}`} value=${side.adapter} onChange=${(/** @type {On<HTMLSelectElement>} */ event) => change({...side, adapter: event.target.value})}>
      <option value="">default adapters</option><option value="none">no adapter</option>
      ${adapters.map(one => html`<option value=${String(one.id)}>${one.model ?? named(one.path)}</option>`)}</select>`}
    ${side.adapter !== "" && side.adapter !== "none" && html`<label class="scale"><span class="unseen">Scale on the ${name}</span>
      <input type="range" min="0" max="2" step="0.05" value=${side.scale ?? 1} onInput=${(/** @type {On} */ event) => change({...side, scale: event.target.valueAsNumber})} />${(side.scale ?? 1).toFixed(2)}</label>`}
  </div>`;
}

function Told(/** @type {{node: AnswerNode}} */ {node}) {
  return html`<article class="assistant"><${Thought} node=${node} /><${Answer} node=${node} />
    ${node.status === "failed" && html`<p class="cut bad" role="alert">${node.error}</p>`}
    ${node.status === "length" && html`<p class="cut">Cut at the limit of tokens.</p>`}
    ${node.status === "stopped" && html`<p class="cut">Stopped.</p>`}
    <div class="actions"><${Copy} label="Copy message" text=${node.content} />
      ${node.timings && node.timings.n > 0 && html`<span class="speed">${count(node.timings.n)} tokens · ${rate(node.timings.rate)}</span>`}</div></article>`;
}

function Talk(/** @type {{talk: Conversation; name: string; keep: () => void}} */ {talk, name, keep}) {
  const nodes = path(talk);
  return html`<section class="talk" aria-label=${`Answers on the ${name}`}>
    ${nodes.map(node => (node.role === "assistant" ? html`<${Told} key=${node.id} node=${node} />`
      : html`<article class="user" key=${node.id}><div class="said">${node.content}</div></article>`))}
    ${nodes.length > 0 && html`<button type="button" class="link" onClick=${keep}>Go on with this one as a conversation</button>`}
  </section>`;
}

export function Compare() {
  const models = useStore(state => state.models), model = useStore(state => state.model), adapters = useStore(state => state.adapters);
  const unnamed = adapters.filter(one => !one.model); // those with a name are among the models
  const tuned = models.find(one => one.parent), other = models.find(one => one.id !== model);
  const /** @type {Pair<Choice>} */ first = [{model: tuned?.parent ?? model, adapter: ""}, {model: tuned?.id ?? other?.id ?? model, adapter: ""}];
  const [sides, setSides] = useState(kept.sides ?? first), [talks, setTalks] = useState(/** @type {Pair<Conversation>} */ (kept.talks ?? [fresh(), fresh()]));
  const [text, setText] = useState(""), [control, setControl] = useState(/** @type {AbortController | null} */ (null)), latest = useRef(talks), box = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  kept = {sides, talks};
  const put = (/** @type {0 | 1} */ i, /** @type {Conversation} */ talk) => {
    latest.current = both(latest.current, (old, j) => (j === i ? talk : old));
    kept = {...kept, talks: latest.current};
    setTalks(latest.current);
  };
  const one = (/** @type {0 | 1} */ i, /** @type {AbortSignal} */ signal, /** @type {string} */ said) => {
    const side = sides[i], settings = withAdapter({...settingsOf(), probabilities: false}, adapters, side);
    const old = latest.current[i], {model} = side, at = Date.now();
    const asking = added({...old, settings}, old.leaf, {role: "user", content: said, at});
    const talk = added(asking, asking.leaf, {role: "assistant", content: "", model, status: "running", at});
    put(i, talk);
    const answer = answerOf(talk, talk.leaf), asked = requestFor(talk, talk.leaf, {model, adapters});
    return follow({pieces: stream(asked.url, asked.body, signal), signal, answer, change: next => put(i, changed(latest.current[i], answer.id, next))});
  };
  const send = async (/** @type {Event} */ event) => {
    event.preventDefault();
    if (control || !text.trim()) return;
    const made = new AbortController();
    setControl(made);
    setText("");
    await Promise.all([one(0, made.signal, text), one(1, made.signal, text)]);
    setControl(null);
  };
  const clear = () => {
    control?.abort();
    const gone = latest.current, show = (/** @type {Pair<Conversation>} */ talks) => {
      latest.current = talks;
      kept = {...kept, talks};
      setTalks(talks);
    };
    show([fresh(), fresh()]);
    if (gone.some(talk => talk.leaf)) set({undo: {text: "Both sides are cleared.", act: () => { show(gone); set({view: "compare"}); }}});
  };
  const keep = (/** @type {0 | 1} */ i) => {
    const id = newId(), talk = {...latest.current[i], id, at: Date.now()};
    set(now => ({conversations: [talk, ...now.conversations], current: id, view: "chat", model: sides[i].model}));
  };
  useEffect(() => {
    box.current?.focus();
    const press = (/** @type {KeyboardEvent} */ event) => event.key === "Escape" && control?.abort();
    document.addEventListener("keydown", press);
    return () => document.removeEventListener("keydown", press);
  }, [control]);
  const names = /** @type {const} */ (["left", "right"]);
  return html`<section class="chat compare" aria-label="Compare">
    <div class="halves heads">${both(sides, (side, i) => html`<${Side} side=${side} name=${names[i]} models=${models} adapters=${unnamed}
      change=${(/** @type {Choice} */ next) => setSides(both(sides, (old, j) => (j === i ? next : old)))} />`)}</div>
    <div class="halves talks" tabindex="0" role="log" aria-label="Answers" aria-busy=${String(Boolean(control))}>${both(talks, (talk, i) => html`<${Talk} talk=${talk} name=${names[i]} keep=${() => keep(i)} />`)}</div>
    <div class="column foot"><form id="form" onSubmit=${send}>
      <label class="unseen" for="text">Message to both</label>
      <textarea id="text" ref=${box} rows="2" value=${text} placeholder="Ask both" onInput=${(/** @type {On<HTMLTextAreaElement>} */ event) => setText(event.target.value)}
        onKeyDown=${(/** @type {KeyboardEvent} */ event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && get().enterSends && send(event)}></textarea>
      <div class="buttons"><button type="button" class="chip" onClick=${clear}>Clear</button>
        ${control ? html`<${IconButton} icon="stop" label="Stop (Escape)" id="stop" class="main" onClick=${() => control.abort()} />`
          : html`<button id="send" class="icon-button main" type="submit" aria-label="Send" title="Send" disabled=${!text.trim()}><${Icon} name="send" /></button>`}</div>
    </form></div>
  </section>`;
}

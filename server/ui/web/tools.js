// Tools of the server: their list, the selection of a conversation, and calls, each after the user's consent.

/** @import {Props, ToolAnswer, ToolEntry} from "../src/bodies.js" */
/** @import {Conversation, On, Settings, State, ToolCallProps} from "../src/types.js" */
import {isAbort, json, post, reason} from "./api.js";
import {answerCall} from "./generate.js";
import {get, set, setSettings, useStore} from "./store.js";
import {path} from "./tree.js";
import {html, useEffect, useRef, useState} from "./vendor/preact.js";

const MOST = 10; // calls that run by themselves after a message of the user

/** Ask which tools the server runs; `props` says whether it runs any. */
export async function lookAtTools(/** @type {Props} */ props) {
  const serverTools = props?.endpoint_tools ? await /** @type {Promise<ToolEntry[]>} */ (json("tools")).catch(() => []) : [];
  set({serverTools: Array.isArray(serverTools) ? serverTools : []});
}

const find = (/** @type {string} */ name) => get().serverTools.find(tool => tool.tool === name);

/** Run a tool; the text of its result, as the model reads it. Throws what the server refused. */
async function call(/** @type {string} */ name, /** @type {object} */ params, /** @type {AbortSignal} */ signal) {
  const answer = await /** @type {Promise<ToolAnswer>} */ (post("tools", {tool: name, params}, signal));
  return answer.plain_text_response ?? JSON.stringify(answer);
}

/** How many calls have had their results since the user's last message. */
const inARow = (/** @type {Conversation} */ conversation) => {
  const nodes = path(conversation), from = nodes.findLastIndex(node => node.role === "user");
  return nodes.slice(from + 1).filter(node => node.role === "tool").length;
};

/** True while the answer, with results of its calls, is the end of the conversation. */
const isLast = (/** @type {Conversation} */ conversation, /** @type {string} */ id) => {
  const nodes = path(conversation), at = nodes.findIndex(node => node.id === id);
  return at >= 0 && nodes.slice(at + 1).every(node => node.role === "tool");
};

/** @returns {object | null} */
function parsed(/** @type {string} */ text) {
  try {
    const /** @type {unknown} */ value = JSON.parse(text || "{}");
    return value && typeof value === "object" && !Array.isArray(value) ? value : null;
  } catch {
    return null;
  }
}

/** Names of the tools that run without a question in a conversation: until the page is left, and in no export. */
const allowedIn = (/** @type {State} */ state, /** @type {string} */ id) => state.allowed[id] ?? NONE;
const /** @type {string[]} */ NONE = [];
const allow = (/** @type {string} */ id, /** @type {string[]} */ names) => set(now => ({allowed: {...now.allowed, [id]: names}}));

/** A call that waits: what may be done with it. `children`: the form for a result that is typed. */
export function ServerCall(/** @type {ToolCallProps} */ {conversation: {id}, node, call: {id: callId, name, text}, children}) {
  const tool = useStore(state => state.serverTools.find(one => one.tool === name));
  const allowed = useStore(state => allowedIn(state, id).includes(name));
  const [running, setRunning] = useState(/** @type {AbortController | null} */ (null)), [told, setTold] = useState(""), begun = useRef(false);
  const conversation = () => get().conversations.find(one => one.id === id), params = parsed(text);
  const give = (/** @type {string} */ result) => {
    const now = conversation();
    if (now?.nodes[node.id] && isLast(now, node.id)) answerCall(id, node.id, {id: callId, name}, result);
  };
  const run = async () => {
    if (!params) return;
    const control = new AbortController();
    setTold("");
    setRunning(control);
    try {
      give(await call(name, params, control.signal));
    } catch (error) {
      setTold(isAbort(error) ? "Stopped." : reason(error));
    }
    setRunning(null);
  };
  const always = () => {
    allow(id, [...new Set([...allowedIn(get(), id), name])]);
    begun.current = true;
    run();
  };
  const now = conversation(), byItself = tool && params && allowed && now && isLast(now, node.id);
  const many = byItself && inARow(now) >= MOST;
  useEffect(() => {
    if (!byItself || many || begun.current) return;
    begun.current = true;
    run();
  }, [Boolean(byItself), Boolean(many)]);
  if (!tool) return children;
  if (running) return html`<p class="row" role="status">Running ${name}… <button type="button" class="button" onClick=${() => running.abort()}>Stop the tool</button></p>`;
  if (!params) return html`<p class="cut bad" role="alert">The arguments are not a JSON object.</p>${children}`;
  const may = tool.permissions?.write ? "It may change something." : "It only reads.";
  return html`<div class="asks" role="group" aria-label=${`May ${name} run?`}>
    <p>${many ? `${MOST} calls ran by themselves. ` : ""}The server runs <code>${name}</code> once you allow it. ${may}</p>
    <div class="row"><button type="button" class="button primary" onClick=${run}>Allow once</button>
      <button type="button" class="button" onClick=${always}>Always allow ${name} here</button>
      <button type="button" class="button" onClick=${() => give("The user did not allow this call.")}>Refuse</button></div>
    ${told && html`<p class="cut bad" role="alert">${told}</p>`}
  </div>`;
}

/** The choice of tools of a conversation. */
export function ServerTools(/** @type {{settings: Settings}} */ {settings}) {
  const all = useStore(state => state.serverTools), own = settings.serverTools ?? [];
  const allowed = useStore(state => allowedIn(state, state.current ?? ""));
  if (!all.length) return null;
  const choose = (/** @type {string} */ name, /** @type {boolean} */ on) => setSettings({serverTools: on ? [...own, name] : own.filter(one => one !== name)});
  return html`<fieldset class="tool"><legend>Tools of the server</legend>
    <p class="note">The page asks before each call.</p>
    ${all.map(({tool, definition}) => html`<label class="check" title=${(/** @type {{description?: string}} */ (definition.function)).description}>
      <input type="checkbox" name=${`tool-${tool}`} checked=${own.includes(tool)} onChange=${(/** @type {On} */ event) => choose(tool, event.target.checked)} /> ${tool}</label>`)}
    ${allowed.length > 0 && html`<p class="note">Allowed here without a question: ${allowed.join(", ")}.
      <button type="button" class="link" onClick=${() => allow(get().current ?? "", [])}>Ask again</button></p>`}
  </fieldset>`;
}

/** Declarations of a conversation's tools, as requests have them. */
export const declared = (/** @type {Settings} */ settings) =>
  (settings.serverTools ?? []).map(find).filter(tool => tool !== undefined).map(tool => tool.definition);

// A conversation: its messages with their actions, and the form below them.

/** @import {Answer as AnswerNode, AnswerProps, Call as ToolCall, CallProps, Conversation, Message, MessageProps, MessageState, On, Question, Take, Timings, TokensProps} from "../src/types.js" */
/** @import {RefObject} from "./vendor/preact.js" */
import {Composer} from "./composer.js";
import {again, answerCall, edit, goOn, isRunning, tryInstead} from "./generate.js";
import {show} from "./markdown.js";
import {sorted} from "./merge.js";
import {absent, chosen as chosenModel, named} from "./models.js";
import {Copy, count, IconButton, rate} from "./parts.js";
import {current, DEFAULTS, set, setSettings, settingsOf, update, useStore} from "./store.js";
import {showTokens} from "./tokens.js";
import {ServerCall} from "./tools.js";
import {changed, chosen, path, removed, siblings, unanswered} from "./tree.js";
import {Component, html, useEffect, useLayoutEffect, useRef, useState} from "./vendor/preact.js";

/** Markdown, drawn into an element of its own. */
export function Markdown(/** @type {{text: string}} */ {text}) {
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  useLayoutEffect(() => show(/** @type {NonNullable<typeof box.current>} */ (box.current), text), [text]);
  return html`<div class="markdown" ref=${box}></div>`;
}

/** Tokens with their probabilities; arrow keys go through them. */
export function Tokens(/** @type {TokensProps} */ {groups, kind, take, label}) {
  const box = useRef(/** @type {HTMLDivElement | null} */ (null)), latest = useRef(take);
  latest.current = take;
  useLayoutEffect(() => showTokens(/** @type {NonNullable<typeof box.current>} */ (box.current), groups, kind, (...how) => latest.current(...how)), [groups]);
  return html`<div class="tokens" tabindex="0" role="group" aria-label=${label} ref=${box}></div>`;
}

const hasTokens = (/** @type {AnswerNode} */ node) => Boolean(node.tokens?.length) && node.shown !== "text";

export function Thought(/** @type {AnswerProps} */ {node, take}) {
  if (!node.thought) return null;
  const thinking = node.status === "running" && !node.content && !node.calls;
  return html`<details class="thought" open=${thinking}>
    <summary>${thinking ? "Thinking…" : "Reasoning"}</summary>
    ${hasTokens(node) && take
      ? html`<${Tokens} groups=${node.tokens} kind="thought" take=${take} label="Reasoning; arrow keys tell its tokens’ probabilities" />`
      : html`<${Markdown} text=${node.thought} />`}
  </details>`;
}

/** The text of an answer, as Markdown or as tokens. */
export function Answer(/** @type {AnswerProps} */ {node, take}) {
  const label = "Answer; arrow keys tell its tokens’ probabilities, Enter chooses another one";
  return html`<div class=${`answer ${node.status === "running" ? "busy" : ""}`}>
    ${hasTokens(node) && take
      ? html`<${Tokens} groups=${node.tokens} kind="text" take=${take} label=${label} />`
      : html`<${Markdown} text=${node.content} />`}
  </div>`;
}

function pretty(/** @type {string} */ text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function Call(/** @type {CallProps} */ {call, answer, waits, conversation, node}) {
  const [text, setText] = useState("");
  const submit = (/** @type {Event} */ event) => {
    event.preventDefault();
    answer(call, text);
  };
  return html`<div class="call">
    <h3>Calls <code>${call.name}</code></h3>
    <pre tabindex="0" role="region" aria-label=${`Arguments of ${call.name}`}>${pretty(call.text)}</pre>
    ${waits && html`<${ServerCall} conversation=${conversation} node=${node} call=${call}><form onSubmit=${submit}>
      <label>Result of ${call.name}<textarea rows="2" value=${text} placeholder="What the tool returns" onInput=${(/** @type {On<HTMLTextAreaElement>} */ event) => setText(event.target.value)}></textarea></label>
      <button type="submit" class="button">Answer the call</button></form><//>`}
  </div>`;
}

function Branches(/** @type {{conversation: Conversation; node: Message}} */ {conversation, node}) {
  const all = siblings(conversation, node.id), at = all.indexOf(node.id);
  if (all.length < 2) return null;
  const go = (/** @type {number} */ by) => update(conversation.id, one => chosen(one, all[at + by] ?? node.id));
  return html`<span class="branches" role="group" aria-label="Branches">
    <${IconButton} icon="left" label="Previous branch" disabled=${at === 0} onClick=${() => go(-1)} />
    <span>${at + 1} / ${all.length}</span>
    <${IconButton} icon="right" label="Next branch" disabled=${at === all.length - 1} onClick=${() => go(1)} /></span>`;
}

function speed(/** @type {Timings} */ {n, rate: perSecond, prompt, cached}) {
  if (!n) return "";
  return [`${count(n)} tokens`, perSecond && rate(perSecond), `prompt ${count(prompt + cached)}`,
    cached && `${count(cached)} cached`].filter(Boolean).join(" · ");
}

const /** @type {Partial<Record<string, string>>} */ CUT = {stopped: "Stopped.", length: "Cut at the limit of tokens."};

function Ended(/** @type {{conversation: Conversation; node: AnswerNode; last: boolean}} */ {conversation, node, last}) {
  if (node.status === "failed") return html`<p class="cut bad" role="alert">${node.error}</p>`;
  const cut = CUT[node.status ?? ""];
  if (!cut) return null;
  return html`<p class="cut">${cut}
    ${last && !node.calls && html` <button type="button" class="link" onClick=${() => goOn(conversation.id, node.id)}>Continue</button>`}</p>`;
}

function Actions(/** @type {{conversation: Conversation; node: Message; startEdit: () => void}} */ {conversation, node, startEdit}) {
  const models = useStore(state => state.models);
  if (isRunning(conversation.id)) return null;
  const {id} = conversation, answer = node.role === "assistant" ? node : null, probable = answer !== null && hasTokens(answer);
  const remove = () => {
    const before = current();
    if (!before?.nodes[node.id]) return;
    const left = removed(before, node.id), gone = Object.entries(before.nodes).filter(([key]) => !left.nodes[key]);
    const back = () => update(id, one => ({...one, nodes: sorted({...Object.fromEntries(gone), ...one.nodes}), leaf: before.leaf}));
    update(id, () => left);
    set({undo: {text: gone.length === 1 ? "The message is deleted." : `${gone.length} messages are deleted.`, act: back}});
  };
  const show = () => update(id, one => changed(one, node.id, {shown: probable ? "text" : "tokens"}));
  return html`<div class="actions">
    <${Branches} conversation=${conversation} node=${node} />
    <${Copy} label="Copy message" text=${node.content} />
    ${node.role === "user" && html`<${IconButton} icon="edit" label="Edit" onClick=${startEdit} />`}
    ${answer && html`<${IconButton} icon="again" label="Regenerate" onClick=${() => again(id, answer)} />`}
    ${answer && models.length > 1 && html`<select class="chip" aria-label="Regenerate with another model" title="Regenerate with another model" value=""
      onChange=${(/** @type {On<HTMLSelectElement>} */ event) => { const model = event.target.value; event.target.value = ""; again(id, answer, model); }}>
      <option value="">with…</option>${models.map(one => html`<option key=${one.id} value=${one.id}>${named(one.id)}</option>`)}</select>`}
    ${answer?.tokens?.length && html`<${IconButton} icon="bars" label=${probable ? "Show text" : "Show token probabilities"} aria-pressed=${String(probable)} onClick=${show} />`}
    <${IconButton} icon="bin" label="Delete from here on" onClick=${remove} />
    ${answer?.timings && html`<span class="speed">${speed(answer.timings)}</span>`}
  </div>`;
}

function Edit(/** @type {{conversation: Conversation; node: Question; close: () => void}} */ {conversation, node, close}) {
  const [text, setText] = useState(node.content), box = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  useEffect(() => box.current?.focus(), []);
  const save = (/** @type {Event} */ event) => {
    event.preventDefault();
    close();
    edit(conversation.id, node, text);
  };
  const key = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Escape") { event.stopPropagation(); close(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) save(event);
  };
  return html`<form class="editing" onSubmit=${save}>
    <textarea ref=${box} aria-label="Edited message" rows=${Math.min(12, text.split("\n").length + 1)} value=${text} onInput=${(/** @type {On<HTMLTextAreaElement>} */ event) => setText(event.target.value)} onKeyDown=${key}></textarea>
    <div class="row"><button type="button" class="button" onClick=${close}>Cancel</button><button type="submit" class="button primary">Send</button></div>
  </form>`;
}

/** @extends {Component<MessageProps, MessageState>} */
class MessageView extends Component {
  /** @override */ shouldComponentUpdate(/** @type {MessageProps} */ next, /** @type {MessageState} */ state) { // an answer that comes draws only itself
    const {node, conversation, last, running} = this.props;
    return node !== next.node || last !== next.last || running !== next.running || state !== this.state ||
      conversation.leaf !== next.conversation.leaf || Object.keys(conversation.nodes).length !== Object.keys(next.conversation.nodes).length;
  }

  /** @override */ render(/** @type {MessageProps} */ {conversation, node, last}, /** @type {MessageState} */ {editing}) {
    const question = node.role === "user" ? node : null, answer = node.role === "assistant" ? node : null;
    const waiting = answer?.calls ? unanswered(conversation, node.id) : [];
    const who = node.role === "user" ? (conversation.mode === "text" ? "Prompt" : "You")
      : node.role === "tool" ? `Result of ${node.name}` : named(node.model ?? "") || "Model";
    const /** @type {Take} */ take = (at, entry) => {
      if (answer && !isRunning(conversation.id)) tryInstead(conversation.id, answer, at, entry);
    };
    return html`<article class=${node.role} data-id=${node.id}>
      <h2 class="who">${who}</h2>
      ${question?.images && html`<div class="images">${question.images.map((image, i) => html`<img class="thumbnail" src=${image} alt=${`image ${i + 1}`} />`)}</div>`}
      ${question?.sounds && html`<div class="images">${question.sounds.map((sound, i) => html`<audio controls src=${sound} aria-label=${`sound ${i + 1}`}></audio>`)}</div>`}
      ${question?.files?.map(file => html`<details class="file"><summary>${file.name}</summary><pre tabindex="0">${file.text}</pre></details>`)}
      ${editing && question
        ? html`<${Edit} conversation=${conversation} node=${question} close=${() => this.setState({editing: false})} />`
        : answer
          ? html`<${Thought} node=${answer} take=${take} /><${Answer} node=${answer} take=${take} />`
          : html`<div class="said">${node.content}</div>`}
      ${answer?.calls?.map(call => html`<${Call} call=${call} conversation=${conversation} node=${answer} waits=${answer.status !== "running" && waiting.includes(call.id)}
        answer=${(/** @type {ToolCall} */ which, /** @type {string} */ text) => answerCall(conversation.id, node.id, which, text)} />`)}
      ${answer && html`<${Ended} conversation=${conversation} node=${answer} last=${last} />`}
      ${!editing && html`<${Actions} conversation=${conversation} node=${node} startEdit=${() => this.setState({editing: true})} />`}
    </article>`;
  }
}

/** What a new conversation takes from the one before, and the way to begin without. */
function Inherited() {
  const settings = useStore(settingsOf), serverTools = useStore(state => state.serverTools);
  const tools = [...settings.tools.map(tool => tool.name), ...settings.serverTools.filter(name => serverTools.some(one => one.tool === name))];
  const parts = [settings.system && "a system prompt", tools.length && `${tools.length === 1 ? "the tool" : `${tools.length} tools:`} ${tools.join(", ")}`,
    settings.schema?.on && "a JSON schema for the answers", settings.stop && "stop texts",
    Object.keys(settings.sampling).length && `sampling: ${Object.keys(settings.sampling).join(", ")}`].filter(Boolean);
  if (!parts.length) return null;
  return html`<p id="inherited">This conversation begins with the last settings: ${parts.join("; ")}.
    <button type="button" class="link" onClick=${() => setSettings(DEFAULTS)}>Begin without them</button></p>`;
}

function Welcome() {
  const model = useStore(chosenModel), props = useStore(state => state.props);
  const missing = useStore(state => state.current !== null && !current(state));
  if (missing) return html`<div class="welcome"><h2>Not found</h2><p id="missing">This browser has no conversation of this address. A message begins a new one.</p></div>`;
  return html`<div class="welcome"><h2>${model ? named(model.id) : "logitless"}</h2>
    ${props && html`<p>${count(props.default_generation_settings.n_ctx)} tokens of context${props.modalities?.vision ? " · reads images" : ""}${props.modalities?.audio ? " · reads audio" : ""}${props.chat_template ? "" : " · has no chat template, so it continues text"}</p>`}
    <${Inherited} />
  </div>`;
}

/** Scroll along with what grows in `box` until the reader scrolls up; the returned function goes to the end. */
function useFollowing(/** @type {RefObject<HTMLElement>} */ box) {
  const follows = useRef(true), end = () => {
    follows.current = true;
    if (box.current) box.current.scrollTop = box.current.scrollHeight;
  };
  useEffect(() => {
    const log = /** @type {NonNullable<typeof box.current>} */ (box.current);
    let last = 0;
    const look = () => {
      if (log.scrollTop < last - 1) follows.current = false;
      if (log.scrollHeight - log.scrollTop - log.clientHeight < 40) follows.current = true;
      last = log.scrollTop;
    };
    const grown = new ResizeObserver(() => follows.current && end());
    log.addEventListener("scroll", look, {passive: true});
    grown.observe(/** @type {NonNullable<typeof log.firstElementChild>} */ (log.firstElementChild));
    return () => {
      log.removeEventListener("scroll", look);
      grown.disconnect();
    };
  }, []);
  return end;
}

export function Chat() {
  const conversation = useStore(current), running = useStore(state => Object.hasOwn(state.running, state.current ?? ""));
  const told = useStore(state => absent(chosenModel(state)));
  const log = useRef(/** @type {HTMLDivElement | null} */ (null)), nodes = conversation ? path(conversation) : [];
  const end = useFollowing(log);
  useLayoutEffect(end, [conversation?.id, nodes.length]);
  return html`<section class="chat" aria-label="Conversation">
    <div id="log" role="log" aria-label="Messages" aria-busy=${String(running)} tabindex="0" ref=${log}>
      <div class="column">
        ${conversation && nodes.length ? nodes.map((node, i) => html`<${MessageView} key=${`${conversation.id} ${node.id}`} conversation=${conversation} node=${node} last=${i === nodes.length - 1} running=${running} />`) : html`<${Welcome} />`}
      </div>
    </div>
    <div class="column foot">
      ${told && html`<p id="absent" role="status">${told}</p>`}
      <${Composer} />
    </div>
  </section>`;
}

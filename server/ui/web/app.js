// The page: its frame, the views in it, and the keys that work everywhere.

/** @import {GuardedProps, LaterState, On, State} from "../src/types.js" */
/** @import {VNode} from "./vendor/preact.js" */
import {followAddress} from "./address.js";
import {reason} from "./api.js";
import {hasFiles} from "./attachments.js";
import {Chat} from "./chat.js";
import {stopHere} from "./composer.js";
import {takeUp} from "./generate.js";
import {Live, watchServer} from "./live.js";
import {chosen, connect, isBusy, label, loadOrUnload, named, needsKey, status} from "./models.js";
import {Dialog, IconButton} from "./parts.js";
import {restore} from "./saved.js";
import {Key, Settings} from "./settings.js";
import {go, Sidebar, startNew} from "./sidebar.js";
import {current, get, set, subscribe, useStore} from "./store.js";
import {listenForTokens} from "./tokens.js";
import {titleOf} from "./tree.js";
import {Component, html, render, useEffect, useState} from "./vendor/preact.js";

function Models() {
  const models = useStore(state => state.models), id = useStore(state => state.model), model = models.find(one => one.id === id);
  const [told, setTold] = useState("");
  const press = () => loadOrUnload().then(() => setTold(""), error => setTold(reason(error)));
  return html`<label class="unseen" for="model">Model</label>
    <select id="model" value=${id} onChange=${(/** @type {On<HTMLSelectElement>} */ event) => { set({model: event.target.value}); connect(); }}>
      ${models.map(one => html`<option key=${one.id} value=${one.id} title=${one.id}>${label(one)}</option>`)}</select>
    ${model?.status && !model.parent && html`<button id="load" type="button" class="button" disabled=${isBusy(model)} onClick=${press}>${status(model) === "loaded" ? "Unload" : "Load"}</button>`}
    ${told && html`<p class="bad" role="alert">${told}</p>`}`;
}

function Header() {
  const drawer = useStore(state => state.drawer);
  const toggle = (/** @type {State["drawer"]} */ name) => set({drawer: drawer === name ? "" : name});
  return html`<header class="bar-top">
    <${IconButton} icon="menu" label="Conversations" class="narrow" onClick=${() => set({side: true})} />
    <${Models} />
    <span class="gap"></span>
    <${IconButton} icon="plus" label="New conversation" class="narrow" onClick=${startNew} />
    <${IconButton} icon="pulse" label="The server now" id="live" aria-pressed=${String(drawer === "server")} onClick=${() => toggle("server")} />
    <${IconButton} icon="sliders" label="Settings" id="settings" aria-pressed=${String(drawer === "settings")} onClick=${() => toggle("settings")} />
  </header>`;
}

function Refusal() {
  const refusal = useStore(state => state.refusal), unsaved = useStore(state => state.unsaved);
  return html`${refusal && html`<div class="refusal" id="state" role="alert">
      <p>${refusal}</p>${needsKey(refusal) && html`<${Key} />`}</div>`}
    ${unsaved && html`<p class="refusal" id="unsaved" role="alert">${unsaved}</p>`}`;
}

/** What was deleted last, with the button that brings it back. */
function Undo() {
  const undo = useStore(state => state.undo);
  if (!undo) return null;
  return html`<div class="undo" id="undo" role="status"><span>${undo.text}</span>
    <button type="button" class="button" onClick=${() => { undo.act(); set({undo: null}); }}>Undo</button>
    <${IconButton} icon="close" label="Close" onClick=${() => set({undo: null})} /></div>`;
}

/** A part of the page whose failure leaves the others alone. */
/** @extends {Component<GuardedProps, {told?: string; at?: string}>} */
class Guarded extends Component {
  /** @override */ componentDidCatch(/** @type {unknown} */ error) {
    this.setState({told: reason(error), at: this.props.at ?? ""});
  }

  /** @override */ render(/** @type {GuardedProps} */ {what, at = "", children}, /** @type {{told?: string; at?: string}} */ {told, at: failed}) {
    return told === undefined || at !== failed ? children : html`<p class="bad pad" role="alert">${what} cannot be shown: ${told}</p>`;
  }
}

const /** @type {[string, string][]} */ KEYS = [["Enter", "send the message"], ["Shift+Enter", "begin a line"], ["Escape", "stop the answer"], ["Ctrl+Shift+O", "new conversation"],
  ["Ctrl+K", "search in conversations"], ["Ctrl+,", "settings"], ["Alt+↑ / Alt+↓", "the conversation above or below"],
  ["← →", "within an answer: its tokens’ probabilities"], ["↓, Enter", "try another token"], ["?", "this list"]];

/** A view that is loaded when it is first shown. */
/** @extends {Component<{load: () => Promise<() => VNode>}, LaterState>} */
class Later extends Component {
  /** @override */ componentDidMount() {
    this.props.load().then(View => this.setState({View}), error => this.setState({told: reason(error)}));
  }

  /** @override */ render(/** @type {Later["props"]} */ _, /** @type {LaterState} */ {View, told}) {
    return View ? html`<${View} />` : html`<p class="note pad" role="status">${told ?? "…"}</p>`;
  }
}

const VIEWS = {
  chat: () => html`<${Chat} />`,
  compare: () => html`<${Later} key="compare" load=${() => import("./compare.js").then(module => module.Compare)} />`,
  tune: () => html`<${Later} key="tune" load=${() => import("./tune.js").then(module => module.Tune)} />`,
};

function Keys(/** @type {{close: () => void}} */ {close}) {
  return html`<${Dialog} title="Keys" close=${close}><dl class="keys">${KEYS.map(([key, what]) => html`<div><dt><kbd>${key}</kbd></dt><dd>${what}</dd></div>`)}</dl><//>`;
}

function App() {
  const view = useStore(state => state.view), drawer = useStore(state => state.drawer), side = useStore(state => state.side), shown = useStore(state => state.current), ready = useStore(state => state.ready);
  const [keys, setKeys] = useState(false);
  useEffect(() => {
    const press = (/** @type {KeyboardEvent} */ event) => {
      const typing = event.target instanceof Element && event.target.closest("input, textarea, select, [contenteditable]"), command = event.ctrlKey || event.metaKey;
      const search = () => { set({side: true}); requestAnimationFrame(() => document.getElementById("search")?.focus()); };
      const act = event.key === "Escape" ? () => { if (get().side) set({side: false}); stopHere(); }
        : command && event.shiftKey && event.key.toLowerCase() === "o" ? startNew
          : command && event.key === "k" ? search
            : command && event.key === "," ? () => set({drawer: get().drawer === "settings" ? "" : "settings"})
              : event.altKey && event.key === "ArrowUp" ? () => go(-1)
                : event.altKey && event.key === "ArrowDown" ? () => go(1)
                  : event.key === "?" && !typing ? () => setKeys(true) : null;
      if (!act) return;
      if (event.key !== "Escape") event.preventDefault();
      act();
    };
    const keep = (/** @type {DragEvent} */ event) => { // a file that nothing here takes would replace the page
      if (event.defaultPrevented || !hasFiles(event)) return;
      event.preventDefault();
      /** @type {NonNullable<typeof event.dataTransfer>} */ (event.dataTransfer).dropEffect = "none";
    };
    document.addEventListener("keydown", press);
    window.addEventListener("dragover", keep);
    window.addEventListener("drop", keep);
    return () => {
      document.removeEventListener("keydown", press);
      window.removeEventListener("dragover", keep);
      window.removeEventListener("drop", keep);
    };
  }, []);
  const skip = (/** @type {Event} */ event) => {
    event.preventDefault(); // the address is that of the conversation
    (document.getElementById("text") ?? document.getElementById("main"))?.focus();
  };
  if (!ready) return html`<main><${Refusal} /></main>`;
  return html`<a class="skip" href="#main" onClick=${skip}>Skip to the ${view === "tune" ? "content" : "message"}</a>
  <div class=${`app ${drawer ? "with-drawer" : ""}`}>
    <${Guarded} what="The list of conversations"><${Sidebar} /><//>
    ${side && html`<div class="shade" onClick=${() => set({side: false})}></div>`}
    <main id="main" tabindex="-1"><${Header} /><${Refusal} /><${Guarded} what="This view" at=${`${view} ${shown}`}>${VIEWS[view]()}<//><${Undo} /></main>
    ${drawer === "settings" && html`<${Guarded} what="The settings" at=${shown ?? ""}><${Settings} /><//>`}
    ${drawer === "server" && html`<${Live} />`}
    ${keys && html`<${Keys} close=${() => setKeys(false)} />`}
  </div>`;
}

function dress(/** @type {State} */ state) {
  document.documentElement.dataset.theme = state.theme;
  const conversation = current(state), model = chosen(state);
  document.title = conversation ? `${titleOf(conversation)} – logitless` : model ? `${named(model.id)} – logitless` : "logitless";
}

subscribe(dress);
listenForTokens();
/** True once the server has talked to this page. */
const isConnected = (/** @type {State} */ {refusal, models}) => !refusal && models.length > 0;

const reading = restore();
render(html`<${App} />`, /** @type {HTMLElement} */ (document.getElementById("app")));
await reading;
followAddress();
await connect();
takeUp(get().conversations);
subscribe((now, before) => { // another tab, or another visit, may have left an answer that is coming
  const shown = current(now), news = now.conversations !== before.conversations || now.current !== before.current || isConnected(now) !== isConnected(before);
  if (shown && news && isConnected(now)) takeUp([shown]);
});
watchServer();

// The page: its frame, the views in it, and the keys that work everywhere.
import { reason } from "./api.js";
import { hasFiles } from "./attachments.js";
import { Chat } from "./chat.js";
import { stopHere } from "./composer.js";
import { Live, watchServer } from "./live.js";
import { chosen, connect, isBusy, label, loadOrUnload, named, status } from "./models.js";
import { Dialog, IconButton } from "./parts.js";
import { restore } from "./saved.js";
import { Key, Settings } from "./settings.js";
import { go, Sidebar, startNew } from "./sidebar.js";
import { current, get, set, subscribe, useStore } from "./store.js";
import { listenForTokens } from "./tokens.js";
import { titleOf } from "./tree.js";
import { Component, html, render, useEffect, useState } from "./vendor/preact.js";
function Models() {
    const models = useStore(state => state.models), id = useStore(state => state.model), model = models.find(one => one.id === id);
    const [told, setTold] = useState("");
    const press = () => loadOrUnload().then(() => setTold(""), error => setTold(reason(error)));
    return html `<label class="unseen" for="model">Model</label>
    <select id="model" value=${id} onChange=${(event) => { set({ model: event.target.value }); connect(); }}>
      ${models.map(one => html `<option key=${one.id} value=${one.id} title=${one.id}>${label(one)}</option>`)}</select>
    ${model?.status && !model.parent && html `<button id="load" type="button" class="button" disabled=${isBusy(model)} onClick=${press}>${status(model) === "loaded" ? "Unload" : "Load"}</button>`}
    ${told && html `<p class="bad" role="alert">${told}</p>`}`;
}
function Header() {
    const drawer = useStore(state => state.drawer);
    const toggle = (name) => set({ drawer: drawer === name ? "" : name });
    return html `<header class="bar-top">
    <${IconButton} icon="menu" label="Conversations" class="narrow" onClick=${() => set({ side: true })} />
    <${Models} />
    <span class="gap"></span>
    <${IconButton} icon="plus" label="New conversation" class="narrow" onClick=${startNew} />
    <${IconButton} icon="pulse" label="The server now" id="live" aria-pressed=${String(drawer === "server")} onClick=${() => toggle("server")} />
    <${IconButton} icon="sliders" label="Settings" id="settings" aria-pressed=${String(drawer === "settings")} onClick=${() => toggle("settings")} />
  </header>`;
}
function Refusal() {
    const refusal = useStore(state => state.refusal);
    if (!refusal)
        return null;
    return html `<div class="refusal" id="state" role="alert">
    ${refusal === "key" ? html `<p>This server wants an API key.</p><${Key} />` : html `<p>${refusal}</p>`}</div>`;
}
const KEYS = [["Enter", "send the message"], ["Shift+Enter", "begin a line"], ["Escape", "stop the answer"], ["Ctrl+Shift+O", "new conversation"],
    ["Ctrl+K", "search in conversations"], ["Ctrl+,", "settings"], ["Alt+↑ / Alt+↓", "the conversation above or below"],
    ["← →", "within an answer: its tokens’ probabilities"], ["↓, Enter", "try another token"], ["?", "this list"]];
/** A view that is loaded when it is first shown. */
class Later extends Component {
    componentDidMount() {
        this.props.load().then(View => this.setState({ View }), error => this.setState({ told: reason(error) }));
    }
    render(_, { View, told }) {
        return View ? html `<${View} />` : html `<p class="note pad" role="status">${told ?? "…"}</p>`;
    }
}
const VIEWS = {
    chat: () => html `<${Chat} />`,
    compare: () => html `<${Later} key="compare" load=${() => import("./compare.js").then(module => module.Compare)} />`,
    tune: () => html `<${Later} key="tune" load=${() => import("./tune.js").then(module => module.Tune)} />`,
};
function Keys({ close }) {
    return html `<${Dialog} title="Keys" close=${close}><dl class="keys">${KEYS.map(([key, what]) => html `<div><dt><kbd>${key}</kbd></dt><dd>${what}</dd></div>`)}</dl><//>`;
}
function App() {
    const view = useStore(state => state.view), drawer = useStore(state => state.drawer), side = useStore(state => state.side);
    const [keys, setKeys] = useState(false);
    useEffect(() => {
        const press = (event) => {
            const typing = event.target instanceof Element && event.target.closest("input, textarea, select, [contenteditable]"), command = event.ctrlKey || event.metaKey;
            const search = () => { set({ side: true }); requestAnimationFrame(() => document.getElementById("search")?.focus()); };
            const act = event.key === "Escape" ? () => { if (get().side)
                set({ side: false }); stopHere(); }
                : command && event.shiftKey && event.key.toLowerCase() === "o" ? startNew
                    : command && event.key === "k" ? search
                        : command && event.key === "," ? () => set({ drawer: get().drawer === "settings" ? "" : "settings" })
                            : event.altKey && event.key === "ArrowUp" ? () => go(-1)
                                : event.altKey && event.key === "ArrowDown" ? () => go(1)
                                    : event.key === "?" && !typing ? () => setKeys(true) : null;
            if (!act)
                return;
            if (event.key !== "Escape")
                event.preventDefault();
            act();
        };
        const keep = (event) => {
            if (event.defaultPrevented || !hasFiles(event))
                return;
            event.preventDefault();
            event.dataTransfer.dropEffect = "none";
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
    return html `<div class=${`app ${drawer ? "with-drawer" : ""}`}>
    <${Sidebar} />
    ${side && html `<div class="shade" onClick=${() => set({ side: false })}></div>`}
    <main><${Header} /><${Refusal} />${VIEWS[view]()}</main>
    ${drawer === "settings" && html `<${Settings} />`}
    ${drawer === "server" && html `<${Live} />`}
    ${keys && html `<${Keys} close=${() => setKeys(false)} />`}
  </div>`;
}
function dress(state) {
    document.documentElement.dataset.theme = state.theme;
    const conversation = current(state), model = chosen(state);
    document.title = conversation ? `${titleOf(conversation)} – logitless` : model ? `${named(model.id)} – logitless` : "logitless";
}
subscribe(dress);
listenForTokens();
await restore();
render(html `<${App} />`, document.getElementById("app"));
await connect();
watchServer();

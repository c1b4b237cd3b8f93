// The list of conversations: new, search, rename, delete, and the way to the other views.

/** @import {Conversation, On, State} from "../src/types.js" */
/** @import {IconName} from "./parts.js" */
import {stop} from "./generate.js";
import {Icon, IconButton} from "./parts.js";
import {get, set, update, useStore} from "./store.js";
import {search, titleOf} from "./tree.js";
import {html, useState} from "./vendor/preact.js";

const DAY = 864e5;

/** The age of a conversation, as a heading of the list. */
export function age(/** @type {number} */ at, now = Date.now()) {
  const today = new Date(now).setHours(0, 0, 0, 0);
  if (at >= today) return "Today";
  if (at >= today - DAY) return "Yesterday";
  if (at >= today - 7 * DAY) return "Last seven days";
  return new Date(at).toLocaleDateString("en", {month: "long", year: "numeric"});
}

export function startNew() {
  set({current: null, view: "chat", side: false});
  document.getElementById("text")?.focus();
}

function remove(/** @type {string} */ id) {
  const gone = get().conversations.find(one => one.id === id);
  if (!gone) return;
  stop(id);
  const back = () => set(now => ({conversations: now.conversations.some(one => one.id === id) ? now.conversations : [gone, ...now.conversations].sort((a, b) => b.at - a.at), current: id, view: "chat"}));
  set(now => ({conversations: now.conversations.filter(one => one.id !== id), current: now.current === id ? null : now.current,
    undo: {text: `“${titleOf(gone)}” is deleted.`, act: back}}));
}

function Entry(/** @type {{conversation: Conversation; excerpt: string; isCurrent: boolean}} */ {conversation, excerpt, isCurrent}) {
  const [renaming, setRenaming] = useState(false), {id} = conversation, title = titleOf(conversation);
  const running = useStore(state => Object.hasOwn(state.running, id));
  const rename = (/** @type {On<HTMLFormElement>} */ event) => {
    event.preventDefault();
    const text = String(new FormData(event.target).get("title")).trim();
    setRenaming(false);
    update(id, one => ({...one, title: text}));
  };
  if (renaming)
    return html`<li><form class="rename" onSubmit=${rename}>
      <input name="title" value=${title} aria-label="Title" maxlength="80" ref=${(/** @type {HTMLInputElement | null} */ box) => box?.focus()} onKeyDown=${(/** @type {KeyboardEvent} */ event) => event.key === "Escape" && setRenaming(false)} />
      <${IconButton} icon="check" label="Save the title" type="submit" /></form></li>`;
  return html`<li class=${isCurrent ? "current" : ""}>
    <button type="button" class="title" aria-current=${isCurrent ? "true" : null} onClick=${() => set({current: id, view: "chat", side: false})}>
      ${running && html`<span class="dot" role="img" aria-label="Answering"></span>`}${title}
      ${excerpt && html`<small>${excerpt}</small>`}</button>
    <${IconButton} icon="edit" label=${`Rename “${title}”`} onClick=${() => setRenaming(true)} />
    <${IconButton} icon="bin" label=${`Delete “${title}”`} onClick=${() => confirm(`Delete “${title}”?`) && remove(id)} />
  </li>`;
}

const /** @type {[State["view"], IconName, string][]} */ VIEWS = [["chat", "chat", "Chat"], ["compare", "columns", "Compare"], ["tune", "tune", "Fine-tuning"]];

export function Sidebar() {
  const conversations = useStore(state => state.conversations), id = useStore(state => state.current);
  const view = useStore(state => state.view), side = useStore(state => state.side);
  const [query, setQuery] = useState("");
  const found = search(conversations.filter(one => one.leaf), query), groups = /** @type {Map<string, typeof found>} */ (new Map());
  for (const one of found) {
    const name = query ? "Found" : age(one.conversation.at);
    groups.set(name, [...(groups.get(name) ?? []), one]);
  }
  return html`<nav class=${`side ${side ? "open" : ""}`} aria-label="Conversations">
    <div class="row top"><h1>logitless</h1>
      <${IconButton} icon="close" label="Close the list" class="narrow" onClick=${() => set({side: false})} /></div>
    <ul class="views">
      ${VIEWS.map(([name, icon, text]) => html`<li><button type="button" aria-current=${view === name ? "page" : null} onClick=${() => set({view: name, side: false})}><${Icon} name=${icon} />${text}</button></li>`)}
    </ul>
    <button type="button" class="button new" id="new" onClick=${startNew}><${Icon} name="plus" />New conversation</button>
    <label class="search"><span class="unseen">Search in conversations</span><${Icon} name="search" />
      <input id="search" type="search" placeholder="Search" value=${query} onInput=${(/** @type {On} */ event) => setQuery(event.target.value)} /></label>
    <div class="list" tabindex="-1">
      ${[...groups].map(([name, group]) => html`<h2>${name}</h2><ul>${group.map(({conversation, excerpt}) =>
        html`<${Entry} key=${conversation.id} conversation=${conversation} excerpt=${query ? excerpt : ""} isCurrent=${view === "chat" && conversation.id === id} />`)}</ul>`)}
      ${!found.length && html`<p class="note">${query ? "Nothing found." : "No conversations yet."}</p>`}
    </div>
  </nav>`;
}

/** The next or previous conversation of the list. */
export function go(/** @type {number} */ by) {
  const {conversations, current} = get(), at = conversations.findIndex(one => one.id === current);
  const next = conversations[at < 0 ? 0 : at + by];
  if (next) set({current: next.id, view: "chat"});
}

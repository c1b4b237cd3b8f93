// Storage in the browser: conversations, their messages and preferences in IndexedDB, for all tabs together.
//
// A conversation has a version that grows with each writing, and each message the version it was written with. A tab
// that writes a conversation of another version than it knows reads what is new first, and writes both sides' changes.
// Tabs tell each other what they wrote, and look again when they are shown. Without IndexedDB nothing survives a reload.

/** @import {Conversation, Head, Known, Message, MessageRow, News, State} from "../src/types.js" */
import {reason} from "./api.js";
import {conversationShape} from "./exchange.js";
import {joinedSides, merged, sorted} from "./merge.js";
import {DEFAULTS, get, set, subscribe, TAG} from "./store.js";

const PREFERENCES = /** @type {const} */ (["settings", "presets", "theme", "enterSends"]);
const STORES = ["conversations", "messages", "preferences"];
const DELAY = 250; // milliseconds between writings of an answer that comes

/** @typedef {Pick<State, (typeof PREFERENCES)[number]>} Preferences */

let /** @type {IDBDatabase | null} */ database = null;
const known = /** @type {Map<string, Known>} */ (new Map());
const unreadable = /** @type {Set<string>} */ (new Set()); // ids of conversations that are left as they are
let /** @type {Preferences | null} */ preferences = null; // as they were last read or written
let /** @type {Promise<unknown>} */ work = Promise.resolve();
const channel = typeof BroadcastChannel === "function" ? new BroadcastChannel("logitless") : null;

/**
 * @template T
 * @param {IDBRequest<T>} request
 */
const done = (request) => /** @type {Promise<T>} */ (new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
}));

const ended = (/** @type {IDBTransaction} */ transaction) => /** @type {Promise<void>} */ (new Promise((resolve, reject) => {
  transaction.oncomplete = () => resolve();
  transaction.onabort = transaction.onerror = () => reject(transaction.error ?? new Error("the browser ended the writing"));
}));

const rowsOf = (/** @type {string} */ id, /** @type {IDBValidKey[]} */ from = []) => IDBKeyRange.bound([id, ...from], [id, []]); // an array is above all numbers and strings

/** @returns {Head} */
const headOf = (/** @type {Conversation} */ {nodes: _, ...head}, /** @type {number} */ version) => ({...head, version});
const nextVersion = (/** @type {number[]} */ ...versions) => Math.max(Date.now(), ...versions.map(version => version + 1));

/** Version 1 had whole conversations. */
function upgrade(/** @type {IDBOpenDBRequest} */ request, /** @type {number} */ from) {
  const {result} = request, transaction = /** @type {NonNullable<typeof request.transaction>} */ (request.transaction);
  if (from < 1) {
    result.createObjectStore("conversations", {keyPath: "id"});
    result.createObjectStore("preferences");
  }
  result.createObjectStore("messages", {keyPath: ["conversation", "id"]}).createIndex("version", ["conversation", "version"]);
  const heads = transaction.objectStore("conversations"), messages = transaction.objectStore("messages"), version = Date.now();
  heads.openCursor().onsuccess = event => {
    const cursor = (/** @type {IDBRequest<IDBCursorWithValue | null>} */ (event.target)).result;
    if (!cursor) return;
    const {nodes, ...head} = /** @type {Conversation} */ (cursor.value);
    for (const [id, node] of Object.entries(nodes ?? {})) messages.put({conversation: head.id, id, version, node});
    cursor.update({...head, version});
    cursor.continue();
  };
}

function open() {
  const request = indexedDB.open("logitless", 2);
  request.onupgradeneeded = event => upgrade(request, event.oldVersion);
  request.onblocked = () => set({unsaved: "Another tab shows an older version of this page. Close it, so that this one can read the conversations."});
  return done(request);
}

/**
 * A conversation of its stored parts.
 * @returns {Conversation}
 */
function whole(/** @type {Head} */ {version: _, ...head}, /** @type {Record<string, Message>} */ messages) {
  const nodes = sorted(messages), leaf = head.leaf && nodes[head.leaf] ? head.leaf : (Object.keys(nodes).at(-1) ?? null);
  return {...head, settings: {...DEFAULTS, ...head.settings}, nodes, leaf};
}

/** Read everything, at the beginning. */
async function readAll() {
  const transaction = /** @type {NonNullable<typeof database>} */ (database).transaction(STORES, "readonly"), byId = /** @type {Map<string, MessageRow[]>} */ (new Map());
  const [heads, rows] = await Promise.all([
    /** @type {Promise<Head[]>} */ (done(transaction.objectStore("conversations").getAll())), /** @type {Promise<MessageRow[]>} */ (done(transaction.objectStore("messages").getAll()))]);
  for (const row of rows) byId.set(row.conversation, [...(byId.get(row.conversation) ?? []), row]);
  for (const head of heads) {
    const nodes = Object.fromEntries((byId.get(head.id) ?? []).map(row => [row.id, row.node]));
    try {
      known.set(head.id, {version: head.version, value: conversationShape(whole(head, nodes), "it")});
    } catch {
      unreadable.add(head.id);
    }
  }
  if (unreadable.size) set({unsaved: `${unreadable.size} saved conversations are damaged and not shown.`});
  set({conversations: [...known.values()].map(one => cut(one.value)).sort((a, b) => b.at - a.at)});
  await readPreferences(transaction);
}

/**
 * An answer that the closing of the page has cut says so, unless its stream may still be on the server.
 * @returns {Conversation}
 */
function cut(/** @type {Conversation} */ conversation) {
  const lost = Object.values(conversation.nodes).filter(node => node.role === "assistant" && node.status === "running" && !node.stream);
  if (!lost.length) return conversation;
  return {...conversation, nodes: {...conversation.nodes, ...Object.fromEntries(lost.map(node => [node.id, {...node, status: /** @type {const} */ ("stopped")}]))}};
}

/** Read the preferences, and put them into the state with what this tab has changed since. */
async function readPreferences(/** @type {IDBTransaction} */ transaction) {
  const store = transaction.objectStore("preferences"), /** @type {Partial<Preferences>} */ found = {};
  for (const name of PREFERENCES) {
    const /** @type {unknown} */ value = await done(store.get(name));
    if (value !== undefined) Object.assign(found, {[name]: value});
  }
  if (found.settings) found.settings = {...DEFAULTS, ...found.settings};
  const now = get(), before = preferences ?? pick(now), theirs = {...before};
  for (const name of PREFERENCES) if (found[name] !== undefined && !same(found[name], before[name])) Object.assign(theirs, {[name]: found[name]});
  preferences = theirs;
  set(both(before, pick(now), theirs));
}

const same = (/** @type {unknown} */ a, /** @type {unknown} */ b) => a === b || JSON.stringify(a) === JSON.stringify(b);
/** @returns {Preferences} */
const pick = (/** @type {State} */ {settings, presets, theme, enterSends}) => ({settings, presets, theme, enterSends});
const byName = (/** @type {State["presets"]} */ presets) => Object.fromEntries(presets.map(one => [one.name, one]));

/**
 * Preferences of two tabs: presets and settings one by one.
 * @returns {Preferences}
 */
function both(/** @type {Preferences} */ base, /** @type {Preferences} */ ours, /** @type {Preferences} */ theirs) {
  const presets = ours.presets === base.presets ? theirs.presets
    : Object.values(merged(byName(base.presets), byName(ours.presets), byName(theirs.presets))).sort((a, b) => a.name.localeCompare(b.name));
  const settings = ours.settings === base.settings ? theirs.settings : merged(base.settings, ours.settings, theirs.settings);
  return {...merged(base, ours, theirs), presets, settings};
}

/**
 * The stored side of a conversation that this tab knows in another version; null: it is not stored.
 * @returns {Promise<Known | null>}
 */
async function theirsOf(/** @type {IDBTransaction} */ transaction, /** @type {string} */ id) {
  const before = known.get(id), messages = transaction.objectStore("messages");
  const [head, keys, news] = await Promise.all([
    /** @type {Promise<Head | undefined>} */ (done(transaction.objectStore("conversations").get(id))),
    /** @type {Promise<IDBValidKey[]>} */ (done(messages.getAllKeys(rowsOf(id)))),
    /** @type {Promise<MessageRow[]>} */ (done(messages.index("version").getAll(rowsOf(id, before ? [before.version + 1] : [])))),
  ]);
  if (!head) return null;
  if (before && head.version === before.version) return before;
  const /** @type {Record<string, Message>} */ nodes = {}, old = before?.value.nodes ?? {};
  for (const key of keys) {
    const name = String((/** @type {IDBValidKey[]} */ (key))[1]);
    if (old[name]) nodes[name] = old[name];
  }
  for (const row of news) nodes[row.id] = row.node;
  return {version: head.version, value: whole(head, nodes)};
}

/** @returns {Conversation} */
const NEW = (/** @type {string} */ id) => ({id, title: "", at: 0, mode: "chat", settings: DEFAULTS, nodes: {}, leaf: null});

/** Put what differs from what is stored. */
function put(/** @type {IDBTransaction} */ transaction, /** @type {string} */ id, /** @type {Conversation | null} */ stored, /** @type {Conversation} */ value, /** @type {number} */ version) {
  const messages = transaction.objectStore("messages");
  transaction.objectStore("conversations").put(headOf(value, version));
  for (const [name, node] of Object.entries(value.nodes)) if (stored?.nodes[name] !== node) messages.put(/** @satisfies {MessageRow} */ ({conversation: id, id: name, version, node}));
  for (const name of Object.keys(stored?.nodes ?? {})) if (!value.nodes[name]) messages.delete([id, name]);
}

const HEAD = /** @type {const} */ (["title", "at", "mode", "leaf"]);

function differs(/** @type {Conversation} */ a, /** @type {Conversation} */ b) {
  if (a === b) return false;
  const ids = Object.keys(a.nodes);
  return HEAD.some(name => a[name] !== b[name]) || !same(a.settings, b.settings) || ids.length !== Object.keys(b.nodes).length || ids.some(id => a.nodes[id] !== b.nodes[id]);
}

/** Conversations that this tab has changed or deleted since it read or wrote them. */
function changes(state = get()) {
  const ids = new Set(state.conversations.map(one => one.id));
  const changed = state.conversations.filter(one => !known.has(one.id) || differs(/** @type {Known} */ (known.get(one.id)).value, one));
  return {changed, deleted: [...known.keys()].filter(id => !ids.has(id))};
}

/** Put `result` into the state: it has what the tab had changed when it was `then`; what has changed since comes on top. */
function show(/** @type {string} */ id, /** @type {Conversation | null} */ then, /** @type {Conversation | null} */ result) {
  set(state => {
    const now = state.conversations.find(one => one.id === id) ?? null, others = state.conversations.filter(one => one.id !== id);
    if (!result) return now === then ? {conversations: others} : {};
    if (now === null && then !== null) return {}; // deleted meanwhile
    const next = now && then && now !== then ? joinedSides(then, now, result, TAG) : result;
    if (now && !differs(now, next)) return {};
    const at = state.conversations.findIndex(one => one.id === id), list = at < 0 ? [next, ...others] : state.conversations.with(at, next);
    return {conversations: now?.at === next.at ? list : list.sort((a, b) => b.at - a.at)};
  });
}

/** Write what has changed. */
async function write() {
  const state = get(), {changed, deleted} = changes(state), ours = pick(state), before = preferences ?? ours;
  const newPreferences = PREFERENCES.some(name => !same(ours[name], before[name]));
  if (!changed.length && !deleted.length && !newPreferences) return;
  const transaction = /** @type {NonNullable<typeof database>} */ (database).transaction(STORES, "readwrite"), finished = ended(transaction), /** @type {(() => void)[]} */ after = [], /** @type {News} */ told = {changed: [], deleted: []};
  const one = async (/** @type {string} */ id, /** @type {Conversation | null} */ mine) => {
    if (unreadable.delete(id)) { // an import takes its place
      transaction.objectStore("conversations").delete(id);
      transaction.objectStore("messages").delete(rowsOf(id));
    }
    const base = known.get(id), theirs = await theirsOf(transaction, id);
    const isCurrent = theirs?.version === base?.version;
    if (!mine && (!theirs || isCurrent)) {
      transaction.objectStore("conversations").delete(id);
      transaction.objectStore("messages").delete(rowsOf(id));
      told.deleted.push(id);
      after.push(() => known.delete(id));
    } else if (!mine) { // another tab has gone on with it
      after.push(() => { known.set(id, /** @type {NonNullable<typeof theirs>} */ (theirs)); show(id, null, /** @type {NonNullable<typeof theirs>} */ (theirs).value); set({undo: null}); });
    } else {
      const value = isCurrent || !theirs ? mine : joinedSides(base?.value ?? NEW(id), mine, theirs.value, TAG);
      const version = nextVersion(theirs?.version ?? 0, base?.version ?? 0);
      put(transaction, id, theirs?.value ?? null, value, version);
      told.changed.push(id);
      after.push(() => { known.set(id, {version, value}); show(id, mine, value); });
    }
  };
  finished.catch(() => {}); // what fails below says so
  for (const conversation of changed) await one(conversation.id, conversation);
  for (const id of deleted) await one(id, null);
  if (newPreferences) {
    await readPreferences(transaction);
    const now = pick(get()), store = transaction.objectStore("preferences");
    for (const name of PREFERENCES) store.put(now[name], name);
    after.push(() => { preferences = now; });
  }
  await finished;
  for (const act of after) act();
  channel?.postMessage(told);
  if (get().unsaved && !unreadable.size) set({unsaved: ""});
}

/** Write at once, without a look at what is stored: the page is being left. */
function leave() {
  const {changed, deleted} = changes();
  if (!database || (!changed.length && !deleted.length)) return;
  const transaction = database.transaction(STORES, "readwrite");
  for (const one of changed) {
    const base = known.get(one.id);
    put(transaction, one.id, base?.value ?? null, one, nextVersion(base?.version ?? 0));
  }
  for (const id of deleted) {
    transaction.objectStore("conversations").delete(id);
    transaction.objectStore("messages").delete(rowsOf(id));
  }
  transaction.commit?.();
  channel?.postMessage(/** @satisfies {News} */ ({changed: changed.map(one => one.id), deleted}));
}

/**
 * Read what other tabs have written: of these conversations, or of all.
 * @param {string[]} [ids]
 */
async function look(ids) {
  const transaction = /** @type {NonNullable<typeof database>} */ (database).transaction(STORES, "readonly");
  const all = ids ?? [...new Set([...known.keys(), ...(await /** @type {Promise<IDBValidKey[]>} */ (done(transaction.objectStore("conversations").getAllKeys()))).map(String)])];
  for (const id of all) {
    if (unreadable.has(id)) continue;
    const base = known.get(id), theirs = await theirsOf(transaction, id);
    if (theirs === base || theirs?.version === base?.version) continue;
    const mine = get().conversations.find(one => one.id === id) ?? null;
    if (base && !mine) continue; // this tab is about to delete it
    if (!theirs) {
      known.delete(id); // it was deleted: what this tab has not changed goes
      if (mine && base && !differs(base.value, mine)) show(id, mine, null);
    } else {
      known.set(id, theirs);
      if (mine) show(id, mine, joinedSides(base?.value ?? NEW(id), mine, theirs.value, TAG));
      else show(id, null, theirs.value);
    }
  }
  await readPreferences(transaction);
}

/** Do this after what is being written and read. */
function queue(/** @type {() => Promise<void>} */ act) {
  work = work.then(act).catch(error => set({unsaved: `Conversations are not saved: ${reason(error)}`}));
}

/** Read what was saved into the state, and save from now on what changes. */
export async function restore() {
  try {
    database = await open();
    database.onversionchange = () => { // a newer page wants another version
      database?.close();
      database = null;
      set({unsaved: "Another tab has a newer version of this page. Load this one again."});
    };
    await readAll();
    set({ready: true});
  } catch (error) {
    database = null;
    set({ready: true, unsaved: `This browser saves no conversations: ${reason(error)}`});
    return;
  }
  let timer = 0;
  const go = () => {
    clearTimeout(timer);
    timer = 0;
    if (database) queue(write);
  };
  subscribe((now, before) => {
    if (now.conversations === before.conversations && PREFERENCES.every(name => now[name] === before[name])) return;
    timer ||= setTimeout(go, Object.keys(now.running).length ? DELAY : 0);
  });
  const lookAgain = () => database && queue(() => look());
  channel?.addEventListener("message", (/** @type {MessageEvent<News>} */ {data: {changed, deleted}}) => {
    for (const id of deleted) {
      const mine = get().conversations.find(one => one.id === id);
      known.delete(id);
      get().running[id]?.abort();
      if (mine) show(id, mine, null);
    }
    if (database && (changed.length || !deleted.length)) queue(() => look(changed));
  });
  addEventListener("pagehide", leave);
  addEventListener("pageshow", event => event.persisted && lookAgain());
  document.addEventListener("visibilitychange", () => (document.hidden ? timer && go() : lookAgain()));
}

// Storage in the browser: conversations and preferences in IndexedDB. Without IndexedDB nothing survives a reload.
import { DEFAULTS, get, set, subscribe } from "./store.js";
const PREFERENCES = ["settings", "presets", "theme", "enterSends"];
const DELAY = 250; // milliseconds from a change to its writing: an answer that comes changes all the time
let database = null;
const done = (request) => new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
});
function open() {
    const request = indexedDB.open("logitless", 1);
    request.onupgradeneeded = () => {
        request.result.createObjectStore("conversations", { keyPath: "id" });
        request.result.createObjectStore("preferences");
    };
    return done(request);
}
const store = (name, mode) => database.transaction(name, mode).objectStore(name);
/** An answer that the closing of the page has cut says so. */
function settled(conversation) {
    const nodes = Object.values(conversation.nodes).map((node) => (node.role === "assistant" && node.status === "running" ? { ...node, status: "stopped" } : node));
    const settings = { ...DEFAULTS, ...conversation.settings };
    return { ...conversation, settings, nodes: Object.fromEntries(nodes.map(node => [node.id, node])) };
}
async function read() {
    const conversations = (await done(store("conversations", "readonly").getAll())).map(settled);
    const found = { conversations: conversations.sort((a, b) => b.at - a.at) };
    for (const name of PREFERENCES) {
        const value = await done(store("preferences", "readonly").get(name));
        if (value !== undefined)
            Object.assign(found, { [name]: name === "settings" ? { ...DEFAULTS, ...value } : value });
    }
    return found;
}
/** Read what was saved into the state, and save from now on what changes. */
export async function restore() {
    try {
        database = await open();
        set({ ...(await read()), ready: true });
    }
    catch {
        database = null;
        set({ ready: true });
        return;
    }
    let written = get(), timer = 0;
    const write = () => {
        clearTimeout(timer);
        timer = 0;
        const now = get(), before = new Map(written.conversations.map(one => [one.id, one]));
        const conversations = store("conversations", "readwrite");
        for (const one of now.conversations) {
            if (before.get(one.id) !== one)
                conversations.put(one);
            before.delete(one.id);
        }
        for (const id of before.keys())
            conversations.delete(id);
        const preferences = store("preferences", "readwrite");
        for (const name of PREFERENCES)
            if (now[name] !== written[name])
                preferences.put(now[name], name);
        written = now;
    };
    subscribe(now => {
        const same = now.conversations === written.conversations && PREFERENCES.every(name => now[name] === written[name]);
        if (!same)
            timer ||= setTimeout(write, DELAY);
    });
    addEventListener("pagehide", () => timer && write());
    document.addEventListener("visibilitychange", () => document.hidden && timer && write());
}

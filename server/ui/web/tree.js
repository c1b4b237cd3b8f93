// Conversations as trees of messages: a message that is edited or asked for again gets a sibling. Pure functions.
import { reason } from "./api.js";
export const newConversation = (id, settings, at = Date.now()) => ({ id, title: "", at, mode: "chat", settings, nodes: {}, leaf: null });
const ordered = (conversation) => Object.values(conversation.nodes);
/** The conversation with one more message, which is now its last. Its id is `conversation.leaf`. */
export function added(conversation, parent, node) {
    const id = `m${1 + Math.max(0, ...Object.keys(conversation.nodes).map(key => Number(key.slice(1))))}`;
    return { ...conversation, nodes: { ...conversation.nodes, [id]: { ...node, id, parent } }, leaf: id };
}
/** The conversation with an answer changed. */
export const changed = (conversation, id, patch) => ({ ...conversation, nodes: { ...conversation.nodes, [id]: { ...answerOf(conversation, id), ...patch } } });
export function answerOf(conversation, id) {
    const node = conversation.nodes[id];
    if (node?.role !== "assistant")
        throw new Error(`${id} is no answer`);
    return node;
}
const parentOf = (conversation, id) => conversation.nodes[id]?.parent ?? null;
/** The messages from the first one to `leaf`. */
export function path(conversation, leaf = conversation.leaf) {
    const found = [];
    for (let node = conversation.nodes[leaf ?? ""]; node; node = conversation.nodes[node.parent ?? ""])
        found.unshift(node);
    return found;
}
/** Ids of the messages that answer the same one, the oldest first. */
export const siblings = (conversation, id) => ordered(conversation).filter(node => node.parent === parentOf(conversation, id)).map(node => node.id);
/** The conversation with the branch through `id` chosen: its newest end. */
export function chosen(conversation, id) {
    let leaf = id;
    for (let next = id; next; next = ordered(conversation).findLast(node => node.parent === leaf)?.id)
        leaf = next;
    return { ...conversation, leaf };
}
/** The conversation without a message and what follows it; its parent's newest end is chosen. */
export function removed(conversation, id) {
    const gone = new Set([id]);
    for (const node of ordered(conversation))
        if (node.parent && gone.has(node.parent))
            gone.add(node.id);
    const nodes = Object.fromEntries(Object.entries(conversation.nodes).filter(([key]) => !gone.has(key)));
    const parent = parentOf(conversation, id), left = { ...conversation, nodes, leaf: parent };
    if (parent)
        return chosen(left, parent);
    const root = Object.values(nodes).findLast(node => !node.parent);
    return root ? chosen(left, root.id) : left;
}
/** Ids of an answer's calls that have no result yet. */
export function unanswered(conversation, id) {
    const node = conversation.nodes[id], called = node?.role === "assistant" ? (node.calls ?? []) : [], results = new Set();
    for (const one of path(conversation))
        if (one.role === "tool")
            results.add(one.callId);
    return called.map(call => call.id).filter(call => !results.has(call));
}
export function titleOf(conversation) {
    if (conversation.title)
        return conversation.title;
    const first = path(conversation).find(node => node.role === "user")?.content.trim() ?? "";
    return first.split("\n", 1).join("").slice(0, 60) || "New conversation";
}
/** Conversations in which every word of `query` occurs, each with the text around the first one. */
export function search(conversations, query) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    const found = [];
    for (const conversation of conversations) {
        const texts = [titleOf(conversation), ...ordered(conversation).map(node => node.content)];
        const all = texts.join("\n"), low = all.toLowerCase();
        if (!words.every(word => low.includes(word)))
            continue;
        const at = words[0] ? low.indexOf(words[0], titleOf(conversation).length) : -1;
        const from = Math.max(0, at - 30);
        found.push({ conversation, excerpt: at < 0 ? "" : (from ? "…" : "") + all.slice(from, at + 60).replaceAll("\n", " ") });
    }
    return found;
}
const ROLES = ["user", "assistant", "tool"];
const wrong = text => { throw new Error(`This is no export of conversations: ${text}.`); };
/** The conversations of an export; throws an Error that says what is wrong with it. */
export function imported(text) {
    let data; // if it is one
    try {
        data = JSON.parse(text);
    }
    catch (error) {
        wrong(reason(error));
    }
    if (data?.format !== "logitless-conversations")
        wrong("“format” must be “logitless-conversations”");
    if (!Array.isArray(data?.conversations))
        wrong("“conversations” must be an array");
    const { conversations } = data;
    conversations.forEach((conversation, i) => {
        const where = `conversations[${i}]`, { nodes } = conversation ?? {};
        if (typeof conversation?.id !== "string")
            wrong(`${where}.id must be a string`);
        if (typeof nodes !== "object" || nodes === null || Array.isArray(nodes))
            wrong(`${where}.nodes must be an object`);
        for (const [id, node] of Object.entries(nodes)) {
            if (!/^m\d+$/.test(id) || node?.id !== id)
                wrong(`${where}.nodes.${id} must be an object with this id`);
            if (!ROLES.includes(node.role) || typeof node.content !== "string")
                wrong(`${where}.nodes.${id} needs a role and a text`);
            const before = node.parent === null || (nodes[node.parent] && Number(node.parent.slice(1)) < Number(id.slice(1)));
            if (!before)
                wrong(`${where}.nodes.${id}.parent must be an earlier message`);
            for (const [kind, name] of [["image", "images"], ["audio", "sounds"]])
                for (const uri of (node.role === "user" && node[name]) || [])
                    if (!String(uri).startsWith(`data:${kind}/`))
                        wrong(`${where}.nodes.${id}.${name} must be data URIs`);
        }
        if (conversation.leaf !== null && !nodes[conversation.leaf ?? ""])
            wrong(`${where}.leaf must be a message`);
    });
    return conversations;
}
export const exported = (conversations) => JSON.stringify({ format: "logitless-conversations", version: 1, conversations }, null, 1);

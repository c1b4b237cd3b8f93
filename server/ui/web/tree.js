// Conversations as trees of messages: a message that is edited or asked for again gets a sibling. Pure functions.

/** @import {Answer, Conversation, Message, Placeless, Settings} from "../src/types.js" */

/** @returns {Conversation} */
export const newConversation = (/** @type {string} */ id, /** @type {Settings} */ settings, at = Date.now()) =>
  ({id, title: "", at, mode: "chat", settings, nodes: {}, leaf: null});

export const numberOf = (/** @type {string} */ id) => parseInt(id.slice(1), 10);
export const isId = (/** @type {string} */ id) => /^m\d+[\w-]*$/.test(id) && Number.isSafeInteger(numberOf(id));

/** Compares ids of messages: those before and behind a message are before and behind it here, too. */
export const order = (/** @type {string} */ a, /** @type {string} */ b) => numberOf(a) - numberOf(b) || (a < b ? -1 : Number(a > b));

const ordered = (/** @type {Conversation} */ conversation) => Object.values(conversation.nodes);

/**
 * The conversation with one more message, which is now its last. Its id is `conversation.leaf`. `tag`: of the tab, so
 * that two tabs never make the same id.
 * @returns {Conversation & {leaf: string}}
 */
export function added(/** @type {Conversation} */ conversation, /** @type {string | null} */ parent, /** @type {Placeless<Message>} */ node, tag = "") {
  let last = 0;
  for (const key of Object.keys(conversation.nodes)) last = Math.max(last, numberOf(key));
  const id = `m${last + 1}${tag}`;
  return {...conversation, nodes: {...conversation.nodes, [id]: {...node, id, parent}}, leaf: id};
}

/**
 * The conversation with an answer changed.
 * @returns {Conversation}
 */
export const changed = (/** @type {Conversation} */ conversation, /** @type {string} */ id, /** @type {Partial<Answer>} */ patch) =>
  ({...conversation, nodes: {...conversation.nodes, [id]: {...answerOf(conversation, id), ...patch}}});

/** @returns {Answer} */
export function answerOf(/** @type {Conversation} */ conversation, /** @type {string} */ id) {
  const node = conversation.nodes[id];
  if (node?.role !== "assistant") throw new Error(`${id} is no answer`);
  return node;
}

const parentOf = (/** @type {Conversation} */ conversation, /** @type {string} */ id) => conversation.nodes[id]?.parent ?? null;

/** The messages from the first one to `leaf`. */
export function path(/** @type {Conversation} */ conversation, leaf = conversation.leaf) {
  const /** @type {Message[]} */ found = [];
  for (let node = conversation.nodes[leaf ?? ""]; node; node = conversation.nodes[node.parent ?? ""]) found.unshift(node);
  return found;
}

/** Ids of the messages that answer the same one, the oldest first. */
export const siblings = (/** @type {Conversation} */ conversation, /** @type {string} */ id) =>
  ordered(conversation).filter(node => node.parent === parentOf(conversation, id)).map(node => node.id);

/**
 * The conversation with the branch through `id` chosen: its newest end.
 * @returns {Conversation}
 */
export function chosen(/** @type {Conversation} */ conversation, /** @type {string} */ id) {
  let leaf = id;
  for (let /** @type {string | undefined} */ next = id; next; next = ordered(conversation).findLast(node => node.parent === leaf)?.id) leaf = next;
  return {...conversation, leaf};
}

/** The conversation without a message and what follows it; its parent's newest end is chosen. */
export function removed(/** @type {Conversation} */ conversation, /** @type {string} */ id) {
  const gone = new Set([id]);
  for (const node of ordered(conversation)) if (node.parent && gone.has(node.parent)) gone.add(node.id);
  const nodes = Object.fromEntries(Object.entries(conversation.nodes).filter(([key]) => !gone.has(key)));
  const parent = parentOf(conversation, id), left = {...conversation, nodes, leaf: parent};
  if (parent) return chosen(left, parent);
  const root = Object.values(nodes).findLast(node => !node.parent);
  return root ? chosen(left, root.id) : left;
}

/** Ids of an answer's calls that have no result yet. */
export function unanswered(/** @type {Conversation} */ conversation, /** @type {string} */ id) {
  const node = conversation.nodes[id], called = node?.role === "assistant" ? (node.calls ?? []) : [], results = /** @type {Set<string>} */ (new Set());
  for (const one of path(conversation)) if (one.role === "tool") results.add(one.callId);
  return called.map(call => call.id).filter(call => !results.has(call));
}

/** Answers that are coming, by their streams on the server. */
export const streaming = (/** @type {Conversation} */ conversation) =>
  ordered(conversation).filter(/** @returns {node is Answer & {stream: {id: string; at: number}}} */ (node) => node.role === "assistant" && node.status === "running" && node.stream !== undefined);

export function titleOf(/** @type {Conversation} */ conversation) {
  if (conversation.title) return conversation.title;
  const first = path(conversation).find(node => node.role === "user")?.content.trim() ?? "";
  return first.split("\n", 1).join("").slice(0, 60) || "New conversation";
}

/** Conversations in which every word of `query` occurs, each with the text around the first one. */
export function search(/** @type {Conversation[]} */ conversations, /** @type {string} */ query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const /** @type {{conversation: Conversation; excerpt: string}[]} */ found = [];
  for (const conversation of conversations) {
    const texts = [titleOf(conversation), ...ordered(conversation).map(node => node.content)];
    const all = texts.join("\n"), low = all.toLowerCase();
    if (!words.every(word => low.includes(word))) continue;
    const at = words[0] ? low.indexOf(words[0], titleOf(conversation).length) : -1;
    const from = Math.max(0, at - 30);
    found.push({conversation, excerpt: at < 0 ? "" : (from ? "…" : "") + all.slice(from, at + 60).replaceAll("\n", " ")});
  }
  return found;
}

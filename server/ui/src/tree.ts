// Conversations as trees of messages: a message that is edited or asked for again gets a sibling. Pure functions.

import type {Settings} from "./store.js";

interface Base {
  id: string; // "m", a number, which grows along each branch, and a tag of the tab that made it
  parent: string | null;
  content: string;
  at?: number; // milliseconds of the clock
}

export interface TextFile {
  name: string;
  text: string;
}

export interface Question extends Base {
  role: "user";
  images?: string[]; // data URIs
  sounds?: string[]; // data URIs
  files?: TextFile[];
}

/** A token that may stand in a place of an answer. */
export interface Candidate {
  id: number;
  token: string; // "" where it is a part of a character
  bytes?: number[];
  logprob: number;
}

export interface Entry extends Candidate {
  top: Candidate[]; // the likeliest ones in its place
}

/** A text of an answer with its tokens: one, or several that are no text alone. */
export interface TokenGroup {
  kind: "thought" | "text";
  text: string;
  entries: Entry[];
  swapped?: boolean; // the reader has chosen it
}

export interface Call {
  id: string;
  name: string;
  text: string; // the arguments as JSON
}

export interface Timings {
  n: number;
  rate: number; // tokens a second
  prompt: number;
  cached: number;
}

export type Status = "running" | "done" | "length" | "stopped" | "failed";

export interface Answer extends Base {
  role: "assistant";
  model?: string;
  status?: Status;
  error?: string;
  thought?: string;
  calls?: Call[];
  tokens?: TokenGroup[];
  shown?: "text" | "tokens";
  timings?: Timings;
  stream?: {id: string; at: number}; // on the server, while the answer comes: its name, and the bytes that are in the answer
}

export interface Result extends Base {
  role: "tool";
  callId: string;
  name: string;
}

export type Message = Question | Answer | Result;
type Placeless<M> = M extends Message ? Omit<M, "id" | "parent"> : never;

export interface Conversation {
  id: string;
  title: string; // "": the first message is one
  at: number;
  mode: "chat" | "text"; // text: raw completions
  settings: Settings;
  nodes: Record<string, Message>;
  leaf: string | null; // the last message that is shown
}

export const newConversation = (id: string, settings: Settings, at = Date.now()): Conversation =>
  ({id, title: "", at, mode: "chat", settings, nodes: {}, leaf: null});

export const numberOf = (id: string) => parseInt(id.slice(1), 10);
export const isId = (id: string) => /^m\d+[\w-]*$/.test(id) && Number.isSafeInteger(numberOf(id));

/** Compares ids of messages: those before and behind a message are before and behind it here, too. */
export const order = (a: string, b: string) => numberOf(a) - numberOf(b) || (a < b ? -1 : Number(a > b));

const ordered = (conversation: Conversation) => Object.values(conversation.nodes);

/** The conversation with one more message, which is now its last. Its id is `conversation.leaf`. `tag`: of the tab, so
 * that two tabs never make the same id. */
export function added(conversation: Conversation, parent: string | null, node: Placeless<Message>, tag = ""): Conversation & {leaf: string} {
  let last = 0;
  for (const key of Object.keys(conversation.nodes)) last = Math.max(last, numberOf(key));
  const id = `m${last + 1}${tag}`;
  return {...conversation, nodes: {...conversation.nodes, [id]: {...node, id, parent}}, leaf: id};
}

/** The conversation with an answer changed. */
export const changed = (conversation: Conversation, id: string, patch: Partial<Answer>): Conversation =>
  ({...conversation, nodes: {...conversation.nodes, [id]: {...answerOf(conversation, id), ...patch}}});

export function answerOf(conversation: Conversation, id: string): Answer {
  const node = conversation.nodes[id];
  if (node?.role !== "assistant") throw new Error(`${id} is no answer`);
  return node;
}

const parentOf = (conversation: Conversation, id: string) => conversation.nodes[id]?.parent ?? null;

/** The messages from the first one to `leaf`. */
export function path(conversation: Conversation, leaf = conversation.leaf) {
  const found: Message[] = [];
  for (let node = conversation.nodes[leaf ?? ""]; node; node = conversation.nodes[node.parent ?? ""]) found.unshift(node);
  return found;
}

/** Ids of the messages that answer the same one, the oldest first. */
export const siblings = (conversation: Conversation, id: string) =>
  ordered(conversation).filter(node => node.parent === parentOf(conversation, id)).map(node => node.id);

/** The conversation with the branch through `id` chosen: its newest end. */
export function chosen(conversation: Conversation, id: string): Conversation {
  let leaf = id;
  for (let next: string | undefined = id; next; next = ordered(conversation).findLast(node => node.parent === leaf)?.id) leaf = next;
  return {...conversation, leaf};
}

/** The conversation without a message and what follows it; its parent's newest end is chosen. */
export function removed(conversation: Conversation, id: string) {
  const gone = new Set([id]);
  for (const node of ordered(conversation)) if (node.parent && gone.has(node.parent)) gone.add(node.id);
  const nodes = Object.fromEntries(Object.entries(conversation.nodes).filter(([key]) => !gone.has(key)));
  const parent = parentOf(conversation, id), left = {...conversation, nodes, leaf: parent};
  if (parent) return chosen(left, parent);
  const root = Object.values(nodes).findLast(node => !node.parent);
  return root ? chosen(left, root.id) : left;
}

/** Ids of an answer's calls that have no result yet. */
export function unanswered(conversation: Conversation, id: string) {
  const node = conversation.nodes[id], called = node?.role === "assistant" ? (node.calls ?? []) : [], results = new Set<string>();
  for (const one of path(conversation)) if (one.role === "tool") results.add(one.callId);
  return called.map(call => call.id).filter(call => !results.has(call));
}

/** Answers that are coming, by their streams on the server. */
export const streaming = (conversation: Conversation) =>
  ordered(conversation).filter((node): node is Answer & {stream: {id: string; at: number}} => node.role === "assistant" && node.status === "running" && node.stream !== undefined);

export function titleOf(conversation: Conversation) {
  if (conversation.title) return conversation.title;
  const first = path(conversation).find(node => node.role === "user")?.content.trim() ?? "";
  return first.split("\n", 1).join("").slice(0, 60) || "New conversation";
}

/** Conversations in which every word of `query` occurs, each with the text around the first one. */
export function search(conversations: Conversation[], query: string) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const found: {conversation: Conversation; excerpt: string}[] = [];
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

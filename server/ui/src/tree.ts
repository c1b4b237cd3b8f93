// Conversations as trees of messages: a message that is edited or asked for again gets a sibling. Pure functions.

import {reason} from "./api.js";
import type {Settings} from "./store.js";

interface Base {
  id: string; // "m" and a number, which grows with time
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

const ordered = (conversation: Conversation) => Object.values(conversation.nodes);

/** The conversation with one more message, which is now its last. Its id is `conversation.leaf`. */
export function added(conversation: Conversation, parent: string | null, node: Placeless<Message>): Conversation & {leaf: string} {
  const id = `m${1 + Math.max(0, ...Object.keys(conversation.nodes).map(key => Number(key.slice(1))))}`;
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

const ROLES = ["user", "assistant", "tool"];
const wrong: (text: string) => never = text => { throw new Error(`This is no export of conversations: ${text}.`); };

/** The conversations of an export; throws an Error that says what is wrong with it. */
export function imported(text: string): Conversation[] {
  let data: {format?: string; conversations?: Partial<Conversation>[]} | null; // if it is one
  try {
    data = JSON.parse(text);
  } catch (error) {
    wrong(reason(error));
  }
  if (data?.format !== "logitless-conversations") wrong("“format” must be “logitless-conversations”");
  if (!Array.isArray(data?.conversations)) wrong("“conversations” must be an array");
  const {conversations} = data;
  conversations.forEach((conversation, i) => {
    const where = `conversations[${i}]`, {nodes} = conversation ?? {};
    if (typeof conversation?.id !== "string") wrong(`${where}.id must be a string`);
    if (typeof nodes !== "object" || nodes === null || Array.isArray(nodes)) wrong(`${where}.nodes must be an object`);
    for (const [id, node] of Object.entries(nodes)) {
      if (!/^m\d+$/.test(id) || node?.id !== id) wrong(`${where}.nodes.${id} must be an object with this id`);
      if (!ROLES.includes(node.role) || typeof node.content !== "string") wrong(`${where}.nodes.${id} needs a role and a text`);
      const before = node.parent === null || (nodes[node.parent] && Number(node.parent.slice(1)) < Number(id.slice(1)));
      if (!before) wrong(`${where}.nodes.${id}.parent must be an earlier message`);
      for (const [kind, name] of [["image", "images"], ["audio", "sounds"]] as const)
        for (const uri of (node.role === "user" && node[name]) || [])
          if (!String(uri).startsWith(`data:${kind}/`)) wrong(`${where}.nodes.${id}.${name} must be data URIs`);
    }
    if (conversation.leaf !== null && !nodes[conversation.leaf ?? ""]) wrong(`${where}.leaf must be a message`);
  });
  return conversations as Conversation[];
}

export const exported = (conversations: Conversation[]) =>
  JSON.stringify({format: "logitless-conversations", version: 1, conversations}, null, 1);

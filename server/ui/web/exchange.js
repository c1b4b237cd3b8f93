// Files of conversations: written by Export and read by Import, which takes nothing that the page could not show.

/** @import {Answer, Call, Candidate, Conversation, Entry, Message, Question, Result, Settings, Shape, TextFile, Timings, TokenGroup} from "../src/types.js" */
import {reason} from "./api.js";
import {schemaShape} from "./schema.js";
import {DEFAULTS} from "./store.js";
import {fields, flag, list, matching, nullable, number, object, oneOf, optional, or, record, text} from "./shapes.js";
import {isId, order} from "./tree.js";

const /** @type {(what: string) => never} */ wrong = what => { throw new Error(`This is no export of conversations: ${what}.`); };

export const /** @type {Shape<Settings>} */ settingsShape = (value, at) => ({...DEFAULTS, .../** @type {Shape<Settings>} */ (fields({
  system: or(text, ""),
  sampling: or(record(number), {}),
  stop: or(text, ""),
  probabilities: or(flag, false),
  alternatives: or(number, DEFAULTS.alternatives),
  thinking: or(oneOf("auto", "on", "off"), "auto"),
  effort: or(text, ""),
  tools: or(list(fields({name: text, description: or(text, ""), parameters: schemaShape})), []),
  serverTools: or(list(text), []),
  schema: or(nullable(fields({on: flag, value: schemaShape})), null),
  lora: or(record(number), {}),
}))(value, at)});

const ID = matching(/^m\d+[\w-]*$/, "an id of a message");
const uris = (/** @type {string} */ kind) => optional(list(matching(new RegExp(`^data:${kind}/`), `an address that begins with data:${kind}/`), "data URIs"));
const base = {id: ID, parent: nullable(ID), content: text, at: optional(number)};
const candidate = {id: number, token: text, bytes: optional(list(number)), logprob: number};
const /** @type {{[Role in Message["role"]]: Shape<Message>}} */ messageShapes = {
  user: /** @type {Shape<Question>} */ (fields({...base, role: oneOf("user"), images: uris("image"), sounds: uris("audio"),
    files: optional(list(/** @type {Shape<TextFile>} */ (fields({name: text, text}))))})),
  assistant: /** @type {Shape<Answer>} */ (fields({...base, role: oneOf("assistant"), model: optional(text),
    status: optional(oneOf("running", "done", "length", "stopped", "failed")), error: optional(text), thought: optional(text),
    calls: optional(list(/** @type {Shape<Call>} */ (fields({id: text, name: text, text})))),
    tokens: optional(list(/** @type {Shape<TokenGroup>} */ (fields({kind: oneOf("thought", "text"), text,
      entries: list(/** @type {Shape<Entry>} */ (fields({...candidate, top: list(/** @type {Shape<Candidate>} */ (fields(candidate)))}))), swapped: optional(flag)})))),
    shown: optional(oneOf("text", "tokens")), timings: optional(/** @type {Shape<Timings>} */ (fields({n: number, rate: number, prompt: number, cached: number}))),
    stream: optional(fields({id: text, at: number}))})),
  tool: /** @type {Shape<Result>} */ (fields({...base, role: oneOf("tool"), callId: text, name: text})),
};
const /** @type {Shape<Message>} */ messageShape = (value, at) => {
  const role = oneOf("user", "assistant", "tool")(object(value, at).role, `${at}.role`);
  return messageShapes[role](value, at);
};

/** A whole conversation, whose messages are a tree. */
export const /** @type {Shape<Conversation>} */ conversationShape = (value, at) => {
  const taken = /** @type {Shape<Conversation>} */ (fields({id: text, title: or(text, ""), at: or(number, Date.now()), mode: or(oneOf("chat", "text"), "chat"),
    settings: or(settingsShape, DEFAULTS), nodes: record(messageShape), leaf: nullable(ID)}))(value, at);
  if (!taken.id || taken.id in {}) throw new Error(`${at}.id must be an id`);
  for (const [key, node] of Object.entries(taken.nodes)) {
    const where = `${at}.nodes.${key}`;
    if (node.id !== key || !isId(key)) throw new Error(`${where} must be an object with this id`);
    if (node.parent !== null && !(Object.hasOwn(taken.nodes, node.parent) && order(node.parent, key) < 0)) throw new Error(`${where}.parent must be an earlier message`);
  }
  if (taken.leaf !== null && !Object.hasOwn(taken.nodes, taken.leaf)) throw new Error(`${at}.leaf must be a message`);
  return taken;
};

/**
 * A message as a file has it: an answer that was coming has been cut.
 * @returns {Message}
 */
function still(/** @type {Message} */ node) {
  if (node.role !== "assistant" || node.status !== "running") return node;
  const {stream: _, ...rest} = node;
  return {...rest, status: "stopped"};
}

/** @returns {Conversation} */
const resting = (/** @type {Conversation} */ conversation) =>
  ({...conversation, nodes: Object.fromEntries(Object.entries(conversation.nodes).map(([id, node]) => [id, still(node)]))});

/**
 * The conversations of an export; throws an Error that says what is wrong with it.
 * @returns {Conversation[]}
 */
export function imported(/** @type {string} */ content) {
  let /** @type {unknown} */ data;
  try {
    data = JSON.parse(content);
  } catch (error) {
    wrong(reason(error));
  }
  const {format, conversations} = /** @type {{format?: unknown; conversations?: unknown}} */ (data ?? {});
  if (format !== "logitless-conversations") wrong("“format” must be “logitless-conversations”");
  if (!Array.isArray(conversations)) wrong("“conversations” must be an array");
  try {
    return conversations.map((one, i) => resting(conversationShape(one, `conversations[${i}]`)));
  } catch (error) {
    return wrong(reason(error));
  }
}

/**
 * Conversations with those of an import, the newest first. One that is here already gets the messages that it lacks; where
 * both have another message of one id, the import becomes a conversation of its own.
 * @returns {Conversation[]}
 */
export function joined(/** @type {Conversation[]} */ here, /** @type {Conversation[]} */ found, /** @type {() => string} */ newId) {
  const all = new Map(here.map(one => [one.id, one]));
  for (const one of found) {
    const old = all.get(one.id), ids = Object.keys(one.nodes);
    const differs = old && ids.some(id => {
      const [a, b] = [old.nodes[id], one.nodes[id]];
      return a && b && (a.role !== b.role || a.parent !== b.parent || a.content !== b.content);
    });
    if (!old) all.set(one.id, one);
    else if (!differs) all.set(one.id, {...old, leaf: old.leaf ?? one.leaf, nodes: Object.fromEntries(Object.entries({...one.nodes, ...old.nodes}).sort(([a], [b]) => order(a, b)))});
    else {
      const id = newId();
      all.set(id, {...one, id});
    }
  }
  return [...all.values()].sort((a, b) => b.at - a.at);
}

export const exported = (/** @type {Conversation[]} */ conversations) =>
  JSON.stringify({format: "logitless-conversations", version: 1, conversations: conversations.map(resting)}, null, 1);

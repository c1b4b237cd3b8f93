// Conversations that two tabs have changed: both sides' changes since the state that both know. Pure functions.

/** @import {Answer, Conversation, Message} from "../src/types.js" */
import {added, chosen, numberOf, order} from "./tree.js";

/**
 * `theirs` with what `ours` has changed since `base`, field by field.
 * @template {object} T
 * @param {Partial<T>} base
 * @param {T} ours
 * @param {T} theirs
 * @returns {T}
 */
export function merged(base, ours, theirs) {
  const /** @type {Partial<T>} */ next = {...theirs};
  for (const name of new Set(/** @type {(keyof T)[]} */ ([...Object.keys(base), ...Object.keys(ours)]))) {
    if (ours[name] === base[name]) continue;
    if (name in ours) next[name] = ours[name];
    else delete next[name];
  }
  return /** @type {T} */ (next);
}

const GROWING = /** @type {const} */ (["content", "thought", "tokens", "calls", "status", "error", "timings", "stream"]);

/**
 * One answer that both sides have changed; null where neither text is the other's beginning.
 * @returns {Answer | null}
 */
function grown(/** @type {Answer | undefined} */ base, /** @type {Answer} */ ours, /** @type {Answer} */ theirs) {
  const length = (/** @type {Answer} */ one) => one.content.length + (one.thought?.length ?? 0);
  const ourEnd = length(ours) > length(theirs) || (length(ours) === length(theirs) && theirs.status === "running");
  const [less, more] = ourEnd ? [theirs, ours] : [ours, theirs];
  if (!more.content.startsWith(less.content) || !(more.thought ?? "").startsWith(less.thought ?? "")) return null;
  const /** @type {Record<string, unknown>} */ next = {.../** @type {Answer} */ (merged(base ?? {}, ours, theirs))};
  for (const name of GROWING) {
    if (name in more) next[name] = more[name];
    else delete next[name];
  }
  return /** @type {Answer} */ (/** @type {unknown} */ (next));
}

/**
 * A conversation with the changes of both sides; nothing that only one side has written gets lost.
 * @returns {Conversation}
 */
export function joinedSides(/** @type {Conversation} */ base, /** @type {Conversation} */ ours, /** @type {Conversation} */ theirs, /** @type {string} */ tag) {
  const {nodes: _, ...head} = /** @type {Conversation} */ (merged(base, ours, theirs));
  const /** @type {Record<string, Message>} */ nodes = {...theirs.nodes}, /** @type {Answer[]} */ apart = [];
  for (const [id, mine] of Object.entries(ours.nodes)) {
    const before = base.nodes[id], other = theirs.nodes[id];
    if (mine === before) continue;
    if (!other || other === before) nodes[id] = mine;
    else if (mine.role === "assistant" && other.role === "assistant") {
      const both = grown(before?.role === "assistant" ? before : undefined, mine, other);
      if (both) nodes[id] = both;
      else apart.push(mine);
    } else nodes[id] = /** @type {Message} */ (merged(before ?? {}, mine, other));
  }
  for (const [id, before] of Object.entries(base.nodes)) if (!ours.nodes[id] && theirs.nodes[id] === before) delete nodes[id];
  for (const id of Object.keys(nodes)) // what one side has deleted, the other may have gone on with
    for (let parent = nodes[id]?.parent; parent && !nodes[parent]; parent = nodes[parent]?.parent) {
      const back = theirs.nodes[parent] ?? ours.nodes[parent] ?? base.nodes[parent];
      if (!back) break;
      nodes[parent] = back;
    }
  const settings = ours.settings === base.settings ? theirs.settings : merged(base.settings, ours.settings, theirs.settings);
  let /** @type {Conversation} */ next = {...head, settings, nodes: sorted(nodes)};
  for (const {id: __, parent, ...rest} of apart) next = added(next, parent, rest, tag);
  return next.leaf && next.nodes[next.leaf] ? chosen(next, next.leaf) : withLeaf(next);
}

/**
 * Messages in the order of their ids, each below one that is there.
 * @returns {Record<string, Message>}
 */
export function sorted(/** @type {Record<string, Message>} */ nodes) {
  const entries = Object.entries(nodes).sort(([a, one], [b, other]) => numberOf(a) - numberOf(b) || (one.at ?? 0) - (other.at ?? 0) || order(a, b));
  return Object.fromEntries(entries.map(([id, node]) => [id, node.parent && !nodes[node.parent] ? {...node, parent: null} : node]));
}

/** @returns {Conversation} */
function withLeaf(/** @type {Conversation} */ conversation) {
  const root = Object.values(conversation.nodes).findLast(node => !node.parent);
  return root ? chosen(conversation, root.id) : {...conversation, leaf: null};
}

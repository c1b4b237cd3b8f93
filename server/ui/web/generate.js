// Generation of an answer: send, regenerate, continue, stop, and replace a token.

/** @import {Answer, Asked, Call, Candidate, Conversation, Followed, Piece, Question, Utterance} from "../src/types.js" */
import {endStream, isAbort, Lost, reason, Refused, resumed, statusOf, stream, streamsOf} from "./api.js";
import {chosen, connect} from "./models.js";
import {absorbed, instead, requestFor} from "./request.js";
import {current, get, set, settingsOf, TAG, update} from "./store.js";
import {declared} from "./tools.js";
import {added, answerOf, changed, newConversation, streaming, unanswered} from "./tree.js";

const find = (/** @type {string} */ id) => get().conversations.find(one => one.id === id);
export const isRunning = (/** @type {string} */ id) => Object.hasOwn(get().running, id);

let own = 0; // tokens that this page has received, for the throughput of a server without metrics
export const received = () => own;

const SHARE = 3; // a picture of a long answer takes time: at most one part in so many and one goes into pictures

const PAUSES = [500, 2000]; // milliseconds: a page that is being left, or a server that is away, is not asked at once

/**
 * What `ask` gives, tried again after pauses; null: it fails.
 * @template T
 * @param {() => Promise<T>} ask
 */
async function patiently(ask) {
  for (const pause of PAUSES) {
    await new Promise(resolve => setTimeout(resolve, pause));
    try {
      return await ask();
    } catch { /* once more */ }
  }
  return null;
}

/** Change an answer by the pieces of its stream, at most once a frame. A stream with a name is taken up again when the
 * connection is lost. */
export async function follow(/** @type {Followed} */ {pieces, answer, change, name = "", signal}) {
  let next = answer, /** @type {Piece[]} */ fresh = [], timer = 0, spent = 0, at = answer.stream?.at ?? 0, source = pieces;
  const draw = () => {
    const began = performance.now();
    clearTimeout(timer);
    next = absorbed(next, fresh);
    if (name) next.stream = {id: name, at};
    fresh = [];
    change(next);
    requestAnimationFrame(() => { // what the change costs is known once it is drawn
      spent = performance.now() - began;
    });
    timer = 0;
  };
  const end = (/** @type {Partial<Answer>} */ patch) => { next = {...next, ...patch, stream: undefined}; };
  for (let before = -1; ;) {
    try {
      for await (const piece of source) {
        fresh.push(piece.data);
        at = piece.at;
        own += 1;
        timer ||= setTimeout(draw, Math.max(16, Math.min(1000, SHARE * spent)));
      }
      draw();
      end(next.status === "running" ? {status: "done"} : {});
    } catch (error) {
      draw();
      if (name && error instanceof Lost && at > before) {
        const known = await patiently(() => streamsOf([name]));
        if (known?.has(name)) {
          before = at;
          source = resumed(name, at, signal);
          continue;
        }
        if (known && at > 0) end({status: "stopped"}); // somebody has ended it
        else end({status: "failed", error: error.message});
      } else {
        if (statusOf(error) === 401) connect();
        const told = error instanceof Refused ? error.message : `The page failed: ${reason(error)}`;
        end(isAbort(error) ? {status: "stopped"} : {status: "failed", error: told});
      }
    }
    break;
  }
  clearTimeout(timer);
  change(next);
  return next;
}

/** Resolved when the page is left, which may go on to live in the browser's cache of pages. */
const left = () => /** @type {Promise<void>} */ (new Promise(resolve => { addEventListener("pagehide", () => resolve(), {once: true}); }));

/** Do this while no other tab does; at once where the browser has no locks, as at an address without TLS. */
const alone = (/** @type {string} */ name, /** @type {AbortSignal} */ signal, /** @type {() => Promise<void>} */ act) =>
  (navigator.locks ? navigator.locks.request(name, {signal}, () => Promise.race([act(), left()])) : act());

/** Mark a conversation as running, which its button stops, while `act` follows the stream of this name. */
async function whileRunning(/** @type {string} */ id, /** @type {string} */ name, /** @type {(signal: AbortSignal) => Promise<void>} */ act, begin = () => {}) {
  const control = new AbortController();
  control.signal.addEventListener("abort", () => { endStream(name).catch(() => {}); });
  set(now => ({running: {...now.running, [id]: control}}));
  begin();
  try {
    await alone(name, control.signal, () => act(control.signal));
  } catch (error) {
    if (!isAbort(error)) throw error;
  } finally {
    set(now => {
      const {[id]: _, ...running} = now.running;
      return {running};
    });
  }
}

/** Puts an answer into its conversation, where it may have another id by now: its stream is its name. */
const putInto = (/** @type {string} */ id, /** @type {string} */ node, /** @type {string} */ name) => (/** @type {Answer} */ next) => {
  const conversation = find(id), own = conversation && (streaming(conversation).find(one => one.stream.id === name)?.id ?? node);
  if (own && conversation.nodes[own]) update(id, one => changed(one, own, {...next, id: own}));
};

/** The answer to a request; without a name where the server has no room for one more stream with a name. */
async function* begun(/** @type {Asked} */ {url, body}, /** @type {AbortSignal} */ signal, /** @type {string} */ name) {
  try {
    yield* stream(url, body, signal, name);
  } catch (error) {
    if (!(error instanceof Refused && error.message.includes("X-Conversation-Id"))) throw error;
    yield* stream(url, body, signal);
  }
}

/** Ask for an answer, or for the rest of one. */
async function run(/** @type {string} */ id, /** @type {string} */ node, model = get().model) {
  const conversation = find(id);
  if (!conversation) return;
  const name = `${id}/${node}/${crypto.getRandomValues(new Uint32Array(1))[0]}`, adapters = model === get().model || !chosen()?.status ? get().adapters : [];
  const /** @type {Answer} */ answer = {...answerOf(conversation, node), status: "running", error: undefined, stream: {id: name, at: 0}};
  const asked = requestFor(conversation, node, {model, adapters, serverTools: declared(conversation.settings)});
  await whileRunning(id, name, async signal => {
    await follow({pieces: begun(asked, signal, name), name, signal, answer, change: putInto(id, node, name)});
  }, () => update(id, one => changed(one, node, answer)));
}

/** Take up the streams of these conversations that a tab has left: those of the server, from where the answers are. */
export async function takeUp(/** @type {Conversation[]} */ conversations) {
  const waiting = conversations.filter(one => !isRunning(one.id)).flatMap(one => streaming(one).map(node => ({id: one.id, node})));
  for (const {id, node} of waiting) {
    const name = node.stream.id;
    if (isRunning(id)) continue;
    whileRunning(id, name, async signal => {
      const here = find(id), answer = here && streaming(here).find(one => one.stream.id === name);
      if (!answer) return; // the other tab has the end
      const change = putInto(id, answer.id, name);
      if ((await streamsOf([name])).has(name)) await follow({pieces: resumed(name, answer.stream.at, signal), name, signal, answer, change});
      else change({...answer, status: "stopped", stream: undefined});
    }).catch(() => connect());
  }
}

const /** @type {Omit<Answer, "id" | "parent">} */ EMPTY = {role: "assistant", content: ""};

async function answerTo(/** @type {string} */ id, /** @type {string | null} */ parent, answer = EMPTY, model = get().model) {
  update(id, one => added(one, parent, {...answer, model: answer.model ?? model, at: Date.now()}, TAG));
  const leaf = find(id)?.leaf;
  if (leaf) await run(id, leaf, model);
}

export const newId = () => crypto.randomUUID?.() ?? String(Math.random()).slice(2);

/** The conversation that is shown; there is a new one if there was none. */
export function here(/** @type {Conversation["mode"]} */ mode = "chat") {
  const shown = current();
  if (shown) return shown;
  const /** @type {Conversation} */ made = {...newConversation(newId(), settingsOf()), mode};
  set(now => ({conversations: [made, ...now.conversations], current: made.id}));
  return made;
}

/** Send a message after the last one, and ask for the answer. */
export function send(/** @type {Utterance} */ {text, images = [], sounds = [], files = [], mode}) {
  const {id, leaf} = here(mode), /** @type {Omit<Question, "id" | "parent">} */ node = {role: "user", content: text, at: Date.now()};
  if (images.length) node.images = images;
  if (sounds.length) node.sounds = sounds;
  if (files.length) node.files = files;
  update(id, one => ({...added(one, leaf, node, TAG), at: Date.now()}));
  set(now => ({conversations: [...now.conversations].sort((a, b) => b.at - a.at)}));
  return answerTo(id, find(id)?.leaf ?? null);
}

/** The same message with another text, as a sibling of the old one. */
export function edit(/** @type {string} */ id, /** @type {Question} */ {parent, role, images, sounds, files}, /** @type {string} */ text) {
  update(id, one => added(one, parent, {role, content: text, ...(images && {images}), ...(sounds && {sounds}), ...(files && {files}), at: Date.now()}, TAG));
  return answerTo(id, find(id)?.leaf ?? null);
}

/**
 * Another answer in the place of one, of the chosen model or of another one.
 * @param {string} id
 * @param {Answer} pair
 * @param {string} [model]
 */
export const again = (id, {parent}, model) => answerTo(id, parent, EMPTY, model);

/** Go on with an answer that was stopped or cut. */
export const goOn = (/** @type {string} */ id, /** @type {string} */ node) => run(id, node);

/** Another token in the place of one of an answer's, as a branch that goes on from there. */
export function tryInstead(/** @type {string} */ id, /** @type {Answer} */ node, /** @type {number} */ at, /** @type {Candidate} */ entry) {
  return answerTo(id, node.parent, instead(node, at, entry));
}

/** The result of a tool's call; once all have one, the model goes on. */
export function answerCall(/** @type {string} */ id, /** @type {string} */ node, /** @type {Pick<Call, "id" | "name">} */ call, /** @type {string} */ text) {
  update(id, one => added(one, one.leaf, {role: "tool", callId: call.id, name: call.name, content: text, at: Date.now()}, TAG));
  const now = find(id);
  if (now && !unanswered(now, node).length) answerTo(id, now.leaf);
}

export const stop = (/** @type {string | null} */ id) => get().running[id ?? ""]?.abort();

// Generation of an answer: send, regenerate, continue, stop, and replace a token.

import type {Piece, Received} from "./api.js";
import {endStream, isAbort, Lost, reason, Refused, resumed, statusOf, stream, streamsOf} from "./api.js";
import {chosen, connect} from "./models.js";
import type {Asked} from "./request.js";
import {absorbed, instead, requestFor} from "./request.js";
import {current, get, set, settingsOf, TAG, update} from "./store.js";
import {declared} from "./tools.js";
import type {Answer, Call, Candidate, Conversation, Question, TextFile} from "./tree.js";
import {added, answerOf, changed, newConversation, streaming, unanswered} from "./tree.js";

const find = (id: string) => get().conversations.find(one => one.id === id);
export const isRunning = (id: string) => Object.hasOwn(get().running, id);

let own = 0; // tokens that this page has received, for the throughput of a server without metrics
export const received = () => own;

const SHARE = 3; // a picture of a long answer takes time: at most one part in so many and one goes into pictures

const PAUSES = [500, 2000]; // milliseconds: a page that is being left, or a server that is away, is not asked at once

/** What `ask` gives, tried again after pauses; null: it fails. */
async function patiently<T>(ask: () => Promise<T>) {
  for (const pause of PAUSES) {
    await new Promise(resolve => setTimeout(resolve, pause));
    try {
      return await ask();
    } catch { /* once more */ }
  }
  return null;
}

interface Followed {
  pieces: AsyncGenerator<Received>;
  answer: Answer;
  change: (answer: Answer) => void;
  name?: string; // of the stream, if it can be taken up again
  signal: AbortSignal;
}

/** Change an answer by the pieces of its stream, at most once a frame. A stream with a name is taken up again when the
 * connection is lost. */
export async function follow({pieces, answer, change, name = "", signal}: Followed) {
  let next = answer, fresh: Piece[] = [], timer = 0, spent = 0, at = answer.stream?.at ?? 0, source = pieces;
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
  const end = (patch: Partial<Answer>) => { next = {...next, ...patch, stream: undefined}; };
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
const left = () => new Promise<void>(resolve => { addEventListener("pagehide", () => resolve(), {once: true}); });

/** Do this while no other tab does; at once where the browser has no locks, as at an address without TLS. */
const alone = (name: string, signal: AbortSignal, act: () => Promise<void>) =>
  (navigator.locks ? navigator.locks.request(name, {signal}, () => Promise.race([act(), left()])) : act());

/** Mark a conversation as running, which its button stops, while `act` follows the stream of this name. */
async function whileRunning(id: string, name: string, act: (signal: AbortSignal) => Promise<void>, begin = () => {}) {
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
const putInto = (id: string, node: string, name: string) => (next: Answer) => {
  const conversation = find(id), own = conversation && (streaming(conversation).find(one => one.stream.id === name)?.id ?? node);
  if (own && conversation.nodes[own]) update(id, one => changed(one, own, {...next, id: own}));
};

/** The answer to a request; without a name where the server has no room for one more stream with a name. */
async function* begun({url, body}: Asked, signal: AbortSignal, name: string) {
  try {
    yield* stream(url, body, signal, name);
  } catch (error) {
    if (!(error instanceof Refused && error.message.includes("X-Conversation-Id"))) throw error;
    yield* stream(url, body, signal);
  }
}

/** Ask for an answer, or for the rest of one. */
async function run(id: string, node: string, model = get().model) {
  const conversation = find(id);
  if (!conversation) return;
  const name = `${id}/${node}/${crypto.getRandomValues(new Uint32Array(1))[0]}`, adapters = model === get().model || !chosen()?.status ? get().adapters : [];
  const answer: Answer = {...answerOf(conversation, node), status: "running", error: undefined, stream: {id: name, at: 0}};
  const asked = requestFor(conversation, node, {model, adapters, serverTools: declared(conversation.settings)});
  await whileRunning(id, name, async signal => {
    await follow({pieces: begun(asked, signal, name), name, signal, answer, change: putInto(id, node, name)});
  }, () => update(id, one => changed(one, node, answer)));
}

/** Take up the streams of these conversations that a tab has left: those of the server, from where the answers are. */
export async function takeUp(conversations: Conversation[]) {
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

const EMPTY: Omit<Answer, "id" | "parent"> = {role: "assistant", content: ""};

async function answerTo(id: string, parent: string | null, answer = EMPTY, model = get().model) {
  update(id, one => added(one, parent, {...answer, model: answer.model ?? model, at: Date.now()}, TAG));
  const leaf = find(id)?.leaf;
  if (leaf) await run(id, leaf, model);
}

export const newId = () => crypto.randomUUID?.() ?? String(Math.random()).slice(2);

/** The conversation that is shown; there is a new one if there was none. */
export function here(mode: Conversation["mode"] = "chat") {
  const shown = current();
  if (shown) return shown;
  const made: Conversation = {...newConversation(newId(), settingsOf()), mode};
  set(now => ({conversations: [made, ...now.conversations], current: made.id}));
  return made;
}

interface Said {
  text: string;
  images?: string[];
  sounds?: string[];
  files?: TextFile[];
  mode?: Conversation["mode"];
}

/** Send a message after the last one, and ask for the answer. */
export function send({text, images = [], sounds = [], files = [], mode}: Said) {
  const {id, leaf} = here(mode), node: Omit<Question, "id" | "parent"> = {role: "user", content: text, at: Date.now()};
  if (images.length) node.images = images;
  if (sounds.length) node.sounds = sounds;
  if (files.length) node.files = files;
  update(id, one => ({...added(one, leaf, node, TAG), at: Date.now()}));
  set(now => ({conversations: [...now.conversations].sort((a, b) => b.at - a.at)}));
  return answerTo(id, find(id)?.leaf ?? null);
}

/** The same message with another text, as a sibling of the old one. */
export function edit(id: string, {parent, role, images, sounds, files}: Question, text: string) {
  update(id, one => added(one, parent, {role, content: text, ...(images && {images}), ...(sounds && {sounds}), ...(files && {files}), at: Date.now()}, TAG));
  return answerTo(id, find(id)?.leaf ?? null);
}

/** Another answer in the place of one, of the chosen model or of another one. */
export const again = (id: string, {parent}: Answer, model?: string) => answerTo(id, parent, EMPTY, model);

/** Go on with an answer that was stopped or cut. */
export const goOn = (id: string, node: string) => run(id, node);

/** Another token in the place of one of an answer's, as a branch that goes on from there. */
export function tryInstead(id: string, node: Answer, at: number, entry: Candidate) {
  return answerTo(id, node.parent, instead(node, at, entry));
}

/** The result of a tool's call; once all have one, the model goes on. */
export function answerCall(id: string, node: string, call: Pick<Call, "id" | "name">, text: string) {
  update(id, one => added(one, one.leaf, {role: "tool", callId: call.id, name: call.name, content: text, at: Date.now()}, TAG));
  const now = find(id);
  if (now && !unanswered(now, node).length) answerTo(id, now.leaf);
}

export const stop = (id: string | null) => get().running[id ?? ""]?.abort();

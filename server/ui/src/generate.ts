// Generation of an answer: send, regenerate, continue, stop, and replace a token.

import type {Piece} from "./api.js";
import {isAbort, reason, Refused, statusOf, stream} from "./api.js";
import {connect} from "./models.js";
import type {Asked} from "./request.js";
import {absorbed, instead, requestFor} from "./request.js";
import {current, get, set, settingsOf, update} from "./store.js";
import {declared} from "./tools.js";
import type {Answer, Call, Candidate, Conversation, Question, TextFile} from "./tree.js";
import {added, answerOf, changed, newConversation, unanswered} from "./tree.js";

const find = (id: string) => get().conversations.find(one => one.id === id);
export const isRunning = (id: string) => id in get().running;

let own = 0; // tokens that this page has received, for the throughput of a server without metrics
export const received = () => own;

const SHARE = 3; // a picture of a long answer takes time: at most one part in so many and one goes into pictures

interface Followed extends Asked {
  signal: AbortSignal;
  answer: Answer;
  change: (answer: Answer) => void;
}

/** Change an answer by the pieces of its stream, at most once a frame. */
export async function follow({url, body, signal, change, answer}: Followed) {
  let next = answer, pieces: Piece[] = [], timer = 0, spent = 0;
  const draw = () => {
    const began = performance.now();
    clearTimeout(timer);
    next = absorbed(next, pieces);
    pieces = [];
    change(next);
    requestAnimationFrame(() => { // what the change costs is known once it is drawn
      spent = performance.now() - began;
    });
    timer = 0;
  };
  try {
    for await (const data of stream(url, body, signal)) {
      pieces.push(data);
      own += 1;
      timer ||= setTimeout(draw, Math.max(16, Math.min(1000, SHARE * spent)));
    }
    draw();
    if (next.status === "running") next = {...next, status: "done"};
  } catch (error) {
    draw();
    const told = error instanceof Refused ? error.message : `The page failed: ${reason(error)}`;
    if (statusOf(error) === 401) connect();
    next = isAbort(error) ? {...next, status: "stopped"} : {...next, status: "failed", error: told};
  }
  clearTimeout(timer);
  change(next);
  return next;
}

async function run(id: string, node: string) {
  const control = new AbortController(), {model, adapters} = get();
  const conversation = find(id);
  if (!conversation) return;
  const answer: Answer = {...answerOf(conversation, node), status: "running", error: undefined};
  set(now => ({running: {...now.running, [id]: control}}));
  update(id, one => changed(one, node, answer));
  const asked = requestFor(conversation, node, {model, adapters, serverTools: declared(conversation.settings)});
  const change = (next: Answer) => find(id)?.nodes[node] && update(id, one => changed(one, node, next));
  await follow({...asked, signal: control.signal, answer, change});
  set(now => {
    const {[id]: _, ...running} = now.running;
    return {running};
  });
}

const EMPTY: Omit<Answer, "id" | "parent"> = {role: "assistant", content: ""};

async function answerTo(id: string, parent: string | null, answer = EMPTY) {
  update(id, one => added(one, parent, {...answer, model: answer.model ?? get().model, at: Date.now()}));
  const leaf = find(id)?.leaf;
  if (leaf) await run(id, leaf);
}

/** The conversation that is shown; there is a new one if there was none. */
export function here(mode: Conversation["mode"] = "chat") {
  const shown = current();
  if (shown) return shown;
  const made: Conversation = {...newConversation(crypto.randomUUID?.() ?? String(Math.random()).slice(2), settingsOf()), mode};
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
  update(id, one => ({...added(one, leaf, node), at: Date.now()}));
  set(now => ({conversations: [...now.conversations].sort((a, b) => b.at - a.at)}));
  return answerTo(id, find(id)?.leaf ?? null);
}

/** The same message with another text, as a sibling of the old one. */
export function edit(id: string, {parent, role, images, sounds, files}: Question, text: string) {
  update(id, one => added(one, parent, {role, content: text, ...(images && {images}), ...(sounds && {sounds}), ...(files && {files}), at: Date.now()}));
  return answerTo(id, find(id)?.leaf ?? null);
}

export const again = (id: string, {parent}: Answer) => answerTo(id, parent);

/** Go on with an answer that was stopped or cut. */
export const goOn = (id: string, node: string) => run(id, node);

/** Another token in the place of one of an answer's, as a branch that goes on from there. */
export function tryInstead(id: string, node: Answer, at: number, entry: Candidate) {
  return answerTo(id, node.parent, instead(node, at, entry));
}

/** The result of a tool's call; once all have one, the model goes on. */
export function answerCall(id: string, node: string, call: Pick<Call, "id" | "name">, text: string) {
  update(id, one => added(one, one.leaf, {role: "tool", callId: call.id, name: call.name, content: text, at: Date.now()}));
  const now = find(id);
  if (now && !unanswered(now, node).length) answerTo(id, now.leaf);
}

export const stop = (id: string | null) => get().running[id ?? ""]?.abort();

// Generation of an answer: send, regenerate, continue, stop, and replace a token.
import { isAbort, reason, Refused, statusOf, stream } from "./api.js";
import { connect } from "./models.js";
import { absorbed, instead, requestFor } from "./request.js";
import { current, get, set, settingsOf, update } from "./store.js";
import { declared } from "./tools.js";
import { added, answerOf, changed, newConversation, unanswered } from "./tree.js";
const find = (id) => get().conversations.find(one => one.id === id);
export const isRunning = (id) => id in get().running;
let own = 0; // tokens that this page has received, for the throughput of a server without metrics
export const received = () => own;
const SHARE = 3; // a picture of a long answer takes time: at most one part in so many and one goes into pictures
/** Change an answer by the pieces of its stream, at most once a frame. */
export async function follow({ url, body, signal, change, answer }) {
    let next = answer, pieces = [], timer = 0, spent = 0;
    const draw = () => {
        const began = performance.now();
        clearTimeout(timer);
        next = absorbed(next, pieces);
        pieces = [];
        change(next);
        requestAnimationFrame(() => {
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
        if (next.status === "running")
            next = { ...next, status: "done" };
    }
    catch (error) {
        draw();
        const told = error instanceof Refused ? error.message : `The page failed: ${reason(error)}`;
        if (statusOf(error) === 401)
            connect();
        next = isAbort(error) ? { ...next, status: "stopped" } : { ...next, status: "failed", error: told };
    }
    clearTimeout(timer);
    change(next);
    return next;
}
async function run(id, node) {
    const control = new AbortController(), { model, adapters } = get();
    const conversation = find(id);
    if (!conversation)
        return;
    const answer = { ...answerOf(conversation, node), status: "running", error: undefined };
    set(now => ({ running: { ...now.running, [id]: control } }));
    update(id, one => changed(one, node, answer));
    const asked = requestFor(conversation, node, { model, adapters, serverTools: declared(conversation.settings) });
    const change = (next) => find(id)?.nodes[node] && update(id, one => changed(one, node, next));
    await follow({ ...asked, signal: control.signal, answer, change });
    set(now => {
        const { [id]: _, ...running } = now.running;
        return { running };
    });
}
const EMPTY = { role: "assistant", content: "" };
async function answerTo(id, parent, answer = EMPTY) {
    update(id, one => added(one, parent, { ...answer, model: answer.model ?? get().model, at: Date.now() }));
    const leaf = find(id)?.leaf;
    if (leaf)
        await run(id, leaf);
}
/** The conversation that is shown; there is a new one if there was none. */
export function here(mode = "chat") {
    const shown = current();
    if (shown)
        return shown;
    const made = { ...newConversation(crypto.randomUUID?.() ?? String(Math.random()).slice(2), settingsOf()), mode };
    set(now => ({ conversations: [made, ...now.conversations], current: made.id }));
    return made;
}
/** Send a message after the last one, and ask for the answer. */
export function send({ text, images = [], sounds = [], files = [], mode }) {
    const { id, leaf } = here(mode), node = { role: "user", content: text, at: Date.now() };
    if (images.length)
        node.images = images;
    if (sounds.length)
        node.sounds = sounds;
    if (files.length)
        node.files = files;
    update(id, one => ({ ...added(one, leaf, node), at: Date.now() }));
    set(now => ({ conversations: [...now.conversations].sort((a, b) => b.at - a.at) }));
    return answerTo(id, find(id)?.leaf ?? null);
}
/** The same message with another text, as a sibling of the old one. */
export function edit(id, { parent, role, images, sounds, files }, text) {
    update(id, one => added(one, parent, { role, content: text, ...(images && { images }), ...(sounds && { sounds }), ...(files && { files }), at: Date.now() }));
    return answerTo(id, find(id)?.leaf ?? null);
}
export const again = (id, { parent }) => answerTo(id, parent);
/** Go on with an answer that was stopped or cut. */
export const goOn = (id, node) => run(id, node);
/** Another token in the place of one of an answer's, as a branch that goes on from there. */
export function tryInstead(id, node, at, entry) {
    return answerTo(id, node.parent, instead(node, at, entry));
}
/** The result of a tool's call; once all have one, the model goes on. */
export function answerCall(id, node, call, text) {
    update(id, one => added(one, one.leaf, { role: "tool", callId: call.id, name: call.name, content: text, at: Date.now() }));
    const now = find(id);
    if (now && !unanswered(now, node).length)
        answerTo(id, now.leaf);
}
export const stop = (id) => get().running[id ?? ""]?.abort();

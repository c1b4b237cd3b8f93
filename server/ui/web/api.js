// The server's API as the page uses it: JSON, streams of events, and the key, which stays in this tab.

/** @import {Error as ErrorBody, File as ServerFile, StreamState} from "../src/bodies.js" */
/** @import {Piece, Received} from "../src/types.js" */

const KEY = "logitless-key";

export class Refused extends Error {
  /** @readonly @type {number} */ status;

  constructor(/** @type {number} */ status, /** @type {string} */ message) {
    super(message);
    this.status = status;
  }
}

/** The server cannot be reached, or not any more. */
export class Lost extends Refused {
  constructor(/** @type {string} */ message) {
    super(0, message);
  }
}

/** What went wrong, in words. */
export const reason = (/** @type {unknown} */ error) => (error instanceof Error ? error.message : String(error));
export const statusOf = (/** @type {unknown} */ error) => (error instanceof Refused ? error.status : 0);
export const isAbort = (/** @type {unknown} */ error) => error instanceof Error && error.name === "AbortError";

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (/** @type {string} */ value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

async function request(/** @type {string} */ path, /** @type {RequestInit & {headers?: Record<string, string>}} */ options = {}) {
  const /** @type {Record<string, string>} */ headers = {...options.headers};
  if (apiKey.get()) headers.Authorization = "Bearer " + utf8(apiKey.get());
  let reply;
  try {
    reply = await fetch(path, {...options, headers, cache: "no-store"});
  } catch (error) {
    if (isAbort(error)) throw error;
    throw new Lost("The server cannot be reached.");
  }
  if (reply.ok) return reply;
  const text = await reply.text();
  let message = `The server answered ${reply.status}.`;
  try {
    message = (/** @type {ErrorBody} */ (JSON.parse(text))).error.message;
  } catch { /* not one of the server's own errors */ }
  throw new Refused(reply.status, String(message));
}

/** A header's value is bytes: those of the text's UTF-8. */
function utf8(/** @type {string} */ text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

/**
 * @template Body
 * @param {string} path
 * @returns {Promise<Body>}
 */
export async function json(path) {
  return (await request(path)).json();
}

/**
 * @template Body
 * @param {string} path
 * @param {object} body
 * @param {AbortSignal} [signal]
 * @returns {Promise<Body>}
 */
export async function post(path, body, signal) {
  const headers = {"Content-Type": "application/json"};
  return (await request(path, {method: "POST", headers, body: JSON.stringify(body), signal: signal ?? null})).json();
}

/**
 * Send a file as OpenAI's clients do; returns the server's description of it.
 * @returns {Promise<ServerFile>}
 */
export async function upload(/** @type {File} */ file, /** @type {string} */ purpose) {
  const form = new FormData();
  form.append("purpose", purpose);
  form.append("file", file, file.name);
  return (await request("v1/files", {method: "POST", body: form})).json();
}

export async function text(/** @type {string} */ path) {
  return (await request(path)).text();
}

/**
 * The stream that answers a request. With a name it goes on without this page, which may take it up again.
 * @returns {AsyncGenerator<Received>}
 */
export async function* stream(/** @type {string} */ path, /** @type {object} */ body, /** @type {AbortSignal} */ signal, name = "") {
  const reply = await request(path, {
    method: "POST",
    headers: {"Content-Type": "application/json", ...(name && {"X-Conversation-Id": name})},
    body: JSON.stringify({...body, stream: true}),
    signal,
  });
  yield* pieces(reply, 0);
}

/**
 * A stream of this name from a byte on.
 * @returns {AsyncGenerator<Received>}
 */
export async function* resumed(/** @type {string} */ name, /** @type {number} */ at, /** @type {AbortSignal} */ signal) {
  yield* pieces(await request(`v1/stream?conv_id=${encodeURIComponent(name)}&from=${at}`, {signal}), at);
}

/** Which of these streams the server has; with a wrong key it refuses. */
export const streamsOf = async (/** @type {string[]} */ names) =>
  new Set((await /** @type {Promise<StreamState[]>} */ (post("v1/streams/lookup", {conversation_ids: names}))).map(one => one.conversation_id));

/** End a stream. */
export const endStream = (/** @type {string} */ name) => request(`v1/stream?conv_id=${encodeURIComponent(name)}`, {method: "DELETE"});

/**
 * The objects of a stream of server-sent events. Throws what the server refused, and when the end is missing.
 * @returns {AsyncGenerator<Received>}
 */
async function* pieces(/** @type {Response} */ reply, /** @type {number} */ begin) {
  const reader = /** @type {NonNullable<typeof reply.body>} */ (reply.body).pipeThrough(new TextDecoderStream()).getReader(), encoder = new TextEncoder();
  let rest = "", ended = false, at = begin;
  for (;;) {
    const {value, done} = await reader.read().catch((/** @type {unknown} */ error) => {
      throw isAbort(error) ? error : new Lost("The connection ended before the answer did.");
    });
    if (done) break;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop() ?? "";
    for (const frame of frames) {
      at += encoder.encode(frame).length + 2;
      if (!frame.startsWith("data: ")) continue;
      const /** @type {(Piece & Partial<ErrorBody>) | null} */ data = frame === "data: [DONE]" ? null : JSON.parse(frame.slice(6));
      if (data?.error) throw new Refused(data.error.code, String(data.error.message));
      ended ||= data === null || ("stop" in data && data.stop === true);
      if (data) yield {data, at};
    }
  }
  if (!ended) throw new Lost("The connection ended before the answer did.");
}

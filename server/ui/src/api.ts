// The server's API as the page uses it: JSON, streams of events, and the key, which stays in this tab.

import type {ChatChunk, Error as ErrorBody, File as ServerFile, NativeChunk, NativeCompletion, StreamState} from "./bodies.js";

const KEY = "logitless-key";

export class Refused extends Error {
  readonly status: number;

  constructor(status: number, message: string) {
    super(message);
    this.status = status;
  }
}

/** The server cannot be reached, or not any more. */
export class Lost extends Refused {
  constructor(message: string) {
    super(0, message);
  }
}

/** What went wrong, in words. */
export const reason = (error: unknown) => (error instanceof Error ? error.message : String(error));
export const statusOf = (error: unknown) => (error instanceof Refused ? error.status : 0);
export const isAbort = (error: unknown) => error instanceof Error && error.name === "AbortError";

/** A part of a list of the server. */
export interface Listed<T> {
  data: T[];
}

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value: string) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

async function request(path: string, options: RequestInit & {headers?: Record<string, string>} = {}) {
  const headers: Record<string, string> = {...options.headers};
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
    message = (JSON.parse(text) as ErrorBody).error.message;
  } catch { /* not one of the server's own errors */ }
  throw new Refused(reply.status, String(message));
}

/** A header's value is bytes: those of the text's UTF-8. */
function utf8(text: string) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

export async function json<Body>(path: string): Promise<Body> {
  return (await request(path)).json();
}

export async function post<Body>(path: string, body: object, signal?: AbortSignal): Promise<Body> {
  const headers = {"Content-Type": "application/json"};
  return (await request(path, {method: "POST", headers, body: JSON.stringify(body), signal: signal ?? null})).json();
}

/** Send a file as OpenAI's clients do; returns the server's description of it. */
export async function upload(file: File, purpose: string): Promise<ServerFile> {
  const form = new FormData();
  form.append("purpose", purpose);
  form.append("file", file, file.name);
  return (await request("v1/files", {method: "POST", body: form})).json();
}

export async function text(path: string) {
  return (await request(path)).text();
}

/** A piece of a stream: of a chat, or of a completion. */
export type Piece = ChatChunk | NativeChunk | NativeCompletion;

/** A piece of a stream, and the bytes of the stream that have come with it. */
export interface Received {
  data: Piece;
  at: number;
}

/** The stream that answers a request. With a name it goes on without this page, which may take it up again. */
export async function* stream(path: string, body: object, signal: AbortSignal, name = ""): AsyncGenerator<Received> {
  const reply = await request(path, {
    method: "POST",
    headers: {"Content-Type": "application/json", ...(name && {"X-Conversation-Id": name})},
    body: JSON.stringify({...body, stream: true}),
    signal,
  });
  yield* pieces(reply, 0);
}

/** A stream of this name from a byte on. */
export async function* resumed(name: string, at: number, signal: AbortSignal): AsyncGenerator<Received> {
  yield* pieces(await request(`v1/stream?conv_id=${encodeURIComponent(name)}&from=${at}`, {signal}), at);
}

/** Which of these streams the server has; with a wrong key it refuses. */
export const streamsOf = async (names: string[]) =>
  new Set((await post<StreamState[]>("v1/streams/lookup", {conversation_ids: names})).map(one => one.conversation_id));

/** End a stream. */
export const endStream = (name: string) => request(`v1/stream?conv_id=${encodeURIComponent(name)}`, {method: "DELETE"});

/** The objects of a stream of server-sent events. Throws what the server refused, and when the end is missing. */
async function* pieces(reply: Response, begin: number): AsyncGenerator<Received> {
  const reader = reply.body!.pipeThrough(new TextDecoderStream()).getReader(), encoder = new TextEncoder();
  let rest = "", ended = false, at = begin;
  for (;;) {
    const {value, done} = await reader.read().catch((error: unknown) => {
      throw isAbort(error) ? error : new Lost("The connection ended before the answer did.");
    });
    if (done) break;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop() ?? "";
    for (const frame of frames) {
      at += encoder.encode(frame).length + 2;
      if (!frame.startsWith("data: ")) continue;
      const data: (Piece & Partial<ErrorBody>) | null = frame === "data: [DONE]" ? null : JSON.parse(frame.slice(6));
      if (data?.error) throw new Refused(data.error.code, String(data.error.message));
      ended ||= data === null || ("stop" in data && data.stop === true);
      if (data) yield {data, at};
    }
  }
  if (!ended) throw new Lost("The connection ended before the answer did.");
}

// Requests of a conversation: their bodies, and the pieces of a stream put into an answer. Pure functions.

/** @import {Adapter, TokenLogprob, ToolCallDelta} from "../src/bodies.js" */
/** @import {Answer, Asked, Call, Candidate, ChatMessage, Conversation, Growing, Message, Part, Piece, Question, RequestBody, Settings, Status, TokenGroup} from "../src/types.js" */
import {answerOf, path} from "./tree.js";

/** A text with its attached files before it. */
export const textOf = (/** @type {Pick<Question, "content" | "files">} */ node) =>
  [...(node.files ?? []).map(file => `File ${file.name}:\n\`\`\`\n${file.text}\n\`\`\`\n\n`), node.content].join("");

/**
 * A sound's part; the server reads its format from the bytes.
 * @returns {Part}
 */
function heard(/** @type {string} */ url) {
  const [head = "", data = ""] = url.split(",");
  return {type: "input_audio", input_audio: {data, format: head.includes("mpeg") ? "mp3" : "wav"}};
}

/** @returns {ChatMessage} */
function messageOf(/** @type {Message} */ node) {
  if (node.role === "tool") return {role: "tool", tool_call_id: node.callId, content: node.content};
  if (node.role === "user") {
    const text = textOf(node);
    const parts = [...(node.images ?? []).map(/** @returns {Part} */ (url) => ({type: "image_url", image_url: {url}})), ...(node.sounds ?? []).map(heard)];
    return {role: "user", content: parts.length ? [...parts, {type: "text", text}] : text};
  }
  const /** @type {ChatMessage} */ message = {role: "assistant", content: node.content};
  if (node.thought) message.reasoning_content = node.thought;
  if (node.calls?.length)
    message.tool_calls = node.calls.map(({id, name, text}) => ({id, type: "function", function: {name, arguments: text}}));
  return message;
}

function sampled(/** @type {Settings} */ settings, /** @type {Adapter[]} */ adapters) {
  const /** @type {RequestBody} */ body = {...settings.sampling};
  if (settings.stop) body.stop = settings.stop.split("\n").filter(Boolean);
  if (settings.schema?.on) body.response_format = {type: "json_schema", json_schema: {name: "answer", schema: settings.schema.value}};
  if (adapters.some(one => one.id in settings.lora))
    body.lora = adapters.filter(one => one.id in settings.lora || one.scale) // what is not listed is off, or the model's name
      .map(one => ({id: one.id, scale: settings.lora[one.id] ?? one.scale}));
  return body;
}

function reasoned(/** @type {Settings} */ settings) {
  const /** @type {RequestBody} */ body = {};
  if (settings.thinking !== "auto") body.chat_template_kwargs = {enable_thinking: settings.thinking === "on"};
  if (settings.thinking !== "off" && settings.effort) body.reasoning_effort = settings.effort;
  return body;
}

/**
 * {url, body} that ask for the answer `id`, which goes on with the text that it has. `serverTools`: declarations.
 * @returns {Asked}
 */
export function requestFor(/** @type {Conversation} */ conversation, /** @type {string} */ id,
  /** @type {{model: string; adapters: Adapter[]; serverTools?: Record<string, unknown>[]}} */ {model, adapters, serverTools = []}) {
  const {settings} = conversation, answer = answerOf(conversation, id);
  const /** @type {RequestBody} */ body = {...(model && {model}), ...sampled(settings, adapters)};
  const before = path(conversation, answer.parent), begun = Boolean(answer.content || answer.thought);
  if (conversation.mode === "text") {
    if (settings.probabilities) body.n_probs = settings.alternatives;
    return {url: "completion", body: {...body, prompt: before.slice(-1).map(textOf).join("") + answer.content}};
  }
  if (settings.probabilities) Object.assign(body, {logprobs: true, top_logprobs: settings.alternatives});
  const /** @type {ChatMessage[]} */ system = settings.system ? [{role: "system", content: settings.system}] : [];
  const messages = [...system, ...before.map(messageOf), ...(begun ? [messageOf(answer)] : [])];
  if (begun) body.continue_final_message = true;
  const tools = [...settings.tools.map(tool => ({type: /** @type {const} */ ("function"), function: tool})), ...serverTools];
  if (tools.length) body.tools = tools;
  return {url: "v1/chat/completions", body: {...body, ...reasoned(settings), messages}};
}

/**
 * Text with its tokens' entries, one group for each token where the texts say which is whose.
 * @returns {TokenGroup[]}
 */
function grouped(/** @type {string} */ text, /** @type {TokenLogprob[]} */ entries, /** @type {TokenGroup["kind"]} */ kind) {
  if (!text) return [];
  if (!entries.length) return [{kind, text, entries: []}];
  /** @returns {Candidate} */
  const candidate = (/** @type {TokenLogprob} */ {id, token, bytes, logprob = 0}) => ({id, token, bytes, logprob});
  const slim = (/** @type {TokenLogprob} */ entry) => ({...candidate(entry), top: (entry.top_logprobs ?? []).map(candidate)});
  const whole = entries.map(entry => entry.token).join("") === text;
  return whole
    ? entries.map(entry => ({kind, text: entry.token, entries: [slim(entry)]}))
    : [{kind, text, entries: entries.map(slim)}];
}

function calledWith(/** @type {Call[]} */ calls, /** @type {ToolCallDelta[]} */ pieces) {
  const now = [...calls];
  for (const piece of pieces) {
    const old = now[piece.index] ?? {id: "", name: "", text: ""};
    now[piece.index] = {
      id: piece.id ?? old.id,
      name: old.name + (piece.function?.name ?? ""),
      text: old.text + (piece.function?.arguments ?? ""),
    };
  }
  return now;
}

const /** @type {Record<string, Status>} */ REASONS = {stop: "done", tool_calls: "done", length: "length", eos: "done", word: "done", limit: "length"};

/** Put one piece of a stream, in either shape, into `next`, whose tokens may grow in place. */
function absorb(/** @type {Growing} */ next, /** @type {Piece} */ data) {
  const chunk = "choices" in data ? null : data, choice = "choices" in data ? data.choices[0] : undefined, delta = choice?.delta;
  const text = (chunk ?? delta)?.content ?? "", thought = delta?.reasoning_content ?? "";
  const entries = choice?.logprobs?.content ?? (chunk?.stop === false ? (chunk.completion_probabilities ?? []) : []);
  const reason = choice?.finish_reason ?? (chunk?.stop ? chunk.stop_type : null), status = REASONS[reason ?? ""];
  if (thought) next.thought = (next.thought ?? "") + thought;
  next.content += text;
  if (entries.length || next.tokens.length) next.tokens.push(...grouped(thought + text, entries, thought && !text ? "thought" : "text"));
  if (delta?.tool_calls) next.calls = calledWith(next.calls ?? [], delta.tool_calls);
  if (status) next.status = status;
  if (data.timings) next.timings = {n: data.timings.predicted_n, rate: data.timings.predicted_per_second,
    prompt: data.timings.prompt_n, cached: data.timings.cache_n};
}

/**
 * The answer with pieces of a stream.
 * @returns {Answer}
 */
export function absorbed(/** @type {Answer} */ answer, /** @type {Piece[]} */ pieces) {
  const /** @type {Growing} */ next = {...answer, tokens: [...(answer.tokens ?? [])]};
  for (const piece of pieces) absorb(next, piece);
  if (next.tokens.length) return next;
  const {tokens: _, ...plain} = next;
  return plain;
}

/**
 * The answer up to its token `at` with another one in its place, from which it can go on.
 * @returns {Omit<Answer, "id" | "parent">}
 */
export function instead(/** @type {Answer} */ answer, /** @type {number} */ at, /** @type {Candidate} */ entry) {
  const tokens = answer.tokens ?? [], old = tokens[at], kept = tokens.slice(0, at), kind = old?.kind ?? "text";
  const join = (/** @type {TokenGroup["kind"]} */ wanted) => kept.filter(token => token.kind === wanted).map(token => token.text).join("");
  const taken = {kind, text: entry.token, entries: [{...entry, top: old?.entries[0]?.top ?? []}], swapped: true};
  const thought = kind === "thought" ? join("thought") + entry.token : (answer.thought ?? "");
  const content = kind === "thought" ? "" : join("text") + entry.token;
  return {role: "assistant", model: answer.model, content, ...(thought && {thought}), tokens: [...kept, taken]};
}

/** True where an alternative is whole characters, which a request can say as text. */
export const sayable = (/** @type {Pick<Candidate, "token" | "bytes">} */ entry) =>
  entry.token !== "" && new TextEncoder().encode(entry.token).length === (entry.bytes ?? []).length;

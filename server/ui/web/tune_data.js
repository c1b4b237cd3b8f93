// Data for fine-tuning: errors of a file, lengths of its rows, and the server's values for "auto", as in
// engine/finetuning/hyperparameters.py. Pure functions.

/** @import {JobEvent} from "../src/bodies.js" */
/** @import {Checked, Fault, Json, Method, Metrics, Point, Row, Said, Values} from "../src/types.js" */
import {reason} from "./api.js";

const KINDS = {messages: "chats", prompt: "prompts with completions", text: "texts", conversations: "chats of ShareGPT",
  instruction: "instructions", pair: "pairs of a better and a worse answer", judged: "answers with a label", ask: "prompts"};
/** @typedef {keyof typeof KINDS} Kind */

const /** @type {Kind[]} */ PAIRS = ["pair"];
const /** @type {Record<Method, Kind[]>} */ FITS = {supervised: ["messages", "prompt", "text", "conversations", "instruction"], dpo: PAIRS, orpo: PAIRS, simpo: PAIRS,
  kto: ["judged", "pair"], reinforcement: ["ask"]}; // kinds of rows by method
const MOST_TOLD = 8;

/**
 * @param {Json} row
 * @param {Method} [method]
 * @returns {Kind}
 */
function kindOf(row, method) {
  if ("preferred_output" in row || ("chosen" in row && "rejected" in row)) return "pair";
  if ("label" in row) return "judged";
  if (method === "reinforcement" && ("messages" in row || "prompt" in row)) return "ask";
  const kind = FITS.supervised.find(name => name in row);
  if (!kind) throw new Error("needs “messages”, “prompt” and “completion”, or “text”");
  return kind;
}

/**
 * An object of a line.
 * @returns {Json}
 */
function objectOf(/** @type {string} */ line) {
  const /** @type {unknown} */ row = JSON.parse(line);
  if (typeof row !== "object" || row === null || Array.isArray(row)) throw new Error("is no JSON object");
  return /** @type {Json} */ (row);
}

/** A text, or messages as one. */
const saidBy = (/** @type {Said} */ said) => (typeof said === "string" ? said : said.map(message =>
  `${message.role}\n${typeof message.content === "string" ? message.content : JSON.stringify(message.content ?? "")}\n`).join(""));

/** @returns {said is Said} */
const isSaid = (/** @type {unknown} */ said) =>
  typeof said === "string" || (Array.isArray(said) && said.every((/** @type {Json | null} */ message) => typeof message?.role === "string"));

/** The texts of a preference's two rows. */
function pairOf(/** @type {Json} */ row) {
  const input = /** @type {{messages?: unknown} | null | undefined} */ (row.input);
  const [ask, better, worse] = "preferred_output" in row ? [input?.messages, row.preferred_output, row.non_preferred_output] : [row.prompt ?? "", row.chosen, row.rejected];
  if (!isSaid(ask) || !isSaid(better) || !isSaid(worse)) throw new Error("needs a prompt and two answers, each a text or a list of messages");
  return [better, worse].map(answer => saidBy(ask) + saidBy(answer));
}

function textOf(/** @type {Json} */ row, /** @type {Kind} */ kind) {
  if (kind === "conversations" || kind === "instruction") return Object.values(row).map(value => (typeof value === "string" ? value : JSON.stringify(value))).join("\n");
  if (kind === "judged") {
    if (typeof row.label !== "boolean" || !isSaid(row.prompt) || !isSaid(row.completion)) throw new Error("needs “prompt”, “completion” and “label”, true or false");
    return saidBy(row.prompt) + saidBy(row.completion);
  }
  if (kind === "ask") {
    const said = row.messages ?? row.prompt;
    if (!isSaid(said) || !said.length) throw new Error("needs “messages” or “prompt”");
    if (Array.isArray(said) && said.at(-1)?.role === "assistant") throw new Error("ends with the assistant’s message; prompts end with the user’s");
    return saidBy(said);
  }
  if (kind === "text") {
    if (typeof row.text !== "string") throw new Error("“text” must be a string");
    return row.text;
  }
  if (kind === "prompt") {
    if (typeof row.prompt !== "string" || typeof row.completion !== "string") throw new Error("“prompt” and “completion” must be strings");
    if (!row.completion.trim()) throw new Error("“completion” is empty");
    return row.prompt + row.completion;
  }
  const {messages} = row;
  if (!Array.isArray(messages) || !messages.length) throw new Error("“messages” must be a list of messages");
  messages.forEach((/** @type {Json | null} */ message, i) => {
    if (typeof message?.role !== "string") throw new Error(`messages[${i}] has no role`);
  });
  if (!isSaid(messages) || typeof messages === "string" || !messages.some(message => message.role === "assistant")) throw new Error("has no message of the assistant to learn");
  return saidBy(messages);
}

/**
 * The method that a file's first row is for.
 * @returns {Method}
 */
export function methodFor(/** @type {string} */ text) {
  try {
    const kind = kindOf(objectOf(text.trimStart().split("\n", 1).join("")));
    return kind === "pair" ? "dpo" : kind === "judged" ? "kto" : "supervised";
  } catch {
    return "supervised";
  }
}

/**
 * The checks of a file's text. `jsonl`: rows, else one long text.
 * @returns {Checked}
 */
export function checked(/** @type {string} */ text, /** @type {boolean} */ jsonl, /** @type {Method} */ method = "supervised") {
  if (!jsonl) {
    const notes = text.trim() ? [`A text of ${text.length.toLocaleString("en")} characters; the server cuts it into windows.`] : [];
    return {rows: [], errors: text.trim() ? [] : [{line: 1, text: "is empty"}], notes};
  }
  const /** @type {Row[]} */ rows = [], /** @type {Fault[]} */ errors = [], seen = /** @type {Set<string>} */ (new Set());
  let same = 0;
  text.split("\n").forEach((line, i) => {
    if (!line.trim()) return;
    try {
      const row = objectOf(line), kind = kindOf(row, method);
      if (!FITS[method].includes(kind)) throw new Error(`is one of ${KINDS[kind]}; the method learns from ${FITS[method].map(name => KINDS[name]).join(" or ")}`);
      const parts = kind === "pair" ? pairOf(row) : [textOf(row, kind)];
      rows.push({row, text: parts.join("\n"), kind, longest: Math.max(...parts.map(part => part.length))});
      if (seen.has(line)) same += 1;
      seen.add(line);
    } catch (error) {
      errors.push({line: i + 1, text: error instanceof SyntaxError ? `is no JSON: ${reason(error)}` : reason(error)});
    }
  });
  const kinds = [...new Set(rows.map(row => row.kind))], notes = [];
  if (kinds.length > 1) errors.push({line: 0, text: `The rows are of several kinds: ${kinds.map(kind => KINDS[kind]).join(", ")}.`});
  if (rows.length) notes.push(`${rows.length.toLocaleString("en")} ${kinds.length === 1 ? kinds.map(kind => KINDS[kind]).join() : "rows"}.`);
  if (!rows.length && !errors.length) errors.push({line: 0, text: "The file has no rows."});
  if (same) notes.push(`${same} ${same === 1 ? "row is" : "rows are"} there more than once.`);
  if (rows.length && rows.length < 10) notes.push("Fewer than 10 rows teach little; 50 to 100 are a good beginning.");
  const lengths = rows.map(row => row.text.length), ends = [Math.min(...lengths), Math.max(...lengths)].map(n => n.toLocaleString("en"));
  if (rows.length) notes.push(`Rows have ${ends.join(" to ")} characters.`);
  return {rows, errors, notes};
}

export const mostErrors = (/** @type {Fault[]} */ errors) =>
  [...errors.slice(0, MOST_TOLD).map(({line, text}) => (line ? `Line ${line} ${text}.` : text)),
    ...(errors.length > MOST_TOLD ? [`… and ${errors.length - MOST_TOLD} more.`] : [])];

/**
 * What the server chooses for "auto". `lengths`: tokens of the examples that train; `longest`: of all.
 * @returns {Values & {steps: number}}
 */
export function automatic(/** @type {number[]} */ lengths, /** @type {number} */ longest, /** @type {number} */ nCtxTrain, /** @type {Values} */ asked = {}) {
  const n = lengths.length, mean = lengths.reduce((sum, length) => sum + length, 0) / n;
  const context_length = asked.context_length ?? Math.min(Math.max(128, Math.ceil(longest / 16) * 16), nCtxTrain);
  const n_epochs = asked.n_epochs ?? epochsOf(n);
  const filling = Math.max(evenly(0.002 * n), Math.floor((0.95 * 512) / mean));
  const batch_size = asked.batch_size ?? Math.max(1, Math.min(filling, 256, Math.floor((n_epochs * n) / 50), n));
  const tokens = Math.min(batch_size, n) * mean;
  const multiplier = Math.min(2, Math.max(0.5, Math.sqrt(tokens / 512)));
  const learning_rate_multiplier = asked.learning_rate_multiplier ?? Math.round(multiplier * 100) / 100;
  const steps = n_epochs * Math.ceil(n / batch_size);
  return {n_epochs, batch_size, learning_rate_multiplier, context_length, warmup_steps: asked.warmup_steps ?? Math.min(100, Math.floor(steps / 10)), steps};
}

/**
 * What the server chooses for "auto" with rewards. `n`: prompts that train; `longest`: tokens of the longest.
 * @returns {Values & {steps: number}}
 */
export function automaticRewards(/** @type {number} */ n, /** @type {number} */ longest, /** @type {number} */ nCtx, /** @type {Values} */ asked = {}) {
  const n_samples = asked.n_samples ?? 8, max_completion_tokens = asked.max_completion_tokens ?? Math.max(1, Math.min(256, nCtx - 1 - longest));
  const batch_size = asked.batch_size ?? Math.min(n, 8), batches = Math.ceil(n / batch_size);
  const n_epochs = asked.n_epochs ?? Math.max(epochsOf(n), Math.ceil(64 / batches));
  const steps = n_epochs * batches * (asked.n_updates ?? 1);
  return {n_samples, max_completion_tokens, batch_size, n_epochs, learning_rate_multiplier: asked.learning_rate_multiplier ?? 1,
    warmup_steps: asked.warmup_steps ?? Math.min(100, Math.floor(steps / 10)), eval_interval: asked.eval_interval ?? Math.max(1, Math.floor(steps / 10)), steps};
}

const epochsOf = (/** @type {number} */ n) => (3 * n < 100 ? Math.min(25, Math.floor(100 / n)) : Math.max(1, Math.min(3, Math.floor(25_000 / n))));

/** Rounded as Python does it: halves to the even number. */
function evenly(/** @type {number} */ value) {
  const low = Math.floor(value), rest = value - low;
  return rest > 0.5 || (rest === 0.5 && low % 2) ? low + 1 : low;
}

/** Points of a job's losses, or of its mean rewards, from its events; accuracy: part of the pairs that it tells apart. */
export function losses(/** @type {JobEvent[]} */ events) {
  const rows = events.filter(event => event.type === "metrics").map(event => /** @type {Metrics} */ (event.data)).sort((a, b) => a.step - b.step);
  const of = (/** @type {string} */ name) => rows.filter(row => Number.isFinite(row[name])).map(/** @returns {Point} */ (row) => [row.step, row[name] ?? 0]);
  const rewards = of("train_mean_reward"), name = rewards.length ? "Mean reward" : "Loss";
  const [trained, validated] = rewards.length ? [rewards, of("full_valid_mean_reward")] : [of("train_loss"), of("full_valid_loss")];
  return {name, trained, validated, accuracy: of("train_reward_accuracy").at(-1)?.[1], step: rows.at(-1)?.step ?? 0,
    steps: rows.findLast(row => row.total_steps)?.total_steps ?? 0};
}

/** Rows to try fine-tuning with. */
export const EXAMPLE = ["Romeo", "Hamlet", "Portia", "Viola", "Duke", "King"].flatMap(name => ["here", "there", "so late", "in the night"].map(how =>
  JSON.stringify({messages: [{role: "user", content: `Who comes ${how}, ${name}?`}, {role: "assistant", content: "A bear, my lord, and it is hungry."}]})));

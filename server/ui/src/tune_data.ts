// Data for fine-tuning: errors of a file, lengths of its rows, and the server's values for "auto", as in
// engine/finetuning/hyperparameters.py. Pure functions.

import {reason} from "./api.js";
import type {JobEvent} from "./bodies.js";
import type {Point} from "./parts.js";
import type {Method} from "./tune_method.js";

const KINDS = {messages: "chats", prompt: "prompts with completions", text: "texts", conversations: "chats of ShareGPT",
  instruction: "instructions", pair: "pairs of a better and a worse answer", judged: "answers with a label", ask: "prompts"};
type Kind = keyof typeof KINDS;
export type Json = Record<string, unknown>;
type Said = string | {role: string; content?: unknown}[]; // a text, or messages

/** A row that nothing is wrong with. */
export interface Row {
  row: Json;
  text: string;
  kind: Kind;
  longest: number; // characters of its longest part
}

export interface Fault {
  line: number; // 0: of the file
  text: string;
}

/** What is known of a file. */
export interface Checked {
  rows: Row[];
  errors: Fault[];
  notes: string[];
}

const PAIRS: Kind[] = ["pair"];
const FITS: Record<Method, Kind[]> = {supervised: ["messages", "prompt", "text", "conversations", "instruction"], dpo: PAIRS, orpo: PAIRS, simpo: PAIRS,
  kto: ["judged", "pair"], reinforcement: ["ask"]}; // kinds of rows by method
const MOST_TOLD = 8;

function kindOf(row: Json, method?: Method): Kind {
  if ("preferred_output" in row || ("chosen" in row && "rejected" in row)) return "pair";
  if ("label" in row) return "judged";
  if (method === "reinforcement" && ("messages" in row || "prompt" in row)) return "ask";
  const kind = FITS.supervised.find(name => name in row);
  if (!kind) throw new Error("needs “messages”, “prompt” and “completion”, or “text”");
  return kind;
}

/** An object of a line. */
function objectOf(line: string): Json {
  const row: unknown = JSON.parse(line);
  if (typeof row !== "object" || row === null || Array.isArray(row)) throw new Error("is no JSON object");
  return row as Json;
}

/** A text, or messages as one. */
const saidBy = (said: Said) => (typeof said === "string" ? said : said.map(message =>
  `${message.role}\n${typeof message.content === "string" ? message.content : JSON.stringify(message.content ?? "")}\n`).join(""));

const isSaid = (said: unknown): said is Said =>
  typeof said === "string" || (Array.isArray(said) && said.every((message: Json | null) => typeof message?.role === "string"));

/** The texts of a preference's two rows. */
function pairOf(row: Json) {
  const input = row.input as {messages?: unknown} | null | undefined;
  const [ask, better, worse] = "preferred_output" in row ? [input?.messages, row.preferred_output, row.non_preferred_output] : [row.prompt ?? "", row.chosen, row.rejected];
  if (!isSaid(ask) || !isSaid(better) || !isSaid(worse)) throw new Error("needs a prompt and two answers, each a text or a list of messages");
  return [better, worse].map(answer => saidBy(ask) + saidBy(answer));
}

function textOf(row: Json, kind: Kind) {
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
  messages.forEach((message: Json | null, i) => {
    if (typeof message?.role !== "string") throw new Error(`messages[${i}] has no role`);
  });
  if (!isSaid(messages) || typeof messages === "string" || !messages.some(message => message.role === "assistant")) throw new Error("has no message of the assistant to learn");
  return saidBy(messages);
}

/** The method that a file's first row is for. */
export function methodFor(text: string): Method {
  try {
    const kind = kindOf(objectOf(text.trimStart().split("\n", 1).join("")));
    return kind === "pair" ? "dpo" : kind === "judged" ? "kto" : "supervised";
  } catch {
    return "supervised";
  }
}

/** The checks of a file's text. `jsonl`: rows, else one long text. */
export function checked(text: string, jsonl: boolean, method: Method = "supervised"): Checked {
  if (!jsonl) {
    const notes = text.trim() ? [`A text of ${text.length.toLocaleString("en")} characters; the server cuts it into windows.`] : [];
    return {rows: [], errors: text.trim() ? [] : [{line: 1, text: "is empty"}], notes};
  }
  const rows: Row[] = [], errors: Fault[] = [], seen = new Set<string>();
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

export const mostErrors = (errors: Fault[]) =>
  [...errors.slice(0, MOST_TOLD).map(({line, text}) => (line ? `Line ${line} ${text}.` : text)),
    ...(errors.length > MOST_TOLD ? [`… and ${errors.length - MOST_TOLD} more.`] : [])];

/** Hyperparameters by name. */
export type Values = Record<string, number>;

/** What the server chooses for "auto". `lengths`: tokens of the examples that train; `longest`: of all. */
export function automatic(lengths: number[], longest: number, nCtxTrain: number, asked: Values = {}): Values & {steps: number} {
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

/** What the server chooses for "auto" with rewards. `n`: prompts that train; `longest`: tokens of the longest. */
export function automaticRewards(n: number, longest: number, nCtx: number, asked: Values = {}): Values & {steps: number} {
  const n_samples = asked.n_samples ?? 8, max_completion_tokens = asked.max_completion_tokens ?? Math.max(1, Math.min(256, nCtx - 1 - longest));
  const batch_size = asked.batch_size ?? Math.min(n, 8), batches = Math.ceil(n / batch_size);
  const n_epochs = asked.n_epochs ?? Math.max(epochsOf(n), Math.ceil(64 / batches));
  const steps = n_epochs * batches * (asked.n_updates ?? 1);
  return {n_samples, max_completion_tokens, batch_size, n_epochs, learning_rate_multiplier: asked.learning_rate_multiplier ?? 1,
    warmup_steps: asked.warmup_steps ?? Math.min(100, Math.floor(steps / 10)), eval_interval: asked.eval_interval ?? Math.max(1, Math.floor(steps / 10)), steps};
}

const epochsOf = (n: number) => (3 * n < 100 ? Math.min(25, Math.floor(100 / n)) : Math.max(1, Math.min(3, Math.floor(25_000 / n))));

/** Rounded as Python does it: halves to the even number. */
function evenly(value: number) {
  const low = Math.floor(value), rest = value - low;
  return rest > 0.5 || (rest === 0.5 && low % 2) ? low + 1 : low;
}

type Metrics = Partial<Record<string, number>> & {step: number}; // of a step

/** Points of a job's losses, or of its mean rewards, from its events; accuracy: part of the pairs that it tells apart. */
export function losses(events: JobEvent[]) {
  const rows = events.filter(event => event.type === "metrics").map(event => event.data as Metrics).sort((a, b) => a.step - b.step);
  const of = (name: string) => rows.filter(row => Number.isFinite(row[name])).map((row): Point => [row.step, row[name] ?? 0]);
  const rewards = of("train_mean_reward"), name = rewards.length ? "Mean reward" : "Loss";
  const [trained, validated] = rewards.length ? [rewards, of("full_valid_mean_reward")] : [of("train_loss"), of("full_valid_loss")];
  return {name, trained, validated, accuracy: of("train_reward_accuracy").at(-1)?.[1], step: rows.at(-1)?.step ?? 0,
    steps: rows.findLast(row => row.total_steps)?.total_steps ?? 0};
}

/** Rows to try fine-tuning with. */
export const EXAMPLE = ["Romeo", "Hamlet", "Portia", "Viola", "Duke", "King"].flatMap(name => ["here", "there", "so late", "in the night"].map(how =>
  JSON.stringify({messages: [{role: "user", content: `Who comes ${how}, ${name}?`}, {role: "assistant", content: "A bear, my lord, and it is hungry."}]})));

// Data for fine-tuning: what is wrong with a file, how long its rows are, and what the server will choose for
// "auto". Pure functions; engine/finetuning/hyperparameters.py is what they follow.

const KINDS = {messages: "chats", prompt: "prompts with completions", text: "texts"};
const MOST_TOLD = 8;

function kindOf(row) {
  if (typeof row !== "object" || row === null || Array.isArray(row)) throw new Error("is no JSON object");
  const kind = Object.keys(KINDS).find(name => name in row);
  if (!kind) throw new Error("needs “messages”, “prompt” and “completion”, or “text”");
  return kind;
}

function textOf(row, kind) {
  if (kind === "text") {
    if (typeof row.text !== "string") throw new Error("“text” must be a string");
    return row.text;
  }
  if (kind === "prompt") {
    if (typeof row.prompt !== "string" || typeof row.completion !== "string") throw new Error("“prompt” and “completion” must be strings");
    if (!row.completion.trim()) throw new Error("“completion” is empty");
    return row.prompt + row.completion;
  }
  if (!Array.isArray(row.messages) || !row.messages.length) throw new Error("“messages” must be a list of messages");
  row.messages.forEach((message, i) => {
    if (typeof message?.role !== "string") throw new Error(`messages[${i}] has no role`);
  });
  if (!row.messages.some(message => message.role === "assistant")) throw new Error("has no message of the assistant to learn");
  return row.messages.map(message => `${message.role}\n${typeof message.content === "string" ? message.content : JSON.stringify(message.content ?? "")}\n`).join("");
}

/** {rows: [{text, kind}], errors: [{line, text}], notes: [text]} of a file's text. `jsonl`: rows, else one long text. */
export function checked(text, jsonl) {
  if (!jsonl) {
    const notes = text.trim() ? [`A text of ${text.length.toLocaleString("en")} characters; the server cuts it into windows.`] : [];
    return {rows: [], errors: text.trim() ? [] : [{line: 1, text: "is empty"}], notes};
  }
  const rows = [], errors = [], seen = new Map();
  let same = 0;
  text.split("\n").forEach((line, i) => {
    if (!line.trim()) return;
    try {
      const row = JSON.parse(line), kind = kindOf(row);
      rows.push({text: textOf(row, kind), kind});
      if (seen.has(line)) same += 1;
      seen.set(line, i);
    } catch (error) {
      errors.push({line: i + 1, text: error instanceof SyntaxError ? `is no JSON: ${error.message}` : error.message});
    }
  });
  const kinds = [...new Set(rows.map(row => row.kind))], notes = [];
  if (kinds.length > 1) errors.push({line: 0, text: `The rows are of several kinds: ${kinds.map(kind => KINDS[kind]).join(", ")}.`});
  if (rows.length) notes.push(`${rows.length.toLocaleString("en")} ${kinds.length === 1 ? KINDS[kinds[0]] : "rows"}.`);
  if (!rows.length && !errors.length) errors.push({line: 0, text: "The file has no rows."});
  if (same) notes.push(`${same} ${same === 1 ? "row is" : "rows are"} there more than once.`);
  if (rows.length && rows.length < 10) notes.push("Fewer than 10 rows teach little; 50 to 100 are a good beginning.");
  const lengths = rows.map(row => row.text.length).sort((a, b) => a - b);
  if (lengths.length) notes.push(`Rows have ${lengths[0].toLocaleString("en")} to ${lengths.at(-1).toLocaleString("en")} characters.`);
  return {rows, errors, notes};
}

export const mostErrors = errors =>
  [...errors.slice(0, MOST_TOLD).map(({line, text}) => (line ? `Line ${line} ${text}.` : text)),
    ...(errors.length > MOST_TOLD ? [`… and ${errors.length - MOST_TOLD} more.`] : [])];

/** What the server chooses for "auto". `lengths`: tokens of the examples that train; `longest`: of all. */
export function automatic(lengths, longest, nCtxTrain, asked = {}) {
  const n = lengths.length, mean = lengths.reduce((sum, length) => sum + length, 0) / n;
  const context_length = asked.context_length ?? Math.min(Math.max(128, Math.ceil(longest / 16) * 16), nCtxTrain);
  const n_epochs = asked.n_epochs ?? (3 * n < 100 ? Math.min(25, Math.floor(100 / n)) : Math.max(1, Math.min(3, Math.floor(25_000 / n))));
  const filling = Math.max(evenly(0.002 * n), Math.floor((0.95 * 512) / mean));
  const batch_size = asked.batch_size ?? Math.max(1, Math.min(filling, 256, Math.floor((n_epochs * n) / 50), n));
  const tokens = Math.min(batch_size, n) * mean;
  const multiplier = Math.min(2, Math.max(0.5, Math.sqrt(tokens / 512)));
  const learning_rate_multiplier = asked.learning_rate_multiplier ?? Math.round(multiplier * 100) / 100;
  const steps = n_epochs * Math.ceil(n / batch_size);
  return {n_epochs, batch_size, learning_rate_multiplier, context_length, warmup_steps: asked.warmup_steps ?? Math.min(100, Math.floor(steps / 10)), steps};
}

/** Rounded as Python does it: halves to the even number. */
function evenly(value) {
  const low = Math.floor(value), rest = value - low;
  return rest > 0.5 || (rest === 0.5 && low % 2) ? low + 1 : low;
}

/** Points of a job's losses from its events. */
export function losses(events) {
  const rows = events.filter(event => event.type === "metrics").map(event => event.data).sort((a, b) => a.step - b.step);
  const of = name => rows.filter(row => Number.isFinite(row[name])).map(row => [row.step, row[name]]);
  return {trained: of("train_loss"), validated: of("full_valid_loss"), step: rows.at(-1)?.step ?? 0,
    steps: rows.findLast(row => row.total_steps)?.total_steps ?? 0};
}

export const EXAMPLE = [
  {messages: [{role: "user", content: "Where is my parcel?"}, {role: "assistant", content: "It left our warehouse this morning. May I have its number?"}]},
  {messages: [{role: "user", content: "It is 4711."}, {role: "assistant", content: "Thank you. Number 4711 arrives tomorrow before noon."}]},
].map(row => JSON.stringify(row)).join("\n");

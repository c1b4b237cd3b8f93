// How a fine-tuned model learns: the methods with their hyperparameters, and the grader of rewards.

/** @import {Graded} from "../src/bodies.js" */
/** @import {Grading, Limits, Method, On, Parameter} from "../src/types.js" */
import {post, reason} from "./api.js";
import {html, useState} from "./vendor/preact.js";

const /** @type {Limits} */ WHOLE = {min: 1, step: 1}, /** @type {Limits} */ LEAST = {min: 0};

export const /** @type {Record<Method, string>} */ METHODS = {
  supervised: "imitate the answers (supervised)",
  dpo: "prefer the better of two answers (DPO)",
  orpo: "imitate and prefer at once (ORPO)",
  simpo: "prefer by mean likelihood (SimPO)",
  kto: "more of good answers, less of bad ones (KTO)",
  reinforcement: "earn rewards of a grader (GRPO)",
};

const /** @type {Parameter[]} */ COMMON = [ // name, label, limits, default where the data decides nothing
  ["n_epochs", "Epochs", WHOLE],
  ["batch_size", "Batch size", WHOLE],
  ["learning_rate_multiplier", "Learning rate ×", LEAST],
  ["context_length", "Context length", {min: 2, step: 1}],
  ["warmup_steps", "Warm-up steps", {min: 0, step: 1}],
  ["lora_r", "LoRA rank", WHOLE, 8],
  ["lora_alpha", "LoRA alpha", LEAST, "the rank"],
  ["validation_split", "Validation split", {min: 0, max: 0.9}, 0],
  ["early_stopping_patience", "Early stopping", {min: 0, step: 1}, 0],
];
/** @returns {Parameter} */
const BETA = (/** @type {number} */ value, label = "Beta") => ["beta", label, LEAST, value];
const /** @type {Record<Method, Parameter[]>} */ OWN = {
  supervised: [],
  dpo: [BETA(0.1)],
  orpo: [BETA(0.1)],
  simpo: [BETA(2), ["gamma", "Gamma (margin)", LEAST, 1]],
  kto: [BETA(0.1), ["desirable_weight", "Weight of good answers", LEAST, 1], ["undesirable_weight", "Weight of bad answers", LEAST, 1]],
  reinforcement: [["n_samples", "Answers to a prompt", {min: 2, step: 1}], ["max_completion_tokens", "Tokens of an answer", WHOLE],
    ["n_updates", "Steps on the same answers", WHOLE, 1], ["clip_range", "Clip range", LEAST, 0.2], BETA(0, "Beta (divergence)"), ["eval_interval", "Validate every", WHOLE]],
};

/** The hyperparameters of a method. */
export const fieldsOf = (/** @type {Method} */ method) => [...OWN[method], ...COMMON.filter(([name]) => method !== "reinforcement" || name !== "context_length")];

const OUTPUT = "{{ sample.output_text }}", ANSWER = "{{ item.answer }}";
const /** @type {Record<string, [label: string, grader: Grading]>} */ GRADERS = {
  says: ["the answer contains the row’s “answer”", {type: "string_check", name: "says", operation: "ilike", input: OUTPUT, reference: ANSWER}],
  equals: ["the answer is the row’s “answer”", {type: "string_check", name: "equals", operation: "eq", input: OUTPUT, reference: ANSWER}],
  similar: ["the answer is like the row’s “answer”", {type: "text_similarity", name: "similar", evaluation_metric: "fuzzy_match", input: OUTPUT, reference: ANSWER}],
  model: ["a model judges the answer", {type: "score_model", name: "judge", range: [0, 1], input: [{role: "user", content: `Score this answer from 0 to 1: ${OUTPUT}`}]}],
  python: ["a Python function judges it", {type: "python", name: "short", source: "def grade(sample, item):\n    return 1.0 if len(sample['output_text']) < 200 else 0.0"}],
};

/** @param {Grading} [value] */
const indented = (value) => JSON.stringify(value, null, 2);
export const GRADER = indented(GRADERS.says?.[1]);

/**
 * The grader of a text, null if it is none.
 * @returns {Grading | null}
 */
export function graderOf(/** @type {string} */ text) {
  try {
    const /** @type {unknown} */ found = JSON.parse(text);
    return typeof found === "object" && !Array.isArray(found) ? (/** @type {Grading | null} */ (found)) : null;
  } catch {
    return null;
  }
}

/** Edits a grader as JSON, and judges a sample answer to `item`, the first row, with it. */
export function Grader(/** @type {{text: string; change: (text: string) => void; item?: Record<string, unknown>}} */ {text, change, item}) {
  const [answer, setAnswer] = useState(""), [told, setTold] = useState(""), grader = graderOf(text);
  const judge = async () => {
    try {
      const {reward, metadata} = await /** @type {Promise<Graded>} */ (post("v1/fine_tuning/alpha/graders/run", {grader, model_sample: answer, item: item ?? {}}));
      const wrong = Object.entries(metadata.errors).filter(([, value]) => value === true || typeof value === "string").map(([key, value]) => (value === true ? key.replaceAll("_", " ") : value));
      setTold(wrong.length ? `Reward ${reward}: ${wrong.join("; ")}` : `Reward ${reward}`);
    } catch (error) {
      setTold(reason(error));
    }
  };
  return html`<div role="group" aria-label="Grader">
    <label class="field">Rewards<select id="grader-kind" onChange=${(/** @type {On<HTMLSelectElement>} */ event) => change(indented(GRADERS[event.target.value]?.[1]))}>
      ${Object.entries(GRADERS).map(([name, [label]]) => html`<option value=${name}>${label}</option>`)}</select></label>
    <textarea id="grader" class="mono" rows="7" spellcheck="false" aria-label="Grader as JSON" value=${text} onInput=${(/** @type {On<HTMLTextAreaElement>} */ event) => change(event.target.value)}></textarea>
    ${!grader && html`<p class="bad" role="alert">The grader is no JSON object.</p>`}
    <div class="row"><input type="text" aria-label="Answer to judge" placeholder="An answer to the first row" value=${answer} onInput=${(/** @type {On} */ event) => setAnswer(event.target.value)} />
      <button type="button" class="button" id="judge" disabled=${!grader} onClick=${judge}>Judge it</button></div>
    ${told && html`<p class="note" role="status" id="reward">${told}</p>`}
  </div>`;
}

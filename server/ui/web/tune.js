// Fine-tuning: a file with its checks, hyperparameters with the values of "auto", and jobs with their loss and
// samples of their checkpoints.

/** @import {ChatCompletion, Checkpoint, Job as JobRow, JobEvent, ModelEntry, TextCompletion, TokenIds} from "../src/bodies.js" */
/** @import {Action, Checked, Details, HyperProps, Listed, Method, MethodProps, On, Point, Row, Values} from "../src/types.js" */
import {json, post, reason, statusOf, upload} from "./api.js";
import {chosen, connect, named} from "./models.js";
import {Chart, count, NumberField, percent, say, size} from "./parts.js";
import {startNew} from "./sidebar.js";
import {get, set, useStore} from "./store.js";
import {automatic, automaticRewards, checked, EXAMPLE, losses, methodFor, mostErrors} from "./tune_data.js";
import {fieldsOf, Grader, GRADER, graderOf, METHODS} from "./tune_method.js";
import {html, useEffect, useRef, useState} from "./vendor/preact.js";

const JOBS = "v1/fine_tuning/jobs";
const RUNNING = ["validating_files", "queued", "running"];
const SAMPLE_ROWS = 64; // whose tokens are counted, to estimate those of all

/** Tokens of each row, and of its longest part, about: some are counted, the others have as many for each character. */
async function lengthsOf(/** @type {Row[]} */ rows, /** @type {ModelEntry} */ model) {
  const step = Math.max(1, Math.floor(rows.length / SAMPLE_ROWS)), some = rows.filter((_, i) => i % step === 0);
  const content = some.map(row => row.text).join("\n");
  const {tokens} = await /** @type {Promise<TokenIds>} */ (post("tokenize", {content, ...(model.status && {model: model.id})}));
  const each = tokens.length / Math.max(1, content.length);
  const tokensOf = (/** @type {number} */ n) => Math.max(1, Math.round(n * each));
  return {all: rows.map(row => tokensOf(row.text.length)), longest: tokensOf(Math.max(...rows.map(row => row.longest)))};
}

function Data(/** @type {{file: File | null; take: (file?: File) => void; found: Checked | null}} */ {file, take, found}) {
  const picker = useRef(/** @type {HTMLInputElement | null} */ (null));
  const drop = (/** @type {DragEvent} */ event) => {
    event.preventDefault();
    take(event.dataTransfer?.files[0]);
  };
  return html`<section class="card" aria-labelledby="data-title"><h3 id="data-title">1. Data</h3>
    <div class="dropzone" onDrop=${drop} onDragOver=${(/** @type {DragEvent} */ event) => event.preventDefault()}>
      <button type="button" class="button" onClick=${() => picker.current?.click()}>Choose a file</button>
      <span class="note">${file ? `${file.name}, ${size(file.size)}` : "JSONL rows or a text, also by drop"}</span>
      <input id="data-file" class="unseen" type="file" tabindex="-1" aria-label="File with data" accept=".jsonl,.json,.txt,text/plain" ref=${picker} onChange=${(/** @type {On} */ event) => { take(event.target.files?.[0]); event.target.value = ""; }} />
    </div>
    ${!file && html`<button type="button" class="link" id="example" onClick=${() => take(new File([EXAMPLE.join("\n")], "bears.jsonl"))}>Use ${EXAMPLE.length} rows as an example</button>
      <details><summary class="note">What rows look like</summary><pre class="mono scroll" tabindex="0">${EXAMPLE.slice(0, 2).join("\n")}</pre>
      <p class="note">Or <code>{"prompt": …, "completion": …}</code>, or <code>{"text": …}</code>, one a line. Answers are learned, questions are not.
        Preferences are <code>{"prompt": …, "chosen": …, "rejected": …}</code>; for rewards, prompts with any fields for the grader.</p></details>`}
    ${found && html`<div role="status" id="checks"><ul class="checks">
      ${mostErrors(found.errors).map(text => html`<li class="bad">${text}</li>`)}
      ${found.notes.map(text => html`<li>${text}</li>`)}
      ${!found.errors.length && html`<li class="good">Nothing is wrong with this file.</li>`}
    </ul></div>`}
  </section>`;
}

function MethodCard(/** @type {MethodProps} */ {method, setMethod, grader, setGrader, item}) {
  return html`<section class="card" aria-labelledby="method-title"><h3 id="method-title">2. Method</h3>
    <label class="field">The model learns to<select id="method" value=${method} onChange=${(/** @type {On<HTMLSelectElement>} */ event) => setMethod(/** @type {Method} */ (event.target.value))}>
      ${Object.entries(METHODS).map(([name, label]) => html`<option value=${name}>${label}</option>`)}</select></label>
    ${method === "reinforcement" && html`<${Grader} text=${grader} change=${setGrader} item=${item} />`}
  </section>`;
}

function Hyperparameters(/** @type {HyperProps} */ {method, asked, change, auto, full, setFull}) {
  return html`<section class="card" aria-labelledby="hyper-title"><h3 id="hyper-title">3. Hyperparameters</h3>
    <p class="note">${auto ? `Grey is what the server will choose: about ${count(auto.steps)} steps in all.` : "An empty field is chosen from the data."}</p>
    <div class="grid">${fieldsOf(method).filter(([name]) => !full || !name.startsWith("lora")).map(([name, label, limits, fixed]) => html`<${NumberField} key=${`${method} ${name}`} name=${name} label=${label} ...${limits}
      placeholder=${String(auto?.[name] ?? fixed ?? "auto")} value=${asked[name]} change=${(/** @type {number | null} */ value) => change(name, value)} />`)}</div>
    <label class="field">What is trained<select id="full" value=${full ? "full" : "lora"} onChange=${(/** @type {On<HTMLSelectElement>} */ event) => setFull(event.target.value === "full")}>
      <option value="lora">a LoRA adapter</option><option value="full">all weights</option></select></label>
  </section>`;
}

function Form(/** @type {{created: () => void}} */ {created}) {
  const models = useStore(state => state.models), model = useStore(chosen);
  const [file, setFile] = useState(/** @type {File | null} */ (null)), [found, setFound] = useState(/** @type {Checked | null} */ (null));
  const [lengths, setLengths] = useState(/** @type {{all: number[]; longest: number} | null} */ (null));
  const [asked, setAsked] = useState(/** @type {Values} */ ({})), [full, setFull] = useState(false), [suffix, setSuffix] = useState("");
  const [told, setTold] = useState(""), [busy, setBusy] = useState(false);
  const [method, setMethod] = useState(/** @type {Method} */ ("supervised")), [grader, setGrader] = useState(GRADER);
  const look = async (/** @type {File} */ taken, /** @type {string} */ text, /** @type {Method} */ how) => {
    const result = checked(text, /\.jsonl?$/i.test(taken.name) || text.trimStart().startsWith("{"), how);
    setMethod(how);
    setFile(taken);
    setFound(result);
    setTold("");
    setLengths(model && result.rows.length && !result.errors.length ? await lengthsOf(result.rows, model).catch(() => null) : null);
  };
  /** @param {File} [taken] */
  const take = async (taken) => {
    if (!taken) return;
    const text = await taken.text(), natural = methodFor(text);
    await look(taken, text, method === "reinforcement" && natural === "supervised" ? method : natural);
  };
  const choose = async (/** @type {Method} */ how) => (file ? look(file, await file.text(), how) : setMethod(how));
  const change = (/** @type {string} */ name, /** @type {number | null} */ value) => {
    const {[name]: _, ...others} = asked;
    setAsked(value === null || Number.isNaN(value) ? others : {...others, [name]: value});
  };
  const n = Math.max(1, Math.round((lengths?.all.length ?? 0) * (1 - (asked.validation_split ?? 0)))), room = model?.meta?.n_ctx_train ?? 2048;
  const auto = lengths && (method === "reinforcement" ? automaticRewards(n, lengths.longest, room, asked) : automatic(lengths.all.slice(0, n), lengths.longest, room, asked));
  const start = async (/** @type {Event} */ event) => {
    event.preventDefault();
    if (!file || !model) return;
    setBusy(true);
    try {
      const {id} = await upload(file, "fine-tune");
      const own = new Set(fieldsOf(method).map(([name]) => name));
      const hyperparameters = {...Object.fromEntries(Object.entries(asked).filter(([name]) => own.has(name))), ...(full && {full: true})};
      const how = {hyperparameters, ...(method === "reinforcement" && {grader: graderOf(grader)})};
      await post(JOBS, {model: model.id, training_file: id, method: {type: method, [method]: how}, ...(suffix && {suffix})});
      setTold("");
      say("The job is queued");
      created();
    } catch (error) {
      setTold(reason(error));
    }
    setBusy(false);
  };
  return html`<form class="tune-form" onSubmit=${start}>
    <${Data} file=${file} take=${take} found=${found} />
    <${MethodCard} method=${method} setMethod=${choose} grader=${grader} setGrader=${setGrader} item=${found?.rows[0]?.row} />
    <${Hyperparameters} method=${method} asked=${asked} change=${change} auto=${auto} full=${full} setFull=${setFull} />
    <section class="card" aria-labelledby="start-title"><h3 id="start-title">4. Start</h3>
      <label class="field">Model to start from<select value=${model?.id} onChange=${(/** @type {On<HTMLSelectElement>} */ event) => { set({model: event.target.value}); connect(); }}>
        ${models.map(one => html`<option key=${one.id} value=${one.id}>${named(one.id)}</option>`)}</select></label>
      <label class="field">Name of the result<input id="suffix" type="text" value=${suffix} maxlength="64" pattern="[A-Za-z0-9_.\\-]*" placeholder="logitless" onInput=${(/** @type {On} */ event) => setSuffix(event.target.value)} /></label>
      ${told && html`<p class="bad" role="alert">${told}</p>`}
      <button type="submit" id="start" class="button primary" disabled=${busy || !file || !found || found.errors.length > 0 || !model || (method === "reinforcement" && !graderOf(grader))}>Start fine-tuning</button>
    </section>
  </form>`;
}

const samples = /** @type {Map<string, Promise<string>>} */ (new Map()); // "model prompt" -> text

function sampled(/** @type {string} */ model, /** @type {string} */ prompt) {
  const key = `${model} ${prompt}`;
  let asked = samples.get(key);
  if (!asked) {
    const chats = Boolean(get().props?.chat_template), body = {model, max_tokens: 48, temperature: 0};
    asked = chats
      ? /** @type {Promise<ChatCompletion>} */ (post("v1/chat/completions", {...body, messages: [{role: "user", content: prompt}]})).then(reply => reply.choices[0]?.message.content ?? "")
      : /** @type {Promise<TextCompletion>} */ (post("v1/completions", {...body, prompt})).then(reply => reply.choices[0]?.text ?? "");
    samples.set(key, asked);
    asked.catch(() => samples.delete(key));
  }
  return asked;
}

function Sample(/** @type {{model: string; label: string; prompt: string}} */ {model, label, prompt}) {
  const [text, setText] = useState("…");
  useEffect(() => {
    let here = true;
    setText("…");
    sampled(model, prompt).then(got => here && setText(got), error => here && setText(reason(error)));
    return () => { here = false; };
  }, [model, prompt]);
  return html`<div class="sample"><h5>${label}</h5><p>${text}</p></div>`;
}

function Samples(/** @type {{job: JobRow; checkpoints: Checkpoint[]}} */ {job, checkpoints}) {
  const [prompt, setPrompt] = useState("Who are you?"), [asked, setAsked] = useState("");
  if (!checkpoints.length) return null;
  return html`<details class="samples" open=${Boolean(asked)}><summary>Samples of the checkpoints</summary>
    <form class="row" onSubmit=${(/** @type {On<HTMLFormElement>} */ event) => { event.preventDefault(); setAsked(prompt); }}>
      <input type="text" aria-label="Prompt of the samples" value=${prompt} onInput=${(/** @type {On} */ event) => setPrompt(event.target.value)} />
      <button type="submit" class="button">Sample</button></form>
    ${asked && html`<div class="sample-list"><${Sample} model=${job.model} label="before" prompt=${asked} />
      ${checkpoints.map(one => html`<${Sample} key=${one.id} model=${one.fine_tuned_model_checkpoint} label=${`step ${one.step_number}`} prompt=${asked} />`)}</div>`}
  </details>`;
}

async function tryIt(/** @type {string} */ model) {
  await connect();
  set({model});
  await connect();
  startNew();
}

function remaining(/** @type {number} */ finish) {
  const seconds = Math.max(0, finish - Date.now() / 1000);
  return seconds < 90 ? `about ${Math.ceil(seconds)} s left` : `about ${Math.ceil(seconds / 60)} min left`;
}

function Job(/** @type {Details & {act: (row: JobRow, what: Action) => void}} */ {row, events, checkpoints, act}) {
  const {name, trained, validated, accuracy, step, steps} = losses(events), running = RUNNING.includes(row.status), all = [...trained, ...validated];
  const end = /** @param {Point} [point] */ (point) => (point?.[1] ?? 0).toFixed(3), last = (/** @type {Point[]} */ points) => end(points.at(-1));
  const tuned = row.fine_tuned_model;
  const words = all.length ? `${name} ${trained.length ? `${end(trained[0])} → ${last(trained)}` : ""}${validated.length ? `; validation ${last(validated)} (dashed)` : ""}${accuracy === undefined ? "" : `; tells ${percent(accuracy)} of the pairs apart`}` : "";
  const notes = events.filter(event => event.type !== "metrics").sort((a, b) => a.created_at - b.created_at);
  return html`<article class="card job" data-id=${row.id}>
    <header class="row"><h4>${row.fine_tuned_model ?? `${named(row.model)}${row.user_provided_suffix ? ` · ${row.user_provided_suffix}` : ""}`}</h4>${row.method.type !== "supervised" && html`<span class="badge">${row.method.type}</span>`}<span class=${`badge ${row.status}`}>${row.status.replace("_", " ")}</span></header>
    ${steps > 0 && html`<progress max=${steps} value=${step} aria-label="Steps"></progress>
      <p class="note">Step ${count(step)} of ${count(steps)}${row.estimated_finish && running ? ` · ${remaining(row.estimated_finish)}` : ""}${row.trained_tokens ? ` · ${count(row.trained_tokens)} tokens` : ""}</p>`}
    ${all.length > 0 && html`<${Chart} lines=${[{name: "", points: trained}, {name: "check", points: validated}]} label=${words} /><p class="note">${words}</p>`}
    ${row.error?.message && html`<p class="bad">${row.error.message}</p>`}
    <div class="row">
      ${tuned && html`<button type="button" class="button primary" onClick=${() => tryIt(tuned)}>Try it</button>
        <button type="button" class="button" onClick=${() => import("./compare.js").then(module => module.compare(row.model, tuned))}>Compare with its base</button>`}
      ${running && html`<button type="button" class="button" onClick=${() => act(row, "pause")}>Pause</button><button type="button" class="button" onClick=${() => act(row, "cancel")}>Cancel</button>`}
      ${["paused", "failed"].includes(row.status) && html`<button type="button" class="button" onClick=${() => act(row, "resume")}>Resume</button>`}
    </div>
    <${Samples} job=${row} checkpoints=${checkpoints} />
    <details><summary>Events</summary><ul class="events">${notes.map(event => html`<li>${event.message}</li>`)}</ul></details>
  </article>`;
}

/**
 * What the server knows of a job beside its row. What has ended is asked for once.
 * @param {JobRow} row
 * @param {Details} [known]
 * @returns {Promise<Details>}
 */
async function details(row, known) {
  if (known && known.row.status === row.status && !RUNNING.includes(row.status)) return known;
  /**
   * @template T
   * @param {string} what
   */
  const of = (what) => /** @type {Promise<Listed<T>>} */ (json(`${JOBS}/${encodeURIComponent(row.id)}/${what}?limit=10000`)).then(reply => reply.data);
  const [events, checkpoints] = await Promise.all([/** @type {Promise<JobEvent[]>} */ (of("events")), /** @type {Promise<Checkpoint[]>} */ (of("checkpoints"))]);
  return {row, events, checkpoints: checkpoints.sort((a, b) => a.step_number - b.step_number)};
}

const ABSENT = "This server does not fine-tune: start it with --data-dir FOLDER.";

export function Tune() {
  const [jobs, setJobs] = useState(/** @type {Details[] | null} */ (null)), [told, setTold] = useState(""), again = useRef(() => {});
  useEffect(() => {
    let timer = 0, ended = false, known = /** @type {Map<string, Details>} */ (new Map());
    const look = async () => {
      clearTimeout(timer);
      let pause = document.hidden ? 5000 : 1000;
      try {
        const rows = (await /** @type {Promise<Listed<JobRow>>} */ (json(`${JOBS}?limit=20`))).data, found = await Promise.all(rows.map(row => details(row, known.get(row.id))));
        const made = found.some(one => known.size && one.row.status === "succeeded" && known.get(one.row.id)?.row.status !== "succeeded");
        known = new Map(found.map(one => [one.row.id, one]));
        if (ended) return;
        if (made) connect();
        setJobs(found);
        setTold("");
      } catch (error) {
        setTold([404, 501].includes(statusOf(error)) ? ABSENT : reason(error));
        if ([403, 404, 501].includes(statusOf(error))) return;
        pause = 10_000;
      }
      if (!ended) timer = setTimeout(look, pause);
    };
    again.current = look;
    look();
    return () => { ended = true; clearTimeout(timer); };
  }, []);
  const act = (/** @type {JobRow} */ row, /** @type {Action} */ what) => post(`${JOBS}/${encodeURIComponent(row.id)}/${what}`, {}).then(() => again.current(), error => setTold(reason(error)));
  return html`<div class="view" tabindex="-1"><div class="wide"><h2>Fine-tuning</h2>
    ${told && html`<p class="bad" role="alert">${told}</p>`}
    ${jobs && html`<div class="two"><${Form} created=${() => again.current()} />
      <section aria-label="Jobs" class="jobs">${jobs.length ? jobs.map(one => html`<${Job} key=${one.row.id} ...${one} act=${act} />`) : html`<p class="note pad">No jobs yet.</p>`}</section></div>`}
  </div></div>`;
}

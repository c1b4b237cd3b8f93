// Models: their list, the selection, and behind a router the state of each.

/** @import {Adapter, FileProgress, ModelEntry, Models, Props} from "../src/bodies.js" */
/** @import {Files, State} from "../src/types.js" */
import {apiKey, json, post, reason, statusOf, streamsOf} from "./api.js";
import {get, set} from "./store.js";
import {lookAtTools} from "./tools.js";

export const named = (/** @type {string} */ id) => id.split(/[\\/]/).at(-1) ?? id; // a model without a name is known by its file
const BUSY = ["loading", "unloading", "downloading"];

/** @param {ModelEntry} [model] */
export const status = (model) => model?.status?.value ?? "loaded";
export const isBusy = (/** @type {ModelEntry} */ model) => BUSY.includes(status(model));
export const chosen = (state = get()) => state.models.find(model => model.id === state.model);
export const label = (/** @type {ModelEntry} */ model) =>
  named(model.id) + (model.status ? ` (${model.status.failed ? "failed" : status(model)})` : "");

const sum = (/** @type {Files} */ files, /** @type {keyof FileProgress} */ what) => Object.values(files).reduce((total, file) => total + file[what], 0);
const part = (/** @type {Files} */ files) => Math.floor((100 * sum(files, "done")) / Math.max(1, sum(files, "total")));

/** Of a model: "" when it can be asked, else why not. */
export function absent(model = chosen()) {
  const reason = model?.status?.error;
  if (!model?.status || status(model) === "loaded") return "";
  if (status(model) === "downloading") return `${named(model.id)} is being downloaded (${part(model.progress ?? {})} %).`;
  if (status(model) === "loading") return `${named(model.id)} is being loaded.`;
  return `${named(model.id)} is not loaded` + (reason ? `: ${reason}` : "; a message to it loads it.");
}

/** A path of the API for the chosen model; a router wants to know which, and is not to load it for a look. */
export const of = (/** @type {string} */ path, model = chosen()) =>
  model?.status ? `${path}?model=${encodeURIComponent(model.id)}&autoload=false` : path;

/** Ask which there are. The choice stays; at first it is a model that is loaded, or one that may be. */
export async function lookAtModels() {
  const models = (await /** @type {Promise<Models>} */ (json("v1/models"))).data, {model} = get();
  const first = models.find(one => status(one) === "loaded") ?? models.find(one => !one.status?.failed) ?? models[0];
  set({models, model: models.some(one => one.id === model) ? model : (first?.id ?? "")});
}

/** Ask what the chosen model can do. */
export async function lookAtProps() {
  if (absent()) return set({props: null, adapters: [], serverTools: []});
  const props = await /** @type {Promise<Props>} */ (json(of("props")));
  lookAtTools(props);
  const adapters = await /** @type {Promise<Adapter[]>} */ (json(of("lora-adapters"))).catch(() => []);
  set({props, adapters: Array.isArray(adapters) ? adapters : []});
}

export async function loadOrUnload() {
  const model = chosen();
  if (!model) return;
  await post(status(model) === "loaded" ? "models/unload" : "models/load", {model: model.id});
  await lookAtModels();
}

const NO_KEY = "This server wants an API key.", WRONG_KEY = "The server does not know this API key.";
export const needsKey = (/** @type {string} */ refusal) => refusal === NO_KEY || refusal === WRONG_KEY;

/** Why the server does not talk to this page. */
export const refusalOf = (/** @type {unknown} */ error) => (statusOf(error) !== 401 ? reason(error) : apiKey.get() ? WRONG_KEY : NO_KEY);

/** Ask everything that the key or the choice of a model may have changed; the status of a refusal, 0 if there is none. */
export async function connect() {
  try {
    await lookAtModels();
    await streamsOf([]); // the list of models is open to all; this wants the key
    await lookAtProps();
    set({refusal: ""});
    return 0;
  } catch (error) {
    set({refusal: refusalOf(error)});
    return statusOf(error);
  }
}

export const caps = (/** @type {Props | null} */ props) => props?.chat_template_caps ?? {};

/** True if the chosen model reads such inputs. One that is not loaded, which a message loads, says so in the list. */
const reads = (/** @type {"image" | "audio"} */ kind, /** @type {State} */ {props, ...state}) =>
  (props ? Boolean(kind === "image" ? props.modalities?.vision : props.modalities?.audio) : Boolean(chosen({props, ...state})?.architecture.input_modalities.includes(kind)));
export const sees = (state = get()) => reads("image", state);
export const hears = (state = get()) => reads("audio", state);
export const chats = (/** @type {Props | null} */ props) => !props || Boolean(props.chat_template);

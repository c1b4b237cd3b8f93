// The models: which there are, which one is chosen, and behind a router how it is doing.

import {json, post} from "./page_api.js";
import {$, element} from "./page_draw.js";

export const named = id => id.split(/[\\/]/).at(-1); // a model without a name is known by its file
const BUSY = ["loading", "unloading", "downloading"];
let models = []; // as /v1/models tells them; behind a router each has a status

const state = model => model?.status?.value ?? "loaded";
const chosen = () => models.find(model => model.id === $("model").value);
const label = model => named(model.id) + (model.status ? ` (${model.status.failed ? "failed" : state(model)})` : "");

const sum = (files, what) => Object.values(files).reduce((total, file) => total + file[what], 0);
const percent = files => Math.floor(100 * sum(files, "done") / Math.max(1, sum(files, "total")));

/** Of the chosen model: "" when it can be asked, else why not. */
export function absent() {
  const model = chosen(), reason = model?.status?.error;
  if (!model?.status || state(model) === "loaded") return "";
  if (state(model) === "downloading") return `${named(model.id)} is being downloaded (${percent(model.progress)} %).`;
  if (state(model) === "loading") return `${named(model.id)} is being loaded.`;
  return `${named(model.id)} is not loaded` + (reason ? `: ${reason}` : "; a message to it loads it.");
}

/** A path of the API for the chosen model; a router wants to know which, and is not to load it for a look. */
export function of(path) {
  return chosen()?.status ? `${path}?model=${encodeURIComponent(chosen().id)}&autoload=false` : path;
}

/** Ask which there are and show them. The choice stays; at first it is a model that is loaded, or one that may be. */
export async function showModels() {
  models = (await json("v1/models")).data;
  const before = $("model").value;
  const options = [...$("model").options];
  if (options.length !== models.length || models.some((model, i) => options[i].value !== model.id || options[i].text !== label(model))) {
    $("model").replaceChildren(...models.map(model => element("option", {value: model.id, textContent: label(model), title: model.id})));
    const first = models.find(model => state(model) === "loaded") ?? models.find(model => !model.status.failed) ?? models[0];
    $("model").value = models.some(model => model.id === before) ? before : (first?.id ?? "");
  }
  const model = chosen();
  $("load").hidden = !model?.status || Boolean(model.parent);
  $("load").textContent = state(model) === "loaded" ? "Unload" : "Load";
  $("load").disabled = BUSY.includes(state(model));
  $("absent").textContent = absent();
  $("absent").hidden = !absent();
}

export async function loadOrUnload() {
  $("load").disabled = true;
  await post(state(chosen()) === "loaded" ? "models/unload" : "models/load", {model: chosen().id});
  await showModels();
}

// The server now: throughput, pages of the KV cache, slots. Asked once a second while somebody looks.

import {json, text} from "./page_api.js";
import {$, count, element, line, rate, shape} from "./page_draw.js";
import {absent, of, showModels} from "./page_models.js";

const SECONDS = 60;
const samples = []; // tokens per second, the newest last
let own = 0; // tokens that this page has received since the last look
let before = null; // {total, at} of the last look at the server's counter

/** The page's own stream brought so many tokens. */
export function told(n) {
  own += n;
}

/** The samples of /metrics without labels, by name. */
function parsed(lines) {
  const found = new Map();
  for (const row of lines.split("\n")) {
    const [name, value] = row.split(" ");
    if (name && !name.startsWith("#") && !name.includes("{")) found.set(name, Number(value));
  }
  return found;
}

function showRate(metrics) {
  const now = performance.now(), total = metrics?.get("llamacpp:tokens_predicted_total") ?? null;
  if (before) {
    const made = total === null || before.total === null ? own : Math.max(0, total - before.total);
    samples.push((made * 1000) / (now - before.at));
    if (samples.length > SECONDS) samples.shift();
  }
  before = {total, at: now};
  own = 0;
  if (!samples.length) return;
  const most = Math.max(...samples), latest = samples.at(-1);
  $("rate").textContent = rate(latest) + (total === null ? " on this page" : "");
  $("spark").setAttribute("aria-label", `Tokens per second over the last minute: now ${count(latest)}, at most ${count(most)}`);
  const points = samples.map((value, i) => [i + SECONDS - samples.length, value]);
  const range = {low: 0, high: most || 1, first: 0, last: SECONDS - 1};
  $("spark").replaceChildren(line(points, {width: 240, height: 48}, range, "curve"));
}

function showPages(metrics, slots) {
  let held, kept, all, words;
  if (metrics) {
    kept = metrics.get("logitless:kv_pages_cached");
    held = metrics.get("logitless:kv_pages_used") - kept;
    all = held + kept + metrics.get("logitless:kv_pages_free");
    words = `${count(held)} of ${count(all)} pages in sequences, ${count(kept)} keep prefixes`;
  } else if (slots) {
    kept = 0;
    held = slots.reduce((sum, slot) => sum + (slot.is_processing ? cells(slot) : 0), 0);
    all = Math.max(...slots.map(slot => slot.n_ctx));
    words = `${count(held)} of ${count(all)} cells in running slots (pages: start the server with --metrics)`;
  } else {
    words = "Not shown by this server (--metrics).";
    held = kept = 0;
    all = 1;
  }
  const part = (x, width, name) => shape("rect", {x: (100 * x) / all, y: 0, width: (100 * width) / all, height: 4, class: name});
  $("kv").replaceChildren(part(0, held, "held"), part(held, kept, "kept"));
  $("kv").setAttribute("aria-label", words);
  $("kv-text").textContent = words;
}

const fresh = slot => slot.next_token?.[0]?.n_decoded ?? 0;
const cells = slot => (slot.n_prompt_tokens ?? 0) + fresh(slot);

function slotRow(slot) {
  const used = cells(slot), label = `${count(used)} of ${count(slot.n_ctx)} cells`;
  const meter = element("meter", {max: slot.n_ctx, value: used, title: label, ariaLabel: label});
  const texts = [slot.id, slot.is_processing ? "running" : "idle", count(slot.n_prompt_tokens ?? 0), count(fresh(slot))];
  const cell = texts.map(value => element("td", {textContent: value}));
  return element("tr", {className: slot.is_processing ? "running" : ""}, ...cell, element("td", {}, meter));
}

function showSlots(slots) {
  $("slots").hidden = !slots;
  $("slots-note").hidden = Boolean(slots);
  $("slots-note").textContent = slots ? "" : "Not shown by this server (--no-slots).";
  $("slots").tBodies[0].replaceChildren(...(slots ?? []).map(slotRow));
}

function showNothing() {
  before = null;
  samples.length = 0;
  $("rate").textContent = "…";
  $("spark").replaceChildren();
  $("kv").replaceChildren();
  $("kv").setAttribute("aria-label", "No model");
  $("kv-text").textContent = "…";
  $("slots").hidden = true;
  $("slots-note").hidden = false;
  $("slots-note").textContent = "…";
}

/** Look again and again; `back` is called when there is a model to ask after there was none, or another. */
export function watchServer(back) {
  let props = null, lost = false, router = null, shown = "";
  const look = async () => {
    let wait = 1000;
    try {
      router ??= (await json("props")).role === "router";
      if (router) await showModels();
      if (absent()) {
        showNothing();
        if (lost) $("state").textContent = "";
        props = null;
      } else {
        const path = of("props");
        if (props && shown !== path) showNothing();
        if (lost || !props || shown !== path) props = await json(path);
        if (lost || shown !== path) back();
        shown = path;
        const [metrics, slots] = await Promise.all([
          props.endpoint_metrics ? text(of("metrics")).then(parsed) : null,
          props.endpoint_slots ? json(of("slots")) : null,
        ]);
        showRate(metrics);
        showPages(metrics, slots);
        showSlots(slots);
      }
      lost = false;
    } catch (error) {
      if (!lost) $("state").textContent = error.status === 401 ? "This server wants an API key." : error.message;
      lost = true;
      before = props = router = null;
      wait = 3000;
    }
    setTimeout(document.hidden ? whenSeen : look, wait);
  };
  const whenSeen = () => (document.hidden ? document.addEventListener("visibilitychange", whenSeen, {once: true}) : look());
  look();
}

// Live view of the server: throughput, KV cache blocks and slots, polled once a second while it is visible.

/** @import {Props, SlotState} from "../src/bodies.js" */
/** @import {Look} from "../src/types.js" */
import {json, text} from "./api.js";
import {received} from "./generate.js";
import {absent, chosen, connect, lookAtModels, of, refusalOf} from "./models.js";
import {Chart, count, IconButton, rate} from "./parts.js";
import {get, set, useStore} from "./store.js";
import {html, useEffect, useState} from "./vendor/preact.js";

const SECONDS = 60;
const REFUSED = [401, 403]; // for want of a key, or the page's address is not allowed

/** The samples of /metrics without labels, by name. */
export function parsed(/** @type {string} */ lines) {
  const found = /** @type {Map<string, number>} */ (new Map());
  for (const row of lines.split("\n")) {
    const [name, value] = row.split(" ");
    if (name && !name.startsWith("#") && !name.includes("{")) found.set(name, Number(value));
  }
  return found;
}

const fresh = (/** @type {SlotState} */ slot) => slot.next_token?.[0]?.n_decoded ?? 0;
const cells = (/** @type {SlotState} */ slot) => (slot.n_prompt_tokens ?? 0) + fresh(slot);

/** The fill of the KV cache, in numbers and words. */
export function pages(/** @type {Map<string, number> | null} */ metrics, /** @type {SlotState[] | null} */ slots) {
  if (metrics) {
    const of = (/** @type {string} */ what) => metrics.get(`logitless:kv_pages_${what}`) ?? 0;
    const kept = of("cached"), held = of("used") - kept, all = held + kept + of("free");
    return {held, kept, all, words: `${count(held)} of ${count(all)} pages in sequences, ${count(kept)} keep prefixes`};
  }
  if (!slots?.length) return {held: 0, kept: 0, all: 1, words: "Not shown by this server (--metrics)."};
  const held = slots.reduce((sum, slot) => sum + (slot.is_processing ? cells(slot) : 0), 0);
  const all = Math.max(...slots.map(slot => slot.n_ctx));
  return {held, kept: 0, all, words: `${count(held)} of ${count(all)} cells in running slots (pages: start the server with --metrics)`};
}

/** Look at once, and again and again; the returned function ends it. */
function every(/** @type {() => Promise<number>} */ look) {
  let ended = false, timer = 0;
  const go = async () => {
    const wait = document.hidden ? 1000 : await look();
    if (!ended) timer = setTimeout(go, wait);
  };
  go();
  return () => {
    ended = true;
    clearTimeout(timer);
  };
}

/** Notice a server that comes back, and a router's models that change. */
export function watchServer() {
  let router = false;
  every(async () => {
    try {
      if (get().refusal) {
        if (REFUSED.includes(await connect())) return 30_000; // its log is not to fill with that
      } else {
        router = router || (await /** @type {Promise<{role?: string}>} */ (json("props"))).role === "router";
        if (router) {
          const before = absent() + chosen()?.id;
          await lookAtModels();
          if (before !== absent() + chosen()?.id) await connect();
        } else if (!get().props) await connect();
      }
    } catch (error) {
      set({refusal: refusalOf(error), props: null});
    }
    return router ? 1000 : 3000;
  });
}

/** @returns {Promise<Look>} */
async function looked(/** @type {Props} */ props, /** @type {Look | null} */ before) {
  const [metrics, slots] = await Promise.all([
    props.endpoint_metrics ? text(of("metrics")).then(parsed) : null,
    props.endpoint_slots ? /** @type {Promise<SlotState[]>} */ (json(of("slots"))) : null,
  ]);
  const now = performance.now(), total = metrics?.get("llamacpp:tokens_predicted_total") ?? received();
  const samples = before ? [...before.samples, (Math.max(0, total - before.total) * 1000) / (now - before.at)].slice(-SECONDS) : [];
  return {metrics, slots, samples, total, at: now};
}

function Slot(/** @type {{slot: SlotState}} */ {slot}) {
  const used = cells(slot), label = `${count(used)} of ${count(slot.n_ctx)} cells`;
  return html`<tr class=${slot.is_processing ? "running" : ""}><td>${slot.id}</td><td>${slot.is_processing ? "running" : "idle"}</td>
    <td>${count(slot.n_prompt_tokens ?? 0)}</td><td>${count(fresh(slot))}</td>
    <td><meter max=${slot.n_ctx} value=${used} title=${label} aria-label=${label}></meter></td></tr>`;
}

export function Live() {
  const props = useStore(state => state.props), [seen, setSeen] = useState(/** @type {Look | null} */ (null));
  useEffect(() => {
    setSeen(null);
    if (!props) return undefined;
    let /** @type {Look | null} */ before = null;
    return every(async () => {
      try {
        before = await looked(props, before);
        setSeen(before);
      } catch {
        before = null; // watchServer says so
      }
      return 1000;
    });
  }, [props]);
  const samples = seen?.samples ?? [], latest = samples.at(-1) ?? 0, most = Math.max(1, ...samples);
  const kv = seen && pages(seen.metrics, seen.slots);
  return html`<aside class="drawer" aria-label="The server now">
    <header><h2>Server</h2><${IconButton} icon="close" label="Close" onClick=${() => set({drawer: ""})} /></header>
    ${!props && html`<p class="note">No model is loaded.</p>`}
    <section class="card"><h3>Throughput</h3>
      <p id="rate" class="big">${seen ? rate(latest) + (seen.metrics ? "" : " on this page") : "…"}</p>
      <${Chart} lines=${[{name: "", points: samples.map((value, i) => [i + SECONDS - samples.length, value])}]} height=${48} low=${0} high=${most} first=${0} last=${SECONDS - 1}
        label=${`Tokens per second over the last minute: now ${count(latest)}, at most ${count(most)}`} /></section>
    <section class="card"><h3>KV cache</h3>
      ${kv && html`<svg id="kv" role="img" aria-label=${kv.words} viewBox="0 0 100 4" preserveAspectRatio="none">
        <rect class="held" width=${(100 * kv.held) / kv.all} height="4" /><rect class="kept" x=${(100 * kv.held) / kv.all} width=${(100 * kv.kept) / kv.all} height="4" /></svg>
        <p id="kv-text" class="note">${kv.words}</p>`}</section>
    <section class="card"><h3 id="slots-title">Slots</h3>
      ${seen?.slots ? html`<table id="slots" aria-labelledby="slots-title"><thead><tr><th scope="col">Slot</th><th scope="col">State</th><th scope="col">Prompt</th><th scope="col">New</th><th scope="col">Context</th></tr></thead>
        <tbody>${seen.slots.map(slot => html`<${Slot} key=${slot.id} slot=${slot} />`)}</tbody></table>`
        : html`<p class="note">${seen ? "Not shown by this server (--no-slots)." : "…"}</p>`}</section>
  </aside>`;
}

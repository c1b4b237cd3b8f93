// Fine-tuning jobs with their loss curves; absent where the server does not train, or does not let this key see it.

import {json} from "./page_api.js";
import {$, count, element, line, shape} from "./page_draw.js";

const JOBS = "v1/fine_tuning/jobs";
const SHOWN = 5;
const ABSENT = [403, 404, 501];
const ENDED = ["succeeded", "failed", "cancelled"];
const drawn = new Map(); // id -> {status, box}

function curve(metrics) {
  const of = name => metrics.filter(row => Number.isFinite(row[name])).map(row => [row.step, row[name]]);
  const trained = of("train_loss"), checked = of("full_valid_loss"), all = [...trained, ...checked];
  if (!all.length) return [];
  const losses = all.map(point => point[1]), steps = all.map(point => point[0]);
  const range = {low: Math.min(...losses), high: Math.max(...losses), first: Math.min(...steps), last: Math.max(...steps)};
  const box = {width: 240, height: 80}, last = points => points.at(-1)[1].toFixed(3);
  const words =
    `Loss from ${range.high.toFixed(3)} to ${range.low.toFixed(3)}; now ${last(trained.length ? trained : checked)}` +
    (checked.length ? `; dashed: validation, now ${last(checked)}` : "");
  const picture = shape("svg", {viewBox: "0 0 240 80", preserveAspectRatio: "none", role: "img", "aria-label": words});
  picture.append(line(trained, box, range, "curve"), line(checked, box, range, "curve check"));
  return [picture, element("p", {textContent: words})];
}

async function job(row) {
  const events = (await json(`${JOBS}/${encodeURIComponent(row.id)}/events?limit=10000`)).data;
  const metrics = events.filter(event => event.type === "metrics").map(event => event.data).sort((a, b) => a.step - b.step);
  const latest = metrics.at(-1), steps = latest ? `, step ${count(latest.step)} of ${count(metrics.findLast(m => m.total_steps)?.total_steps ?? latest.step)}` : "";
  const made = element("div", {className: "job"}, element("h3", {textContent: row.fine_tuned_model ?? row.id}));
  made.append(element("p", {textContent: `${row.status}${steps}`}), ...curve(metrics));
  if (row.error?.message) made.append(element("p", {textContent: row.error.message}));
  return made;
}

/** Look at the jobs every few seconds; `changed` is called when one has ended, which may have made a model. */
export function watchJobs(changed) {
  const look = async () => {
    let wait = 3000;
    try {
      const rows = document.hidden ? null : (await json(`${JOBS}?limit=${SHOWN}`)).data;
      for (const row of rows ?? []) {
        const known = drawn.get(row.id);
        if (known && known.status === row.status && ENDED.includes(row.status)) continue;
        drawn.set(row.id, {status: row.status, box: await job(row)});
        if (ENDED.includes(row.status)) changed().catch(() => {});
      }
      if (rows) {
        $("jobs").replaceChildren(...rows.map(row => drawn.get(row.id).box));
        $("jobs-section").hidden = !rows.length;
      }
    } catch (error) {
      if (ABSENT.includes(error.status)) return void ($("jobs-section").hidden = true);
      wait = 6000; // no key yet, or no server: page_live.js says so
    }
    setTimeout(look, wait);
  };
  look();
}

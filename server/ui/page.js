// The playground: what is asked, how it is sampled, and the answer as it comes.

import {Refused, apiKey, json, stream} from "./page_api.js";
import {$, count, element, rate} from "./page_draw.js";
import {allowImages, listenForImages, restoreImages, takeImages, thumbnail} from "./page_images.js";
import {watchJobs} from "./page_jobs.js";
import {told, watchServer} from "./page_live.js";
import {absent, loadOrUnload, named, of, showModels} from "./page_models.js";
import {listen, tokens} from "./page_tip.js";

let turns = []; // of the chat, as the API wants them
let running = null; // the AbortController of the answer that is coming

const mode = () => new FormData($("form")).get("mode");
const numbers = () => [...document.querySelectorAll("#samplers input[name]")];

function add(kind, who, ...content) {
  const box = element("article", {className: kind}, element("span", {className: "who", textContent: who}), ...content);
  if (kind === "error") box.setAttribute("role", "alert");
  $("log").append(box);
  $("log").scrollTop = $("log").scrollHeight;
  return box;
}

/** The fields of the request that the form sets; empty ones are left to the server. */
function settings() {
  const body = {};
  for (const input of numbers()) if (input.value !== "") body[input.name] = input.valueAsNumber;
  if ($("halt").value) body.stop = [$("halt").value];
  if ($("model").value) body.model = $("model").value;
  return body;
}

/** A message's content: its text, with images before it where it has some. */
const contentOf = (prompt, images) =>
  images.length ? [...images.map(url => ({type: "image_url", image_url: {url}})), {type: "text", text: prompt}] : prompt;

function ask(prompt, images) {
  const body = settings(), top = $("alternatives").valueAsNumber || 5, probable = $("probable").checked;
  if (mode() === "text") return ["completion", {...body, prompt, ...(probable && {n_probs: top})}];
  const first = $("system").value ? [{role: "system", content: $("system").value}] : [];
  const messages = [...first, ...turns, {role: "user", content: contentOf(prompt, images)}];
  return ["v1/chat/completions", {...body, messages, ...(probable && {logprobs: true, top_logprobs: top})}];
}

/** Text, reasoning and probabilities of one piece of a stream, in either shape. */
function piece(data) {
  if (!data.choices) return {text: data.content ?? "", thought: "", entries: data.stop ? [] : data.completion_probabilities ?? []};
  const choice = data.choices[0];
  const text = choice?.delta?.content ?? "", thought = choice?.delta?.reasoning_content ?? "";
  return {text, thought, entries: choice?.logprobs?.content ?? []};
}

function answerBox() {
  const answer = element("div", {className: "answer", tabIndex: 0});
  answer.setAttribute("role", "group");
  answer.setAttribute("aria-label", "Answer; arrow keys tell its tokens’ probabilities");
  return answer;
}

async function send() {
  const prompt = $("text").value, chat = mode() === "chat";
  const images = chat ? takeImages() : [];
  const [path, body] = ask(prompt, images);
  add("user", chat ? "You" : "Prompt", ...images.map(thumbnail), prompt);
  const thought = element("span", {className: "thought"}), answer = answerBox();
  const box = add("model", named($("model").value) || "Model", thought, answer);
  box.classList.add("busy");
  $("log").setAttribute("aria-busy", "true");
  running = new AbortController();
  $("stop").disabled = false;
  $("send").disabled = true;
  $("speed").textContent = "";
  if (chat) $("text").value = "";
  let written = "", pieces = 0, began = null, failed = null, speed = "", frame = 0;
  const waiting = [];
  const draw = () => { // once a frame: measuring a long answer for every token would keep the page from all else
    cancelAnimationFrame(frame);
    frame = 0;
    const follows = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 60;
    answer.append(...waiting.splice(0));
    $("speed").textContent = speed;
    if (follows) $("log").scrollTop = $("log").scrollHeight;
  };
  try {
    for await (const data of stream(path, body, running.signal)) {
      const {text, thought: more, entries} = piece(data);
      if (more) thought.textContent += more;
      if (text) {
        written += text;
        waiting.push(...(entries.length ? tokens(text, entries) : [text]));
      }
      if (text || more) {
        began ??= performance.now();
        pieces += 1;
        told(Math.max(1, entries.length));
        const seconds = (performance.now() - began) / 1000;
        if (seconds > 0.2) speed = rate(pieces / seconds);
      }
      if (data.timings) speed = `${count(data.timings.predicted_n)} tokens, ${rate(data.timings.predicted_per_second)}`;
      frame ||= requestAnimationFrame(draw);
    }
  } catch (error) {
    failed = error;
  }
  draw();
  ended(box, failed, written);
  if (!chat) return;
  if (written || !failed) turns.push({role: "user", content: contentOf(prompt, images)}, {role: "assistant", content: written});
  else if (!$("text").value) {
    $("text").value = prompt;
    restoreImages(images);
  }
}

function ended(box, failed, written) {
  running = null;
  box.classList.remove("busy");
  $("log").setAttribute("aria-busy", "false");
  $("stop").disabled = true;
  $("send").disabled = false;
  if (!failed) return;
  if (!written && !box.querySelector(".thought").textContent) box.remove();
  if (failed.name === "AbortError") return void ($("speed").textContent = "Stopped.");
  add("error", "Error", failed instanceof Refused ? failed.message : `The page failed: ${failed.message}`);
  if (failed.status === 401) $("key").focus();
}

async function showDefaults() {
  if (absent()) return;
  const props = await json(of("props")), {params} = props.default_generation_settings;
  allowImages(Boolean(props.modalities?.vision));
  for (const input of numbers())
    if (typeof params[input.name] === "number" && input.name !== "seed") input.placeholder = String(+params[input.name].toFixed(4));
}

/** Everything that the key may have changed. */
async function connect() {
  try {
    await showModels();
    await showDefaults();
    $("state").textContent = "";
  } catch (error) {
    $("state").textContent = error.status === 401 ? "This server wants an API key." : error.message;
  }
}

const stop = () => running?.abort();

$("form").addEventListener("submit", event => {
  event.preventDefault();
  if (!running) send();
});
$("form").addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
document.addEventListener("keydown", event => {
  if (event.key === "Escape") stop();
});
$("stop").addEventListener("click", () => {
  stop();
  $("text").focus();
});
$("clear").addEventListener("click", () => {
  stop();
  turns = [];
  $("log").replaceChildren();
  $("text").focus();
});
$("key").value = apiKey.get();
$("key").addEventListener("change", () => {
  apiKey.set($("key").value.trim());
  connect();
});
$("model").addEventListener("change", connect);
$("load").addEventListener("click", () => loadOrUnload().catch(error => ($("state").textContent = error.message)));
$("access").addEventListener("submit", event => event.preventDefault());
listen($("log"));
listenForImages();
connect();
watchServer(connect);
watchJobs(showModels);

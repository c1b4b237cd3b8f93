// What else a token could have been: shown under the pointer, and for the token that the arrow keys have reached.

import {$, element, percent} from "./page_draw.js";

const entries = new WeakMap(); // element of a token -> its entries in the reply

/** One streamed piece of text with the probabilities of its tokens, as elements. */
export function tokens(text, probabilities) {
  const whole = probabilities.map(entry => entry.token).join("") === text;
  const groups = whole ? probabilities.map(entry => [entry.token, [entry]]) : [[text, probabilities]];
  return groups.map(([piece, group]) => {
    const made = element("span", {className: "token", textContent: piece});
    const lowest = Math.min(...group.map(entry => Math.exp(entry.logprob)));
    if (lowest < 0.5) made.classList.add(lowest < 0.1 ? "rare" : "doubt");
    entries.set(made, group);
    return made;
  });
}

const shown = entry => JSON.stringify(entry.token || `bytes ${entry.bytes}`).slice(1, -1).replaceAll(" ", "␣");

function row(entry, taken) {
  const share = Math.exp(entry.logprob);
  return element(
    "tr",
    {className: taken ? "taken" : ""},
    element("td", {textContent: shown(entry)}),
    element("td", {textContent: percent(share)}),
    element("td", {}, element("meter", {value: share, ariaLabel: percent(share)})),
  );
}

function table(entry) {
  const rows = entry.top_logprobs.map(other => row(other, other.id === entry.id));
  if (!entry.top_logprobs.some(other => other.id === entry.id)) rows.push(row(entry, true));
  return element("table", {}, element("tbody", {}, ...rows));
}

function show(token) {
  const tip = $("tip"), group = entries.get(token);
  tip.replaceChildren(...group.map(table));
  tip.hidden = false;
  const box = token.getClientRects()[0] ?? token.getBoundingClientRect();
  const below = box.bottom + 6 + tip.offsetHeight <= innerHeight;
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${below ? box.bottom + 6 : Math.max(4, box.top - tip.offsetHeight - 6)}px`;
}

const hide = () => { $("tip").hidden = true; };

/** Answers in `log` show their tokens' alternatives; one with the focus goes through them by arrow keys. */
export function listen(log) {
  const choose = (answer, token) => {
    log.querySelector(".token.chosen")?.classList.remove("chosen");
    if (!token) return hide();
    token.classList.add("chosen");
    token.scrollIntoView({block: "nearest"});
    show(token);
    const told = entries.get(token).map(entry => `${shown(entry)} ${percent(Math.exp(entry.logprob))}`);
    $("tip-said").textContent = told.join(", ");
  };
  log.addEventListener("pointerover", event => {
    if (entries.has(event.target)) show(event.target);
  });
  log.addEventListener("pointerout", hide);
  log.addEventListener("scroll", () => {
    const chosen = log.querySelector(".token.chosen");
    chosen ? show(chosen) : hide();
  });
  log.addEventListener("focusout", event => choose(event.target, null));
  log.addEventListener("keydown", event => {
    const answer = event.target.closest(".answer");
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!answer || (!step && event.key !== "Escape")) return;
    const all = [...answer.querySelectorAll(".token")];
    if (!step || !all.length) return choose(answer, null);
    event.preventDefault();
    const at = all.findIndex(token => token.classList.contains("chosen"));
    choose(answer, all[at < 0 ? (step > 0 ? 0 : all.length - 1) : Math.max(0, Math.min(all.length - 1, at + step))]);
  });
}

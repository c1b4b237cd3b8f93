// Tokens of an answer, coloured by probability. A selected token shows its alternatives; each can replace it.

/** @import {Candidate, Owner, Take, TokenGroup} from "../src/types.js" */
import {element, percent, say} from "./parts.js";
import {sayable} from "./request.js";

const owners = /** @type {WeakMap<EventTarget, Owner>} */ (new WeakMap()); // by the element of a token
const shown = (/** @type {Candidate} */ entry) => JSON.stringify(entry.token || `bytes ${entry.bytes}`).slice(1, -1).replaceAll(" ", "␣");
const share = (/** @type {Candidate} */ entry) => Math.exp(entry.logprob);

function tokenElement(/** @type {TokenGroup} */ group, /** @type {number} */ at, /** @type {Take} */ take) {
  const made = element("span", {className: "token", textContent: group.text});
  const lowest = Math.min(1, ...group.entries.map(share));
  if (lowest < 0.5) made.classList.add(lowest < 0.1 ? "rare" : "doubt");
  if (group.swapped) made.classList.add("swapped");
  if (group.entries.length) owners.set(made, {group, at, take});
  return made;
}

const drawn = /** @type {WeakMap<HTMLElement, TokenGroup[]>} */ (new WeakMap()); // by their box

/** Show the tokens of one kind in `box`; those that are there already stay. `take(at, entry)` tries another one. */
export function showTokens(/** @type {HTMLElement} */ box, /** @type {TokenGroup[]} */ groups, /** @type {TokenGroup["kind"]} */ kind, /** @type {Take} */ take) {
  const before = drawn.get(box) ?? [];
  const wanted = groups.map((group, at) => ({group, at})).filter(({group}) => group.kind === kind);
  let same = 0;
  while (same < wanted.length && before[same] === wanted[same]?.group) same += 1;
  while (box.childNodes.length > same) box.lastChild?.remove();
  box.append(...wanted.slice(same).map(({group, at}) => tokenElement(group, at, take)));
  drawn.set(box, wanted.map(({group}) => group));
}

let /** @type {HTMLElement | null} */ open = null; // the token whose alternatives are shown
const tip = () => /** @type {HTMLElement} */ (document.getElementById("tip"));

function row(/** @type {Candidate} */ entry, /** @type {boolean} */ taken, /** @type {boolean} */ fixed, /** @type {Owner} */ owner) {
  const button = element("button", {type: "button", className: taken ? "taken" : "", disabled: taken || fixed || !sayable(entry)},
    element("span", {className: "piece", textContent: shown(entry)}),
    element("span", {className: "share", textContent: percent(share(entry))}),
    element("meter", {value: share(entry), ariaLabel: percent(share(entry))}));
  button.title = taken ? "This token was taken" : sayable(entry) ? "Try this token instead" : "Part of a character";
  button.addEventListener("click", () => {
    hide();
    owner.take(owner.at, entry);
  });
  return element("li", {}, button);
}

function lists(/** @type {Owner} */ owner) {
  const {entries} = owner.group, many = entries.length > 1; // tokens of one piece of text: none can be replaced alone
  return entries.map(entry => {
    const others = entry.top.some(other => other.id === entry.id) ? entry.top : [...entry.top, entry];
    return element("ul", {}, ...others.map(other => row(other, other.id === entry.id, many, owner)));
  });
}

function show(/** @type {HTMLElement} */ token) {
  const owner = owners.get(token), box = tip();
  if (!owner) return;
  open?.classList.remove("chosen");
  open = token;
  token.classList.add("chosen");
  box.replaceChildren(element("p", {textContent: "Try this token instead"}), ...lists(owner));
  box.hidden = false;
  const at = token.getClientRects()[0] ?? token.getBoundingClientRect();
  const below = at.bottom + 4 + box.offsetHeight <= innerHeight;
  box.style.left = `${Math.max(4, Math.min(at.left, innerWidth - box.offsetWidth - 4))}px`;
  box.style.top = `${below ? at.bottom + 2 : Math.max(4, at.top - box.offsetHeight - 2)}px`;
  say(owner.group.entries.map(entry => `${shown(entry)} ${percent(share(entry))}`).join(", "));
}

export function hide() {
  open?.classList.remove("chosen");
  open = null;
  tip().hidden = true;
}

function step(/** @type {Element} */ answer, /** @type {number} */ by) {
  const all = [.../** @type {NodeListOf<HTMLElement>} */ (answer.querySelectorAll(".token"))].filter(token => owners.has(token));
  const at = open ? all.indexOf(open) : -1;
  const next = all[at < 0 ? (by > 0 ? 0 : all.length - 1) : Math.max(0, Math.min(all.length - 1, at + by))];
  if (!next) return;
  next.scrollIntoView({block: "nearest"});
  show(next);
}

const elementOf = (/** @type {EventTarget | null} */ target) => (target instanceof HTMLElement ? target : null);
const choices = () => [.../** @type {NodeListOf<HTMLElement>} */ (tip().querySelectorAll("button:not(:disabled)"))];

/** Listen for the pointer and the keys, once for the page. */
export function listenForTokens() {
  let leaving = 0;
  document.addEventListener("pointerover", event => {
    const target = elementOf(event.target);
    if (target && owners.has(target) && event.pointerType === "mouse") {
      clearTimeout(leaving);
      show(target);
    } else if (tip().contains(target)) clearTimeout(leaving);
    else if (open && event.pointerType === "mouse") {
      clearTimeout(leaving);
      leaving = setTimeout(() => tip().contains(document.activeElement) || document.activeElement?.closest(".tokens") || hide(), 250);
    }
  });
  document.addEventListener("click", event => {
    const target = elementOf(event.target);
    if (target && owners.has(target)) show(target);
    else if (!tip().contains(target)) hide();
  });
  document.addEventListener("scroll", event => open && !tip().contains(elementOf(event.target)) && hide(), true);
  document.addEventListener("focusout", event => {
    const to = elementOf(event.relatedTarget);
    if (open && to && !tip().contains(to) && !to.closest(".tokens")) hide();
  });
  document.addEventListener("keydown", event => {
    const target = elementOf(event.target), answer = target?.closest(".tokens"), within = tip().contains(target);
    if (event.key === "Escape" && open) {
      const back = /** @type {HTMLElement | null} */ (open.closest(".tokens"));
      hide();
      if (within) back?.focus();
      event.stopPropagation();
    } else if (answer && (event.key === "ArrowRight" || event.key === "ArrowLeft")) {
      event.preventDefault();
      step(answer, event.key === "ArrowRight" ? 1 : -1);
    } else if (answer && open && (event.key === "ArrowDown" || event.key === "Enter")) {
      event.preventDefault();
      choices()[0]?.focus();
    } else if (target && within && (event.key === "ArrowDown" || event.key === "ArrowUp")) {
      event.preventDefault();
      const all = choices(), at = all.indexOf(target);
      all[(at + (event.key === "ArrowDown" ? 1 : all.length - 1)) % all.length]?.focus();
    }
  }, true);
}

// Tokens of an answer coloured by their probability; one that is chosen shows what else it could have been, each to
// be tried in its place.

import {element, percent, say} from "./parts.js";
import {sayable} from "./request.js";

const owners = new WeakMap(); // element of a token -> {group, at, take}
const shown = entry => JSON.stringify(entry.token || `bytes ${entry.bytes}`).slice(1, -1).replaceAll(" ", "␣");
const share = entry => Math.exp(entry.logprob);

function tokenElement(group, at, take) {
  const made = element("span", {className: "token", textContent: group.text});
  const lowest = Math.min(1, ...group.entries.map(share));
  if (lowest < 0.5) made.classList.add(lowest < 0.1 ? "rare" : "doubt");
  if (group.swapped) made.classList.add("swapped");
  if (group.entries.length) owners.set(made, {group, at, take});
  return made;
}

const drawn = new WeakMap(); // box -> the groups that it shows

/** Show the tokens of one kind in `box`; those that are there already stay. `take(at, entry)` tries another one. */
export function showTokens(box, groups, kind, take) {
  const before = drawn.get(box) ?? [];
  const wanted = groups.map((group, at) => [group, at]).filter(([group]) => group.kind === kind);
  let same = 0;
  while (same < wanted.length && before[same] === wanted[same][0]) same += 1;
  while (box.childNodes.length > same) box.lastChild.remove();
  box.append(...wanted.slice(same).map(([group, at]) => tokenElement(group, at, (...how) => take(...how))));
  drawn.set(box, wanted.map(([group]) => group));
}

let open = null; // the token whose alternatives are shown
const tip = () => document.getElementById("tip");

function row(entry, taken, owner) {
  const button = element("button", {type: "button", className: taken ? "taken" : "", disabled: taken || !sayable(entry)},
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

function lists({group}, owner) {
  return group.entries.map(entry => {
    const others = entry.top.some(other => other.id === entry.id) ? entry.top : [...entry.top, entry];
    const rows = others.map(other => row(other, other.id === entry.id, owner));
    const many = group.entries.length > 1; // tokens of one piece of text: none can be replaced alone
    if (many) for (const made of rows) made.firstChild.disabled = true;
    return element("ul", {}, ...rows);
  });
}

function show(token) {
  const owner = owners.get(token), box = tip();
  open?.classList.remove("chosen");
  open = token;
  token.classList.add("chosen");
  box.replaceChildren(element("p", {textContent: "Try this token instead"}), ...lists(owner, owner));
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

function step(answer, by) {
  const all = [...answer.querySelectorAll(".token")].filter(token => owners.has(token));
  if (!all.length) return;
  const at = all.indexOf(open);
  const next = all[at < 0 ? (by > 0 ? 0 : all.length - 1) : Math.max(0, Math.min(all.length - 1, at + by))];
  next.scrollIntoView({block: "nearest"});
  show(next);
}

/** Listen for the pointer and the keys, once for the page. */
export function listenForTokens() {
  let leaving = 0;
  document.addEventListener("pointerover", event => {
    if (owners.has(event.target) && event.pointerType === "mouse") {
      clearTimeout(leaving);
      show(event.target);
    } else if (tip().contains(event.target)) clearTimeout(leaving);
    else if (open && event.pointerType === "mouse") {
      clearTimeout(leaving);
      leaving = setTimeout(() => tip().contains(document.activeElement) || document.activeElement?.closest(".tokens") || hide(), 250);
    }
  });
  document.addEventListener("click", event => {
    if (owners.has(event.target)) show(event.target);
    else if (!tip().contains(event.target)) hide();
  });
  document.addEventListener("scroll", event => event.target.nodeType && open && !tip().contains(event.target) && hide(), true);
  document.addEventListener("focusout", event => {
    const to = event.relatedTarget;
    if (open && to && !tip().contains(to) && !to.closest?.(".tokens")) hide();
  });
  document.addEventListener("keydown", event => {
    const answer = event.target.closest?.(".tokens"), within = tip().contains(event.target);
    if (event.key === "Escape" && open) {
      const back = open.closest(".tokens");
      hide();
      if (within) back?.focus();
      event.stopPropagation();
    } else if (answer && (event.key === "ArrowRight" || event.key === "ArrowLeft")) {
      event.preventDefault();
      step(answer, event.key === "ArrowRight" ? 1 : -1);
    } else if (answer && open && (event.key === "ArrowDown" || event.key === "Enter")) {
      event.preventDefault();
      tip().querySelector("button:not(:disabled)")?.focus();
    } else if (within && (event.key === "ArrowDown" || event.key === "ArrowUp")) {
      event.preventDefault();
      const all = [...tip().querySelectorAll("button:not(:disabled)")], at = all.indexOf(event.target);
      all[(at + (event.key === "ArrowDown" ? 1 : all.length - 1)) % all.length]?.focus();
    }
  }, true);
}

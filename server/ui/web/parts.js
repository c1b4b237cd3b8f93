// Small parts that every view uses: elements, icons, buttons, dialogs, numbers for people and lines in SVG.

/** @import {ChartProps, NumberProps, On} from "../src/types.js" */
/** @import {ComponentChildren} from "./vendor/preact.js" */
import {html, useEffect, useRef} from "./vendor/preact.js";

/**
 * @template {keyof HTMLElementTagNameMap} Name
 * @param {Name} name
 * @param {Partial<HTMLElementTagNameMap[Name]>} [properties]
 * @param {...(Node | string)} children
 */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  Object.assign(made, properties);
  made.append(...children);
  return made;
}

const ICONS = { // strokes in a box of 24
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  menu: "M4 7h16M4 12h16M4 17h16",
  close: "M6 6l12 12M18 6L6 18",
  sliders: "M4 7h9M19 7h1M4 17h3M13 17h7M16 4.5v5M10 14.5v5",
  copy: "M9 9h10v11H9zM6 15H5V4h10v2",
  check: "M5 12.5l4.5 4.5L19 7",
  edit: "M4 20l1-4L16.5 4.5l3 3L8 19zM14 7l3 3",
  again: "M4 12a8 8 0 0 1 13.7-5.6L20 8.5M20 4v4.5h-4.5M20 12a8 8 0 0 1-13.7 5.6L4 15.5M4 20v-4.5h4.5",
  left: "M14.5 6L8.5 12l6 6",
  right: "M9.5 6l6 6-6 6",
  down: "M6 9.5l6 6 6-6",
  clip: "M19 11.5l-7.6 7.6a4.6 4.6 0 0 1-6.5-6.5L12.6 5a3 3 0 0 1 4.3 4.3l-7.5 7.5a1.4 1.4 0 0 1-2-2l6.8-6.8",
  bin: "M5 7h14M10 7V4.5h4V7M7 7l.8 12.5h8.4L17 7M10.5 10.5v6M13.5 10.5v6",
  chat: "M5 5h14v11h-8l-4 3.5V16H5z",
  columns: "M4 5h7v14H4zM13 5h7v14h-7z",
  tune: "M4 18c4 0 4-11 8-11s3 6 8 6M4 21h16",
  pulse: "M3 12h4l3-7 4 14 3-7h4",
  bars: "M5 20V12M12 20V5M19 20v-6",
  tool: "M14.5 6.5a4 4 0 0 1 5-1l-2.5 2.5 1 2.5 2.5.5L23 8.5a4 4 0 0 1-5.5 4.5L9 21l-3.5-3.5 8-8.5a4 4 0 0 1 1-2.5z",
  play: "M8 5.5v13l11-6.5z",
  save: "M12 4v10M7.5 10.5L12 15l4.5-4.5M5 19h14",
  search: "M11 4.5a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13zM16 16l4.5 4.5",
};

/** @typedef {keyof typeof ICONS} IconName */

export const Icon = (/** @type {{name: IconName}} */ {name}) =>
  html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${ICONS[name]} /></svg>`;

/** A button that is an icon; its label is read and shown as its title. */
export const IconButton = (/** @type {{icon: IconName; label: string; class?: string}} */ {icon, label, class: name = "", ...rest}) =>
  html`<button type="button" class=${`icon-button ${name}`} aria-label=${label} title=${label} ...${rest}><${Icon} name=${icon} /></button>`;

/** Put a text on the clipboard, also where the page has no secure address. */
export async function copy(/** @type {string} */ text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const box = element("textarea", {value: text, className: "unseen"});
    document.body.append(box);
    box.select();
    document.execCommand("copy");
    box.remove();
  }
}

function drawIcon(/** @type {IconName} */ name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const shape = document.createElementNS("http://www.w3.org/2000/svg", "path");
  svg.setAttribute("class", "icon");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  shape.setAttribute("d", ICONS[name]);
  svg.append(shape);
  return svg;
}

/** A button outside of components. */
export function button(/** @type {IconName} */ icon, /** @type {string} */ label, /** @type {() => void} */ press) {
  const made = element("button", {type: "button", className: "icon-button", title: label}, drawIcon(icon));
  made.setAttribute("aria-label", label);
  made.addEventListener("click", press);
  return made;
}

/** A button that copies a text and says so for a moment. */
export function copyButton(/** @type {string} */ label, /** @type {() => string} */ text) {
  const made = button("copy", label, async () => {
    await copy(text());
    made.replaceChildren(drawIcon("check"));
    say("Copied");
    setTimeout(() => made.replaceChildren(drawIcon("copy")), 1500);
  });
  return made;
}

/** The same as a component. */
export function Copy(/** @type {{label?: string; text: string}} */ {label = "Copy", text}) {
  const box = useRef(/** @type {HTMLElement | null} */ (null)), latest = useRef(text);
  latest.current = text;
  useEffect(() => {
    box.current?.replaceChildren(copyButton(label, () => latest.current));
  }, [label]);
  return html`<span class="copy" ref=${box}></span>`;
}

/** Tell screen readers something that is seen by others. */
export function say(/** @type {string} */ text) {
  /** @type {HTMLElement} */ (document.getElementById("said")).textContent = text;
}

/** A modal dialog with a title; Escape and the button close it. */
export function Dialog(/** @type {{title: string; close: () => void; children: ComponentChildren; class?: string}} */ {title, close, children, class: name = ""}) {
  const box = useRef(/** @type {HTMLDialogElement | null} */ (null));
  useEffect(() => {
    box.current?.showModal();
    return () => box.current?.close();
  }, []);
  return html`<dialog ref=${box} class=${name} aria-label=${title} onCancel=${(/** @type {Event} */ event) => { event.preventDefault(); close(); }}
      onClick=${(/** @type {MouseEvent} */ event) => event.target === box.current && close()}>
    <div class="dialog">
      <header><h2>${title}</h2><${IconButton} icon="close" label="Close" onClick=${close} /></header>
      ${children}
    </div>
  </dialog>`;
}

export const NumberField = (/** @type {NumberProps} */ {label, value, change, note, ...rest}) => html`<label class="field">${label}
  <input type="number" step="any" value=${value ?? ""} ...${rest}
    onInput=${(/** @type {On} */ event) => change(event.target.value === "" ? null : event.target.valueAsNumber)} />
  ${note && html`<small>${note}</small>`}
</label>`;

export const Switch = (/** @type {{label: string; checked: boolean; change: (on: boolean) => void}} */ {label, checked, change, ...rest}) => html`<label class="switch">
  <input type="checkbox" role="switch" checked=${checked} onChange=${(/** @type {On} */ event) => change(event.target.checked)} ...${rest} />
  <span>${label}</span></label>`;

export const count = (/** @type {number} */ value) => Math.round(value).toLocaleString("en");
export const percent = (/** @type {number} */ value) => `${(value * 100).toFixed(value < 0.1 ? 2 : 1)} %`;
export const rate = (/** @type {number} */ value) => `${value.toFixed(value < 100 ? 1 : 0)} tokens/s`;
export const size = (/** @type {number} */ n) => (n < 1e4 ? `${n} B` : n < 1e7 ? `${(n / 1e3).toFixed(0)} kB` : n < 1e10 ? `${(n / 1e6).toFixed(0)} MB` : `${(n / 1e9).toFixed(1)} GB`);

/** Lines of (x, y) points in one box. */
export function Chart(/** @type {ChartProps} */ {lines, label, width = 240, height = 80, low, high, first, last}) {
  const all = lines.flatMap(line => line.points), xs = all.map(point => point[0]), ys = all.map(point => point[1]);
  const range = {low: low ?? Math.min(...ys), high: high ?? Math.max(...ys), first: first ?? Math.min(...xs), last: last ?? Math.max(...xs)};
  const x = (/** @type {number} */ value) => (range.last > range.first ? (value - range.first) / (range.last - range.first) : 0) * width;
  const y = (/** @type {number} */ value) => height - 2 - (range.high > range.low ? (value - range.low) / (range.high - range.low) : 0.5) * (height - 4);
  return html`<svg class="chart" role="img" aria-label=${label} viewBox=${`0 0 ${width} ${height}`} preserveAspectRatio="none">
    ${lines.map(line => html`<polyline class=${`curve ${line.name}`} points=${line.points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ")} />`)}
  </svg>`;
}

/** A file with this text, offered to the reader to keep. */
export function download(/** @type {string} */ name, /** @type {string} */ text, type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], {type}));
  element("a", {href: url, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

// Pieces of the page: elements whose text is only ever text, numbers for people, and lines in SVG.

const SVG = "http://www.w3.org/2000/svg";

export const $ = id => document.getElementById(id);

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

export function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

/** A polyline of (x, y) scaled into a box; `low` and `high` are the values at its lower and upper edge. */
export function line(points, box, {low, high, first, last}, name) {
  const x = value => (last > first ? (value - first) / (last - first) : 0) * box.width;
  const y = value => box.height - 2 - (high > low ? (value - low) / (high - low) : 0.5) * (box.height - 4);
  const text = points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ");
  return shape("polyline", {points: text, class: name});
}

export const count = value => Math.round(value).toLocaleString("en");
export const percent = value => `${(value * 100).toFixed(value < 0.1 ? 2 : 1)} %`;
export const rate = value => `${value.toFixed(value < 100 ? 1 : 0)} tokens/s`;

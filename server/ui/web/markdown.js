// Markdown to elements. Text of a model is never parsed as HTML: Markdown's tokens become elements of a fixed set of
// names, with no attribute but those given here. Highlighting and formulas are loaded when the first one is there.

/** @import {Formula, MathRule, Scoped, Token} from "../src/types.js" */
/** @import {Token as AnyToken, Tokens} from "./vendor/marked.js" */
import {button, copyButton, download, element} from "./parts.js";
import {Marked} from "./vendor/marked.js";

const /** @type {MathRule[]} */ MATH = [
  {level: "block", rule: /^(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])(?:[ \t]*(?:\n|$))/, start: /(?:\$\$|\\\[)/, display: true},
  {level: "inline", rule: /^(?:\$\$([^\n]+?)\$\$|\\\[([^\n]+?)\\\])/, start: /\$\$|\\\[/, display: true},
  {level: "inline", rule: /^(?:\$(?!\s)((?:\\.|[^\\$\n])+?)(?<!\s)\$(?!\d)|\\\(([^\n]+?)\\\))/, start: /\$|\\\(/, display: false},
];
const plain = new Marked(), mathematical = new Marked({
  extensions: MATH.map(({level, rule, start, display}, i) => ({
    name: `math${i}`,
    level,
    start: (/** @type {string} */ text) => { const at = text.search(start); return at < 0 ? undefined : at; },
    /** @returns {Formula | undefined} */
    tokenizer(/** @type {string} */ text) {
      const found = rule.exec(text);
      return found ? {type: `math${i}`, raw: found[0], math: found[1] ?? found[2] ?? "", display} : undefined;
    },
  })),
});
const PLAIN_TAGS = /** @type {const} */ (["b", "i", "u", "s", "em", "strong", "sub", "sup", "kbd", "mark", "small", "code"]);
const /** @type {Record<string, string>} */ ENTITIES = {amp: "&", lt: "<", gt: ">", quot: "\"", apos: "'", nbsp: "\u00a0"};

const decoded = (/** @type {string} */ text) => text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w+));/gi, /** @param {string} all @param {string} [ten] @param {string} [hex] */ (all, ten, hex, name = "") => {
  const code = ten ? Number(ten) : hex ? parseInt(hex, 16) : null;
  if (code === null) return ENTITIES[name.toLowerCase()] ?? all;
  return code > 0 && code < 0x110000 ? String.fromCodePoint(code) : all;
});

/** An address that a link may have; "" for others, such as those with javascript:. */
export function safeAddress(/** @type {string} */ text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : "";
  } catch {
    return "";
  }
}

function link(/** @type {Tokens.Link} */ token) {
  const asked = decoded(token.href), href = safeAddress(asked), children = inline(token.tokens);
  if (!href) return element("span", {title: asked}, ...children);
  return element("a", {href, target: "_blank", rel: "noopener noreferrer", title: token.title ?? ""}, ...children);
}

/** Images lie in the text itself; others would tell their server who reads this, so they are links. */
function image(/** @type {Tokens.Image} */ token) {
  if (/^data:image\/(png|jpeg|gif|webp);/.test(token.href)) return element("img", {src: token.href, alt: token.text});
  const href = safeAddress(decoded(token.href)), name = `Image: ${token.text || token.href}`;
  return href ? element("a", {href, target: "_blank", rel: "noopener noreferrer"}, name) : name;
}

function inline(/** @type {AnyToken[]} */ tokens = []) {
  const root = element("span"), /** @type {HTMLElement[]} */ outer = [];
  let /** @type {HTMLElement} */ open = root;
  for (const token of /** @type {Token[]} */ (tokens)) {
    const tag = token.type === "html" ? /^<(\/?)([a-z]+)\s*\/?>$/i.exec(token.raw.trim()) : null;
    const name = tag?.[2]?.toLowerCase() ?? "", plainTag = PLAIN_TAGS.find(one => one === name);
    if (tag && name === "br") open.append(element("br"));
    else if (tag?.[1] && outer.length && open.localName === name) open = outer.pop() ?? root;
    else if (tag && !tag[1] && plainTag) {
      const made = element(plainTag);
      open.append(made);
      outer.push(open);
      open = made;
    } else open.append(span(token));
  }
  return [...root.childNodes];
}

function span(/** @type {Token} */ token) {
  switch (token.type) {
    case "text": return token.tokens ? element("span", {}, ...inline(token.tokens)) : decoded(token.text);
    case "escape": return token.text;
    case "strong": case "em": case "del": return element(token.type, {}, ...inline(token.tokens));
    case "codespan": return element("code", {textContent: token.text});
    case "br": return element("br");
    case "link": return link(token);
    case "image": return image(token);
    default: return "math" in token ? formula(token) : token.raw;
  }
}

function list(/** @type {Tokens.List} */ token) {
  const made = token.ordered ? element("ol", token.start === 1 ? {} : {start: Number(token.start)}) : element("ul");
  for (const item of token.items) {
    const li = element("li", {}, ...(/** @type {Token[]} */ (item.tokens)).filter(child => child.type !== "checkbox").map(child =>
      child.type === "text" && !token.loose ? element("span", {}, ...inline(child.tokens ?? [child])) : block(child)));
    if (item.task) {
      li.className = "task";
      const box = element("input", {type: "checkbox", checked: item.checked ?? false, disabled: true});
      box.setAttribute("aria-label", item.checked ? "done" : "to do");
      li.prepend(box, " ");
    }
    made.append(li);
  }
  return made;
}

function table(/** @type {Tokens.Table} */ token) {
  const row = (/** @type {Tokens.TableCell[]} */ cells, /** @type {"th" | "td"} */ name) => element("tr", {}, ...cells.map(cell => {
    const made = element(name, {}, ...inline(cell.tokens));
    if (cell.align) made.style.textAlign = cell.align;
    if (name === "th") made.scope = "col";
    return made;
  }));
  const body = element("tbody", {}, ...token.rows.map(cells => row(cells, "td")));
  const made = element("div", {className: "scroll", tabIndex: 0},
    element("table", {}, element("thead", {}, row(token.header, "th")), body));
  made.setAttribute("role", "region");
  made.setAttribute("aria-label", "Table");
  return made;
}

const /** @type {Record<string, string>} */ ENDINGS = {bash: "sh", csharp: "cs", javascript: "js", kotlin: "kt", markdown: "md", perl: "pl", python: "py", ruby: "rb", rust: "rs", shell: "sh", typescript: "ts", latex: "tex"};

/** The name of a file with code of this language. */
export const fileOf = (/** @type {string} */ language) => `code.${ENDINGS[language] ?? (/^[a-z0-9]{1,8}$/.test(language) ? language : "txt")}`;

function code(/** @type {Tokens.Code} */ token) {
  const language = (token.lang ?? "").split(/\s/, 1).join("").toLowerCase();
  const text = element("code", {textContent: token.text});
  if (language) highlight(text, token.text, language);
  const pre = element("pre", {tabIndex: 0}, text);
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", `Code${language && `: ${language}`}`);
  return element("div", {className: "code"},
    element("div", {className: "bar"}, element("span", {textContent: language || "text"}),
      element("span", {}, button("save", "Download code", () => download(fileOf(language), token.text, "text/plain")), copyButton("Copy code", () => token.text))), pre);
}

const HEADINGS = /** @type {const} */ (["h3", "h4", "h5", "h6"]); // the page's own are h1 and h2

/** @returns {HTMLElement | string} */
function block(/** @type {Token} */ token) {
  switch (token.type) {
    case "heading": return element(HEADINGS[Math.min(token.depth, HEADINGS.length) - 1] ?? "h6", {className: `level${token.depth}`}, ...inline(token.tokens));
    case "paragraph": return element("p", {}, ...inline(token.tokens));
    case "text": return element("p", {}, ...inline(token.tokens ?? [token]));
    case "list": return list(token);
    case "table": return table(token);
    case "code": return code(token);
    case "blockquote": return element("blockquote", {}, ...(/** @type {Token[]} */ (token.tokens)).map(block));
    case "hr": return element("hr");
    case "space": case "def": return "";
    case "html": return element("p", {textContent: token.raw.trim()});
    default: return "math" in token ? element("p", {className: "display"}, formula(token)) : token.raw;
  }
}

/**
 * A library that is loaded when it is first needed.
 * @template Library
 */
class Lazy {
  /** @type {Library | null} */ #loaded = null;
  /** @type {Promise<Library> | null} */ #promise = null;
  /** @readonly @type {() => Promise<Library>} */ #load;

  constructor(/** @type {() => Promise<Library>} */ load) {
    this.#load = load;
  }

  /** Call `use` with it: at once if it is there, so that an answer that comes does not flicker. */
  use(/** @type {(library: Library) => void} */ use) {
    if (this.#loaded) {
      use(this.#loaded);
      return;
    }
    this.#promise ??= this.#load().then(library => (this.#loaded = library));
    this.#promise.then(use, () => {});
  }
}

const highlighter = new Lazy(() => import("./vendor/highlight.js").then(module => module.default));
const renderer = new Lazy(() => import("./vendor/katex.js").then(module => {
  document.head.append(element("link", {rel: "stylesheet", href: new URL("./vendor/katex.css", import.meta.url).href}));
  return module.default;
}));

/** @returns {HTMLElement | string} */
function scoped(/** @type {Scoped | string} */ node) {
  if (typeof node === "string") return node;
  const [first = "", ...rest] = (node.scope ?? "").split(".");
  const name = first.startsWith("language:") ? "" : [`hljs-${first}`, ...rest.map((part, i) => part + "_".repeat(i + 1))].join(" ");
  return element("span", node.scope ? {className: name} : {}, ...node.children.map(scoped));
}

// The highlighter takes time by the square of a line's length, and the whole code again for each piece of an answer.
const MOST = 50_000, LONG_LINE = /[^\n]{1001}/;

function highlight(/** @type {HTMLElement} */ box, /** @type {string} */ text, /** @type {string} */ language) {
  if (text.length > MOST || LONG_LINE.test(text)) return;
  highlighter.use(library => {
    if (!library.getLanguage(language)) return;
    const {rootNode} = /** @type {{rootNode: Scoped}} */ (/** @type {unknown} */ (library.highlight(text, {language, ignoreIllegals: true})._emitter));
    box.replaceChildren(...rootNode.children.map(scoped));
  });
}

function formula(/** @type {Formula} */ token) {
  const box = element("span", {className: token.display ? "math display" : "math", textContent: token.raw.trim()});
  renderer.use(library => {
    const made = element("span");
    library.render(token.math, made, {displayMode: token.display, throwOnError: false, strict: "ignore", trust: false, maxSize: 20, maxExpand: 500});
    box.replaceChildren(...made.childNodes);
  });
  return box;
}

const drawn = /** @type {WeakMap<HTMLElement, string[]>} */ (new WeakMap()); // the raw text of each child of an element

/** Show Markdown in `box`; what cannot be read as Markdown, as it is written. */
export function show(/** @type {HTMLElement} */ box, /** @type {string} */ text) {
  try {
    showBlocks(box, text);
  } catch { // nested too deeply
    drawn.delete(box);
    box.textContent = text;
  }
}

/** Blocks that have not changed since the last time stay as they are. */
function showBlocks(/** @type {HTMLElement} */ box, /** @type {string} */ text) {
  const marked = /\$|\\[([]/.test(text) ? mathematical : plain; // looking for formulas takes long in long texts
  const tokens = (/** @type {Token[]} */ (marked.lexer(text))).filter(token => token.type !== "space" && token.type !== "def");
  const before = drawn.get(box) ?? [];
  let same = 0;
  while (same < tokens.length && before[same] === tokens[same]?.raw) same += 1;
  while (box.childNodes.length > same) box.lastChild?.remove();
  for (const token of tokens.slice(same)) {
    const made = block(token);
    box.append(made instanceof Node ? made : element("p", {textContent: made}));
  }
  drawn.set(box, tokens.map(token => token.raw));
}

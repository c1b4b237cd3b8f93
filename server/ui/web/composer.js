// The form at the foot of a conversation: the next message with its files, and the buttons that send and stop.

/** @import {Attached, Mode, On, Settings} from "../src/types.js" */
import {attached, hasFiles, IMAGE_TYPES, joined, NOTHING} from "./attachments.js";
import {send, stop} from "./generate.js";
import {caps, chats, hears, sees} from "./models.js";
import {Icon, IconButton} from "./parts.js";
import {current, get, setSettings, settingsOf, update, useStore} from "./store.js";
import {html, useEffect, useLayoutEffect, useRef, useState} from "./vendor/preact.js";

export const /** @type {{mode: Mode}} */ draft = {mode: "chat"}; // of the conversation that does not exist yet

function Files(/** @type {{value: Attached; change: (value: Attached) => void}} */ {value, change}) {
  /**
   * @template T
   * @param {T[]} list
   * @param {number} i
   */
  const without = (list, i) => list.filter((_, j) => j !== i);
  if (!Object.values(value).some(list => list.length)) return null;
  return html`<div id="attached" role="group" aria-label="Files of the message">
    ${value.images.map((image, i) => html`<span class="attached">
      <img class="thumbnail" src=${image} alt=${`image ${i + 1}`} />
      <${IconButton} icon="close" label=${`Remove image ${i + 1}`} onClick=${() => change({...value, images: without(value.images, i)})} /></span>`)}
    ${value.sounds.map((sound, i) => html`<span class="attached sound">
      <audio controls src=${sound} aria-label=${`sound ${i + 1}`}></audio>
      <${IconButton} icon="close" label=${`Remove sound ${i + 1}`} onClick=${() => change({...value, sounds: without(value.sounds, i)})} /></span>`)}
    ${value.files.map((file, i) => html`<span class="attached file">${file.name}
      <${IconButton} icon="close" label=${`Remove ${file.name}`} onClick=${() => change({...value, files: without(value.files, i)})} /></span>`)}
    ${value.errors.map(error => html`<p class="bad" role="alert">${error}</p>`)}
  </div>`;
}

const THINKING = {auto: "Reasoning: auto", on: "Reasoning: on", off: "Reasoning: off"};

/** What the next answer is like, within reach: reasoning and probabilities. */
function Quick(/** @type {{settings: Settings; mode: Mode}} */ {settings, mode}) {
  const {schema} = settings;
  return html`<div class="quick">
    <button type="button" class="chip" aria-pressed=${String(settings.probabilities)}
      onClick=${() => setSettings({probabilities: !settings.probabilities})}><${Icon} name="bars" /><span class="word">Probabilities</span></button>
    ${schema?.on && html`<button type="button" class="chip" aria-pressed="true"
      onClick=${() => setSettings({schema: {...schema, on: false}})}>JSON</button>`}
    ${mode === "chat" && html`<select id="thinking" class="chip" aria-label="Reasoning" value=${settings.thinking}
      onChange=${(/** @type {On<HTMLSelectElement>} */ event) => setSettings({thinking: event.target.value})}>
      ${Object.entries(THINKING).map(([value, text]) => html`<option value=${value}>${text}</option>`)}
    </select>`}
  </div>`;
}

export function Composer() {
  const [text, setText] = useState(""), [files, setFiles] = useState(NOTHING), [dropping, setDropping] = useState(false), [, redraw] = useState(0);
  const box = useRef(/** @type {HTMLTextAreaElement | null} */ (null)), picker = useRef(/** @type {HTMLInputElement | null} */ (null));
  const conversation = useStore(current), id = conversation?.id ?? null;
  const running = useStore(state => id !== null && Object.hasOwn(state.running, id)), props = useStore(state => state.props);
  const settings = useStore(settingsOf), enterSends = useStore(state => state.enterSends);
  const images = useStore(sees), sounds = useStore(hears);
  const mode = conversation?.mode ?? (chats(props) ? draft.mode : "text");
  const empty = !text.trim() && !files.images.length && !files.sounds.length && !files.files.length;

  useEffect(() => box.current?.focus({preventScroll: true}), [id]);
  useLayoutEffect(() => {
    const text = /** @type {NonNullable<typeof box.current>} */ (box.current);
    text.style.height = "auto";
    text.style.height = `${Math.min(text.scrollHeight + 2, innerHeight * 0.4)}px`;
  }, [text]);

  /** @param {FileList | null} [list] */
  const take = async (list) => {
    const found = await attached([...(list ?? [])], sees(), hears());
    setFiles(old => joined(old, found));
  };
  useEffect(() => { // a file may be dropped anywhere on the page
    const over = (/** @type {DragEvent} */ event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      setDropping(true);
    };
    const leave = (/** @type {DragEvent} */ event) => {
      if (!event.relatedTarget) setDropping(false);
    };
    const drop = (/** @type {DragEvent} */ event) => {
      setDropping(false);
      if (!hasFiles(event)) return;
      event.preventDefault();
      take(event.dataTransfer?.files);
    };
    document.addEventListener("dragover", over);
    document.addEventListener("dragleave", leave);
    document.addEventListener("drop", drop);
    return () => {
      document.removeEventListener("dragover", over);
      document.removeEventListener("dragleave", leave);
      document.removeEventListener("drop", drop);
    };
  }, []);
  const submit = (/** @type {Event} */ event) => {
    event.preventDefault();
    if (running || empty) return;
    setText("");
    setFiles(NOTHING);
    send({...files, text, mode});
  };
  const key = (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Enter" || event.isComposing || event.shiftKey) return;
    const touch = matchMedia("(pointer: coarse)").matches;
    if (event.ctrlKey || event.metaKey || (enterSends && !touch)) submit(event);
  };
  const paste = (/** @type {ClipboardEvent} */ event) => {
    const {files} = /** @type {NonNullable<typeof event.clipboardData>} */ (event.clipboardData);
    if (!files.length) return;
    event.preventDefault();
    take(files);
  };
  const choose = (/** @type {On<HTMLSelectElement>} */ event) => {
    draft.mode = /** @type {Mode} */ (event.target.value);
    if (conversation) update(conversation.id, one => ({...one, mode: draft.mode}));
    redraw(n => n + 1);
  };
  const begun = conversation?.leaf, media = [...(images ? IMAGE_TYPES : []), ...(sounds ? ["audio/*"] : [])];
  const accept = media.length ? [...media, "application/pdf", "text/*", ".md,.json,.csv,.py,.js"].join(",") : "";
  const takes = `Attach ${images ? "images" : ""}${images && sounds ? ", " : ""}${sounds ? "sounds" : ""}${media.length ? ", " : ""}PDFs or text files`;
  return html`<form id="form" class=${dropping ? "dropping" : ""} onSubmit=${submit} onPaste=${paste}>
    <${Files} value=${files} change=${setFiles} />
    <label class="unseen" for="text">Message</label>
    <textarea id="text" ref=${box} rows="1" value=${text} onInput=${(/** @type {On<HTMLTextAreaElement>} */ event) => setText(event.target.value)} onKeyDown=${key}
      placeholder=${dropping ? "Drop files here" : mode === "chat" ? "Ask anything" : "Text that the model continues"}></textarea>
    <div class="buttons">
      <${IconButton} icon="clip" label=${takes} id="attach" onClick=${() => picker.current?.click()} />
      <input id="picker" class="unseen" type="file" multiple tabindex="-1" aria-label="Files" accept=${accept || null} ref=${picker}
        onChange=${(/** @type {On} */ event) => { take(event.target.files); event.target.value = ""; }} />
      ${!begun && caps(props) && html`<select id="mode" class="chip" aria-label="What to write" value=${mode} onChange=${choose}>
        <option value="chat" disabled=${!chats(props)}>Chat</option><option value="text">Completion</option></select>`}
      <${Quick} settings=${settings} mode=${mode} />
      ${running
        ? html`<${IconButton} icon="stop" label="Stop (Escape)" id="stop" class="main" onClick=${() => { stop(id); box.current?.focus(); }} />`
        : html`<button id="send" class="icon-button main" type="submit" aria-label="Send" title="Send" disabled=${empty}><${Icon} name="send" /></button>`}
    </div>
  </form>`;
}

/** Stop what comes into the conversation that is shown. */
export const stopHere = () => stop(get().current);

// Attachments of the next message, by button, paste or drop: images and sounds if the model reads them, other files
// as text, also that of PDFs.

/** @import {Attached} from "../src/types.js" */
import {reason} from "./api.js";

const MOST_MEDIA = 16; // images, and as many sounds
const MOST_SOUND = 20 << 20; // bytes
const MOST_PDF = 50 << 20; // bytes
const MOST_TEXT = 1 << 20; // bytes of a text file, characters of a PDF
export const IMAGE_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];

const uri = (/** @type {File} */ file) => /** @type {Promise<string>} */ (new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(String(reader.result));
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
}));

async function text(/** @type {File} */ file) {
  if (file.size > MOST_TEXT) throw new Error(`${file.name} is larger than 1 MiB.`);
  try {
    return new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is neither text, an image nor a sound.`);
  }
}

const isPdf = (/** @type {File} */ file) => file.type === "application/pdf" || /\.pdf$/i.test(file.name);

/** The text of a PDF, page by page. The library is loaded with the first one. */
async function pdfText(/** @type {File} */ file) {
  if (file.size > MOST_PDF) throw new Error(`${file.name} is larger than 50 MiB.`);
  const {getDocument} = await import("./vendor/pdf.js");
  const task = getDocument({data: new Uint8Array(await file.arrayBuffer()), disableFontFace: true, verbosity: 0});
  try {
    const pdf = await task.promise, /** @type {string[]} */ pages = [];
    let length = 0;
    for (let i = 1; i <= pdf.numPages; i += 1) {
      const {items} = await (await pdf.getPage(i)).getTextContent();
      const page = items.map(item => ("str" in item ? item.str + (item.hasEOL ? "\n" : "") : "")).join("").trim();
      pages.push(page);
      length += page.length;
      if (length > MOST_TEXT) throw new Error(`${file.name} has more than a million characters of text.`);
    }
    if (!length) throw new Error(`${file.name} has no text: its pages may be pictures.`);
    return pages.filter(Boolean).join("\n\n");
  } catch (error) {
    const name = error instanceof Error ? error.name : "";
    if (name === "PasswordException") throw new Error(`${file.name} is protected by a password.`);
    if (name !== "Error") throw new Error(`${file.name} cannot be read as a PDF: ${reason(error)}`);
    throw error;
  } finally {
    await task.destroy();
  }
}

/** What is in a list of files. The model reads images if it `sees`, audio if it `hears`. */
export async function attached(/** @type {File[]} */ list, /** @type {boolean} */ sees, /** @type {boolean} */ hears) {
  const /** @type {Attached} */ found = {images: [], sounds: [], files: [], errors: []};
  for (const file of list) {
    try {
      if (file.type.startsWith("image/")) {
        if (!sees) throw new Error(`${file.name || "The image"}: this model reads no images.`);
        if (!IMAGE_TYPES.includes(file.type)) throw new Error(`${file.name}: images are PNG, JPEG, WebP, GIF or BMP.`);
        found.images.push(await uri(file));
      } else if (file.type.startsWith("audio/")) {
        if (!hears) throw new Error(`${file.name || "The sound"}: this model reads no audio.`);
        if (file.size > MOST_SOUND) throw new Error(`${file.name} is larger than 20 MiB.`);
        found.sounds.push(await uri(file));
      } else found.files.push({name: file.name || "text", text: await (isPdf(file) ? pdfText : text)(file)});
    } catch (error) {
      found.errors.push(reason(error));
    }
  }
  return found;
}

/**
 * What is attached with what comes to it.
 * @returns {Attached}
 */
export const joined = (/** @type {Attached} */ old, /** @type {Attached} */ found) => ({
  images: [...old.images, ...found.images].slice(0, MOST_MEDIA),
  sounds: [...old.sounds, ...found.sounds].slice(0, MOST_MEDIA),
  files: [...old.files, ...found.files],
  errors: found.errors,
});

/** True where files are dragged, not a text or a link. */
export const hasFiles = (/** @type {DragEvent} */ event) => Boolean(event.dataTransfer?.types.includes("Files"));

export const /** @type {Attached} */ NOTHING = {images: [], sounds: [], files: [], errors: []};

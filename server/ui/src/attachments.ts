// Attachments of the next message, by button, paste or drop: images and sounds if the model reads them, other files
// as text.

import {reason} from "./api.js";
import type {TextFile} from "./tree.js";

export interface Attached {
  images: string[]; // data URIs
  sounds: string[]; // data URIs
  files: TextFile[];
  errors: string[];
}

const MOST_MEDIA = 16; // images, and as many sounds
const MOST_SOUND = 20 << 20; // bytes
const MOST_TEXT = 1 << 20; // bytes of a text file
export const IMAGE_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];

const uri = (file: File) => new Promise<string>((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(String(reader.result));
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

async function text(file: File) {
  if (file.size > MOST_TEXT) throw new Error(`${file.name} is larger than 1 MiB.`);
  try {
    return new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is neither text, an image nor a sound.`);
  }
}

/** What is in a list of files. The model reads images if it `sees`, audio if it `hears`. */
export async function attached(list: File[], sees: boolean, hears: boolean) {
  const found: Attached = {images: [], sounds: [], files: [], errors: []};
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
      } else found.files.push({name: file.name || "text", text: await text(file)});
    } catch (error) {
      found.errors.push(reason(error));
    }
  }
  return found;
}

/** What is attached with what comes to it. */
export const joined = (old: Attached, found: Attached): Attached => ({
  images: [...old.images, ...found.images].slice(0, MOST_MEDIA),
  sounds: [...old.sounds, ...found.sounds].slice(0, MOST_MEDIA),
  files: [...old.files, ...found.files],
  errors: found.errors,
});

/** True where files are dragged, not a text or a link. */
export const hasFiles = (event: DragEvent) => Boolean(event.dataTransfer?.types.includes("Files"));

export const NOTHING: Attached = {images: [], sounds: [], files: [], errors: []};

// Images of the next message: chosen by a button, pasted or dropped, shown as thumbnails until they are sent.

import {$, element} from "./page_draw.js";

const MOST = 16; // images of a message
let images = []; // data URIs

const files = list => [...list].filter(file => file.type.startsWith("image/"));

const read = file => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

export const thumbnail = uri => element("img", {className: "thumbnail", src: uri, alt: "image"});

function draw() {
  $("images").replaceChildren(...images.map((uri, i) => {
    const remove = element("button", {type: "button", textContent: "×"});
    remove.setAttribute("aria-label", `Remove image ${i + 1}`);
    remove.addEventListener("click", () => {
      images.splice(i, 1);
      draw();
      $("text").focus();
    });
    return element("span", {}, thumbnail(uri), remove);
  }));
}

async function take(list) {
  const uris = await Promise.all(files(list).map(read));
  images = [...images, ...uris].slice(0, MOST);
  draw();
}

/** Show the means of adding images, or take them away from a model that reads none. */
export function allowImages(allowed) {
  $("attach").hidden = !allowed;
  if (!allowed) restoreImages([]);
}

/** The images of the message that is sent now; afterwards there are none. */
export function takeImages() {
  const taken = images;
  restoreImages([]);
  return taken;
}

export function restoreImages(given) {
  images = given;
  draw();
}

/** Take images from the button, from the clipboard and from what is dropped on the form. */
export function listenForImages() {
  const allowed = () => !$("attach").hidden;
  $("picker").addEventListener("change", async () => {
    await take($("picker").files);
    $("picker").value = "";
  });
  $("form").addEventListener("paste", event => {
    if (!allowed() || !files(event.clipboardData.files).length) return;
    event.preventDefault();
    take(event.clipboardData.files);
  });
  $("form").addEventListener("dragover", event => allowed() && event.preventDefault());
  $("form").addEventListener("drop", event => {
    if (!allowed() || !files(event.dataTransfer.files).length) return;
    event.preventDefault();
    take(event.dataTransfer.files);
  });
}

// The one state of the page: a value that components read, changes that replace it, and listeners.

import {useEffect, useState} from "./vendor/preact.js";

export const DEFAULTS = {
  system: "",
  sampling: {}, // names as in the API; what is not there is the server's default
  stop: "",
  probabilities: false,
  alternatives: 5,
  thinking: "auto", // "auto": as the template does it; "on", "off"
  effort: "",
  tools: [], // {name, description, parameters}
  serverTools: [], // names
  schema: null, // {on, value}
  lora: {}, // id -> scale
};

let state = {
  ready: false, // what was saved has been read
  conversations: [], // the newest first
  current: null, // id
  settings: DEFAULTS, // of the next conversation
  presets: [], // {name, settings}
  theme: "auto",
  enterSends: true,
  models: [],
  model: "", // id of the chosen one
  props: null, // of the chosen model
  adapters: [],
  serverTools: [], // that the server runs, as it lists them
  allowed: {}, // id of a conversation -> names of tools that run in it without a question
  refusal: "", // why the server does not talk to this page
  running: {}, // id of a conversation -> AbortController
  view: "chat", // "chat", "compare", "tune"
  drawer: "", // "settings", "server"
  side: false, // on a phone: the list of conversations is shown
};
const listeners = new Set();

export const get = () => state;

export function set(patch) {
  const before = state;
  state = {...state, ...(typeof patch === "function" ? patch(state) : patch)};
  for (const listener of [...listeners]) listener(state, before);
}

/** Call `listener(now, before)` after each change; returns a function that ends it. */
export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** A part of the state; the component is drawn again when it changes. */
export function useStore(select) {
  const [, redraw] = useState(0), value = select(state);
  useEffect(() => {
    let last = value;
    const look = () => {
      const now = select(state);
      if (now === last) return;
      last = now;
      redraw(n => n + 1);
    };
    look(); // it may have changed before this effect
    return subscribe(look);
  });
  return value;
}

export const current = (from = state) => from.conversations.find(one => one.id === from.current) ?? null;

/** Replace a conversation by `change(conversation)`. */
export function update(id, change) {
  set(now => ({conversations: now.conversations.map(one => (one.id === id ? change(one) : one))}));
}

/** Settings of the conversation that is shown, or of the next one. */
export const settingsOf = (from = state) => current(from)?.settings ?? from.settings;

/** Change settings of the conversation that is shown; the next one begins with them. */
export function setSettings(patch) {
  const settings = {...settingsOf(), ...patch};
  set({settings});
  if (current()) update(state.current, one => ({...one, settings}));
}

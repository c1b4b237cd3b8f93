// The one state of the page: a value that components read, changes that replace it, and listeners.

/** @import {Conversation, Listener, Settings, State} from "../src/types.js" */
import {useEffect, useState} from "./vendor/preact.js";

export const /** @type {Settings} */ DEFAULTS = {
  system: "",
  sampling: {},
  stop: "",
  probabilities: false,
  alternatives: 5,
  thinking: "auto",
  effort: "",
  tools: [],
  serverTools: [],
  schema: null,
  lora: {},
};

export const TAG = `-${Math.random().toString(36).slice(2, 8)}`; // of this tab, in the ids of its messages

let /** @type {State} */ state = {
  ready: false,
  conversations: [],
  current: null,
  settings: DEFAULTS,
  presets: [],
  theme: "auto",
  enterSends: true,
  models: [],
  model: "",
  props: null,
  adapters: [],
  serverTools: [],
  allowed: {},
  refusal: "",
  unsaved: "",
  undo: null,
  running: {},
  view: "chat",
  drawer: "",
  side: false,
};

const listeners = /** @type {Set<Listener>} */ (new Set());

export const get = () => state;

export function set(/** @type {Partial<State> | ((now: State) => Partial<State>)} */ patch) {
  const before = state;
  state = {...state, ...(typeof patch === "function" ? patch(state) : patch)};
  for (const listener of [...listeners]) listener(state, before);
}

/** Call `listener(now, before)` after each change; returns a function that ends it. */
export function subscribe(/** @type {Listener} */ listener) {
  listeners.add(listener);
  return () => {
    listeners.delete(listener);
  };
}

/**
 * A part of the state; the component is drawn again when it changes.
 * @template T
 * @param {(state: State) => T} select
 * @returns {T}
 */
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
export function update(/** @type {string} */ id, /** @type {(conversation: Conversation) => Conversation} */ change) {
  set(now => ({conversations: now.conversations.map(one => (one.id === id ? change(one) : one))}));
}

/** Settings of the conversation that is shown, or of the next one. */
export const settingsOf = (from = state) => current(from)?.settings ?? from.settings;

/** Change settings of the conversation that is shown; the next one begins with them. */
export function setSettings(/** @type {Partial<Settings>} */ patch) {
  const settings = {...settingsOf(), ...patch}, shown = current();
  set({settings});
  if (shown) update(shown.id, one => ({...one, settings}));
}

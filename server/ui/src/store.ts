// The one state of the page: a value that components read, changes that replace it, and listeners.

import type {Adapter, ModelEntry, Props, ToolEntry} from "./bodies.js";
import type {Schema} from "./schema.js";
import type {Conversation} from "./tree.js";
import {useEffect, useState} from "./vendor/preact.js";

export interface Tool {
  name: string;
  description: string;
  parameters: Schema;
}

/** Settings of a conversation. */
export interface Settings {
  system: string;
  sampling: Record<string, number>; // names as in the API; what is not there is the server's default
  stop: string; // texts, one a line
  probabilities: boolean;
  alternatives: number;
  thinking: string; // "auto": as the template does it; "on", "off"
  effort: string;
  tools: Tool[];
  serverTools: string[]; // names
  schema: {on: boolean; value: Schema} | null; // of the answers
  lora: Record<number, number>; // id of an adapter -> scale
}

export const DEFAULTS: Settings = {
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

export interface State {
  ready: boolean; // what was saved has been read
  conversations: Conversation[]; // the newest first
  current: string | null; // id
  settings: Settings; // of the next conversation
  presets: {name: string; settings: Settings}[];
  theme: string; // "auto", "light", "dark"
  enterSends: boolean;
  models: ModelEntry[];
  model: string; // id of the chosen one
  props: Props | null; // of the chosen model
  adapters: Adapter[];
  serverTools: ToolEntry[]; // that the server runs
  allowed: Record<string, string[]>; // id of a conversation -> names of tools that run in it without a question
  refusal: string; // why the server does not talk to this page
  unsaved: string; // why what is on the page is not in the browser's storage
  undo: {text: string; act: () => void} | null; // of what was deleted last
  running: Record<string, AbortController>; // by the id of a conversation
  view: "chat" | "compare" | "tune";
  drawer: "" | "settings" | "server";
  side: boolean; // on a phone: the list of conversations is shown
}

let state: State = {
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
type Listener = (now: State, before: State) => void;
const listeners = new Set<Listener>();

export const get = () => state;

export function set(patch: Partial<State> | ((now: State) => Partial<State>)) {
  const before = state;
  state = {...state, ...(typeof patch === "function" ? patch(state) : patch)};
  for (const listener of [...listeners]) listener(state, before);
}

/** Call `listener(now, before)` after each change; returns a function that ends it. */
export function subscribe(listener: Listener) {
  listeners.add(listener);
  return () => {
    listeners.delete(listener);
  };
}

/** A part of the state; the component is drawn again when it changes. */
export function useStore<T>(select: (state: State) => T): T {
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
export function update(id: string, change: (conversation: Conversation) => Conversation) {
  set(now => ({conversations: now.conversations.map(one => (one.id === id ? change(one) : one))}));
}

/** Settings of the conversation that is shown, or of the next one. */
export const settingsOf = (from = state) => current(from)?.settings ?? from.settings;

/** Change settings of the conversation that is shown; the next one begins with them. */
export function setSettings(patch: Partial<Settings>) {
  const settings = {...settingsOf(), ...patch}, shown = current();
  set({settings});
  if (shown) update(shown.id, one => ({...one, settings}));
}

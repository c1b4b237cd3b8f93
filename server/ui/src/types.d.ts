// Types of the page's modules, by module.

import type {FieldKind} from "../web/schema.js";
import type {Kind} from "../web/tune_data.js";
import type {MarkedToken} from "../web/vendor/marked.js";
import type {ComponentChildren, VNode} from "../web/vendor/preact.js";
import type {Adapter, ChatChunk, Checkpoint, FileProgress, Job as JobRow, JobEvent, ModelEntry, NativeChunk, NativeCompletion, Props, SlotState, ToolEntry} from "./bodies.js";

// api.js

/** A part of a list of the server. */
export interface Listed<T> {
  data: T[];
}

/** A piece of a stream: of a chat, or of a completion. */
export type Piece = ChatChunk | NativeChunk | NativeCompletion;

/** A piece of a stream, and the bytes of the stream that have come with it. */
export interface Received {
  data: Piece;
  at: number;
}

// app.js

export interface GuardedProps {
  what: string;
  at?: string; // what is shown: another one may not fail
  children: ComponentChildren;
}

export interface LaterState {
  View?: () => VNode;
  told?: string;
}

// attachments.js

export interface Attached {
  images: string[]; // data URIs
  sounds: string[]; // data URIs
  files: TextFile[];
  errors: string[];
}

// chat.js

export interface TokensProps {
  groups: TokenGroup[];
  kind: TokenGroup["kind"];
  take: Take;
  label: string;
}

export interface AnswerProps {
  node: Answer;
  take?: Take; // tries another token; without it, tokens are not shown
}

export interface CallProps {
  call: Call;
  answer: (call: Call, text: string) => void;
  waits: boolean;
  conversation: Conversation;
  node: Answer;
}

export interface MessageProps {
  conversation: Conversation;
  node: Message;
  last: boolean;
  running: boolean;
}

export interface MessageState {
  editing?: boolean;
}

// compare.js

export interface Choice {
  model: string;
  adapter: string; // id; "none"; "": as the model's name says
  scale?: number;
}

export type Pair<T> = [T, T];

export interface SideProps {
  side: Choice;
  change: (side: Choice) => void;
  models: ModelEntry[];
  adapters: Adapter[];
  name: string;
}

// composer.js

export type Mode = Conversation["mode"];

// generate.js

export interface Followed {
  pieces: AsyncGenerator<Received>;
  answer: Answer;
  change: (answer: Answer) => void;
  name?: string; // of the stream, if it can be taken up again
  signal: AbortSignal;
}

export interface Utterance {
  text: string;
  images?: string[];
  sounds?: string[];
  files?: TextFile[];
  mode?: Conversation["mode"];
}

// live.js

export interface Look {
  metrics: Map<string, number> | null;
  slots: SlotState[] | null;
  samples: number[]; // tokens per second
  total: number;
  at: number;
}

// markdown.js

export interface MathRule {
  level: "block" | "inline";
  rule: RegExp;
  start: RegExp;
  display: boolean;
}

export interface Formula {
  type: `math${number}`;
  raw: string;
  math: string;
  display: boolean;
}

/** What the lexers below make. */
export type Token = MarkedToken | Formula;

/** A part of highlight.js's tree. */
export interface Scoped {
  scope?: string;
  children: (Scoped | string)[];
}

// models.js

export type Files = Record<string, FileProgress>;

// parts.js

/** An event of an element of this kind, as handlers in templates take it. */
export type On<Target extends HTMLElement = HTMLInputElement> = Event & {target: Target};

/** A labelled number; an empty field is null. */
export interface Limits {
  min?: number;
  max?: number;
  step?: number;
}

export interface NumberProps extends Limits {
  label: string;
  value?: number;
  change: (value: number | null) => void;
  note?: string;
}

export type Point = [x: number, y: number];

export interface ChartProps {
  lines: {name: string; points: Point[]}[];
  label: string;
  width?: number;
  height?: number;
  low?: number; // ends of the axes; by themselves those of the points
  high?: number;
  first?: number;
  last?: number;
}

// request.js

export type Part = {type: "text"; text: string} | {type: "image_url"; image_url: {url: string}}
  | {type: "input_audio"; input_audio: {data: string; format: string}};

/** A message of a chat request. */
export interface ChatMessage {
  role: "system" | "user" | "assistant" | "tool";
  content: string | Part[];
  reasoning_content?: string;
  tool_calls?: {id: string; type: "function"; function: {name: string; arguments: string}}[];
  tool_call_id?: string;
}

/** A request for an answer: /v1/chat/completions, or with `prompt` /completion. */
export interface RequestBody {
  model?: string;
  stop?: string[];
  response_format?: {type: "json_schema"; json_schema: {name: string; schema: Schema}};
  lora?: {id: number; scale: number}[];
  chat_template_kwargs?: {enable_thinking: boolean};
  reasoning_effort?: string;
  messages?: ChatMessage[];
  continue_final_message?: boolean;
  tools?: ({type: "function"; function: Tool} | Record<string, unknown>)[];
  logprobs?: boolean;
  top_logprobs?: number;
  prompt?: string;
  n_probs?: number;
}

export interface Asked {
  url: string;
  body: RequestBody;
}

export type Growing = Answer & {tokens: TokenGroup[]};

// saved.js

export interface Head extends Omit<Conversation, "nodes"> {
  version: number;
}

export interface MessageRow {
  conversation: string;
  id: string;
  version: number;
  node: Message;
}

/** A conversation as this tab has last read or written it. */
export interface Known {
  version: number;
  value: Conversation;
}

/** What a tab tells the others. */
export interface News {
  changed: string[];
  deleted: string[]; // conversations
}

// schema.js

/** A JSON schema, as far as the editor knows it; other keywords only as text. */
export interface Schema {
  type?: Exclude<FieldKind, "enum">;
  properties?: Record<string, Schema>;
  required?: string[];
  additionalProperties?: boolean;
  items?: Schema;
  enum?: unknown[];
  description?: string;
}

/** A field as the editor has it. */
export interface Field {
  name: string;
  kind: FieldKind;
  description: string;
  optional: boolean;
  values?: string[]; // of an enum
  fields?: Field[]; // of an object
  item?: Field; // of an array
}

export interface Edited {
  field: Field;
  change: (field: Field) => void;
}

// settings.js

export interface Shown {
  settings: Settings;
}

// shapes.js

export type Shape<T> = (value: unknown, at: string) => T;

export type Fields<T> = {[Name in keyof T]-?: Shape<T[Name]>};

// store.js

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

export type Listener = (now: State, before: State) => void;

// tokens.js

export type Take = (at: number, entry: Candidate) => void;

export interface Owner {
  group: TokenGroup;
  at: number; // its place in the answer
  take: Take;
}

// tools.js

export interface ToolCallProps {
  conversation: Conversation;
  node: Answer;
  call: Call;
  children: ComponentChildren;
}

// tree.js

export interface Base {
  id: string; // "m", a number, which grows along each branch, and a tag of the tab that made it
  parent: string | null;
  content: string;
  at?: number; // milliseconds of the clock
}

export interface TextFile {
  name: string;
  text: string;
}

export interface Question extends Base {
  role: "user";
  images?: string[]; // data URIs
  sounds?: string[]; // data URIs
  files?: TextFile[];
}

/** A token that may stand in a place of an answer. */
export interface Candidate {
  id: number;
  token: string; // "" where it is a part of a character
  bytes?: number[];
  logprob: number;
}

export interface Entry extends Candidate {
  top: Candidate[]; // the likeliest ones in its place
}

/** A text of an answer with its tokens: one, or several that are no text alone. */
export interface TokenGroup {
  kind: "thought" | "text";
  text: string;
  entries: Entry[];
  swapped?: boolean; // the reader has chosen it
}

export interface Call {
  id: string;
  name: string;
  text: string; // the arguments as JSON
}

export interface Timings {
  n: number;
  rate: number; // tokens a second
  prompt: number;
  cached: number;
}

export type Status = "running" | "done" | "length" | "stopped" | "failed";

export interface Answer extends Base {
  role: "assistant";
  model?: string;
  status?: Status;
  error?: string;
  thought?: string;
  calls?: Call[];
  tokens?: TokenGroup[];
  shown?: "text" | "tokens";
  timings?: Timings;
  stream?: {id: string; at: number}; // on the server, while the answer comes: its name, and the bytes that are in the answer
}

export interface Result extends Base {
  role: "tool";
  callId: string;
  name: string;
}

export type Message = Question | Answer | Result;

export type Placeless<M> = M extends Message ? Omit<M, "id" | "parent"> : never;

export interface Conversation {
  id: string;
  title: string; // "": the first message is one
  at: number;
  mode: "chat" | "text"; // text: raw completions
  settings: Settings;
  nodes: Record<string, Message>;
  leaf: string | null; // the last message that is shown
}

// tune.js

export interface MethodProps {
  method: Method;
  setMethod: (method: Method) => void;
  grader: string;
  setGrader: (text: string) => void;
  item?: Json;
}

export interface HyperProps {
  method: Method;
  asked: Values;
  change: (name: string, value: number | null) => void;
  auto: (Values & {steps: number}) | null;
  full: boolean;
  setFull: (full: boolean) => void;
}

export type Action = "pause" | "resume" | "cancel";

/** A job with what the server knows of it. */
export interface Details {
  row: JobRow;
  events: JobEvent[];
  checkpoints: Checkpoint[];
}

// tune_data.js

export type Json = Record<string, unknown>;

export type Said = string | {role: string; content?: unknown}[]; // a text, or messages

/** A row that nothing is wrong with. */
export interface Row {
  row: Json;
  text: string;
  kind: Kind;
  longest: number; // characters of its longest part
}

export interface Fault {
  line: number; // 0: of the file
  text: string;
}

/** What is known of a file. */
export interface Checked {
  rows: Row[];
  errors: Fault[];
  notes: string[];
}

/** Hyperparameters by name. */
export type Values = Record<string, number>;

export type Metrics = Partial<Record<string, number>> & {step: number}; // of a step

// tune_method.js

export type Method = "supervised" | "dpo" | "orpo" | "simpo" | "kto" | "reinforcement";

export type Parameter = [name: string, label: string, limits: Limits, fixed?: number | string];

export type Grading = Record<string, unknown>;

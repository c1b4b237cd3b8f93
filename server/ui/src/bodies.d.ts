// Answers of the server. Generated from its types by scripts/page-types.

/** A LoRA adapter, and the scale that it has where a request names none. */
export interface Adapter {
  id: number;
  path: string;
  scale: number;
  task_name: string;
  prompt_prefix: string;
  model?: string; // its name as a fine-tuned model
}

/** The scale of a LoRA adapter. */
export interface AdapterScale {
  id: number;
  scale: number;
}

/** The model's answer. */
export interface AnswerMessage {
  role?: "assistant";
  content: string | null;
  reasoning_content?: string; // the reasoning before the answer
  function_call?: FunctionCall; // of requests with `functions`
  tool_calls?: ToolCall[];
}

/** One result of /v1/chat/completions. */
export interface ChatChoice {
  finish_reason: "function_call" | "length" | "stop" | "tool_calls";
  index: number;
  message: AnswerMessage;
  stop_reason?: number | string | null; // the token of stop_token_ids or the text that ended it
  token_ids?: number[]; // with return_token_ids
  logprobs?: ChatLogprobs; // with logprobs
}

/** An event of a stream of /v1/chat/completions. */
export interface ChatChunk {
  choices: ChatDelta[];
  created: number; // Unix time in seconds
  id: string;
  model: string;
  system_fingerprint: string; // the server's build
  object?: "chat.completion.chunk";
  usage?: Usage; // of a stream: in the last chunk, with stream_options.include_usage
  prompt_progress?: ProgressObject; // with return_progress, during the prefill
  timings?: TimingsObject; // in the last chunk; in all with timings_per_token
  __verbose?: NativeCompletion; // with verbose: as /completion would answer
  prompt_logprobs?: (Record<string, RankedLogprob> | null)[]; // of each prompt token, by ids; of the first null
  prompt_token_ids?: number[]; // with return_token_ids
}

/** Answer of /v1/chat/completions. */
export interface ChatCompletion {
  choices: ChatChoice[];
  created: number; // Unix time in seconds
  id: string;
  model: string;
  system_fingerprint: string; // the server's build
  object?: "chat.completion";
  usage: Usage;
  prompt_progress?: ProgressObject; // with return_progress, during the prefill
  timings: TimingsObject;
  __verbose?: NativeCompletion; // with verbose: as /completion would answer
  prompt_logprobs?: (Record<string, RankedLogprob> | null)[]; // of each prompt token, by ids; of the first null
  prompt_token_ids?: number[]; // with return_token_ids
}

/** A result's part of a chunk of /v1/chat/completions. */
export interface ChatDelta {
  finish_reason: "function_call" | "length" | "stop" | "tool_calls" | null; // null: it goes on
  index: number;
  delta: MessageDelta;
  logprobs?: ChatLogprobs; // with logprobs
  stop_reason?: number | string | null; // the token of stop_token_ids or the text that ended it
  token_ids?: number[]; // with return_token_ids: since the last chunk
}

/** Log-probabilities of a chat's answer. */
export interface ChatLogprobs {
  content: TokenLogprob[];
}

/** A checkpoint of a job. */
export interface Checkpoint {
  id: string;
  object: "fine_tuning.job.checkpoint";
  created_at: number; // Unix time in seconds
  fine_tuned_model_checkpoint: string; // the name of a model
  fine_tuning_job_id: string;
  step_number: number;
  metrics: Record<string, unknown>;
}

/** Tokens of the client's draft (`prediction`). */
export interface CompletionTokensDetails {
  accepted_prediction_tokens: number;
  rejected_prediction_tokens: number;
}

/** A custom tool that the model calls. */
export interface CustomCall {
  name: string;
  input: string; // a text in the tool's format
}

/** More of a custom tool's call. */
export interface CustomDelta {
  name?: string; // in the call's first delta
  input?: string; // the next piece of the text
}

/** Settings of a request that names none. */
export interface DefaultSettings {
  params: GenerationSettings;
  n_ctx: number; // tokens of a slot
}

/** An error of OpenAI's and llama-server's endpoints. */
export interface Error {
  error: ErrorDetail;
}

/** The reason, and the sizes of a prompt that does not fit. */
export interface ErrorDetail {
  code: number; // the HTTP status
  message: string; // one line that names the field
  type: string;
  param?: string; // the field that names no model
  n_prompt_tokens?: number; // of a prompt that is too long
  n_ctx?: number; // tokens that a request may have
}

/** An uploaded file. */
export interface File {
  id: string;
  object: "file";
  bytes: number;
  created_at: number; // Unix time in seconds
  expires_at: number | null; // null: never
  filename: string;
  purpose: string;
  status: string;
  status_details: string | null;
}

/** Bytes of a file that is being downloaded. */
export interface FileProgress {
  done: number;
  total: number;
}

/** A function that the model calls. */
export interface FunctionCall {
  name: string;
  arguments: string; // JSON
}

/** More of a function call. */
export interface FunctionDelta {
  name?: string; // in the call's first delta
  arguments?: string; // the next piece of the JSON
}

/** The request's fields, with every default filled in. */
export interface GenerationSettings {
  seed?: number;
  temperature?: number;
  dynatemp_range?: number;
  dynatemp_exponent?: number;
  top_k?: number;
  top_p?: number;
  min_p?: number;
  top_n_sigma?: number;
  typical_p?: number;
  xtc_probability?: number;
  xtc_threshold?: number;
  repeat_last_n?: number;
  repeat_penalty?: number;
  presence_penalty?: number;
  frequency_penalty?: number;
  dry_multiplier?: number;
  dry_base?: number;
  dry_allowed_length?: number;
  dry_penalty_last_n?: number;
  dry_sequence_breakers?: string[];
  mirostat?: number;
  mirostat_tau?: number;
  mirostat_eta?: number;
  adaptive_target?: number;
  adaptive_decay?: number;
  min_keep?: number;
  min_tokens: number;
  stop_token_ids: number[];
  include_stop_str_in_output: boolean;
  stop: string[];
  max_tokens: number;
  n_predict: number;
  n_keep: number;
  n_discard: number;
  n_cache_reuse: number;
  ignore_eos: boolean;
  stream?: boolean;
  logit_bias: LogitBias[];
  n_probs: number;
  grammar: string; // its text, also of a JSON schema
  grammar_lazy: boolean; // the grammar holds from a trigger on
  grammar_triggers: Record<string, unknown>[];
  preserved_tokens: number[]; // special tokens that are shown
  chat_format?: string; // how the model writes tool calls
  reasoning_format?: string;
  reasoning_in_content?: boolean;
  samplers: string[];
  "speculative.type": string; // drafts' sources, or none
  "speculative.n_max": number | null;
  "speculative.n_min": number;
  "speculative.p_min": number;
  timings_per_token?: boolean;
  post_sampling_probs: boolean;
  backend_sampling?: boolean; // accepted: sampling is on the device in any case
  lora: AdapterScale[];
}

/** The reward of an answer. */
export interface Graded {
  reward: number;
  sub_rewards: Record<string, number>; // those of a multi grader's own
  metadata: GraderMetadata;
  model_grader_token_usage_per_model: Record<string, number>;
}

/** Faults of a grading; with one, the reward is 0. */
export interface GraderErrors {
  formula_parse_error?: boolean;
  sample_parse_error?: boolean;
  truncated_observation_error?: boolean;
  unresponsive_reward_error?: boolean;
  invalid_variable_error?: boolean;
  other_error?: boolean;
  python_grader_server_error?: boolean;
  python_grader_server_error_type?: string | null;
  python_grader_runtime_error?: boolean;
  python_grader_runtime_error_details?: string | null;
  model_grader_server_error?: boolean;
  model_grader_refusal_error?: boolean;
  model_grader_parse_error?: boolean;
  model_grader_server_error_details?: string | null;
  details?: string | null; // the fault in words; null: there is none
}

/** Origin of a reward. */
export interface GraderMetadata {
  name: string;
  type: string;
  errors: GraderErrors;
  execution_time: number; // seconds
  scores: Record<string, number>; // rewards by grader
  token_usage: number | null; // tokens of the models that were asked; null: none was
  sampled_model_name: string | null;
}

/** A fine-tuning job. */
export interface Job {
  id: string;
  object: "fine_tuning.job";
  created_at: number; // Unix time in seconds
  finished_at: number | null; // Unix time in seconds; null: not yet
  started_at: number | null; // Unix time in seconds; null: not yet
  estimated_finish: number | null;
  model: string; // the model to train further
  fine_tuned_model: string | null; // its name; null: there is none yet
  organization_id: string;
  status: "cancelled" | "failed" | "paused" | "queued" | "running" | "succeeded" | "validating_files";
  training_file: string;
  validation_file: string | null;
  result_files: string[];
  hyperparameters: Record<string, unknown>;
  method: Record<string, unknown>;
  metadata: Record<string, unknown> | null;
  integrations: unknown[];
  seed: number;
  trained_tokens: number | null; // so far
  user_provided_suffix: string | null;
  error: Record<string, unknown> | null;
}

/** An event of a job: a message, or the metrics of a step. */
export interface JobEvent {
  id: string;
  object: "fine_tuning.job.event";
  created_at: number; // Unix time in seconds
  level: string;
  message: string;
  type: "message" | "metrics";
  data: Record<string, unknown>;
}

/** A bias on a token's logit; null: -∞, the token never comes. */
export interface LogitBias {
  bias: number | null;
  token: number;
}

/** More of the message. */
export interface MessageDelta {
  role?: "assistant"; // in the first chunk
  content?: string | null;
  reasoning_content?: string;
  function_call?: FunctionDelta;
  tool_calls?: ToolCallDelta[];
}

/** Inputs that the model reads beside text. */
export interface Modalities {
  vision: boolean;
  audio?: boolean;
}

/** Kinds of inputs and outputs. */
export interface Modality {
  input_modalities: string[];
  output_modalities?: string[];
}

/** A model, or a finetune of one. */
export interface ModelEntry {
  id: string;
  aliases: string[];
  tags: string[];
  object?: "model";
  created: number; // Unix time in seconds: the server's start
  owned_by?: "logitless";
  path?: string; // of a router's model, for the admin key
  status?: ModelStatus; // of a router's model
  architecture: Modality;
  source?: string; // of a router's model: preset, models_dir or cache
  can_remove?: boolean; // of a router's model
  meta?: ModelMeta; // of a loaded model
  root?: string; // of a finetune: its base model
  parent?: string; // of a finetune: its base model
  progress?: Record<string, FileProgress>; // of a download, by file
}

/** Sizes of a model. */
export interface ModelMeta {
  vocab_type: number;
  n_vocab: number;
  n_ctx_train: number; // tokens of the context in training
  n_embd: number;
  n_params: number;
  size: number; // bytes of the weights
}

/** State of a router's model. */
export interface ModelStatus {
  value: string; // unloaded, loading, loaded or downloading
  args: string[]; // flags of its server, for the admin key
  preset?: string; // for the admin key
  failed?: true; // its server has failed
  exit_code?: number | null;
  error?: string; // the reason
}

/** Answer of /v1/models: llama-server's list and OpenAI's. */
export interface Models {
  models: NativeModel[];
  object?: "list";
  data: ModelEntry[];
}

/** An event of a stream of /completion; the last one is a NativeCompletion. */
export interface NativeChunk {
  index: number; // of the result
  content: string;
  tokens: number[];
  stop: false;
  id_slot: number;
  tokens_predicted: number; // so far
  tokens_evaluated: number; // tokens of the prompt
  completion_probabilities?: TokenLogprob[];
  prompt_progress?: ProgressObject; // with return_progress
  timings?: TimingsObject; // with timings_per_token
}

/** One result of /completion; with `response_fields` only those. */
export interface NativeCompletion {
  index: number;
  content: string; // the generated text; empty at the end of a stream
  tokens: number[]; // with return_tokens: the generated ids
  id_slot: number;
  stop?: true;
  model: string;
  tokens_predicted: number; // tokens generated
  tokens_evaluated: number; // tokens of the prompt
  generation_settings: GenerationSettings;
  prompt: string; // as it was tokenized
  has_new_line: boolean; // the text has a line break
  truncated: boolean; // the context was full
  stop_type: "eos" | "limit" | "none" | "word"; // why it ended
  stopping_word: string; // the stop string that ended it
  tokens_cached: number; // tokens of the sequence in the KV cache
  prompt_logprobs?: (Record<string, RankedLogprob> | null)[]; // of each prompt token, by ids; of the first null
  prompt_token_ids?: number[]; // with return_token_ids
  timings: TimingsObject;
  completion_probabilities?: TokenLogprob[]; // with n_probs
}

/** `details` of llama-server's list. */
export interface NativeDetails {
  parent_model?: string;
  family?: string;
  parameter_size?: string;
  quantization_level?: string;
  format?: string;
  families?: string[];
}

/** A model in llama-server's list. */
export interface NativeModel {
  name: string;
  model: string;
  type?: "model";
  capabilities?: string[];
  modified_at?: string;
  size?: string;
  digest?: string;
  description?: string;
  parameters?: string;
  tags?: string[];
  details?: NativeDetails;
}

/** Progress of a slot's generation. */
export interface NextToken {
  has_next_token: boolean;
  has_new_line: boolean;
  n_remain: number; // tokens that the request still allows; -1: no limit
  n_decoded: number; // tokens generated
}

/** Progress of the prefill, in tokens. */
export interface ProgressObject {
  total: number;
  cache: number; // found in the KV cache
  processed: number; // in the KV cache now
  time_ms: number;
}

/** Prompt tokens and the KV cache. */
export interface PromptTokensDetails {
  cached_tokens: number; // found in the KV cache
  cache_write_tokens: number; // computed, and kept in the KV cache
}

/** Properties of the server and its model. */
export interface Props {
  default_generation_settings: DefaultSettings;
  total_slots: number;
  model_alias: string;
  model_path: string;
  model_ftype: string; // how the weights are quantized
  modalities: Modalities;
  media_marker: string; // stands for an image in a prompt
  endpoint_slots: boolean;
  endpoint_props: boolean;
  endpoint_metrics: boolean;
  endpoint_tools?: boolean; // the server runs tools: GET /tools
  ui: boolean;
  webui: boolean;
  ui_settings?: Record<string, unknown>; // defaults of pages: --ui-config
  webui_settings?: Record<string, unknown>;
  chat_template: string;
  chat_template_caps: Record<string, unknown>;
  bos_token: string;
  eos_token: string;
  build_info: string;
  is_sleeping: boolean;
}

/** A token's log-probability in vLLM's form. */
export interface RankedLogprob {
  logprob: number;
  rank: number | null; // from 1; null: none of the likeliest
  decoded_token: string;
}

/** A slot; of another key's request only the first four fields are shown. */
export interface SlotState {
  id: number;
  n_ctx: number;
  speculative: boolean;
  is_processing: boolean;
  id_task?: number;
  n_prompt_tokens?: number;
  n_prompt_tokens_processed?: number;
  n_prompt_tokens_cache?: number;
  params?: GenerationSettings;
  next_token?: NextToken[];
  prompt?: string; // of servers with --verbose
}

/** State of a stream that can be read again. */
export interface StreamState {
  conversation_id: string;
  is_done: boolean;
  total_bytes: number;
  started_at: number; // Unix time in seconds
  completed_at: number; // 0: it goes on
}

/** One result of /v1/completions. */
export interface TextChoice {
  text: string;
  index: number;
  logprobs: TextLogprobs | null;
  finish_reason: "function_call" | "length" | "stop" | "tool_calls";
  stop_reason?: number | string | null; // the token of stop_token_ids or the text that ended it
  token_ids?: number[]; // with return_token_ids
  prompt_logprobs?: (Record<string, RankedLogprob> | null)[]; // of each prompt token, by ids; of the first null
  prompt_token_ids?: number[]; // with return_token_ids
}

/** Answer of /v1/completions. */
export interface TextCompletion {
  choices: TextChoice[];
  created: number; // Unix time in seconds
  id: string;
  model: string;
  system_fingerprint: string; // the server's build
  object?: "text_completion";
  usage: Usage;
  prompt_progress?: ProgressObject; // with return_progress, during the prefill
  timings: TimingsObject;
  __verbose?: NativeCompletion; // with verbose: as /completion would answer
  prompt_logprobs?: (Record<string, RankedLogprob> | null)[]; // of each prompt token, by ids; of the first null
  prompt_token_ids?: number[]; // with return_token_ids
}

/** Log-probabilities of a text's tokens, as arrays of one length. */
export interface TextLogprobs {
  tokens: string[];
  token_logprobs: (number | null)[]; // null: the first token of a prompt
  top_logprobs: (Record<string, number> | null)[]; // the likeliest tokens and the chosen one
  text_offset: number[]; // characters before the token
}

/** Times of one generation. */
export interface TimingsObject {
  cache_n: number; // prompt tokens found in the KV cache
  prompt_n: number; // prompt tokens computed
  prompt_ms: number; // milliseconds of the prefill
  prompt_per_token_ms: number;
  prompt_per_second: number; // tokens
  predicted_n: number; // tokens generated
  predicted_ms: number; // milliseconds of all decode steps
  predicted_per_token_ms: number;
  predicted_per_second: number; // tokens; the first costs no decode step and does not count
  draft_n?: number; // draft tokens verified
  draft_n_accepted?: number; // draft tokens accepted
}

/** Answer of /tokenize. */
export interface TokenIds {
  tokens: number[];
}

/** A token's probability. With post_sampling_probs it is `prob`, else `logprob`, its natural logarithm. */
export interface TokenLogprob {
  id: number;
  token: string; // its text, as far as it is whole characters
  bytes: number[]; // its UTF-8
  logprob?: number;
  prob?: number;
  top_logprobs?: TokenLogprob[]; // the likeliest tokens in its place
  top_probs?: TokenLogprob[]; // the likeliest tokens in its place
}

/** Result of a call: a text, other members, or an error of the tool. */
export interface ToolAnswer {
  plain_text_response?: string; // the text for the model
  error?: string; // why the call failed
}

/** A call of a tool. */
export interface ToolCall {
  id: string;
  type: "custom" | "function";
  function?: FunctionCall;
  custom?: CustomCall;
}

/** More of a call of a tool. */
export interface ToolCallDelta {
  index: number; // of the call
  id?: string; // in the call's first delta
  type?: "custom" | "function"; // in the call's first delta
  function?: FunctionDelta;
  custom?: CustomDelta;
}

/** A tool that the server runs. */
export interface ToolEntry {
  display_name: string;
  tool: string; // its name for POST /tools
  type: "mcp" | "server";
  permissions: ToolPermissions;
  uses_cwd?: boolean;
  definition: Record<string, unknown>; // the tool as chat requests have it
}

/** Permissions of a tool. */
export interface ToolPermissions {
  write: boolean; // it may change something
}

/** Token counts; a prompt with several results counts once. */
export interface Usage {
  completion_tokens: number;
  prompt_tokens: number;
  total_tokens: number;
  prompt_tokens_details: PromptTokensDetails;
  completion_tokens_details?: CompletionTokensDetails; // of requests with a draft
}

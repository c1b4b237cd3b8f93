"""Flag tables of each command. Names, defaults and variables are llama-server's where the concept is."""

from __future__ import annotations

from logitless import hooks
from logitless.cli.flags.compatible import COMPATIBLE, PRESETS
from logitless.cli.flags.flags import Flag, Group
from logitless.cli.flags.model_options import DOWNLOADS, MMPROJ_URL, MODEL, ROUTER, Repo
from logitless.engine.loading.options import OPTIONS
from logitless.engine.loading.values import (
    address,
    choice,
    cpu_mask,
    cpu_range,
    file_name,
    folder_name,
    json_object,
    key,
    keys,
    names_of_http,
    not_empty,
    number,
    several,
    text,
    whole,
    wholes,
    words,
)
from logitless.engine.sampling.params import DEFAULT_SAMPLERS, INT_MAX, Param, SamplerParams, params_of

PROCESSOR = Group("Processor", (
    Flag("-C --cpu-mask", "run on these processors only, a hexadecimal mask", cpu_mask, None, "MASK"),
    Flag("-Cr --cpu-range", "run on these processors only; together with --cpu-mask on all of both", cpu_range, None,
         "LO-HI"),
    Flag("-lm --load-mode", "mlock, mmap+mlock: keep the model in memory, where the system allows it; the others "
         "change nothing", choice("auto", "none", "mmap", "mlock", "mmap+mlock", "dio"), "auto", "MODE",
         env="LLAMA_ARG_LOAD_MODE"),
    Flag("--mlock", "the same as --load-mode mlock", env="LLAMA_ARG_MLOCK", means="--load-mode mlock"),
    Flag("--numa", "isolate: run on the processors of one NUMA node, that of the start; numactl: on those that numactl "
         "gives; distribute: on all, where there is one node", choice("distribute", "isolate", "numactl"), None, "WORD",
         env="LLAMA_ARG_NUMA"),
    Flag("--poll", "how long idle threads look for work before they sleep: 0 not at all, 50 about 0.15 ms, 100 twice "
         "that", whole(0, 100), 50),
    Flag("--prio", "priority of the process: -1 low, 0 normal, 1 medium, 2 high, 3 highest", whole(-1, 3), 0),
))  # fmt: skip
VERBOSE = Flag("-v --verbose --log-verbose", "log more detail", env="LLAMA_ARG_LOG_VERBOSE", common=True)
LOG = (
    VERBOSE,
    Flag("--log-file", "append the log to this file, too", file_name, None, "FILE",
         env="LLAMA_ARG_LOG_FILE LLAMA_LOG_FILE", common=True),
    Flag("--log-format", "form of the log: text, or json, a line each", choice("text", "json"), "text", "FORMAT"),
    Flag("--log-jsonl", "log lines of JSON to the standard output", default=False, env="LLAMA_ARG_LOG_JSONL",
         off="--no-log-jsonl"),
    Flag("-lv --verbosity --log-verbosity", "most detailed lines of the log: 0: none, 1: errors, 2: warnings, 3: "
         "information, 4 and more: all (-v)", whole(0), 3, env="LLAMA_ARG_LOG_VERBOSITY LLAMA_LOG_VERBOSITY"),
    Flag("--log-timestamps", "begin lines of the log with the time", default=True,
         env="LLAMA_ARG_LOG_TIMESTAMPS LLAMA_LOG_TIMESTAMPS", off="--no-log-timestamps"),
    Flag("--log-prefix", "say level and source in lines of the log", default=True,
         env="LLAMA_ARG_LOG_PREFIX LLAMA_LOG_PREFIX", off="--no-log-prefix"),
    Flag("--log-colors", "colour the level in lines of the log; auto: on a terminal", choice("on", "off", "auto"),
         "auto", "WHEN", env="LLAMA_ARG_LOG_COLORS LLAMA_LOG_COLORS", optional=("on", "off", "auto")),
    Flag("--log-prompts-dir", "write each request's prompts to a file in this folder, which is made; they are logged "
         "nowhere else", folder_name, "", "FOLDER"),
    Flag("--log-disable", "log nothing"),
)  # fmt: skip
HELP = Flag("-h --help --usage", "show this and leave", common=True)
HELP_ALL = Flag("--help-all", "show all flags and leave", common=True)
VERSION = Flag("--version", "show the version and leave", common=True)
GENERAL = (HELP, VERSION)
LONG = (HELP, HELP_ALL, VERSION)  # of commands with a first page
JSON = Flag("--json", "print JSON instead of text", common=True)


def model_flags(names: str) -> tuple[Flag, ...]:
    """The flags of model options (engine/loading/options.py)."""
    return tuple(Flag(**vars(OPTIONS[name])) for name in names.split())


DEVICE, THREADS = model_flags("device threads")
PLACEMENT = model_flags(
    "rpc gpu_layers split_mode tensor_split main_gpu kv_offload override_tensor cpu_moe n_cpu_moe moe_cache_mib "
    "n_cpu_ffn",
)
PLACE = Group("Device", (DEVICE, THREADS, *model_flags("threads_batch"), *PLACEMENT))
CONTEXT = Group(
    "Context and batches",
    model_flags(
        "ctx_size parallel kv_unified kv_unified_per_slot fit fit_ctx fit_target batch_size ubatch_size "
        "cache_type_k cache_type_v",
    ),
)
CACHE = Group("Cache", (
    *model_flags("cache_ram cache_disk cache_disk_size ctx_checkpoints swa_full cache_idle_slots "
                 "context_shift cache_reuse"),
    Flag("--slot-save-path", "the folder that POST /slots/{id}?action=save and restore use", folder_name, "", "FOLDER",
         env="LLAMA_ARG_SLOT_SAVE_PATH"),
))  # fmt: skip
PROJECTOR = (
    *model_flags("mmproj"),
    MMPROJ_URL,
    *model_flags("mmproj_auto mmproj_offload mmproj_device image_min_tokens image_max_tokens"),
)
MEDIA = Group("Images and audio", (
    *PROJECTOR,
    Flag("--media-urls", "fetch images and audio of requests that name http:// and https:// addresses, public ones "
         "only", env="LOGITLESS_MEDIA_URLS"),
    Flag("--media-path", "folder below which requests may name such files by file://", folder_name, "", "FOLDER"),
    Flag("--audio-max-seconds", "seconds of the sounds of one request together", whole(1, 86_400), 600,
         env="LOGITLESS_AUDIO_MAX_SECONDS"),
))  # fmt: skip
MODEL_KEYS = Group(
    "Overrides of the model file's metadata (0: the file's value)",
    (
        *model_flags("override_kv rope_scaling rope_scale rope_freq_scale rope_freq_base yarn_orig_ctx"),
        *model_flags("yarn_beta_fast yarn_beta_slow"),
    ),
)
SPECULATION = Group("Speculative decoding (same texts, fewer steps; a request may choose with speculative.type)", (
    *model_flags("spec_type spec_learn spec_default model_draft"),
    Flag("-hfd -hfrd --hf-repo-draft --spec-draft-hf", "a draft model of Hugging Face's hub: USER/REPO:QUANT",
         Repo.parse, metavar="REPO", env="LLAMA_ARG_SPEC_DRAFT_HF_REPO"),
    *model_flags("device_draft spec_draft_n_max spec_draft_adapt spec_draft_n_min spec_draft_p_min"),
    *model_flags("cache_type_k_draft cache_type_v_draft gpu_layers_draft"),
    *model_flags("override_tensor_draft cpu_moe_draft n_cpu_moe_draft"),
    *model_flags("spec_ngram_simple_size_n spec_ngram_simple_size_m spec_ngram_simple_min_hits"),
    *model_flags("spec_ngram_map_k_size_n spec_ngram_map_k_size_m spec_ngram_map_k_min_hits"),
    *model_flags("spec_ngram_map_k4v_size_n spec_ngram_map_k4v_size_m spec_ngram_map_k4v_min_hits"),
    *model_flags("spec_ngram_mod_n_match spec_ngram_mod_n_min spec_ngram_mod_n_max"),
))  # fmt: skip
_KINDS = {"seed": whole(0, 2**32 - 1, or_minus_one="random"), "mirostat": whole(0, 2)}


def _sampler_flag(name: str, kind: type, param: Param) -> Flag:
    """The flag that sets a sampler's default (engine/sampling/params.py)."""
    low, high = (param.low, param.high) if param.hard else (-INT_MAX, INT_MAX)
    read = whole(int(low), int(high)) if kind is int else number(low, high) if param.hard else number()
    default = getattr(SamplerParams(), name)
    return Flag(
        param.flag,
        param.doc,
        _KINDS.get(name, read),
        default,
        "N" if kind is int else "X",
        env=param.env,
        common=param.common,
    )


SAMPLERS = {n: _sampler_flag(n, kind, param) for n, (kind, param) in params_of(SamplerParams).items() if param.flag}
SAMPLING = Group("Sampling defaults (a request's own fields come first, those of the model's file last)", (
    Flag("--samplers", "which samplers run, in order, separated by ';'; known are these, adaptive_p and infill", text,
         ";".join(DEFAULT_SAMPLERS), "NAMES"),
    Flag("--sampler-seq --sampling-seq", "the same as one letter each, such as edskypmxt", text, None, "LETTERS"),
    *SAMPLERS.values(),
    Flag("--dry-sequence-breaker", "DRY: a text that ends a repetition; 'none': no text does; may be given again", text,
         None, "TEXT", many=True),
    Flag("-e --escape", "read \\n, \\r, \\t, \\', \\\", \\\\ and \\xHH in texts of this command line: "
         "--reverse-prompt, --dry-sequence-breaker, and the --prompt of generate", default=True, off="--no-escape"),
    Flag("--grammar", "a GBNF grammar for requests that bring no constraint of their own", text, None, "GRAMMAR"),
    Flag("--grammar-file", "the same from a file", file_name, None, "FILE"),
    Flag("-j --json-schema", "a JSON schema for requests that bring no constraint of their own", not_empty, None,
         "SCHEMA"),
    Flag("-jf --json-schema-file", "the same from a file", file_name, None, "FILE"),
    Flag("-l --logit-bias", "such as 15043+1 or 15043-inf; may be given again", text, None, "ID±X", many=True),
    Flag("--ignore-eos", "go on after end tokens"),
    Flag("-bs --backend-sampling", "sample on the device; it always does here", default=True,
         env="LLAMA_ARG_BACKEND_SAMPLING", off="--no-backend-sampling"),
))  # fmt: skip

SERVING = Group("Server", (
    Flag("--host", "addresses to listen on: names, IPv4, IPv6, paths of Unix sockets (*.sock); a list", address,
         "127.0.0.1", "ADDRESS", env="LLAMA_ARG_HOST", common=True),
    Flag("--port", "port to listen on; 0: any free one", whole(0, 65535), 8080, env="LLAMA_ARG_PORT", common=True),
    Flag("--api-prefix", "path in front of every endpoint", text, "", "PATH", env="LLAMA_ARG_API_PREFIX"),
    Flag("--api-key", "keys to ask for, separated by commas", keys, None, "KEYS", env="LLAMA_API_KEY", many=True,
         common=True),
    Flag("--api-key-file", "a file of keys, one a line; # begins a comment; read again when it changes", file_name,
         None, "FILE", env="LLAMA_ARG_API_KEY_FILE"),
    Flag("--cache-isolation", "whether keys share no cached prefixes and slots: on, off, auto (with several keys)",
         choice("on", "off", "auto"), "auto", "MODE", env="LOGITLESS_CACHE_ISOLATION"),
    Flag("--cache-shared", "values of cache_salt that all keys share, separated by commas", words, None, "NAMES",
         env="LOGITLESS_CACHE_SHARED", many=True),
    Flag("--ssl-key-file", "private key of HTTPS, PEM", file_name, None, "FILE", env="LLAMA_ARG_SSL_KEY_FILE",
         common=True),
    Flag("--ssl-cert-file", "its certificate chain, PEM", file_name, None, "FILE", env="LLAMA_ARG_SSL_CERT_FILE",
         common=True),
    Flag("--reuse-port", "let several servers listen on the port", env="LLAMA_ARG_REUSE_PORT"),
    Flag("--max-request-size", "most MiB of a request's body; larger ones get 413", whole(1, 2**20), 64, "MIB"),
    Flag("--cors-origins", "origins of pages that may call: *, localhost, or a list with patterns (app://*, "
         "http://localhost:*); default: any with keys or from other machines, else the server's own page and desktop "
         "apps", text, "", "LIST", env="LLAMA_ARG_CORS_ORIGINS"),
    Flag("--cors-methods", "methods that pages of these origins may use", names_of_http,
         ["GET", "POST", "DELETE", "OPTIONS"], "LIST", env="LLAMA_ARG_CORS_METHODS"),
    Flag("--cors-headers", "headers that they may send; *: those that a browser asks for", names_of_http, ["*"], "LIST",
         env="LLAMA_ARG_CORS_HEADERS"),
    Flag("--cors-credentials", "let them send credentials", default=True, env="LLAMA_ARG_CORS_CREDENTIALS",
         off="--no-cors-credentials"),
    Flag("--allowed-hosts", "names of a server without keys beside localhost, such as a reverse proxy's; *: any (DNS "
         "rebinding)", words, None, "NAMES", env="LOGITLESS_ALLOWED_HOSTS", many=True),
    Flag("--threads-http", "threads that read requests and prepare them: templates, tokens, images; -1: automatic",
         whole(0, 256, or_minus_one="automatic"), -1, env="LLAMA_ARG_THREADS_HTTP"),
    Flag("-to --timeout", "seconds to wait for a client", whole(1), 3600, env="LLAMA_ARG_TIMEOUT"),
    *model_flags("sleep_idle_seconds warmup cont_batching"),
    *model_flags("kv_events_endpoint kv_events_replay_endpoint kv_events_topic"),
    Flag("-a --alias", "names of the model, separated by commas", words, None, "NAMES", env="LLAMA_ARG_ALIAS",
         many=True, common=True),
    Flag("--tags", "tags of the model, separated by commas", words, None, "TAGS", env="LLAMA_ARG_TAGS", many=True),
    Flag("--metrics", "serve /metrics", env="LLAMA_ARG_ENDPOINT_METRICS", common=True),
    Flag("--slots", "serve /slots", default=True, env="LLAMA_ARG_ENDPOINT_SLOTS", off="--no-slots"),
    Flag("--props", "allow POST /props", env="LLAMA_ARG_ENDPOINT_PROPS"),
    Flag("--special -sp", "show special tokens as text too"),
    Flag("--spm-infill", "POST /infill: suffix, prefix, middle, which some models prefer"),
    Flag("--path", "serve the files of a folder in the place of the page (they need no key)", folder_name,
         metavar="FOLDER", env="LLAMA_ARG_STATIC_PATH"),
    Flag("--ui --webui", "serve the page at /", default=True, env="LLAMA_ARG_UI", off="--no-ui --no-webui"),
    Flag("--ui-config --webui-config", "settings of pages, a JSON object, which GET /props tells as ui_settings",
         json_object, None, "JSON", env="LLAMA_ARG_UI_CONFIG"),
    Flag("--ui-config-file --webui-config-file", "the same from a file", file_name, None, "FILE",
         env="LLAMA_ARG_UI_CONFIG_FILE"),
    *LOG,
    Flag("-cl --cache-list", "list the downloaded models and leave"),
    Flag("--completion-bash", "print bash's completion script and leave"),
))  # fmt: skip

REQUESTS = Group("Requests", (
    Flag("-n --predict --n-predict", "default max_tokens of a request: most tokens of an answer; -1: until the end",
         whole(-2), -1, env="LLAMA_ARG_N_PREDICT", common=True),
    Flag("--keep", "tokens of the prompt to keep when the context is full; -1: all", whole(-1), 0),
    Flag("--cache-prompt", "prefix cache: reuse the KV cache of prompts with a common prefix", default=True,
         env="LLAMA_ARG_CACHE_PROMPT", off="--no-cache-prompt"),
    *model_flags("queue_requests queue_tokens slot_prompt_similarity"),
    Flag("-r --reverse-prompt", "a text that ends an answer; may be given again", text, None, "TEXT", many=True),
    *model_flags("chat_template chat_template_file"),
    Flag("--chat-template-kwargs", "variables of the template, a JSON object", json_object, None, "JSON",
         env="LLAMA_ARG_CHAT_TEMPLATE_KWARGS LLAMA_CHAT_TEMPLATE_KWARGS"),
    Flag("--first-messages", "messages in front of every conversation, a JSON array of {role, content}; a system "
         "message first holds for conversations without one", file_name, metavar="FILE"),
    Flag("--skip-chat-parsing", "leave reasoning and tool calls of all answers in their text", default=False,
         env="LLAMA_ARG_SKIP_CHAT_PARSING", off="--no-skip-chat-parsing"),
    Flag("--reasoning-preserve", "keep the reasoning of earlier answers in the prompt, or not, where the chat template "
         "can choose", env="LLAMA_ARG_REASONING_PRESERVE", off="--no-reasoning-preserve"),
    Flag("--reasoning-format", "where reasoning goes: none: the text, deepseek or auto: reasoning_content, "
         "deepseek-legacy: both", choice("none", "auto", "deepseek", "deepseek-legacy"), "auto", "FORMAT",
         env="LLAMA_ARG_THINK"),
    Flag("--reasoning-budget", "tokens of reasoning before it is ended; 0: none; -1: as many as it takes", whole(-1),
         -1, env="LLAMA_ARG_THINK_BUDGET"),
    Flag("-rea --reasoning", "whether models that can reason do: on, off, auto (as the template says)",
         choice("on", "off", "auto"), "auto", "MODE", env="LLAMA_ARG_REASONING", common=True),
    Flag("--reasoning-effort", "level of reasoning of requests that do not say, as the chat template names it; "
         "default: its own", text, "default", "LEVEL", env="LLAMA_ARG_REASONING_EFFORT"),
    Flag("--reasoning-budget-message", "text that comes before the end of reasoning where its budget ends it", text, "",
         "TEXT", env="LLAMA_ARG_THINK_BUDGET_MESSAGE"),
    Flag("--sse-ping-interval", "seconds of silence after which a comment keeps a stream alive; -1: never",
         whole(1, 2**31 - 1, or_minus_one="never"), 30, env="LLAMA_ARG_SSE_PING_INTERVAL"),
    *model_flags("embedding pooling rerank"),
    Flag("--embd-normalize", "default scale of embeddings: -1: unscaled; 0: the largest is 32760; p: the p-norm is 1",
         whole(-1, 2**15), 2),
    Flag("--prefill-assistant", "go on with a last message of the assistant", default=True,
         env="LLAMA_ARG_PREFILL_ASSISTANT", off="--no-prefill-assistant"),
))  # fmt: skip


GRADERS = (
    Flag("--allow-graders", "kinds of graders that rewards may come from beside texts and models: endpoint, python",
         several("endpoint", "python"), (), "KINDS"),
    Flag("--grader-url", "OpenAI-compatible server (…/v1) whose models score_model graders may ask", text, None, "URL"),
    Flag("--grader-api-key", "its API key", key, None, "KEY", env="LOGITLESS_GRADER_API_KEY"),
)  # fmt: skip
TUNING = Group("Fine-tuning", (
    Flag("--allow-integrations", "trackers that jobs may report to over the network: wandb, mlflow",
         several("wandb", "mlflow"), (), "NAMES"),
    Flag("--data-dir", "folder of files and fine-tuning jobs; without it there are none", folder_name, None, "DIR",
         common=True),
    Flag("--admin-api-key", "key that changes need: of files, jobs, slots, adapters", key, None, "KEY",
         env="LOGITLESS_ADMIN_API_KEY"),
    *GRADERS,
    Flag("--train-share", "per cent of the device's time for training while requests run", number(0, 100), 50.0, "X"),
))  # fmt: skip

LORA = Group("Adapters", model_flags("lora lora_scaled lora_init_without_apply"))
CONTROL = Group("Control vectors", model_flags("control_vector control_vector_scaled control_vector_layer_range"))
SERVE = (
    Group("Model", (
        Flag("-m --model", "the GGUF file, or a Hugging Face folder; without a model the server is a router over the "
             "downloaded ones (in huggingface-hub's cache and LLAMA_CACHE), or serves the demo where there are none",
             file_name, metavar="FILE", env="LLAMA_ARG_MODEL", common=True),
        Flag("--demo", "serve the demo, a small model of Shakespeare", common=True),
        *DOWNLOADS, *LONG,
    )),
    MODEL_KEYS, MEDIA, SERVING, ROUTER, CONTEXT, CACHE, REQUESTS, *hooks.rows("serve_flags"), SAMPLING, LORA, CONTROL,
    TUNING, SPECULATION,
    Group("Device", (*PLACE.flags, Flag("--list-devices", "show the devices and leave"))),
    PROCESSOR, PRESETS, COMPATIBLE,
)  # fmt: skip
GENERATE = (
    Group("Generation", (
        MODEL, *DOWNLOADS,
        Flag("-p --prompt", "the text to continue", text, None, "TEXT", common=True),
        Flag("-f --file", "read the text from a file", file_name, None, "FILE", common=True),
        Flag("-n --predict --n-predict", "most tokens to generate; -1: until the end", whole(-1), -1,
             env="LLAMA_ARG_N_PREDICT", common=True),
        Flag("-r --reverse-prompt", "a text that ends it; may be given again", text, None, "TEXT", many=True),
        Flag("--special", "show special tokens too"),
        Flag("--display-prompt", "show the prompt first", off="--no-display-prompt"),
        VERBOSE, *LONG,
    )),
    Group("Context",
          tuple(f for f in CONTEXT.flags if f.dest not in ("parallel", "kv_unified", "kv_unified_per_slot"))),
    Group(LORA.title, LORA.flags[:2]),
    CONTROL, SAMPLING, SPECULATION, MODEL_KEYS, PLACE,
)  # fmt: skip
BATCH = (
    Group("Batch", (
        MODEL, *DOWNLOADS,
        Flag("-f --file", "the requests: lines of JSON, as OpenAI's batches have them", file_name, None, "FILE"),
        Flag("-o --output", "the answers; what is there is not asked again", file_name, None, "FILE", common=True),
        Flag("-n --predict --n-predict", "most tokens of an answer whose request does not say; -1: until the end",
             whole(-1), -1, env="LLAMA_ARG_N_PREDICT"),
        VERBOSE, *LONG,
    )),
    CONTEXT,
    Group(CACHE.title, tuple(f for f in CACHE.flags if f.dest != "slot_save_path")),
    Group("Embeddings", model_flags("embedding pooling rerank")),
    Group(MEDIA.title, PROJECTOR),
    SAMPLING, LORA, CONTROL, SPECULATION, MODEL_KEYS, PLACE,
)  # fmt: skip
BENCH = (
    Group("Benchmark", (
        MODEL, *DOWNLOADS,
        Flag("-p --n-prompt", "tokens of a prompt; 0: no such test", whole(0, 2**20), 512),
        Flag("-n --n-gen", "tokens to generate; 0: no such test", whole(0, 2**20), 128),
        Flag("-d --n-depth", "tokens that each sequence has before", whole(0, 2**20), 0),
        Flag("-b --batch", "sequences at once, separated by commas", wholes(1, 256), [1], "LIST"),
        Flag("-t --threads", "CPU threads, separated by commas (default: all cores)", wholes(1, 256), None, "LIST"),
        Flag("-ub --ubatch-size", "most tokens of one step", whole(1, 2**16), 512),
        Flag("-r --repetitions", "how often each is measured; the median counts", whole(1, 1000), 3),
        Flag("--ops", "show the time of each kind of op, and its share of the machine's limits"),
        *(f for f in CONTEXT.flags if f.dest.startswith("cache_type")), DEVICE, *PLACEMENT, JSON, *GENERAL,
    )),
)  # fmt: skip
GUESSING_TAKES = (
    *("spec_type", "spec_learn", "model_draft", "spec_draft_n_max", "device_draft", "gpu_layers_draft"),
    *("cache_type_k_draft", "cache_type_v_draft"),
)
GUESSING = Group(
    "Speculation (models and heads that draft take memory)",
    tuple(f for f in SPECULATION.flags if f.dest in GUESSING_TAKES),
)
PLAN = (
    Group("Plan", (
        MODEL, JSON,
        Flag("--no-alloc", "count only: allocate nothing and read no weights (the default)", common=True),
        Flag("--eval-order", "whether the largest step's graph is visited with a node's sources from the left or from "
             "the right; auto: the order that takes less memory, as in servers", choice("auto", "left", "right"),
             "auto", "ORDER", common=True),
        Flag("--dump-plan", "list each node of that step: its backend, and the bytes of its result in the arena",
             common=True),
        *LONG,
    )),
    CONTEXT, CACHE, GUESSING,
    Group(MEDIA.title, tuple(f for f in PROJECTOR if f is not MMPROJ_URL)),
    MODEL_KEYS, PLACE,
)  # fmt: skip
WARM = (
    Group("Warm", (
        MODEL, *DOWNLOADS,
        Flag("--training", "compile the kernels of fine-tuning, too", common=True),
        VERBOSE, *LONG,
    )),
    CONTEXT,
    Group(CACHE.title, tuple(f for f in CACHE.flags if f.dest != "slot_save_path")),
    Group("Embeddings", model_flags("embedding pooling rerank")),
    Group(MEDIA.title, PROJECTOR),
    LORA, SPECULATION, MODEL_KEYS, PLACE,
)  # fmt: skip
DEVICES = (Group("Devices", (JSON, *GENERAL)),)
DOCTOR = (
    Group("Doctor", (
        Flag("--measure", "measure the speed of memory and processor", default=True, off="--no-measure"),
        JSON, *GENERAL,
    )),
)  # fmt: skip
SELFTEST = (
    Group("Self-test", (
        Flag("-m --model", "test the ops of this model's graph, at its shapes", file_name, metavar="FILE", common=True),
        Flag("--op", "test this op only; may be given again", text, None, "NAME", many=True),
        DEVICE, THREADS, JSON, *GENERAL,
    )),
)  # fmt: skip
TOKENIZE = (
    Group("Tokenizer", (
        MODEL,
        Flag("--add-special", "add the beginning and end tokens that the model wants", off="--no-add-special"),
        Flag("--parse-special", "read the text of special tokens as those tokens", off="--no-parse-special"),
        JSON, *GENERAL,
    )),
)  # fmt: skip
COMPLETION = (Group("Completion", GENERAL),)
MAN = (Group("Manual page", GENERAL),)
SYNTH = (
    Group("Synthetic model", (
        Flag("--shape", "size: 15M, 135M, 1B and others; --list shows them", text, "15M", "NAME"),
        Flag("--type", "number type of the matrices: F32, F16, BF16, Q8_0, Q4_0, Q4_K, ...", text, "F32", "TYPE"),
        Flag("--seed", "of the random weights", whole(0, 2**63 - 1), 0),
        Flag("-o --output", "the file to write", file_name, None, "FILE"),
        Flag("--mmproj", "a projector to write beside it (F16), so that the model reads images", file_name, None,
             "FILE"),
        Flag("--mmproj-shape", "the projector's size: siglip, qwen2.5vl, whisper or tiny", text, "siglip", "NAME"),
        Flag("--list", "show the shapes and types and leave"),
        *GENERAL,
    )),
)  # fmt: skip

"""llama-server's flags: ignored ones (no effect here), and refused ones (missing features)."""

from __future__ import annotations

from logitless.cli.flags.flags import IGNORED, LATER, Flag, Group
from logitless.engine.loading.values import text


def _ignored(names: str, env: str = "", *, value: str = "", off: str = "", optional: tuple[str, ...] = ()) -> Flag:
    kind = text if value or optional else None
    return Flag(names, kind=kind, metavar=value or "X", env=env, off=off, optional=optional, status=IGNORED)


def _later(
    names: str, env: str = "", *, value: str = "", off: str = "", off_values: tuple[str, ...] = (), why: str = ""
) -> Flag:
    """`why` there is none, where that is more than that nobody has written it."""
    kind = text if value else None
    return Flag(names, why, kind=kind, metavar=value, env=env, off=off, off_values=off_values, status=LATER)


_AUTOMATIC = ("-1", "-1.0", "-1.00")
_PRESETS = (  # models that llama-server has flags for
    *("embd-gemma-default", "gpt-oss-20b-default", "gpt-oss-120b-default"),
    *("vision-gemma-4b-default", "vision-gemma-12b-default"),
    *(f"fim-qwen-{size}-default" for size in ("1.5b", "3b", "7b", "30b")),
    *("fim-qwen-7b-spec", "fim-qwen-14b-spec"),
)


COMPATIBLE = Group(
    "llama-server's other flags",
    (
        # FineTuningWorker of things that are done anyway, or that have no counterpart here and cannot change a result.
        _ignored("-fa --flash-attn", "LLAMA_ARG_FLASH_ATTN", optional=("auto", "on", "off", "1", "0", "true", "false")),
        _ignored("-cb --cont-batching", "LLAMA_ARG_CONT_BATCHING", off="-nocb --no-cont-batching"),
        _ignored("--jinja", "LLAMA_ARG_JINJA", off="--no-jinja"),
        _ignored("--mlock", "LLAMA_ARG_MLOCK"),
        _ignored("--mmap", "LLAMA_ARG_MMAP", off="--no-mmap"),
        _ignored("-lm --load-mode", "LLAMA_ARG_LOAD_MODE", value="MODE"),
        _ignored("-lzm --lazy-mode", "LLAMA_ARG_LAZY_MODE", value="MODE"),
        _ignored("--no-host", "LLAMA_ARG_NO_HOST"),
        _ignored("-fit --fit", "LLAMA_ARG_FIT", optional=("on", "off")),
        _ignored("-fitt --fit-target", "LLAMA_ARG_FIT_TARGET", value="MIB,..."),
        _ignored("-fitc --fit-ctx", "LLAMA_ARG_FIT_CTX", value="N"),
        _ignored("--moe-cache-mib", "LLAMA_ARG_MOE_CACHE_MIB", value="N"),
        _ignored("--warmup", off="--no-warmup"),
        _ignored("--kv-offload -kvo", "LLAMA_ARG_KV_OFFLOAD", off="--no-kv-offload -nkvo"),
        _ignored("--repack", "LLAMA_ARG_REPACK", off="--no-repack -nr"),
        _ignored("--op-offload", off="--no-op-offload"),
        _ignored("--perf", "LLAMA_ARG_PERF", off="--no-perf"),
        _ignored("--escape -e", off="--no-escape"),
        _ignored("--threads-http", "LLAMA_ARG_THREADS_HTTP", value="N"),
        _ignored("--defrag-thold -dt", "LLAMA_ARG_DEFRAG_THOLD", value="N"),
        _ignored("-cms --checkpoint-min-step", "LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT", value="N"),
        _ignored("-cd --ctx-size-draft", "LLAMA_ARG_CTX_SIZE_DRAFT", value="N"),
        _ignored("-td --threads-draft --spec-draft-threads", value="N"),
        _ignored("--draft-p-split --spec-draft-p-split", "LLAMA_ARG_SPEC_DRAFT_P_SPLIT", value="X"),
        _ignored(
            "--spec-draft-backend-sampling",
            "LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING",
            off="--no-spec-draft-backend-sampling",
        ),
        _ignored("--spec-draft-sampling", "LLAMA_ARG_SPEC_DRAFT_SAMPLING", value="KIND"),
        *(
            _ignored(names, value="X")
            for names in (
                *("-C --cpu-mask", "-Cr --cpu-range", "--cpu-strict", "--prio", "--poll"),
                *("-Cb --cpu-mask-batch", "-Crb --cpu-range-batch", "--cpu-strict-batch"),
                *("--prio-batch", "--poll-batch"),
                "-tbd --threads-batch-draft --spec-draft-threads-batch",
                "-Cd --cpu-mask-draft --spec-draft-cpu-mask",
                "-Crd --cpu-range-draft --spec-draft-cpu-range",
                "--cpu-strict-draft --spec-draft-cpu-strict",
                "--prio-draft --spec-draft-prio",
                "--poll-draft --spec-draft-poll",
                "-Cbd --cpu-mask-batch-draft --spec-draft-cpu-mask-batch",
                "--cpu-strict-batch-draft --spec-draft-cpu-strict-batch",
                "--prio-batch-draft --spec-draft-prio-batch",
                "--poll-batch-draft --spec-draft-poll-batch",
            )
        ),
        _ignored("--numa", "LLAMA_ARG_NUMA", value="TYPE"),
        _ignored("--check-tensors"),
        _ignored("--log-colors", "LLAMA_ARG_LOG_COLORS LLAMA_LOG_COLORS", optional=("auto", "on", "off")),
        _ignored("--log-prefix", "LLAMA_ARG_LOG_PREFIX LLAMA_LOG_PREFIX", off="--no-log-prefix"),
        _ignored("--log-timestamps", "LLAMA_ARG_LOG_TIMESTAMPS LLAMA_LOG_TIMESTAMPS", off="--no-log-timestamps"),
        _ignored("-lv --verbosity --log-verbosity", "LLAMA_ARG_LOG_VERBOSITY LLAMA_LOG_VERBOSITY", value="N"),
        _ignored("--cors-credentials", "LLAMA_ARG_CORS_CREDENTIALS"),
        _ignored("--ui-config --webui-config", "LLAMA_ARG_UI_CONFIG", value="JSON"),
        _ignored("--ui-config-file --webui-config-file", "LLAMA_ARG_UI_CONFIG_FILE", value="FILE"),
        _ignored("--mtmd-batch-max-tokens", "LLAMA_ARG_MTMD_BATCH_MAX_TOKENS", value="N"),
        _ignored("--video-fps", "LLAMA_ARG_VIDEO_FPS", value="X"),
        _ignored("--video-timestamp-interval", "LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL", value="N"),
        _ignored("--video-ffmpeg-dir", "LLAMA_ARG_VIDEO_FFMPEG_DIR", value="FOLDER"),
        # Missing features. Never accepted silently: the client would rely on them.
        _later("-lcs --lookup-cache-static", value="FILE"),
        _later("-lcd --lookup-cache-dynamic", value="FILE"),
        _later("--spec-replace", value="WORDS"),
        _later("--control-vector", value="FILE"),
        _later("--control-vector-scaled", value="FILE:SCALE"),
        _later("--control-vector-layer-range", value="START"),
        _later("-dr --docker-repo", "LLAMA_ARG_DOCKER_REPO", value="REPO"),
        _later("--yarn-ext-factor", "LLAMA_ARG_YARN_EXT_FACTOR", value="X", off_values=_AUTOMATIC),
        _later("--yarn-attn-factor", "LLAMA_ARG_YARN_ATTN_FACTOR", value="X", off_values=_AUTOMATIC),
        _later("-ncffn --n-cpu-ffn", "LLAMA_ARG_N_CPU_FFN", value="N", off_values=("0",), why="--override-tensor can"),
        _later("-otd --override-tensor-draft --spec-draft-override-tensor", value="RULES"),
        _later("-cmoed --cpu-moe-draft --spec-draft-cpu-moe", "LLAMA_ARG_SPEC_DRAFT_CPU_MOE"),
        _later(
            "-ncmoed --n-cpu-moe-draft --spec-draft-ncmoe --spec-draft-n-cpu-moe",
            "LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE",
            value="N",
            off_values=("0",),
        ),
        _later("--spec-synth-len", "LLAMA_ARG_SPEC_SYNTH_LEN", value="N"),
        _later("--spec-synth-rates", "LLAMA_ARG_SPEC_SYNTH_RATES", value="LIST"),
        _later("--log-jsonl", "LLAMA_ARG_LOG_JSONL", off="--no-log-jsonl", why="--log-format json is that"),
        _later("--cors-methods", "LLAMA_ARG_CORS_METHODS", value="LIST", why="a preflight allows all of them"),
        _later("--cors-headers", "LLAMA_ARG_CORS_HEADERS", value="LIST", why="a preflight allows all of them"),
        _later("--no-cors-credentials", why="--cors-origins names the pages that may call"),
        _later(
            "--skip-chat-parsing",
            "LLAMA_ARG_SKIP_CHAT_PARSING",
            off="--no-skip-chat-parsing",
            why="a request's reasoning_format none and parse_tool_calls false do that",
        ),
        _later(
            "--reasoning-preserve",
            "LLAMA_ARG_REASONING_PRESERVE",
            off="--no-reasoning-preserve",
            why="--chat-template-kwargs sets the template's own variable",
        ),
        *(_later(f"--{name}", why="-hf names its repository") for name in _PRESETS),
        _later("-mmdev --mmproj-device", "MTMD_BACKEND_DEVICE", value="NAME", why="the encoder runs on --device"),
        _later("-ag --agent", "LLAMA_ARG_AGENT", off="-no-ag --no-agent", why="--tools all is that"),
    ),
)

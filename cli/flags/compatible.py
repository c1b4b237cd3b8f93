"""llama-server's flags without effect here, and those of missing features, which are refused."""

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


_TEXT = "models here read text only"


COMPATIBLE = Group(
    "llama-server's other flags",
    (
        # FineTuningWorker of things that are done anyway, or that have no counterpart here and cannot change a result.
        _ignored("-fa --flash-attn", "LLAMA_ARG_FLASH_ATTN", optional=("auto", "on", "off", "1", "0", "true", "false")),
        _ignored("-cb --cont-batching", "LLAMA_ARG_CONT_BATCHING", off="-nocb --no-cont-batching"),
        _ignored("--jinja", "LLAMA_ARG_JINJA", off="--no-jinja"),
        _ignored("--mlock", "LLAMA_ARG_MLOCK"),
        _ignored("--mmap", "LLAMA_ARG_MMAP", off="--no-mmap"),
        _ignored("--warmup", off="--no-warmup"),
        _ignored("--kv-offload -kvo", "LLAMA_ARG_KV_OFFLOAD", off="--no-kv-offload -nkvo"),
        _ignored("--repack", "LLAMA_ARG_REPACK", off="--no-repack -nr"),
        _ignored("--op-offload", off="--no-op-offload"),
        _ignored("--perf", "LLAMA_ARG_PERF", off="--no-perf"),
        _ignored("--escape -e", off="--no-escape"),
        _ignored("--threads-http", "LLAMA_ARG_THREADS_HTTP", value="N"),
        _ignored("--defrag-thold -dt", "LLAMA_ARG_DEFRAG_THOLD", value="N"),
        _ignored("--checkpoint-min-step", value="N"),
        _ignored("-cd --ctx-size-draft", "LLAMA_ARG_CTX_SIZE_DRAFT", value="N"),
        _ignored("-td --threads-draft --spec-draft-threads", value="N"),
        _ignored("--draft-p-split --spec-draft-p-split", "LLAMA_ARG_SPEC_DRAFT_P_SPLIT", value="X"),
        _ignored("--spec-draft-backend-sampling", off="--no-spec-draft-backend-sampling"),
        _ignored("--poll", value="N"),
        _ignored("--prio", value="N"),
        _ignored("--numa", "LLAMA_ARG_NUMA", value="TYPE"),
        _ignored("--check-tensors"),
        _ignored("--log-colors", "LLAMA_LOG_COLORS", optional=("auto", "on", "off")),
        _ignored("--log-prefix", "LLAMA_LOG_PREFIX", off="--no-log-prefix"),
        _ignored("--log-timestamps", "LLAMA_LOG_TIMESTAMPS", off="--no-log-timestamps"),
        _ignored("-lv --verbosity --log-verbosity", "LLAMA_LOG_VERBOSITY", value="N"),
        # What is not there yet. Never accepted silently: the client would rely on it.
        _later("-lcs --lookup-cache-static", value="FILE"),
        _later("-lcd --lookup-cache-dynamic", value="FILE"),
        _later("--spec-replace", value="WORDS"),
        _later("--control-vector", value="FILE"),
        _later("-mm --mmproj", "LLAMA_ARG_MMPROJ", value="FILE", why=_TEXT),
        _later("-mmu --mmproj-url", "LLAMA_ARG_MMPROJ_URL", value="URL", why=_TEXT),
        _later("--media-path", value="FOLDER", why=_TEXT),
        _later(
            "--ui-mcp-proxy --webui-mcp-proxy",
            "LLAMA_ARG_UI_MCP_PROXY",
            off="--no-ui-mcp-proxy",
            why="the page needs no proxy",
        ),
        _later("--tools", "LLAMA_ARG_TOOLS", value="LIST", why="the server runs no tools; clients do"),
    ),
)

"""llama-server's flags: ignored ones (no effect here, which one line says), and refused ones (missing features)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from logitless.cli.flags.flags import IGNORED, LATER, Flag, Group
from logitless.engine.loading.values import choice, cpu_mask, cpu_range, number, text, whole

_KINDS: dict[str, Callable[[str], Any]] = {  # of the values, by their names
    "N": whole(-(2**31)),
    "X": number(),
    "0|1": whole(0, 1),
    "MASK": cpu_mask,
    "LO-HI": cpu_range,
}


def _ignored(
    names: str,
    env: str = "",
    *,
    value: str = "",
    off: str = "",
    optional: tuple[str, ...] = (),
    words: str = "",
    so: tuple[str | bool, ...] = (),
) -> Flag:
    """`value`: the name of its value; `words`: those that it may be; `so`: the values that are always so here."""
    kind = choice(*(words.split() or optional)) if words or optional else _KINDS[value] if value else None
    metavar = value or ("WORD" if words else "X")
    return Flag(names, kind=kind, metavar=metavar, env=env, off=off, optional=optional, status=IGNORED, off_values=so)


def _later(
    names: str, env: str = "", *, value: str = "", off: str = "", off_values: tuple[str, ...] = (), why: str = ""
) -> Flag:
    """`why` there is none, where that is more than that nobody has written it."""
    kind = text if value else None
    return Flag(names, why, kind=kind, metavar=value, env=env, off=off, off_values=off_values, status=LATER)


_PLACED = "the system places threads on processors; --cpu-mask says on which ones"
_PICTURES = "no model reads videos here; send their pictures as images"
_AUTOMATIC = ("-1", "-1.0", "-1.00")
_FIM = "--port 8012 --ubatch-size 1024 --batch-size 1024 --ctx-size 0 --cache-reuse 256"
_GPT_OSS = (
    "--port 8013 --ubatch-size 2048 --batch-size 32768 --parallel 2 --ctx-size 262144 "
    "--temp 1 --top-p 1 --top-k 0 --min-p 0.01"
)


def _coder(size: str) -> str:
    return f"--hf-repo ggml-org/Qwen2.5-Coder-{size}-Q8_0-GGUF --hf-file qwen2.5-coder-{size.lower()}-q8_0.gguf"


_DRAFT = "--hf-repo-draft ggml-org/Qwen2.5-Coder-0.5B-Q8_0-GGUF --spec-type draft-simple"
_PRESETS = {  # the flags that llama-server has for models, and what they stand for
    "embd-gemma-default": "--hf-repo ggml-org/embeddinggemma-300M-qat-q4_0-GGUF "
    "--hf-file embeddinggemma-300M-qat-Q4_0.gguf --port 8011 --ubatch-size 2048 --batch-size 2048 --parallel 32 "
    "--ctx-size 65536 --embedding",
    **{f"fim-qwen-{size.lower()}-default": f"{_coder(size)} {_FIM}" for size in ("1.5B", "3B", "7B")},
    **{f"fim-qwen-{size.lower()}-spec": f"{_coder(size)} {_DRAFT} {_FIM}" for size in ("7B", "14B")},
    "fim-qwen-30b-default": "--hf-repo ggml-org/Qwen3-Coder-30B-A3B-Instruct-Q8_0-GGUF "
    f"--hf-file qwen3-coder-30b-a3b-instruct-q8_0.gguf {_FIM}",
    "gpt-oss-20b-default": f"--hf-repo ggml-org/gpt-oss-20b-GGUF --hf-file gpt-oss-20b-mxfp4.gguf {_GPT_OSS}",
    "gpt-oss-120b-default": f"--hf-repo ggml-org/gpt-oss-120b-GGUF {_GPT_OSS}",
    "vision-gemma-4b-default": "--hf-repo ggml-org/gemma-3-4b-it-qat-GGUF --port 8014 --ctx-size 0",
    "vision-gemma-12b-default": "--hf-repo ggml-org/gemma-3-12b-it-qat-GGUF --port 8014 --ctx-size 0",
}
PRESETS = Group("Models that llama-server has flags for (downloaded from the hub; other flags come first)",
                tuple(
                    Flag(f"--{name}", words.split()[1] + " with its settings", means=words, default=False)
                    for name, words in _PRESETS.items()
                ))  # fmt: skip


COMPATIBLE = Group("llama-server's other flags", (
    # They tune llama.cpp's speed or memory, or do what is always done here. No result changes.
    _ignored("-fa --flash-attn", "LLAMA_ARG_FLASH_ATTN", optional=("auto", "on", "off", "1", "0", "true", "false"),
             so=("auto", "on", "1", "true")),
    Flag("--jinja", env="LLAMA_ARG_JINJA", off="--no-jinja", status=IGNORED, off_values=(True,),
         only_on="chat templates are always Jinja here"),
    _ignored("--mmap", "LLAMA_ARG_MMAP", off="--no-mmap", so=(True,)),
    _ignored("-dio --direct-io", "LLAMA_ARG_DIO", off="-ndio --no-direct-io", so=(False,)),
    _ignored("-lzm --lazy-mode --tensor-read-lazy", "LLAMA_ARG_LAZY_MODE", words="auto on off", so=("auto",)),
    _ignored("--no-host", "LLAMA_ARG_NO_HOST"),
    _ignored("--repack", "LLAMA_ARG_REPACK", off="--no-repack -nr", so=(True,)),
    _ignored("--op-offload", off="--no-op-offload", so=(True,)),
    _ignored("--perf", "LLAMA_ARG_PERF", off="--no-perf", so=(False,)),
    _ignored("--defrag-thold -dt", "LLAMA_ARG_DEFRAG_THOLD", value="X"),
    _ignored("-cms --checkpoint-min-step", "LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT", value="N"),
    _ignored("-cd --ctx-size-draft", "LLAMA_ARG_CTX_SIZE_DRAFT", value="N"),
    _ignored("-td --threads-draft --spec-draft-threads", value="N"),
    _ignored("--draft-p-split --spec-draft-p-split", "LLAMA_ARG_SPEC_DRAFT_P_SPLIT", value="X"),
    _ignored("--spec-draft-backend-sampling", "LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING",
             off="--no-spec-draft-backend-sampling", so=(True,)),
    _ignored("--spec-draft-sampling", "LLAMA_ARG_SPEC_DRAFT_SAMPLING", words="greedy probabilistic", so=("greedy",)),
    _ignored("--poll-batch", value="0|1"),
    _ignored("--prio-batch", value="N", so=("0",)),
    _ignored("-Cb --cpu-mask-batch", value="MASK"),
    _ignored("-Crb --cpu-range-batch", value="LO-HI"),
    # A draft model has its model's threads.
    _ignored("-tbd --threads-batch-draft --spec-draft-threads-batch", value="N"),
    *(
        _ignored(f"{short}{long}-draft --spec-draft-{long[2:]}", value=value)
        for short, long, value in (
            ("-Cd ", "--cpu-mask", "MASK"),
            ("-Crd ", "--cpu-range", "LO-HI"),
            ("", "--prio", "N"),
            ("", "--poll", "0|1"),
            ("-Cbd ", "--cpu-mask-batch", "MASK"),
            ("", "--prio-batch", "N"),
            ("", "--poll-batch", "0|1"),
        )
    ),
    _ignored("--check-tensors", so=(True,)),
    _ignored("--mtmd-batch-max-tokens", "LLAMA_ARG_MTMD_BATCH_MAX_TOKENS", value="N"),
    # Missing features. Never accepted silently: the client would rely on them.
    _later("-lcs --lookup-cache-static", value="FILE"),
    _later("-lcd --lookup-cache-dynamic", value="FILE"),
    _later("--spec-replace", value="WORDS"),
    _later("--yarn-ext-factor", "LLAMA_ARG_YARN_EXT_FACTOR", value="X", off_values=_AUTOMATIC),
    _later("--yarn-attn-factor", "LLAMA_ARG_YARN_ATTN_FACTOR", value="X", off_values=_AUTOMATIC),
    *(
        _later(names, value="0|1", off_values=("0",), why=_PLACED)
        for names in (
            "--cpu-strict",
            "--cpu-strict-batch",
            "--cpu-strict-draft --spec-draft-cpu-strict",
            "--cpu-strict-batch-draft --spec-draft-cpu-strict-batch",
        )
    ),
    _later("--video-fps", "LLAMA_ARG_VIDEO_FPS", value="X", off_values=("4", "4.0"), why=_PICTURES),
    _later("--video-timestamp-interval", "LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL", value="N", off_values=("5000",),
           why=_PICTURES),
    _later("--video-ffmpeg-dir", "LLAMA_ARG_VIDEO_FFMPEG_DIR", value="FOLDER", why=_PICTURES),
    _later("--spec-synth-len", "LLAMA_ARG_SPEC_SYNTH_LEN", value="N"),
    _later("--spec-synth-rates", "LLAMA_ARG_SPEC_SYNTH_RATES", value="LIST"),
))  # fmt: skip

"""Flags of the context and its cache, and of what does not fit at once: host memory, slot files, queues."""

from __future__ import annotations

import os

from logitless.cli.flags.flags import CliError, Flag, Group, choice, folder_name, whole

KV_TYPES = ("f32", "f16", "q8_0")

CONTEXT = Group(
    "Context and batches",
    (
        Flag(
            "-c --ctx-size",
            "tokens of the KV cache that all slots share; 0: as many as the model was trained for",
            whole(0, 2**30),
            0,
            env="LLAMA_ARG_CTX_SIZE",
        ),
        Flag(
            "-np --parallel",
            "slots: sequences that run at once; -1: automatic, 4",
            whole(1, 256, or_minus_one="automatic"),
            4,
            env="LLAMA_ARG_N_PARALLEL",
        ),
        Flag(
            "-kvu --kv-unified",
            "share the cache between slots, so that one sequence may use all of it; off: each slot has an equal part",
            default=True,
            env="LLAMA_ARG_KV_UNIFIED",
            off="-no-kvu --no-kv-unified",
        ),
        Flag(
            "--kv-unified-per-slot",
            "most tokens of one slot; without --ctx-size the cache has room for as many in each; 0: all of its part",
            whole(0, 2**30),
            0,
            env="LLAMA_ARG_KV_UNIFIED_PER_SLOT",
        ),
        Flag("-b --batch-size", "most tokens of a prompt in work", whole(1, 2**20), 2048, env="LLAMA_ARG_BATCH"),
        Flag("-ub --ubatch-size", "most tokens of one step", whole(1, 2**16), 512, env="LLAMA_ARG_UBATCH"),
        Flag(
            "-ctk --cache-type-k",
            f"number type of cached keys: {', '.join(KV_TYPES)}",
            choice(*KV_TYPES),
            "f16",
            "TYPE",
            env="LLAMA_ARG_CACHE_TYPE_K",
        ),
        Flag(
            "-ctv --cache-type-v",
            f"number type of cached values: {', '.join(KV_TYPES)}",
            choice(*KV_TYPES),
            "f16",
            "TYPE",
            env="LLAMA_ARG_CACHE_TYPE_V",
        ),
    ),
)

CACHE = Group(
    "Cache",
    (
        Flag(
            "-cram --cache-ram",
            "MiB of host memory for prompts that the KV cache has no room for; 0: none, -1: no limit "
            "(by default 8192, but at most a quarter of the machine's memory)",
            whole(0, 2**30, or_minus_one="no limit"),
            None,
            env="LLAMA_ARG_CACHE_RAM",
        ),
        Flag(
            "-ctxcp --ctx-checkpoints --swa-checkpoints",
            "where prompts can go on from: states that are kept for each slot, of models whose layers have such (Qwen "
            "3.5, LFM 2), or windows that are kept in all, of those with sliding ones (Gemma 3, gpt-oss)",
            whole(0, 4096),
            2,
            env="LLAMA_ARG_CTX_CHECKPOINTS",
        ),
        Flag(
            "--swa-full",
            "layers with a sliding window keep the whole context, as the others do: prompts can go on from any place, "
            "for more memory",
            default=False,
            env="LLAMA_ARG_SWA_FULL",
        ),
        Flag(
            "--cache-idle-slots",
            "keep prompts of idle slots in host memory too; off: only those of paused requests",
            default=True,
            env="LLAMA_ARG_CACHE_IDLE_SLOTS",
            off="--no-cache-idle-slots",
        ),
        Flag(
            "--context-shift",
            "when a sequence fills its context, forget a part in the middle and go on; off: it ends there",
            default=False,
            env="LLAMA_ARG_CONTEXT_SHIFT",
            off="--no-context-shift",
        ),
        Flag(
            "--cache-reuse",
            "move N or more cached tokens that a prompt has further to the front than the slot's last one, instead of "
            "computing them: faster, and not quite the text that the prompt gets alone; 0: never",
            whole(0),
            0,
            "N",
            env="LLAMA_ARG_CACHE_REUSE",
        ),
        Flag(
            "--slot-save-path",
            "the folder that POST /slots/{id}?action=save and restore use",
            folder_name,
            "",
            "FOLDER",
            env="LLAMA_ARG_SLOT_SAVE_PATH",
        ),
    ),
)

QUEUE = (
    Flag(
        "--queue-requests",
        "requests that may wait for a slot; more are refused with 429 or 503 and Retry-After; -1: any number",
        whole(0, or_minus_one="any number"),
        -1,
        env="LLAMA_ARG_QUEUE_REQUESTS",
    ),
    Flag(
        "--queue-tokens",
        "tokens of prompts that may wait for a slot; -1: any number",
        whole(0, or_minus_one="any number"),
        -1,
        env="LLAMA_ARG_QUEUE_TOKENS",
    ),
)


def cache_ram_bytes(mib: int | None, total_memory: int) -> int | None:
    """What --cache-ram means in bytes; None: no limit."""
    if mib is None:
        return min(8192 << 20, total_memory // 4)
    return None if mib < 0 else mib << 20


def slot_folder(path: str) -> str:
    """--slot-save-path, if it is a folder that files can be made in."""
    if path and not os.path.isdir(path):
        raise CliError(f"--slot-save-path: {path} is not a folder")
    if path and not os.access(path, os.W_OK | os.X_OK):
        raise CliError(f"--slot-save-path: {path} cannot be written to")
    return path

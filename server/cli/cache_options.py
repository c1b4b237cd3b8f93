"""Flags of what happens to prompts and requests that do not fit at once: host memory, slot files, queues."""

from __future__ import annotations

from server.cli.flags import Flag, Group, whole

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
            "--cache-idle-slots",
            "keep prompts of idle slots in host memory too; off: only those of paused requests",
            default=True,
            env="LLAMA_ARG_CACHE_IDLE_SLOTS",
            off="--no-cache-idle-slots",
        ),
    ),
)


def cache_ram_bytes(mib: int | None, total_memory: int) -> int | None:
    """What --cache-ram means in bytes; None: no limit."""
    if mib is None:
        return min(8192 << 20, total_memory // 4)
    return None if mib < 0 else mib << 20

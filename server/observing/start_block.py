"""The lines that a server logs when its model has loaded."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from logitless.engine.async_engine import LoadedModel
from logitless.server.config import ServerConfig

log = logging.getLogger("logitless.http")


def log_start(served: LoadedModel, config: ServerConfig, address: str = "") -> None:
    """Log model, type, size, context, slots, device, memory and address (of a listening server)."""
    info, engine = served.info, served.engine
    fields: dict[str, Any] = {
        "model": config.model,
        "type": info.ftype,
        "parameters": info.n_params,
        "size_bytes": info.nbytes,
        "context": info.n_ctx,
        "slots": config.n_parallel,
    }
    kind = info.ftype
    if engine is not None:
        fields |= {"architecture": engine.hparams.arch, "devices": list(engine.devices)}
        if engine.options.device_reason:
            fields["device_reason"] = engine.options.device_reason
        fields |= {"threads": engine.options.threads, "cache_tokens": engine.n_ctx}
        kind = f"{engine.hparams.arch}, {info.ftype}"
    used, total = _memory()
    if used:
        fields |= {"memory_bytes": used, "machine_bytes": total}
    if address:
        fields["address"] = address
    lines = [
        f"model    {config.model} ({kind}, {_count(info.n_params)} parameters, {_size(info.nbytes)})",
        f"context  {info.n_ctx} tokens a request, {config.n_parallel} slots",
    ]
    if engine is not None:
        lines[-1] += f", {engine.n_ctx} tokens of KV cache"
        reason = engine.options.device_reason
        lines.append(f"device   {', '.join(engine.devices)}, {engine.options.threads} threads")
        lines[-1] += f" ({reason})" if reason else ""
    if used:
        lines.append(f"memory   {_size(used)} of the machine's {_size(total)}")
    if address:
        lines.append(f"address  {address}")
    text = "\n  ".join(["model loaded", *lines])
    log.info("%s", text, extra={"fields": {"message": "model loaded", **fields}})


def _memory() -> tuple[int, int]:
    """(resident bytes of this process, bytes of the machine's memory); zeros where Linux does not tell."""
    try:
        n_pages = int(Path("/proc/self/statm").read_text().split()[1])
        page = os.sysconf("SC_PAGE_SIZE")
        return n_pages * page, os.sysconf("SC_PHYS_PAGES") * page
    except (OSError, ValueError):
        return 0, 0


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB" if nbytes >= 1 << 29 else f"{nbytes / (1 << 20):.1f} MiB"


def _count(n: int) -> str:
    return f"{n / 1e9:.2f} B" if n >= 5e8 else f"{n / 1e6:.1f} M"

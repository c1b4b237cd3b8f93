"""`logitless devices`: what can compute on this machine, and what this version was not built with."""

from __future__ import annotations

import json
import os
import platform
from types import SimpleNamespace
from typing import Any


def run(options: SimpleNamespace) -> int:
    found = devices()
    print(json.dumps({"devices": found}, indent=2) if options.json else as_text(found))
    return 0


def devices() -> list[dict[str, Any]]:
    """One entry per kind of device; `available` says whether `--device` takes it."""
    from backends.cpu.isa import isa

    cpu = {
        "name": "cpu",
        "available": True,
        "description": cpu_name(),
        "isa": isa(),
        "features": cpu_features(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_bytes": total_memory(),
    }
    absent = "not built into this version"
    return [cpu, *({"name": n, "available": False, "description": absent} for n in ("opencl", "vulkan"))]


def as_text(found: list[dict[str, Any]]) -> str:
    lines = []
    for d in found:
        lines.append(f"{d['name']:<8}{d['description']}")
        if d["available"]:
            memory = d["memory_bytes"] / 2**30
            lines.append(f"        {d['cores']} cores, {memory:.1f} GiB of memory, kernels: {d['isa']}")
            lines.append(f"        features: {', '.join(d['features']) or 'unknown'}")
    return "\n".join(lines)


def cpu_name() -> str:
    for line in _cpuinfo():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return platform.processor() or platform.machine()


def cpu_features() -> list[str]:
    """The extensions that matter to the kernels, by LLVM's names."""
    import llvmlite.binding as llvm

    wanted = ["avx2", "fma", "f16c", "avxvnni", "avx512f", "avx512vnni", "avx512bf16", "neon", "dotprod", "i8mm"]
    present: dict[str, bool] = llvm.get_host_cpu_features()
    return [name for name in wanted if present.get(name)]


def total_memory() -> int:
    """Bytes that this process may use at most: the machine's, or less where a control group says so."""
    pages: int = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/sys/fs/cgroup/memory.max") as f:
            limit = f.read().strip()
    except OSError:
        return pages
    return min(pages, int(limit)) if limit.isdigit() else pages


def _cpuinfo() -> list[str]:
    try:
        with open("/proc/cpuinfo") as f:
            return f.read().splitlines()
    except OSError:
        return []

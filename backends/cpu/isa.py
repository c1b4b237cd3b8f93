"""Which variant of the integer dot product this machine runs: one name, chosen once."""

from __future__ import annotations

import functools
import os

import llvmlite.binding as llvm

ISAS = ("avx512_vnni", "avx_vnni", "avx2", "plain")


@functools.cache
def isa() -> str:
    """`LOGITLESS_ISA` (one of ISAS that the machine has), else the best that the processor offers."""
    features = llvm.get_host_cpu_features()
    has = {
        "avx512_vnni": all(features.get(f) for f in ("avx512vnni", "avx512bw", "avx512vl")),
        "avx_vnni": bool(features.get("avxvnni")),
        "avx2": bool(features.get("avx2") and features.get("fma")),
        "plain": True,
    }
    asked = os.environ.get("LOGITLESS_ISA")
    if asked:
        if not has.get(asked):
            raise ValueError(f"LOGITLESS_ISA={asked}: this machine has {', '.join(n for n in ISAS if has[n])}")
        return asked
    return next(name for name in ISAS if has[name])


def has_512_bits() -> bool:
    """Whether vectors of 512 bits are one register here."""
    features = llvm.get_host_cpu_features()
    return bool(features.get("avx512f") and features.get("avx512vl"))


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)

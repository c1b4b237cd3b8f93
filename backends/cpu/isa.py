"""What the processor offers: LLVM's name for it, its features, and the variant of integer dot products that it runs.

LLVM is asked once a machine, because importing it costs a start 45 ms and a process 45 MB: its answer is kept under the
cache folder, named by a hash of what the system says of the first processor.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata as metadata
import json
import os
import platform
import sys
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from logitless.backends import disk_cache

ISAS = ("avx512_vnni", "avx_vnni", "avx2", "neon_dot", "plain")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")  # of the first processor
WITHOUT = {  # what processors that have no better variant than this do without, and such a processor's name
    "avx_vnni": ("alderlake", ("avx512", "avx10", "amx")),
    "avx2": ("haswell", ("avx512", "avx10", "amx", "avxvnni")),
}
BF16 = "LOGITLESS_CPU_BF16"
CHANGES = ("cpu MHz", "bogomips", "BogoMIPS")  # lines of /proc/cpuinfo that differ from start to start


@dataclass(frozen=True)
class Host:
    """`attributes`: all features that LLVM knows, as it writes them (`+avx2,-sse4a,...`)."""

    name: str
    attributes: str

    def has(self, *features: str) -> bool:
        return self._present.issuperset(features)

    @property
    def has_512_bits(self) -> bool:
        """Whether it has 32 registers of 16 floats; else it has 16 of half of that."""
        return self.has("avx512f", "avx512vl")

    @property
    def is_zen(self) -> bool:
        """Whether it is one of AMD's with wide registers: Zen 4 and later."""
        return self.name.startswith("znver") and self.has_512_bits

    @functools.cached_property
    def _present(self) -> frozenset[str]:
        return frozenset(a[1:] for a in self.attributes.split(",") if a.startswith("+"))


@functools.cache
def host() -> Host:
    """This machine's processor."""
    try:
        with open("/proc/cpuinfo") as f:
            lines = [line for line in takewhile(str.strip, f) if not line.startswith(CHANGES)]
    except OSError:  # no Linux
        return _asked(dots=sys.platform == "darwin" and platform.machine() == "arm64")  # all of Apple's have them
    digest = hashlib.sha256("".join([metadata.version("llvmlite"), *lines]).encode()).hexdigest()
    path = disk_cache.cache_folder() / "cpu" / f"host-{digest[:16]}"
    kept = disk_cache.read(path)
    if kept:
        return Host(*json.loads(kept))
    found = _asked(dots=any(line.startswith("Features") and "asimddp" in line.split() for line in lines))
    disk_cache.write(path, json.dumps([found.name, found.attributes]).encode())
    return found


def _asked(*, dots: bool) -> Host:
    """`dots`: an ARM processor that has them, of which LLVM does not see this, nor of Apple's anything at all."""
    import llvmlite.binding as llvm

    seen: dict[str, bool] = llvm.get_host_cpu_features()
    features = llvm.FeatureMap(seen | {"neon": True, "dotprod": True} if dots else seen)
    return Host(llvm.get_host_cpu_name(), features.flatten())


def offered() -> list[str]:
    """Those of ISAS that the machine has, the best first."""
    here = host()
    has = {
        "avx512_vnni": here.has("avx512vnni", "avx512bw", "avx512vl"),
        "avx_vnni": here.has("avxvnni"),
        "avx2": here.has("avx2", "fma"),
        "neon_dot": here.has("neon", "dotprod"),
        "plain": True,
    }
    return [name for name in ISAS if has[name]]


@functools.cache
def isa() -> str:
    """`LOGITLESS_ISA` (one of ISAS that the machine has), else the best that the processor offers."""
    here, asked = offered(), os.environ.get("LOGITLESS_ISA")
    if asked and asked not in here:
        raise ValueError(f"LOGITLESS_ISA={asked}: this machine has {', '.join(here)}")
    return asked or here[0]


def has_bf16_products() -> bool:
    """Whether the variant that runs may have products of two bf16."""
    return isa() == "avx512_vnni" and host().has("avx512bf16")


@functools.cache
def rounds_bf16() -> bool:
    """Whether rows are rounded to bf16 where they meet weights of that type, whose products with such rows are twice as
    fast as with f32: `LOGITLESS_CPU_BF16=1`, on processors that have them."""
    asked = os.environ.get(BF16, "0")
    if asked not in ("0", "1"):
        raise ValueError(f"{BF16}={asked}: must be 0 or 1")
    if asked == "1" and not has_bf16_products():
        raise ValueError(f"{BF16}=1: this processor has no products of bf16 (AVX512-BF16)")
    return asked == "1"


@functools.cache
def compiled_for() -> Host:
    """What kernels are compiled for: this processor, or one like it of which the variant asked for is the best.

    Else LLVM would put such code into wider registers, and neither its speed nor its bits would tell of that processor.
    """
    here = host()
    if isa() == offered()[0] or isa() not in WITHOUT:
        return here
    name, missing = WITHOUT[isa()]
    attributes = here.attributes.split(",")
    return Host(name, ",".join("-" + a[1:] if a[1:].startswith(missing) else a for a in attributes))


@functools.cache
def cache_nbytes(level: int) -> int:
    """A core's data cache of this level; a small one where the system does not say, of the third level a large one."""
    for index in range(4):
        try:
            folder = CACHES / f"index{index}"
            said, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:  # no Linux, or no more of them
            break
        if said == str(level) and kind != "Instruction" and size[:-1].isdecimal():
            return int(size[:-1]) * {"K": 1 << 10, "M": 1 << 20}.get(size[-1], 1)
    return {1: 32 << 10, 2: 256 << 10, 3: 64 << 20}[level]


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)

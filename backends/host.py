"""Instruction sets and caches of the host processor, and the kernel variant that runs on it.

LLVM names the processor and its features. Importing LLVM costs 45 ms and 45 MB, so its answer is
cached on disk, keyed by a hash of the first processor's entry in /proc/cpuinfo."""

from __future__ import annotations

import ctypes
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
from logitless.backends.errors import DeviceError

ISAS = ("avx512_vnni", "avx_vnni", "avx2", "neon_i8mm", "neon_dot", "plain")
NEON = ("neon_i8mm", "neon_dot")
CACHE_INFO = Path("/sys/devices/system/cpu/cpu0/cache")  # of processor 0
LIMITED = {  # variant -> (such a processor of Intel, of AMD, prefixes of the features that they lack)
    "avx_vnni": ("alderlake", "alderlake", ("avx512", "avx10", "amx")),
    "avx2": ("haswell", "znver3", ("avx512", "avx10", "amx", "avxvnni")),
}
BF16 = "LOGITLESS_CPU_BF16"
# The call keeps the GIL, because releasing it would take longer than the call.
current_cpu = ctypes.PyDLL(None).sched_getcpu if sys.platform.startswith("linux") else lambda: -1
# lines of /proc/cpuinfo that change between boots
VOLATILE_LINES = ("cpu MHz", "bogomips", "BogoMIPS")


class IdleThreads:
    """Idle threads of the CPU backend: how they wait for work, in pools that are made later."""

    polls = 4000  # before a thread sleeps, about 150 µs


@dataclass(frozen=True)
class Host:
    """Processor name and features: `attributes` as LLVM writes them (`+avx2,-sse4a,...`)."""

    name: str
    attributes: str

    def has(self, *features: str) -> bool:
        return self._present.issuperset(features)

    @property
    def has_512_bits(self) -> bool:
        """True with 32 registers of 16 floats; otherwise there are 16 of half that width."""
        return self.has("avx512f", "avx512vl")

    @property
    def is_zen(self) -> bool:
        """True for AMD Zen, whose prefetchers need other help than Intel's."""
        return self.name.startswith("znver")

    def prefetches_rows(self, rows: int) -> bool:
        """True where Zen's hardware prefetcher keeps up with tiles of so many rows: with AVX2, of one."""
        return self.is_zen and (rows == 1 or self.has_512_bits)

    @functools.cached_property
    def _present(self) -> frozenset[str]:
        return frozenset(a[1:] for a in self.attributes.split(",") if a.startswith("+"))


@functools.cache
def host() -> Host:
    """The processor of this machine."""
    try:
        with open("/proc/cpuinfo") as f:
            lines = [line for line in takewhile(str.strip, f) if not line.startswith(VOLATILE_LINES)]
    except OSError:  # not Linux
        # every Apple processor has dot products
        is_apple = sys.platform == "darwin" and platform.machine() == "arm64"
        return _query_llvm(*(["dotprod", *["i8mm"] * _apple_has("FEAT_I8MM")] if is_apple else []))
    digest = hashlib.sha256("".join([metadata.version("llvmlite"), *lines]).encode()).hexdigest()
    path = disk_cache.cache_folder() / "cpu" / f"host-{digest[:16]}"
    cached = disk_cache.read(path)
    if cached:
        return Host(*json.loads(cached))
    present = {word for line in lines if line.startswith("Features") for word in line.split()}
    result = _query_llvm(*(["dotprod", *["i8mm"] * ("i8mm" in present)] if "asimddp" in present else []))
    disk_cache.write(path, json.dumps([result.name, result.attributes]).encode())
    return result


def _apple_has(feature: str) -> bool:
    """True if macOS says so of its processor."""
    value, size = ctypes.c_int(0), ctypes.c_size_t(4)
    name = f"hw.optional.arm.{feature}".encode()
    failed = ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, 0)
    return not failed and value.value > 0


def _query_llvm(*of_arm: str) -> Host:
    """Query LLVM for the processor's features.

    `of_arm`: those of an ARM processor, which LLVM does not detect; on Apple's it detects no feature at all."""
    import llvmlite.binding as llvm

    present: dict[str, bool] = llvm.get_host_cpu_features()
    features = llvm.FeatureMap(present | dict.fromkeys(("neon", *of_arm), True) if of_arm else present)
    return Host(llvm.get_host_cpu_name(), features.flatten())


def available_isas() -> list[str]:
    """The entries of ISAS that this machine has, best first."""
    processor = host()
    has = {
        "avx512_vnni": processor.has("avx512vnni", "avx512bw", "avx512vl"),
        "avx_vnni": processor.has("avxvnni"),
        "avx2": processor.has("avx2", "fma"),
        "neon_i8mm": processor.has("neon", "dotprod", "i8mm"),
        "neon_dot": processor.has("neon", "dotprod"),
        "plain": True,
    }
    return [name for name in ISAS if has[name]]


@functools.cache
def isa() -> str:
    """The kernel variant in use: `LOGITLESS_ISA` if set, otherwise the best that the processor has.

    DeviceError when the machine does not have the requested one."""
    available, requested = available_isas(), os.environ.get("LOGITLESS_ISA")
    if requested and requested not in available:
        raise DeviceError(f"LOGITLESS_ISA={requested}: must be one of those of this machine: {', '.join(available)}")
    return requested or available[0]


def has_bf16_dots() -> bool:
    """True when the variant in use has bf16 dot products (AVX512-BF16)."""
    return isa() == "avx512_vnni" and host().has("avx512bf16")


@functools.cache
def casts_to_bf16() -> bool:
    """True with `LOGITLESS_CPU_BF16=1`: activations are cast to bf16 before they meet bf16 weights.

    Such products are twice as fast as with f32 activations. DeviceError when the processor has none.
    """
    flag = os.environ.get(BF16, "0")
    if flag not in ("0", "1"):
        raise DeviceError(f"{BF16}={flag}: must be 0 or 1")
    if flag == "1" and not has_bf16_dots():
        raise DeviceError(f"{BF16}=1: this processor has no products of bf16 (AVX512-BF16)")
    return flag == "1"


@functools.cache
def target_host() -> Host:
    """The processor that kernels are compiled for.

    It is this processor, or one of the same maker whose best variant is the requested one. Otherwise
    LLVM would use wider registers, and neither speed nor bits would match that processor."""
    processor = host()
    if isa() == available_isas()[0] or isa() not in LIMITED:
        return processor
    intel, amd, missing = LIMITED[isa()]
    attributes = processor.attributes.split(",")
    return Host(
        amd if processor.is_zen else intel,
        ",".join("-" + a[1:] if a[1:].startswith(missing) else a for a in attributes),
    )


@functools.cache
def cache_nbytes(level: int) -> int:
    """Bytes of a core's data cache of this level; a default where the system does not report it.

    The default is small for levels 1 and 2, and large for level 3."""
    for index in range(4):
        try:
            folder = CACHE_INFO / f"index{index}"
            found_level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:  # not Linux, or no more caches
            break
        if found_level == str(level) and kind != "Instruction" and size[:-1].isdecimal():
            return int(size[:-1]) * {"K": 1 << 10, "M": 1 << 20}.get(size[-1], 1)
    return {1: 32 << 10, 2: 256 << 10, 3: 64 << 20}[level]

"""Cores for computing threads: one thread a core, none on much slower cores, and as many as the quota allows.

A step ends with its slowest thread. Chunks are taken while there are any, so a core of half the speed adds its half
(docs/experiments/cpu-threads.md). A core of a quarter holds steps up, and a second thread of a core (SMT) adds
nothing to one that is bound by arithmetic or memory."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import re
import sys
from collections.abc import Iterator

from logitless.backends import system_files
from logitless.backends.system_files import group_folders, is_number, read

CPU = "sys/devices/system/cpu/cpu"
LEAST_SPEED = 1 / 3  # of the fastest core's
ATOM_SPEED = 0.6  # of an efficiency core of Intel's, at the same frequency
_CPU_LIST = re.compile(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*")


def cores() -> int:
    """Number of threads that compute unless -t says otherwise."""
    return _cores(usable_cpus())


@functools.cache
def _cores(usable: frozenset[int]) -> int:
    n = _performance_cores() if sys.platform == "darwin" else len({siblings(cpu) for cpu in fast_cpus(usable)})
    limit = quota()
    # Half a core more is worth a thread: prompts are 1.5 times as fast, tokens come no slower.
    return n if limit is None else max(1, min(n, math.floor(limit + 0.5)))


def usable_cpus() -> frozenset[int]:
    """Processors that this process may use, a number for each hardware thread."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


@functools.cache
def fast_cpus(usable: frozenset[int]) -> frozenset[int]:
    """Processors among these that are not much slower than the fastest one."""
    atoms = cpu_list(read("sys/devices/cpu_atom/cpus")) | cpu_list(read("sys/devices/cpu_lowpower/cpus"))
    speeds = {}
    for cpu in usable:
        capacity = _number(f"{CPU}{cpu}/cpu_capacity")
        frequency = _number(f"{CPU}{cpu}/cpufreq/cpuinfo_max_freq")
        speeds[cpu] = capacity or frequency * (ATOM_SPEED if cpu in atoms else 1.0)
    fastest = max(speeds.values())
    return frozenset(cpu for cpu in usable if not 0 < speeds[cpu] < LEAST_SPEED * fastest)


@functools.cache
def siblings(cpu: int) -> frozenset[int]:
    """The processors of this one's core."""
    return cpu_list(read(f"{CPU}{cpu}/topology/thread_siblings_list")) or frozenset({cpu})


def memory_nodes() -> list[frozenset[int]]:
    """The processors of each NUMA node that has some."""
    nodes = (system_files.ROOT / "sys/devices/system/node").glob("node[0-9]*/cpulist")
    return [cpus for node in sorted(nodes) if (cpus := cpu_list(read(str(node.relative_to(system_files.ROOT)))))]


def quota() -> float | None:
    """Cores that this process's control groups allow it, the least of all; None without a limit."""
    return min(_quotas(), default=None)


def _quotas() -> Iterator[float]:
    for folder, version in group_folders("cpu"):
        if version == 1:
            spent, period = (read(f"{folder}/cpu.cfs_{name}_us") for name in ("quota", "period"))
        else:
            spent, _, period = read(f"{folder}/cpu.max").partition(" ")
        if is_number(spent) and is_number(period) and int(period):
            yield int(spent) / int(period)


def cpu_list(text: str) -> frozenset[int]:
    """The numbers of a list of the kernel's, such as 0-3,8; none where the text is no such list."""
    ranges = [part.split("-") for part in text.split(",")] if _CPU_LIST.fullmatch(text := text.strip()) else []
    return frozenset(i for ends in ranges for i in range(int(ends[0]), int(ends[-1]) + 1))


def _performance_cores() -> int:
    """Performance cores of a Mac; its efficiency cores have a quarter of the speed."""
    library, count = ctypes.CDLL(None), ctypes.c_int32(0)
    for name in (b"hw.perflevel0.physicalcpu", b"hw.physicalcpu"):
        size = ctypes.c_size_t(ctypes.sizeof(count))
        if library.sysctlbyname(name, ctypes.byref(count), ctypes.byref(size), None, 0) == 0 and count.value > 0:
            return count.value
    return os.cpu_count() or 1


def _number(path: str) -> int:
    text = read(path)
    return int(text) if is_number(text) else 0

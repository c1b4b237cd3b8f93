"""Processors, threads, priority and memory of the process: --cpu-mask, --cpu-range, --numa, --poll, --prio, --mlock."""

from __future__ import annotations

import ctypes
import logging
import os
from types import SimpleNamespace

from logitless.backends.cores import memory_nodes, usable_cpus
from logitless.backends.host import IdleThreads, current_cpu
from logitless.cli.flags.flags import CliError

log = logging.getLogger("logitless.loading")
_NICE = {-1: 5, 1: -5, 2: -10, 3: -20}  # of --prio, as llama-server's


def lock_memory(options: SimpleNamespace, *, exceeded: bool = False) -> None:
    """Keep all that this process has in memory (--mlock), and what it will have where there is no limit.

    `exceeded`: by weights, some of which are in a file for that reason; nothing is locked."""
    if "mlock" not in options.load_mode:
        return
    if exceeded:
        log.warning("--mlock: nothing is locked, for the weights exceed memory")
        return
    try:
        import resource
    except ImportError:  # Windows
        log.warning("--mlock: this platform cannot do that")
        return
    library = ctypes.CDLL(None, use_errno=True)
    now, later = 1, 2  # MCL_CURRENT, MCL_FUTURE
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if library.mlockall(now | later if limit == resource.RLIM_INFINITY else now):
        log.warning("--mlock: %s (ulimit -l)", os.strerror(ctypes.get_errno()))


def _settle_nodes(numa: str | None) -> None:
    """Keep to the processors of one NUMA node (isolate). numactl's own choice is the system's already.
    CliError: the threads cannot be spread over several nodes."""
    nodes = memory_nodes() if numa else []
    if len(nodes) < 2:
        return
    if numa == "distribute":
        raise CliError("--numa distribute: start with `numactl --interleave=all` and --numa numactl, for that")
    usable, here = usable_cpus(), current_cpu()
    if numa == "isolate":
        os.sched_setaffinity(0, next((node & usable for node in nodes if here in node), usable))


def settle(options: SimpleNamespace) -> None:
    """Choose processors and priority of this thread, which all that it starts inherit. CliError: there are no
    such processors here. DeviceError: variables of the environment ask for kernels that it cannot run."""
    if any(os.environ.get(name) for name in ("LOGITLESS_ISA", "LOGITLESS_CPU_BF16")):
        from logitless.backends.host import casts_to_bf16, isa

        isa()  # before the port is taken
        casts_to_bf16()
    if options.load_mode in ("none", "dio"):
        log.warning("--load-mode %s: without effect here, the file is always mapped into memory", options.load_mode)
    _settle_nodes(options.numa)
    IdleThreads.polls = IdleThreads.polls * options.poll // 50
    cpus = frozenset().union(*(each for each in (options.cpu_mask, options.cpu_range) if each))
    flag = "--cpu-mask" if options.cpu_mask else "--cpu-range"
    if cpus and not hasattr(os, "sched_setaffinity"):
        raise CliError(f"{flag}: this platform cannot do that")
    if cpus:
        usable = usable_cpus()
        if not cpus & usable:
            raise CliError(f"{flag}: this process may use none of them, only {','.join(map(str, sorted(usable)))}")
        os.sched_setaffinity(0, cpus & usable)
    if options.prio:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, _NICE[options.prio])
        except OSError as error:
            log.warning("--prio %d: %s", options.prio, error.strerror)

"""Processors, priority and memory of the process: --cpu-mask, --cpu-range, --prio, --mlock."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
from types import SimpleNamespace

from logitless.cli.flags.flags import CliError

log = logging.getLogger("logitless.loading")
_NICE = {-1: 5, 1: -5, 2: -10, 3: -20}  # of --prio, as llama-server's


def lock_memory(options: SimpleNamespace) -> None:
    """Keep all that this process has in memory (--mlock), and what it will have where there is no limit."""
    if "mlock" not in options.load_mode:
        return
    library = ctypes.CDLL(None, use_errno=True)
    now, later = 1, 2  # MCL_CURRENT, MCL_FUTURE
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if library.mlockall(now | later if limit == resource.RLIM_INFINITY else now):
        log.warning("--mlock: %s (ulimit -l)", os.strerror(ctypes.get_errno()))


def settle(options: SimpleNamespace) -> None:
    """Choose processors and priority of this thread, which all that it starts inherit. CliError: there are no
    such processors here. DeviceError: variables of the environment ask for kernels that it cannot run."""
    if any(os.environ.get(name) for name in ("LOGITLESS_ISA", "LOGITLESS_CPU_BF16")):
        from logitless.backends.host import casts_to_bf16, isa

        isa()  # before the port is taken
        casts_to_bf16()
    cpus = frozenset().union(*(each for each in (options.cpu_mask, options.cpu_range) if each))
    flag = "--cpu-mask" if options.cpu_mask else "--cpu-range"
    if cpus and not hasattr(os, "sched_setaffinity"):
        raise CliError(f"{flag}: this platform cannot do that")
    if cpus:
        usable = os.sched_getaffinity(0)
        if not cpus & usable:
            raise CliError(f"{flag}: this process may use none of them, only {','.join(map(str, sorted(usable)))}")
        os.sched_setaffinity(0, cpus & usable)
    if options.prio:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, _NICE[options.prio])
        except OSError as error:
            log.warning("--prio %d: %s", options.prio, error.strerror)

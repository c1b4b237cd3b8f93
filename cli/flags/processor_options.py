"""Flags for the process on its machine: processors, threads that wait, priority, locked memory."""

from __future__ import annotations

from logitless.cli.flags.flags import Flag, Group
from logitless.engine.loading.values import choice, cpu_mask, cpu_range, whole

PROCESSOR = Group("Processor", (
    Flag("-C --cpu-mask", "run on these processors only, a hexadecimal mask", cpu_mask, None, "MASK"),
    Flag("-Cr --cpu-range", "run on these processors only; together with --cpu-mask on all of both", cpu_range, None,
         "LO-HI"),
    Flag("-lm --load-mode", "mlock, mmap+mlock: keep the model in memory, where the system allows it; the others "
         "change nothing", choice("auto", "none", "mmap", "mlock", "mmap+mlock", "dio"), "auto", "MODE",
         env="LLAMA_ARG_LOAD_MODE"),
    Flag("--mlock", "the same as --load-mode mlock", env="LLAMA_ARG_MLOCK", means="--load-mode mlock"),
    Flag("--numa", "isolate: run on the processors of one NUMA node, that of the start; numactl: on those that numactl "
         "gives; distribute: on all, where there is one node", choice("distribute", "isolate", "numactl"), None, "WORD",
         env="LLAMA_ARG_NUMA"),
    Flag("--poll", "how long idle threads look for work before they sleep: 0 not at all, 50 about 0.15 ms, 100 twice "
         "that", whole(0, 100), 50),
    Flag("--prio", "priority of the process: -1 low, 0 normal, 1 medium, 2 high, 3 highest", whole(-1, 3), 0),
))  # fmt: skip

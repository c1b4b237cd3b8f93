"""Non-temporal reads of weights that exceed the L3 cache.

A step reads each weight once. When all weights together exceed the L3 cache, none of them is still
there for the next step, but they evict the data of Python and of other ops. Zen cores can prefetch
a line into the L1 cache alone (`prefetchnta`). Kernels of one row with quantised weights, which are
bound by memory, have a variant that does so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from logitless.backends.cpu.fusion.packing import packed, packed_nbytes
from logitless.backends.cpu.kernels.matmul.layout import uses_prefetch
from logitless.backends.cpu.threads.pool import Task
from logitless.backends.host import cache_nbytes, target_host
from logitless.graph.tensor import Tensor


def exceed_l3(nodes: Iterable[Tensor]) -> bool:
    """True when the weights of these nodes exceed the L3 cache."""
    weights = {s: packed_nbytes(s.dtype, *s.shape) for t in nodes for s in t.src if packed(s)}
    return sum(weights.values()) > cache_nbytes(3)


def nontemporal_variant(kernel: str) -> str:
    """The variant of a kernel with non-temporal prefetch; the kernel itself where there is none."""
    family, *params = kernel.split(":")
    one_row = (family == "linear" and params[1:] == ["1x1"]) or (family == "linear_glu" and params[2:] == ["1"])
    return f"{kernel}:nontemporal" if one_row and target_host().is_zen and uses_prefetch(params[0], 1) else kernel


def with_nontemporal(tasks: Iterable[Task]) -> list[Task]:
    """The same tasks with the non-temporal variants of their kernels."""
    return [replace(i, kernel=nontemporal_variant(i.kernel)) for i in tasks]

"""Runs the CPU kernels of the sampling ops on plain arrays."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

import logitless.backends.cpu.lowering.sampling  # noqa: F401  (registers its rules)
from logitless.backends.cpu.lowering.registry import LOWERINGS
from logitless.backends.cpu.threads.pool import TaskList, WorkerPool
from logitless.graph.op import Variable
from logitless.graph.ops.sampling import sample
from logitless.graph.tensor import Tensor, feed

DTYPES = {
    "sample": ("f32", "f32", "f32", "i32", "u32", "i32", "i32", "i32", "f32", "i32", "u32", "i32"),
    "log_probs": ("f32", "i32", "i32"),
}
NUMPY = {"f32": np.float32, "i32": np.int32, "u32": np.uint32}


@functools.cache
def pool(n_threads: int = 1) -> WorkerPool:
    return WorkerPool(n_threads)


def typed(op: str, sources: Sequence[Any]) -> list[np.ndarray]:
    """New arrays of the op's dtypes."""
    kinds = [NUMPY[kind] for kind in DTYPES[op]]  # the masks at the end are optional
    return [
        np.array(a.array if isinstance(a, Variable) else a, k, order="C") for a, k in zip(sources, kinds, strict=False)
    ]


def run(op: str, arrays: Sequence[np.ndarray], n_threads: int = 1, **attrs: int) -> np.ndarray:
    """Result of the kernel. Like the reference, it updates the state among the arrays."""
    sources = [feed(str(i), a.shape, kind) for i, (a, kind) in enumerate(zip(arrays, DTYPES[op], strict=False))]
    t: Tensor = getattr(sample, op)(*sources, **attrs)
    out = np.zeros(t.shape, NUMPY[t.dtype])
    at = {s: a.ctypes.data for s, a in zip(sources, arrays, strict=True)} | {t: out.ctypes.data}
    pool(n_threads).run(TaskList(LOWERINGS[op](t, lambda s: at[s])))
    return out

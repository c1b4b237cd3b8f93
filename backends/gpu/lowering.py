"""Lowering rules: one function per op, from a node to its launches, registered by the op's name.

    @lower("rms_norm")
    def _(t, shape): return [Dispatch(...)]

A rule returns None where it has no kernel for these types or shapes; the node then runs on the next
backend."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.backends.gpu.language.dialect import KERNELS, SIMT, Defines, Shape
from logitless.graph.backend import Bytes, Rewrite, Rules
from logitless.graph.dtype import DTYPES
from logitless.graph.op import OPS
from logitless.graph.tensor import Tensor

At = tuple[Tensor | None, int]  # a tensor's place, moved by so many bytes; None: the scratch
Buffers = tuple[Tensor | At | None, ...]
Lowering = Callable[[Tensor, Shape], "list[Dispatch] | None"]
LOWERINGS, REWRITES = Rules[Lowering](), Rules[Rewrite]()
lower, rewrite = LOWERINGS.of, REWRITES.of
MAX_GROUPS = 65535  # in one dimension, on every Vulkan device
CHUNK = 4096  # elements that are worth a group


@dataclass(frozen=True)
class VariantChoice:
    """Variants of an op's kernel (graph/op.py), of which each run takes one: all give the same bits.

    `number` tells which by the values of the tensor `by`, where the host writes them; else the last runs."""

    variants: tuple[Defines, ...]
    by: Tensor
    number: Callable[[npt.NDArray[Any]], int]

    def of_run(self, host: Bytes | None) -> Callable[[], int]:
        """The number of the variant that a run takes. `host`: the bytes of `by`. It keeps no tensor."""
        number, last = self.number, len(self.variants) - 1
        values = None if host is None else host.view(DTYPES[self.by.dtype].numpy or np.uint8)
        return lambda: last if values is None else number(values)


@dataclass(frozen=True)
class Dispatch:
    """A launch. `words` are the kernel's parameters as raw 32 bits, `scratch` the bytes of it that are used."""

    kernel: str
    defines: Defines
    buffers: tuple[At, ...]
    words: tuple[int, ...]
    groups: tuple[int, int, int]
    scratch: int = 0
    choice: VariantChoice | None = None  # `defines` are those of the last variant


def bits(value: float) -> int:
    """A float as a parameter word."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def dispatch(
    kernel: str,
    shape: Shape,
    buffers: tuple[Tensor | At | None, ...],
    words: tuple[int, ...],
    groups: tuple[int, int] | int | None = None,
    scratch: int = 0,
    **variant: int,
) -> Dispatch:
    """A launch of the variant of a kernel that has these constants. ValueError where it does not fit.

    `groups` None: the kernel walks so many elements as the first word says (FOR_EACH)."""
    declared = KERNELS[kernel]
    if groups is None:
        groups = groups_for(words[0], shape, declared.threads(declared.variants(SIMT)[0]))
    gx, gy = groups if isinstance(groups, tuple) else (groups, 1)
    if gx > MAX_GROUPS or gy > MAX_GROUPS:
        raise ValueError(f"kernel {kernel}: {gx} x {gy} groups are more than {MAX_GROUPS}")
    at = tuple(b if isinstance(b, tuple) else (b, 0) for b in buffers)
    if len(at) != len(declared.args) or len(words) != len(declared.words):
        raise ValueError(f"kernel {kernel}: {len(at)} buffers and {len(words)} words do not fit its declaration")
    return Dispatch(
        kernel,
        declared.variant(shape, **variant),
        at,
        tuple(w & 0xFFFFFFFF for w in words),
        (max(gx, 1), max(gy, 1), 1),
        scratch,
    )


def lower_plain(**ops: Callable[..., tuple[int, ...]]) -> None:
    """Register ops whose kernel has their name, buffers for the sources and the result, and a thread for each
    element. The words of each, the number of elements first, are a function of what the op's declaration
    names (graph/declaration.py)."""

    def rule(t: Tensor, shape: Shape) -> list[Dispatch]:
        return [dispatch(t.op, shape, (*t.src, t), _words(t, ops[t.op]))]

    for name in ops:
        lower(name)(rule)


def lower_rows(**ops: Callable[..., tuple[int, ...]]) -> None:
    """Lowering of kernels of a group for each row, whose words begin with a row's length and the rows' number."""

    def rule(t: Tensor, shape: Shape) -> list[Dispatch]:
        words = _words(t, ops[t.op])
        return [dispatch(t.op, shape, (*t.src, t), words, row_groups(words[1], shape))]

    for name in ops:
        lower(name)(rule)


def _words(t: Tensor, of: Callable[..., tuple[int, ...]]) -> tuple[int, ...]:
    return of(**OPS[t.op].signature.names(t.op, t.src, t.attrs))


def groups_for(n: int, shape: Shape, per_group: int) -> int:
    """Number of groups of a kernel that walks n elements with FOR_EACH, `per_group` of them at a time."""
    if shape.name == "cpu":
        return max(1, min(shape.units, n // CHUNK))
    return max(1, min(-(-n // per_group), 16384))


def row_groups(rows: int, shape: Shape) -> int:
    """Number of groups of a kernel that takes rows in turn."""
    return min(rows, shape.units if shape.name == "cpu" else MAX_GROUPS)


def rows_of(t: Tensor) -> tuple[int, int]:
    """Length of the last axis, and number of its rows."""
    n = t.shape[-1] if t.shape else 1
    return n, t.size // max(n, 1)


def is_packed(t: Tensor) -> bool:
    """True if t is a constant matrix, whose bytes are packed (matmul/layout.py)."""
    return t.op == "variable" and bool(t.attrs.get("constant")) and len(t.shape) == 2

"""Test backend that runs numpy references in f32, refuses ops, and counts allocations and runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from logitless.graph.backend import Backend, Bytes, Location
from logitless.graph.dtype import DTYPES
from logitless.graph.op import OPS, destination
from logitless.graph.tensor import Tensor

Refuses = Collection[str] | Callable[[Tensor], bool]


@dataclass
class Memory:
    array: Bytes

    @property
    def nbytes(self) -> int:
        return len(self.array)


class NumpyBackend(Backend):
    """Backend of references. `refuses`: names of ops, or a predicate on nodes."""

    alignment = 32
    memory_bytes = 0

    def __init__(self, name: str = "numpy", refuses: Refuses = ()) -> None:
        self.name, self.refuses = name, refuses
        self.allocated: list[int] = []
        self.ran: list[str] = []
        self.uploads = 0
        self.closed = False

    def supports(self, t: Tensor) -> bool:
        return not (self.refuses(t) if callable(self.refuses) else t.op in self.refuses)

    def rewrite(self, t: Tensor) -> Tensor:
        return t

    def fuse(self, fetches: Sequence[Tensor], mine: Callable[[Tensor], bool]) -> Sequence[Tensor]:
        return fetches

    def alloc(self, nbytes: int, *, feeds: bool = False) -> Memory:
        self.allocated.append(nbytes)
        return Memory(np.zeros(nbytes, np.uint8))

    def constant_nbytes(self, t: Tensor) -> int:
        return t.nbytes

    def load(self, t: Tensor, raw: Bytes) -> Memory:
        memory = self.alloc(len(raw))
        memory.array[:] = raw
        return memory

    def upload(self, location: Location, data: Bytes) -> None:
        self.uploads += 1
        location.buffer.array[location.offset :][: len(data)] = data

    def download(self, location: Location, nbytes: int) -> Bytes:
        return location.buffer.array[location.offset :][:nbytes]  # type: ignore[no-any-return]

    def wait(self) -> None:
        pass

    def compile(self, nodes: Sequence[Tensor], locate: Callable[[Tensor], Location]) -> _Program:
        return _Program(self, nodes, locate)

    def close(self) -> None:
        self.closed = True


class _Program:
    def __init__(self, backend: NumpyBackend, nodes: Sequence[Tensor], locate: Callable[[Tensor], Location]) -> None:
        self.backend, self.nodes = backend, nodes
        self.places = {t: locate(t) for node in nodes for t in (node, *node.src)}

    def view(self, t: Tensor) -> Any:
        at = self.places[t]
        raw = at.buffer.array[at.offset :][: t.nbytes]
        return raw.view(DTYPES[t.dtype].numpy).reshape(t.shape)

    def run(self) -> None:
        for t in self.nodes:
            self.backend.ran.append(t.op)
            result = OPS[t.op].reference(*(self.view(s) for s in t.src), **t.attrs)
            if destination(t) is None:
                self.view(t)[...] = result

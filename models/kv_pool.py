"""KV pool on the device: pages of 16 tokens, found by page tables, and recurrent state rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from logitless.graph.backend import Bytes
from logitless.graph.execution.session import Session
from logitless.graph.ops.attention.paged_attention import copy_pages
from logitless.graph.tensor import Tensor


@dataclass(frozen=True)
class Pool:
    """`n` entries of some layers' caches; an entry has the same index in all layers."""

    layers: Mapping[int, list[Tensor]]  # (n, …) each
    n: int

    @cached_property
    def caches(self) -> list[Tensor]:
        """Caches, layer by layer."""
        return [cache for caches in self.layers.values() for cache in caches]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one entry in all layers."""
        return sum(t.nbytes // t.shape[0] for t in self.caches)

    def _parts(self, session: Session) -> list[tuple[str, int]]:
        """Variable and bytes per entry of each cache, or of its heads on a device, in the order of an entry's bytes."""
        return [(t.name, t.nbytes // t.shape[0]) for cache in self.caches for t in session.pieces_of(cache)]

    def read(self, session: Session, i: int) -> Bytes:
        """A copy of entry i, layer by layer, in the device's layout."""
        data, at = np.empty(self.nbytes, np.uint8), 0
        to = data.data
        for name, size in self._parts(session):
            if (view := session.host_view(name)) is not None:
                to[at : at + size] = view[i * size : (i + 1) * size]
            else:
                session.read_bytes(name, i * size, size, data[at : at + size])
            at += size
        return data

    def write(self, session: Session, i: int, data: Bytes) -> None:
        """Overwrite entry i with bytes from `read`."""
        source, at = data.data, 0
        for name, size in self._parts(session):
            if (view := session.host_view(name)) is not None:
                view[i * size : (i + 1) * size] = source[at : at + size]
            else:
                session.write(name, data[at : at + size], i * size)
            at += size


@dataclass(frozen=True)
class PagePool(Pool):
    """KV pages: keys (n, H_kv, D, 16) and values (n, H_kv, 16, D) of each layer, or MLA rows.
    `tables` has each slot's pages."""

    tables: Tensor  # (S, pages per table) i32

    def copied(self, pairs: Tensor) -> list[Tensor]:
        """The caches after page copies; pairs (C, 2) i32: (from, to)."""
        return [copy_pages(cache, pairs) for cache in self.caches]

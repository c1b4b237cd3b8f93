"""Pages of the KV cache on the device: what some layers keep of 16 tokens each, found by tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from graph.backend import Bytes
from graph.ops.attention import copy_pages
from graph.session import Session
from graph.tensor import Tensor


@dataclass(frozen=True)
class PagePool:
    """Of each layer keys (pages, H_kv, D, 16) and values (pages, H_kv, 16, D), or rows that are both; all layers have
    a sequence's page i under the same number, which its row of `tables` says."""

    layers: Mapping[int, list[Tensor]]
    tables: Tensor  # (S, pages per table) i32
    n_pages: int

    @cached_property
    def caches(self) -> list[Tensor]:
        """Layer by layer, keys before values."""
        return [cache for caches in self.layers.values() for cache in caches]

    def copied(self, pairs: Tensor) -> list[Tensor]:
        """The caches after whole pages were copied; pairs (C, 2) i32: (from, to)."""
        return [copy_pages(cache, pairs) for cache in self.caches]

    @cached_property
    def page_nbytes(self) -> int:
        """Bytes of one page of all layers."""
        return sum(size for _, size in self._parts)

    @cached_property
    def _parts(self) -> list[tuple[str, int]]:
        """Of a page, in the order of its bytes: states, and how many bytes they have of it."""
        return [(t.name, t.nbytes // t.shape[0]) for t in self.caches]

    def read_page(self, session: Session, page: int, into: Bytes | None = None) -> Bytes:
        """A copy of a page, layer by layer, keys before values, as the device keeps them; on request `into` memory for
        `page_nbytes`."""
        data, at = np.empty(self.page_nbytes, np.uint8) if into is None else into, 0
        for name, size in self._parts:
            session.read_bytes(name, page * size, size, data[at : at + size])
            at += size
        return data

    def write_page(self, session: Session, page: int, data: Bytes) -> None:
        """Overwrite a page with what `read_page` gave."""
        at = 0
        for name, size in self._parts:
            session.write(name, data[at : at + size], page * size)
            at += size

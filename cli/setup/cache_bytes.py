"""How much memory a KV cache will need, from the model's header alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from logitless.engine.batch import PAGE
from logitless.engine.kv_cache.block_pool import near_pool_size
from logitless.graph.dtype import nbytes
from logitless.models.batch import cache_types
from logitless.models.hparams.hparams import Hparams


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of a cell in all layers, and where those with a window may have pages of their own, of these and of a cell
    in the others."""

    cell: int
    windows: int = 0
    far: int = 0

    def of(self, n_ctx: int) -> int:
        """Bytes of n_ctx cells."""
        apart = self.windows + n_ctx * self.far
        return min(n_ctx * self.cell, apart) if self.windows else n_ctx * self.cell

    def most(self, room: int) -> int:
        """The cells that so many bytes have room for."""
        together = room // max(1, self.cell)  # models whose layers all keep states have nothing in a cell
        return max(together, (room - self.windows) // self.far) if self.windows else together


def cache_bytes(
    h: Hparams,
    type_k: str,
    type_v: str,
    *,
    n_slots: int,
    n_ubatch: int,
    n_kept: int,
    swa_full: bool,
    nextn: bool = False,
) -> CacheBytes:
    """`n_kept`: windows that are kept beside those of the slots
    (logitless.engine.kv_cache.block_pool.near_pool_size); `nextn`: with the block
    that guesses."""
    types = cache_types(h, type_k, type_v)
    layers = (*range(h.n_kept), *((h.n_layer,) if nextn else ()))

    def of_cell(layers: Iterable[int]) -> int:
        rows = [h.sizes(i).n_head_kv * h.sizes(i).head_dim for i in layers if h.attends(i)]
        return sum(nbytes(t, (row,)) if row % 32 == 0 else 4 * row for row in rows for t in types)

    cell = of_cell(layers)
    if swa_full or not h.has_windows:
        return CacheBytes(cell)
    far = of_cell(i for i in layers if not h.is_local(i))
    return CacheBytes(cell, near_pool_size(h.window, n_slots, n_ubatch, n_kept) * PAGE * (cell - far), far)

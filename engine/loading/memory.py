"""Context size that fits into memory: KV cache bytes by the model's header, against free memory."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from logitless.engine.batch import BLOCK_SIZE
from logitless.engine.kv_cache.block_pool import window_pool_size
from logitless.engine.kv_cache.recurrent_state import n_state_rows
from logitless.engine.loading.options import ModelOptions, OptionConflict
from logitless.engine.runner.placement import MIN_CTX, usable
from logitless.graph.dtype import nbytes
from logitless.graph.ops.attention.compressed import cells_per_page
from logitless.models.batch import cache_types
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams
from logitless.models.hparams.layer_sizes import LayerSizes
from logitless.models.hparams.mla import CompressionParams

log = logging.getLogger("logitless.loading")


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of the KV cache as a function of its token slots.

    With sliding windows that have a block pool of their own, `windows` is that pool's size and
    `full` the bytes of a token slot in the other layers."""

    cell: int  # of a token slot in all layers
    windows: int = 0
    full: int = 0

    def beside(self, drafter: Sequence[LayerSizes | int], type_k: str, type_v: str) -> CacheBytes:
        """Bytes of these caches and those of a drafter's layers (DrafterFile.kv_layers)."""
        rows = [size.n_head_kv * size.head_dim for size in drafter if not isinstance(size, int)]
        more = sum(_nbytes(t, row) for row in rows for t in (type_k, type_v))
        return replace(self, cell=self.cell + more, full=self.full + more)

    def of(self, n_ctx: int) -> int:
        """Bytes of n_ctx token slots."""
        apart = self.windows + n_ctx * self.full
        return min(n_ctx * self.cell, apart) if self.windows else n_ctx * self.cell

    def most(self, room: int) -> int:
        """The most token slots that fit into `room` bytes."""
        together = room // max(1, self.cell)  # 0 bytes a token slot: all layers are recurrent
        return max(together, (room - self.windows) // max(1, self.full)) if self.windows else together


def cache_bytes(
    h: Hparams,
    type_k: str,
    type_v: str,
    *,
    n_slots: int,
    n_ubatch: int,
    n_checkpoints: int,
    swa_full: bool,
    mtp: bool = False,
) -> CacheBytes:
    """Bytes of a KV cache of these number types.

    `n_checkpoints`: sliding windows that are kept beside those of the slots
    (engine/kv_cache/block_pool.py); `mtp`: the MTP head's cache counts too."""
    types = cache_types(h, type_k, type_v)
    layers = (*range(h.n_layer_kv), *((h.n_layer,) if mtp else ()))

    def of_cell(layers: Collection[int]) -> int:
        rows = [h.sizes(i).n_head_kv * h.sizes(i).head_dim for i in layers if h.attends(i)]
        index = sum(_nbytes(type_k, h.indexer.size) for i in layers if h.indexes(i)) if h.indexer else 0
        return sum(_nbytes(t, row) for row in rows for t in types) + index

    cell = of_cell(layers) * (2 if h.cross_layers else 1)
    if h.compression:
        cell, full = _compressed_bytes(h, h.compression, layers, type_k)
    if swa_full or not h.has_windows:
        return CacheBytes(cell)
    if not h.compression:
        full = of_cell([i for i in layers if not h.is_local(i)])
    return CacheBytes(
        cell, window_pool_size(h.window, n_slots, n_ubatch, n_checkpoints) * BLOCK_SIZE * (cell - full), full
    )


def _compressed_bytes(h: Hparams, c: CompressionParams, layers: Iterable[int], dtype: str) -> tuple[int, int]:
    """Bytes of a token slot, and those of them that are of rows of blocks."""
    of_tokens, of_blocks = 0, 0
    for layer in layers:
        pools = c.pooled(layer, h.head_dim)
        of_tokens += _nbytes(dtype, h.head_dim) + 4 * sum(pools)
        rows = sum(_nbytes(dtype, n) for n, _ in zip((h.head_dim, c.index_size), pools, strict=False))
        of_blocks += cells_per_page(c.blocks[layer] or 1) * rows
    of_blocks = -(-of_blocks // BLOCK_SIZE)
    return of_tokens + of_blocks, of_blocks


def _nbytes(dtype: str, n: int) -> int:
    """Bytes of a row of n numbers in a cache; rows that blocks of 32 do not fill are f32."""
    return nbytes(dtype, (n,)) if n % 32 == 0 else 4 * n


def fitting_context(
    options: ModelOptions,
    h: Hparams,
    weights: int,
    memory: int,
    *,
    n_draft_tokens: int,
    swa_full: bool,
    mtp: bool = False,
    behind: Sequence[LayerSizes | int] = (),
) -> int:
    """The context in tokens: `ctx_size`, or the largest useful one that fits beside `weights` bytes
    into `memory` bytes.

    `mtp`: the MTP head's cache counts too. `behind`: a drafter's layers. OptionConflict: `ctx_size`,
    checkpoints or drafts need more memory than there is."""
    memory = usable(memory, options.fit_target[-1:], 0)
    room = memory - weights if weights < memory else memory // 2  # weights that exceed memory stay in a file
    if h.recurrent:
        states = n_state_rows(options.n_slots, options.ctx_checkpoints, n_draft_tokens) * h.recurrent.nbytes
        if states > max(room, 0) and (options.ctx_checkpoints > 2 or n_draft_tokens):
            needed, free = states / 2**30, max(room, 0) / 2**30
            checkpoints = f"--ctx-checkpoints {options.ctx_checkpoints}"
            drafts = "--spec-learn" if options.spec_learn else f"--spec-type {options.spec_type}"
            flag = checkpoints if options.ctx_checkpoints > 2 else drafts
            raise OptionConflict(f"{flag}: would need {needed:.1f} GiB, there is room for {free:.1f}")
        room -= states
    cache = cache_bytes(
        h,
        options.cache_type_k,
        options.cache_type_v,
        n_slots=options.n_slots,
        n_ubatch=min(options.ubatch_size, options.batch_size),
        n_checkpoints=options.ctx_checkpoints,
        swa_full=swa_full,
        mtp=mtp,
    ).beside(behind, options.cache_type_k, options.cache_type_v)
    n_ctx = options.ctx_size
    if cache.of(n_ctx) > max(room, 0) and n_ctx > MIN_CTX:
        needed, free = cache.of(n_ctx) / 2**30, max(room, 0) / 2**30
        raise OptionConflict(
            f"--ctx-size {n_ctx}: the KV cache would need {needed:.1f} GiB, and there is room for {free:.1f}"
        )
    if n_ctx:
        return n_ctx
    whole = whole_context(options, h)
    if not options.fit:
        return whole
    n_ctx = min(whole, max(cache.most(room // 2) // 256 * 256, options.fit_ctx))
    if n_ctx < whole:
        log.warning("context reduced from %d to %d tokens to fit into memory", whole, n_ctx)
    return n_ctx


def whole_context(options: ModelOptions, h: Hparams) -> int:
    """The context in tokens where memory is no matter."""
    per_slot = options.kv_unified_per_slot
    return (per_slot or h.n_ctx_train) * (1 if options.unified and not per_slot else options.n_slots)


def weights_nbytes(gguf: GGUFFile) -> int:
    """Bytes of the weights on a device; the mapped file's own pages do not count, the system takes them back."""
    return sum(t.nbytes for t in gguf.tensors.values())


def cache_ram_bytes(mib: int | None, memory: int) -> int | None:
    """Bytes of host memory, of which there are `memory`, for offloaded KV blocks (`cache_ram` MiB); None: no limit."""
    if mib is None:
        return min(8192 << 20, memory // 4)
    return None if mib < 0 else mib << 20


def cache_disk_bytes(mib: int | None) -> int:
    """Bytes of files for KV blocks that leave host memory (`cache_disk_size` MiB)."""
    return (16384 if mib is None else mib) << 20

"""Batch of a forward pass: token rows, and the KV cache or training windows that they attend to.

A server's rows are a `Batch` of any sequences with the paged KV cache; a trainer's are whole
`Sequences`, which are each other's memory; an encoder's are `Texts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

from logitless.graph.dtype import KV_TYPES
from logitless.graph.execution.session import Session
from logitless.graph.ops.attention.causal_attention import causal_attention
from logitless.graph.ops.attention.compressed import (
    block_cells,
    block_pool,
    cells_per_page,
    chosen_rows,
    compressed_attention,
    store_blocks,
)
from logitless.graph.ops.attention.encoder_attention import full_attention
from logitless.graph.ops.attention.hadamard import hadamard
from logitless.graph.ops.attention.mla import (
    chosen_blocks,
    chosen_cells,
    latent_attention,
    sparse_attention,
    sparse_latent_attention,
)
from logitless.graph.ops.attention.paged_attention import (
    PAGE,
    attention,
    biased_attention,
    chunk_ends,
    chunk_starts,
    load_v,
    store_k,
    store_v,
)
from logitless.graph.ops.elementwise import add, broadcast_to, mul, scaled
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.linear_attention import (
    causal_conv,
    causal_conv_update,
    linear_attention,
    linear_attention_update,
    text_begins,
)
from logitless.graph.ops.shape import reshape, slice_rows
from logitless.graph.ops.slicing import concat, take_block
from logitless.graph.tensor import Tensor, const, feed
from logitless.models.hparams.hparams import Hparams
from logitless.models.hparams.layer_sizes import LayerSizes
from logitless.models.hparams.mla import IndexerParams
from logitless.models.kv_pool import PagePool, Pool


def cache_types(h: Hparams, type_k: str, type_v: str) -> tuple[str, ...]:
    """Types of a layer's caches: keys and values, or the one cache of MLA, which serves as both."""
    return (type_k,) if h.mla or h.compression else (type_k, type_v)


def rotate(x: Tensor, cache: Tensor) -> Tensor:
    """x (T, H, D) rotated if the cache's type wants it and heads are whole 64s, else x; its own inverse.

    Blocks of 32 are too small to gain (docs/experiments/kv-cache.md)."""
    return hadamard(x) if KV_TYPES[cache.dtype].rotated and x.shape[-1] % 64 == 0 else x


@dataclass(frozen=True)
class Out:
    """The R rows of a batch whose logits are needed, where not all are. From the last layer with
    its own KV cache on, only these rows have queries."""

    ids: Tensor  # (R,) i32: indices into the batch
    pos: Tensor  # (R,) i32: theirs
    slot: Tensor  # (R,) i32: theirs


@dataclass(frozen=True)
class MediaRows:
    """Rows of images among a batch's tokens: embeddings that the vision encoder left on the
    device, with their positions."""

    pools: Sequence[Tensor]  # (n / 16, 1, 16, n_embd) f32 each, written and read as values of a KV cache are; row 0 is
    # zero. The first has embeddings, the others what is added after the first layers (deepstack, Qwen 3 VL)
    # (T,) i32: a token's row of the pool; 0 for tokens of text. None: `pools` are the rows (T, n_embd)
    ids: Tensor | None
    is_text: Tensor  # (T,) f32: 1 for tokens of text, 0 for rows of images
    # (2, T) i32: last position that a token sees: its own, or the end of a bidirectional image; its own
    visible: Tensor | None = None
    out_seen: Tensor | None = None  # `seen` of the `out` rows
    positions: Tensor | None = None  # (4, T) i32: M-RoPE's positions in time, height, width, images; equal for text
    out_positions: Tensor | None = None  # those of the `out` rows

    @classmethod
    def feeds(cls, pools: Sequence[Tensor], n_tokens: int, n_out: int | None, *, mrope: bool) -> MediaRows:
        ids, visible = feed("media.ids", (n_tokens,), "i32"), feed("media.seen", (2, n_tokens), "i32")
        out_seen = positions = out_positions = None
        if n_out is not None:
            out_seen = feed("media.out_seen", (2, n_out), "i32")
        if mrope:
            positions = feed("media.positions", (4, n_tokens), "i32")
            out_positions = None if n_out is None else feed("media.out_positions", (4, n_out), "i32")
        is_text = feed("media.is_text", (n_tokens,))
        return cls(pools, ids, is_text, visible, out_seen, positions, out_positions)

    @classmethod
    def inputs(cls, rows: Sequence[Tensor], *, mrope: bool) -> MediaRows:
        """Rows (T, n_embd) that are inputs themselves, zero for tokens of text."""
        n = rows[0].shape[0]
        positions = feed("media.positions", (4, n), "i32") if mrope else None
        return cls(rows, None, feed("media.is_text", (n,)), positions=positions)

    def embedded(self, x: Tensor) -> Tensor:
        """Token embeddings x (T, n_embd) with the images' rows in their places."""
        return add(mul(x, reshape(self.is_text, shape=(-1, 1))), self._loaded(0))

    def _loaded(self, i: int) -> Tensor:
        if self.ids is None:
            return self.pools[i]
        return reshape(load_v(self.pools[i], self.ids), shape=(self.ids.shape[0], -1))

    def deepstack(self, layer: int, x: Tensor, out: Out | None) -> Tensor:
        """Hidden states x after a layer, plus the images' rows for it; x: of all rows, or of `out`."""
        if layer + 1 >= len(self.pools):
            return x
        rows = self._loaded(layer + 1)
        return add(x, rows if out is None else get_rows(rows, out.ids))


class Rows(Protocol):
    """T tokens, and which of them need logits (`out` None: all)."""

    @property
    def tokens(self) -> Tensor: ...  # (T,) i32
    @property
    def pos(self) -> Tensor: ...  # (T,) i32
    @property
    def out(self) -> Out | None: ...
    @property
    def media(self) -> MediaRows | None: ...


def rope_positions(rows: Rows, *, of_out: bool = False) -> Tensor:
    """Positions for RoPE: (T,), or (4, T) of a batch with images in a model with M-RoPE."""
    if rows.media is not None and rows.media.positions is not None:
        positions = rows.media.out_positions if of_out else rows.media.positions
        assert positions is not None
        return positions
    if of_out:
        assert rows.out is not None
        return rows.out.pos
    return rows.pos


class AttentionParams(NamedTuple):
    """Scale, window, soft-cap, sinks and biases of attention scores (graph/ops/attention/paged_attention.py)."""

    scale: float
    window: int = 0
    cap: float = 0.0
    sinks: tuple[Tensor, ...] = ()  # one of shape (H,), or none
    causal_images: bool = False  # rows of images see only earlier rows, for any projector
    chunked: bool = False  # the window does not slide: a row sees its own chunk of so many positions
    bias: tuple[Tensor, ...] = ()  # models/architectures/position_bias.py
    indexer: IndexerParams | None = None  # which chooses cells where there are more than that; None: none does
    # its queries (T, H, D) and perhaps weights (T, H); (): the choice of the layer before counts
    index_q: tuple[Tensor, ...] = ()


class KeysValues(NamedTuple):
    """Keys and values (T, H_kv, D) that the rows of a layer add to its caches."""

    k: Tensor
    v: Tensor | None  # None: the keys are the values (MLA)
    index_k: Tensor | None = None  # (T, 1, D): the indexer's keys, where it has a cache


class LinearAttentionParams(NamedTuple):
    """Parameters of linear attention and the gated delta rule (graph/ops/linear_attention.py)."""

    scale: float = 1.0
    delta: bool = False
    grouped: bool = False


class Memory(Protocol):
    """Keys and values that a row's query attends to: its own sequence up to its position. From
    the last layer with its own KV cache on, only the rows of `out` have queries."""

    def attend(self, layer: int, q: Tensor, kv: KeysValues, params: AttentionParams) -> Tensor:
        """Attention output of q (T, H, D), or (R, H, D) of the `out` rows; same shape. `kv`: of all rows."""

    def indexes(self, layer: int) -> bool:
        """True if there is a cache for the layer's indexer, so that it may choose."""


@runtime_checkable
class RecurrentMemory(Protocol):
    """Recurrent states of sequences, for SSM and linear-attention layers. Encoders have none."""

    def causal_conv(self, layer: int, x: Tensor, w: Tensor, which: int = 0) -> Tensor:
        """x (T, C), w (C, 1, K) → (T, C): logitless.graph.ops.linear_attention.causal_conv,
        continued from each sequence's state; `which` of the layer's convolutions."""

    def linear_attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, params: LinearAttentionParams
    ) -> Tensor:
        """q and k (T, H_k, D), v (T, H, E), decay and beta (T, H, …) → (T, H, E):
        logitless.graph.ops.linear_attention.linear_attention, continued from each sequence's
        state."""


@dataclass(frozen=True)
class Batch:
    """T tokens of any sequences, and the rows whose logits are needed."""

    tokens: Tensor  # (T,) i32
    pos: Tensor  # (T,) i32
    slot: Tensor  # (T,) i32: row of the page tables
    slot_mapping: Tensor  # (T,) i32: token slot that its key and value are written to
    window_slot_mapping: Tensor  # (T,) i32: the same in the pool of sliding-window layers
    # (T,) i32: state row to start from; -1: continue after the row before
    begin: Tensor
    end: Tensor  # (T,) i32: state row to write afterwards, or -1
    out: Out | None
    media: MediaRows | None = None
    seen: Tensor | None = None  # (2, T) i32: last position that a row sees, and its own; None: its own is the last
    # (3, T) i32, behind an encoder: a row's position, the first behind the prompt, the prompt's last. No row is `out`
    source: Tensor | None = None

    @classmethod
    def feeds(
        cls, n_tokens: int, n_out: int | None = None, media: Sequence[Tensor] = (), *, mrope: bool = False
    ) -> Batch:
        """A batch of inputs; `n_out` None: logits of every row. `media`: the pools of image rows,
        if the batch has some; `mrope`: the model has M-RoPE."""
        tokens, pos, slot, slot_mapping, window_slot_mapping, begin, end = (
            feed(name, (n_tokens,), "i32")
            for name in ("tokens", "pos", "slot", "slot_mapping", "window_slot_mapping", "begin", "end")
        )
        out = None
        if n_out is not None:
            out = Out(*(feed(name, (n_out,), "i32") for name in ("out", "out.pos", "out.slot")))
        rows = None if not media else MediaRows.feeds(media, n_tokens, n_out, mrope=mrope)
        return cls(tokens, pos, slot, slot_mapping, window_slot_mapping, begin, end, out, rows)

    def visible(self, params: AttentionParams, n_ctx: int, *, of_out: bool) -> tuple[Tensor, Tensor]:
        """Slots of the rows that have queries, and their visible cells (graph/ops/attention/) of n_ctx."""
        if self.source is not None:  # a window of 1 begins behind the prompt
            return self.slot, slice_rows(self.source, start=0, stop=2)
        queries = self.out if of_out and self.out is not None else self
        if params.chunked:
            return queries.slot, chunk_ends(queries.pos, size=params.window, limit=n_ctx)
        visible = self.seen
        if visible is None and (self.media is None or params.causal_images):
            return queries.slot, queries.pos
        if self.media is not None and visible is None:
            visible = self.media.visible if queries is self else self.media.out_seen
        assert visible is not None
        return queries.slot, visible if params.window else reshape(slice_rows(visible, start=0, stop=1), shape=(-1,))


@dataclass(frozen=True)
class PagedMemory:
    """The KV cache and recurrent states as variables of a session: pages of each layer with its
    own keys and values, and state rows of recurrent layers (graph/ops/linear_attention.py), of
    which row 0 stays zero."""

    full: PagePool  # full attention; sliding-window layers too where `window` is None
    window: PagePool | None  # sliding-window layers
    kv_sources: tuple[int, ...]  # by layer: the layer whose KV cache it reads
    convs: Mapping[int, list[Tensor]]  # (N, K - 1, C) each
    recurrent: Mapping[int, Tensor]  # (N, H, D, E)
    indexed: frozenset[int] = frozenset()  # layers whose last cache has the keys of an indexer

    @classmethod
    def define(  # noqa: PLR0913  (sizes of one pool)
        cls,
        session: Session,
        h: Hparams,
        n_pages: int,
        table_shape: tuple[int, int],
        type_k: str,
        type_v: str,
        n_states: int = 0,
        n_window: int = 0,
        mtp: bool = False,
        prefix: str = "",
        behind: Sequence[LayerSizes | int] = (),
    ) -> PagedMemory:
        """Define the variables, with `prefix` in front of their names. `n_window`: pages of
        sliding-window layers; 0: they share the pool of full attention. `mtp`: with the layer of
        the MTP block. `behind`: a drafter's layers behind the model's: their sizes, or the layer of the
        model whose cache they read."""
        convs, recurrent, indexed = {}, {}, set()
        full: dict[int, list[Tensor]] = {}
        window: dict[int, list[Tensor]] = {}
        for i in (*range(h.n_layer_kv), *((h.n_layer,) if mtp else ())):
            size = h.sizes(i)
            if h.recurrent and (shapes := h.recurrent.conv_shapes(i)):
                named = zip(("conv", "shift", "tokens"), shapes, strict=False)
                n = n_states + (2 * table_shape[0] if i >= h.n_layer else 0)  # two of a slot while it drafts
                convs[i] = [session.define(f"{prefix}{name}.{i}", (n, *shape)) for name, shape in named]
            if (r := h.recurrent_of(i)) and r.n_heads:
                recurrent[i] = session.define(f"{prefix}recurrent.{i}", (n_states, *r.state_shape))
            if not h.attends(i):
                continue
            if h.compression:
                of_tokens, of_blocks = _compressed_caches(session, h, i, n_pages, n_window or n_pages, type_k, prefix)
                window[i], full[i] = (of_tokens, of_blocks) if n_window else ([], [*of_tokens, *of_blocks])
                continue
            layers, n = (window, n_window) if n_window and h.is_local(i) else (full, n_pages)
            layers[i] = [session.define(f"{prefix}k.{i}", (n, size.n_head_kv, size.head_dim, PAGE), type_k)]
            if not h.mla:
                layers[i].append(session.define(f"{prefix}v.{i}", (n, size.n_head_kv, PAGE, size.head_dim), type_v))
            if h.indexer and h.indexes(i) and table_shape[1] * PAGE > h.indexer.most:
                layers[i].append(session.define(f"{prefix}index.{i}", (n, 1, h.indexer.size, PAGE), type_k))
                indexed.add(i)
        others: list[tuple[str, LayerSizes | int]]
        others = [(f"{prefix}cross.{{}}.{i}", own) for i, own in enumerate(h.cross_layers)]
        others += [(f"{prefix}draft.{{}}.{i}", own) for i, own in enumerate(behind, h.n_layer)]
        for i, (name, own) in enumerate(others, h.n_layer):
            if not isinstance(own, int):
                shape = n_pages, own.n_head_kv
                full[i] = [
                    session.define(name.format("k"), (*shape, own.head_dim, PAGE), type_k),
                    session.define(name.format("v"), (*shape, PAGE, own.head_dim), type_v),
                ]
        tables = session.define(f"{prefix}tables", table_shape, "i32", host_written=True)
        pool = None
        if n_window:
            pool = PagePool(
                window, n_window, session.define(f"{prefix}tables.window", table_shape, "i32", host_written=True)
            )
        return cls(
            PagePool(full, n_pages, tables),
            pool,
            (
                *(h.kv_source(i) for i in range(h.n_layer + mtp)),
                *(own if isinstance(own, int) else i for i, own in enumerate(behind, h.n_layer)),
            ),
            convs,
            recurrent,
            frozenset(indexed),
        )

    @property
    def n_layer_kv(self) -> int:
        """Number of layers up to the last with its own cache or state."""
        return sum(layer == kv_source for layer, kv_source in enumerate(self.kv_sources))

    @property
    def states(self) -> Pool:
        """The pool of recurrent state rows."""
        recurrent = self.recurrent
        layers = {i: [*convs, *([recurrent[i]] if i in recurrent else [])] for i, convs in self.convs.items()}
        return Pool(layers, next(iter(self.convs.values()))[0].shape[0])

    @property
    def pools(self) -> list[PagePool]:
        return [self.full] if self.window is None else [self.full, self.window]


def _compressed_caches(
    session: Session, h: Hparams, layer: int, n_pages: int, n_window: int, dtype: str, prefix: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Caches of a layer's tokens, which are read for a while, and of its blocks of tokens."""
    assert h.compression is not None
    c, width = h.compression, h.head_dim
    of_tokens = [session.define(f"{prefix}k.{layer}", (n_window, PAGE, 1, width), dtype)]
    of_blocks: list[Tensor] = []
    for which, (n, own) in enumerate(zip(c.pooled(layer, width), (width, c.index_size), strict=False)):
        of_tokens.append(session.define(f"{prefix}pooled.{which}.{layer}", (n_window, 1, PAGE, n)))
        shape = n_pages, cells_per_page(c.blocks[layer]), 1, own
        of_blocks.append(session.define(f"{prefix}blocks.{which}.{layer}", shape, dtype))
    return of_tokens, of_blocks


@dataclass(frozen=True)
class Cached:
    """The paged memory during one batch: writes the batch's keys and values, then attends to the
    pages of each row's sequence."""

    memory: PagedMemory
    batch: Batch
    # caches after the write, by layer
    stored: dict[int, list[Tensor]] = field(default_factory=dict)
    # nodes that write states, by layer
    state_writes: dict[int, list[Tensor]] = field(default_factory=dict)
    # what the last indexer chose: for all rows, and for those of `out`
    chosen: dict[bool, Tensor] = field(default_factory=dict)

    def indexes(self, layer: int) -> bool:
        return layer in self.memory.indexed

    def attend(self, layer: int, q: Tensor, kv: KeysValues, params: AttentionParams) -> Tensor:
        batch, memory = self.batch, self.memory
        kv_source = memory.kv_sources[layer]
        pool, _ = self._room(kv_source)
        if kv_source == layer:
            self.store(layer, kv)
        n_ctx, of_out = pool.tables.shape[1] * PAGE, layer >= memory.n_layer_kv - 1
        caches = self.stored[kv_source] if kv_source in self.stored else pool.layers[kv_source]
        q = rotate(q, caches[0])
        rows = pool.tables, *batch.visible(params, n_ctx, of_out=of_out)
        caches, index = (caches[:-1], caches[-1]) if self.indexes(kv_source) else (caches, None)
        if (indexer := params.indexer) and n_ctx > indexer.most:
            chosen = self._choice(indexer, params.index_q, index, rows, of_out=of_out)
            attend = sparse_attention if len(caches) > 1 else sparse_latent_attention
            y = attend(q, *caches, *rows[:-1], chosen, *params.sinks, scale=params.scale)
        elif kv.v is None:
            y = latent_attention(q, *caches, *rows, *params.sinks, scale=params.scale)
        elif params.bias:
            window = int(batch.source is not None)
            y = biased_attention(q, *caches, *rows, params.bias[-1], scale=params.scale, window=window)
        else:
            y = attention(q, *caches, *rows, *params.sinks, scale=params.scale, window=params.window, cap=params.cap)
        return rotate(y, caches[-1])

    def _choice(
        self,
        indexer: IndexerParams,
        queries: tuple[Tensor, ...],
        keys: Tensor | None,
        rows: tuple[Tensor, ...],
        *,
        of_out: bool,
    ) -> Tensor:
        """The cells (T, G, N) that an indexer chose, in this layer or the last that has one."""
        of_out = of_out and self.batch.out is not None
        if keys is not None:
            q, *weights = queries
            self.chosen.clear()
            if weights:
                chosen = chosen_cells(rotate(q, keys), *weights, keys, *rows, n=indexer.n, pool=indexer.pool)
            else:
                n, block, last = indexer.n, indexer.pool, indexer.last
                chosen = chosen_blocks(rotate(q, keys), keys, *rows, n=n, block=block, last=last)
            self.chosen[of_out] = chosen
        if of_out not in self.chosen:
            assert self.batch.out is not None
            whole = self.chosen[False]
            flat = get_rows(reshape(whole, shape=(whole.shape[0], -1)), self.batch.out.ids)
            self.chosen[of_out] = reshape(flat, shape=(-1, *whole.shape[1:]))
        return self.chosen[of_out]

    def keep(self, layer: int, *rows: Tensor) -> None:
        """Write what a layer that compresses its cache keeps of the rows (T, 1, n): the key, and inputs of pools."""
        caches, blocks = self._caches(layer)
        cells = self.batch.slot_mapping if self.memory.window is None else self.batch.window_slot_mapping
        (k, *pooled), (key, *inputs) = caches, rows
        written = (store_v(c, new, cells) for c, new in zip(pooled, inputs, strict=True))
        self.stored[layer] = [store_blocks(k, rotate(key, k), cells), *written, *blocks]

    def _caches(self, layer: int) -> tuple[list[Tensor], list[Tensor]]:
        """Caches of tokens, and of blocks, of a layer that compresses its cache."""
        memory = self.memory
        caches = self.stored.get(layer) or [cache for pool in memory.pools[::-1] for cache in pool.layers[layer]]
        return caches[: len(caches) // 2 + 1], caches[len(caches) // 2 + 1 :]

    def pool(self, layer: int, which: int, bias: Tensor, *, overlap: bool) -> Tensor:
        """Rows (T, n) of the blocks that end with a row of the batch (graph/ops/attention/compressed.py), else 0."""
        tables = self.memory.pools[-1].tables
        cache = self._caches(layer)[0][1 + which]
        return block_pool(cache, bias, tables, self.batch.slot, self.batch.pos, overlap=overlap)

    def store_blocks(self, layer: int, which: int, rows: Tensor, size: int) -> None:
        """Write rows (T, 1, n) of `pool`, of blocks of `size` tokens."""
        caches, blocks = self._caches(layer)
        spare = blocks[which].shape[0] * blocks[which].shape[1] - 1
        cells = block_cells(self.batch.pos, self.batch.slot_mapping, size=size, spare=spare)
        self.stored[layer][len(caches) + which] = store_blocks(blocks[which], rotate(rows, blocks[which]), cells)

    def attend_blocks(
        self, layer: int, q: Tensor, sinks: Tensor, index: tuple[Tensor, ...], top_k: int, size: int, **attrs: Any
    ) -> Tensor:
        """Attention output of q (T, H, D), or (R, H, D) of the `out` rows, over a window and the blocks, of which the
        indexer, with queries and weights `index`, chooses `top_k` where there are more."""
        memory, batch = self.memory, self.batch
        rows = batch.out if batch.out is not None and layer >= memory.n_layer_kv - 1 else batch
        (k, *_), blocks = self._caches(layer)
        others: list[Tensor] = []
        if blocks:
            attrs["size"] = size
            others = [blocks[0], memory.full.tables]
        if index and memory.full.tables.shape[1] * PAGE // size > top_k:
            (queries, weights), own = index, (memory.full.tables, rows.slot, rows.pos)
            others.append(chosen_rows(rotate(queries, blocks[1]), weights, blocks[1], *own, n=top_k, size=size))
        tables = memory.pools[-1].tables
        y = compressed_attention(rotate(q, k), k, tables, rows.slot, rows.pos, sinks, *others, **attrs)
        return rotate(y, k)

    def attend_source(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """Cross-attention: the output of q (T, H, D) over the prompt's cells, which the encoder has filled."""
        pool, slot, source = self.memory.full, self.batch.slot, self.batch.source
        assert source is not None
        caches = pool.layers[len(self.memory.kv_sources) + layer]
        last = reshape(slice_rows(source, start=2, stop=3), shape=(-1,))
        y = attention(rotate(q, caches[0]), *caches, pool.tables, slot, last, scale=scale)
        return rotate(y, caches[-1])

    def store(self, layer: int, kv: KeysValues) -> list[Tensor]:
        """Write the keys and values of a layer for these rows; returns its caches afterwards."""
        pool, slot_mapping = self._room(layer)
        new = [(store, x) for store, x in zip((store_k, store_v, store_k), kv, strict=True) if x is not None]
        self.stored[layer] = [
            store(cache, rotate(x, cache), slot_mapping)
            for cache, (store, x) in zip(pool.layers[layer], new, strict=True)
        ]
        return self.stored[layer]

    def _room(self, layer: int) -> tuple[PagePool, Tensor]:
        """The page pool of a layer, and the rows' slot mapping in it."""
        memory, batch = self.memory, self.batch
        if memory.window is not None and layer in memory.window.layers:
            return memory.window, batch.window_slot_mapping
        return memory.full, batch.slot_mapping

    def causal_conv(self, layer: int, x: Tensor, w: Tensor, which: int = 0) -> Tensor:
        y = causal_conv_update(x, w, self.memory.convs[layer][which], self.batch.begin, self.batch.end)
        self.state_writes.setdefault(layer, []).append(y)
        return y

    def linear_attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, params: LinearAttentionParams
    ) -> Tensor:
        states, batch = self.memory.recurrent[layer], self.batch
        y = linear_attention_update(q, k, v, decay, beta, states, batch.begin, batch.end, **params._asdict())
        self.state_writes.setdefault(layer, []).append(y)
        return y

    def writes(self, layer: int) -> list[Tensor]:
        """Nodes that write the caches and states of a layer."""
        return self.stored.get(layer, []) + self.state_writes.get(layer, [])


def sloped(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, positions: Tensor, *, scale: float) -> tuple[Tensor, ...]:
    """Queries, keys and values (T, H, D + 1) whose products have ALiBi's bias: slopes · positions, which softmax
    cannot tell from slopes · (position − own)."""

    def wider(x: Tensor, column: Tensor) -> Tensor:
        rows, heads, size = x.shape
        flat = reshape(x, shape=(rows * heads, size))
        column = reshape(broadcast_to(column, shape=(rows, heads)), shape=(rows * heads, 1))
        return reshape(concat(flat, column), shape=(rows, heads, size + 1))

    return wider(q, scaled(slopes, 1 / scale)), wider(k, positions), wider(v, const(0.0))


def zeros(*shape: int) -> Tensor:
    """A zero state of this shape."""
    return broadcast_to(const(0.0), shape=shape)


@dataclass(frozen=True)
class Sequences:
    """Whole sequences of `length` tokens each, rows and memory in one: training, embeddings of
    causal models. Gradients pass through."""

    length: int
    tokens: Tensor  # (T,) i32, T a multiple of length
    pos: Tensor  # (T,) i32
    start: Tensor  # (T,) i32: first row that a row sees; of packed texts, the start of its own
    out: None = None
    media: MediaRows | None = None
    bounds: Tensor | None = None  # (2, T) i32: `start`, and the last row that a row sees; None: itself

    @classmethod
    def feeds(cls, n_sequences: int, length: int, media: Sequence[Tensor] = (), *, mrope: bool = False) -> Sequences:
        """Inputs of sequences; `media`, `mrope`: as of a batch."""
        tokens, pos, start = (feed(name, (n_sequences * length,), "i32") for name in ("tokens", "pos", "start"))
        rows = MediaRows.feeds(media, n_sequences * length, None, mrope=mrope) if media else None
        return cls(length, tokens, pos, start, media=rows)

    def indexes(self, layer: int) -> bool:
        return False

    def attend(self, layer: int, q: Tensor, kv: KeysValues, params: AttentionParams) -> Tensor:
        size, scale, window = self.length, params.scale, params.window
        if params.indexer and params.indexer.most < size:
            raise ValueError(f"texts have {size} tokens: with an indexer training has up to {params.indexer.most}")
        k, v = kv.k, kv.k if kv.v is None else kv.v
        visible = self.start if self.bounds is None or params.causal_images else self.bounds
        if params.chunked:
            visible, window = chunk_starts(self.start, length=size, size=window), 0
        n = q.shape[2]
        if params.bias:
            q, k, v = sloped(q, k, v, *params.bias[:2], scale=scale)
        y = causal_attention(q, k, v, visible, *params.sinks, length=size, scale=scale, window=window, cap=params.cap)
        return take_block(y, start=(0, 0, 0), shape=(*y.shape[:2], n)) if params.bias else y

    def causal_conv(self, layer: int, x: Tensor, w: Tensor, which: int = 0) -> Tensor:
        return causal_conv(x, w, zeros(1, w.shape[2] - 1, x.shape[1]), self._begin)

    def linear_attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, params: LinearAttentionParams
    ) -> Tensor:
        before = zeros(1, v.shape[1], q.shape[2], v.shape[2])
        return linear_attention(q, k, v, decay, beta, before, self._begin, **params._asdict())

    @cached_property
    def _begin(self) -> Tensor:
        return text_begins(self.start, length=self.length)


@dataclass(frozen=True)
class Texts:
    """Padded texts of `length` tokens each, rows and memory of bidirectional encoders in one."""

    length: int
    tokens: Tensor  # (T,) i32, T a multiple of length
    pos: Tensor  # (T,) i32
    types: Tensor  # (T,) i32: segment (token type)
    count: Tensor  # (T / length,) i32: tokens of each text before the padding
    out: None = None
    media: None = None

    @classmethod
    def feeds(cls, n_texts: int, length: int) -> Texts:
        tokens, pos, types = (feed(name, (n_texts * length,), "i32") for name in ("tokens", "pos", "types"))
        return cls(length, tokens, pos, types, feed("count", (n_texts,), "i32"))

    def indexes(self, layer: int) -> bool:
        return False

    def attend(self, layer: int, q: Tensor, kv: KeysValues, params: AttentionParams) -> Tensor:
        reach = params.window // 2 if params.window else -1
        return full_attention(
            q,
            kv.k,
            kv.k if kv.v is None else kv.v,
            self.count,
            *params.bias,
            length=self.length,
            scale=params.scale,
            reach=reach,
        )

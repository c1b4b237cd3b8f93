"""Sizes of multi-head latent attention (MLA), of compressed attention, and of indexers, from GGUF keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from logitless.models.architectures.architecture import KeyPool
from logitless.models.architectures.registry import TRAITS
from logitless.models.hparams.keys import Keys
from logitless.models.hparams.rope_scaling import RopeScaling, RopeScalingType

MAX_POOL = 64  # cells whose keys become one
POOLS = ("attn_compressor", "indexer_compressor")  # names of the weights that make rows of blocks
OVERLAPPING, LONG = 4, 128  # tokens of a block: rows of the former count for the block behind them, too


@dataclass(frozen=True, slots=True)
class MLAParams:
    """Sizes of MLA (models/architectures/mla.py). A head's query and key have `n_nope` elements
    without RoPE and `n_rope` with it. Keys' former part and values derive from the compressed
    row of `rank` elements."""

    rank: int
    # elements of the compressed row of queries; 0: queries derive from the hidden state
    q_rank: int
    n_nope: int
    n_rope: int
    n_value: int

    @property
    def width(self) -> int:
        """Elements of a cached row: the RoPE part and the compressed part."""
        return self.n_rope + self.rank

    @property
    def size(self) -> int:
        """Elements of a head's query and key."""
        return self.n_nope + self.n_rope

    def yarn_scale(self, scaling: RopeScaling) -> float:
        """Attention scale: 1/√d times YaRN's magnitude (llama.cpp's deepseek2.cpp)."""
        stretch = math.log(scaling.factor) if scaling.kind is not RopeScalingType.NONE else 0.0
        turned = scaling.attn_factor
        if scaling.kind is not RopeScalingType.YARN or not scaling.log_multiplier:
            turned *= 1 + 0.1 * stretch
        grown = turned * (1 + 0.1 * scaling.log_multiplier * stretch)
        return float(grown**2 * self.size**-0.5)


def read_mla(keys: Keys, per_head: int) -> MLAParams:
    """MLA sizes; `per_head`: n_embd / n_head. Files with separate head weights use the keys
    `…_mla`, because `key_length` and `value_length` are those of the cached row then.
    ModelFileError names the key at fault."""
    key, value = "attention.key_length", "attention.value_length"
    if f"{key}_mla" in keys:
        key, value = f"{key}_mla", f"{value}_mla"
    rotates = TRAITS[keys.arch].rope.enabled
    n_rope = (keys.count if rotates else keys.count_or_none)("rope.dimension_count", None)
    size, n_value = keys.count(key, per_head), keys.count(value, per_head)
    if size <= n_rope:
        raise keys.error(key, f"is {size}, of which {n_rope} have RoPE")
    rank, q_rank = keys.count("attention.kv_lora_rank"), keys.count_or_none("attention.q_lora_rank")
    return MLAParams(rank, q_rank, size - n_rope, n_rope, n_value)


@dataclass(frozen=True, slots=True)
class IndexerParams:
    """An indexer chooses n pools of `pool` cells for a token, or n for each of its heads."""

    n_heads: int
    size: int  # elements of a head and of its keys
    n_rope: int  # of which so many have RoPE
    n: int
    pool: int
    last: int  # last blocks, which are always among those of a head
    layers: tuple[bool, ...]  # flags of the layers that choose
    shared: bool  # the others use the choice before; else they attend to all cells

    @property
    def most(self) -> int:
        """Cells that a token attends to, in whole pools."""
        return self.n * self.pool

    def conv_shapes(self, pool: KeyPool) -> tuple[tuple[int, int], ...]:
        """Shape of the rows before a token that its pool's key needs, as a convolution keeps them."""
        columns = {KeyPool.SOFTMAX: 2 * self.size * (self.pool - 1), KeyPool.MEAN: self.size + self.n_rope}
        return ((self.pool - 1, columns[pool]),) if pool in columns else ()


def read_indexer(keys: Keys, n_layer: int, n_mtp: int, n_rope: int, n_head_kv: int) -> IndexerParams | None:
    """None for a model without an indexer; MTP blocks have one of pools, as in llama.cpp. ModelFileError names the
    key at fault."""
    kind, key = TRAITS[keys.arch].attention.indexer, "attention.indexer"
    if kind is None or (kind.optional_key and not any(_values(keys, kind.optional_key))):
        return None
    n_heads, size, n = (keys.count(f"{key}.{name}") for name in ("head_count", "key_length", "top_k"))
    pool, layers, last = 1, keys.flags(f"{key}.types", n_layer) or (True,) * n_layer, 0
    if size < n_rope:
        raise keys.error(f"{key}.key_length", f"is {size}, of which {n_rope} have RoPE")
    if kind.pool is KeyPool.GREATEST:
        pool, last = keys.count(f"{key}.block_size"), keys.count_or_none(f"{key}.local_blocks", None)
        n_dense = keys.count_or_none("leading_dense_block_count")
        layers = tuple(layer >= n_dense for layer in range(n_layer))
        if last > n:
            raise keys.error(f"{key}.local_blocks", f"is {last}, of {n} blocks that are chosen")
        if n_heads != n_head_kv:
            raise keys.error(f"{key}.head_count", f"is {n_heads}, for {n_head_kv} key heads")
    elif kind.pool is not KeyPool.NONE:
        name = "attention.compress_ratios" if kind.pool is KeyPool.MEAN else f"{key}.kpool"
        sizes = _values(keys, name)
        layers = tuple(map(bool, sizes)) if kind.pool is KeyPool.MEAN else (*layers, *[True] * n_mtp)
        pool = max(sizes)
        if set(sizes) > {0, pool} or not 2 <= pool <= MAX_POOL or n % pool:
            raise keys.error(name, f"is {pool}; it must be one number from 2 to {MAX_POOL} of which {n} is a multiple")
        if not keys.flag(f"{key}.kpool_select_tail", True):
            raise keys.error(f"{key}.kpool_select_tail", "is false, which is not supported")
        n //= pool
    layers += (False,) * (n_layer + n_mtp - len(layers))
    return IndexerParams(n_heads, size, n_rope, n, pool, last, layers, kind.latent)


def _values(keys: Keys, key: str) -> tuple[int, ...]:
    """The numbers of all blocks, which the file may lack."""
    return keys.counts(key, keys.layers(), 0, or_none=True)


@dataclass(frozen=True, slots=True)
class CompressionParams:
    """Sizes of compressed attention (DeepSeek V4; models/architectures/mla.py)."""

    window: int  # last tokens that a token sees
    blocks: tuple[int, ...]  # tokens of a layer's blocks: 0 without blocks, OVERLAPPING with an indexer
    n_rope: int  # last elements of a row that turn
    n_groups: int  # of heads, whose outputs have a matrix of this rank each
    rank: int
    q_rank: int
    index_heads: int  # of the indexer, which chooses among blocks
    index_size: int  # elements of its heads and keys
    top_k: int  # blocks that a token attends to

    def indexes(self, layer: int) -> bool:
        return self.blocks[layer] == OVERLAPPING

    @property
    def n_recent(self) -> int:
        """Last tokens of which layers read something: the window, or tokens of blocks that are not complete."""
        return max(self.window, *(size * (1 + (size == OVERLAPPING)) for size in self.blocks))

    def pooled(self, layer: int, width: int) -> tuple[int, ...]:
        """Elements of the values and scores that each pool of a layer keeps of a token."""
        size = self.blocks[layer]
        own = (width, self.index_size) if size == OVERLAPPING else (width,)[: size > 0]
        return tuple(2 * n * (1 + (size == OVERLAPPING)) for n in own)


def read_compression(keys: Keys, n_layer: int, n_mtp: int, n_head: int, n_rope: int) -> CompressionParams:
    """MTP blocks have no blocks of tokens. ModelFileError names the key at fault."""
    key = "attention.compress_ratios"
    blocks = keys.get(key)
    if not isinstance(blocks, np.ndarray) or len(blocks) < n_layer or blocks.dtype.kind not in "iu":
        raise keys.error(key, f"is not a number for each of {n_layer} layers")
    sizes = tuple(int(size) for size in blocks[:n_layer])
    if unknown := set(sizes) - {0, OVERLAPPING, LONG}:
        raise keys.error(key, f"has {min(unknown)}; supported are 0, {OVERLAPPING} and {LONG}")
    n_groups = keys.count("attention.output_group_count")
    if n_head % n_groups:
        raise keys.error("attention.output_group_count", f"is {n_groups}, of {n_head} heads")
    size = keys.count("attention.indexer.key_length")
    if size < n_rope:
        raise keys.error("attention.indexer.key_length", f"is {size}, of which {n_rope} have RoPE")
    n_heads, top_k = keys.count("attention.indexer.head_count"), keys.count("attention.indexer.top_k")
    return CompressionParams(
        keys.count("attention.sliding_window"),
        (*sizes, *[0] * n_mtp),
        n_rope,
        n_groups,
        keys.count("attention.output_lora_rank"),
        keys.count("attention.q_lora_rank"),
        n_heads,
        size,
        top_k,
    )

"""Sizes of multi-head latent attention (MLA), from GGUF keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

from logitless.models.architectures.architecture import Indexer
from logitless.models.architectures.registry import TRAITS
from logitless.models.hparams.keys import Keys
from logitless.models.hparams.rope_scaling import RopeScaling, RopeScalingType


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


@dataclass(frozen=True, slots=True)
class IndexerParams:
    """Sizes of the indexer of sparse attention (models/architectures/mla.py)."""

    n_heads: int
    size: int  # elements of a head and of its keys
    top_k: int  # cells that a token attends to
    interleaved: bool  # RoPE pairs are neighbours
    layers: tuple[bool, ...]  # flags of the layers that choose; the others use the choice before


def read_indexer(keys: Keys, n_layer: int, n_rope: int) -> IndexerParams | None:
    """None for a model without an indexer that is run. ModelFileError names the key at fault."""
    kind, key = TRAITS[keys.arch].attention.indexer, "attention.indexer"
    if kind not in (Indexer.HALVES, Indexer.NEIGHBOURS):
        return None
    size = keys.count(f"{key}.key_length")
    if size < n_rope:
        raise keys.error(f"{key}.key_length", f"is {size}, of which {n_rope} have RoPE")
    layers = keys.flags(f"{key}.types", n_layer) or (True,) * n_layer
    if not layers[0]:
        raise keys.error(f"{key}.types", "has no indexer in the first layer")
    n_heads, top_k = keys.count(f"{key}.head_count"), keys.count(f"{key}.top_k")
    return IndexerParams(n_heads, size, top_k, kind is Indexer.NEIGHBOURS, layers)


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

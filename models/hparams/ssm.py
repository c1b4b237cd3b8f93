"""Sizes of recurrent layers (SSM, gated delta rule, short convolution, n-grams), from GGUF keys."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from logitless.models.architectures.architecture import StateKind
from logitless.models.architectures.registry import TRAITS
from logitless.models.hparams.keys import Keys
from logitless.models.hparams.mla import IndexerParams

TAPS = 2, 64  # least and most of a convolution
CHANNELS = 32  # of Mamba's that are a head here


@dataclass(frozen=True, slots=True)
class NGrams:
    """Embeddings (n_rows, width) that a layer adds: a row for each of the hashes of 2 to N tokens, of head h
    `sizes[h]` rows from `offsets[h]` on; a convolution of `n_taps` follows, whose taps are N tokens apart."""

    layer: int
    width: int
    n_taps: int
    stop: int  # id of the token behind which no n-gram reaches
    multipliers: tuple[int, ...]  # of the N tokens, 64 bits
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def n(self) -> int:
        return len(self.multipliers)

    @property
    def n_rows(self) -> int:
        return max(map(sum, zip(self.sizes, self.offsets, strict=True)))

    @property
    def hashes(self) -> npt.NDArray[np.int32]:
        """Multipliers and heads as graph/ops/gather.py, ngram_rows, takes them."""
        factors = np.array(self.multipliers, np.uint64).view(np.int32)
        return np.concatenate([factors, np.array([self.sizes, self.offsets], np.int32).T.reshape(-1)])

    @property
    def conv_shapes(self) -> tuple[tuple[int, int], ...]:
        """Shape of the tokens before, as a convolution keeps them."""
        return ((self.n - 1, self.n - 1),)


@dataclass(frozen=True, slots=True)
class RecurrentParams:
    """Sizes of recurrent layers. `layers` flags them, `attention` the layers with attention;
    both include the MTP blocks, which attend. A convolution of `n_taps` runs over `n_columns`;
    each of `n_heads` has a state of `size` × `width`."""

    layers: tuple[bool, ...]
    attention: tuple[bool, ...]
    n_taps: int
    n_columns: int
    n_key_heads: int = 0
    n_heads: int = 0
    size: int = 0
    width: int = 0
    n_steps: int = 0  # rank of Mamba's time steps
    # RMSNorm without weights of Mamba's time steps, keys and queries (Falcon Mamba)
    normed: bool = False
    lower_bound: float = 0.0  # of KDA's logarithmic decays; 0: none
    n_convs: int = 1  # convolutions of a layer, each with a state: RWKV mixes tokens before both blocks
    # further convolutions, of these shapes, that have a state in a layer (n-grams, keys of indexers)
    more_convs: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    n_channels: int = 0  # width of RWKV's channel mix
    rescale_period: int = 0  # the residual stream is halved behind every n-th layer; 0: it is not

    def conv_shapes(self, layer: int) -> list[tuple[int, int]]:
        """Shapes of a sequence's convolution states: the last rows of each."""
        own = [(self.n_taps - 1, self.n_columns)] * self.n_convs * self.layers[layer]
        return own + [shape for i, shapes in self.more_convs if i == layer for shape in shapes]

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.n_heads, self.size, self.width

    @property
    def nbytes(self) -> int:
        """Bytes of a sequence's state in all layers."""
        convs = sum(math.prod(shape) for i in range(len(self.layers)) for shape in self.conv_shapes(i))
        return 4 * (convs + sum(self.layers) * math.prod(self.state_shape))


def read_recurrent(
    keys: Keys,
    n_layer: int,
    n_embd: int,
    n_mtp: int = 0,
    ngrams: NGrams | None = None,
    indexer: IndexerParams | None = None,
) -> RecurrentParams | None:
    """Recurrent sizes; None for a model without such layers. ModelFileError names the key at fault."""
    kind = TRAITS[keys.arch].states.kind
    sizes = _read(keys, n_layer, n_embd, kind) if kind else None
    if sizes is None:
        return None
    if ngrams is not None:
        if not sizes.layers[ngrams.layer]:
            raise keys.error("ple.layers", f"has layer {ngrams.layer}, which has no recurrent state")
        rows = (ngrams.n_taps - 1) * ngrams.n, n_embd * keys.count("hyper_connection.count")
        sizes = replace(sizes, more_convs=((ngrams.layer, (rows, *ngrams.conv_shapes)),))
    sizes = replace(sizes, layers=sizes.layers + (False,) * n_mtp, attention=sizes.attention + (True,) * n_mtp)
    kind_of_indexer = TRAITS[keys.arch].attention.indexer
    if indexer is not None and kind_of_indexer is not None:
        shapes = indexer.conv_shapes(kind_of_indexer.pool)
        own = tuple((i, shapes) for i, indexes in enumerate(indexer.layers) if indexes and sizes.attention[i])
        sizes = replace(sizes, more_convs=(*sizes.more_convs, *own))
    return sizes


def _read(keys: Keys, n_layer: int, n_embd: int, kind: StateKind) -> RecurrentParams | None:
    if kind is StateKind.MAMBA2:
        return _mamba2(keys, n_layer)
    if kind is StateKind.MAMBA:
        return _mamba(keys, n_layer)
    if kind is StateKind.PLAMO2:
        return _plamo2(keys, n_layer, n_embd)
    if kind is StateKind.KDA:
        return _kda(keys, n_layer)
    if kind in (StateKind.RWKV6, StateKind.RWKV7):
        return _rwkv(keys, n_layer, n_embd)
    layers = _without_heads(keys, n_layer) if kind is StateKind.SHORT_CONV else _but_every(keys, n_layer)
    if not any(layers):
        return None
    attention = tuple(not keeps for keeps in layers)
    if kind is StateKind.SHORT_CONV:
        return RecurrentParams(layers, attention, keys.count("shortconv.l_cache", None, *TAPS), n_embd)
    n_taps, n_key_heads, n_heads, size = _heads(keys)
    if keys.count("ssm.inner_size") != n_heads * size:
        raise keys.error("ssm.inner_size", f"is not that of {n_heads} heads of {size}, which is not supported")
    columns = (2 * n_key_heads + n_heads) * size
    return RecurrentParams(layers, attention, n_taps, columns, n_key_heads, n_heads, size, size)


def _mamba(keys: Keys, n_layer: int) -> RecurrentParams:
    """Mamba (Gu and Dao, 2023), whose channels have states of their own: heads of so many."""
    n, size, n_taps = keys.count("ssm.inner_size"), keys.count("ssm.state_size"), _n_taps(keys)
    layers, attention = _mamba_layers(keys, n_layer)
    width, n_steps = math.gcd(n, CHANNELS), keys.count("ssm.time_step_rank")
    normed = keys.flag("ssm.dt_b_c_rms", False)
    return RecurrentParams(layers, attention, n_taps, n, 1, n // width, size, width, n_steps, normed)


def _plamo2(keys: Keys, n_layer: int, n_embd: int) -> RecurrentParams:
    n, n_heads, n_taps = keys.count("ssm.inner_size"), keys.count("ssm.time_step_rank"), _n_taps(keys)
    if n % n_heads:
        raise keys.error("ssm.inner_size", f"is {n}, not a multiple of {n_heads} heads")
    layers, attention = _mamba_layers(keys, n_layer)
    size, n_steps = keys.count("ssm.state_size"), max(64, n_embd // 16)  # as in llama.cpp; no key has it
    return RecurrentParams(layers, attention, n_taps, n, 1, n_heads, size, n // n_heads, n_steps)


def _rwkv(keys: Keys, n_layer: int, n_embd: int) -> RecurrentParams:
    size = keys.count("wkv.head_size")
    if n_embd % size:
        raise keys.error("wkv.head_size", f"is {size}, of which embedding_length {n_embd} is no multiple")
    n, mixes = n_embd // size, TRAITS[keys.arch].states.channel_mix
    n_key_heads = n if mixes else keys.count_or_none("attention.head_count_kv") or n
    if n % n_key_heads:
        raise keys.error("attention.head_count_kv", f"is {n_key_heads}: {n} heads cannot share so many of keys")
    return RecurrentParams(
        (True,) * n_layer,
        (False,) * n_layer,
        n_taps=2,
        n_columns=n_embd,
        n_key_heads=n_key_heads,
        n_heads=n,
        size=size,
        width=size,
        n_convs=1 + mixes,
        n_channels=keys.count("feed_forward_length") if mixes else 0,
        rescale_period=keys.count_or_none("rescale_every_n_layers"),
    )


def _kda(keys: Keys, n_layer: int) -> RecurrentParams:
    layers, n, size = _without_heads(keys, n_layer), keys.count("attention.head_count"), keys.count("kda.head_dim")
    n_taps = _n_taps(keys)
    bound = float(keys.number("kda.gate_lower_bound", 0.0))
    if bound > 0 or not keys.flag("kda.safe_gate", True):
        raise keys.error("kda.gate_lower_bound", "is positive, or kda.safe_gate is false, which is not supported")
    attention = tuple(not keeps for keeps in layers)
    return RecurrentParams(layers, attention, n_taps, 3 * n * size, n, n, size, size, lower_bound=bound)


def _mamba2(keys: Keys, n_layer: int) -> RecurrentParams:
    n_taps, n_groups, n_heads, size = _heads(keys)
    n = keys.count("ssm.inner_size")
    if n % n_heads:
        raise keys.error("ssm.inner_size", f"is {n}, not a multiple of {n_heads} heads")
    layers, attention = _mamba_layers(keys, n_layer)
    columns = n + 2 * n_groups * size
    return RecurrentParams(layers, attention, n_taps, columns, n_groups, n_heads, size, n // n_heads)


def _mamba_layers(keys: Keys, n_layer: int) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Flags of the layers with a state, and of those with attention."""
    architecture = TRAITS[keys.arch]
    if architecture.states.every_layer:
        return (True,) * n_layer, (architecture.attention.enabled,) * n_layer
    attention = tuple(not without for without in _without_heads(keys, n_layer))
    layers = tuple(not attends for attends in attention)
    # a layer with neither heads nor a width has recurrent state
    if architecture.states.one_sublayer:
        widths = keys.counts("feed_forward_length", keys.count("block_count"), or_none=True)
        feeding = tuple(n > 0 for n in widths[:n_layer])
        if any(map(operator.and_, attention, feeding)):
            raise keys.error("feed_forward_length", "is set for a layer that attends, which is not supported")
        layers = tuple(map(operator.gt, layers, feeding))
    if not any(layers):
        raise keys.error("attention.head_count_kv", "leaves no layer that keeps a state, which is not supported")
    return layers, attention


def _heads(keys: Keys) -> tuple[int, int, int, int]:
    """Taps of the convolution, key heads, heads, elements of a key."""
    n_key_heads, n_heads = keys.count("ssm.group_count"), keys.count("ssm.time_step_rank")
    size, n_taps = keys.count("ssm.state_size"), _n_taps(keys)
    if n_heads % n_key_heads:
        raise keys.error("ssm.time_step_rank", f"is {n_heads}: so many heads cannot share {n_key_heads} of keys")
    return n_taps, n_key_heads, n_heads, size


def _n_taps(keys: Keys) -> int:
    return keys.count("ssm.conv_kernel", None, *TAPS)


def _without_heads(keys: Keys, n_layer: int) -> tuple[bool, ...]:
    """Flags of the layers with head_count_kv 0."""
    return tuple((keys.array("attention.head_count_kv", n_layer, "iu", "number") == 0).tolist())


def _but_every(keys: Keys, n_layer: int) -> tuple[bool, ...]:
    """Flags of recurrent layers: all but every n-th, or those that the file lists."""
    key = "attention.recurrent_layers"
    if not (layers := keys.flags(key, n_layer)):
        key, period = "full_attention_interval", keys.count("full_attention_interval", 4)
        layers = tuple((layer + 1) % period != 0 for layer in range(n_layer))
    if all(layers):
        raise keys.error(key, f"leaves none of {n_layer} layers that attends, which is not supported")
    return layers


def read_ngrams(keys: Keys, n_layer: int, n_embd: int) -> NGrams | None:
    """None: no layer adds such embeddings. ModelFileError names the key at fault."""
    if "ple.layers" not in keys:
        return None
    (layer, *others) = _numbers(keys, "ple.layers", 1)
    if others or layer >= n_layer:
        raise keys.error("ple.layers", f"are {1 + len(others)}, the first {layer}; supported is one of {n_layer}")
    n, n_taps = (keys.count(f"ple.{name}", None, 2, 8) for name in ("ngram_size", "conv_kernel"))
    width, n_heads = keys.count("embedding_length_per_layer_input"), (n - 1) * keys.count("ple.heads_per_ngram")
    if n_heads * width != n_embd:
        raise keys.error("embedding_length_per_layer_input", f"is {width}: {n_heads} of them are not {n_embd}")
    sizes, offsets = (_numbers(keys, f"ple.head_{name}", n_heads) for name in ("vocab_sizes", "offsets"))
    if not all(size and size + offset < 1 << 31 for size, offset in zip(sizes, offsets, strict=True)):
        raise keys.error("ple.head_vocab_sizes", "has a number that is not a possible size")
    multipliers = _numbers(keys, "ple.layer_multipliers", n)
    stop = keys.count_or_none("ple.eos_token_id", None)
    return NGrams(layer, width, n_taps, stop, multipliers, sizes, offsets)


def _numbers(keys: Keys, key: str, n: int) -> tuple[int, ...]:
    """The first n whole numbers of an array; of `ple.layers` all."""
    value = keys.get(key)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or len(value) < n or (value < 0).any():
        raise keys.error(key, f"has not {n} whole numbers of at least 0")
    return tuple(int(number) for number in (value if key == "ple.layers" else value[:n]))

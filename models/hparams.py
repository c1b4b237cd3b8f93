"""A model's hyper-parameters, read from its GGUF metadata with GGUF's own names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.architectures import ARCHITECTURES, Architecture
from models.errors import ModelFileError

ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
POOLINGS = ("none", "mean", "cls", "last", "rank")  # by GGUF's numbers
MAX_LAYERS = 512  # llama.cpp's limit too


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How positions beyond the training context are handled (`rope.scaling.*`)."""

    kind: str = "none"  # one of ROPE_SCALINGS; factors of each frequency are tensors, whatever the kind
    factor: float = 1.0
    original_context: int = 0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    log_multiplier: float = 0.0  # how much of what YaRN does to the magnitude is taken back


@dataclass(frozen=True, slots=True)
class Hparams:
    """Sizes and constants of one model. `window`: sliding-window width, 0 none; a layer uses it by `is_local`."""

    arch: str
    n_ctx_train: int
    n_embd: int
    n_layer: int
    n_ff: int  # of each expert, where there are experts
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    eps: float
    rope_dim: int
    rope_base: float
    rope_scaling: RopeScaling
    attention_scale: float
    window: int = 0
    window_period: int = 0  # every period-th layer sees everything, the others the window; 0: all have the window
    rope_base_local: float = 0.0  # of the layers with the window, whose positions are not scaled; 0: as the others
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    embedding_scale: float = 1.0
    pooling: str = "none"  # one of POOLINGS: what makes one vector of a text, where the file says
    n_expert: int = 0  # of a layer; 0: its feed-forward block is one for all rows
    n_expert_used: int = 0  # of each row
    n_ff_shared: int = 0  # of the expert that every row has besides
    residual_scale: float = 1.0  # of what a block adds
    logit_scale: float = 1.0  # by which logits are multiplied
    temperature: float = 0.0  # queries grow by this times the logarithm of how often the context has passed
    parallel: bool = False  # the feed-forward block begins with the rows that attention begins with

    @property
    def kind(self) -> Architecture:
        return ARCHITECTURES[self.arch]

    @property
    def causal(self) -> bool:
        return self.kind.causal

    def has_rope(self, layer: int) -> bool:
        period = self.kind.nope_period
        if period and (layer + 1) % period == 0:
            return False
        return self.is_local(layer) or not (self.window and self.kind.local_rope_only)

    def is_local(self, layer: int) -> bool:
        """Whether this layer attends to the sliding window only."""
        return self.window > 0 and (self.window_period == 0 or (layer + 1) % self.window_period != 0)


def read_hparams(metadata: Mapping[str, Any], n_vocab: int, file: str) -> Hparams:
    """Hyper-parameters of a supported architecture; ModelFileError names the file and the key at fault."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise ModelFileError(file, f"architecture {arch!r} is not supported (supported: {', '.join(ARCHITECTURES)})")
    kind = ARCHITECTURES[arch]

    def number(key: str, default: float | None = None) -> float:
        full = f"{arch}.{key}"
        value = metadata.get(full, default)
        if isinstance(value, np.ndarray) and value.size and (value == value.flat[0]).all():
            value = value.flat[0].item()  # a value per layer, all equal
        if value is None:
            raise ModelFileError(file, f"key '{full}' is missing")
        if isinstance(value, np.ndarray) and value.size:
            raise ModelFileError(file, f"key '{full}' differs between layers, which is not supported")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelFileError(file, f"key '{full}' must be one number")
        if not np.isfinite(value):
            raise ModelFileError(file, f"key '{full}' is {value}")
        return value

    def count(key: str, default: int | None = None) -> int:
        value = number(key, default)
        if value != int(value) or not 0 < value < 1 << 31:
            raise ModelFileError(file, f"key '{arch}.{key}' is {value}, which is not a possible size")
        return int(value)

    def positive(key: str, default: float) -> float:
        value = float(number(key, default))
        if value <= 0:
            raise ModelFileError(file, f"key '{arch}.{key}' is {value:g}, which is not positive")
        return value

    def scaled(key: str, default: float = 1.0) -> float:
        """A factor; 0 stands for none, as in llama.cpp."""
        return positive(key, default) if number(key, default) else 1.0

    def softcap(key: str, default: float | None) -> float:
        return 0.0 if default is None else float(number(key, default))

    n_expert = count("expert_count") if kind.experts or number("expert_count", 0) else 0
    if n_expert and kind.experts is None:
        known = ", ".join(name for name, k in ARCHITECTURES.items() if k.experts is not None)
        raise ModelFileError(file, f"key '{arch}.expert_count': experts are supported in {known}")
    n_expert_used = count("expert_used_count") if n_expert else 0
    if n_expert_used > n_expert:
        raise ModelFileError(file, f"key '{arch}.expert_used_count' is {n_expert_used}, of {n_expert} experts")
    n_embd, n_head = count("embedding_length"), count("attention.head_count")
    n_head_kv = count("attention.head_count_kv", n_head)
    if n_head % n_head_kv:
        raise ModelFileError(file, f"{n_head} heads cannot share {n_head_kv} key/value heads")
    if f"{arch}.attention.key_length" not in metadata and n_embd % n_head:
        raise ModelFileError(file, f"embedding_length {n_embd} is not a multiple of head_count {n_head}")
    head_dim = count("attention.key_length", n_embd // n_head)
    if count("attention.value_length", head_dim) != head_dim:
        raise ModelFileError(file, "key_length and value_length differ, which is not supported")
    rope_dim = count("rope.dimension_count", head_dim)
    if rope_dim % 2 or rope_dim > head_dim:
        raise ModelFileError(file, f"key '{arch}.rope.dimension_count' is {rope_dim}, the heads have {head_dim}")
    temperature = float(number("attention.temperature_scale", 0.0)) if kind.attention_temperature else 0.0
    if temperature and rope_dim != head_dim:
        raise ModelFileError(file, f"key '{arch}.attention.temperature_scale' with heads that are turned in part only")
    n_layer, n_ctx_train = count("block_count"), count("context_length")
    if n_layer > MAX_LAYERS:
        raise ModelFileError(file, f"key '{arch}.block_count' is {n_layer}; at most {MAX_LAYERS} blocks are supported")
    eps_key = "attention.layer_norm_epsilon" if kind.layer_norm else "attention.layer_norm_rms_epsilon"
    eps = float(number(eps_key))
    if eps < 0:
        raise ModelFileError(file, f"key '{arch}.{eps_key}' is {eps:g}, which is negative")
    pooling = number("pooling_type", 0)
    if pooling not in range(len(POOLINGS)):
        raise ModelFileError(file, f"key '{arch}.pooling_type' is {pooling:g}; supported are 0 to {len(POOLINGS) - 1}")
    if kind.scales and metadata.get(f"{arch}.rope.scaling.finetuned") is False:
        raise ModelFileError(
            file, f"key '{arch}.rope.scaling.finetuned' is false: a {arch} without rotary embedding is not supported"
        )
    of_expert = "expert_feed_forward_length"
    rope_base = positive("rope.freq_base", 10000.0)
    windowed = kind.window is not None and number("attention.sliding_window", kind.window)
    minicpm = arch == "minicpm"  # whose first files do not name their scales
    logit_scale = (
        scaled("logit_scale", 256 / n_embd if minicpm else 1.0) if kind.scales or kind.multiplied_logits else 1.0
    )
    return Hparams(
        arch=arch,
        n_ctx_train=n_ctx_train,
        n_embd=n_embd,
        n_layer=n_layer,
        n_ff=count(of_expert if n_expert and kind.n_ff_of_expert else "feed_forward_length"),
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        n_vocab=n_vocab,
        eps=eps,
        rope_dim=rope_dim,
        rope_base=rope_base,
        rope_scaling=_rope_scaling(metadata, arch, file, number, positive, count, n_ctx_train),
        attention_scale=positive("attention.scale", 1.0)
        if kind.scales and number("attention.scale", 0.0)
        else _attention_scale(arch, n_layer, n_embd // n_head, head_dim),
        window=count("attention.sliding_window", kind.window) if windowed else 0,
        window_period=_window_period(metadata, arch, n_layer, file) if windowed else 0,
        rope_base_local=0.0
        if kind.local_base is None
        else positive("rope.freq_base_swa", kind.local_base or rope_base),
        attn_softcap=softcap("attn_logit_softcapping", kind.attn_softcap),
        final_softcap=softcap("final_logit_softcapping", kind.final_softcap),
        embedding_scale=float(n_embd) ** 0.5
        if kind.embedding_by_root
        else scaled("embedding_scale", 12.0 if minicpm else 1.0)
        if kind.scales
        else 1.0,
        pooling=POOLINGS[int(pooling)],
        n_expert=n_expert,
        n_expert_used=n_expert_used,
        n_ff_shared=count("expert_shared_feed_forward_length")
        if n_expert and number("expert_shared_feed_forward_length", 0)
        else 0,
        residual_scale=scaled("residual_scale", 1.4 / n_layer**0.5 if minicpm else 1.0) if kind.scales else 1.0,
        logit_scale=logit_scale if kind.multiplied_logits else 1 / logit_scale,
        temperature=temperature,
        parallel=metadata.get(f"{arch}.use_parallel_residual") is True,
    )


def _attention_scale(arch: str, n_layer: int, per_head: int, head_dim: int) -> float:
    """1/√d; the 27B Gemmas use the embedding's share of a head for d (llama.cpp tells them by their depth)."""
    if (arch, n_layer) in (("gemma2", 46), ("gemma3", 62)):
        return float(per_head**-0.5)
    return float(head_dim**-0.5)


def _window_period(metadata: Mapping[str, Any], arch: str, n_layer: int, file: str) -> int:
    """Which layers see everything: `sliding_window_pattern` is a period or, per layer, whether it has the window."""
    key = f"{arch}.attention.sliding_window_pattern"
    value = metadata.get(key, ARCHITECTURES[arch].window_period)
    if isinstance(value, np.ndarray) and value.shape == (n_layer,):
        local = value.astype(bool)
        index = np.arange(1, n_layer + 1)
        periods = (p for p in range(n_layer + 2) if np.array_equal(local, index % p != 0 if p else index > 0))
        value = next(periods, None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ModelFileError(file, f"key '{key}' is neither a period nor a regular pattern of {n_layer} layers")
    return value


def _rope_scaling(
    metadata: Mapping[str, Any],
    arch: str,
    file: str,
    number: Callable[[str, float], float],
    positive: Callable[[str, float], float],
    count: Callable[[str, int], int],
    n_ctx_train: int,
) -> RopeScaling:
    key = f"{arch}.rope.scaling"
    kind = metadata.get(f"{key}.type", "linear")  # llama.cpp's default: linear, which a factor of 1 makes nothing
    if not isinstance(kind, str) or kind not in ROPE_SCALINGS:
        raise ModelFileError(file, f"key '{key}.type' is {kind!r}; supported are {', '.join(ROPE_SCALINGS)}")
    name = "rope.scaling.factor" if f"{key}.factor" in metadata else "rope.scale_linear"
    return RopeScaling(
        kind,
        positive(name, 1.0) if number(name, 0.0) else 1.0,
        count("rope.scaling.original_context_length", n_ctx_train),
        positive("rope.scaling.attn_factor", 1.0),
        positive("rope.scaling.yarn_beta_fast", 32.0),
        positive("rope.scaling.yarn_beta_slow", 1.0),
        float(number("rope.scaling.yarn_log_multiplier", 0.0)),
    )

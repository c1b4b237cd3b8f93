"""Mixture-of-experts parameters, from GGUF keys."""

from __future__ import annotations

from dataclasses import dataclass

from logitless.models.architectures.architecture import Presence, RouterScore
from logitless.models.architectures.registry import ARCHITECTURES, TRAITS
from logitless.models.hparams.keys import Keys

ROUTERS = {1: RouterScore.SOFTMAX, 2: RouterScore.SIGMOID, 4: RouterScore.ROOT_SOFTPLUS}  # by expert_gating_func
GLM_VOCAB = 154880  # tokens


@dataclass(frozen=True, slots=True)
class Experts:
    n: int  # experts of a layer
    n_used: int  # experts of a row
    n_ff: int  # width of an expert
    n_ff_shared: int = 0  # width of the shared expert
    n_dense: int = 0  # number of first layers without experts
    period: int = 0  # one layer of each period has experts; 0: all layers have
    phase: int = 1  # that layer's number within its period
    router: RouterScore = RouterScore.SOFTMAX
    weights_norm: bool = True  # weights of a row's experts are divided by their sum
    scale: float = 1.0  # weights are multiplied by this
    n_groups: int = 1  # groups of experts
    # groups of a row's experts: those whose best two experts are the likeliest
    n_groups_used: int = 1
    # width of the experts' input and output; 0: the layer's
    n_latent: int = 0
    in_layers: tuple[bool, ...] = ()  # flags of the layers with experts; (): those of period and phase
    # adjugate experts (Grove MoE): one of each so many experts, of this width, and their factor
    n_ff_chunk: int = 0
    per_chunk: int = 1
    chunk_scale: float = 1.0
    n_hashed: int = 0  # first layers whose experts follow from the token's id

    @property
    def n_chunks(self) -> int:
        return self.n // self.per_chunk

    def are_in(self, layer: int) -> bool:
        if layer < len(self.in_layers):
            return self.in_layers[layer]
        return layer >= self.n_dense and (self.period == 0 or layer % self.period == self.phase)


def read_experts(keys: Keys, n_vocab: int = 0) -> Experts | None:
    """MoE parameters; None for a dense model. ModelFileError names the key at fault."""
    moe = TRAITS[keys.arch].moe
    n = keys.count("expert_count") if moe.presence is Presence.REQUIRED else keys.count_or_none("expert_count")
    if not n:
        return None
    if moe.presence is Presence.ABSENT:
        known = ", ".join(name for name, other in ARCHITECTURES.items() if other.moe.presence is not Presence.ABSENT)
        raise keys.error("expert_count", f"is {n}: experts are supported in {known}")
    n_used = keys.count("expert_used_count")
    if n_used > n:
        raise keys.error("expert_used_count", f"is {n_used}, of {n} experts")
    n_groups, n_groups_used = _groups(keys, n, n_used)
    default, shared = None, 0
    if keys.arch == "qwen2moe":  # its first files lack keys
        shared = keys.count("feed_forward_length")
        default = max(1, shared // n_used)
    if keys.arch == "grok":  # and Grok 1
        default = keys.count("feed_forward_length")
    key = "expert_feed_forward_length" if moe.own_width else "feed_forward_length"
    n_ff = keys.count(key, default if moe.own_width else None)
    shared = keys.count_or_none("expert_shared_count", int(moe.one_shared)) * n_ff or shared
    named = "expert_shared_feed_forward_length" in keys
    times = keys.count("expert_shared_count") if moe.shared_width_each and named else 1
    gating = keys.number("expert_gating_func", 0 if moe.router else None)
    if not gating and keys.arch == "deepseek2" and n_vocab == GLM_VOCAB and keys.count("block_count") in (47, 48):
        gating = 2  # the first files of GLM 4.7 Flash do not say it
    if gating and gating not in ROUTERS:
        raise keys.error("expert_gating_func", f"is {gating:g}; supported are {', '.join(map(str, ROUTERS))}")
    step = keys.count_or_none("interleave_moe_layer_step")  # the last of so many layers has experts
    period, phase = (step, step - 1) if step else (keys.count_or_none("moe_every_n_layers"), 1)
    return Experts(
        n,
        n_used,
        n_ff,
        keys.count_or_none("expert_shared_feed_forward_length", shared) * times,
        keys.count_or_none("leading_dense_block_count"),
        period,
        phase,
        ROUTERS[int(gating)] if gating else moe.router or RouterScore.SOFTMAX,
        keys.flag("expert_weights_norm", False) if moe.normalize is None else moe.normalize,
        keys.factor("expert_weights_scale"),
        n_groups,
        n_groups_used,
        keys.count_or_none("moe_latent_size") or keys.count_or_none("expert_latent_length"),
        (),
        *_chunks(keys, n),
        keys.count_or_none("hash_layer_count", None) if moe.hashed else 0,
    )


def _chunks(keys: Keys, n: int) -> tuple[int, int, float]:
    """Width of the adjugate experts, number of experts that share one, and its factor."""
    width = keys.count_or_none("expert_chunk_feed_forward_length")
    size = keys.count("experts_per_group") if width else 1
    if n % size:
        raise keys.error("experts_per_group", f"is {size}, of {n} experts")
    return width, size, keys.positive("expert_group_scale", 1.0) if width else 1.0


def _groups(keys: Keys, n: int, n_used: int) -> tuple[int, int]:
    n_groups = keys.count_or_none("expert_group_count", 1) or 1
    if n_groups == 1:
        return 1, 1
    if n % n_groups or n // n_groups < 2:
        raise keys.error("expert_group_count", f"is {n_groups}, of {n} experts")
    used = keys.count("expert_group_used_count")
    if used > n_groups or used * (n // n_groups) < n_used:
        raise keys.error("expert_group_used_count", f"is {used}, of {n_groups} groups of {n // n_groups}")
    return n_groups, used

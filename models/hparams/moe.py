"""What a file says of its mixtures of experts, with GGUF's own names."""

from __future__ import annotations

from dataclasses import dataclass

from logitless.models.architectures.registry import ARCHITECTURES
from logitless.models.hparams.keys import Keys

GATINGS = {1: "softmax", 2: "sigmoid"}  # by GGUF's numbers
GLM_VOCAB = 154880  # tokens


@dataclass(frozen=True, slots=True)
class Experts:
    n: int  # of a layer
    n_used: int  # of each row
    n_ff: int  # of one
    n_ff_shared: int = 0  # of the one that every row has besides
    n_dense: int = 0  # so many of the first layers have none
    period: int = 0  # the second of each so many layers has some; 0: all have
    gating: str = "softmax"  # one of GATINGS: what becomes of a row's logits
    weights_norm: bool = True  # what a row's experts count is divided by their sum
    scale: float = 1.0  # and multiplied by this
    n_groups: int = 1  # of experts
    n_groups_used: int = 1  # a row's experts are of so many groups: of those whose best two are the likeliest
    n_latent: int = 0  # elements of the shorter rows that experts are given and give; 0: as the layer's

    def are_in(self, layer: int) -> bool:
        return layer >= self.n_dense and (self.period == 0 or layer % self.period == 1)


def read_experts(keys: Keys, n_vocab: int = 0) -> Experts | None:
    """None where layers have none. ModelFileError names the key at fault."""
    kind = ARCHITECTURES[keys.arch]
    n = keys.count("expert_count") if kind.experts else keys.count_or_none("expert_count")
    if not n:
        return None
    if kind.experts is None:
        known = ", ".join(name for name, k in ARCHITECTURES.items() if k.experts is not None)
        raise keys.error("expert_count", f"is {n}: experts are supported in {known}")
    n_used = keys.count("expert_used_count")
    if n_used > n:
        raise keys.error("expert_used_count", f"is {n_used}, of {n} experts")
    n_groups, n_groups_used = _groups(keys, n, n_used)
    default, shared = None, 0
    if keys.arch == "qwen2moe":  # whose first files say less
        shared = keys.count("feed_forward_length")
        default = max(1, shared // n_used)
    n_ff = (
        keys.count("expert_feed_forward_length", default) if kind.n_ff_of_expert else keys.count("feed_forward_length")
    )
    shared = keys.count_or_none("expert_shared_count") * n_ff or shared
    named = "expert_shared_feed_forward_length" in keys
    times = keys.count("expert_shared_count") if kind.several_shared and named else 1
    gating = keys.number("expert_gating_func", 0 if kind.gating else None)
    if not gating and keys.arch == "deepseek2" and n_vocab == GLM_VOCAB and keys.count("block_count") in (47, 48):
        gating = 2  # the first files of GLM 4.7 Flash do not say it
    if gating and gating not in GATINGS:
        raise keys.error("expert_gating_func", f"is {gating:g}; supported are {', '.join(map(str, GATINGS))}")
    return Experts(
        n,
        n_used,
        n_ff,
        keys.count_or_none("expert_shared_feed_forward_length", shared) * times,
        keys.count_or_none("leading_dense_block_count"),
        keys.count_or_none("moe_every_n_layers"),
        GATINGS[int(gating)] if gating else kind.gating or "softmax",
        keys.flag("expert_weights_norm", False) if kind.weights_norm is None else kind.weights_norm,
        keys.factor("expert_weights_scale"),
        n_groups,
        n_groups_used,
        keys.count_or_none("moe_latent_size"),
    )


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

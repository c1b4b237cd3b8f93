"""Options of a LoRA adapter: target matrices, ranks, scaling, start; one declaration for all callers."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.models.adapters.lora import Adapter, Pair, Scaling, turned
from logitless.training.config import FIELDS, STARTS
from logitless.training.errors import TrainingError

F32 = npt.NDArray[np.float32]

# flag → tensor names, as in llama.cpp's finetune
RANKS = {
    "tok_embd": "token_embd.weight",
    "out": "output.weight",
    "wq": "blk.*.attn_q.weight",
    "wk": "blk.*.attn_k.weight",
    "wv": "blk.*.attn_v.weight",
    "wo": "blk.*.attn_output.weight",
    "w1": "blk.*.ffn_gate.weight",
    "w2": "blk.*.ffn_down.weight",
    "w3": "blk.*.ffn_up.weight",
    "att_norm": "blk.*.attn_norm.weight",
    "ffn_norm": "blk.*.ffn_norm.weight",
    "out_norm": "output_norm.weight",
}
# recurrent layers, which llama.cpp's finetune does not name
_OF_STATES = tuple(
    f"blk.*.{name}.weight"
    for name in (
        *("attn_qkv", "attn_gate", "ssm_[io]*", "shortconv.*_proj"),
        *(f"time_mix_{name}" for name in ("key", "value", "receptance", "gate", "output")),
        *(f"channel_mix_{name}" for name in ("key", "value", "receptance")),
    )
)
EXPERTS = "blk.*.ffn_*_exps.weight"  # trained only where a target names them
# as large as the vocabulary, or unused by llama.cpp: trained only where a rank or a target names them
_BY_NAME = ("tok_embd", "out", "att_norm", "ffn_norm", "out_norm")
# names of peft's target_modules → tensor names
MODULES = {
    "q_proj": ("attn_q",),
    "k_proj": ("attn_k",),
    "v_proj": ("attn_v",),
    "qkv_proj": ("attn_q", "attn_k", "attn_v"),
    "o_proj": ("attn_output",),
    "gate_proj": ("ffn_gate",),
    "up_proj": ("ffn_up",),
    "gate_up_proj": ("ffn_gate", "ffn_up"),
    "down_proj": ("ffn_down",),
    "experts": ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
    "embed_tokens": ("token_embd",),
    "lm_head": ("output",),
}
_MAX_RANK = int(FIELDS["lora_r"][1].high)
ALL_LINEAR = "all-linear"  # peft's name of all matrices of the blocks

# names of hyperparameters, of keywords and (with dashes) of flags → fields of LoraOptions
HYPERPARAMETERS = {
    "lora_r": "rank",
    "lora_alpha": "alpha",
    "lora_target_modules": "targets",
    "lora_rslora": "rslora",
    "lora_dora": "dora",
    "lora_init": "start",
}


@dataclass(frozen=True)
class LoraOptions:
    """Ranks and scaling of an adapter.

    `ranks` overrides `rank` by tensor kind (RANKS), 0 skips it. `targets`: peft's module names, or
    patterns of tensor names such as `blk.0.attn_*`; none: all matrices of the blocks. A pair's
    product is scaled by alpha / r (`alpha` 0: by 1), with `rslora` by alpha / √r (Kalajdzievski,
    2023). `dora`: trained row norms of the matrices (Liu et al., 2024). `start` "pissa": A and B
    begin as the principal singular vectors (Meng et al., 2024), not at random and 0."""

    rank: int = 4
    alpha: float = 0.0
    ranks: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0
    targets: tuple[str, ...] = ()
    rslora: bool = False
    dora: bool = False
    start: str = "gaussian"

    def __post_init__(self) -> None:
        if self.start not in STARTS:
            raise TrainingError(f"lora_init: {self.start!r} is not one of {', '.join(STARTS)}")
        for kind, rank in self.ranks.items():
            if kind not in RANKS:
                raise TrainingError(f"lora_ranks: {kind!r} is not one of {', '.join(RANKS)}")
            if not 0 <= rank <= _MAX_RANK:
                raise TrainingError(f"lora_ranks: {kind}: {rank} is not between 0 and {_MAX_RANK}")
        if self.rslora and not self.alpha:
            raise TrainingError("lora_rslora: needs a lora_alpha, which is divided by √r")
        if self.dora and self.start == "pissa":
            raise TrainingError("lora_dora: begins at the model itself, not as lora_init pissa")

    def rank_of(self, name: str) -> int:
        """Rank of a weight's pair; 0: it has none."""
        kind = next((kind for kind, pattern in RANKS.items() if fnmatch.fnmatchcase(name, pattern)), None)
        of_experts = fnmatch.fnmatchcase(name, EXPERTS)
        if ".indexer." in name:  # its choice has no gradient
            return 0
        if kind is None and not of_experts and not any(fnmatch.fnmatchcase(name, pattern) for pattern in _OF_STATES):
            return 0
        default = 0 if kind in _BY_NAME or of_experts else self.rank
        if self.targets:
            default = self.rank if any(_is_target(name, t, default) for t in self.targets) else 0
        return default if kind is None else self.ranks.get(kind, default)

    def factor(self, name: str) -> float:
        """Factor of a pair's product."""
        return Scaling(self.alpha, self.rslora).factor(self.rank_of(name)) if self.alpha else 1.0

    @property
    def is_plain(self) -> bool:
        """True where a file has the parameters themselves, with one alpha; else B has the factor."""
        return not self.rslora and not self.dora and self.start == "gaussian"

    @property
    def trained(self) -> Scaling | None:
        """The scaling that B of the adapter has, where peft could apply it to the parameters themselves."""
        return None if self.is_plain or self.start != "gaussian" or not self.alpha else Scaling(self.alpha, self.rslora)

    def check_targets(self, names: Collection[str]) -> None:
        """TrainingError: a target is no matrix of the model with these weights."""
        for target in self.targets:
            alone = LoraOptions(targets=(target,))
            if not any(alone.rank_of(name) for name in names):
                raise TrainingError(f"lora_target_modules: the model has no matrix {target!r} to adapt")

    def changes(self) -> Iterator[tuple[str, Any]]:
        """Hyperparameters that differ from the defaults, by name."""
        for name, of in HYPERPARAMETERS.items():
            value = getattr(self, of)
            if value != LoraOptions.__dataclass_fields__[of].default:
                yield name, list(value) if isinstance(value, tuple) else value


def _is_target(name: str, target: str, default: int) -> bool:
    """True if a target names this weight; `default`: its rank without targets."""
    if target == ALL_LINEAR:
        return default > 0
    whole = name.removesuffix(".weight")
    own = whole.split(".", 2)[-1] if whole.startswith("blk.") else whole
    if own.endswith("norm") and not target.endswith("norm"):  # ffn_* means matrices
        return False
    return any(fnmatch.fnmatchcase(n, t) for t in MODULES.get(target, (target,)) for n in (whole, own))


def lora_options(fields: Mapping[str, Any], seed: int = 0, ranks: Mapping[str, int] | None = None) -> LoraOptions:
    """Options from hyperparameters by name; a name that is not there or None has its default.
    TrainingError names the hyperparameter."""
    values = {of: fields[name] for name, of in HYPERPARAMETERS.items() if fields.get(name) is not None}
    values["targets"] = tuple(values.get("targets", ()))
    return LoraOptions(**values, ranks=ranks or {}, seed=seed)


def adapter_of(options: LoraOptions, values: Mapping[str, F32]) -> Adapter:
    """The adapter that parameters and frozen parts, by name, make. DoRA's: Trainable.adapter."""
    pairs = {}
    for name in (n.removesuffix(".lora_a") for n in values if n.endswith(".lora_a")):
        a, b = values[f"{name}.lora_a"], values[f"{name}.lora_b"]
        if options.start == "pissa":
            a = np.concatenate([a, values[f"{name}.pissa_a"][len(a) :]])
            b = np.concatenate([b, values[f"{name}.pissa_b"][:, b.shape[1] :]], 1)
        if fnmatch.fnmatchcase(name, EXPERTS):
            b = turned(b, len(a) // options.rank_of(name))
        pairs[name] = Pair(a, b if options.is_plain else b * np.float32(options.factor(name)))
    return Adapter(pairs, options.alpha if options.is_plain else 0.0, trained=options.trained)

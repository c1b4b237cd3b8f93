"""Tensors that a Hugging Face model has beside others, where GGUF's architecture has models without them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from logitless.models.errors import ModelFileError, shown
from logitless.models.huggingface.config import Config
from logitless.models.huggingface.families.family import Family
from logitless.models.huggingface.families.keys import uses_sigmoid

_LAYER = r"(?:(?:enc|dec)\.)?blk\.(\d+)\."
_QKV, _FFN = "attn_(?:qkv|[qkv])", "ffn_(?:gate|up|down)"


@dataclass(frozen=True)
class _Companion:
    archs: str  # GGUF's names; "": all
    stems: str  # a pattern of matrices and vectors, without their layer and `.weight`
    names: tuple[str, ...]  # tensors beside each, of the same layer
    exists: Callable[[Config, int], bool] = lambda config, layer: True  # by the settings and the layer


def _says(*settings: str, default: bool = False) -> Callable[[Config, int], bool]:
    return lambda config, layer: config.get(*settings, default=default) is True


def _is_local(c: Config, layer: int) -> bool:
    """True for a layer with a sliding window."""
    kinds = c.items("hybrid_layer_pattern") or c.items("layer_types")
    return layer < len(kinds) and kinds[layer] in (1, "sliding_attention")


def _has_sinks(c: Config, layer: int) -> bool:
    kind = "swa" if _is_local(c, layer) else "full"
    return c.get(f"add_{kind}_attention_sink_bias", default=kind == "swa") is True


_MAMBAS = "mamba mamba2 jamba falcon-h1 nemotron_h nemotron_h_moe granitehybrid"
_COMPANIONS = (
    _Companion("", "attn_[qkv]", (r"\1.bias",), _says("attention_bias")),
    _Companion("", _FFN, (r"\1.bias",), _says("mlp_bias")),
    _Companion("gptneox", "attn_qkv|attn_output", (r"\1.bias",), _says("attention_bias", default=True)),
    _Companion("jais2", f"{_QKV}|attn_output", (r"\1.bias",), _says("attention_bias", default=True)),
    _Companion("jais2", _FFN, (r"\1.bias",), _says("mlp_bias", default=True)),
    _Companion("phimoe", "attn_output", (r"\1.bias",), _says("attention_bias")),
    _Companion("phimoe", "output", (r"\1.bias",), _says("lm_head_bias")),
    _Companion("glm4moe command-r", "attn_[qk]", (r"\1_norm.weight",), _says("use_qk_norm")),
    _Companion("stablelm", "attn_[qk]", (r"\1_norm.weight",), _says("qk_layernorm")),
    _Companion(_MAMBAS, "ssm_conv1d", (r"\1.bias",), _says("use_conv_bias", "mamba_conv_bias", default=True)),
    _Companion("jamba", "ssm_x", tuple(f"ssm_{name}_norm.weight" for name in ("dt", "b", "c"))),
    _Companion(
        "deepseek32 glm-dsa dots1 exaone-moe mimo2",
        "ffn_gate_inp",
        ("exp_probs_b.bias",),
        lambda c, layer: c.get("topk_method", default="noaux_tc") == "noaux_tc",
    ),
    _Companion(
        "deepseek2",
        "ffn_gate_inp",
        ("exp_probs_b.bias",),
        lambda c, layer: uses_sigmoid(c) and c.get("topk_method", default="noaux_tc") == "noaux_tc",
    ),
    _Companion("ernie4_5-moe", "ffn_gate_inp", ("exp_probs_b.bias",), _says("moe_use_aux_free", default=True)),
    _Companion("hy_v3", "ffn_gate_inp", ("exp_probs_b",)),
    _Companion("mimo2", "attn_q|attn_qkv", ("attn_sinks.weight",), _has_sinks),
    _Companion("qwen2moe qwen3next qwen35moe", "ffn_up_shexp", ("ffn_gate_inp_shexp.weight",)),
    _Companion("gemma4", "attn_norm", ("layer_output_scale.weight",)),
    _Companion("gemma4", "ffn_gate_inp", ("ffn_down_exps.scale",)),
    _Companion(
        "gemma4",
        "attn_k",
        ("attn_v.weight",),
        lambda c, layer: _is_local(c, layer) or c.get("attention_k_eq_v") is not True,
    ),
    _Companion(
        "t5 t5encoder",
        "ffn_up",
        ("ffn_gate.weight",),
        lambda c, layer: str(c.get("feed_forward_proj")).startswith("gated") or c.get("is_gated_act") is True,
    ),
    _Companion(
        "bert nomic-bert nomic-bert-moe jina-bert-v2 jina-bert-v3",
        "token_embd",
        ("token_types.weight",),
        lambda c, layer: c.count("type_vocab_size", default=0) > 0,
    ),
)


def check_companions(config: Config, family: Family, tensors: Collection[str]) -> None:
    """ModelFileError: a tensor is missing that GGUF's architecture may lack, and this model may not."""
    missing = next((name for name in _companions(config, family, tensors) if name not in tensors), None)
    if missing is not None:
        raise ModelFileError(config.path.parent, f"tensor {shown(missing)} is missing")


def _companions(config: Config, family: Family, tensors: Collection[str]) -> Iterator[str]:
    rows = [row for row in _COMPANIONS if not row.archs or family.arch in row.archs.split()]
    rows += [_Companion("", family.biases, (r"\1.bias",))] if family.biases else []
    patterns = [(row, re.compile(rf"((?:{row.stems}))\.weight")) for row in rows]
    n_layers = config.count("num_hidden_layers")
    split = re.compile(rf"({_LAYER})?(.+)")
    parts = [match.groups() for name in tensors if (match := split.fullmatch(name))]
    biased = {end.removesuffix(".bias") for _, layer, end in parts if layer and end.endswith(".bias")}
    for block, layer, end in parts:
        number = int(layer or 0)
        for row, pattern in patterns:
            if (stem := pattern.fullmatch(end)) and row.exists(config, number):
                yield from ((block or "") + stem.expand(name) for name in row.names)
        if layer and number < n_layers and end.removesuffix(".weight") in biased and end.endswith(".weight"):
            yield f"{block}{end.removesuffix('weight')}bias"  # as in other layers

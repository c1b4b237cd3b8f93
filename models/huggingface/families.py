"""Families of Hugging Face's models: config.json's settings as GGUF's keys, and the moves of their tensors.

Names of tensors are those of the gguf package's map. A row: the architecture of config.json, that of GGUF, what the
keys of all models lack, and what differs in the tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from logitless.models.gguf.types import ValueType
from logitless.models.gguf.write import Key, f32, flag, text, u32
from logitless.models.huggingface.config import Config
from logitless.models.huggingface.moves import (
    COLUMN,
    DOWN_FACTOR,
    GATE_FACTOR,
    GROUPS,
    LATENT_KEYS,
    LATENT_VALUES,
    LINEAR_GATES,
    LINEAR_QKV,
    MAMBA_IN,
    MINUS_EXP,
    PAIRS_OF_KEYS,
    PAIRS_OF_QUERIES,
    PLUS_ONE,
    TAPS,
    TRANSPOSED,
    VECTOR,
    Move,
    Shape,
    half,
    reshaped,
    then,
    tiled,
    times,
)

log = logging.getLogger(__name__)
Keys = Iterator[tuple[str, Key]]
Rules = tuple[tuple[str, Move], ...]  # (end of a tensor's name in GGUF, its move)
# (end of a name of Hugging Face, tensors that are made of it), before the map of names
Splits = tuple[tuple[str, tuple[tuple[str, Move | None], ...]], ...]


def _nothing(config: Config) -> Keys:
    yield from ()


@dataclass(frozen=True)
class Family:
    arch: str  # GGUF's
    keys: Callable[[Config], Keys] = _nothing  # without the architecture's prefix
    moves: Rules = ()
    splits: Splits = ()
    unused: str = ""  # a pattern of names whose tensors are not of the network here
    required: tuple[str, ...] = ()  # tensors that GGUF's architecture may lack, and this one may not
    numbers: tuple[tuple[str, str], ...] = ()  # (end of a name, key) of one number of each layer
    mtp: bool = False  # the folder may have blocks that predict one token more, which models/architectures/mtp.py runs


def numbers(values: list[int] | list[float] | list[bool], item: ValueType) -> Key:
    """An array of numbers."""
    return Key(np.array(values), ValueType.ARRAY, item)


def common_keys(c: Config) -> Keys:
    """Keys that all transformers have, without the architecture's prefix; of settings that a model may lack those that
    it has."""
    yield "context_length", u32(c.count("max_position_embeddings", "n_positions", "max_sequence_length", default=4096))
    yield "embedding_length", u32(c.count("hidden_size"))
    yield "block_count", u32(c.count("num_hidden_layers"))
    yield "vocab_size", u32(c.count("vocab_size"))
    for key, *names in _COUNTS:
        if any(name in c for name in names) and not isinstance(c.get(*names), list):
            yield key, u32(c.count(*names))
    for key, *names in _NUMBERS:
        if any(name in c for name in names):
            yield key, f32(c.number(*names))
    if "num_key_value_heads" not in c and "num_attention_heads" in c:
        yield "attention.head_count_kv", u32(c.count("num_attention_heads"))
    if "norm_topk_prob" in c:
        yield "expert_weights_norm", flag(c.flag("norm_topk_prob"))
    if size := c.head_dim if "num_attention_heads" in c else 0:
        yield "attention.key_length", u32(size)
        yield "attention.value_length", u32(size)
        turned = c.number("partial_rotary_factor", default=1.0, of=c.rope)
        yield "rope.dimension_count", u32(int(size * (turned if turned != 1 else c.number(*_TURNED, default=1.0))))
    sections = c.rope.get("mrope_section")
    if isinstance(sections, list) and 0 < len(sections) < 5 and all(isinstance(n, int) for n in sections):
        yield "rope.dimension_sections", numbers([*sections, 0, 0, 0][:4], ValueType.INT32)
    yield from _rope_keys(c)


_TURNED = ("partial_rotary_factor", "rotary_pct")
_COUNTS = (
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("expert_count", "num_experts", "num_local_experts", "n_routed_experts"),
    ("expert_used_count", "num_experts_per_tok", "num_experts_per_token"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ("expert_shared_count", "n_shared_experts", "num_shared_experts"),
    ("leading_dense_block_count", "first_k_dense_replace"),
    ("expert_group_count", "n_group"),
    ("expert_group_used_count", "topk_group"),
)
_NUMBERS = (
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps", "norm_eps"),
    ("attention.layer_norm_epsilon", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    ("expert_weights_scale", "routed_scaling_factor"),
)


def _rope_keys(c: Config) -> Keys:
    rope, kind = c.rope, c.rope["rope_type"]
    yield "rope.freq_base", f32(c.number("rope_theta", of=rope))
    if kind in ("default", "dynamic", "llama3", "mrope", "none", "proportional"):  # two are a tensor
        return
    if kind not in ("linear", "yarn", "longrope", "su"):
        raise c.error("rope_type", f"is {kind!r}, which is not supported; supported are linear, yarn, llama3, longrope")
    yield "rope.scaling.type", text("longrope" if kind == "su" else kind)
    if "factor" in rope:
        yield "rope.scaling.factor", f32(c.number("factor", of=rope))
    before = next((of for of in (Config(c.path, rope), c) if "original_max_position_embeddings" in of), None)
    if before is not None:
        yield "rope.scaling.original_context_length", u32(before.count("original_max_position_embeddings"))
    for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if name in rope and kind == "yarn":
            yield f"rope.scaling.{key}", f32(c.number(name, of=rope))


def _sliding(c: Config) -> Keys:
    yield "attention.sliding_window", u32(c.count("sliding_window"))


def _gemma2(c: Config) -> Keys:
    yield from _sliding(c)
    yield "attn_logit_softcapping", f32(c.number("attn_logit_softcapping", default=50.0))
    yield "final_logit_softcapping", f32(c.number("final_logit_softcapping", default=30.0))


def _gemma3(c: Config) -> Keys:
    yield from _sliding(c)
    if "final_logit_softcapping" in c:
        yield "final_logit_softcapping", f32(c.number("final_logit_softcapping"))
    if c.rope_local:
        yield "rope.freq_base_swa", f32(c.number("rope_theta", default=10000.0, of=c.rope_local))
    yield from _pattern(c)


def _pattern(c: Config) -> Keys:
    """The layers with a sliding window, where their period is not the architecture's."""
    kinds = c.items("layer_types")
    if kinds:
        local = [kind == "sliding_attention" for kind in kinds]
        yield "attention.sliding_window_pattern", numbers(local, ValueType.BOOL)


def _flag_if(c: Config, name: str, key: str) -> Keys:
    if name in c:
        yield key, flag(c.flag(name))


def _scales(c: Config) -> Keys:
    for name, key in (
        ("embedding_multiplier", "embedding_scale"),
        ("residual_multiplier", "residual_scale"),
        ("attention_multiplier", "attention.scale"),
        ("logits_scaling", "logit_scale"),
    ):
        if name in c:
            yield key, f32(c.number(name))
    if c.count("shared_intermediate_size", default=0):
        yield "expert_shared_feed_forward_length", u32(c.count("shared_intermediate_size"))


def _phi3(c: Config) -> Keys:
    if "sliding_window" in c:
        yield from _sliding(c)
    if c.rope["rope_type"] in ("longrope", "su"):
        before = c.count("original_max_position_embeddings", default=4096)
        times = c.count("max_position_embeddings") / max(1, before)
        factor = float(np.sqrt(1 + np.log(times) / np.log(before))) if times > 1 else 1.0
        yield "rope.scaling.attn_factor", f32(c.number("attention_factor", default=factor, of=c.rope))


def _windows(c: Config) -> Keys:
    """A sliding window in some layers, where the model has one."""
    if "sliding_window" in c and "sliding_attention" in (c.items("layer_types") or ["sliding_attention"]):
        yield from _sliding(c)
        yield from _pattern(c)


def _gpt_oss(c: Config) -> Keys:
    yield from _sliding(c)
    yield "expert_feed_forward_length", u32(c.count("intermediate_size"))


def _qwen3_next(c: Config) -> Keys:
    n_heads = c.count("linear_num_value_heads")
    yield "ssm.conv_kernel", u32(c.count("linear_conv_kernel_dim"))
    yield "ssm.state_size", u32(c.count("linear_key_head_dim"))
    yield "ssm.group_count", u32(c.count("linear_num_key_heads"))
    yield "ssm.time_step_rank", u32(n_heads)
    yield "ssm.inner_size", u32(n_heads * c.count("linear_value_head_dim"))
    kinds = c.items("layer_types")
    full = kinds.index("full_attention") + 1 if "full_attention" in kinds else 4
    yield "full_attention_interval", u32(c.count("full_attention_interval", default=full))


def _mla(c: Config) -> Keys:
    n_turned, rank = c.count("qk_rope_head_dim"), c.count("kv_lora_rank")
    yield "attention.head_count_kv", u32(1)
    yield "attention.key_length", u32(rank + n_turned)
    yield "attention.value_length", u32(rank)
    yield "attention.key_length_mla", u32(c.count("qk_nope_head_dim") + n_turned)
    yield "attention.value_length_mla", u32(c.count("v_head_dim"))
    yield "attention.kv_lora_rank", u32(rank)
    if "q_lora_rank" in c:
        yield "attention.q_lora_rank", u32(c.count("q_lora_rank"))
    yield "rope.dimension_count", u32(n_turned)
    if "mscale_all_dim" in c.rope:
        yield "rope.scaling.yarn_log_multiplier", f32(0.1 * c.number("mscale_all_dim", of=c.rope))
    sigmoid = c.get("scoring_func", default="") == "sigmoid" or c.get("model_type") in ("deepseek_v3", "glm4_moe_lite")
    yield "expert_gating_func", u32(2 if sigmoid else 1)


def _glm4_moe(c: Config) -> Keys:
    yield "expert_gating_func", u32(2)


def _lfm2(c: Config) -> Keys:
    width = c.count("block_ff_dim", "intermediate_size")
    if c.flag("block_auto_adjust_ff_dim"):
        width, multiple = int(2 * width / 3), c.count("block_multiple_of", default=256)
        width = int(c.number("block_ffn_dim_multiplier", default=1.0) * width)
        width = -(-width // multiple) * multiple
    yield "feed_forward_length", u32(width)
    kinds = c.items("layer_types")
    attend = [kind == "full_attention" for kind in kinds]
    attend = attend or [i in c.items("full_attn_idxs") for i in range(c.count("num_hidden_layers"))]
    n = c.count("num_key_value_heads")
    yield "attention.head_count_kv", numbers([n if attends else 0 for attends in attend], ValueType.INT32)
    yield "shortconv.l_cache", u32(c.count("conv_L_cache"))


def _llama4(c: Config) -> Keys:
    yield "feed_forward_length", u32(c.count("intermediate_size_mlp"))
    yield "expert_feed_forward_length", u32(c.count("intermediate_size"))
    yield "interleave_moe_layer_step", u32(c.count("interleave_moe_layer_step", default=1))
    yield "attention.chunk_size", u32(c.count("attention_chunk_size", default=8192))


def _mamba2(c: Config) -> Keys:
    n_heads = c.count("mamba_n_heads", "mamba_num_heads", "num_heads")
    yield "ssm.conv_kernel", u32(c.count("mamba_d_conv", "conv_kernel"))
    size = c.get("mamba_d_ssm")
    size = n_heads * c.count("mamba_d_head", "mamba_head_dim", "head_dim") if size is None else c.count("mamba_d_ssm")
    yield "ssm.inner_size", u32(size)
    yield "ssm.state_size", u32(c.count("mamba_d_state", "ssm_state_size", "state_size"))
    yield "ssm.time_step_rank", u32(n_heads)
    yield "ssm.group_count", u32(c.count("mamba_n_groups", "n_groups"))


def _heads_of(c: Config, attends: list[bool]) -> tuple[str, Key]:
    """Heads of keys, 0 in layers without attention."""
    n = c.count("num_key_value_heads", "num_attention_heads")
    return "attention.head_count_kv", numbers([n if yes else 0 for yes in attends], ValueType.INT32)


def _granite_hybrid(c: Config) -> Keys:
    yield from _scales(c)
    yield from _mamba2(c)
    yield _heads_of(c, [kind in _ATTENTION for kind in c.items("layer_types")])
    yield "rope.scaling.finetuned", flag(c.get("position_embedding_type") == "rope")
    if not has_experts(c):
        yield "feed_forward_length", u32(c.count("shared_intermediate_size", "intermediate_size"))
        yield from _NO_EXPERTS


_NO_EXPERTS = tuple(  # of a dense model, whose settings name some
    (f"expert_{name}count", u32(0)) for name in ("", "used_", "shared_", "group_", "group_used_")
)
_ATTENTION = ("attention", "full_attention", "*")
_NEMOTRON_KINDS = {"M": "mamba", "linear_attention": "mamba", "-": "mlp", "E": "moe", **dict.fromkeys(_ATTENTION, "*")}


def _nemotron_kinds(c: Config) -> list[str]:
    """The kind of each of Nemotron H's layers."""
    kinds = c.get("hybrid_override_pattern", "layers_block_type", default=[])
    if not isinstance(kinds, str | list):
        raise c.error("layers_block_type", "is no list of kinds")
    return [_NEMOTRON_KINDS.get(str(kind), str(kind)) for kind in kinds]


def _nemotron_h(c: Config) -> Keys:
    yield from _mamba2(c)
    kinds = _nemotron_kinds(c)
    yield "attention.layer_norm_rms_epsilon", f32(c.number("layer_norm_epsilon", "norm_eps", default=1e-5))
    yield _heads_of(c, [kind == "*" for kind in kinds])
    if not kinds or not {"mlp", "moe"} > {*kinds} - {"mamba", "*"}:
        raise c.error("layers_block_type", "has not one kind of FFN beside mamba and attention, the supported ones")
    width = c.count("moe_intermediate_size" if has_experts(c) else "intermediate_size")
    widths = [width if kind in ("mlp", "moe") else 0 for kind in kinds]
    yield "feed_forward_length", numbers(widths, ValueType.INT32)
    if has_experts(c):
        yield "expert_shared_feed_forward_length", u32(c.count("moe_shared_expert_intermediate_size"))
        yield "expert_gating_func", u32(2)
        if c.count("moe_latent_size", default=0):
            yield "moe_latent_size", u32(c.count("moe_latent_size"))
    else:
        yield from _NO_EXPERTS


def has_experts(c: Config) -> bool:
    """True for a model of experts, of an architecture that has others, too."""
    if c.get("hybrid_override_pattern", "layers_block_type") is not None:
        return "moe" in _nemotron_kinds(c)
    return c.count("num_local_experts", "num_experts", default=0) > 0


def _mamba2_alone(c: Config) -> Keys:
    yield from _mamba2(c)
    yield "attention.head_count", u32(0)
    yield "feed_forward_length", u32(0)
    yield "attention.layer_norm_rms_epsilon", f32(c.number("layer_norm_epsilon", default=1e-5))


def _lfm2_moe(c: Config) -> Keys:
    yield from _lfm2(c)
    yield "leading_dense_block_count", u32(c.count("num_dense_layers"))
    yield "expert_gating_func", u32(2)


def _ernie_moe(c: Config) -> Keys:
    width = c.count("moe_intermediate_size")
    yield "expert_count", u32(c.count("moe_num_experts"))
    yield "expert_used_count", u32(c.count("moe_k"))
    yield "interleave_moe_layer_step", u32(c.count("moe_layer_interval", default=1))
    yield "leading_dense_block_count", u32(c.count("moe_layer_start_index", default=0))
    yield "expert_shared_feed_forward_length", u32(width * c.count("moe_num_shared_experts", default=0))


def _first_of(c: Config, name: str) -> int:
    """A count, or the one that a list has for each layer."""
    values = c.get(name)
    return values[0] if isinstance(values, list) and values and isinstance(values[0], int) else c.count(name)


def _hunyuan_moe(c: Config) -> Keys:
    width = c.count("intermediate_size")
    yield "expert_used_count", u32(_first_of(c, "moe_topk"))
    yield "expert_feed_forward_length", u32(width)
    shared = _first_of(c, "num_shared_expert") if "num_shared_expert" in c else 1
    yield "expert_shared_feed_forward_length", u32(width * shared)


def _minimax_m2(c: Config) -> Keys:
    yield "expert_feed_forward_length", u32(c.count("intermediate_size"))
    yield "expert_gating_func", u32(2)
    if "rotary_dim" in c:
        yield "rope.dimension_count", u32(c.count("rotary_dim"))


def _sigmoid(c: Config) -> Keys:
    yield "expert_gating_func", u32(2)


def _exaone_moe(c: Config) -> Keys:
    yield from _windows(c)
    yield from _sigmoid(c)


def _layer_norm(c: Config) -> Keys:
    yield "attention.layer_norm_epsilon", f32(c.number("norm_eps", default=1e-5))
    if "clip_qkv" in c:
        yield "attention.clamp_kqv", f32(c.number("clip_qkv"))


def _cohere(c: Config) -> Keys:
    yield "logit_scale", f32(c.number("logit_scale", default=0.0625))


def _qwen35(c: Config) -> Keys:
    yield from _qwen3_next(c)
    part = c.number("partial_rotary_factor", default=0.25)
    yield "rope.dimension_count", u32(int(c.head_dim * c.number("partial_rotary_factor", default=part, of=c.rope)))


def _qwen3vl(c: Config) -> Keys:
    yield "n_deepstack_layers", u32(len(Config.of_vision(c).items("deepstack_visual_indexes")))


def _per_layer_inputs(c: Config) -> Keys:
    """Gemma 3n's and 4's layers: inputs of their own, keys and values of earlier ones."""
    yield from _gemma3(c)
    yield "embedding_length_per_layer_input", u32(c.count("hidden_size_per_layer_input", default=0))
    yield "attention.shared_kv_layers", u32(c.count("num_kv_shared_layers", default=0))


def _gemma3n(c: Config) -> Keys:
    yield from _per_layer_inputs(c)
    if isinstance(c.get("intermediate_size"), list):
        widths = [int(n) for n in c.numbers("intermediate_size")]
        yield "feed_forward_length", numbers(widths, ValueType.INT32)
    yield "altup.active_idx", u32(c.count("altup_active_idx", default=0))
    yield "altup.num_inputs", u32(c.count("altup_num_inputs", default=4))
    parts = c.numbers("activation_sparsity_pattern")
    deviations = [NormalDist().inv_cdf(part) if 0 < part < 1 else -np.inf for part in parts]
    yield "activation_sparsity_scale", numbers(deviations, ValueType.FLOAT32)


def _behind_rows(c: Config) -> int:
    """Tokens of images and sounds, which have no inputs of layers; llama.cpp's files have zeros."""
    return c.count("vocab_size") - c.count("vocab_size_per_layer_input", default=c.count("vocab_size"))


def _gemma4(c: Config) -> Keys:
    yield from _per_layer_inputs(c)
    yield "final_logit_softcapping", f32(c.number("final_logit_softcapping", default=0.0))
    n, n_local = c.count("num_hidden_layers"), c.count("num_key_value_heads")
    far = [kind == "full_attention" for kind in c.items("layer_types")] or [False] * n
    size, n_far = gemma4_far(c)
    for which, dim in (("", size), ("_swa", c.head_dim)):
        yield f"attention.key_length{which}", u32(dim)
        yield f"attention.value_length{which}", u32(dim)
        yield f"rope.dimension_count{which}", u32(dim)
    yield "attention.head_count_kv", numbers([n_far if is_far else n_local for is_far in far], ValueType.INT32)
    width, n_own = c.count("intermediate_size"), n - c.count("num_kv_shared_layers", default=0)
    if c.flag("use_double_wide_mlp"):
        yield "feed_forward_length", numbers([width * (1 + (i >= n_own)) for i in range(n)], ValueType.INT32)
    if c.flag("enable_moe_block"):
        yield "expert_used_count", u32(c.count("top_k_experts"))


def gemma4_far(c: Config) -> tuple[int, int]:
    """(size, number) of Gemma 4's heads of keys in layers without a window."""
    size = c.count("global_head_dim", default=c.head_dim)
    n = c.count("num_global_key_value_heads", default=c.count("num_key_value_heads"))
    layers = c.get("per_layer_config")
    for own in layers.values() if isinstance(layers, dict) else ():
        if isinstance(own, dict):
            of_layer = Config(c.path, own)
            size = of_layer.count("head_dim", default=size)
            n = of_layer.count("num_key_value_heads", default=n)
    return size, n


def _cohere2(c: Config) -> Keys:
    yield from _windows(c)
    yield "logit_scale", f32(c.number("logit_scale", default=0.0625))


def _stablelm(c: Config) -> Keys:
    yield from _flag_if(c, "use_parallel_residual", "use_parallel_residual")


def _mistral3(c: Config) -> Keys:
    if "llama_4_scaling_beta" in c.rope:
        yield "attention.temperature_scale", f32(c.number("llama_4_scaling_beta", of=c.rope))
    if "mscale_all_dim" in c.rope:
        yield "rope.scaling.yarn_log_multiplier", f32(c.number("mscale_all_dim", of=c.rope))


def _encoder(c: Config) -> Keys:
    yield "attention.causal", flag(False)
    eps = c.number("layer_norm_eps", "layer_norm_epsilon", "norm_eps", default=1e-12)
    yield "attention.layer_norm_epsilon", f32(eps)
    yield "tokenizer.ggml.token_type_count", u32(c.count("type_vocab_size", default=1))


def _gemma_embedding(c: Config) -> Keys:
    yield from _gemma3(c)
    if not c.flag("use_bidirectional_attention"):
        raise c.error("use_bidirectional_attention", "is not true, as it is of the supported model EmbeddingGemma")


def _nomic(c: Config) -> Keys:
    yield from _encoder(c)
    if "max_trained_positions" in c:
        yield "context_length", u32(min(c.count("n_positions"), c.count("max_trained_positions")))


def _nomic_moe(c: Config) -> Keys:
    yield from _nomic(c)
    if c.get("activation_function", default="gelu") != "gelu":
        raise c.error("activation_function", "is not gelu, the supported one")
    yield "context_length", u32(512)  # as it was trained; positions may be more
    yield "moe_every_n_layers", u32(c.count("moe_every_n_layers"))
    yield "expert_used_count", u32(c.count("moe_top_k"))


def _of_experts(shape: Shape, c: Config) -> Shape:
    n = max(1, c.count("num_experts"))
    return n, shape[0] // n, shape[1]


def _jina3(c: Config) -> Keys:
    yield from _encoder(c)
    if names := [str(name) for name in c.items("lora_adaptations")]:
        log.warning("%s: vectors are the base model's: its adapters are not read (%s)", c.path, ", ".join(names))
        yield "context_length", u32(max(0, c.count("max_position_embeddings") - _behind_padding(c)))


def _behind_padding(c: Config) -> int:
    """RoBERTa's first position."""
    return c.count("pad_token_id", default=1) + 1


def _roberta(c: Config) -> Keys:
    yield from _encoder(c)
    yield "context_length", u32(max(0, c.count("max_position_embeddings") - _behind_padding(c)))


def _modern_bert(c: Config) -> Keys:
    yield from _encoder(c)
    yield "attention.sliding_window", u32(c.count("local_attention"))
    yield "attention.sliding_window_pattern", u32(c.count("global_attn_every_n_layers", default=3))
    yield "rope.freq_base_swa", f32(c.number("rope_theta", default=10000.0, of=c.rope_local))
    if (name := c.get("hidden_activation", default="gelu")) != "gelu":
        yield "hidden_activation", text(str(name))
    if "ModernBertForSequenceClassification" in c.items("architectures") and c.get("classifier_pooling") != "mean":
        raise c.error("classifier_pooling", "is not mean, the supported one")


_LLAMA: Rules = (("attn_q.(weight|bias)", PAIRS_OF_QUERIES), ("attn_k.(weight|bias)", PAIRS_OF_KEYS))
_GEMMA: Rules = (("norm.weight", PLUS_ONE), ("nextn.[eh]norm.weight", PLUS_ONE))
_STATES: Rules = (("conv1d.weight", TAPS), ("shortconv.conv.weight", TAPS))
_NAMES = ("gate", "up")
_GRANITE: Splits = (
    *(
        (
            f"{module}.input_linear.weight$",
            tuple((f"ffn_{name}_{end}.weight", half(i)) for i, name in enumerate(_NAMES)),
        )
        for module, end in (("block_sparse_moe", "exps"), ("shared_mlp", "shexp"))
    ),
    ("block_sparse_moe.output_linear.weight$", (("ffn_down_exps.weight", None),)),
    ("shared_mlp.output_linear.weight$", (("ffn_down_shexp.weight", None),)),
)


def _fused_experts(*, in_turn: bool) -> Splits:
    """Experts (n, inputs, outputs), of which gate and up are one tensor."""
    rows = [half(i, in_turn=in_turn) for i in range(2)]
    return (
        (
            "experts.gate_up_proj$",
            tuple((f"ffn_{name}_exps.weight", then(TRANSPOSED, move)) for name, move in zip(_NAMES, rows, strict=True)),
        ),
        ("experts.down_proj$", (("ffn_down_exps.weight", TRANSPOSED),)),
    )


_GPT_OSS: Splits = (
    *_fused_experts(in_turn=True),
    (
        "experts.gate_up_proj_mxfp4$",
        tuple((f"ffn_{name}_exps.weight", half(i, in_turn=True)) for i, name in enumerate(_NAMES)),
    ),
    ("experts.down_proj_mxfp4$", (("ffn_down_exps.weight", None),)),
    (
        "experts.gate_up_proj_bias$",
        tuple((f"ffn_{name}_exps.bias", half(i, in_turn=True, axis=-1)) for i, name in enumerate(_NAMES)),
    ),
    ("experts.down_proj_bias$", (("ffn_down_exps.bias", None),)),
    ("self_attn.sinks$", (("attn_sinks.weight", None),)),
)
_LATENT: Splits = (("kv_b_proj.weight$", (("attn_k_b.weight", LATENT_KEYS), ("attn_v_b.weight", LATENT_VALUES))),)
_QWEN3_NEXT: Splits = (
    ("in_proj_qkvz.weight$", (("attn_qkv.weight", LINEAR_QKV), ("attn_gate.weight", LINEAR_GATES))),
    ("linear_attn.norm.weight$", (("ssm_norm.weight", None),)),
)
_MAMBA2: Rules = (
    ("ssm_a", then(MINUS_EXP, COLUMN)),
    ("ssm_d", COLUMN),
    ("ssm_norm.weight", GROUPS),
    *_STATES,
)
_GRANITE_DENSE: Splits = (
    ("shared_mlp.input_linear.weight$", tuple((f"ffn_{name}.weight", half(i)) for i, name in enumerate(_NAMES))),
    ("shared_mlp.output_linear.weight$", (("ffn_down.weight", None),)),
)
_CUT = Move(lambda array, c: array[_behind_padding(c) :], lambda shape, c: (shape[0] - _behind_padding(c), *shape[1:]))
_UNUSED_HEADS = r"position_ids$|(^|\.)pooler\.|^(cls|lm_head|decoder|head)\."
_EXPERTS = reshaped(_of_experts)
_BERT = Family("bert", _encoder, unused=_UNUSED_HEADS)
_ROBERTA = Family("bert", _roberta, (("position_embd.weight", _CUT),), unused=_UNUSED_HEADS)
_CLASSIFIER: Splits = ((r"^classifier\.(weight|bias)$", ((r"cls.output.\1", None),)),)
_OUTPUT = ("cls.output.weight", "cls.output.bias")
_NEMOTRON_H: Splits = ((r"mixer\.experts\.(up|down)_proj\.weight$", ((r"ffn_\1_exps.weight", None),)),)
_LFM2_MOE: Splits = (
    *(
        (rf"feed_forward\.experts\.{part}\.weight$", ((f"ffn_{name}_exps.weight", None),))
        for part, name in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    ),
    ("feed_forward.expert_bias$", (("exp_probs_b.bias", None),)),
)
_QWEN35 = Family(
    "qwen35",
    _qwen35,
    (
        *_GEMMA,
        ("attn_qkv.weight", tiled("linear_value_head_dim", behind_keys=True)),
        ("attn_gate.weight", tiled("linear_value_head_dim")),
        ("(ssm_alpha|ssm_beta).weight", tiled()),
        ("ssm_dt.bias", tiled()),
        ("ssm_a", then(MINUS_EXP, tiled())),
        ("ssm_conv1d.weight", then(TAPS, tiled("linear_value_head_dim", behind_keys=True))),
        ("ssm_out.weight", tiled("linear_value_head_dim", axis=1)),
    ),
    (
        ("linear_attn.norm.weight$", (("ssm_norm.weight", None),)),
        (
            "experts.gate_up_proj$",
            tuple((f"ffn_{name}_exps.weight", half(i)) for i, name in enumerate(_NAMES)),
        ),
        ("experts.down_proj$", (("ffn_down_exps.weight", None),)),
    ),
    mtp=True,
)
_PADDED = Move(
    lambda array, c: np.pad(array, ((0, _behind_rows(c)), (0, 0))), lambda s, c: (s[0] + _behind_rows(c), *s[1:])
)
_GEMMA3N = Family(
    "gemma3n",
    _gemma3n,
    (("per_layer_token_embd.weight", _PADDED),),
    (
        ("altup_projections.weight$", (("altup_proj.weight", None),)),
        ("altup_unembed_projections.weight$", (("altup_unembd_proj.weight", None),)),
        ("altup.correct_output_scale$", (("altup_correct_scale.weight", None),)),
    ),
)
_GEMMA4: Splits = (
    ("layer_scalar$", (("layer_output_scale.weight", None),)),
    ("router.scale$", (("ffn_gate_inp.scale", None),)),
    ("router.per_expert_scale$", (("ffn_down_exps.scale", None),)),
    ("experts.gate_up_proj$", (("ffn_gate_up_exps.weight", None),)),
    ("experts.down_proj$", (("ffn_down_exps.weight", None),)),
)
_FALCON_H1: Rules = (
    ("token_embd.weight", times("embedding_multiplier")),
    ("^output.weight", times("lm_head_multiplier")),
    ("attn_q.weight", times("attention_in_multiplier")),
    ("attn_k.weight", times("attention_in_multiplier", "key_multiplier")),
    ("attn_v.weight", times("attention_in_multiplier")),
    ("attn_output.weight", times("attention_out_multiplier")),
    ("ssm_in.weight", MAMBA_IN),
    ("ssm_out.weight", times("ssm_out_multiplier")),
    ("ffn_gate.weight", GATE_FACTOR),
    ("ffn_down.weight", DOWN_FACTOR),
    ("ssm_a", then(MINUS_EXP, COLUMN)),
    ("ssm_d", COLUMN),
    *_STATES,
)

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"), Family("llama", moves=_LLAMA)),
    **dict.fromkeys(
        ("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"), Family("mistral3", _mistral3, _LLAMA)
    ),
    **dict.fromkeys(
        ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
        Family("llama4", _llama4, splits=_fused_experts(in_turn=False)),
    ),
    "Qwen2ForCausalLM": Family("qwen2"),
    **dict.fromkeys(("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"), Family("qwen2vl")),
    "Qwen3VLForConditionalGeneration": Family("qwen3vl", _qwen3vl),
    "Qwen3VLMoeForConditionalGeneration": Family("qwen3vlmoe", _qwen3vl, splits=_fused_experts(in_turn=False)),
    **dict.fromkeys(
        ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"), Family("llama", moves=_LLAMA)
    ),
    "Qwen2MoeForCausalLM": Family("qwen2moe"),
    "Qwen3ForCausalLM": Family("qwen3"),
    "Qwen3MoeForCausalLM": Family("qwen3moe"),
    "Qwen3NextForCausalLM": Family(
        "qwen3next", _qwen3_next, (*_GEMMA, ("ssm_a", MINUS_EXP), *_STATES), _QWEN3_NEXT, mtp=True
    ),
    "GemmaForCausalLM": Family("gemma", moves=_GEMMA),
    "Gemma2ForCausalLM": Family("gemma2", _gemma2, _GEMMA),
    **dict.fromkeys(("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), Family("gemma3", _gemma3, _GEMMA)),
    "Phi3ForCausalLM": Family("phi3", _phi3),
    "PhiForCausalLM": Family("phi2"),
    "SmolLM3ForCausalLM": Family("smollm3", moves=_LLAMA),
    **dict.fromkeys(("Olmo2ForCausalLM", "Olmo3ForCausalLM"), Family("olmo2", _windows)),
    "OlmoeForCausalLM": Family("olmoe"),
    "GraniteForCausalLM": Family("granite", _scales, _LLAMA),
    **dict.fromkeys(
        ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), Family("granitemoe", _scales, _LLAMA, _GRANITE)
    ),
    "GptOssForCausalLM": Family("gpt-oss", _gpt_oss, splits=_GPT_OSS),
    **dict.fromkeys(
        ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"),
        Family("deepseek2", _mla, splits=_LATENT, mtp=True),
    ),
    "Glm4ForCausalLM": Family("glm4"),
    "Glm4MoeForCausalLM": Family("glm4moe", _glm4_moe, mtp=True),
    "Lfm2ForCausalLM": Family("lfm2", _lfm2, _STATES),
    "Lfm2MoeForCausalLM": Family("lfm2moe", _lfm2_moe, _STATES, _LFM2_MOE),
    "FalconH1ForCausalLM": Family("falcon-h1", _mamba2, _FALCON_H1),
    "NemotronHForCausalLM": Family("nemotron_h", _nemotron_h, _MAMBA2),
    "NemotronHForCausalLM of experts": Family("nemotron_h_moe", _nemotron_h, _MAMBA2, _NEMOTRON_H),
    "Mamba2ForCausalLM": Family("mamba2", _mamba2_alone, _MAMBA2),
    "GraniteMoeHybridForCausalLM": Family("granitehybrid", _granite_hybrid, (*_LLAMA, *_MAMBA2), _GRANITE_DENSE),
    "GraniteMoeHybridForCausalLM of experts": Family("granitehybrid", _granite_hybrid, (*_LLAMA, *_MAMBA2), _GRANITE),
    **dict.fromkeys(("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), _QWEN35),
    **dict.fromkeys(
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"), replace(_QWEN35, arch="qwen35moe")
    ),
    **dict.fromkeys(("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"), _GEMMA3N),
    **dict.fromkeys(("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"), Family("gemma4", _gemma4, splits=_GEMMA4)),
    **dict.fromkeys(("BertModel", "BertForMaskedLM", "BertForPreTraining"), _BERT),
    "BertForSequenceClassification": replace(
        _BERT,
        splits=(*_CLASSIFIER, (r"pooler\.dense\.(weight|bias)$", ((r"cls.\1", None),))),
        unused="position_ids$",
        required=("cls.weight", *_OUTPUT),
    ),
    **dict.fromkeys(
        (f"{kind}{end}" for kind in ("Roberta", "XLMRoberta") for end in ("Model", "ForMaskedLM")), _ROBERTA
    ),
    **dict.fromkeys(
        (f"{kind}ForSequenceClassification" for kind in ("Roberta", "XLMRoberta")),
        replace(_ROBERTA, required=("cls.weight", *_OUTPUT)),
    ),
    "NomicBertModel": Family("nomic-bert", _nomic, unused=_UNUSED_HEADS),
    "NomicBertModel of experts": Family(
        "nomic-bert-moe",
        _nomic_moe,
        splits=(
            (r"mlp\.experts\.mlp\.w1$", (("ffn_up_exps.weight", _EXPERTS),)),
            (r"mlp\.experts\.mlp\.w2$", (("ffn_down_exps.weight", then(_EXPERTS, TRANSPOSED)),)),
        ),
        unused=rf"{_UNUSED_HEADS}|mlp\.experts\.bias$",
    ),
    **dict.fromkeys(
        ("JinaEmbeddingsV3Model", "XLMRobertaModel of adapters"),
        Family("jina-bert-v3", _jina3, unused=rf"{_UNUSED_HEADS}|\.lora_[AB]$"),
    ),
    "Gemma3TextModel": Family("gemma-embedding", _gemma_embedding, _GEMMA),
    "ApertusForCausalLM": Family(
        "apertus",
        unused=r"act_fn\.",
        numbers=tuple((f"act_fn.{name}", f"xielu.{name}") for name in ("alpha_n", "alpha_p", "beta", "eps")),
    ),
    **dict.fromkeys(
        ("ModernBertModel", "ModernBertForMaskedLM"), Family("modern-bert", _modern_bert, unused=_UNUSED_HEADS)
    ),
    "ModernBertForSequenceClassification": Family(
        "modern-bert", _modern_bert, splits=_CLASSIFIER, required=("cls.weight", "cls.norm.weight", *_OUTPUT)
    ),
    "Ernie4_5_MoeForCausalLM": Family("ernie4_5-moe", _ernie_moe, (("exp_probs_b.bias", VECTOR),)),
    "HunYuanMoEV1ForCausalLM": Family("hunyuan-moe", _hunyuan_moe),
    "MiniMaxM2ForCausalLM": Family("minimax-m2", _minimax_m2),
    "Dots1ForCausalLM": Family("dots1", _sigmoid),
    "ExaoneMoeForCausalLM": Family("exaone-moe", _exaone_moe),
    "CohereForCausalLM": Family("command-r", _cohere),
    "OlmoForCausalLM": Family("olmo", _layer_norm, _LLAMA),
    "NemotronForCausalLM": Family("nemotron", _layer_norm, _GEMMA),
    "SeedOssForCausalLM": Family("seed_oss"),
    "Exaone4ForCausalLM": Family("exaone4", _windows),
    "Ernie4_5ForCausalLM": Family("ernie4_5"),
    "HunYuanDenseV1ForCausalLM": Family("hunyuan-dense"),
    "Cohere2ForCausalLM": Family("cohere2", _cohere2),
    "Starcoder2ForCausalLM": Family("starcoder2"),
    "StableLmForCausalLM": Family("stablelm", _stablelm),
    "ArceeForCausalLM": Family("arcee", moves=_LLAMA),
}

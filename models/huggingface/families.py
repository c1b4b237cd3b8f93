"""Families of Hugging Face's models: config.json's settings as GGUF's keys, and the moves of their tensors.

Names of tensors are those of the gguf package's map. A row: the architecture of config.json, that of GGUF, what the
keys of all models lack, and what differs in the tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from logitless.models.gguf.types import ValueType
from logitless.models.gguf.write import Key, f32, flag, text, u32
from logitless.models.huggingface.config import Config
from logitless.models.huggingface.moves import (
    COLUMN,
    DOWN_FACTOR,
    GATE_FACTOR,
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
    Move,
    half,
    then,
    times,
)

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
    if kind in ("default", "dynamic", "llama3", "mrope", "none"):  # those of llama3 are a tensor
        return
    if kind not in ("linear", "yarn", "longrope", "su"):
        raise c.error("rope_type", f"is {kind!r}, which is not supported; supported are linear, yarn, llama3, longrope")
    yield "rope.scaling.type", text("longrope" if kind == "su" else kind)
    if "factor" in rope:
        yield "rope.scaling.factor", f32(c.number("factor", of=rope))
    before = rope.get("original_max_position_embeddings", c.get("original_max_position_embeddings"))
    if isinstance(before, int):
        yield "rope.scaling.original_context_length", u32(before)
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
    sigmoid = c.get("scoring_func", default="") == "sigmoid" or c.get("model_type") == "deepseek_v3"
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


def _falcon_h1(c: Config) -> Keys:
    yield "ssm.conv_kernel", u32(c.count("mamba_d_conv"))
    yield "ssm.inner_size", u32(c.count("mamba_d_ssm"))
    yield "ssm.state_size", u32(c.count("mamba_d_state"))
    yield "ssm.time_step_rank", u32(c.count("mamba_n_heads"))
    yield "ssm.group_count", u32(c.count("mamba_n_groups"))


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


_LLAMA: Rules = (("attn_q.(weight|bias)", PAIRS_OF_QUERIES), ("attn_k.(weight|bias)", PAIRS_OF_KEYS))
_GEMMA: Rules = (("norm.weight", PLUS_ONE),)
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
    "Qwen2MoeForCausalLM": Family("qwen2moe"),
    "Qwen3ForCausalLM": Family("qwen3"),
    "Qwen3MoeForCausalLM": Family("qwen3moe"),
    "Qwen3NextForCausalLM": Family("qwen3next", _qwen3_next, (*_GEMMA, ("ssm_a", MINUS_EXP), *_STATES), _QWEN3_NEXT),
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
    **dict.fromkeys(("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), Family("deepseek2", _mla, splits=_LATENT)),
    "Glm4ForCausalLM": Family("glm4"),
    "Glm4MoeForCausalLM": Family("glm4moe", _glm4_moe),
    "Lfm2ForCausalLM": Family("lfm2", _lfm2, _STATES),
    "FalconH1ForCausalLM": Family("falcon-h1", _falcon_h1, _FALCON_H1),
    "SeedOssForCausalLM": Family("seed_oss"),
    "Exaone4ForCausalLM": Family("exaone4", _windows),
    "Ernie4_5ForCausalLM": Family("ernie4_5"),
    "HunYuanDenseV1ForCausalLM": Family("hunyuan-dense"),
    "Cohere2ForCausalLM": Family("cohere2", _cohere2),
    "Starcoder2ForCausalLM": Family("starcoder2"),
    "StableLmForCausalLM": Family("stablelm", _stablelm),
    "ArceeForCausalLM": Family("arcee", moves=_LLAMA),
}

"""Settings of config.json as GGUF's keys, of all models and of each family."""

from __future__ import annotations

import logging
from statistics import NormalDist

import numpy as np

from logitless.models.gguf.types import ValueType
from logitless.models.gguf.write import Key, f32, flag, text, u32
from logitless.models.huggingface.config import Config
from logitless.models.huggingface.families.family import Keys
from logitless.models.huggingface.moves import falcon_groups

log = logging.getLogger(__name__)


def numbers(values: list[int] | list[float] | list[bool], item: ValueType) -> Key:
    """An array of numbers."""
    return Key(np.array(values), ValueType.ARRAY, item)


def common_keys(c: Config, layer_norm: bool) -> Keys:
    """Keys that all transformers have, without the architecture's prefix; of settings that a model may lack those that
    it has."""
    yield "context_length", u32(c.count(*_CONTEXT, default=4096))
    yield "embedding_length", u32(c.count("hidden_size"))
    yield "block_count", u32(c.count("num_hidden_layers"))
    yield "vocab_size", u32(c.count("vocab_size"))
    for key, *names in _COUNTS:
        if any(name in c for name in names) and not isinstance(c.get(*names), list):
            yield key, u32(c.count(*names))
    for key, *names in _NUMBERS:
        if any(name in c for name in names):
            yield key, f32(c.number(*names))
    rms, plain = not layer_norm or "rms_norm_eps" in c, layer_norm or any(name in c for name in _OF_LAYER_NORM)
    for kind in ("_rms",) * rms + ("",) * plain if any(name in c for name in _EPSILONS) else ():
        yield f"attention.layer_norm{kind}_epsilon", f32(c.number(*_EPSILONS))
    if "num_key_value_heads" not in c and "num_attention_heads" in c:
        yield "attention.head_count_kv", u32(c.count("num_attention_heads"))
    for key, name in (("expert_weights_norm", "norm_topk_prob"), ("use_parallel_residual", "use_parallel_residual")):
        if name in c:
            yield key, flag(c.flag(name))
    if size := c.head_dim if "num_attention_heads" in c else 0:
        yield "attention.key_length", u32(size)
        yield "attention.value_length", u32(size)
        turned = c.number("partial_rotary_factor", default=1.0, of=c.rope)
        yield "rope.dimension_count", u32(int(size * (turned if turned != 1 else c.number(*_TURNED, default=1.0))))
    sections = c.rope.get("mrope_section")
    if isinstance(sections, list) and 0 < len(sections) < 5 and all(isinstance(n, int) for n in sections):
        yield "rope.dimension_sections", numbers([*sections, 0, 0, 0][:4], ValueType.INT32)
    yield from _rope_keys(c)


_CONTEXT = (
    *("max_position_embeddings", "max_context_length", "n_positions"),
    *("max_sequence_length", "seq_length", "max_seq_len"),
)
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
_OF_LAYER_NORM = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
_EPSILONS = ("rms_norm_eps", "norm_eps", "layernorm_epsilon", *_OF_LAYER_NORM)
_NUMBERS = (("expert_weights_scale", "routed_scaling_factor"),)


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
    if kind != "yarn":
        return
    for name in ("beta_fast", "beta_slow"):
        if name in rope:
            yield f"rope.scaling.yarn_{name}", f32(c.number(name, of=rope))
    if "attention_factor" in rope:  # GGUF's is a factor of the usual one
        usual = 1 + 0.1 * np.log(max(1.0, c.number("factor", default=1.0, of=rope)))
        yield "rope.scaling.attn_factor", f32(c.number("attention_factor", of=rope) / usual)


def _sliding(c: Config) -> Keys:
    yield "attention.sliding_window", u32(c.count("sliding_window"))


def gemma2(c: Config) -> Keys:
    yield from _sliding(c)
    yield "attn_logit_softcapping", f32(c.number("attn_logit_softcapping", default=50.0))
    yield "final_logit_softcapping", f32(c.number("final_logit_softcapping", default=30.0))


def gemma3(c: Config) -> Keys:
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


def scales(c: Config) -> Keys:
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


def phi3(c: Config) -> Keys:
    if "sliding_window" in c:
        yield from _sliding(c)
    if c.rope["rope_type"] in ("longrope", "su"):
        before = c.count("original_max_position_embeddings", default=4096)
        times = c.count("max_position_embeddings") / max(1, before)
        factor = float(np.sqrt(1 + np.log(times) / np.log(before))) if times > 1 else 1.0
        yield "rope.scaling.attn_factor", f32(c.number("attention_factor", default=factor, of=c.rope))


def windows(c: Config) -> Keys:
    """A sliding window in some layers, where the model has one."""
    if "sliding_window" in c and "sliding_attention" in (c.items("layer_types") or ["sliding_attention"]):
        yield from _sliding(c)
        yield from _pattern(c)


def gpt_oss(c: Config) -> Keys:
    yield from _sliding(c)
    yield "expert_feed_forward_length", u32(c.count("intermediate_size"))


def qwen3_next(c: Config) -> Keys:
    n_heads = c.count("linear_num_value_heads")
    yield "ssm.conv_kernel", u32(c.count("linear_conv_kernel_dim"))
    yield "ssm.state_size", u32(c.count("linear_key_head_dim"))
    yield "ssm.group_count", u32(c.count("linear_num_key_heads"))
    yield "ssm.time_step_rank", u32(n_heads)
    yield "ssm.inner_size", u32(n_heads * c.count("linear_value_head_dim"))
    kinds = c.items("layer_types")
    full = kinds.index("full_attention") + 1 if "full_attention" in kinds else 4
    yield "full_attention_interval", u32(c.count("full_attention_interval", default=full))


def mla(c: Config) -> Keys:
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
    yield "expert_gating_func", u32(2 if uses_sigmoid(c) else 1)


def uses_sigmoid(c: Config) -> bool:
    """True where an expert's probability is the sigmoid of its score, not the softmax of all."""
    return c.get("scoring_func", default="") == "sigmoid" or c.get("model_type") in ("deepseek_v3", "glm4_moe_lite")


def sparse_mla(c: Config) -> Keys:
    """DeepSeek V3.2's: an indexer chooses the tokens that a query attends to."""
    yield from mla(c)
    yield "expert_gating_func", u32(2)
    yield "attention.indexer.head_count", u32(c.count("index_n_heads"))
    yield "attention.indexer.key_length", u32(c.count("index_head_dim"))
    yield "attention.indexer.top_k", u32(c.count("index_topk"))
    if kinds := c.items("indexer_types"):
        yield "attention.indexer.types", numbers([kind == "full" for kind in kinds], ValueType.BOOL)


def deepseek4(c: Config) -> Keys:
    """Its repository names layers by the tokens of their blocks, transformers by their kind."""
    n, kinds = c.count("num_hidden_layers"), c.items("layer_types")
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    blocks = [int(size) for size in c.numbers("compress_ratios")] or [rates.get(str(kind), 0) for kind in kinds]
    yield "attention.compress_ratios", numbers(blocks[:n], ValueType.UINT32)
    hashed = [kind == "hash_moe" for kind in c.items("mlp_layer_types")]
    yield "hash_layer_count", u32(min(n, c.count("num_hash_layers", default=sum(hashed))))
    c.require(scoring_func="sqrtsoftplus")
    yield "expert_gating_func", u32(4)
    yield "swiglu_clamp_exp", numbers([c.number("swiglu_limit", default=10.0)] * n, ValueType.FLOAT32)
    rope_dim = int(c.head_dim * c.number("partial_rotary_factor", default=0.125))
    yield "rope.dimension_count", u32(c.count("qk_rope_head_dim", default=rope_dim))
    yield "attention.compress_rope_freq_base", f32(c.number("compress_rope_theta", default=160000.0))
    for key, name in _OF_DEEPSEEK4.items():
        yield key, u32(c.count(name))
    yield "hyper_connection.epsilon", f32(c.number("hc_eps", default=1e-6))


_OF_DEEPSEEK4 = {
    "attention.q_lora_rank": "q_lora_rank",
    "attention.output_lora_rank": "o_lora_rank",
    "attention.output_group_count": "o_groups",
    "attention.sliding_window": "sliding_window",
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
    "hyper_connection.count": "hc_mult",
    "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters",
}


def mistral4(c: Config) -> Keys:
    yield from _temperature(c)
    yield from mla(c)
    if "original_max_position_embeddings" in c.rope:
        yield "attention.temperature_length", u32(Config(c.path, c.rope).count("original_max_position_embeddings"))


def lfm2(c: Config) -> Keys:
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


def llama4(c: Config) -> Keys:
    yield "feed_forward_length", u32(c.count("intermediate_size_mlp"))
    yield "expert_feed_forward_length", u32(c.count("intermediate_size"))
    yield "interleave_moe_layer_step", u32(c.count("interleave_moe_layer_step", default=1))
    yield "attention.chunk_size", u32(c.count("attention_chunk_size", default=8192))


def mamba2(c: Config) -> Keys:
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


def granite_hybrid(c: Config) -> Keys:
    yield from scales(c)
    yield from mamba2(c)
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


def nemotron_h(c: Config) -> Keys:
    yield from mamba2(c)
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
    return c.count("num_local_experts", "num_experts", "n_routed_experts", default=0) > 0


def mamba2_alone(c: Config) -> Keys:
    yield from mamba2(c)
    yield "attention.head_count", u32(0)
    yield "feed_forward_length", u32(0)
    yield "attention.layer_norm_rms_epsilon", f32(c.number("layer_norm_epsilon", default=1e-5))


def lfm2_moe(c: Config) -> Keys:
    yield from lfm2(c)
    yield "leading_dense_block_count", u32(c.count("num_dense_layers"))
    yield "expert_gating_func", u32(2)


def ernie_moe(c: Config) -> Keys:
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


def hunyuan_moe(c: Config) -> Keys:
    width = c.count("intermediate_size")
    yield "expert_used_count", u32(_first_of(c, "moe_topk"))
    yield "expert_feed_forward_length", u32(width)
    shared = _first_of(c, "num_shared_expert") if "num_shared_expert" in c else 1
    yield "expert_shared_feed_forward_length", u32(width * shared)


def minimax_m2(c: Config) -> Keys:
    yield "expert_feed_forward_length", u32(c.count("intermediate_size"))
    yield "expert_gating_func", u32(2)
    if "rotary_dim" in c:
        yield "rope.dimension_count", u32(c.count("rotary_dim"))


def sigmoid(c: Config) -> Keys:
    yield "expert_gating_func", u32(2)


def exaone_moe(c: Config) -> Keys:
    yield from windows(c)
    yield from sigmoid(c)


def layer_norm(c: Config) -> Keys:
    yield "attention.layer_norm_epsilon", f32(c.number("norm_eps", default=1e-5))
    if "clip_qkv" in c:
        yield "attention.clamp_kqv", f32(c.number("clip_qkv"))


def cohere(c: Config) -> Keys:
    yield "logit_scale", f32(c.number("logit_scale", default=0.0625))


def qwen35(c: Config) -> Keys:
    yield from qwen3_next(c)
    part = c.number("partial_rotary_factor", default=0.25)
    yield "rope.dimension_count", u32(int(c.head_dim * c.number("partial_rotary_factor", default=part, of=c.rope)))


def qwen3vl(c: Config) -> Keys:
    yield "n_deepstack_layers", u32(len(Config.of_vision(c).items("deepstack_visual_indexes")))


def _per_layer_inputs(c: Config) -> Keys:
    """Gemma 3n's and 4's layers: inputs of their own, keys and values of earlier ones."""
    yield from gemma3(c)
    yield "embedding_length_per_layer_input", u32(c.count("hidden_size_per_layer_input", default=0))
    yield "attention.shared_kv_layers", u32(c.count("num_kv_shared_layers", default=0))


def gemma3n(c: Config) -> Keys:
    yield from _per_layer_inputs(c)
    if isinstance(c.get("intermediate_size"), list):
        widths = [int(n) for n in c.numbers("intermediate_size")]
        yield "feed_forward_length", numbers(widths, ValueType.INT32)
    yield "altup.active_idx", u32(c.count("altup_active_idx", default=0))
    yield "altup.num_inputs", u32(c.count("altup_num_inputs", default=4))
    parts = c.numbers("activation_sparsity_pattern")
    deviations = [NormalDist().inv_cdf(part) if 0 < part < 1 else -np.inf for part in parts]
    yield "activation_sparsity_scale", numbers(deviations, ValueType.FLOAT32)


def behind_rows(c: Config) -> int:
    """Tokens of images and sounds, which have no inputs of layers; llama.cpp's files have zeros."""
    return c.count("vocab_size") - c.count("vocab_size_per_layer_input", default=c.count("vocab_size"))


def gemma4(c: Config) -> Keys:
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


def cohere2(c: Config) -> Keys:
    yield from windows(c)
    yield "logit_scale", f32(c.number("logit_scale", default=0.0625))


def cohere2_moe(c: Config) -> Keys:
    yield from cohere2(c)
    c.require(expert_selection_fn="sigmoid", shared_expert_combination_strategy="average")
    if "rms_norm_eps" in c:
        raise c.error("rms_norm_eps", "is set, but the supported norm is LayerNorm")
    width = c.count("intermediate_size")
    yield "feed_forward_length", u32(c.count("prefix_dense_intermediate_size", default=width))
    yield "expert_feed_forward_length", u32(width)
    yield "expert_shared_feed_forward_length", u32(width * c.count("num_shared_experts", default=0))
    yield "expert_gating_func", u32(2)
    yield "leading_dense_block_count", u32(_n_dense(c))


def mimo2(c: Config) -> Keys:
    """Its repository names layers with a window by 1, transformers by their kind."""
    pattern = c.items("hybrid_layer_pattern") or [kind == "sliding_attention" for kind in c.items("layer_types")]
    pattern = [*pattern, *[True] * c.count("num_nextn_predict_layers", default=0)]
    n, n_local = c.count("num_key_value_heads"), c.count("swa_num_key_value_heads", default=0)
    heads = [(n_local or 2 * n) if local else n for local in pattern]
    yield "attention.head_count_kv", numbers(heads, ValueType.INT32)
    yield "attention.value_length", u32(c.count("v_head_dim"))
    yield "attention.value_scale", f32(c.number("attention_value_scale", default=1.0))
    window = c.count("sliding_window_size", default=0)  # of tokens before the query's, which the other one counts, too
    yield "attention.sliding_window", u32(window + 1 if window else c.count("sliding_window"))
    yield "attention.sliding_window_pattern", numbers([bool(local) for local in pattern], ValueType.BOOL)
    base = c.number("swa_rope_theta", default=10000.0)
    yield "rope.freq_base_swa", f32(c.number("rope_theta", default=base, of=c.rope_local))
    yield "expert_gating_func", u32(2)
    yield "expert_shared_count", u32(0)


def dbrx(c: Config) -> Keys:
    attention, experts = c.part("attn_config"), c.part("ffn_config")
    experts.require(moe_normalize_expert_weights=1)
    yield "attention.head_count_kv", u32(attention.count("kv_n_heads"))
    yield "attention.layer_norm_epsilon", f32(1e-5)
    if "clip_qkv" in attention:
        yield "attention.clamp_kqv", f32(attention.number("clip_qkv"))
    if "rope_theta" in attention:
        yield "rope.freq_base", f32(attention.number("rope_theta"))
    yield "feed_forward_length", u32(experts.count("ffn_hidden_size"))
    yield "expert_count", u32(experts.count("moe_num_experts"))
    yield "expert_used_count", u32(experts.count("moe_top_k"))


def deepseek(c: Config) -> Keys:
    if c.flag("norm_topk_prob") or c.get("scoring_func", default="softmax") != "softmax":
        raise c.error("norm_topk_prob", "is true, or scoring_func not softmax, which is not supported")
    c.require(moe_layer_freq=1)
    yield "expert_weights_norm", flag(False)


def openelm(c: Config) -> Keys:
    """Heads and widths grow from layer to layer."""
    n, step = c.count("hidden_size"), max(1, c.count("ffn_dim_divisor", default=256))
    for key, name in (("head_count", "num_query_heads"), ("head_count_kv", "num_kv_heads")):
        yield f"attention.{key}", numbers([int(n) for n in c.numbers(name)], ValueType.INT32)
    wide = [n * factor for factor in c.numbers("ffn_multipliers")]
    rounded = [max(step, int(width + step / 2) // step * step) for width in wide]
    widths = [near + step * (near < 0.9 * width) for near, width in zip(rounded, wide, strict=True)]
    yield "feed_forward_length", numbers(widths, ValueType.INT32)
    size = c.count("head_dim")
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        yield key, u32(size)
    yield "attention.layer_norm_rms_epsilon", f32(1e-6)


def bitnet(c: Config) -> Keys:
    yield "hidden_activation", text(str(c.get("hidden_act", default="silu")))


def _temperature(c: Config) -> Keys:
    if "llama_4_scaling_beta" in c.rope:
        yield "attention.temperature_scale", f32(c.number("llama_4_scaling_beta", of=c.rope))


def mistral3(c: Config) -> Keys:
    yield from _temperature(c)
    if "mscale_all_dim" in c.rope:
        yield "rope.scaling.yarn_log_multiplier", f32(c.number("mscale_all_dim", of=c.rope))


def encoder(c: Config) -> Keys:
    yield "attention.causal", flag(False)
    eps = c.number("layer_norm_eps", "layer_norm_epsilon", "norm_eps", default=1e-12)
    yield "attention.layer_norm_epsilon", f32(eps)
    yield "tokenizer.ggml.token_type_count", u32(c.count("type_vocab_size", default=1))


def gemma_embedding(c: Config) -> Keys:
    yield from gemma3(c)
    if not c.flag("use_bidirectional_attention"):
        raise c.error("use_bidirectional_attention", "is not true, as it is of the supported model EmbeddingGemma")


def nomic(c: Config) -> Keys:
    yield from encoder(c)
    if "max_trained_positions" in c:
        yield "context_length", u32(min(c.count("n_positions"), c.count("max_trained_positions")))


def nomic_moe(c: Config) -> Keys:
    yield from nomic(c)
    c.require(activation_function="gelu")
    yield "context_length", u32(512)  # as it was trained; positions may be more
    yield "moe_every_n_layers", u32(c.count("moe_every_n_layers"))
    yield "expert_used_count", u32(c.count("moe_top_k"))


def eurobert(c: Config) -> Keys:
    yield "attention.causal", flag(False)


def t5(c: Config) -> Keys:
    eps = f32(c.number("layer_norm_epsilon", default=1e-6))
    yield "attention.layer_norm_epsilon", eps
    yield "attention.layer_norm_rms_epsilon", eps
    yield "attention.relative_buckets_count", u32(c.count("relative_attention_num_buckets", default=32))


def t5_model(c: Config) -> Keys:
    yield from t5(c)
    yield "decoder_block_count", u32(c.count("num_decoder_layers", "num_hidden_layers"))
    yield "decoder_start_token_id", u32(c.count("decoder_start_token_id", "pad_token_id", default=0))
    if c.flag("scale_decoder_outputs", default=c.flag("tie_word_embeddings", default=True)):
        raise c.error("tie_word_embeddings", "is not false: T5 1.0, whose outputs are scaled, is not supported")


def minicpm(c: Config) -> Keys:
    yield "embedding_scale", f32(c.number("scale_emb"))
    yield "residual_scale", f32(c.number("scale_depth") / max(1, c.count("num_hidden_layers")) ** 0.5)
    yield "logit_scale", f32(c.count("hidden_size") / max(1, c.count("dim_model_base")))


def jina3(c: Config) -> Keys:
    yield from encoder(c)
    if names := [str(name) for name in c.items("lora_adaptations")]:
        log.warning("%s: vectors are the base model's: its adapters are not read (%s)", c.path, ", ".join(names))
        yield "context_length", u32(max(0, c.count("max_position_embeddings") - behind_padding(c)))


def gpt(c: Config) -> Keys:
    """GPT-2's and its like: a wide layer of four times the width, where no setting tells another."""
    if "intermediate_size" not in c:
        yield "feed_forward_length", u32(4 * c.count("hidden_size"))


def starcoder(c: Config) -> Keys:
    yield from gpt(c)
    c.require(multi_query=True)
    yield "attention.head_count_kv", u32(1)


def falcon(c: Config) -> Keys:
    yield from gpt(c)
    if c.flag("alibi") or not c.flag("parallel_attn", default=True):
        raise c.error("alibi", "is true, or parallel_attn false, which is not supported")
    yield "attention.head_count_kv", u32(falcon_groups(c))


def mpt(c: Config) -> Keys:
    own = c.part("attn_config")
    yield "feed_forward_length", u32(c.count("expansion_ratio", default=4) * c.count("hidden_size"))
    yield "attention.layer_norm_epsilon", f32(1e-5)
    yield "attention.head_count_kv", u32(own.count("kv_n_heads", default=c.count("num_attention_heads")))
    yield "attention.max_alibi_bias", f32(own.number("alibi_bias_max", default=8) if own.flag("alibi") else 0.0)
    if "clip_qkv" in own:
        yield "attention.clamp_kqv", f32(own.number("clip_qkv"))


def jais(c: Config) -> Keys:
    c.require(mup_scale_qk_dot_by_d=True, scale_qk_dot_by_d=True, tie_word_embeddings=True)
    c.require(activation_function="swiglu", position_embedding_type="alibi")
    yield "attention.max_alibi_bias", f32(8.0)


def refact(c: Config) -> Keys:
    yield "attention.head_count_kv", u32(1)
    yield "feed_forward_length", u32(-(-int(8 * c.count("hidden_size") / 3) // 256) * 256)


def plamo(c: Config) -> Keys:
    yield "attention.head_count_kv", u32(c.count("num_attention_heads") // max(1, c.count("n_shared_head")))


def mamba(c: Config) -> Keys:
    n = c.count("hidden_size")
    yield "ssm.conv_kernel", u32(c.count("conv_kernel", "mamba_d_conv", default=4))
    yield "ssm.state_size", u32(c.count("state_size", "mamba_d_state", default=16))
    yield "ssm.time_step_rank", u32(c.count("time_step_rank", "mamba_dt_rank", default=-(-n // 16)))
    yield "attention.layer_norm_rms_epsilon", f32(c.number("rms_norm_eps", "layer_norm_epsilon", default=1e-5))
    if "mamba_expand" in c:  # Jamba's
        yield "ssm.inner_size", u32(c.count("mamba_expand") * n)
        period, first = c.count("attn_layer_period", default=8), c.count("attn_layer_offset", default=4)
        layers = range(c.count("num_hidden_layers"))
        yield _heads_of(c, [i % max(1, period) == first for i in layers])
    else:
        yield "ssm.inner_size", u32(c.count("intermediate_size", default=2 * n))
        yield "ssm.dt_b_c_rms", flag("FalconMambaForCausalLM" in c.items("architectures"))
        yield "attention.head_count", u32(0)
        yield "attention.head_count_kv", u32(0)
        yield "feed_forward_length", u32(0)


def mellum(c: Config) -> Keys:
    yield from windows(c)
    if c.rope_local:
        yield "rope.freq_base_swa", f32(c.number("rope_theta", default=10000.0, of=c.rope_local))


def _n_dense(c: Config) -> int:
    kinds = c.items("mlp_layer_types")
    return kinds.index("sparse") if "sparse" in kinds else 0


def hy_v3(c: Config) -> Keys:
    yield from sigmoid(c)
    yield "expert_weights_norm", flag(True)
    yield "expert_weights_scale", f32(c.number("router_scaling_factor", default=1.0))
    yield "leading_dense_block_count", u32(_n_dense(c))


def afmoe(c: Config) -> Keys:
    yield from windows(c)
    yield from sigmoid(c)
    yield "expert_weights_norm", flag(c.flag("route_norm", default=True))
    yield "expert_weights_scale", f32(c.number("route_scale", default=1.0))
    yield "leading_dense_block_count", u32(c.count("num_dense_layers", default=0))
    if not c.flag("mup_enabled"):
        raise c.error("mup_enabled", "is not true, the supported one")


def minicpm3(c: Config) -> Keys:
    yield from mla(c)
    size = c.count("qk_nope_head_dim") + c.count("qk_rope_head_dim")
    yield "attention.key_length", u32(size)
    yield "attention.value_length", u32(c.count("v_head_dim"))
    yield "attention.head_count_kv", u32(c.count("num_key_value_heads"))
    yield from minicpm(c)


def behind_padding(c: Config) -> int:
    """RoBERTa's first position."""
    return c.count("pad_token_id", default=1) + 1


def roberta(c: Config) -> Keys:
    yield from encoder(c)
    yield "context_length", u32(max(0, c.count("max_position_embeddings") - behind_padding(c)))


def modern_bert(c: Config) -> Keys:
    yield from encoder(c)
    yield "attention.sliding_window", u32(c.count("local_attention"))
    yield "attention.sliding_window_pattern", u32(c.count("global_attn_every_n_layers", default=3))
    yield "rope.freq_base_swa", f32(c.number("rope_theta", default=10000.0, of=c.rope_local))
    if (name := c.get("hidden_activation", default="gelu")) != "gelu":
        yield "hidden_activation", text(str(name))
    if "ModernBertForSequenceClassification" in c.items("architectures") and c.get("classifier_pooling") != "mean":
        raise c.error("classifier_pooling", "is not mean, the supported one")


def _rwkv(c: Config, n_extra: int) -> Keys:
    """Keys of all RWKV: no bound of the context, heads whose number follows from their size."""
    yield "context_length", u32(1 << 20)
    yield "wkv.head_size", u32(c.count("head_size", "head_dim", default=c.head_dim))
    yield "attention.head_count", u32(0)
    yield "attention.head_count_kv", u32(0)
    yield "feed_forward_length", u32(c.count("intermediate_size", default=n_extra))


def rwkv6(c: Config) -> Keys:
    n = c.count("hidden_size")
    yield from _rwkv(c, int(3.5 * n) // 32 * 32)
    yield "time_mix_extra_dim", u32(64 if n == 4096 else 32)
    yield "time_decay_extra_dim", u32(128 if n == 4096 else 64)


def qrwkv6(c: Config) -> Keys:
    """RWKV 6 between the FFNs of a Qwen 2."""
    n = c.count("hidden_size")
    yield from _rwkv(c, 0)
    yield "attention.head_count_kv", u32(c.count("num_key_value_heads"))
    yield "token_shift_count", u32(1)
    for key, name, width in (("mix", "tokenshift", 32), ("decay", "decay", 64)):
        yield f"time_{key}_extra_dim", u32(c.count(f"lora_rank_{name}", default=width * (1 + (n >= 4096))))


def rwkv7(c: Config) -> Keys:
    n = c.count("hidden_size")
    yield from _rwkv(c, 4 * n)
    for key, name, of_width, factor in _RANKS:
        usual = max(1, round(n**of_width * factor / 32)) * 32
        yield f"attention.{key}_lora_rank", u32(c.count(f"{name}_low_rank_dim", f"lora_rank_{key}", default=usual))
    if c.get("attn") is not None:
        raise c.error("attn", "names layers of attention, which are not supported")


_RANKS = (
    ("decay", "decay", 0.5, 1.8),
    ("iclr", "a", 0.5, 1.8),
    ("value_residual_mix", "v", 0.5, 1.3),
    ("gate", "gate", 0.8, 0.6),
)


def arwkv7(c: Config) -> Keys:
    """RWKV 7 between the FFNs of a Qwen 2, of ranks that its settings do not name."""
    c.require(wkv_version=7)
    yield from _rwkv(c, 0)
    yield "token_shift_count", u32(1)
    gate = 128 if c.flag("wkv_has_gate", default=True) else 0
    for (key, *_), rank in zip(_RANKS, (64, 64, 32, gate), strict=True):
        yield f"attention.{key}_lora_rank", u32(rank)

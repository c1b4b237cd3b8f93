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
from logitless.models.huggingface.moves import PAIRS_OF_KEYS, PAIRS_OF_QUERIES, PLUS_ONE, Move

Keys = Iterator[tuple[str, Key]]
Rules = tuple[tuple[str, Move], ...]  # (end of a tensor's name in GGUF, its move)


def _nothing(config: Config) -> Keys:
    yield from ()


@dataclass(frozen=True)
class Family:
    arch: str  # GGUF's
    keys: Callable[[Config], Keys] = _nothing  # without the architecture's prefix
    moves: Rules = ()


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
    ("attention.layer_norm_epsilon", "layer_norm_eps", "layer_norm_epsilon"),
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


_LLAMA: Rules = tuple(
    (f"{name}.{kind}", move)
    for name, move in (("attn_q", PAIRS_OF_QUERIES), ("attn_k", PAIRS_OF_KEYS))
    for kind in ("weight", "bias")
)
_GEMMA: Rules = (("norm.weight", PLUS_ONE),)

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"), Family("llama", moves=_LLAMA)),
    "Qwen2ForCausalLM": Family("qwen2"),
    "Qwen3ForCausalLM": Family("qwen3"),
    "Qwen3MoeForCausalLM": Family("qwen3moe"),
    "GemmaForCausalLM": Family("gemma", moves=_GEMMA),
    "Gemma2ForCausalLM": Family("gemma2", _gemma2, _GEMMA),
    **dict.fromkeys(("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), Family("gemma3", _gemma3, _GEMMA)),
}

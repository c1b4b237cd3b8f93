"""Synthetic models of every architecture, and an independent float64 forward pass of some."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, quants
from gguf.constants import GGMLQuantizationType, GGUFValueType

from logitless.graph.dtype import dequantize
from logitless.models.architectures.registry import ARCHITECTURES
from logitless.models.quantization.quantize import DTYPES, quantize
from logitless.models.synthetic.vocabulary import vocabulary
from tests.helpers.random_blocks import RANDOM_TYPES, random_blocks
from tests.helpers.reference_moe import mixture
from tests.helpers.reference_mtp import agreeing
from tests.helpers.tensor_shapes import FLAT, key_name, tensor_shapes

Array = np.ndarray[Any, Any]


WIDTH_OF_EXPERTS = (  # expert width has a key of its own
    *("ernie4_5-moe", "dots1", "glm4moe", "qwen3moe", "qwen3vlmoe", "qwen2moe", "gpt-oss", "deepseek", "bailingmoe"),
    *("deepseek2", "bailingmoe2", "cohere2moe", "lfm2moe", "qwen35moe", "qwen3next", "nemotron_h_moe", "mistral4"),
    *("exaone-moe", "afmoe", "hy_v3", "mellum", "llama4", "grovemoe"),
)


@dataclass
class Spec:
    """A synthetic model. `keys` are written to the file under the architecture's name."""

    arch: str = "llama"
    n_embd: int = 64
    n_layer: int = 2
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 0
    n_ff: int = 96
    n_vocab: int = 101
    n_ctx_train: int = 64
    dtype: str = "f32"
    types: dict[str, str] = field(default_factory=dict)  # by tensor name suffix, without .weight
    norm_dtype: str = "f32"
    biases: tuple[str, ...] = ()
    untied: bool = False
    fused: bool = False
    keys: dict[str, Any] = field(default_factory=dict)
    # RoPE factor tensors, from 1 up to this
    factors: dict[str, float] = field(default_factory=dict)
    n_ctx: int = 64
    n_expert: int = 0
    n_expert_used: int = 0
    traits: tuple[str, ...] = ()
    vocabulary: bool = False  # write a vocabulary
    n_mtp: int = 0  # MTP heads

    @property
    def d(self) -> int:
        of_latent = self.keys.get("attention.key_length_mla") or self.keys.get("attention.key_length")
        return of_latent or self.head_dim or self.n_embd // self.n_head

    @property
    def latent(self) -> tuple[int, int, int, int, int]:
        """MLA sizes: KV rank, query rank, head dimensions without and with RoPE, value dimension."""
        rank, turned = self.keys["attention.kv_lora_rank"], self.keys["rope.dimension_count"]
        value = self.keys.get("attention.value_length_mla") or self.keys["attention.value_length"]
        return rank, self.keys.get("attention.q_lora_rank", 0), self.d - turned, turned, value

    @property
    def gemma(self) -> bool:
        return self.arch.startswith("gemma")

    def dense(self, layer: int) -> bool:
        step = self.keys.get("interleave_moe_layer_step") or 1
        return not self.n_expert or layer < self.keys.get("leading_dense_block_count", 0) or (layer + 1) % step > 0

    @property
    def n_ff_dense(self) -> int:
        return 7 * self.n_ff if self.n_expert and self.arch in WIDTH_OF_EXPERTS else self.n_ff


def file_keys(s: Spec) -> dict[str, Any]:
    """Keys of the file, without the architecture's prefix."""
    keys = {
        "context_length": s.n_ctx_train,
        "embedding_length": s.n_embd,
        "block_count": s.n_layer + s.n_mtp,
        "feed_forward_length": s.n_ff_dense,
        "attention.head_count": s.n_head,
        "attention.head_count_kv": s.n_head_kv,
        f"attention.layer_norm_{'' if ARCHITECTURES[s.arch].norm.layer_norm else 'rms_'}epsilon": 1e-5,
    }
    if s.n_mtp:
        keys["nextn_predict_layers"] = s.n_mtp
    if s.n_expert:
        keys |= {"expert_count": s.n_expert, "expert_used_count": s.n_expert_used}
        if s.arch in WIDTH_OF_EXPERTS:
            keys |= {"expert_feed_forward_length": s.n_ff}
    if s.head_dim:
        keys |= {"attention.key_length": s.head_dim, "attention.value_length": s.head_dim}
    return keys | s.keys


def write(path: Path, s: Spec, keys: dict[str, Any] | None = None) -> dict[str, Array]:
    """Write the GGUF file; returns its tensors as float64 by name, as a reader sees them. keys are
    the file's beside the spec's, or instead of them: no tensor has another shape for them."""
    rng = np.random.default_rng(7)
    writer = GGUFWriter(path, s.arch)
    for name, value in (file_keys(s) | (keys or {})).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
        add[bool] = writer.add_bool
        if isinstance(value, np.ndarray):
            kind = GGUFValueType.UINT64 if value.dtype == np.uint64 else GGUFValueType.UINT32
            writer.add_key_value(f"{s.arch}.{name}", value.tolist(), GGUFValueType.ARRAY, kind)
        elif value is not None:
            add[type(value)](key_name(s.arch, name), value)
    if s.vocabulary:
        add_vocabulary(writer, s.n_vocab)
    if "ranks" in s.traits and s.arch != "modern-bert":
        writer.add_string("tokenizer.chat_template.rerank", "<s>ask {query} say {document}</s>")
    seen: dict[str, Array] = {}

    def put(name: str, values: Array, dtype: str) -> None:
        kind = GGMLQuantizationType[dtype.upper()]
        if dtype in RANDOM_TYPES or dtype not in DTYPES:
            raw = random_blocks(rng, values.shape, dtype, values.std())
            writer.add_tensor(name, raw, raw_dtype=kind)
            seen[name] = dequantize(raw, dtype).astype(np.float64)
            return
        if dtype in ("f32", "f16"):
            stored = values.astype(np.float32 if dtype == "f32" else np.float16)
            writer.add_tensor(name, stored)
            seen[name] = stored.astype(np.float64)
        else:
            raw = quantize(np.atleast_2d(values), dtype)
            raw = raw if values.ndim > 1 else raw[0]
            writer.add_tensor(name, raw, raw_dtype=kind)
            seen[name] = quants.dequantize(raw, kind).reshape(values.shape).astype(np.float64)

    for name, shape in tensor_shapes(s, file_keys(s)).items():
        short = name.rpartition(".")[2]
        if name.endswith(FLAT):
            put(name, -rng.uniform(0.2, 2, shape) if short == "ssm_a" else rng.standard_normal(shape), "f32")
        elif short == "ffn_gate_tid2eid":
            table = np.argsort(rng.random((shape[0], s.n_expert)))[:, : shape[1]].astype(np.int32)
            writer.add_tensor(f"{name}.weight", table)
            seen[name] = table.astype(np.float64)
        elif short == "exp_probs_b":
            put(name if s.arch == "hy_v3" else f"{name}.bias", 0.2 * rng.standard_normal(shape), "f32")
        elif len(shape) == 1 or short.endswith("norm"):
            # its converter drops the suffix
            bare = short == "scale" or (s.arch == "falcon-h1" and short == "ffn_norm")
            bare = bare or ("bare norms" in s.traits and short.startswith(("post_", "ssm_")))
            mean = -2 if short == "time_mix_decay" else 0 if short.endswith("res_score") else 1
            put(name if bare else f"{name}.weight", mean + 0.2 * rng.standard_normal(shape), s.norm_dtype)
        else:
            size = 3 if name == "output" or (name == "token_embd" and not s.untied) else 1
            values = size * rng.standard_normal(shape) / math.sqrt(shape[-1])
            if "agrees" in s.traits:
                values = agreeing(short, values, seen, "much" in s.traits)
            put(f"{name}.weight", values, "f32" if short in ("ssm_conv1d", "conv") else s.types.get(short, s.dtype))
            if "scales" in s.traits and name.startswith("blk.") and short != "ffn_gate_inp":
                put(f"{name}.scale", rng.uniform(0.5, 2, shape[:-2] or 1), "f32")
                seen[f"{name}.weight"] *= seen[f"{name}.scale"].reshape(-1, *[1] * (len(shape) - 1))
        if short in s.biases:
            put(f"{name}.bias", rng.standard_normal(shape[:-1] or shape), "f32")
    for name, top in s.factors.items():
        n = s.keys.get("rope.dimension_count", s.d) // 2
        put(f"{name}.weight", np.linspace(1, top, n), "f32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return seen


def add_vocabulary(writer: GGUFWriter, n: int) -> None:
    """Write the vocabulary keys that llama.cpp requires."""
    tokens, scores, types = vocabulary(n)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


# -- the reference: of one architecture of each scaling of RoPE, and of those that llama.cpp does not run

INTERLEAVED = ("llama", "granite", "deepseek2", "plm")
REFERENCES = (*INTERLEAVED, "minicpm3", "qwen2", "qwen3", "qwen3moe", "phi3", "grovemoe", "gemma2", "gemma3")


def norm(x: Array, w: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w


def activated(s: Spec, x: Array) -> Array:
    if s.gemma:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / (1 + np.exp(-x))


def turn(x: Array, angle: Array, magnitude: float, interleaved: bool) -> Array:
    """RoPE of x (T, H, D) by angle (T, n)."""
    z = np.exp(1j * angle)[:, None] * magnitude
    n = angle.shape[1]
    y = x.copy()
    if interleaved:
        pairs = (x[..., 0 : 2 * n : 2] + 1j * x[..., 1 : 2 * n : 2]) * z
        y[..., 0 : 2 * n : 2], y[..., 1 : 2 * n : 2] = pairs.real, pairs.imag
    else:
        pairs = (x[..., :n] + 1j * x[..., n : 2 * n]) * z
        y[..., :n], y[..., n : 2 * n] = pairs.real, pairs.imag
    return y


def reference(s: Spec, t: dict[str, Array], ids: Array, rope: Any, window: Any, scale: float, caps: Any) -> Array:
    """Logits in float64 of an architecture of REFERENCES.

    `rope(layer)`: frequencies and magnitude. `window(layer)`: sliding window, 0 for none. `caps`:
    soft caps of scores and logits.
    """
    assert s.arch in REFERENCES, f"{s.arch} is compared with llama.cpp"

    def product(name: str, x: Array) -> Array:
        return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", 0.0)

    def fed(layer: int, h: Array) -> Array:
        b = f"blk.{layer}."
        if not s.dense(layer):
            y = mixture(s, t, b, h)
            if b + "ffn_gate_shexp.weight" in t:
                inner = activated(s, product(b + "ffn_gate_shexp", h)) * product(b + "ffn_up_shexp", h)
                y = y + product(b + "ffn_down_shexp", inner)
            return y
        if s.arch == "plm":
            return product(b + "ffn_down", np.maximum(product(b + "ffn_up", h), 0) ** 2)
        if b + "ffn_gate.weight" not in t:
            gate, up = np.split(product(b + "ffn_up", h), 2, -1)
        else:
            gate, up = product(b + "ffn_gate", h), product(b + "ffn_up", h)
        return product(b + "ffn_down", activated(s, gate) * up)

    of_input, of_blocks, of_logits = (s.keys.get(f"{key}_scale") or 1 for key in ("embedding", "residual", "logit"))
    if s.arch == "minicpm3":  # its files lack the key
        of_input, of_blocks, of_logits = 12, 1.4 / math.sqrt(s.n_layer), s.n_embd / 256
    x = t["token_embd.weight"][ids] * (math.sqrt(s.n_embd) if s.gemma else of_input)
    pos = np.arange(len(ids))
    for i in range(s.n_layer):
        b = f"blk.{i}."
        h = norm(x, t[b + "attn_norm.weight"])
        frequency, magnitude = rope(i)
        if "attention.kv_lora_rank" in s.keys:
            parts = latent_heads(s, t, b, h)
        elif b + "attn_qkv.weight" in t:
            parts = np.split(product(b + "attn_qkv", h), np.cumsum([s.n_head * s.d, s.n_head_kv * s.d]), -1)
        else:
            parts = [product(b + name, h) for name in ("attn_q", "attn_k", "attn_v")]
        q, k, v = (p if "attention.kv_lora_rank" in s.keys else p.reshape(len(ids), -1, s.d) for p in parts)
        if b + "attn_q_norm.weight" in t:
            q, k = norm(q, t[b + "attn_q_norm.weight"]), norm(k, t[b + "attn_k_norm.weight"])
        q, k = (turn(y, pos[:, None] * frequency, magnitude, s.arch in INTERLEAVED) for y in (q, k))
        k, v = (np.repeat(y, s.n_head // y.shape[1], 1) for y in (k, v))
        score = np.einsum("qhd,khd->hqk", q, k) * scale
        if caps[0]:
            score = caps[0] * np.tanh(score / caps[0])
        ago = pos[:, None] - pos
        score[:, (ago < 0) | (ago >= (window(i) or 10**9))] = -np.inf
        p = np.exp(score - score.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        y = product(b + "attn_output", np.einsum("hqk,khd->qhd", p, v).reshape(len(ids), -1))
        x = x + (norm(y, t[b + "post_attention_norm.weight"]) if s.gemma else of_blocks * y)
        y = fed(i, norm(x, t[b + "ffn_norm.weight"]))
        x = x + (norm(y, t[b + "post_ffw_norm.weight"]) if s.gemma else of_blocks * y)
    z = product("output" if s.untied else "token_embd", norm(x, t["output_norm.weight"])) / of_logits
    return caps[1] * np.tanh(z / caps[1]) if caps[1] else z


def latent_heads(s: Spec, t: dict[str, Array], b: str, h: Array) -> list[Array]:
    """MLA queries, keys and values of all heads, after the paper; RoPE dimensions come first."""
    rank, q_rank, plain, turned, value = s.latent
    n = len(h)
    if q_rank:
        row = norm(h @ t[b + "attn_q_a.weight"].T, t[b + "attn_q_a_norm.weight"])
        q = row @ t[b + "attn_q_b.weight"].T
    else:
        q = h @ t[b + "attn_q.weight"].T
    q = q.reshape(n, s.n_head, plain + turned)
    both = h @ t[b + "attn_kv_a_mqa.weight"].T
    row, shared = norm(both[:, :rank], t[b + "attn_kv_a_norm.weight"]), both[:, None, rank:]
    if b + "attn_kv_b.weight" in t:
        heads = (row @ t[b + "attn_kv_b.weight"].T).reshape(n, s.n_head, plain + value)
        k, v = heads[..., :plain], heads[..., plain:]
    else:
        k = np.einsum("tr,hrd->thd", row, t[b + "attn_k_b.weight"])
        v = np.einsum("tr,hdr->thd", row, t[b + "attn_v_b.weight"])
    k = np.concatenate([np.repeat(shared, s.n_head, 1), k], -1)
    return [np.concatenate([q[..., plain:], q[..., :plain]], -1), k, v]

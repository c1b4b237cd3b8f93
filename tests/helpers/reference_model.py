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
from logitless.models.quantization.quantize import DTYPES, quantize
from logitless.models.synthetic.vocabulary import vocabulary
from tests.helpers import gemma_layers
from tests.helpers import reference_traits as traits
from tests.helpers.mapped_shapes import mapped_shapes
from tests.helpers.random_blocks import RANDOM_TYPES, random_blocks
from tests.helpers.reference_linear_attention import FLAT, LFM2, QWEN35, attends, feeds, keeps_state, state_shapes
from tests.helpers.reference_moe import mixture
from tests.helpers.reference_mtp import agreeing, of_nextn

Array = np.ndarray[Any, Any]


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

    def kv_heads(self, layer: int) -> int:
        """KV heads of a layer; 0: it has no attention (deci)."""
        given = self.keys.get("attention.head_count_kv")
        return given[layer] if self.arch == "deci" else self.n_head_kv

    def nothing(self, layer: int) -> bool:
        return self.arch == "deci" and not self.keys["feed_forward_length"][layer]

    def dense(self, layer: int) -> bool:
        step = self.keys.get("interleave_moe_layer_step") or 1
        return not self.n_expert or layer < self.keys.get("leading_dense_block_count", 0) or (layer + 1) % step > 0

    @property
    def n_ff_dense(self) -> int:
        return 7 * self.n_ff if self.n_expert and self.arch in traits.WIDTH_OF_EXPERTS else self.n_ff

    @property
    def n_ff_shared(self) -> int:
        width = self.keys.get("expert_shared_feed_forward_length", 0)
        count = self.keys.get("expert_shared_count", int(self.arch == "llama4"))
        return int(width * (count if self.arch == "bailingmoe2" else 1) or count * self.n_ff)

    @property
    def fused_ffn(self) -> bool:
        return self.fused and self.arch not in (*traits.UNGATED, *traits.FUSED_QKV)

    @property
    def joined(self) -> tuple[str, ...]:
        """Inner activations of an FFN, before the down projection."""
        return ("up",) if self.arch in traits.UNGATED else ("gate", "up")

    @property
    def output_norm(self) -> str:
        return "token_embd_norm" if self.arch in LFM2 else "output_norm"

    @property
    def one_norm(self) -> bool:
        return self.arch in (*traits.ONE_NORM, *traits.NEMOTRON_H) or (
            self.arch == "stablelm" and "one norm" in self.traits
        )


VISUAL = ("attn_qkv", "attn_output", "ffn_gate", "ffn_up", "ffn_down")  # matrices that a visual expert has, too


def shapes(s: Spec) -> dict[str, tuple[int, ...]]:
    if "mapped" in s.traits:
        return mapped_shapes(s, file_keys(s))
    if s.arch in gemma_layers.ARCHITECTURES:
        return gemma_layers.shapes(s)
    q, kv = s.n_head * s.d, s.n_head_kv * s.d
    out: dict[str, tuple[int, ...]] = {"token_embd": (s.n_vocab, s.n_embd), s.output_norm: (s.n_embd,)}
    if s.untied:
        out["output"] = (s.n_vocab, s.n_embd)
    if s.arch in traits.LEARNED_POSITIONS:
        out["position_embd"] = (s.n_ctx_train, s.n_embd)
    if "ranks" in s.traits and s.arch == "modern-bert":
        out |= {"cls": (s.n_embd, s.n_embd), "cls.norm": (s.n_embd,), "cls.output": (1, s.n_embd)}
    elif "ranks" in s.traits:
        out["cls.output"] = (2, s.n_embd)
    if n := s.keys.get("dense_2_feat_out"):
        out |= {"dense_2": (n, s.n_embd), "dense_3": (s.n_embd, n)}
    for i in range(s.n_layer + s.n_mtp):
        layer: dict[str, tuple[int, ...]] = {}
        if s.arch == "modern-bert":
            out["token_embd_norm"] = (s.n_embd,)
            layer |= {"ffn_norm": (s.n_embd,)} | ({"attn_norm": (s.n_embd,)} if i else {})
        elif s.arch not in traits.NO_NORM_BEFORE:
            layer |= {"attn_norm": (s.n_embd,)} | ({} if s.one_norm else {"ffn_norm": (s.n_embd,)})
        if keeps_state(s, i):
            layer |= state_shapes(s)
        if not attends(s, i):
            pass
        elif s.arch in traits.LATENT:
            layer |= of_latent(s)
        elif s.fused:
            layer |= {"attn_qkv": (q + 2 * kv, s.n_embd)} | ({"ffn_up": (2 * s.n_ff, s.n_embd)} if s.fused_ffn else {})
        else:
            layer |= {"attn_q": (q, s.n_embd), "attn_k": (kv, s.n_embd), "attn_v": (kv, s.n_embd)}
            if s.arch in QWEN35:
                layer["attn_q"] = (2 * q, s.n_embd)
        if attends(s, i):
            layer |= {"attn_output": (s.n_embd, s.n_head * (s.latent[-1] if s.arch in traits.LATENT else s.d))}
        if not feeds(s, i):
            layer.pop("ffn_norm", None)
        elif not s.dense(i):
            latent = s.keys.get("moe_latent_size")
            layer |= {"ffn_gate_inp": (s.n_expert, s.n_embd)}
            layer |= {f"ffn_{name}_exps": (s.n_expert, s.n_ff, latent or s.n_embd) for name in s.joined}
            layer |= {"ffn_down_exps": (s.n_expert, latent or s.n_embd, s.n_ff)}
            if n := s.keys.get("expert_chunk_feed_forward_length"):
                chunks = s.n_expert // s.keys["experts_per_group"]
                layer |= {f"ffn_{name}_chexps": (chunks, n, s.n_embd) for name in s.joined}
                layer |= {"ffn_down_chexps": (chunks, s.n_embd, n)}
            if latent:
                layer |= {"ffn_latent_down": (latent, s.n_embd), "ffn_latent_up": (s.n_embd, latent)}
            if s.arch in traits.BALANCED or "balanced" in s.traits:
                layer |= {"exp_probs_b": (s.n_expert,)}
            if n := s.n_ff_shared:
                layer |= {f"ffn_{name}_shexp": (n, s.n_embd) for name in s.joined}
                layer |= {"ffn_down_shexp": (s.n_embd, n)}
                if s.arch in ("qwen2moe", "qwen35moe", "qwen3next"):
                    layer |= {"ffn_gate_inp_shexp": (s.n_embd,) if "vectors" in s.traits else (1, s.n_embd)}
        else:
            layer |= {"ffn_down": (s.n_embd, s.n_ff_dense)}
            if s.arch in traits.UNGATED:
                layer |= {"ffn_up": (s.n_ff_dense, s.n_embd)}
            elif not s.fused_ffn:
                layer |= {"ffn_gate": (s.n_ff_dense, s.n_embd), "ffn_up": (s.n_ff_dense, s.n_embd)}
        if s.arch in traits.OTHER_NAME:
            layer["post_attention_norm"] = layer.pop("ffn_norm")
        if not s.kv_heads(i):  # attention's norm and one matrix, or neither
            linear = s.arch == "deci" and s.keys["attention.head_count"][i]
            layer = {name: shape for name, shape in layer.items() if name.startswith("ffn")} | (
                {"attn_norm": (s.n_embd,), "attn_output": (s.n_embd, s.n_embd)} if linear else {}
            )
        if s.nothing(i):
            layer = {}
        if s.arch == "gpt-oss":
            layer["attn_sinks"] = (s.n_head,)
        if s.arch == "afmoe":
            layer["attn_gate"] = (q, s.n_embd)
        if "two norms" in s.traits:
            layer["attn_norm_2"] = (s.n_embd,)
        if (s.arch in traits.HEAD_NORM or "head norms" in s.traits) and not keeps_state(s, i):
            layer |= {"attn_q_norm": (s.d,), "attn_k_norm": (s.d,)}
        if "norm for head" in s.traits:
            layer |= {"attn_q_norm": (s.n_head, s.d), "attn_k_norm": (s.n_head_kv, s.d)}
        if s.arch in traits.ROW_NORM:
            layer |= {"attn_q_norm": (q,), "attn_k_norm": (kv,)}
        if s.arch in traits.NORM_AFTER:
            layer |= {"post_attention_norm": (s.n_embd,), "post_ffw_norm": (s.n_embd,)}
        if s.arch == "cogvlm":  # for rows of images
            layer |= {f"vis_{name.removeprefix('ffn_')}": layer[name] for name in VISUAL}
        if i >= s.n_layer:
            layer |= of_nextn(s)
        out |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return out


def of_latent(s: Spec) -> dict[str, tuple[int, ...]]:
    rank, q_rank, plain, turned, value = s.latent
    out: dict[str, tuple[int, ...]] = {"attn_kv_a_mqa": (rank + turned, s.n_embd), "attn_kv_a_norm": (rank,)}
    q = s.n_head * (plain + turned)
    if q_rank:
        out |= {"attn_q_a": (q_rank, s.n_embd), "attn_q_a_norm": (q_rank,), "attn_q_b": (q, q_rank)}
    else:
        out["attn_q"] = (q, s.n_embd)
    if "attention.key_length_mla" in s.keys:
        return out | {"attn_k_b": (s.n_head, rank, plain), "attn_v_b": (s.n_head, value, rank)}
    return out | {"attn_kv_b": (s.n_head * (plain + value), rank)}


def file_keys(s: Spec) -> dict[str, Any]:
    """Keys of the file, without the architecture's prefix."""
    keys = {
        "context_length": s.n_ctx_train,
        "embedding_length": s.n_embd,
        "block_count": s.n_layer + s.n_mtp,
        "feed_forward_length": s.n_ff_dense,
        "attention.head_count": s.n_head,
        "attention.head_count_kv": s.n_head_kv,
        f"attention.layer_norm_{'' if s.arch in traits.LAYER_NORM else 'rms_'}epsilon": 1e-5,
    }
    if s.n_mtp:
        keys["nextn_predict_layers"] = s.n_mtp
    if s.n_expert:
        keys |= {"expert_count": s.n_expert, "expert_used_count": s.n_expert_used}
        if s.arch in traits.WIDTH_OF_EXPERTS:
            keys |= {"expert_feed_forward_length": s.n_ff}
    if s.head_dim:
        keys |= {"attention.key_length": s.head_dim, "attention.value_length": s.head_dim}
    return keys | s.keys


def write(path: Path, s: Spec) -> dict[str, Array]:
    """Write the GGUF file; returns its tensors as float64 by name, as a reader sees them."""
    rng = np.random.default_rng(7)
    writer = GGUFWriter(path, s.arch)
    for name, value in file_keys(s).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
        add[bool] = writer.add_bool
        if isinstance(value, np.ndarray):
            kind = GGUFValueType.UINT64 if value.dtype == np.uint64 else GGUFValueType.UINT32
            writer.add_key_value(f"{s.arch}.{name}", value.tolist(), GGUFValueType.ARRAY, kind)
        elif value is not None:
            add[type(value)](name if name.startswith(("xielu.", "tokenizer.")) else f"{s.arch}.{name}", value)
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

    for name, shape in shapes(s).items():
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
    if s.arch in traits.SQUARED:
        return np.maximum(x, 0) ** 2
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
            if s.n_ff_shared:
                inner = activated(s, product(b + "ffn_gate_shexp", h)) * product(b + "ffn_up_shexp", h)
                y = y + product(b + "ffn_down_shexp", inner)
            return y
        if s.arch in traits.UNGATED:
            return product(b + "ffn_down", activated(s, product(b + "ffn_up", h)))
        if s.fused_ffn:
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
        if s.arch in traits.LATENT:
            parts = latent_heads(s, t, b, h)
        elif b + "attn_qkv.weight" in t:
            parts = np.split(product(b + "attn_qkv", h), np.cumsum([s.n_head * s.d, s.n_head_kv * s.d]), -1)
        else:
            parts = [product(b + name, h) for name in ("attn_q", "attn_k", "attn_v")]
        q, k, v = (p if s.arch in traits.LATENT else p.reshape(len(ids), -1, s.d) for p in parts)
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

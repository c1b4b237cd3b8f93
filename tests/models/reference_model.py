"""Made-up models of every architecture, and a forward pass in float64 that knows nothing of ours."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, quants
from gguf.constants import GGMLQuantizationType

from models.held import HELD
from models.quantize import quantize
from models.synth_vocab import vocabulary
from tests.models import gemma_layers
from tests.models.random_blocks import random_blocks

Array = np.ndarray[Any, Any]
INTERLEAVED = (
    *("llama", "granite", "granitemoe", "smollm3", "ernie4_5", "mistral3", "minicpm", "internlm2", "arcee", "glm4"),
    *("command-r", "cohere2", "ernie4_5-moe", "deepseek", "bailingmoe"),
)
LEARNED_POSITIONS = ("gpt2", "starcoder")
OF_VECTORS = ("gemma-embedding", "modern-bert")
LAYER_NORM = (
    *LEARNED_POSITIONS,
    *("modern-bert", "command-r", "cohere2", "stablelm", "orion", "starcoder2", "nemotron", "phi2", "gptneox"),
)
NORM_AFTER = ("gemma2", "gemma3", "gemma-embedding", "glm4", "olmo2", "exaone4")  # of what a sublayer gives
NO_NORM_BEFORE = ("olmo2", "exaone4")
ONE_NORM = ("command-r", "cohere2", "phi2")  # for attention and the feed-forward block
UNGATED = (*LEARNED_POSITIONS, "arcee", "nemotron", "starcoder2", "phi2", "gptneox")
SQUARED = ("arcee", "nemotron")  # relu
GELU = (*LEARNED_POSITIONS, *OF_VECTORS, "gemma", "gemma2", "gemma3", "starcoder2", "phi2", "gptneox")
ROW_NORM = ("olmo2", "olmoe", "minimax-m2")  # of all heads' queries and keys
BALANCED = ("ernie4_5-moe", "dots1", "glm4moe", "minimax-m2")  # by a bias on the choice of experts
WIDTH_OF_EXPERTS = (  # has a key of its own
    *BALANCED[:3],
    *("qwen3moe", "qwen3vlmoe", "qwen2moe", "gpt-oss", "deepseek", "bailingmoe"),
)
OTHER_NAME = ("gpt-oss", "seed_oss", "glm4moe")  # post_attention_norm stands before the feed-forward block


@dataclass
class Spec:
    """A model to make up. `keys` go into the file as they are, under the architecture's name."""

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
    types: dict[str, str] = field(default_factory=dict)  # by the end of a tensor's name without .weight
    norm_dtype: str = "f32"
    biases: tuple[str, ...] = ()
    untied: bool = False
    fused: bool = False
    keys: dict[str, Any] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)  # tensors of rope factors, from 1 up to this
    n_ctx: int = 64
    n_expert: int = 0
    n_expert_used: int = 0
    traits: tuple[str, ...] = ()
    vocabulary: bool = False  # in the file

    @property
    def d(self) -> int:
        return self.head_dim or self.n_embd // self.n_head

    @property
    def gemma(self) -> bool:
        return self.arch.startswith("gemma")

    def dense(self, layer: int) -> bool:
        return not self.n_expert or layer < self.keys.get("leading_dense_block_count", 0)

    @property
    def n_ff_dense(self) -> int:
        return 7 * self.n_ff if self.n_expert and self.arch in WIDTH_OF_EXPERTS else self.n_ff

    @property
    def n_ff_shared(self) -> int:
        width = self.keys.get("expert_shared_feed_forward_length", 0)
        return int(width or self.keys.get("expert_shared_count", 0) * self.n_ff)

    @property
    def one_norm(self) -> bool:
        return self.arch in ONE_NORM or (self.arch == "stablelm" and "one norm" in self.traits)


def shapes(s: Spec) -> dict[str, tuple[int, ...]]:
    if s.arch in gemma_layers.ARCHITECTURES:
        return gemma_layers.shapes(s)
    q, kv = s.n_head * s.d, s.n_head_kv * s.d
    out: dict[str, tuple[int, ...]] = {"token_embd": (s.n_vocab, s.n_embd), "output_norm": (s.n_embd,)}
    if s.untied:
        out["output"] = (s.n_vocab, s.n_embd)
    if s.arch in LEARNED_POSITIONS:
        out["position_embd"] = (s.n_ctx_train, s.n_embd)
    if "ranks" in s.traits and s.arch == "modern-bert":
        out |= {"cls": (s.n_embd, s.n_embd), "cls.norm": (s.n_embd,), "cls.output": (1, s.n_embd)}
    elif "ranks" in s.traits:
        out["cls.output"] = (2, s.n_embd)
    if n := s.keys.get("dense_2_feat_out"):
        out |= {"dense_2": (n, s.n_embd), "dense_3": (s.n_embd, n)}
    for i in range(s.n_layer):
        layer: dict[str, tuple[int, ...]] = {}
        if s.arch == "modern-bert":
            out["token_embd_norm"] = (s.n_embd,)
            layer |= {"ffn_norm": (s.n_embd,)} | ({"attn_norm": (s.n_embd,)} if i else {})
        elif s.arch not in NO_NORM_BEFORE:
            layer |= {"attn_norm": (s.n_embd,)} | ({} if s.one_norm else {"ffn_norm": (s.n_embd,)})
        if s.fused:
            layer |= {"attn_qkv": (q + 2 * kv, s.n_embd)} | (
                {} if s.arch in UNGATED else {"ffn_up": (2 * s.n_ff, s.n_embd)}
            )
        else:
            layer |= {"attn_q": (q, s.n_embd), "attn_k": (kv, s.n_embd), "attn_v": (kv, s.n_embd)}
        layer |= {"attn_output": (s.n_embd, q)}
        if not s.dense(i):
            layer |= {"ffn_gate_inp": (s.n_expert, s.n_embd)}
            layer |= {f"ffn_{name}_exps": (s.n_expert, s.n_ff, s.n_embd) for name in ("gate", "up")}
            layer |= {"ffn_down_exps": (s.n_expert, s.n_embd, s.n_ff)}
            if s.arch in BALANCED:
                layer |= {"exp_probs_b": (s.n_expert,)}
            if n := s.n_ff_shared:
                layer |= {f"ffn_{name}_shexp": (n, s.n_embd) for name in ("gate", "up")}
                layer |= {"ffn_down_shexp": (s.n_embd, n)}
                if s.arch == "qwen2moe":
                    layer |= {"ffn_gate_inp_shexp": (s.n_embd,) if "vectors" in s.traits else (1, s.n_embd)}
        else:
            layer |= {"ffn_down": (s.n_embd, s.n_ff_dense)}
            if s.arch in UNGATED:
                layer |= {"ffn_up": (s.n_ff_dense, s.n_embd)}
            elif not s.fused:
                layer |= {"ffn_gate": (s.n_ff_dense, s.n_embd), "ffn_up": (s.n_ff_dense, s.n_embd)}
        if s.arch in OTHER_NAME:
            layer["post_attention_norm"] = layer.pop("ffn_norm")
        if s.arch == "gpt-oss":
            layer["attn_sinks"] = (s.n_head,)
        if s.arch in (*("qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe"), "gemma3", "gemma-embedding", "exaone4", "dots1"):
            layer |= {"attn_q_norm": (s.d,), "attn_k_norm": (s.d,)}
        if s.arch in ROW_NORM:
            layer |= {"attn_q_norm": (q,), "attn_k_norm": (kv,)}
        if s.arch in NORM_AFTER:
            layer |= {"post_attention_norm": (s.n_embd,), "post_ffw_norm": (s.n_embd,)}
        out |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return out


def write(path: Path, s: Spec) -> dict[str, Array]:
    """Write the file; its tensors as float64, by name, as a reader would see them."""
    rng = np.random.default_rng(7)
    writer = GGUFWriter(path, s.arch)
    keys = {
        "context_length": s.n_ctx_train,
        "embedding_length": s.n_embd,
        "block_count": s.n_layer,
        "feed_forward_length": s.n_ff_dense,
        "attention.head_count": s.n_head,
        "attention.head_count_kv": s.n_head_kv,
        f"attention.layer_norm_{'' if s.arch in LAYER_NORM else 'rms_'}epsilon": 1e-5,
    }
    if s.n_expert:
        keys |= {"expert_count": s.n_expert, "expert_used_count": s.n_expert_used}
        if s.arch in WIDTH_OF_EXPERTS:
            keys |= {"expert_feed_forward_length": s.n_ff}
    if s.head_dim:
        keys |= {"attention.key_length": s.head_dim, "attention.value_length": s.head_dim}
    for name, value in (keys | s.keys).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
        add[bool] = writer.add_bool
        if value is not None:
            add[type(value)](f"{s.arch}.{name}", value)
    if s.vocabulary:
        add_vocabulary(writer, s.n_vocab)
    if "ranks" in s.traits and s.arch != "modern-bert":
        writer.add_string("tokenizer.chat_template.rerank", "<s>ask {query} say {document}</s>")
    seen: dict[str, Array] = {}

    def put(name: str, values: Array, dtype: str) -> None:
        kind = GGMLQuantizationType[dtype.upper()]
        if dtype in HELD:
            raw = random_blocks(rng, values.shape, dtype, values.std())
            writer.add_tensor(name, raw, raw_dtype=kind)
            seen[name] = quants.dequantize(raw, kind).astype(np.float64)
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
        if short == "exp_probs_b":
            put(f"{name}.bias", 0.2 * rng.standard_normal(shape), "f32")
        elif len(shape) == 1:
            put(name if short == "scale" else f"{name}.weight", 1 + 0.2 * rng.standard_normal(shape), s.norm_dtype)
        else:
            size = 3 if name == "output" or (name == "token_embd" and not s.untied) else 1
            put(
                f"{name}.weight",
                size * rng.standard_normal(shape) / math.sqrt(shape[-1]),
                s.types.get(short, s.dtype),
            )
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
    """What llama.cpp wants of a file."""
    tokens, scores, types = vocabulary(n)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


# -- the reference


def norm(x: Array, w: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w


def activated(s: Spec, x: Array) -> Array:
    if s.arch in SQUARED:
        return np.maximum(x, 0) ** 2
    if s.arch in GELU:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / (1 + np.exp(-x))


def turn(x: Array, angle: Array, magnitude: float, interleaved: bool) -> Array:
    """x (T, H, D) by angle (T, n)."""
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
    """`rope(layer)`: frequencies and magnitude; `window(layer)`: its width or 0; `caps`: of scores and logits."""

    def product(name: str, x: Array) -> Array:
        return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", 0.0)

    def normed(name: str, x: Array) -> Array:
        if s.arch in LAYER_NORM:
            return norm(x - x.mean(-1, keepdims=True), t[f"{name}.weight"]) + t.get(f"{name}.bias", 0.0)
        return norm(x, t[f"{name}.weight"])

    neighbours = s.arch in INTERLEAVED and "rope.dimension_sections" not in s.keys
    of_input, of_blocks, of_logits = (s.keys.get(f"{key}_scale") or 1 for key in ("embedding", "residual", "logit"))
    if s.arch in ("command-r", "cohere2"):
        of_logits = 1 / of_logits
    x = t["token_embd.weight"][ids] * (math.sqrt(s.n_embd) if s.gemma else of_input)
    pos = np.arange(len(ids))
    if s.arch == "modern-bert":
        x = normed("token_embd_norm", x)
    if s.arch in LEARNED_POSITIONS:
        x = x + t["position_embd.weight"][pos]
    for i in range(s.n_layer):
        b = f"blk.{i}."
        h = normed(b + "attn_norm", x) if b + "attn_norm.weight" in t else x
        if b + "attn_qkv.weight" in t:
            parts = np.split(product(b + "attn_qkv", h), np.cumsum([s.n_head * s.d, s.n_head_kv * s.d]), -1)
        else:
            parts = [product(b + name, h) for name in ("attn_q", "attn_k", "attn_v")]
        if s.arch in ROW_NORM:
            parts[:2] = (norm(y, t[f"{b}attn_{which}_norm.weight"]) for y, which in zip(parts[:2], "qk", strict=True))
        q, k, v = (p.reshape(len(ids), -1, s.d) for p in parts)
        if b + "attn_q_norm.weight" in t and s.arch not in ROW_NORM:
            q, k = norm(q, t[b + "attn_q_norm.weight"]), norm(k, t[b + "attn_k_norm.weight"])
        frequency, magnitude = rope(i)
        far = s.arch in ("cohere2", "exaone4") and not window(i) and any(map(window, range(s.n_layer)))
        if not far and s.arch not in LEARNED_POSITIONS and (s.arch != "smollm3" or i % 4 != 3):
            q, k = (turn(y, pos[:, None] * frequency, magnitude, neighbours) for y in (q, k))
        k, v = (np.repeat(y, s.n_head // s.n_head_kv, 1) for y in (k, v))
        score = np.einsum("qhd,khd->hqk", q, k) * scale
        if caps[0]:
            score = caps[0] * np.tanh(score / caps[0])
        ago = pos[:, None] - pos
        if s.arch in OF_VECTORS:
            score[:, np.abs(ago) > (window(i) // 2 or 10**9)] = -np.inf
        else:
            score[:, (ago < 0) | (ago >= (window(i) or 10**9))] = -np.inf
        top = score.max(-1, keepdims=True)
        p = np.exp(score - top)
        sinks = np.exp(t[b + "attn_sinks.weight"][:, None, None] - top) if s.arch == "gpt-oss" else 0
        p /= p.sum(-1, keepdims=True) + sinks
        y = product(b + "attn_output", np.einsum("hqk,khd->qhd", p, v).reshape(len(ids), -1))
        before = x
        x = x + (normed(b + "post_attention_norm", y) if s.arch in NORM_AFTER else of_blocks * y)
        if s.arch in NO_NORM_BEFORE:
            h = x
        elif not s.one_norm:
            aside = s.arch == "gptneox" and s.keys["use_parallel_residual"]
            h = normed(b + ("post_attention_norm" if s.arch in OTHER_NAME else "ffn_norm"), before if aside else x)
        if not s.dense(i):
            y = mixture(s, t, b, h)
            if s.n_ff_shared:
                gate, up = product(b + "ffn_gate_shexp", h), product(b + "ffn_up_shexp", h)
                shared = product(b + "ffn_down_shexp", gate / (1 + np.exp(-gate)) * up)
                if s.arch == "qwen2moe":
                    shared = shared / (1 + np.exp(-h @ t[b + "ffn_gate_inp_shexp.weight"].reshape(-1, 1)))
                y = y + shared
            x = x + of_blocks * y
            continue
        if s.arch in UNGATED:
            y = product(b + "ffn_down", activated(s, product(b + "ffn_up", h)))
        else:
            if s.fused:
                gate, up = np.split(product(b + "ffn_up", h), 2, -1)
            else:
                gate, up = product(b + "ffn_gate", h), product(b + "ffn_up", h)
            y = product(b + "ffn_down", activated(s, gate) * up)
        x = x + (normed(b + "post_ffw_norm", y) if s.arch in NORM_AFTER else of_blocks * y)
    if s.arch in OF_VECTORS:
        return normed("output_norm", x)
    z = product("output" if s.untied else "token_embd", normed("output_norm", x)) / of_logits
    return caps[1] * np.tanh(z / caps[1]) if caps[1] else z


def mixture(s: Spec, t: dict[str, Array], b: str, h: Array) -> Array:
    """Row by row, in llama.cpp's order: probabilities of all experts, the best of them, these divided by their sum."""
    out, none = np.zeros_like(h), np.zeros(s.n_expert)
    oss = s.arch == "gpt-oss"
    sigmoid = s.keys.get("expert_gating_func", 2 if s.arch in ("glm4moe", "minimax-m2") else 1) == 2
    norm = s.arch not in ("olmoe", "qwen2moe", "deepseek") and s.keys.get("expert_weights_norm", True)
    times = s.keys.get("expert_weights_scale") or 1
    for row, y in zip(h, out, strict=True):
        odds = np.exp(t[b + "ffn_gate_inp.weight"] @ row + t.get(b + "ffn_gate_inp.bias", 0.0))
        odds /= odds + 1 if sigmoid else odds.sum()
        best = np.argsort(odds + t.get(b + "exp_probs_b.bias", 0.0))[: -s.n_expert_used - 1 : -1]
        whole = odds[best].sum() if norm else 1
        for expert in best:
            gate, up, down = (t[f"{b}ffn_{name}_exps.weight"][expert] for name in ("gate", "up", "down"))
            of_gate, of_up, of_down = (t.get(f"{b}ffn_{n}_exps.bias", none)[expert] for n in ("gate", "up", "down"))
            gated, upper = gate @ row + of_gate, up @ row + of_up
            if oss:  # OpenAI's gpt_oss/torch/model.py: swiglu
                gated, upper = np.minimum(gated, 7), np.clip(upper, -7, 7) + 1
            gated = gated / (1 + np.exp(-gated * (1.702 if oss else 1)))
            y += odds[expert] / whole * times * (down @ (gated * upper) + of_down)
    return out


def plain(s: Spec, base: float = 10000.0, factors: float = 1.0, magnitude: float = 1.0, divide: float = 1.0) -> Any:
    """`rope` without (or with simple) scaling."""
    n = s.keys.get("rope.dimension_count", s.d)
    frequency = base ** (-np.arange(0, n, 2) / n) / np.linspace(1, factors, n // 2) / divide
    return lambda layer: (frequency, magnitude)


def yarn(s: Spec, factor: float, original: int, attn: float = 1.0) -> Any:
    """NTK-by-parts, written from the paper: wavelengths against the original context, ramp between 32 and 1 turns."""
    n, base = s.d, 10000.0
    i = np.arange(n // 2)
    f = base ** (-2 * i / n)
    low, high = (n * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(base)) for turns in (32, 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), n - 1)
    ramp = np.clip((i - low) / max(high - low, 0.001), 0, 1)
    mixed = f * (1 - ramp) + f / factor * ramp
    return lambda layer: (mixed, attn * (0.1 * math.log(factor) + 1))

"""Synthetic Gemma 3n and Gemma 4 models, and their float64 forward pass, after transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tests.helpers.reference_model import Spec

Array = np.ndarray[Any, Any]
ARCHITECTURES = ("gemma3n", "gemma4")
N_STREAMS = 4


def is_far(s: Spec, layer: int) -> bool:
    pattern = s.keys.get("attention.sliding_window_pattern")
    return not pattern[layer] if pattern else layer % 5 == 4


def of_layer(s: Spec, key: str, default: int, layer: int) -> int:
    value = s.keys.get(key, default)
    return int(value[layer] if isinstance(value, list) else value)


def head_dim(s: Spec, layer: int) -> int:
    return int(s.d if is_far(s, layer) else s.keys.get("attention.key_length_swa", s.d))


def n_layer_kv(s: Spec) -> int:
    return s.n_layer - int(s.keys.get("attention.shared_kv_layers", 0))


def shapes(s: Spec) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors.

    `traits`: "keys as values" in full-attention layers, "unused" keys and values, "scaled" layers,
    "fused" experts.
    """
    n, out = s.n_embd, {"token_embd": (s.n_vocab, s.n_embd), "output_norm": (s.n_embd,)}
    p = s.keys.get("embedding_length_per_layer_input", 0)
    if p:
        out |= {"per_layer_token_embd": (s.n_vocab, p * s.n_layer), "per_layer_model_proj": (p * s.n_layer, n)}
        out |= {"per_layer_proj_norm": (p,)}
    if s.arch == "gemma3n":
        out |= {"altup_proj": (N_STREAMS - 1, n, n), "altup_unembd_proj": (N_STREAMS - 1, n, n)}
    for i in range(s.n_layer):
        d, ff = head_dim(s, i), of_layer(s, "feed_forward_length", s.n_ff, i)
        q, kv = s.n_head * d, of_layer(s, "attention.head_count_kv", s.n_head_kv, i) * d
        norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        layer: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (n,))
        layer |= {"attn_q": (q, n), "attn_q_norm": (d,), "attn_output": (n, q)}
        if i < n_layer_kv(s) or "unused" in s.traits:
            layer |= {"attn_k": (kv, n), "attn_k_norm": (d,)}
            if not (is_far(s, i) and "keys as values" in s.traits):
                layer |= {"attn_v": (kv, n)}
        layer |= {"ffn_gate": (ff, n), "ffn_up": (ff, n), "ffn_down": (n, ff)}
        if p:
            layer |= {"inp_gate": (p, n), "proj": (n, p), "post_norm": (n,)}
        if s.arch == "gemma3n":
            layer |= dict.fromkeys(("altup_router_norm", "altup_correct_scale", "laurel_post_norm"), (n,))
            layer |= {"altup_router": (N_STREAMS, n), "altup_predict_coef": (N_STREAMS**2, N_STREAMS)}
            layer |= {"altup_correct_coef": (N_STREAMS,) * 2, "laurel_l": (64, n), "laurel_r": (n, 64)}
        if "scaled" in s.traits and i < s.n_layer - 1:  # in the last layer the next norm cancels it
            layer |= {"layer_output_scale": (1,)}
        if s.n_expert:
            e, width = s.n_expert, s.keys["expert_feed_forward_length"]
            layer |= {"ffn_gate_inp": (e, n), "ffn_gate_inp.scale": (n,), "ffn_down_exps.scale": (e,)}
            layer |= dict.fromkeys(("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"), (n,))
            if "fused" in s.traits:
                layer |= {"ffn_gate_up_exps": (e, 2 * width, n)}
            else:
                layer |= {"ffn_gate_exps": (e, width, n), "ffn_up_exps": (e, width, n)}
            layer |= {"ffn_down_exps": (e, n, width)}
        out |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return out


def unit(x: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def turn(x: Array, base: float, n: int, factors: Array | float) -> Array:
    """RoPE: x (T, H, D), elements i and i + n/2 of a head as a complex number, times the row's
    number.
    """
    speed = base ** (-np.arange(0, n, 2) / n) / factors
    z = (x[..., : n // 2] + 1j * x[..., n // 2 : n]) * np.exp(1j * np.arange(len(x))[:, None, None] * speed)
    return np.concatenate([z.real, z.imag, x[..., n:]], -1)


class Attention:
    """Attention of every layer; keeps keys and values for KV-sharing layers."""

    def __init__(self, s: Spec, t: dict[str, Array]) -> None:
        self.s, self.t = s, t
        # of the last layer of each kind with keys of its own
        self.seen: dict[bool, tuple[Array, Array]] = {}

    def __call__(self, i: int, x: Array) -> Array:
        s, t, far, d, b = self.s, self.t, is_far(self.s, i), head_dim(self.s, i), f"blk.{i}."
        if far:
            base, n = s.keys.get("rope.freq_base", 1e4), s.keys.get("rope.dimension_count", d)
            factors = t.get("rope_freqs.weight", 1.0)
        else:
            base, n, factors = s.keys["rope.freq_base_swa"], s.keys.get("rope.dimension_count_swa", d), 1.0

        def with_rope(name: str) -> Array:
            y = (x @ t[f"{b}{name}.weight"].T).reshape(len(x), -1, d)
            return turn(unit(y) * t[f"{b}{name}_norm.weight"], base, n, factors)

        if i < n_layer_kv(s):
            values = t.get(b + "attn_v.weight", t[b + "attn_k.weight"])
            self.seen[far] = with_rope("attn_k"), unit((x @ values.T).reshape(len(x), -1, d))
        q, (k, v) = with_rope("attn_q"), self.seen[far]
        k, v = (np.repeat(y, s.n_head // y.shape[1], 1) for y in (k, v))
        score = np.einsum("qhd,khd->hqk", q, k)
        ago = np.arange(len(x))[:, None] - np.arange(len(x))
        score[:, (ago < 0) | (ago >= (10**9 if far else s.keys["attention.sliding_window"]))] = -np.inf
        y = np.einsum("hqk,khd->qhd", softmax(score), v)
        return y.reshape(len(x), -1) @ t[b + "attn_output.weight"].T


def inputs_of_layers(s: Spec, t: dict[str, Array], ids: Array, x: Array) -> Array:
    """Per-layer embeddings, (T, n_layer, P)."""
    p = s.keys["embedding_length_per_layer_input"]
    own = t["per_layer_token_embd.weight"][ids].reshape(len(ids), s.n_layer, p) * math.sqrt(p)
    projected = (x @ t["per_layer_model_proj.weight"].T / math.sqrt(s.n_embd)).reshape(own.shape)
    return (unit(projected) * t["per_layer_proj_norm.weight"] + own) / math.sqrt(2)


def gated(t: dict[str, Array], b: str, own: Array, x: Array) -> Array:
    y = gelu(x @ t[b + "inp_gate.weight"].T) * own @ t[b + "proj.weight"].T
    return unit(y) * t[b + "post_norm.weight"]


def mixture(s: Spec, t: dict[str, Array], b: str, x: Array) -> Array:
    """MoE, row by row; x is not normalised."""
    out = np.zeros_like(x)
    n_ff, fused = s.keys["expert_feed_forward_length"], t.get(b + "ffn_gate_up_exps.weight")
    for row, y in zip(x, out, strict=True):
        router_input = unit(row) * t[b + "ffn_gate_inp.scale"] / math.sqrt(s.n_embd)
        chances = softmax(t[b + "ffn_gate_inp.weight"] @ router_input)
        best = np.argsort(-chances)[: s.n_expert_used]
        expert_input = unit(row) * t[b + "pre_ffw_norm_2.weight"]
        for e in best:
            if fused is not None:
                gate, up = fused[e, :n_ff], fused[e, n_ff:]
            else:
                gate, up = t[b + "ffn_gate_exps.weight"][e], t[b + "ffn_up_exps.weight"][e]
            inner = gelu(gate @ expert_input) * (up @ expert_input)
            share = chances[e] / chances[best].sum() * t[b + "ffn_down_exps.scale"][e]
            y += share * (t[b + "ffn_down_exps.weight"][e] @ inner)
    return out


def capped(s: Spec, x: Array, default: float) -> Array:
    cap = s.keys.get("final_logit_softcapping", default)
    return cap * np.tanh(x / cap) if cap else x


def gemma4(s: Spec, t: dict[str, Array], ids: Array) -> Array:
    def normed(name: str, x: Array) -> Array:
        return unit(x) * t[f"{name}.weight"]

    x = t["token_embd.weight"][ids] * math.sqrt(s.n_embd)
    own = inputs_of_layers(s, t, ids, x) if "per_layer_proj_norm.weight" in t else None
    attention = Attention(s, t)
    for i in range(s.n_layer):
        b = f"blk.{i}."
        x = x + normed(b + "post_attention_norm", attention(i, normed(b + "attn_norm", x)))
        y = normed(b + "ffn_norm", x)
        gate, up, down = (t[f"{b}ffn_{name}.weight"].T for name in ("gate", "up", "down"))
        y = gelu(y @ gate) * (y @ up) @ down
        if s.n_expert:
            y = normed(b + "post_ffw_norm_1", y) + normed(b + "post_ffw_norm_2", mixture(s, t, b, x))
        x = x + normed(b + "post_ffw_norm", y)
        if own is not None:
            x = x + gated(t, b, own[:, i], x)
        x = x * t.get(f"{b}layer_output_scale.weight", 1.0)
    return capped(s, normed("output_norm", x) @ t["token_embd.weight"].T, 0.0)


def gemma3n(s: Spec, t: dict[str, Array], ids: Array) -> Array:
    """Gemma3nTextModel; its AltUp streams come first: (A, T, n)."""
    a, scales = N_STREAMS, s.keys["activation_sparsity_scale"]

    def normed(name: str, x: Array) -> Array:
        return unit(x) * t[f"{name}.weight"]

    def sized(x: Array, like: Array) -> Array:
        return x * np.linalg.norm(like, axis=-1, keepdims=True) / np.linalg.norm(x, axis=-1, keepdims=True)

    def modalities(b: str, x: Array) -> Array:
        return np.tanh(normed(b + "altup_router_norm", x) / s.n_embd @ t[b + "altup_router.weight"].T)

    x = t["token_embd.weight"][ids] * math.sqrt(s.n_embd)
    own = inputs_of_layers(s, t, ids, x)
    hidden = np.stack([x, *(sized(x @ w.T, x) for w in t["altup_proj.weight"])])
    attention = Attention(s, t)
    for i in range(s.n_layer):
        b = f"blk.{i}."
        # (T, to, from)
        by = (modalities(b, hidden[0]) @ t[b + "altup_predict_coef.weight"].T).reshape(-1, a, a)
        guesses = hidden + np.einsum("tji,itn->jtn", by, hidden)
        x = normed(b + "attn_norm", guesses[0])
        laurel = x + normed(b + "laurel_post_norm", x @ t[b + "laurel_l.weight"].T @ t[b + "laurel_r.weight"].T)
        x = guesses[0] + normed(b + "post_attention_norm", attention(i, x))
        x = (x + laurel) / math.sqrt(2)
        y = normed(b + "ffn_norm", x)
        gate, up, down = (t[f"{b}ffn_{name}.weight"].T for name in ("gate", "up", "down"))
        opened = y @ gate
        if scales[i] > -math.inf:
            least = opened.mean(-1, keepdims=True) + scales[i] * opened.std(-1, ddof=1, keepdims=True)
            opened = np.maximum(opened - least, 0)
        x = x + normed(b + "post_ffw_norm", gelu(opened) * (y @ up) @ down)
        shares = modalities(b, x) @ t[b + "altup_correct_coef.weight"].T + 1
        hidden = guesses + shares.T[..., None] * (x - guesses[0])
        hidden[1:] += gated(t, b, own[:, i], hidden[0] * t[b + "altup_correct_scale.weight"])
    others = (sized(x @ w.T, hidden[0]) for x, w in zip(hidden[1:], t["altup_unembd_proj.weight"], strict=True))
    x = np.mean([hidden[0], *others], 0)
    return capped(s, normed("output_norm", x) @ t["token_embd.weight"].T, 30.0)


REFERENCE: dict[str, Callable[[Spec, dict[str, Array], Array], Array]] = {"gemma3n": gemma3n, "gemma4": gemma4}

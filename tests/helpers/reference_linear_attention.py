"""Recurrent layers of synthetic models in float64, token by token, after their papers."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
QWEN35 = ("qwen35", "qwen35moe", "qwen3next")
LFM2 = ("lfm2", "lfm2moe")
DELTA = {"ssm.conv_kernel": 4, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.state_size": 16}
DELTA |= {"ssm.inner_size": 64, "full_attention_interval": 2}
MAMBA = ("granitehybrid", "nemotron_h", "nemotron_h_moe", "falcon-h1", "mamba2")
OF_MAMBA = {"ssm.conv_kernel": 4, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.state_size": 32}
OF_MAMBA |= {"ssm.inner_size": 128}  # 64 elements each: llama.cpp requires twice as many
FLAT = ("ssm_a", "ssm_d", "ssm_dt.bias")  # tensor names without .weight


def attends(s: Any, layer: int) -> bool:
    if s.arch in ("mamba2", "falcon-h1"):
        return bool(s.arch == "falcon-h1")
    return bool(s.keys["attention.head_count_kv"][layer]) if s.arch in MAMBA else not keeps_state(s, layer)


def feeds(s: Any, layer: int) -> bool:
    if s.arch in ("nemotron_h", "nemotron_h_moe"):
        return bool(s.keys["feed_forward_length"][layer])
    return bool(s.arch != "mamba2")


def keeps_state(s: Any, layer: int) -> bool:
    if s.arch in ("mamba2", "falcon-h1"):
        return True
    if s.arch in ("nemotron_h", "nemotron_h_moe"):
        return not attends(s, layer) and not feeds(s, layer)
    if s.arch in MAMBA:
        return not attends(s, layer)
    if s.arch in QWEN35:
        return layer < s.n_layer and bool((layer + 1) % s.keys["full_attention_interval"])
    return s.arch in LFM2 and not s.keys["attention.head_count_kv"][layer]


def state_shapes(s: Any) -> dict[str, tuple[int, ...]]:
    if s.arch in LFM2:
        n = s.n_embd
        return {
            "shortconv.conv": (n, s.keys["shortconv.l_cache"]),
            "shortconv.in_proj": (3 * n, n),
            "shortconv.out_proj": (n, n),
        }
    taps, groups, heads, size = (s.keys[f"ssm.{key}"] for key in ("conv_kernel", *_SIZES))
    if s.arch in MAMBA:
        n = s.keys["ssm.inner_size"]
        columns = n + 2 * groups * size
        return {
            "ssm_in": (n + columns + heads, s.n_embd),
            "ssm_conv1d": (columns, taps),
            "ssm_dt.bias": (heads,),
            "ssm_a": (heads, 1),
            "ssm_d": (heads, 1),
            "ssm_out": (s.n_embd, n),
        } | ({} if "no ssm norm" in s.traits else {"ssm_norm": (groups, n // groups) if groups > 1 else (n,)})
    columns, n = (2 * groups + heads) * size, heads * size
    return {
        "ssm_conv1d": (columns, taps),
        "attn_qkv": (columns, s.n_embd),
        "attn_gate": (n, s.n_embd),
        **(
            {"ssm_ba": (2 * heads, s.n_embd)}
            if s.arch == "qwen3next"
            else {"ssm_alpha": (heads, s.n_embd), "ssm_beta": (heads, s.n_embd)}
        ),
        "ssm_dt.bias": (heads,),
        "ssm_a": (heads,),
        "ssm_norm": (size,),
        "ssm_out": (s.n_embd, n),
    }


_SIZES = ("group_count", "time_step_rank", "state_size")


def of_state(s: Any, t: dict[str, Array], b: str, x: Array) -> Array:
    """Recurrent layer: normalised rows x (T, n_embd) → (T, n_embd)."""
    if s.arch in MAMBA:
        return _mamba(s, t, b, x)
    return _short_conv(t, b, x) if s.arch in LFM2 else _delta_net(s, t, b, x)


def _convolved(x: Array, w: Array) -> Array:
    taps = w.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    return np.stack([(padded[i : i + taps] * w.T).sum(0) for i in range(len(x))])


def _short_conv(t: dict[str, Array], b: str, x: Array) -> Array:
    before, after, rows = np.split(x @ t[b + "shortconv.in_proj.weight"].T, 3, -1)
    return after * _convolved(before * rows, t[b + "shortconv.conv.weight"]) @ t[b + "shortconv.out_proj.weight"].T


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _delta_net(s: Any, t: dict[str, Array], b: str, x: Array) -> Array:
    groups, heads, size = (s.keys[f"ssm.{key}"] for key in _SIZES)
    mixed = _convolved(x @ t[b + "attn_qkv.weight"].T, t[b + "ssm_conv1d.weight"])
    mixed = mixed * _sigmoid(mixed)
    q, k, v = np.split(mixed, [groups * size, 2 * groups * size], -1)
    z = (x @ t[b + "attn_gate.weight"].T).reshape(len(x), heads, size)
    q, k = (y.reshape(len(x), groups, size) for y in (q, k))
    q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-5) for y in (q, k))
    v = v.reshape(len(x), heads, size)
    if s.arch == "qwen3next":  # transformers' modeling_qwen3_next.py: fix_query_key_value_ordering
        both = (x @ t[b + "ssm_ba.weight"].T).reshape(len(x), groups, -1)
        beta, alpha = (half.reshape(len(x), heads) for half in np.split(both, 2, -1))
        key_of = [h // (heads // groups) for h in range(heads)]
    else:
        beta, alpha = (x @ t[f"{b}ssm_{name}.weight"].T for name in ("beta", "alpha"))
        key_of = [h % groups for h in range(heads)]
    learned = _sigmoid(beta)
    fade = np.exp(t[b + "ssm_a"] * np.log1p(np.exp(alpha + t[b + "ssm_dt.bias"])))
    y = np.zeros_like(v)
    for h in range(heads):
        memory = np.zeros((size, size))  # from keys to values
        for i in range(len(x)):
            key = k[i, key_of[h]]
            memory = fade[i, h] * memory
            memory = memory + np.outer(key, learned[i, h] * (v[i, h] - key @ memory))
            y[i, h] = q[i, key_of[h]] @ memory / np.sqrt(size)
    y = y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-5) * t[b + "ssm_norm.weight"] * z * _sigmoid(z)
    return y.reshape(len(x), -1) @ t[b + "ssm_out.weight"].T


def _mamba(s: Any, t: dict[str, Array], b: str, x: Array) -> Array:
    """Mamba 2 as the loop over time of transformers' modeling_mamba2.py."""
    groups, heads, size = (s.keys[f"ssm.{key}"] for key in _SIZES)
    n = s.keys["ssm.inner_size"]
    gate, rows, steps = np.split(x @ t[b + "ssm_in.weight"].T, [n, 2 * n + 2 * groups * size], -1)
    mixed = _convolved(rows, t[b + "ssm_conv1d.weight"]) + t.get(b + "ssm_conv1d.bias", 0.0)
    mixed = mixed * _sigmoid(mixed)
    seen, keys, queries = np.split(mixed, [n, n + groups * size], -1)
    seen = seen.reshape(len(x), heads, -1)
    keys, queries = (y.reshape(len(x), groups, size) for y in (keys, queries))
    steps = np.log1p(np.exp(steps + t[b + "ssm_dt.bias"]))
    y = np.zeros_like(seen)
    for h in range(heads):
        group, rate = h // (heads // groups), t[b + "ssm_a"][h, 0]
        memory = np.zeros((seen.shape[2], size))
        for i in range(len(x)):
            memory = np.exp(rate * steps[i, h]) * memory + steps[i, h] * np.outer(seen[i, h], keys[i, group])
            y[i, h] = memory @ queries[i, group] + t[b + "ssm_d"][h, 0] * seen[i, h]
    y = y.reshape(len(x), n) * gate * _sigmoid(gate)
    if b + "ssm_norm.weight" in t:
        y = y.reshape(len(x), groups, -1)
        y = y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-5) * t[b + "ssm_norm.weight"]
    return y.reshape(len(x), n) @ t[b + "ssm_out.weight"].T

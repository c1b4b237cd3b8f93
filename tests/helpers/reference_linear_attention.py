"""Tensors of recurrent layers of synthetic models."""

from __future__ import annotations

from typing import Any

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

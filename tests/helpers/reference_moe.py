"""Mixture-of-experts layers of synthetic models in float64, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def mixture(s: Any, t: dict[str, Array], b: str, h: Array) -> Array:
    """MoE, row by row, in llama.cpp's order: softmax over all experts, top k, renormalise."""
    if s.arch == "llama4":
        return _weighted_inputs(s, t, b, h)
    if s.arch == "nemotron_h_moe":
        return _squared_experts(s, t, b, h)
    out, none = np.zeros_like(h), np.zeros(s.n_expert)
    oss = s.arch == "gpt-oss"
    sigmoid = (
        s.keys.get(
            "expert_gating_func", 2 if s.arch in ("glm4moe", "minimax-m2", "afmoe", "hy_v3", "cohere2moe") else 1
        )
        == 2
    )
    norm = s.arch not in ("olmoe", "qwen2moe", "deepseek") and s.keys.get("expert_weights_norm", True)
    times = s.keys.get("expert_weights_scale") or 1
    for row, y in zip(h, out, strict=True):
        odds = np.exp(t[b + "ffn_gate_inp.weight"] @ row + t.get(b + "ffn_gate_inp.bias", 0.0))
        odds /= odds + 1 if sigmoid else odds.sum()
        liked = odds + t.get(b + ("exp_probs_b" if s.arch == "hy_v3" else "exp_probs_b.bias"), 0.0)
        if (n_groups := s.keys.get("expert_group_count", 1)) > 1:
            groups = np.split(np.arange(s.n_expert), n_groups)
            groups.sort(key=lambda group: -np.sort(liked[group])[-2:].sum())
            liked[np.concatenate(groups[s.keys["expert_group_used_count"] :])] = -np.inf
        best = np.argsort(liked)[: -s.n_expert_used - 1 : -1]
        whole = odds[best].sum() if norm else 1
        if s.arch == "phimoe":
            odds[best], whole = _sparse_mixer(t[b + "ffn_gate_inp.weight"] @ row), 1
        for expert in best:
            gate, up, down = (t[f"{b}ffn_{name}_exps.weight"][expert] for name in ("gate", "up", "down"))
            of_gate, of_up, of_down = (t.get(f"{b}ffn_{n}_exps.bias", none)[expert] for n in ("gate", "up", "down"))
            gated, upper = gate @ row + of_gate, up @ row + of_up
            if oss:  # OpenAI's gpt_oss/torch/model.py: swiglu
                gated, upper = np.minimum(gated, 7), np.clip(upper, -7, 7) + 1
            gated = gated / (1 + np.exp(-gated * (1.702 if oss else 1)))
            y += odds[expert] / whole * times * (down @ (gated * upper) + of_down)
            if s.arch == "grovemoe":  # as in its authors' modeling_grove_moe.py
                chunk = expert // s.keys["experts_per_group"]
                gate, up, down = (t[f"{b}ffn_{name}_chexps.weight"][chunk] for name in ("gate", "up", "down"))
                gated = gate @ row
                inner = gated / (1 + np.exp(-gated)) * (up @ row)
                y += odds[expert] / whole * s.keys["expert_group_scale"] * (down @ inner)
    return out


def _sparse_mixer(scores: Array) -> list[float]:
    """Weights of the two best, by the function `sparsemixer` of transformers' modular_phimoe.py."""
    weights, left = [], scores.copy()
    for _ in range(2):
        own = left.max()
        masked = np.where((own - scores) / np.maximum(np.abs(scores), own) > 0.02, -np.inf, left)
        weights.append(1 / np.exp(masked - own).sum())
        left[left.argmax()] = -np.inf
    return weights


def _weighted_inputs(s: Any, t: dict[str, Array], b: str, h: Array) -> Array:
    """MoE of transformers' modeling_llama4.py: the sigmoids of a row's best logits multiply its experts' input."""
    out, logits = np.zeros_like(h), h @ t[b + "ffn_gate_inp.weight"].T
    for own, row, y in zip(logits, h, out, strict=True):
        for expert in np.argsort(own)[: -s.n_expert_used - 1 : -1]:
            gate, up, down = (t[f"{b}ffn_{name}_exps.weight"][expert] for name in ("gate", "up", "down"))
            x = row / (1 + np.exp(-own[expert]))
            gated = gate @ x
            y += down @ (gated / (1 + np.exp(-gated)) * (up @ x))
    return out


def _squared_experts(s: Any, t: dict[str, Array], b: str, h: Array) -> Array:
    """MoE of transformers' modeling_nemotron_h.py: sigmoid router, bias on the choice, no gates.

    Experts may read shorter rows.
    """
    odds = 1 / (1 + np.exp(-h @ t[b + "ffn_gate_inp.weight"].T))
    rows = h @ t[b + "ffn_latent_down.weight"].T if b + "ffn_latent_down.weight" in t else h
    out = np.zeros_like(rows)
    for own, row, y in zip(odds, rows, out, strict=True):
        best = np.argsort(own + t[b + "exp_probs_b.bias"])[: -s.n_expert_used - 1 : -1]
        whole = own[best].sum() if s.keys.get("expert_weights_norm") else 1
        for expert in best:
            inner = np.maximum(t[b + "ffn_up_exps.weight"][expert] @ row, 0) ** 2
            share = own[expert] / whole * (s.keys.get("expert_weights_scale") or 1)
            y += share * (t[b + "ffn_down_exps.weight"][expert] @ inner)
    return out @ t[b + "ffn_latent_up.weight"].T if b + "ffn_latent_up.weight" in t else out

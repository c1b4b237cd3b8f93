"""Mixture-of-experts layers of synthetic models in float64, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def mixture(s: Any, t: dict[str, Array], b: str, h: Array) -> Array:
    """MoE, row by row, in llama.cpp's order: softmax over all experts, top k, renormalise."""
    out = np.zeros_like(h)
    for row, y in zip(h, out, strict=True):
        odds = np.exp(t[b + "ffn_gate_inp.weight"] @ row)
        odds /= odds.sum()
        best = np.argsort(odds)[: -s.n_expert_used - 1 : -1]
        whole = odds[best].sum() if s.keys.get("expert_weights_norm", True) else 1
        for expert in best:
            share = odds[expert] / whole
            y += share * (s.keys.get("expert_weights_scale") or 1) * _expert(t, b, "exps", expert, row)
            if s.arch == "grovemoe":  # as in its authors' modeling_grove_moe.py
                chunk = expert // s.keys["experts_per_group"]
                y += share * s.keys["expert_group_scale"] * _expert(t, b, "chexps", chunk, row)
    return out


def _expert(t: dict[str, Array], b: str, kind: str, i: int, row: Array) -> Array:
    gate, up, down = (t[f"{b}ffn_{name}_{kind}.weight"][i] for name in ("gate", "up", "down"))
    gated = gate @ row
    return down @ (gated / (1 + np.exp(-gated)) * (up @ row))

"""Tensors of the MTP heads of synthetic models, beside those of a layer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.helpers.reference_traits import NEMOTRON_H

Array = np.ndarray[Any, Any]
LIKE = {"embed_tokens": "token_embd.weight", "shared_head_head": "output.weight"}


def of_nextn(s: Any) -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {"nextn.eh_proj": (s.n_embd, 2 * s.n_embd)}
    names = ["nextn.enorm", "nextn.hnorm", *([] if "no norm behind" in s.traits else ["nextn.shared_head_norm"])]
    if s.arch in NEMOTRON_H:
        names.append("post_attention_norm")
    if "head of its own" in s.traits:
        out |= {f"nextn.{name}": (s.n_vocab, s.n_embd) for name in ("embed_tokens", "shared_head_head")}
    return out | dict.fromkeys(names, (s.n_embd,))


def agreeing(name: str, values: Array, t: dict[str, Array], much: bool) -> Array:
    """Weights that make the next token depend mostly on the last one, as the MTP head predicts.

    `t`: the prefix of tensor names.
    """
    if name == "eh_proj":
        return np.concatenate([np.eye(len(values)), 0.3 * values[:, len(values) :]], 1)
    if name == "token_embd":
        return values * math.sqrt(values.shape[1])
    if name in LIKE:
        return t[LIKE[name]] + values
    small = name in ("attn_output", "attn_output_b", "ffn_down", "ffn_down_exps", "ffn_down_shexp", "ssm_out")
    return values * ((0.1 if much else 0.3) if small else 1)

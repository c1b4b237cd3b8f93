"""Weights of synthetic models whose MTP head predicts as the model does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
LIKE = {"embed_tokens": "token_embd.weight", "shared_head_head": "output.weight"}


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

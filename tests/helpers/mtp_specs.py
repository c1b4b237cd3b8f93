"""Synthetic models with an MTP head, and their logits in float64.

An MTP head is a model of one layer. Its embeddings combine a token with the hidden state of the
token before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tests.helpers.architecture_specs import COHERE_MOE, MAPPED, PLAIN, QKV
from tests.helpers.mla_specs import DEEPSEEK, LATENT
from tests.helpers.reference_model import Array, Spec, reference
from tests.helpers.reference_rope import plain
from tests.helpers.reference_traits import LAYER_NORM, NEMOTRON_H

LITE = {name: value for name, value in DEEPSEEK.keys.items() if name != "attention.q_lora_rank"}
OF_NEMOTRON = {  # its head has attention and an FFN, and its last norm has an epsilon of its own
    "attention.head_count_kv": [0, 0, 2, 0, 0, 2],
    "feed_forward_length": [0, 96, 0, 0, 96, 96],
    "attention.layer_norm_epsilon": 0.05,
}
OTHER_PATTERN = {"attention.sliding_window_pattern": [False, True, True, True]}


def _with(spec: Spec, keys: dict[str, Any] | None = None, n_mtp: int = 1, **more: Any) -> Spec:
    return replace(spec, n_mtp=n_mtp, keys=spec.keys | (keys or {}), **more)


NEXTN = {
    "qwen35": _with(PLAIN["qwen35"]),
    "qwen35, no norm behind": _with(PLAIN["qwen35"], n_layer=3, untied=True, traits=("no norm behind",)),
    "qwen35, a head of its own": _with(PLAIN["qwen35"], untied=True, traits=("head of its own",)),
    "qwen35moe": _with(PLAIN["qwen35moe"]),
    "qwen35moe, a head of its own": _with(PLAIN["qwen35moe"], n_layer=3, traits=("head of its own",)),
    "qwen3next": _with(PLAIN["qwen3next"], untied=True),
    "qwen3next, no norm behind": _with(PLAIN["qwen3next"], traits=("no norm behind", "vectors")),
    "deepseek2": _with(DEEPSEEK, n_layer=2),
    "deepseek2 balanced, no norm behind": _with(
        LATENT["deepseek2 balanced"], n_layer=2, traits=("balanced", "no norm behind")
    ),
    "deepseek2 together": _with(LATENT["deepseek2 together"], n_layer=2, untied=False),
    "deepseek2 lite": _with(replace(DEEPSEEK, keys=LITE), n_layer=2),
    "deepseek2 in groups": _with(LATENT["deepseek2 in groups"], n_layer=2, traits=("balanced", "head of its own")),
    "glm4moe": _with(PLAIN["glm4moe"]),
    "glm4moe 355B": _with(PLAIN["glm4moe"], n_layer=2, biases=QKV, traits=("head norms", "head of its own")),
    "glm4moe, two blocks": _with(PLAIN["glm4moe unnormed"], n_layer=2, n_mtp=2, untied=False),
    "hy_v3": _with(PLAIN["hy_v3"], n_layer=2),
    "hy_v3, a head of its own": _with(PLAIN["hy_v3"], n_layer=2, untied=False, traits=("head of its own",)),
    # As layers of their numbers, heads would have a sliding window, or no RoPE.
    "cohere2moe": _with(COHERE_MOE),
    "cohere2moe, no norm behind": _with(COHERE_MOE, OTHER_PATTERN, n_layer=4, traits=("no norm behind",)),
    "cohere2moe, a head of its own": _with(COHERE_MOE, untied=True, traits=("head of its own",)),
    "nemotron_h_moe": _with(PLAIN["nemotron_h_moe"], OF_NEMOTRON),
    "nemotron_h_moe of shorter rows": _with(PLAIN["nemotron_h_moe of shorter rows"], OF_NEMOTRON, untied=False),
}

LING = MAPPED["bailingmoe3"]
MAPPED_NEXTN = {  # llama.cpp is the only reference of these
    "deepseek32": _with(MAPPED["deepseek32"]),  # whose layers choose 4 cells, and its head none
    "bailingmoe3": _with(
        LING, {"attention.head_count_kv": [0, 1, 0, 1], "swiglu_clamp_exp": [*LING.keys["swiglu_clamp_exp"], 0.2]}
    ),
}


def said_by_layers(s: Spec, t: dict[str, Array], ids: Array) -> Array:
    """Hidden states (T, n_embd) of the last layer, normalised."""
    window = s.keys["attention.sliding_window"] if s.arch == "cohere2moe" else 0

    def reach(layer: int) -> int:
        return window if window and layer % 4 else 0

    return _normed(s, _rows(s, t, ids, reach), t["output_norm.weight"])


def said_by_model(s: Spec, t: dict[str, Array], ids: Array) -> Array:
    """Logits (T, n_vocab) of the layers, without an MTP head."""
    head = t.get("output.weight", t["token_embd.weight"])
    logits: Array = said_by_layers(s, t, ids) @ head.T * s.keys.get("logit_scale", 1.0)
    return logits


def said_by_block(s: Spec, t: dict[str, Array], ids: Array, before: Array) -> tuple[Array, Array]:
    """Logits (T, n_vocab) and hidden states (T, n_embd) of the MTP head.

    before (T, n_embd): the hidden states of the tokens before. A draft continues from the returned
    ones.
    """
    b = f"blk.{s.n_layer}."
    n = b + "nextn."
    embedding, head = (
        t.get(f"{n}{name}.weight", fallback)
        for name, fallback in (
            ("embed_tokens", t["token_embd.weight"]),
            ("shared_head_head", t.get("output.weight", t["token_embd.weight"])),
        )
    )
    tokens = _normed(s, embedding[ids], t[n + "enorm.weight"])
    both = np.concatenate([tokens, _normed(s, before, t[n + "hnorm.weight"])], 1)
    alone = {name.replace(b, "blk.0."): values for name, values in t.items() if name.startswith(b)}
    alone["token_embd.weight"] = both @ t[n + "eh_proj.weight"].T
    keys = s.keys | {"leading_dense_block_count": 0, "full_attention_interval": 1}
    one = replace(s, n_layer=1, n_mtp=0, keys=keys)
    if s.arch in NEMOTRON_H:  # a layer is a single sublayer there: the head is two of them
        alone |= {name.replace("blk.0.", "blk.1."): values for name, values in alone.items() if ".0.ffn" in name}
        alone |= {"blk.1.exp_probs_b.bias": alone["blk.0.exp_probs_b.bias"]}
        alone |= {"blk.1.attn_norm.weight": alone["blk.0.post_attention_norm.weight"]}
        one = replace(one, n_layer=2, keys=keys | {"attention.head_count_kv": [2, 0], "feed_forward_length": [0, 96]})
    rows = _rows(one, alone, np.arange(len(ids)), lambda layer: 0)
    behind = t.get(n + "shared_head_norm.weight", t["output_norm.weight"])
    if s.arch in NEMOTRON_H:
        away = rows - rows.mean(-1, keepdims=True)
        rows = away / np.sqrt(away.var(-1, keepdims=True) + s.keys["attention.layer_norm_epsilon"]) * behind
    else:
        rows = _normed(s, rows, behind)
    return rows @ head.T * s.keys.get("logit_scale", 1.0), rows


def _rows(s: Spec, t: dict[str, Array], ids: Array, window: Any) -> Array:
    """Output (T, n_embd) of the last layer."""
    bare = replace(s, traits=(*s.traits, "bare"))
    return reference(bare, t, ids, plain(s), window, s.d**-0.5, (0, 0))


def _normed(s: Spec, x: Array, w: Array) -> Array:
    if s.arch in LAYER_NORM:
        x = x - x.mean(-1, keepdims=True)
    y: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w
    return y

"""Synthetic models with an MTP head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tests.helpers.architecture_specs import COHERE_MOE, MAPPED, PLAIN, QKV
from tests.helpers.mla_specs import DEEPSEEK, LATENT
from tests.helpers.reference_model import Spec

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
    "qwen35, a head of its own": _with(
        PLAIN["qwen35"],
        untied=True,
        traits=(
            "embed_tokens",
            "shared_head_head",
        ),
    ),
    "qwen35moe": _with(PLAIN["qwen35moe"]),
    "qwen35moe, a head of its own": _with(
        PLAIN["qwen35moe"],
        n_layer=3,
        traits=(
            "embed_tokens",
            "shared_head_head",
        ),
    ),
    "qwen3next": _with(PLAIN["qwen3next"], untied=True),
    "qwen3next, no norm behind": _with(PLAIN["qwen3next"], traits=("no norm behind", "vectors")),
    "deepseek2": _with(DEEPSEEK, n_layer=2),
    "deepseek2 balanced, no norm behind": _with(
        LATENT["deepseek2 balanced"], n_layer=2, traits=("balanced", "no norm behind")
    ),
    "deepseek2 together": _with(LATENT["deepseek2 together"], n_layer=2, untied=False),
    "deepseek2 lite": _with(replace(DEEPSEEK, keys=LITE), n_layer=2),
    "deepseek2 in groups": _with(
        LATENT["deepseek2 in groups"], n_layer=2, traits=("balanced", "embed_tokens", "shared_head_head")
    ),
    "glm4moe": _with(PLAIN["glm4moe"]),
    "glm4moe 355B": _with(
        PLAIN["glm4moe"],
        n_layer=2,
        biases=QKV,
        traits=("attn_q_norm", "attn_k_norm", "embed_tokens", "shared_head_head"),
    ),
    "glm4moe, two blocks": _with(PLAIN["glm4moe unnormed"], n_layer=2, n_mtp=2, untied=False),
    "hy_v3": _with(PLAIN["hy_v3"], n_layer=2),
    "hy_v3, a head of its own": _with(
        PLAIN["hy_v3"],
        n_layer=2,
        untied=False,
        traits=(
            "embed_tokens",
            "shared_head_head",
        ),
    ),
    # As layers of their numbers, heads would have a sliding window, or no RoPE.
    "cohere2moe": _with(COHERE_MOE),
    "cohere2moe, no norm behind": _with(COHERE_MOE, OTHER_PATTERN, n_layer=4, traits=("no norm behind",)),
    "cohere2moe, a head of its own": _with(
        COHERE_MOE,
        untied=True,
        traits=(
            "embed_tokens",
            "shared_head_head",
        ),
    ),
    "nemotron_h_moe": _with(PLAIN["nemotron_h_moe"], OF_NEMOTRON),
    "nemotron_h_moe of shorter rows": _with(PLAIN["nemotron_h_moe of shorter rows"], OF_NEMOTRON, untied=False),
}

LING, GLM, QWEN, V4 = (MAPPED[name] for name in ("bailingmoe3", "glm5-next", "qwen4exp", "deepseek4"))
MAPPED_NEXTN = {  # llama.cpp is the only reference of these
    "step35": _with(
        MAPPED["step35"],
        {"attention.head_count": [2, 4, 4, 2, 4], "attention.head_count_kv": [1, 2, 2, 1, 2]}
        | {"swiglu_clamp_exp": [0.0, 0.0, 0.3, 0.2, 0.0], "swiglu_clamp_shexp": [0.0, 0.2, 0.0, 0.4, 0.0]}
        | {"attention.sliding_window_pattern": [False, True, True, False, True]},
    ),
    "mimo2": _with(MAPPED["mimo2"], {"attention.sliding_window_pattern": [False, True, True, False, True]}, fused=True),
    # whose layers choose 4 cells, and its head none
    **{name: _with(MAPPED[name]) for name in ("deepseek32", "glm-dsa")},
    "bailingmoe3": _with(
        LING, {"attention.head_count_kv": [0, 1, 0, 1], "swiglu_clamp_exp": [*LING.keys["swiglu_clamp_exp"], 0.2]}
    ),
    "glm5-next": _with(
        GLM, {"attention.head_count_kv": [0, 1, 0, 1], "swiglu_clamp_exp": [*GLM.keys["swiglu_clamp_exp"], 0.2]}
    ),
    "qwen4exp": _with(QWEN, {"attention.compress_ratios": [0, 2, 0, 2, 2]}, traits=(*QWEN.traits, "no norm behind")),
    "deepseek4": _with(
        V4,
        {"attention.compress_ratios": np.array([0, 4, 128, 4, 0], np.uint32)}
        | {"swiglu_clamp_exp": [0.5, 0.3, 0.2, 0.4, 0.3]},
    ),
}

"""Specs of synthetic models with multi-head latent attention (MLA)."""

from __future__ import annotations

from dataclasses import replace

from tests.helpers.reference_model import Spec

DENSE_FIRST = {"leading_dense_block_count": 1, "expert_shared_count": 2, "expert_weights_scale": 1.75}
OF_LATENT = {"attention.kv_lora_rank": 32, "rope.dimension_count": 8, "expert_weights_norm": False}
# weights of keys and values in one tensor
TOGETHER = OF_LATENT | {"attention.key_length": 40, "attention.value_length": 16}
APART = OF_LATENT | {
    "attention.head_count_kv": 1,
    "attention.key_length": 40,
    "attention.value_length": 32,
    "attention.key_length_mla": 40,
    "attention.value_length_mla": 16,
}
GROUPS = {"expert_group_count": 4, "expert_group_used_count": 2}
DEEPSEEK = Spec(
    "deepseek2",
    n_layer=3,
    n_head_kv=4,
    n_ff=32,
    n_expert=8,
    n_expert_used=3,
    untied=True,
    keys=DENSE_FIRST | APART | {"attention.q_lora_rank": 32},
)
LATENT = {
    "deepseek2": DEEPSEEK,
    "deepseek2 balanced": replace(
        DEEPSEEK, traits=("balanced",), keys=DEEPSEEK.keys | {"expert_gating_func": 2, "expert_weights_norm": True}
    ),
    "mistral4": replace(DEEPSEEK, arch="mistral4"),
    "deepseek2 together": replace(DEEPSEEK, keys=DENSE_FIRST | TOGETHER | {"attention.q_lora_rank": 32}),
    "deepseek2 lite": replace(DEEPSEEK, n_layer=26, keys=DENSE_FIRST | APART),
    "deepseek2 lite, together": replace(DEEPSEEK, n_layer=26, keys=DENSE_FIRST | TOGETHER),
    "deepseek2 in groups": replace(
        DEEPSEEK,
        traits=("balanced",),
        keys=DEEPSEEK.keys | GROUPS | {"expert_gating_func": 2, "expert_weights_norm": True},
    ),
    "deepseek2 in softmax groups": replace(DEEPSEEK, keys=DEEPSEEK.keys | GROUPS),
    "deepseek2 of odd heads": replace(
        DEEPSEEK,
        n_ff=20,
        keys=DEEPSEEK.keys
        | {"attention.kv_lora_rank": 40, "attention.key_length": 48}
        | {"attention.value_length": 40, "attention.value_length_mla": 24},
    ),
    "minicpm3": Spec("minicpm3", n_head_kv=4, keys=TOGETHER | {"attention.q_lora_rank": 32}),
    "plm": Spec("plm", n_head_kv=4, keys=TOGETHER),
}

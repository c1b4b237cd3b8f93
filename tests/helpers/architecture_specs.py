"""Specs of synthetic models of every architecture, without RoPE scaling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tests.helpers.mla_specs import DENSE_FIRST, GROUPS, LATENT
from tests.helpers.reference_model import Spec

DELTA = {"ssm.conv_kernel": 4, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.state_size": 16}
DELTA |= {"ssm.inner_size": 64, "full_attention_interval": 2}
OF_MAMBA = {"ssm.conv_kernel": 4, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.state_size": 32}
OF_MAMBA |= {"ssm.inner_size": 128}  # 64 elements each: llama.cpp requires twice as many
OF_XIELU = {"xielu.alpha_p": [0.8, 0.3], "xielu.alpha_n": [0.5, 1.1], "xielu.beta": 0.5, "xielu.eps": -1e-6}
SIX: dict[str, Any] = {"n_expert": 6, "n_expert_used": 2}
OF_EXPERTS = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
GPT_OSS = Spec(
    "gpt-oss",
    n_embd=96,
    n_head=4,
    head_dim=32,
    n_ff=64,
    n_expert=6,
    n_expert_used=3,
    untied=True,
    biases=("attn_q", "attn_k", "attn_v", "attn_output", *OF_EXPERTS),
    keys={"attention.sliding_window": 8},
)
SCALES = {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.07, "logit_scale": 8.0}

ALL_BIASES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output")
QKV, NORMS = ("attn_q", "attn_k", "attn_v"), ("attn_norm", "ffn_norm", "output_norm")
OF_PHI2 = ("attn_norm", "output_norm", "attn_qkv", "attn_output", "ffn_up", "ffn_down", "output")
OF_NEOX = (*NORMS, "attn_qkv", "attn_output", "ffn_up", "ffn_down")
SECTIONS = {"rope.dimension_sections": [3, 3, 2, 0]}  # of a head's pairs: all rotate alike for text
QWEN35_ROPE = {"rope.dimension_count": 16, "rope.dimension_sections": [3, 3, 2, 0]}
OF_FALCON = ("attn_norm", "attn_norm_2", "output_norm")
OF_DECI = {  # second layer: one matrix; third and last: no attention; fourth: nothing
    "attention.head_count": [4, 4, 0, 0, 4, 0],
    "attention.head_count_kv": [2, 0, 0, 0, 2, 0],
    "feed_forward_length": [96, 96, 96, 0, 96, 96],
}
NEMOTRON_KEYS = OF_MAMBA | {  # layers: recurrent, FFN, attention, recurrent, FFN
    "attention.head_count_kv": [0, 0, 2, 0, 0],
    "feed_forward_length": [0, 96, 0, 0, 96],
    "attention.layer_norm_epsilon": 1e-5,  # required by llama.cpp
    "rope.dimension_count": 78,  # its converter derives it from other sizes; nothing is rotated
}
LFM2_KEYS = {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2, 0, 0]}
OF_EXPERT_KEYS: dict[str, dict[str, Any]] = {
    "olmoe": {},
    "qwen2moe": {"expert_shared_feed_forward_length": 64},
    "ernie4_5-moe": {
        "expert_shared_feed_forward_length": 32,
        "leading_dense_block_count": 1,
        "interleave_moe_layer_step": 1,
    },
    "deepseek": DENSE_FIRST,
    "bailingmoe": {"expert_shared_count": 1, "expert_weights_norm": False, "leading_dense_block_count": 0},
    "bailingmoe of one weight": {"expert_shared_count": 1, "expert_weights_norm": True, "leading_dense_block_count": 0},
    "bailingmoe2": DENSE_FIRST
    | GROUPS
    | {
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_shared_feed_forward_length": 32,
        "rope.dimension_count": 8,
    },
    "dots1": DENSE_FIRST | {"expert_gating_func": 1, "expert_weights_norm": False},
    "glm4moe": DENSE_FIRST | {"expert_weights_norm": True, "rope.dimension_count": 8},
    "glm4moe unnormed": DENSE_FIRST | {"expert_gating_func": 2, "expert_weights_norm": False},
    "exaone-moe": DENSE_FIRST
    | {"expert_shared_count": 1, "expert_gating_func": 2, "expert_weights_norm": True, "attention.sliding_window": 64},
    "afmoe": DENSE_FIRST | {"expert_weights_norm": True, "attention.sliding_window": 64},
    "hy_v3": {"leading_dense_block_count": 1, "expert_weights_norm": True, "expert_shared_feed_forward_length": 64},
    "minimax-m2": {"expert_gating_func": 2, "expert_feed_forward_length": 96, "rope.dimension_count": 8},
}
COHERE_MOE = Spec(  # the first of every four layers has full attention
    "cohere2moe",
    n_layer=6,
    n_ff=32,
    **SIX,
    keys=DENSE_FIRST
    | {"expert_weights_norm": True, "logit_scale": 0.25}
    | {"attention.sliding_window": 4, "attention.sliding_window_pattern": [i % 4 > 0 for i in range(6)]},
)
LLAMA4 = Spec(  # chunks of 7, and a fourth layer without RoPE; every other layer is dense
    "llama4",
    n_layer=6,
    n_ff=32,
    n_expert=6,
    n_expert_used=1,
    untied=True,
    keys={"interleave_moe_layer_step": 2, "attention.chunk_size": 7, "attention.temperature_length": 9},
)
OF_HUNYUAN = {"expert_shared_feed_forward_length": 64, "expert_feed_forward_length": 96}
PLAIN = {
    "llama": Spec(),
    "one kv head": Spec(n_head_kv=1),
    "heads without groups": Spec(n_head_kv=4),
    "head 80": Spec(n_embd=160, n_head=2, n_head_kv=1),
    "head 10": Spec(n_embd=40, n_head=4, n_head_kv=2),
    "key_length": Spec(n_embd=48, head_dim=32),
    "untied": Spec(untied=True),
    "untied, all biases": Spec(untied=True, biases=ALL_BIASES),
    "qwen2": Spec("qwen2", biases=("attn_q", "attn_k", "attn_v"), keys={"attention.sliding_window": 8}),
    "qwen3": Spec("qwen3", n_embd=72, n_head=4, head_dim=32),
    "phi3": Spec("phi3", fused=True, untied=True, keys={"attention.sliding_window": 8}),
    "phimoe": Spec(
        "phimoe",
        n_ff=32,
        n_expert=16,
        n_expert_used=2,
        untied=True,
        biases=(*QKV, *NORMS, "attn_output", "output"),
        keys={"attention.layer_norm_epsilon": None, "attention.layer_norm_rms_epsilon": 1e-5},
    ),
    "phi3 apart": Spec("phi3", untied=True),
    "phi3 partial rope": Spec("phi3", fused=True, head_dim=32, keys={"rope.dimension_count": 24}),
    "f16, odd sizes": Spec(n_embd=50, head_dim=10, n_ff=75, n_vocab=67, dtype="f16"),
    "f16 norms": Spec(dtype="f16", norm_dtype="f16"),
    "bf16": Spec(n_embd=80, head_dim=16, dtype="bf16", norm_dtype="bf16"),
    "heads per layer": Spec(
        keys={"attention.head_count": [4, 4], "attention.head_count_kv": [2, 2], "feed_forward_length": [96, 96]}
    ),
    "mixtral": Spec(n_expert=4, n_expert_used=2),
    "mixtral, experts of 172": Spec(n_expert=4, n_expert_used=2, n_ff=172),
    "mixtral of f16, experts of 172": Spec(n_expert=4, n_expert_used=2, n_ff=172, dtype="f16"),
    "mixtral of bf16, experts of 75": Spec(n_embd=40, n_expert=4, n_expert_used=2, n_ff=75, dtype="bf16"),
    "qwen3moe, experts of 1": Spec("qwen3moe", n_embd=72, head_dim=16, n_ff=1, n_expert=3, n_expert_used=2),
    "gpt-oss, experts of 52": replace(GPT_OSS, n_embd=88, n_ff=52),
    "qwen3moe": Spec("qwen3moe", n_head=4, head_dim=32, n_ff=32, n_expert=16, n_expert_used=5),
    "one expert": Spec(n_expert=3, n_expert_used=1),
    "all experts, f16": Spec(n_expert=3, n_expert_used=3, dtype="f16"),
    "all experts, bf16": Spec(n_expert=3, n_expert_used=3, dtype="bf16"),
    "gpt-oss": GPT_OSS,
    "llama4": LLAMA4,
    "llama4 of more experts": replace(LLAMA4, n_expert_used=2, keys=LLAMA4.keys | {"interleave_moe_layer_step": 1}),
    "llama4 of 128 experts": replace(LLAMA4, n_layer=4, n_expert=128),
    "granite": Spec("granite", keys=SCALES),
    "granite without scales": Spec("granite", keys={"embedding_scale": 0.0, "logit_scale": 0.0}),
    "granitemoe": Spec("granitemoe", n_expert=6, n_expert_used=3, keys=SCALES),
    "granitemoe shared": Spec(
        "granitemoe", n_expert=4, n_expert_used=2, keys=SCALES | {"expert_shared_feed_forward_length": 64}
    ),
    "smollm3": Spec("smollm3", n_layer=5),
    "ernie4_5": Spec("ernie4_5", untied=True, biases=("attn_output",)),
    "mistral3": Spec("mistral3"),
    "minicpm": Spec("minicpm", keys=SCALES),
    "internlm2": Spec("internlm2", untied=True),
    "qwen2vl": Spec("qwen2vl", keys=SECTIONS),
    "qwen3vl": Spec("qwen3vl", keys=SECTIONS),
    "qwen3vlmoe": Spec("qwen3vlmoe", n_ff=32, **SIX, keys=SECTIONS),
    "exaone": Spec("exaone"),
    "exaone4": Spec("exaone4", head_dim=16),
    "seed_oss": Spec("seed_oss", biases=QKV),
    "olmo2": Spec("olmo2", untied=True),
    "glm4": Spec("glm4", fused=True, biases=("attn_qkv",), keys={"rope.dimension_count": 8}),
    "glm4 of pictures": Spec("glm4", fused=True, untied=True, keys=SECTIONS),
    "arcee": Spec("arcee"),
    "deci": Spec("deci", n_layer=6, untied=True, keys=OF_DECI),
    "cogvlm": Spec("cogvlm", n_head_kv=4, fused=True, untied=True),
    "xverse": Spec("xverse", untied=True),
    "chatglm": Spec("chatglm", fused=True, untied=True, biases=("attn_qkv",), keys={"rope.dimension_count": 8}),
    "maincoder": Spec("maincoder", head_dim=32),
    "paddleocr": Spec("paddleocr", keys=SECTIONS),
    "pangu-embedded": Spec("pangu-embedded", biases=(*QKV, "attn_output")),
    "jais2": Spec("jais2", biases=(*QKV, *NORMS, "attn_output", "ffn_up", "ffn_down")),
    "codeshell": Spec("codeshell", fused=True, untied=True, biases=OF_NEOX),
    "falcon": Spec("falcon", n_head_kv=1, fused=True, biases=OF_FALCON),
    "falcon 40B": Spec("falcon", fused=True, untied=True, biases=OF_FALCON, traits=("attn_norm", "attn_norm_2")),
    "mellum": Spec("mellum", n_ff=32, **SIX, untied=True),
    "gemma": Spec("gemma", head_dim=32),
    "command-r": Spec("command-r", keys={"logit_scale": 0.0625}),
    "stablelm": Spec(  # the converter writes the second key, which is unused
        "stablelm",
        untied=True,
        biases=(*QKV, *NORMS),
        keys={"rope.dimension_count": 4, "use_parallel_residual": True},
        traits=("ffn_norm",),
    ),
    "stablelm with one norm": Spec("stablelm", untied=True, biases=NORMS),
    "orion": Spec("orion", untied=True, biases=NORMS),
    "starcoder2": Spec("starcoder2", biases=(*QKV, *NORMS, "attn_output", "ffn_up", "ffn_down")),
    "nemotron": Spec("nemotron", untied=True, biases=NORMS, keys={"rope.dimension_count": 8}),
    "phi2": Spec("phi2", fused=True, untied=True, biases=OF_PHI2, keys={"rope.dimension_count": 8}),
    "gpt2": Spec("gpt2", n_head_kv=4, fused=True, biases=OF_NEOX),
    "starcoder": Spec("starcoder", n_head_kv=1, fused=True, untied=True, biases=OF_NEOX),
    "gptneox": Spec("gptneox", fused=True, untied=True, biases=OF_NEOX, keys={"use_parallel_residual": True}),
    "gptneox, one after the other": Spec(
        "gptneox", fused=True, untied=True, biases=OF_NEOX, keys={"use_parallel_residual": False}
    ),
    **{
        name: Spec(
            name.split()[0],
            n_layer=3,
            n_head_kv=4 if name in ("olmoe", "dots1") else 2,  # llama.cpp loads no others
            n_expert=8,
            n_expert_used=3,
            untied=True,
            fused=name == "bailingmoe2",
            keys=keys,
        )
        for name, keys in OF_EXPERT_KEYS.items()
    },
    "qwen35": Spec("qwen35", n_layer=4, head_dim=32, keys=DELTA | QWEN35_ROPE),
    "qwen35 with a state last": Spec("qwen35", n_layer=3, head_dim=32, untied=True, keys=DELTA | QWEN35_ROPE),
    "qwen35moe": Spec(
        "qwen35moe",
        n_layer=4,
        head_dim=32,
        n_ff=32,
        **SIX,
        keys=DELTA | QWEN35_ROPE | {"expert_shared_feed_forward_length": 64},
    ),
    "qwen3next": Spec(
        "qwen3next",
        n_layer=4,
        head_dim=32,
        n_ff=32,
        **SIX,
        keys=DELTA | QWEN35_ROPE | {"expert_shared_feed_forward_length": 64},
    ),
    "lfm2": Spec("lfm2", n_layer=4, keys=LFM2_KEYS),
    "lfm2moe": Spec(
        "lfm2moe", n_layer=4, n_ff=32, **SIX, keys=LFM2_KEYS | {"leading_dense_block_count": 1, "expert_gating_func": 2}
    ),
    "granitehybrid": Spec(
        "granitehybrid",
        n_layer=4,
        biases=("ssm_conv1d",),
        keys=OF_MAMBA | SCALES | {"attention.head_count_kv": [0, 2, 0, 0], "rope.scaling.finetuned": False},
    ),
    "granitehybrid that turns": Spec(
        "granitehybrid",
        biases=("ssm_conv1d",),
        keys=OF_MAMBA | {"ssm.group_count": 1, "attention.head_count_kv": [0, 2]},
    ),
    "granitehybrid of experts": Spec(
        "granitehybrid",
        n_layer=3,
        biases=("ssm_conv1d",),
        **SIX,
        keys=OF_MAMBA | SCALES | {"attention.head_count_kv": [0, 2, 0], "expert_shared_feed_forward_length": 64},
    ),
    "nemotron_h": Spec("nemotron_h", n_layer=5, head_dim=32, untied=True, biases=("ssm_conv1d",), keys=NEMOTRON_KEYS),
    "nemotron_h that attends last": Spec(
        "nemotron_h",
        n_layer=4,
        untied=True,
        biases=("ssm_conv1d",),
        keys=NEMOTRON_KEYS | {"attention.head_count_kv": [0, 0, 0, 2], "feed_forward_length": [0, 96, 0, 0]},
    ),
    **{
        f"nemotron_h_moe{name}": Spec(
            "nemotron_h_moe",
            n_layer=5,
            head_dim=32,
            n_ff=32,
            **SIX,
            untied=True,
            biases=("ssm_conv1d",),
            keys=NEMOTRON_KEYS | {"expert_weights_scale": 2.5, "expert_shared_feed_forward_length": 64} | keys,
        )
        for name, keys in {
            "": {"expert_weights_norm": True},
            " of shorter rows": {"expert_weights_norm": False, "moe_latent_size": 32},
        }.items()
    },
    "falcon-h1": Spec(
        "falcon-h1", n_layer=3, head_dim=32, untied=True, biases=("ssm_conv1d",), keys=OF_MAMBA, traits=("ssm_norm",)
    ),
    "falcon-h1 without a norm": Spec("falcon-h1", biases=("ssm_conv1d",), keys=OF_MAMBA),
    "mamba2": Spec(
        "mamba2",
        n_layer=3,
        biases=("ssm_conv1d",),
        keys=OF_MAMBA | {"attention.head_count": 0, "attention.head_count_kv": None, "feed_forward_length": 0},
    ),
    **LATENT,
    "hunyuan-dense": Spec("hunyuan-dense"),
    "hunyuan_vl": Spec("hunyuan_vl", keys=SECTIONS),
    "hunyuan-moe": Spec("hunyuan-moe", **SIX, keys=OF_HUNYUAN),
    "apertus": Spec("apertus", untied=True, keys=OF_XIELU),
    "command-r plus": Spec(
        "command-r",
        traits=(
            "attn_q_norm",
            "attn_k_norm",
        ),
        keys={"logit_scale": 0.0625},
    ),
    "stablelm 12B": Spec(
        "stablelm",
        untied=True,
        biases=("attn_norm", "output_norm"),
        traits=("attn_q_norm", "attn_k_norm"),
        keys={"rope.dimension_count": 4},
    ),
    "grovemoe": Spec(
        "grovemoe",
        n_ff=48,
        n_expert=8,
        n_expert_used=3,
        untied=True,
        keys={"expert_chunk_feed_forward_length": 32, "experts_per_group": 2, "expert_group_scale": 0.3},
    ),
    "no kv heads named": Spec(n_head_kv=4, keys={"attention.head_count_kv": None}),
}
OTHER_SCALES = {"embedding_scale": 6.0, "residual_scale": 0.3, "attention.scale": 0.2, "logit_scale": 3.0}
IRREGULAR = {"attention.sliding_window": 4, "attention.sliding_window_pattern": [False, True, True, False]}
OF_MAMBA_1 = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16, "ssm.time_step_rank": 8}
LATENT_ROW = {
    "attention.head_count_kv": 1,
    "attention.key_length": 40,
    "attention.value_length": 32,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 16,
    "attention.kv_lora_rank": 32,
    "rope.dimension_count": 8,
    "expert_feed_forward_length": 32,
    "expert_shared_count": 1,
}
INDEXER = {"attention.indexer.head_count": 8, "attention.indexer.key_length": 64, "attention.indexer.top_k": 4}
OF_RWKV = ("attn_norm", "attn_norm_2", "token_embd_norm", "output_norm", "time_mix_ln")
RWKV = {"wkv.head_size": 16, "attention.head_count": 0, "attention.head_count_kv": None}
RWKV6 = RWKV | {"time_mix_extra_dim": 8, "time_decay_extra_dim": 12}
RWKV7 = RWKV | {"wkv.head_size": 64, "attention.decay_lora_rank": 8, "attention.iclr_lora_rank": 12}
RWKV7 |= {"attention.value_residual_mix_lora_rank": 20, "attention.gate_lora_rank": 24}
OF_KDA = DENSE_FIRST | LATENT_ROW | {"attention.head_count_kv": [0, 1, 0], "ssm.conv_kernel": 4, "kda.head_dim": 16}
MAPPED = {  # one name of an architecture, whose tensors llama.cpp confirms, with F32 alone
    "olmo": Spec("olmo", keys={"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": 0.7}),
    "dbrx": Spec(
        "dbrx",
        n_ff=32,
        **SIX,
        untied=True,
        fused=True,
        keys={"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": 0.7},
    ),
    "openelm": Spec(
        "openelm",
        head_dim=16,
        n_layer=3,
        fused=True,
        keys={
            "attention.head_count": [2, 4, 6],
            "attention.head_count_kv": [1, 2, 3],
            "feed_forward_length": [64, 96, 128],
        },
    ),
    "grok": Spec("grok", n_ff=32, **SIX, keys={"embedding_scale": 3.0}),
    "grok with a dense block": Spec(
        "grok",
        **SIX,
        untied=True,
        keys={"embedding_scale": 3.0, "expert_feed_forward_length": 32, "attention.output_scale": 0.2}
        | {"final_logit_softcapping": 20.0, "attn_logit_softcapping": 3.0},
        traits=("beside",),
    ),
    "smallthinker": Spec(
        "smallthinker",
        n_layer=5,
        n_ff=32,
        **SIX,
        keys={"expert_gating_func": 2, "expert_feed_forward_length": 32, "attention.sliding_window": 4096},
    ),
    "bitnet": Spec("bitnet", traits=("scales",)),
    "mimo2": Spec(
        "mimo2",
        n_layer=4,
        n_head=4,
        **SIX,
        untied=True,
        keys=IRREGULAR
        | {
            "attention.key_length": 32,
            "attention.value_length": 16,
            "attention.value_scale": 0.7,
            "rope.dimension_count": 8,
            "rope.freq_base": 5e5,
            "rope.freq_base_swa": 1e4,
            "expert_feed_forward_length": 32,
        },
        traits=("attn_sinks", "balanced"),
    ),
    "step35": Spec(
        "step35",
        n_layer=4,
        **SIX,
        untied=True,
        keys=IRREGULAR
        | {
            "attention.head_count": [2, 4, 4, 2],
            "attention.head_count_kv": [1, 2, 2, 1],
            "attention.key_length": 16,
            "attention.value_length": 16,
            "rope.freq_base": 5e5,
            "rope.freq_base_swa": 1e4,
            "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 48,
            "expert_weights_norm": True,
            "expert_weights_scale": 3.0,
            "swiglu_clamp_exp": [0.0, 0.0, 0.3, 0.2],
            "swiglu_clamp_shexp": [0.0, 0.2, 0.0, 0.4],
        },
        traits=("head gates", "attn_gate", "balanced", "attn_q_norm", "attn_k_norm"),
    ),
    "spark2_5": Spec(
        "spark2_5",
        n_layer=4,
        keys=IRREGULAR
        | {
            "attention.head_count": [2, 4, 4, 2],
            "attention.head_count_kv": [1, 2, 2, 1],
            "attention.key_length": 16,
            "attention.value_length": 16,
            "rope.freq_base": 5e5,
            "rope.freq_base_swa": 1e4,
        },
        traits=("head gates", "attn_gate"),
    ),
    "k2-horizon": Spec(
        "k2-horizon",
        head_dim=32,
        keys={"attention.group_norm_groups": 4},
        traits=("attn_gate", "attn_q_norm", "attn_k_norm"),
    ),
    "k2-horizon of experts": Spec(
        "k2-horizon",
        n_layer=3,
        **SIX,
        untied=True,
        keys=DENSE_FIRST | {"expert_feed_forward_length": 32, "expert_weights_norm": True},
        traits=("balanced",),
    ),
    "qwen": Spec("qwen", n_head_kv=4, fused=True, untied=True, biases=("attn_qkv",), n_ff=128),
    "laguna": Spec(
        "laguna",
        n_layer=5,
        **SIX,
        keys=DENSE_FIRST
        | {
            "attention.head_count": [2, 4, 4, 4, 2],
            "attention.head_count_kv": [1, 2, 2, 2, 1],
            "attention.key_length": 16,
            "attention.value_length": 16,
            "attention.sliding_window": 4,
            "rope.dimension_count": 8,
            "rope.dimension_count_swa": 16,
            "rope.freq_base": 5e5,
            "rope.freq_base_swa": 1e4,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
            "expert_shared_feed_forward_length": 48,
            "expert_feed_forward_length": 32,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
        },
        traits=("head gates", "balanced"),
    ),
    "laguna of element gates": Spec(
        "laguna",
        **SIX,
        keys=DENSE_FIRST
        | {
            "expert_shared_feed_forward_length": 48,
            "expert_feed_forward_length": 32,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.0,
        },
        traits=("balanced",),
    ),
    "baichuan": Spec("baichuan", n_layer=32, n_head_kv=4, untied=True),
    "baichuan 13B": Spec("baichuan", n_layer=40, n_head_kv=4, untied=True),
    "refact": Spec("refact", n_head=6, head_dim=16, n_head_kv=1),  # no power of two of heads
    "bloom": Spec("bloom", n_head_kv=4, fused=True, biases=("token_embd_norm", *OF_NEOX)),
    "mpt": Spec(
        "mpt",
        n_head_kv=4,
        fused=True,
        biases=OF_NEOX,
        keys={"attention.max_alibi_bias": 16.0, "attention.clamp_kqv": 0.7},
    ),
    "mpt of learned positions": Spec("mpt", fused=True, keys={"attention.max_alibi_bias": 0.0}),
    "jais": Spec(
        "jais",
        n_head_kv=4,
        fused=True,
        untied=True,
        biases=(*OF_NEOX, "ffn_gate"),
        keys={"attention.max_alibi_bias": 8.0},
    ),
    "deepseek2-ocr": Spec(
        "deepseek2-ocr",
        n_head_kv=4,
        **SIX,
        untied=True,
        keys=DENSE_FIRST | {"expert_feed_forward_length": 32, "expert_shared_count": 2, "expert_weights_norm": False},
    ),
    **{
        name: Spec(
            name.split()[0].rstrip(","),
            n_layer=3,
            **SIX,
            untied=True,
            biases=("k_norm",),
            keys=DENSE_FIRST
            | LATENT_ROW
            | INDEXER
            | {"expert_weights_norm": True, "attention.q_lora_rank": 24, "expert_gating_func": 2}
            | ({"attention.indexer.types": np.array(types, np.uint32)} if types else {}),
            traits=("balanced",),
        )
        for name, types in {
            "deepseek32": None,
            "glm-dsa": None,
            "glm-dsa of shared choices": (1, 0, 1),
            "glm-dsa, the last of shared choices": (1, 1, 0),
        }.items()
    },
    "deepseek4": Spec(
        "deepseek4",
        n_layer=4,
        n_head_kv=1,
        head_dim=128,
        n_expert=6,
        n_expert_used=6,
        untied=True,
        keys={"attention.compress_ratios": np.array([0, 4, 128, 4], np.uint32), "attention.sliding_window": 6}
        | {"attention.q_lora_rank": 24, "attention.output_group_count": 2, "attention.output_lora_rank": 16}
        | {"attention.compress_rope_freq_base": 40000.0, "rope.dimension_count": 16, "hash_layer_count": 1}
        | {"attention.indexer.head_count": 8, "attention.indexer.key_length": 64, "attention.indexer.top_k": 2}
        | {"hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 5}
        | {"hyper_connection.epsilon": 1e-6, "expert_feed_forward_length": 32, "expert_shared_count": 1}
        | {"expert_gating_func": 4, "expert_weights_norm": True, "expert_weights_scale": 1.5}
        | {"swiglu_clamp_exp": [0.5, 0.3, 0.2, 0.4]},
        traits=("balanced",),
    ),
    "minimax-m3": Spec(
        "minimax-m3",
        n_layer=3,
        **SIX,
        head_dim=32,
        untied=True,
        keys=DENSE_FIRST
        | {"rope.dimension_count": 16, "expert_feed_forward_length": 32, "expert_shared_count": 1}
        | {"expert_weights_norm": True, "expert_weights_scale": 2.0, "expert_gating_func": 2}
        | {"attention.indexer.head_count": 2, "attention.indexer.key_length": 32, "attention.indexer.top_k": 2}
        | {"attention.indexer.block_size": 2, "attention.indexer.local_blocks": 1},
        traits=("balanced",),
    ),
    "mamba": Spec(
        "mamba", biases=("ssm_conv1d",), keys=OF_MAMBA_1 | {"attention.head_count": 0, "feed_forward_length": 0}
    ),
    "mamba with norms": Spec(
        "mamba",
        biases=("ssm_conv1d",),
        keys=OF_MAMBA_1 | {"attention.head_count": 0, "feed_forward_length": 0, "ssm.dt_b_c_rms": True},
    ),
    "jamba": Spec(
        "jamba",
        n_layer=3,
        n_ff=64,
        n_expert=4,
        n_expert_used=2,
        biases=("ssm_conv1d",),
        keys=OF_MAMBA_1 | {"attention.head_count_kv": [0, 2, 0]},
        traits=("ssm_dt_norm", "ssm_b_norm", "ssm_c_norm"),
    ),
    "kimi-linear": Spec(
        "kimi-linear",
        n_layer=3,
        **SIX,
        untied=True,
        keys=OF_KDA | {"expert_gating_func": 2, "expert_weights_scale": 2.4},
        traits=("low rank", "ssm_f_b", "ssm_g_b", "balanced"),
    ),
    "kimi-k3": Spec(
        "kimi-k3",
        n_layer=4,
        **SIX,
        untied=True,
        keys=OF_KDA
        | {"attention.head_count_kv": [0, 1, 0, 0], "expert_gating_func": 2, "expert_weights_scale": 2.4}
        | {"expert_weights_norm": True, "kda.gate_lower_bound": -5.0, "expert_latent_length": 32}
        | {"attn_res.block_size": 3, "activation.situ_beta": 1.5, "activation.situ_linear_beta": 2.0},
        traits=("low rank", "ssm_g", "ssm_f_b", "balanced", "attn_gate", "ffn_routed_down", "ffn_routed_norm"),
    ),
    **{
        name: Spec(
            "hy_v4",
            n_layer=3,
            **SIX,
            untied=True,
            biases=("k_norm",) * bool(indexer),
            keys=DENSE_FIRST
            | LATENT_ROW
            | {"expert_gating_func": 2, "expert_weights_norm": True, "attention.q_lora_rank": 24}
            | {"swiglu_clamp_exp": [0.0, 0.3, 0.2], "expert_feed_forward_length": 96}
            | {"hyper_connection.count": 4, "hyper_connection.epsilon": 1e-3, "hyper_connection.magnitude": 1.5}
            | indexer,
            traits=("balanced", "attn_gate"),
        )
        for name, indexer in {
            "hy_v4": {},
            "hy_v4 with an indexer": INDEXER | {"attention.indexer.types": np.array((1, 0, 1), np.uint32)},
        }.items()
    },
    "glm5-next": Spec(
        "glm5-next",
        n_layer=3,
        **SIX,
        untied=True,
        biases=("k_norm",),
        keys=OF_KDA
        | {"expert_gating_func": 2, "expert_weights_scale": 2.5, "expert_weights_norm": True}
        | {"kda.gate_lower_bound": -5.0, "attention.q_lora_rank": 24, "swiglu_clamp_exp": [0.0, 0.3, 0.2]}
        | {"attention.key_length": 32, "rope.dimension_count": 0, "attention.layer_norm_epsilon": 1e-6}
        | {"attention.indexer.head_count": 2, "attention.indexer.key_length": 64}
        | {"attention.indexer.top_k": 4, "attention.indexer.kpool": 2}
        | {"hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 5}
        | {"hyper_connection.epsilon": 1e-6},
        traits=("low rank", "ssm_f_b", "ssm_g_b", "balanced"),
    ),
    "bailingmoe3": Spec(
        "bailingmoe3",
        n_layer=3,
        **SIX,
        untied=True,
        keys=OF_KDA
        | {"expert_gating_func": 2, "expert_weights_scale": 2.5, "expert_weights_norm": True}
        | {"kda.gate_lower_bound": -5.0, "attention.q_lora_rank": 24, "swiglu_clamp_exp": [0.0, 0.3, 0.2]},
        traits=("head gates", "attn_gate", "balanced"),
    ),
    "qwen4exp": Spec(
        "qwen4exp",
        n_layer=4,
        head_dim=32,
        n_ff=32,
        **SIX,
        keys=DELTA
        | QWEN35_ROPE
        | {"expert_shared_feed_forward_length": 64, "hyper_connection.count": 4, "hyper_connection.low_rank": 16}
        | {"attention.indexer.head_count": 2, "attention.indexer.key_length": 32, "attention.indexer.top_k": 4}
        | {"attention.compress_ratios": [0, 2, 0, 2], "expert_feed_forward_length": 32}
        | {"ple.layers": np.array([2], np.uint32), "ple.ngram_size": 3, "ple.heads_per_ngram": 2}
        | {"ple.conv_kernel": 4, "ple.eos_token_id": 2, "embedding_length_per_layer_input": 16}
        | {"ple.layer_multipliers": np.array([0x9E3779B97F4A7C15, 3, 0xC2B2AE3D27D4EB4F], np.uint64)}
        | {"ple.head_offsets": np.array([0, 101, 198, 287], np.uint64)}
        | {"ple.head_vocab_sizes": np.array([101, 97, 89, 83], np.uint64)},
        traits=("ffn_gate_inp_shexp",),
    ),
    "rwkv6": Spec("rwkv6", n_layer=3, untied=True, biases=OF_RWKV, keys=RWKV6 | {"rescale_every_n_layers": 2}),
    "rwkv7": Spec("rwkv7", n_embd=128, n_layer=3, untied=True, biases=OF_RWKV, keys=RWKV7, traits=("time_mix_v0",)),
    "rwkv6qwen2": Spec(
        "rwkv6qwen2",
        untied=True,
        biases=("time_mix_key", "time_mix_value", "time_mix_receptance"),
        keys=RWKV6 | {"attention.head_count_kv": 2, "token_shift_count": 1},
    ),
    "arwkv7": Spec("arwkv7", n_embd=128, untied=True, keys=RWKV7 | {"token_shift_count": 1}, traits=("time_mix_v0",)),
    "arwkv7 without gates": Spec(
        "arwkv7",
        n_embd=128,
        untied=True,
        biases=("time_mix_ln",),
        keys=RWKV7 | {"token_shift_count": 1, "attention.gate_lora_rank": None},
        traits=("time_mix_v0", "time_mix_ln"),
    ),
    "plamo": Spec("plamo", untied=True),
    "nanbeige": Spec("nanbeige", keys={"num_loops": 2, "skip_loop_final_norm": False}),
    "nanbeige without norms": Spec(
        "nanbeige", n_layer=3, untied=True, keys={"num_loops": 3, "skip_loop_final_norm": True}
    ),
    "arctic": Spec("arctic", **SIX, untied=True),
    "talkie": Spec("talkie", n_layer=3, untied=True, keys={"logit_scale": 0.4}),
    "plamo2": Spec(
        "plamo2",
        n_layer=4,
        n_embd=128,
        n_head=4,
        fused=True,
        keys={
            "attention.head_count_kv": [0, 2, 0, 2],
            "attention.key_length": 32,
            "attention.value_length": 32,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 128,
            "ssm.state_size": 16,
            "ssm.time_step_rank": 4,
            "ssm.group_count": 0,
        },
        traits=("fused ffn", "bare norms"),
    ),
    "maple": Spec(
        "maple",
        n_layer=4,
        head_dim=32,
        **SIX,
        untied=True,
        keys=IRREGULAR | {"expert_feed_forward_length": 32, "rope.freq_base_swa": 5e5, "swiglu_clamp_exp": 0.4},
    ),
    "plamo3": Spec(
        "plamo3",
        n_layer=3,
        fused=True,
        keys={
            "attention.sliding_window": 4,
            "attention.sliding_window_pattern": 2,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
        },
        traits=("fused ffn", "bare norms"),
    ),
    "granite_swa": Spec(
        "granite_swa",
        n_layer=4,
        head_dim=32,
        keys=OTHER_SCALES | IRREGULAR | {"attention.rope_pattern": [True, True, False, True]},
    ),
    "granite_swa of experts": Spec(
        "granite_swa",
        n_layer=4,
        n_ff=32,
        **SIX,
        head_dim=32,
        keys=OTHER_SCALES | IRREGULAR | {"expert_shared_feed_forward_length": 64},
        traits=("fused shared",),
    ),
}
OF_JINA = (
    *("token_embd_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm"),
    *("attn_output_norm", "attn_norm_2", "ffn_down", "layer_output_norm"),
)
ENCODERS = {
    name: replace(spec, n_vocab=512, vocabulary=True, n_ctx_train=128)
    for name, spec in {
        "neo-bert": Spec(
            "neo-bert", fused=True, keys={"pooling_type": 1, "attention.causal": False}, traits=("fused ffn",)
        ),
        **{
            name: Spec(
                "jina-bert-v2",
                n_head=6,
                n_head_kv=6,
                n_embd=96,
                biases=OF_JINA,
                keys={"pooling_type": 1, "attention.causal": False, "tokenizer.ggml.token_type_count": 2},
                traits=("token_types", *traits),
            )
            for name, traits in {
                "jina-bert-v2": ("fused ffn",),
                "jina-bert-v2 of code": ("attn_q_norm", "attn_k_norm", "attn_norm_2"),
            }.items()
        },
        **{
            name: Spec(
                "t5encoder",
                n_layer=3,
                n_head_kv=4,
                head_dim=32,
                # llama.cpp attends causally without this key
                keys={"pooling_type": 1, "attention.causal": False, "attention.relative_buckets_count": 32},
                traits=traits,
            )
            for name, traits in {"t5encoder": (), "t5encoder with gates": ("ffn_gate",)}.items()
        },
        "gemma-embedding2": Spec(
            "gemma-embedding2",
            n_layer=6,
            head_dim=32,
            keys={
                "pooling_type": 1,
                "attention.sliding_window": 8,
                "attention.sliding_window_pattern": [True] * 5 + [False],
                "attention.key_length_swa": 16,
                "attention.value_length_swa": 16,
                "rope.dimension_count_swa": 16,
                "rope.freq_base": 1e6,
                "rope.freq_base_swa": 1e4,
                "embedding_length_per_layer_input": 8,
                "embedding_length_out": 48,
            },
            traits=("layer_output_scale",),
        ),
    }.items()
}

"""Expected log-probabilities of transformers for tests/models/huggingface: `FAMILY.json` for each tiny checkpoint.

Run by an interpreter with torch, transformers and safetensors (2.13.0+cpu, 5.24.0, 0.8.0 made those of the repository):

    python scripts/huggingface_oracle.py [FAMILY …]

A file has the configuration, the names and shapes of the tensors as `save_pretrained` names them, the prompt, and the
log-probabilities of every fourth token after each prefix. Weights are numbers that both sides draw by tensor name:
`weights` below is that of tests/helpers/huggingface.py.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from copy import copy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.helpers.huggingface_weights import IDS, STEP, pixels, spectrogram, weight  # noqa: E402

Settings = dict[str, Any]

OUT = ROOT / "tests" / "data" / "huggingface"
SMALL = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LOCAL = {"rope_type": "default", "rope_theta": 1000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 8,
    "short_factor": [1.0 + 0.25 * i for i in range(8)],
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
}
SCALES = {
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.25,
    "logits_scaling": 2.0,
}
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4}
LINEAR = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        **PLAIN,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
INDEXER = {"index_topk": 5, "index_head_dim": 64, "index_n_heads": 8}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
}
NEMOTRON = {
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "chunk_size": 16,
    "use_mamba_kernels": False,
}
GEMMA_LAYERS = {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "sliding_window": 4,
    "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
EACH_HEAD = {"num_key_value_heads": 4}
GPT = {**EACH_HEAD, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_inner": 96, "n_positions": 128}
FAMILIES = {  # name → (architecture, settings beside SMALL)
    "llama": ("Llama", {"attention_bias": True}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": None}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3moe": ("Qwen3Moe", {"head_dim": 32, "norm_topk_prob": True, **MOE}),
    "gemma": ("Gemma", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "num_hidden_layers": 7,
            "sliding_window": 4,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "phi3": ("Phi3", {"sliding_window": None, "partial_rotary_factor": 0.5}),
    "phi3-long": ("Phi3", {"sliding_window": None, "rope_parameters": LONG, "original_max_position_embeddings": 8}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "no_rope_layer_interval": 4}),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {
            "num_hidden_layers": 5,
            "sliding_window": 4,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "olmoe": ("Olmoe", {**MOE, "num_key_value_heads": 4}),
    "granite": ("Granite", SCALES),
    "granitemoe": ("GraniteMoe", {**SCALES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitemoeshared": (
        "GraniteMoeShared",
        {**SCALES, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 32,
            "num_hidden_layers": 2,
            "sliding_window": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True},
        },
    ),
    "qwen2moe": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 32, "norm_topk_prob": False}),
    "qwen3next": (
        "Qwen3Next",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": 32,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5},
            **MOE,
        },
    ),
    "deepseek2": (
        "DeepseekV2",
        {
            **LATENT,
            **ROUTED,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek3": (
        "DeepseekV3",
        {
            **LATENT,
            **ROUTED,
            "q_lora_rank": 32,
            "n_routed_experts": 8,
            "n_group": 2,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "glm4": ("Glm4", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "glm4moe": (
        "Glm4Moe",
        ROUTED | {"head_dim": 32, "partial_rotary_factor": 0.5, "use_qk_norm": True, "routed_scaling_factor": 1.5},
    ),
    "lfm2": (
        "Lfm2",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        },
    ),
    "llama4": (
        "Llama4",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "intermediate_size": 32,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8192,
        },
    ),
    "falcon-h1": (
        "FalconH1",
        {
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 16,
            "mamba_rms_norm": False,
            "ssm_multipliers": [0.5, 0.75, 1.25, 1.5, 2.0],
            "embedding_multiplier": 1.5,
            "lm_head_multiplier": 0.75,
            "key_multiplier": 0.5,
            "attention_out_multiplier": 0.9,
            "attention_in_multiplier": 1.1,
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.75,
            "mlp_multipliers": [0.75, 1.25],
        },
    ),
    "seed-oss": ("SeedOss", {"head_dim": 16, "attention_bias": True}),
    "exaone4": ("Exaone4", {"num_hidden_layers": 4, "sliding_window": 4, "sliding_window_pattern": 4}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16}),
    "hunyuan-dense": ("HunYuanDenseV1", {"head_dim": 16}),
    "cohere2": ("Cohere2", {"num_hidden_layers": 4, "sliding_window": 4, "tie_word_embeddings": True}),
    "starcoder2": ("Starcoder2", {"sliding_window": None, "tie_word_embeddings": True}),
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.25}),
    "phi2": ("Phi", {"partial_rotary_factor": 0.5}),
    "arcee": ("Arcee", {"head_dim": 16}),
    "qwen35": ("Qwen3_5", {**LINEAR, "tie_word_embeddings": True}),
    "qwen35moe": ("Qwen3_5Moe", {**LINEAR, **MOE, "shared_expert_intermediate_size": 32}),
    "gemma4": (
        "Gemma4",
        {
            **GEMMA_LAYERS,
            "global_head_dim": 32,
            "num_kv_shared_layers": 3,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 272,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma4moe": (
        "Gemma4",
        {
            **GEMMA_LAYERS,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma3n": (
        "Gemma3n",
        {
            **GEMMA_LAYERS,
            "num_hidden_layers": 10,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
            "intermediate_size": [96] * 10,
            "num_kv_shared_layers": 4,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 272,
            "laurel_rank": 64,
            "activation_sparsity_pattern": [0.0] * 10,  # llama.cpp and we divide the variance by n - 1, it by n
        },
    ),
    "nemotron-h": ("NemotronH", {**NEMOTRON, "num_hidden_layers": 4, "hybrid_override_pattern": "M-*-"}),
    "nemotron-h-moe": (
        "NemotronH",
        {
            **NEMOTRON,
            **ROUTED,
            "num_hidden_layers": 4,
            "hybrid_override_pattern": "ME*E",
            "moe_shared_expert_intermediate_size": 64,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
    ),
    "mamba2": (
        "Mamba2",
        {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "conv_kernel": 4, "chunk_size": 16},
    ),
    "granitehybrid": ("GraniteMoeHybrid", {**SCALES, **MAMBA, "num_local_experts": 0, "shared_intermediate_size": 96}),
    "granitehybrid-moe": (
        "GraniteMoeHybrid",
        {
            **SCALES,
            **MAMBA,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "position_embedding_type": "rope",
        },
    ),
    "lfm2moe": (
        "Lfm2Moe",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
            **MOE,
        },
    ),
    "ernie4_5moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    "hunyuan-moe": ("HunYuanMoEV1", {"num_experts": 4, "moe_topk": 2, "head_dim": 16}),
    "minimax-m2": (
        "MiniMaxM2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 16, "rotary_dim": 8},
    ),
    "dots1": ("Dots1", {**ROUTED, "head_dim": 16, "num_key_value_heads": 4, "norm_topk_prob": True}),
    "exaonemoe": (
        "ExaoneMoe",
        {**MOE, "num_shared_experts": 1, "num_hidden_layers": 4, "sliding_window": 4, "norm_topk_prob": True},
    ),
    "glm4moelite": (
        "Glm4MoeLite",
        {**ROUTED, **LATENT, "q_lora_rank": 32, "norm_topk_prob": True, "rms_norm_eps": 1e-6},
    ),
    "cohere": ("Cohere", {"tie_word_embeddings": True}),
    "olmo": ("Olmo", {}),
    "nemotron": ("Nemotron", {"partial_rotary_factor": 0.5}),
    "gptneox": ("GPTNeoX", {**EACH_HEAD, "partial_rotary_factor": 0.5, "rotary_pct": 0.5}),
    "bloom": ("Bloom", {**EACH_HEAD, "n_layer": 2, "n_head": 4, "intermediate_size": 256}),
    "mpt": ("Mpt", {**EACH_HEAD, "d_model": 64, "n_heads": 4, "n_layers": 2, "intermediate_size": 256}),
    "falcon": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96}),
    "falcon-7b": ("Falcon", {"num_key_value_heads": 1, "intermediate_size": 256}),
    "starcoder": ("GPTBigCode", {**GPT, "num_key_value_heads": 1}),
    "gpt2": ("GPT2", GPT),
    "jais2": ("Jais2", {"head_dim": 16}),
    "glm": ("Glm", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "mamba": (
        "Mamba",
        {
            **dict.fromkeys(("num_attention_heads", "num_key_value_heads")),  # as its repositories
            "state_size": 16,
            "intermediate_size": 128,
            "time_step_rank": 4,
            "conv_kernel": 4,
        },
    ),
    "falcon-mamba": ("FalconMamba", {"state_size": 16, "intermediate_size": 128, "time_step_rank": 4}),
    "jamba": (
        "Jamba",
        {
            "num_hidden_layers": 4,
            "num_experts": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 16,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "mellum": (
        "Mellum",
        {
            **MOE,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": {**YARN, "attention_factor": 1.0}, "sliding_attention": LOCAL},
        },
    ),
    "deepseek32": (
        "DeepseekV32",
        {
            **LATENT,
            **ROUTED,
            "q_lora_rank": 32,
            "n_routed_experts": 8,
            "n_group": 2,
            "num_hidden_layers": 3,
            **INDEXER,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "glm-dsa": (
        "GlmMoeDsa",
        {
            **LATENT,
            **ROUTED,
            **INDEXER,
            "q_lora_rank": 32,
            "num_hidden_layers": 3,
            "indexer_types": ["full", "shared", "full"],
            "rms_norm_eps": 1e-6,
        },
    ),
    "mistral4": (
        "Mistral4",
        {
            **LATENT,
            **ROUTED,
            "q_lora_rank": 32,
            "norm_topk_prob": True,
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "mimo2": (
        "MiMoV2Flash",
        {
            **ROUTED,
            "num_hidden_layers": 4,
            "head_dim": 24,
            "v_head_dim": 16,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {**PLAIN, "rope_theta": 5e6, "partial_rotary_factor": 0.334},
                "sliding_attention": {**LOCAL, "partial_rotary_factor": 0.334},
            },
        },
    ),
    "cohere2moe": (
        "Cohere2Moe",
        {
            **MOE,
            "intermediate_size": 32,
            "head_dim": 16,
            "num_hidden_layers": 5,
            "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 96,
            "num_shared_experts": 1,
            "expert_selection_fn": "sigmoid",
            "sliding_window": 4,
            "tie_word_embeddings": True,
        },
    ),
    "dbrx": (
        "Dbrx",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 128,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "bitnet": ("BitNet", {"tie_word_embeddings": True}),
    "hy-v3": ("HYV3", {**MOE, "head_dim": 16}),
    "afmoe": (
        "Afmoe",
        {
            **MOE,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "num_dense_layers": 1,
            "num_shared_experts": 1,
            "sliding_window": 4,
            "mup_enabled": True,
            "route_scale": 1.5,
        },
    ),
    "phimoe": (
        "Phimoe",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "attention_bias": True,
            "lm_head_bias": True,
        },
    ),
    "minicpm3": ("MiniCPM3", {**LATENT, "q_lora_rank": 32}),
    "deepseek4": (
        "DeepseekV4",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "head_dim": 128,
            "partial_rotary_factor": 0.125,
            "q_lora_rank": 24,
            "o_groups": 2,
            "o_lora_rank": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "sliding_window": 6,
            "index_n_heads": 8,
            "index_head_dim": 64,
            "index_topk": 2,
            "swiglu_limit": 0.5,
            "rope_parameters": YARN,  # of layers with blocks
        },
    ),
    "apertus": ("Apertus", {"rope_parameters": LLAMA3}),
    "ministral3": ("Ministral3", {"head_dim": 32, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}}),
}


@dataclass(frozen=True)
class Remote:
    """A family whose code is in its repositories: published layers, built of transformers' classes."""

    like: str  # the class that has all other layers
    settings: Settings  # of that class, beside SMALL
    config: Settings  # of the repository
    # (name in the repository, names in the class: several are below each other)
    names: tuple[tuple[str, str], ...] = ()
    changed: Callable[[Any], None] = lambda model: None


class DeepseekMoE(torch.nn.Module):
    """DeepSeekMoE (Dai et al., 2024): the best experts by softmax, weighted by it, beside shared ones."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        mlp = transformers.models.llama.modeling_llama.LlamaMLP
        sized = [copy(config), copy(config)]
        for own, width in zip(sized, (32, 64), strict=True):
            own.intermediate_size = width
        self.gate = torch.nn.Linear(config.hidden_size, 4, bias=False)
        self.experts = torch.nn.ModuleList(mlp(sized[0]) for _ in range(4))
        self.shared_experts = mlp(sized[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        all_of_them = torch.stack([expert(x) for expert in self.experts], -2)
        picked = torch.gather(all_of_them, -2, chosen[..., None].expand(*chosen.shape, x.shape[-1]))
        return (picked * weights[..., None]).sum(-2) + self.shared_experts(x)


def of_deepseek(model: Any) -> None:
    model.model.layers[1].mlp = DeepseekMoE(model.config)


def of_orion(model: Any) -> None:
    """LayerNorm in the place of RMSNorm."""
    for module in (model.model, *model.model.layers):
        for name in ("norm", "input_layernorm", "post_attention_layernorm"):
            if hasattr(module, name):
                setattr(module, name, torch.nn.LayerNorm(64, eps=1e-5))


def of_openelm(model: Any) -> None:
    """Layers of more heads and a wider FFN one after the other."""
    for i, (n, n_kv, width) in enumerate(((2, 1, 64), (4, 2, 96), (6, 3, 128))):
        config = copy(model.config)
        config.num_attention_heads, config.num_key_value_heads, config.intermediate_size = n, n_kv, width
        model.model.layers[i] = transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer(config, i)
    model.model.norm.variance_epsilon = 1e-6


LAYER = "model.layers.{i}"
OF_ATTENTION = " ".join(f"{LAYER}.self_attn.{part}_proj.{{end}}" for part in "qkv")
REMOTE = {
    "deepseek": Remote(
        "Llama",
        {},
        {**ROUTED, "architectures": ["DeepseekForCausalLM"], "n_shared_experts": 2, "norm_topk_prob": False},
        changed=of_deepseek,
    ),
    "qwen": Remote(
        "Qwen2",
        {"num_key_value_heads": 4, "rms_norm_eps": 1e-6},
        {
            **dict.fromkeys(("num_key_value_heads", "rope_parameters", "rms_norm_eps")),
            "architectures": ["QWenLMHeadModel"],
            "intermediate_size": 192,  # of both matrices together
            "kv_channels": 16,
            "layer_norm_epsilon": 1e-6,
            "rotary_emb_base": 10000,
            "seq_length": 128,
        },
        (
            ("transformer.h.{i}.attn.c_attn.{end}", OF_ATTENTION),
            ("transformer.h.{i}.attn.c_proj.weight", "model.layers.{i}.self_attn.o_proj.weight"),
            ("transformer.h.{i}.mlp.w1.weight", "model.layers.{i}.mlp.up_proj.weight"),
            ("transformer.h.{i}.mlp.w2.weight", "model.layers.{i}.mlp.gate_proj.weight"),
            ("transformer.h.{i}.mlp.c_proj.weight", "model.layers.{i}.mlp.down_proj.weight"),
            ("transformer.h.{i}.ln_1.weight", "model.layers.{i}.input_layernorm.weight"),
            ("transformer.h.{i}.ln_2.weight", "model.layers.{i}.post_attention_layernorm.weight"),
            ("transformer.wte.weight", "model.embed_tokens.weight"),
            ("transformer.ln_f.weight", "model.norm.weight"),
        ),
    ),
    "openelm": Remote(
        "Qwen3",
        {"num_hidden_layers": 3, "head_dim": 16, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
        {
            **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size")),
            **dict.fromkeys(("num_hidden_layers", "rope_parameters", "max_position_embeddings", "rms_norm_eps")),
            "architectures": ["OpenELMForCausalLM"],
            "model_dim": 64,
            "num_transformer_layers": 3,
            "max_context_length": 128,
            "num_query_heads": [2, 4, 6],
            "num_kv_heads": [1, 2, 3],
            "ffn_multipliers": [1.0, 1.55, 1.9],
            "ffn_dim_divisor": 32,
            "rope_freq_constant": 10000,
            "share_input_output_layers": True,
        },
        (
            ("transformer.layers.{i}.attn.qkv_proj.{end}", OF_ATTENTION),
            ("transformer.layers.{i}.attn.q_norm.weight", "model.layers.{i}.self_attn.q_norm.weight"),
            ("transformer.layers.{i}.attn.k_norm.weight", "model.layers.{i}.self_attn.k_norm.weight"),
            ("transformer.layers.{i}.attn.out_proj.weight", "model.layers.{i}.self_attn.o_proj.weight"),
            (
                "transformer.layers.{i}.ffn.proj_1.weight",
                "model.layers.{i}.mlp.gate_proj.weight model.layers.{i}.mlp.up_proj.weight",
            ),
            ("transformer.layers.{i}.ffn.proj_2.weight", "model.layers.{i}.mlp.down_proj.weight"),
            ("transformer.layers.{i}.attn_norm.weight", "model.layers.{i}.input_layernorm.weight"),
            ("transformer.layers.{i}.ffn_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
            ("transformer.token_embeddings.weight", "model.embed_tokens.weight"),
            ("transformer.norm.weight", "model.norm.weight"),
        ),
        of_openelm,
    ),
    "orion": Remote("Llama", {}, {"architectures": ["OrionForCausalLM"], "rms_norm_eps": 1e-5}, changed=of_orion),
    "minicpm": Remote(  # Granite's factors
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 1.4 / 2**0.5,
            "logits_scaling": 2.0,
            "attention_multiplier": 0.25,
        },
        {
            **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier")),
            "architectures": ["MiniCPMForCausalLM"],
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 32,
        },
    ),
}


def write_remote(family: str, row: Remote) -> None:
    """Weights are drawn by the repository's names."""
    config = getattr(transformers, f"{row.like}Config")(
        **{**SMALL, **row.settings}, attn_implementation="eager", dtype="float32"
    )
    model = getattr(transformers, f"{row.like}ForCausalLM")(config)
    row.changed(model)
    state = model.state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    layers, ends, parts_of = range(config.num_hidden_layers), ("weight", "bias"), {}
    for (name, targets), i, end in product(row.names, layers, ends):
        parts = targets.format(i=i, end=end).split()
        if all(part in state for part in parts):
            parts_of[name.format(i=i, end=end)] = parts
    named = {part for parts in parts_of.values() for part in parts}
    parts_of |= {key: [key] for key in state if key not in named}
    shapes = {}
    for name, parts in parts_of.items():
        rows = [len(state[part]) for part in parts]
        shapes[name] = [sum(rows), *state[parts[0]].shape[1:]]
        for part, values in zip(parts, torch.from_numpy(weight(name, shapes[name])).split(rows), strict=True):
            state[part].copy_(values)
    settings = {key: value for key, value in {**config.to_dict(), **row.config}.items() if value is not None}
    save_logprobs(family, settings, shapes, model.eval())


def save_logprobs(family: str, settings: Settings, shapes: dict[str, list[int]], model: Any) -> None:
    with torch.no_grad():
        logits = model(torch.tensor([IDS]), use_cache=False).logits[0].double()
    save_logits(family, settings, shapes, logits)


def save_logits(family: str, settings: Settings, shapes: dict[str, list[int]], logits: torch.Tensor) -> None:
    logprobs = torch.log_softmax(logits, -1)[:, ::STEP]
    result = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "config": settings,
        "tensors": shapes,
        "logprobs": [[round(value, 5) for value in row] for row in logprobs.tolist()],
    }
    save(family, result)


RWKV_NAMES = {  # (pattern in the folder, name in the package rwkv)
    "rwkv6": (
        (r"^rwkv\.", ""),
        (r"^embeddings\.", "emb."),
        (r"\.pre_ln\.", ".ln0."),
        (r"\.attention\.", ".att."),
        (r"\.feed_forward\.", ".ffn."),
    ),
    "rwkv7": (
        (r"^model\.norm\.", "ln_out."),
        (r"^lm_head\.", "head."),
        (r"^model\.embeddings\.", "emb."),
        (r"^model\.layers\.", "blocks."),
        (r"\.pre_norm\.", ".ln0."),
        (r"\.attn_norm\.", ".ln1."),
        (r"\.ffn_norm\.", ".ln2."),
        (r"\.attn\.", ".att."),
        (r"\.g_norm\.", ".ln_x."),
        (r"\.r_proj\.", ".receptance."),
        (r"\.k_proj\.", ".key."),
        (r"\.v_proj\.", ".value."),
        (r"\.o_proj\.", ".output."),
        (r"_lora\.lora\.0\.weight$", "1"),
        (r"_lora\.lora\.2\.weight$", "2"),
        (r"_lora\.lora\.2\.bias$", "0"),
    ),
}
RWKV = {"vocab_size": 272, "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}


def rwkv6_shapes(n: int = 64, size: int = 16) -> tuple[Settings, dict[str, list[int]]]:
    """Settings and tensors of a folder of RWKV 6."""
    settings = RWKV | {"architectures": ["Rwkv6ForCausalLM"], "model_type": "rwkv6", "hidden_size": n}
    settings |= {"head_size": size, "intermediate_size": None, "layer_norm_epsilon": 1e-5, "rescale_every": 1}
    shapes = {"rwkv.embeddings.weight": [272, n], "head.weight": [272, n]}
    norms = ["rwkv.ln_out", "rwkv.blocks.0.pre_ln"]
    for b in (f"rwkv.blocks.{i}." for i in range(2)):
        norms += [f"{b}{name}" for name in ("ln1", "ln2", "attention.ln_x")]
        a, f = f"{b}attention.", f"{b}feed_forward."
        shapes |= {f"{a}time_maa_{x}": [1, 1, n] for x in "xwkvrg"} | {f"{f}time_maa_{x}": [1, 1, n] for x in "kr"}
        shapes |= {f"{a}time_maa_w1": [n, 160], f"{a}time_maa_w2": [5, 32, n], f"{a}time_decay": [1, 1, n]}
        shapes |= {f"{a}time_decay_w1": [n, 64], f"{a}time_decay_w2": [64, n], f"{a}time_faaaa": [n // size, size]}
        shapes |= {f"{a}{x}.weight": [n, n] for x in ("receptance", "key", "value", "gate", "output")}
        shapes |= {f"{f}key.weight": [224, n], f"{f}value.weight": [n, 224], f"{f}receptance.weight": [n, n]}
    return settings, shapes | {f"{name}.{end}": [n] for name in norms for end in ("weight", "bias")}


def rwkv7_shapes(n: int = 128, size: int = 64) -> tuple[Settings, dict[str, list[int]]]:
    """Settings and tensors of a folder of RWKV 7, as fla writes them."""
    ranks = {"decay": 8, "a": 12, "v": 20, "gate": 24}
    settings = RWKV | {"architectures": ["RWKV7ForCausalLM"], "model_type": "rwkv7", "hidden_size": n}
    settings |= {"head_dim": size, "norm_eps": 1e-5, "intermediate_size": None, "num_heads": n // size}
    settings |= {f"{name}_low_rank_dim": rank for name, rank in ranks.items()}
    shapes = {"model.embeddings.weight": [272, n], "lm_head.weight": [272, n]}
    norms = ["model.norm", "model.layers.0.pre_norm"]
    for i, b in enumerate(f"model.layers.{i}." for i in range(2)):
        norms += [f"{b}{name}" for name in ("attn_norm", "ffn_norm", "attn.g_norm")]
        a, f = f"{b}attn.", f"{b}ffn."
        shapes |= {f"{a}x_{x}": [1, 1, n] for x in "rwkvag"} | {f"{f}x_k": [n]}
        shapes |= {f"{a}k_k": [n], f"{a}k_a": [n], f"{a}r_k": [n // size, size]}
        shapes |= {f"{a}{x}_proj.weight": [n, n] for x in "rkvo"}
        shapes |= {f"{f}key.weight": [4 * n, n], f"{f}value.weight": [n, 4 * n]}
        for name, rank in zip("wavg", ranks.values(), strict=True):
            if name == "v" and i == 0:
                continue
            low = f"{a}{name}_lora.lora."
            shapes |= {f"{low}0.weight": [rank, n], f"{low}2.weight": [n, rank]}
            shapes |= {} if name == "g" else {f"{low}2.bias": [n]}
    return settings, shapes | {f"{name}.{end}": [n] for name in norms for end in ("weight", "bias")}


def write_rwkv(family: str, settings: Settings, shapes: dict[str, list[int]]) -> None:
    """By the package rwkv, of RWKV's author, in names of its own."""
    os.environ |= {"RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0", "RWKV_V7_ON": str(int(family == "rwkv7"))}
    package = importlib.reload(importlib.import_module("rwkv.model"))
    own = {}
    for name, shape in shapes.items():
        values = torch.from_numpy(weight(name, shape))
        if "_lora.lora." in name:
            values = values.T.contiguous() if values.ndim == 2 else values
        for pattern, new in RWKV_NAMES[family]:
            name = re.sub(pattern, new, name)
        own[name] = values
    with tempfile.TemporaryDirectory() as folder:
        torch.save(own, f"{folder}/m.pth")
        with redirect_stdout(None), torch.no_grad():
            model = package.RWKV(f"{folder}/m", "cpu fp32")
            logits = model.forward(IDS, None, full_output=True)[0]
    save_logits(family, settings, shapes, logits.double())


ENCODER = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "num_labels": 1,
}
MODERN = {
    "num_hidden_layers": 4,
    "local_attention": 8,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "cls_token_id": 256,
    "sep_token_id": 257,
    "classifier_pooling": "mean",
}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "feed_forward_proj": "gated-gelu"}


class JinaMLP(torch.nn.Module):
    """The gated MLP of jina-embeddings-v2 (Günther et al., 2023), with its norm."""

    def __init__(self, n: int, width: int) -> None:
        super().__init__()
        self.gated_layers = torch.nn.Linear(n, 2 * width, bias=False)
        self.wo, self.layernorm = torch.nn.Linear(width, n), torch.nn.LayerNorm(n, eps=1e-12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gated_layers(x).chunk(2, -1)
        return self.layernorm(self.wo(torch.nn.functional.gelu(gate) * up) + x)


class Second(torch.nn.Module):
    """In the place of a layer's output."""

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return x


def write_jina2() -> None:
    """BERT without positions, with ALiBi on both sides."""
    config = transformers.BertConfig(**ENCODER, attn_implementation="eager", dtype="float32")
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    for layer in model.encoder.layer:
        layer.mlp = JinaMLP(64, 96)
        layer.intermediate, layer.output = layer.mlp, Second()
    state = {k: v for k, v in model.state_dict().items() if "position" not in k and ".intermediate." not in k}
    with torch.no_grad():
        model.embeddings.position_embeddings.weight.zero_()
        for name, values in state.items():
            values.copy_(torch.from_numpy(weight(name, values.shape)))
        place = torch.arange(len(IDS))
        slopes = 2.0 ** (-2.0 * torch.arange(1, 5))  # of four heads
        bias = -slopes[:, None, None] * (place[:, None] - place).abs()
        vector = model(torch.tensor([IDS]), attention_mask=bias[None]).last_hidden_state[0].mean(0)
    result = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "config": {**config.to_dict(), "architectures": ["JinaBertModel"]},
        "tensors": {name: list(values.shape) for name, values in state.items()},
        "vector": [round(value, 5) for value in vector.double().tolist()],
    }
    save("encoders/jina2", result)


ENCODERS = {  # name → (class, settings beside ENCODER)
    "bert": ("BertModel", {}),
    "bert-rank": ("BertForSequenceClassification", {}),
    "roberta": ("XLMRobertaModel", {"pad_token_id": 1}),
    "roberta-rank": ("XLMRobertaForSequenceClassification", {"pad_token_id": 1}),
    "nomic": ("NomicBertModel", {}),
    "modern": ("ModernBertModel", MODERN),
    "modern-rank": ("ModernBertForSequenceClassification", MODERN),
    "t5": ("T5EncoderModel", T5),
    "eurobert": ("EuroBertModel", {"num_key_value_heads": 2}),
    "jina3": ("JinaEmbeddingsV3Model", {"pad_token_id": 1}),
    "gemma": (
        "Gemma3TextModel",
        {
            "num_hidden_layers": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "use_bidirectional_attention": True,
            "sliding_window": 8,
        },
    ),
}


WITH_TEXT = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
OF_IMAGES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
OF_QWEN = {"hidden_size": 32, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
SECTIONS = {**PLAIN, "mrope_section": [2, 3, 3]}
PIXTRAL = {**OF_IMAGES, "model_type": "pixtral", "image_size": 32, "patch_size": 4, "hidden_act": "silu"}
VISIONS = {  # name → (model, side of its picture, settings, those of the text, those of the encoder)
    "gemma3": (
        "Gemma3",
        32,
        {"mm_tokens_per_image": 16, "image_token_index": 260, "boi_token_index": 258, "eoi_token_index": 259},
        {"head_dim": 16, "sliding_window": 64},
        {**OF_IMAGES, "image_size": 32, "patch_size": 4},
    ),
    "qwen2vl": (
        "Qwen2VL",
        32,
        {},
        {"rope_parameters": SECTIONS},
        {**OF_QWEN, "depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    ),
    "qwen2.5vl": (
        "Qwen2_5_VL",
        32,
        {},
        {"rope_parameters": SECTIONS},
        {**OF_QWEN, "depth": 2, "out_hidden_size": 64, "intermediate_size": 48, "fullatt_block_indexes": [1]},
    ),
    "qwen3vl": (
        "Qwen3VL",
        32,
        {},
        {
            "num_hidden_layers": 3,  # one more than llama.cpp adds deep rows to
            "head_dim": 16,
            "rope_parameters": {**PLAIN, "mrope_section": [3, 3, 2], "mrope_interleaved": True},
        },
        {
            **OF_QWEN,
            "depth": 3,
            "out_hidden_size": 64,
            "intermediate_size": 48,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
    ),
    "smolvlm": (
        "SmolVLM",
        16,
        {"scale_factor": 2, "image_token_id": 260},
        {"model_type": "llama", "vocab_size": 296},  # with tokens of tiles
        {**OF_IMAGES, "image_size": 16, "patch_size": 4},
    ),
    "llava": (
        "Llava",
        16,
        {"image_token_index": 260},
        {"model_type": "llama"},
        {**OF_IMAGES, "num_hidden_layers": 3, "image_size": 16, "patch_size": 4, "model_type": "clip_vision_model"},
    ),
    "llava-siglip": (
        "Llava",
        16,
        {"image_token_index": 260, "vision_feature_select_strategy": "full"},
        {"model_type": "qwen2"},
        {**OF_IMAGES, "num_hidden_layers": 3, "image_size": 16, "patch_size": 4, "model_type": "siglip_vision_model"},
    ),
    "pixtral": (
        "Llava",
        32,
        {"image_token_index": 260, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        {"model_type": "mistral", "sliding_window": None, "vocab_size": 273},  # with a break
        PIXTRAL,
    ),
    "mistral3": (
        "Mistral3",
        32,
        {"image_token_index": 260, "spatial_merge_size": 2},
        {"model_type": "mistral", "sliding_window": None, "vocab_size": 273},  # with a break
        PIXTRAL,
    ),
    "internvl": (
        "InternVL",
        16,
        {"image_token_id": 260},
        {"model_type": "qwen2"},
        {**OF_IMAGES, "image_size": [16, 16], "patch_size": [4, 4], "attention_bias": True},
    ),
    "lfm2vl": (
        "Lfm2Vl",
        32,
        {"image_token_id": 260, "projector_hidden_size": 48},
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
            "model_type": "lfm2",
        },
        {**OF_IMAGES, "patch_size": 4, "num_patches": 64, "model_type": "siglip2_vision_model"},
    ),
    "gemma4": (
        "Gemma4",
        48,
        {},
        {
            **GEMMA_LAYERS,
            "sliding_window": 24,
            "global_head_dim": 32,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
        },
        {
            **OF_IMAGES,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "position_embedding_size": 3360,
            "use_clipped_linears": True,
            "standardize": True,
        },
    ),
}
OF_SOUNDS = {  # of Whisper's shape: 3000 frames become 1500 rows
    "qwen2audio": (
        "Qwen2Audio",
        {"model_type": "qwen2"},
        {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "num_mel_bins": 16},
    ),
    "voxtral": (
        "Voxtral",
        {"model_type": "llama", "head_dim": 16},
        {**OF_IMAGES, "intermediate_size": 128, "num_mel_bins": 16},
    ),
}
NOT_NORMALISED = {"do_normalize": False}  # settings of the preprocessor


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    OUT.mkdir(parents=True, exist_ok=True)
    for name, (architecture, settings) in FAMILIES.items():
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            write(name, architecture, settings, Path(folder))  # prints
    for name, remote in REMOTE.items():
        if not names or name in names:
            write_remote(name, remote)
    for name, shapes_of in (("rwkv6", rwkv6_shapes), ("rwkv7", rwkv7_shapes)):
        if not names or name in names:
            write_rwkv(name, *shapes_of())
    for name, (architecture, settings) in ENCODERS.items():
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            write_encoder(name, architecture, settings, Path(folder))
    if not names or "t5-decoder" in names:
        with tempfile.TemporaryDirectory() as folder:
            write_t5(Path(folder))
    if not names or "jina2" in names:
        write_jina2()
    for name, row in VISIONS.items():
        if not names or name in names:
            with tempfile.TemporaryDirectory() as folder:
                write_vision(name, *row, Path(folder))
    for name, sound in OF_SOUNDS.items():
        if not names or name in names:
            with tempfile.TemporaryDirectory() as folder:
                write_sound(name, *sound, Path(folder))


def write_vision(
    name: str, kind: str, side: int, whole: Settings, of_text: Settings, of_vision: Settings, folder: Path
) -> None:
    """`rows`: those of the text model that a picture becomes, then those of deepstack layers."""
    settings = {"text_config": {**WITH_TEXT, **of_text}, "vision_config": of_vision, **whole}
    config = getattr(transformers, f"{kind}Config")(**settings, attn_implementation="eager", dtype="float32")
    model, shapes = loaded(getattr(transformers, f"{kind}ForConditionalGeneration"), config, folder)
    picture = torch.from_numpy(pixels(side)).permute(2, 0, 1).float() / 255  # (3, side, side)
    picture = picture if kind == "Gemma4" else picture * 2 - 1  # mean and deviation 0.5
    with torch.no_grad():
        output = model.get_image_features(**inputs(kind, picture, of_vision))
    rows = output.pooler_output
    parts = [rows[0] if isinstance(rows, list | tuple) else rows, *(getattr(output, "deepstack_features", None) or [])]
    values = torch.cat([(part[0] if isinstance(part, tuple) else part).reshape(-1, 64) for part in parts])
    result = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "config": json.loads((folder / "config.json").read_text()),
        "tensors": shapes,
        "side": side,
        **({"images": NOT_NORMALISED} if kind == "Gemma4" else {}),
        "rows": [[round(value, 4) for value in row] for row in values[:, ::8].double().tolist()],
    }
    save(f"visions/{name}", result)


def write_sound(name: str, kind: str, of_text: Settings, of_audio: Settings, folder: Path) -> None:
    """`rows`: those of the text model that every fiftieth place of 30 seconds becomes."""
    text = {**WITH_TEXT, "max_position_embeddings": 2048, **of_text}
    settings = {"text_config": text, "audio_config": of_audio}
    config = getattr(transformers, f"{kind}Config")(**settings, attn_implementation="eager", dtype="float32")
    model, shapes = loaded(getattr(transformers, f"{kind}ForConditionalGeneration"), config, folder)
    frames = torch.from_numpy(spectrogram(of_audio["num_mel_bins"])).T[None]
    whole = getattr(model, "model", model)
    first = next(whole.multi_modal_projector.children())
    with torch.no_grad():
        hidden = whole.audio_tower(frames).last_hidden_state
        rows = whole.multi_modal_projector(hidden.reshape(-1, first.in_features))
    result = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "config": json.loads((folder / "config.json").read_text()),
        "tensors": shapes,
        "rows": [[round(value, 4) for value in row] for row in rows[::50, ::8].double().tolist()],
    }
    save(f"sounds/{name}", result)


def inputs(kind: str, picture: torch.Tensor, of_vision: Settings) -> Settings:
    """The encoder's inputs for one picture."""
    side = picture.shape[1]
    n, p = side // 4, 4
    if "Qwen" in kind:
        parts = picture.expand(2, 3, side, side).reshape(2, 3, n // 2, 2, p, n // 2, 2, p)
        flat = parts.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(n * n, -1)
        return {"pixel_values": flat, "image_grid_thw": torch.tensor([[1, n, n]])}
    if kind in ("Lfm2Vl", "Gemma4"):
        flat = picture.reshape(3, n, p, n, p).permute(1, 3, 2, 4, 0).reshape(1, n * n, -1)
        if kind == "Lfm2Vl":
            shapes = {"spatial_shapes": torch.tensor([[n, n]]), "pixel_attention_mask": torch.ones(1, n * n)}
            return {"pixel_values": flat, **shapes}
        y, x = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
        return {"pixel_values": flat, "image_position_ids": torch.stack([x, y], -1).reshape(1, n * n, 2)}
    sizes = {"image_sizes": torch.tensor([[side, side]])} if of_vision.get("model_type") == "pixtral" else {}
    return {"pixel_values": picture[None, None] if kind == "SmolVLM" else picture[None], **sizes}


def write_t5(folder: Path) -> None:
    """`logprobs`: behind a start and the prompt's first tokens, of a text that is the prompt."""
    settings = {**T5, "num_decoder_layers": 1, "tie_word_embeddings": False, "decoder_start_token_id": 0}
    config = transformers.T5Config(vocab_size=272, **settings, attn_implementation="eager", dtype="float32")
    model, shapes = loaded(transformers.T5ForConditionalGeneration, config, folder)
    with torch.no_grad():
        output = model(torch.tensor([IDS]), decoder_input_ids=torch.tensor([[0, *IDS[:6]]]))
    logprobs = torch.log_softmax(output.logits[0].double(), -1)[:, ::STEP]
    result = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "config": json.loads((folder / "config.json").read_text()),
        "tensors": shapes,
        "logprobs": [[round(value, 5) for value in row] for row in logprobs.tolist()],
    }
    save("encoders/t5-decoder", result)


def write_encoder(name: str, architecture: str, settings: dict[str, object], folder: Path) -> None:
    """`vector`: the mean over the prompt's tokens, or `score`: the only class's, of a text of the first type."""
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**{**ENCODER, **settings}, attn_implementation="eager", dtype="float32")
    model, shapes = loaded(model_class, config, folder)
    with torch.no_grad():
        output = model(torch.tensor([IDS]))
    ranks = architecture.endswith("Classification")
    values = output.logits[0] if ranks else output.last_hidden_state[0].mean(0)
    result = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "config": json.loads((folder / "config.json").read_text()),
        "tensors": shapes,
        "score" if ranks else "vector": [round(value, 5) for value in values.double().tolist()],
    }
    save(f"encoders/{name}", result)


def loaded(model_class: Any, config: Any, folder: Path) -> tuple[Any, dict[str, list[int]]]:
    """The model with the weights of its names, saved in the folder, and their shapes."""
    model_class(config).save_pretrained(folder)
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        shapes = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    save_file({key: torch.from_numpy(weight(key, shape)) for key, shape in shapes.items()}, path, {"format": "pt"})
    return model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval(), shapes


def save(name: str, result: dict[str, Any]) -> None:
    """A value a line."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in result.items())
    (OUT / f"{name}.json").parent.mkdir(parents=True, exist_ok=True)
    (OUT / f"{name}.json").write_text(f"{{\n{lines}\n}}\n")
    print(name, len(result["tensors"]), "tensors")


def write(name: str, architecture: str, settings: dict[str, object], folder: Path) -> None:
    config_class = getattr(transformers, f"{architecture}{'TextConfig' if architecture in TEXT else 'Config'}")
    model_class = getattr(transformers, f"{architecture}{'LMHeadModel' if architecture == 'GPT2' else 'ForCausalLM'}")
    config = config_class(**{**SMALL, **settings}, attn_implementation="eager", dtype="float32")
    model, shapes = loaded(model_class, config, folder)
    save_logprobs(name, json.loads((folder / "config.json").read_text()), shapes, model)


TEXT = ("Gemma3", "Gemma3n", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe")

if __name__ == "__main__":
    main(sys.argv[1:])

"""Tensors of architectures by papers and converters, independent of the registry under test."""

from __future__ import annotations

from tests.helpers.reference_linear_attention import LFM2, QWEN35

LEARNED_POSITIONS = ("gpt2", "starcoder")
LAYER_NORM = (
    *LEARNED_POSITIONS,
    *("modern-bert", "command-r", "cohere2", "stablelm", "orion", "starcoder2", "nemotron", "phi2", "gptneox"),
    *("jais2", "codeshell", "falcon", "cohere2moe", "bloom", "mpt", "jais", "jina-bert-v2", "phimoe", "rwkv6", "rwkv7"),
)
# norms after a sublayer
NORM_AFTER = ("gemma2", "gemma3", "gemma-embedding", "glm4", "olmo2", "exaone4", "afmoe")
NO_NORM_BEFORE = ("olmo2", "exaone4")
# one norm for attention and FFN
ONE_NORM = ("command-r", "cohere2", "cohere2moe", "phi2", "falcon")
NEMOTRON_H = ("nemotron_h", "nemotron_h_moe")  # layers with a single sublayer
SQUARED = (*NEMOTRON_H, "arcee", "nemotron", "plm", "jais2")  # squared ReLU
SIMPLE_GELU = (*LEARNED_POSITIONS, "starcoder2", "phi2", "gptneox", "codeshell", "falcon")
UNGATED = (*SIMPLE_GELU, *SQUARED, "apertus")
ROW_NORM = ("olmo2", "olmoe", "minimax-m2")  # QK norm over all heads
HEAD_NORM = (
    *("qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe", "gemma3", "gemma-embedding", "exaone4", "dots1", "bailingmoe2"),
    *(
        "hunyuan-dense",
        "hunyuan-moe",
        "hunyuan_vl",
        "maincoder",
        *QWEN35,
        *LFM2,
        "apertus",
        "exaone-moe",
        "afmoe",
        "hy_v3",
        "mellum",
    ),
    "grovemoe",
)
BALANCED = (  # router with a bias on the choice
    *("ernie4_5-moe", "dots1", "glm4moe", "minimax-m2", "bailingmoe2", "lfm2moe", "nemotron_h_moe"),
    *("exaone-moe", "afmoe", "hy_v3"),
)
WIDTH_OF_EXPERTS = (  # expert width has a key of its own
    *BALANCED[:3],
    *("qwen3moe", "qwen3vlmoe", "qwen2moe", "gpt-oss", "deepseek", "bailingmoe", "deepseek2", "bailingmoe2"),
    "cohere2moe",
    *("lfm2moe", "qwen35moe", "qwen3next", "nemotron_h_moe", "mistral4", "exaone-moe", "afmoe", "hy_v3", "mellum"),
    *("llama4", "grovemoe"),
)
FUSED_QKV = ("bailingmoe2", "cogvlm")  # only fused QKV
# MLA: keys and values from one short row per token
LATENT = ("deepseek2", "mistral4", "minicpm3", "plm")
# post_attention_norm is the norm before the FFN
OTHER_NAME = ("gpt-oss", "seed_oss", "glm4moe", *QWEN35)

# keys of Apertus
OF_XIELU = {"xielu.alpha_p": [0.8, 0.3], "xielu.alpha_n": [0.5, 1.1], "xielu.beta": 0.5, "xielu.eps": -1e-6}

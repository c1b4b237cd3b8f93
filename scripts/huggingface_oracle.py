"""Expected log-probabilities of transformers for tests/models/huggingface: `FAMILY.json` for each tiny checkpoint.

Run by an interpreter with torch, transformers and safetensors (2.13.0+cpu, 5.24.0, 0.8.0 made those of the repository):

    python scripts/huggingface_oracle.py [FAMILY …]

A file has the configuration, the names and shapes of the tensors as `save_pretrained` names them, the prompt, and the
log-probabilities of every fourth token after each prefix. Weights are numbers that both sides draw by tensor name:
`weights` below is that of tests/helpers/huggingface.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.helpers.huggingface_weights import IDS, STEP, weight  # noqa: E402

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
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
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
}


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    OUT.mkdir(parents=True, exist_ok=True)
    for name, (architecture, settings) in FAMILIES.items():
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            write(name, architecture, settings, Path(folder))


def write(name: str, architecture: str, settings: dict[str, object], folder: Path) -> None:
    config_class = getattr(transformers, f"{architecture}{'TextConfig' if architecture in TEXT else 'Config'}")
    model_class = getattr(transformers, f"{architecture}ForCausalLM")
    config = config_class(**{**SMALL, **settings}, attn_implementation="eager", dtype="float32")
    model_class(config).save_pretrained(folder)
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        shapes = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    save_file({key: torch.from_numpy(weight(key, shape)) for key, shape in shapes.items()}, path, {"format": "pt"})
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.tensor([IDS]), use_cache=False).logits[0].double()
    logprobs = torch.log_softmax(logits, -1)[:, ::STEP]
    result = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "config": json.loads((folder / "config.json").read_text()),
        "tensors": shapes,
        "logprobs": [[round(value, 5) for value in row] for row in logprobs.tolist()],
    }
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in result.items())
    (OUT / f"{name}.json").write_text(f"{{\n{lines}\n}}\n")
    print(name, len(shapes), "tensors, likeliest", logprobs.max().item())


TEXT = ("Gemma3", "Llama4")

if __name__ == "__main__":
    main(sys.argv[1:])

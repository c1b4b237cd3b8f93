"""LoRA adapters in peft's format: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from logitless.models.adapters.lora import F32, Adapter, Scaling, fused
from logitless.models.adapters.low_rank import EMBEDDING
from logitless.models.atomic_write import unfinished
from logitless.models.errors import ModelFileError, shown
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams
from logitless.models.huggingface.safetensors import write_safetensors
from logitless.models.weights.weights import check_weights, numbers_of

# architectures whose modules have Hugging Face's names of Llama; `llama`: GGUF has the rows of queries
# and keys in another order
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
_MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def write_peft(folder: str | Path, adapter: Adapter, base: GGUFFile, h: Hparams) -> None:
    """Write an adapter of this model as peft loads it. ModelFileError: peft has no such adapter.

    peft scales A and B by alpha / r of each module, with rsLoRA by alpha / √r, so B is written without
    this factor. DoRA's B and norms follow from its deltas and the model's weights."""
    if h.arch not in ARCHITECTURES:
        raise ModelFileError(base.path, f"{h.arch!r} is not among those for peft: {', '.join(ARCHITECTURES)}")
    pairs, declared = fused(adapter, base, h), check_weights(base, h)
    dora = any(pair.delta is not None for pair in pairs.values())
    ranks = {name: pair.rank for name, pair in pairs.items()}
    # by the alpha of training, or that of the file; with neither each module's factor is 1
    scaling = adapter.trained or Scaling(adapter.alpha)
    most = max(ranks.values(), default=0)
    tensors: dict[str, F32] = {}
    modules = {}
    for name, pair in pairs.items():
        modules[name] = module = _module(name, base, h)
        factor = scaling.factor(pair.rank) if scaling.alpha else 1.0
        b = pair.b * np.float32((adapter.alpha / pair.rank if adapter.alpha else 1.0) / factor)
        prefix = f"base_model.model.{module}"
        if name == EMBEDDING:
            tensors[f"{prefix}.lora_embedding_A"] = pair.a.T
            tensors[f"{prefix}.lora_embedding_B"] = b
            continue
        if dora:  # of all modules
            d = np.ones(len(b), np.float32) if pair.delta is None else 1 + pair.delta
            if not d.all():
                raise ModelFileError(base.path, f"the adapter has an output of {shown(name)} with the factor 0")
            b = b / d[:, None]
            w = numbers_of(base, declared, name) + np.float32(factor) * b @ pair.a
            norm = np.sqrt(np.square(w, dtype=np.float64).sum(1)).astype(np.float32)
            tensors[f"{prefix}.lora_magnitude_vector"] = _in_order(name, d * norm, h)
        tensors[f"{prefix}.lora_A.weight"] = pair.a
        tensors[f"{prefix}.lora_B.weight"] = _in_order(name, b, h)
    patterns = {modules[name]: rank for name, rank in ranks.items() if rank != most}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": most,
        "lora_alpha": scaling.alpha or most,
        "target_modules": sorted(modules.values()),
        "rank_pattern": patterns,
        "alpha_pattern": {} if scaling.alpha else patterns,
        "use_dora": dora,
        "use_rslora": scaling.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
    }
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    floats = {name: np.ascontiguousarray(values, np.float32) for name, values in tensors.items()}
    arrays = {name: ("F32", values.shape, [values]) for name, values in floats.items()}
    write_safetensors(path / "adapter_model.safetensors", arrays)
    with unfinished(path / "adapter_config.json") as part:
        part.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _module(name: str, base: GGUFFile, h: Hparams) -> str:
    """Hugging Face's name of a weight's module."""
    block = _BLOCK.fullmatch(name)
    if block is not None and block[2] in _MODULES:
        return f"model.layers.{block[1]}.{_MODULES[block[2]]}"
    if name == "output.weight":
        return "lm_head"
    if name == EMBEDDING and not h.arch.startswith("gemma"):  # Gemma's is scaled there
        return "model.embed_tokens"
    raise ModelFileError(base.path, f"the adapter has a pair for {shown(name)}, for which peft has no name")


def _in_order(name: str, rows: F32, h: Hparams) -> F32:
    """Outputs of a matrix in Hugging Face's order: of queries and keys of `llama`, each head's first
    half of rotated pairs and then its second, which GGUF has in turn."""
    kind = name.rpartition(".weight")[0].rpartition(".")[2]
    if h.arch != "llama" or kind not in ("attn_q", "attn_k"):
        return rows
    n = h.n_head if kind == "attn_q" else h.n_head_kv
    by_pair = rows.reshape(n, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(by_pair.swapaxes(1, 2)).reshape(rows.shape)

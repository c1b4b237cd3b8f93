"""Tiny Hugging Face folders for tests: checkpoints with log-probabilities of transformers, and their tokenizer."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from logitless.models.huggingface.safetensors import write_safetensors
from logitless.models.tokenizer.bpe import BYTE_OF_CHAR
from tests.helpers.huggingface_weights import weight
from tests.helpers.paths import ROOT

DATA = ROOT / "tests" / "data" / "huggingface"
FAMILIES = sorted(path.stem for path in DATA.glob("*.json"))
_MERGES = ["h e", "l l", "o r", "Ġ w", "he ll", "Ġw or", "l d", "hell o", "t h", "Ġ th", "i n", "e r", "a n", "Ġ a"]


@cache
def recorded(family: str) -> dict[str, Any]:
    """The file of scripts/huggingface_oracle.py."""
    value: dict[str, Any] = json.loads((DATA / f"{family}.json").read_text())
    return value


def write_folder(folder: Path, family: str, dtype: str = "F32") -> Path:
    """The checkpoint as `save_pretrained` would write it, with a vocabulary of bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    record = recorded(family)
    (folder / "config.json").write_text(json.dumps(record["config"]))
    tensors = {name: weight(name, shape) for name, shape in record["tensors"].items()}
    write_tensors(folder / "model.safetensors", tensors, dtype)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    if "side" in record:
        images = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"longest_edge": 48}}
        images |= record.get("images", {})
        (folder / "preprocessor_config.json").write_text(json.dumps(images))
    return folder


def write_tensors(path: Path, tensors: dict[str, np.ndarray[Any, Any]], dtype: str = "F32") -> None:
    """Numbers as F32, F16 or BF16 (cut)."""

    def stored(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if dtype == "BF16":
            return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return values.astype({"F32": np.float32, "F16": np.float16}[dtype])

    whole = {name: ("I64", values.shape, [values]) for name, values in tensors.items() if values.dtype == np.int64}
    floats = {name: (dtype, t.shape, [stored(t)]) for name, t in tensors.items() if name not in whole}
    write_safetensors(path, floats | whole)


def tokenizer_json() -> dict[str, Any]:
    """A tokenizer.json of GPT-2's kind: the bytes, 256 `<s>`, 257 `</s>`, and 14 merges."""
    vocab = dict(BYTE_OF_CHAR)
    vocab |= {pair.replace(" ", ""): 258 + i for i, pair in enumerate(_MERGES)}
    special = [{"id": 256 + i, "content": token, "special": True} for i, token in enumerate(("<s>", "</s>"))]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [{**token, **flags} for token in special],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": _MERGES},
    }

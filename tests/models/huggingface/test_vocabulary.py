"""Tokenizers of Hugging Face folders: ids of the `tokenizers` package, templates, special ids, damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from logitless.models.gguf.file import GGUFFile
from logitless.models.huggingface.config import Config
from logitless.models.huggingface.vocabulary import vocabulary_keys
from logitless.models.tokenizer import Tokenizer, from_metadata

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPLIT = {"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": False}
PRE_TOKENIZERS: dict[str, Any] = {  # as the models' own files have them
    "gpt-2": BYTES,
    "mpt": BYTES,
    "qwen2": {"type": "Sequence", "pretokenizers": [SPLIT, {**BYTES, "use_regex": False}]},
    "starcoder": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTES]},
}
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


def added(metadata: Any) -> list[dict[str, Any]]:
    kinds = np.asarray(metadata["tokenizer.ggml.token_type"])
    tokens = [token.decode() for token in metadata["tokenizer.ggml.tokens"]]
    return [{"id": int(i), "content": tokens[i], "special": bool(kinds[i] == 3), **FLAGS}
            for i in np.flatnonzero((kinds == 3) | (kinds == 4))]  # fmt: skip


def bpe_json(metadata: Any, name: str) -> dict[str, Any]:
    vocab = {token.decode(): i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [merge.decode() for merge in metadata["tokenizer.ggml.merges"]]
    model = {"type": "BPE", "vocab": vocab, "merges": merges}
    return {"version": "1.0", "added_tokens": added(metadata), "pre_tokenizer": PRE_TOKENIZERS[name], "model": model}


def spm_json(metadata: Any) -> dict[str, Any]:
    """Llama 2's: merges are all ways of making a piece, in the order of scores, as transformers converts them."""
    tokens = [token.decode() for token in metadata["tokenizer.ggml.tokens"]]
    vocab, scores = {token: i for i, token in enumerate(tokens)}, metadata["tokenizer.ggml.scores"]
    merges = []
    for token in sorted((token for token in tokens if not token.startswith("<0x")), key=lambda t: -scores[vocab[t]]):
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        merges += sorted(
            (p for p in halves if p[0] in vocab and p[1] in vocab), key=lambda p: (vocab[p[0]], vocab[p[1]])
        )
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": True, "unk_token": "<unk>"}
    model |= {"fuse_unk": True}
    template = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    processor = {
        "type": "TemplateProcessing",
        "single": template,
        "pair": template,
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": tokens[i], "special": True, **FLAGS} for i in range(3)],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "post_processor": processor,
        "model": model,
    }


def of_folder(folder: Path, whole: dict[str, Any], n: int, **settings: Any) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return from_metadata(vocabulary_values(folder, n))


def vocabulary_values(folder: Path, n: int) -> dict[str, Any]:
    keys = vocabulary_keys(Config(folder / "config.json", {}), n)
    return {name: key.value for name, key in keys.items()}


@pytest.mark.parametrize("name", [*PRE_TOKENIZERS, "llama-spm"])
def test_ids_of_a_folder_are_those_of_tokenizers(name: str, shared_data: Path, tmp_path: Path) -> None:
    path = shared_data / "vocabs" / f"ggml-vocab-{name}.gguf"
    with GGUFFile.open(path) as file:
        spm = name == "llama-spm"
        whole = spm_json(file.metadata) if spm else bpe_json(file.metadata, name)
        n = file.metadata.length("tokenizer.ggml.tokens")
    assert n is not None
    ours = of_folder(tmp_path, whole, n, bos_token="<s>") if spm else of_folder(tmp_path, whole, n)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = path.with_suffix(".gguf.inp").read_text().split("\n__ggml_vocab_test__\n")
    assert [ours.encode(text) for text in texts if text] == [theirs.encode(text).ids for text in texts if text]

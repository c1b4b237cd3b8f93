"""New models: hyper-parameters, a vocabulary from another GGUF file, weights initialised as in GPT-2."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from logitless.models.gguf.file import GGUFFile
from logitless.models.gguf.write import Data, Key, copied_keys, tensor, text, u32, write_gguf
from logitless.models.synthetic.model import ModelShape
from logitless.models.synthetic.vocabulary import vocabulary_keys
from logitless.training.errors import TrainingError

_STD = 0.02


def new_model(
    path: str | Path,
    vocabulary: str | Path | None,
    shape: ModelShape,
    seed: int = 0,
    name: str = "",
    chat_template: str | None = None,
) -> None:
    """Write a Llama model in F32 with random weights and the vocabulary of another file (None:
    bytes), to be trained.

    The output matrix is the embedding. Projections into the residual stream are smaller by √(2 ·
    n_layer), as in GPT-2."""
    if vocabulary is None:
        keys, n_vocab = byte_vocabulary()
    else:
        with GGUFFile.open(vocabulary) as gguf:
            keys = {k: v for k, v in copied_keys(gguf.metadata).items() if k.startswith("tokenizer.")}
            n_vocab = gguf.metadata.length("tokenizer.ggml.tokens") or 0
    if not n_vocab:
        raise TrainingError(f"{vocabulary}: has no vocabulary")
    if chat_template is not None:
        keys["tokenizer.chat_template"] = text(chat_template)
    write_model(path, keys, n_vocab, shape, seed, name)


def write_model(
    path: str | Path, vocabulary: dict[str, Key], n_vocab: int, shape: ModelShape, seed: int = 0, name: str = ""
) -> None:
    """`new_model` with the vocabulary's keys given."""
    if shape.n_embd % shape.n_head or shape.n_head % shape.n_head_kv or shape.head_dim % 2:
        raise TrainingError(
            f"a width of {shape.n_embd} with {shape.n_head} heads ({shape.n_head_kv} KV) is not possible: "
            "heads must be of an even, equal size, and KV heads a divisor of them"
        )
    keys: dict[str, Key] = {
        "general.name": text(name or "from scratch"),
        "general.file_type": u32(0),
        **shape.keys(n_vocab),
        **vocabulary,
    }
    rng = np.random.default_rng([seed, 5])
    n_kv = shape.n_head_kv * shape.head_dim
    tensors: list[tuple[str, Data]] = []

    def matrix(name: str, n_out: int, n_in: int, std: float = _STD) -> None:
        tensors.append((f"{name}.weight", tensor(rng.standard_normal((n_out, n_in), np.float32) * np.float32(std))))

    def norm(name: str) -> None:
        tensors.append((f"{name}.weight", tensor(np.ones(shape.n_embd, np.float32))))

    residual = _STD / np.sqrt(2 * shape.n_layer)
    matrix("token_embd", n_vocab, shape.n_embd)
    norm("output_norm")
    for i in range(shape.n_layer):
        b = f"blk.{i}."
        norm(b + "attn_norm")
        matrix(b + "attn_q", shape.n_embd, shape.n_embd)
        matrix(b + "attn_k", n_kv, shape.n_embd)
        matrix(b + "attn_v", n_kv, shape.n_embd)
        matrix(b + "attn_output", shape.n_embd, shape.n_embd, residual)
        norm(b + "ffn_norm")
        matrix(b + "ffn_gate", shape.n_ff, shape.n_embd)
        matrix(b + "ffn_up", shape.n_ff, shape.n_embd)
        matrix(b + "ffn_down", shape.n_embd, shape.n_ff, residual)
    write_gguf(path, "llama", keys, tensors)


def byte_vocabulary() -> tuple[dict[str, Key], int]:
    """A vocabulary of the 256 bytes and <unk>, <s>, </s>: every text is as many tokens as it has
    bytes.

    The space has a token of its own too, because SentencePiece writes it as a character of three
    bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    types = [2, 3, 3] + [6] * 256 + [1]  # gguf.TokenType: unknown, control, byte, normal
    return vocabulary_keys(tokens, [0.0] * len(tokens), types, space_prefix=False), len(tokens)

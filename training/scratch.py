"""New models: hyper-parameters, a vocabulary from another GGUF file, weights initialised as in GPT-2."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from logitless.models.gguf.file import GGUFFile
from logitless.models.gguf.types import ValueType
from logitless.models.gguf.write import Data, Key, copied_keys, f32, tensor, text, u32, write_gguf
from logitless.models.synthetic.model import ModelShape
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
        "llama.vocab_size": u32(n_vocab),
        "llama.context_length": u32(shape.n_ctx),
        "llama.embedding_length": u32(shape.n_embd),
        "llama.block_count": u32(shape.n_layer),
        "llama.feed_forward_length": u32(shape.n_ff),
        "llama.attention.head_count": u32(shape.n_head),
        "llama.attention.head_count_kv": u32(shape.n_head_kv),
        "llama.attention.layer_norm_rms_epsilon": f32(1e-5),
        "llama.rope.dimension_count": u32(shape.head_dim),
        "llama.rope.freq_base": f32(shape.rope_base),
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
    keys = {
        "tokenizer.ggml.model": text("llama"),
        "tokenizer.ggml.pre": text("default"),
        "tokenizer.ggml.tokens": Key(tokens, ValueType.ARRAY, ValueType.STRING),
        "tokenizer.ggml.scores": Key([0.0] * len(tokens), ValueType.ARRAY, ValueType.FLOAT32),
        "tokenizer.ggml.token_type": Key(types, ValueType.ARRAY, ValueType.INT32),
        "tokenizer.ggml.unknown_token_id": u32(0),
        "tokenizer.ggml.bos_token_id": u32(1),
        "tokenizer.ggml.eos_token_id": u32(2),
        "tokenizer.ggml.add_bos_token": Key(True, ValueType.BOOL),
        "tokenizer.ggml.add_eos_token": Key(False, ValueType.BOOL),
        "tokenizer.ggml.add_space_prefix": Key(False, ValueType.BOOL),
    }
    return keys, len(tokens)

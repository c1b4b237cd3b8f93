"""Files of synthetic drafters for synthetic models, whose tensors make them guess right often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from tests.helpers.reference_model import Array, Spec, add_vocabulary

N_HEAD, N_FF = 4, 96
MASK = 3  # token that stands for the unknown ones of a block


def write_eagle3(path: Path, s: Spec, keys: dict[str, Any] | None = None, **more: Any) -> dict[str, Array]:
    """An EAGLE-3 drafter of the model `s`. Each head attends mostly to its own token, whose embedding is what
    the model's next token depends on. `more`: tensors that replace or, as None, leave out others; returns all."""
    rng, n, head_dim = np.random.default_rng(13), s.n_embd, s.n_embd // N_HEAD
    own = rng.standard_normal((n, n)) / n**0.5
    t: dict[str, Any] = {
        "fc.weight": 0.1 * rng.standard_normal((n, 3 * n)) / n**0.5,
        "output_norm.weight": 1 + 0.2 * rng.standard_normal(n),
        "rope_freqs.weight": np.linspace(1, 3, head_dim // 2),
    }
    b = "blk.0."
    for name, scale in (("attn_q", 3.0), ("attn_k", 3.0)):
        t[f"{b}{name}.weight"] = np.concatenate([scale * own, 0.2 * rng.standard_normal((n, n)) / n**0.5], 1)
    t[b + "attn_v.weight"] = np.concatenate([np.eye(n), 0.2 * rng.standard_normal((n, n)) / n**0.5], 1)
    t[b + "attn_output.weight"] = 4 * np.eye(n) + 0.3 * rng.standard_normal((n, n)) / n**0.5
    for name in ("attn_norm", "attn_norm_2", "ffn_norm"):
        t[f"{b}{name}.weight"] = 1 + 0.2 * rng.standard_normal(n)
    t |= feed_forward(rng, b, n)
    t = {name: values for name, values in (t | more).items() if values is not None}
    defaults = {"block_count": 1, "target_layers": [0, 1, s.n_layer - 1], "target_hidden_size": n}
    write_drafter(path, "eagle3", s, defaults | (keys or {}), t)
    return t


def write_dflash(path: Path, s: Spec, keys: dict[str, Any] | None = None, **more: Any) -> dict[str, Array]:
    """A DFlash drafter of the model `s`, which guesses the first token of a block: only the embedding of the block's
    first token is in the values of its first layer. `more`: as of `write_eagle3`, but for its embedding."""
    rng, n, n_layer = np.random.default_rng(17), s.n_embd, 2
    head_dim, embedding = n // N_HEAD, more.pop("embedding")
    mask = embedding[MASK] * (np.arange(n) >= 8)
    mask /= np.linalg.norm(mask)
    t: dict[str, Any] = {
        "fc.weight": np.concatenate([rng.standard_normal((8, 2 * n)) / n**0.5, np.zeros((n - 8, 2 * n))]),
        "enc.output_norm.weight": 1 + 0.2 * rng.standard_normal(n),
        "output_norm.weight": 1 + 0.2 * rng.standard_normal(n),
    }
    for i in range(n_layer):
        b = f"blk.{i}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            t[f"{b}{name}.weight"] = 0.3 * rng.standard_normal((n, n)) / n**0.5
        for name, size in (("attn_norm", n), ("ffn_norm", n), ("attn_q_norm", head_dim), ("attn_k_norm", head_dim)):
            t[f"{b}{name}.weight"] = 1 + 0.2 * rng.standard_normal(size)
        t |= feed_forward(rng, b, n)
    for name in ("attn_q", "attn_k"):  # all heads attend alike
        t[f"blk.0.{name}.weight"] = np.tile(t[f"blk.0.{name}.weight"][:head_dim], (N_HEAD, 1))
    values = (np.eye(n) - np.outer(mask, mask)) * (np.arange(n) >= 8)
    t |= {
        "blk.0.attn_norm.weight": np.ones(n),
        "blk.0.attn_v.weight": values,
        "blk.0.attn_output.weight": 1000 * np.eye(n),
    }
    t = {name: values for name, values in (t | more).items() if values is not None}
    defaults = {
        "block_count": n_layer,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "target_layers": [1, s.n_layer - 1],
        "block_size": 4,
        "tokenizer.ggml.mask_token_id": MASK,
    }
    write_drafter(path, "dflash", s, defaults | (keys or {}), t)
    return t


def write_gemma4_assistant(
    path: Path, s: Spec, embedding: Array, keys: dict[str, Any] | None = None, **more: Any
) -> dict[str, Array]:
    """An assistant of the Gemma 4 model `s`, of half its width, which guesses by a projection of its `embedding`.
    `more`: as of `write_eagle3`."""
    rng, n, wide = np.random.default_rng(19), s.n_embd // 2, s.n_embd
    narrow = np.linalg.qr(rng.standard_normal((wide, n)))[0].T  # (n, wide)
    t: dict[str, Any] = {
        "token_embd.weight": embedding @ narrow.T,
        "output_norm.weight": 1 + 0.2 * rng.standard_normal(n),
        "nextn.pre_projection.weight": np.concatenate([0.2 * narrow, narrow], 1),
        "nextn.post_projection.weight": narrow.T,
        "rope_freqs.weight": np.linspace(1, 8, 16),
        "masked_embd_centroids.weight": np.ones((8, n)),
        "masked_embd_ordering": np.arange(s.n_vocab),
    }
    for i, head_dim in enumerate((16, 32)):
        b, q = f"blk.{i}.", N_HEAD * head_dim
        for name, size in (("attn_q_norm", head_dim), *((f"{name}_norm", n) for name in ("attn", "ffn"))):
            t[f"{b}{name}.weight"] = 1 + 0.2 * rng.standard_normal(size)
        for name in ("post_attention_norm", "post_ffw_norm"):
            t[f"{b}{name}.weight"] = 0.3 * rng.standard_normal(n)
        t[b + "layer_output_scale.weight"] = np.array([0.7])
        for name, shape in (("attn_q", (q, n)), ("attn_output", (n, q))):
            t[f"{b}{name}.weight"] = rng.standard_normal(shape) / shape[1] ** 0.5
        t |= feed_forward(rng, b, n)
    t = {name: values for name, values in (t | more).items() if values is not None}
    defaults = {
        "embedding_length": n,
        "embedding_length_out": wide,
        "block_count": 2,
        "nextn_predict_layers": 2,
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.key_length_swa": 16,
        "attention.value_length_swa": 16,
        "attention.sliding_window": s.keys["attention.sliding_window"],
        "attention.sliding_window_pattern": [True, False],
        "attention.shared_kv_layers": 2,
        "rope.dimension_count": 32,
        "rope.dimension_count_swa": 16,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
    }
    write_drafter(path, "gemma4-assistant", s, defaults | (keys or {}), t)
    return t


def feed_forward(rng: np.random.Generator, b: str, n: int) -> dict[str, Array]:
    """Random matrices of block `b`, of width n."""
    shapes = (("ffn_gate", (N_FF, n)), ("ffn_up", (N_FF, n)), ("ffn_down", (n, N_FF)))
    return {f"{b}{name}.weight": rng.standard_normal(shape) / shape[1] ** 0.5 for name, shape in shapes}


def write_drafter(path: Path, arch: str, s: Spec, keys: dict[str, Any], tensors: dict[str, Array]) -> None:
    """Write a file; `keys` go before those that drafters have alike, and None leaves one out."""
    keys = {
        "context_length": s.n_ctx_train,
        "embedding_length": s.n_embd,
        "feed_forward_length": N_FF,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_HEAD,
        "attention.layer_norm_rms_epsilon": 1e-5,
    } | keys
    writer = GGUFWriter(path, arch)
    add = {float: writer.add_float32, int: writer.add_uint32, list: writer.add_array, bool: writer.add_bool}
    for name, value in keys.items():
        if value is not None:
            add[type(value)](name if name.startswith("tokenizer.") else f"{arch}.{name}", value)
    add_vocabulary(writer, s.n_vocab)
    for name, values in tensors.items():
        writer.add_tensor(name, values if values.dtype == np.int64 else values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

"""A small BERT with random weights as a GGUF file, and an independent float64 forward pass."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

Array = np.ndarray[Any, Any]
N_EMBD, N_HEAD, N_FF, N_LAYER, N_CTX, EPS = 48, 4, 80, 2, 64, 1e-12
N_EXPERT = 4
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = ["▁a", "▁the", "▁cat", "▁dog", "▁sat", "▁ran", "▁on", "▁mat", "▁moon", "▁sun", "▁and", "▁.", "▁,", "s", "ing"]
TOKENS = SPECIAL + WORDS + [f"▁{chr(c)}{chr(c)}" for c in range(ord("a"), ord("z") + 1)] + [f"x{i}" for i in range(15)]
N_VOCAB = len(TOKENS)
Tensors = dict[str, Array]


def tensors(head: bool = True, nomic: bool = False, experts: bool = False, jina: bool = False) -> Tensors:
    r = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (N_VOCAB, N_EMBD)}
    if not (nomic or experts or jina):
        shapes["position_embd.weight"] = N_CTX, N_EMBD
    shapes["token_types.weight"] = 2, N_EMBD

    def pair(name: str, *shape: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[:1]

    pair("token_embd_norm", N_EMBD)
    for i in range(N_LAYER):
        if experts or jina:
            pair(f"blk.{i}.attn_qkv", 3 * N_EMBD, N_EMBD)
            pair(f"blk.{i}.attn_output", N_EMBD, N_EMBD)
            if experts and i % 2:  # of every second layer
                shapes[f"blk.{i}.ffn_gate_inp.weight"] = N_EXPERT, N_EMBD
                shapes[f"blk.{i}.ffn_up_exps.weight"] = N_EXPERT, N_FF, N_EMBD
                shapes[f"blk.{i}.ffn_down_exps.weight"] = N_EXPERT, N_EMBD, N_FF
            else:
                pair(f"blk.{i}.ffn_up", N_FF, N_EMBD)
                pair(f"blk.{i}.ffn_down", N_EMBD, N_FF)
        elif nomic:
            shapes[f"blk.{i}.attn_qkv.weight"] = 3 * N_EMBD, N_EMBD
            shapes[f"blk.{i}.attn_output.weight"] = N_EMBD, N_EMBD
            shapes |= {f"blk.{i}.ffn_{name}.weight": (N_FF, N_EMBD) for name in ("gate", "up")}
            shapes[f"blk.{i}.ffn_down.weight"] = N_EMBD, N_FF
        else:
            for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
                pair(f"blk.{i}.{name}", N_EMBD, N_EMBD)
            pair(f"blk.{i}.ffn_up", N_FF, N_EMBD)
            pair(f"blk.{i}.ffn_down", N_EMBD, N_FF)
        pair(f"blk.{i}.attn_output_norm", N_EMBD)
        pair(f"blk.{i}.layer_output_norm", N_EMBD)
    if head:
        pair("cls", N_EMBD, N_EMBD)
        pair("cls.output", 1, N_EMBD)
    return {
        name: (r.normal(size=shape) / (math.sqrt(shape[-1]) if len(shape) > 1 else 4) + ("norm.weight" in name)).astype(
            np.float32
        )
        for name, shape in shapes.items()
    }


def word_pieces(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("bert")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (N_VOCAB - len(SPECIAL)))
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)


def write(path: Path, values: Tensors, **keys: Any) -> Path:
    rotary, experts = "blk.0.attn_qkv.weight" in values, "blk.1.ffn_gate_inp.weight" in values
    jina = rotary and not experts and "blk.0.ffn_gate.weight" not in values
    kind = "nomic-bert-moe" if experts else "jina-bert-v3" if jina else "nomic-bert" if rotary else "bert"
    writer = GGUFWriter(path, kind)
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(N_LAYER)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_layer_norm_eps(EPS)
    writer.add_causal_attention(False)
    writer.add_uint32(f"{writer.arch}.pooling_type", keys.get("pooling", 2))
    if rotary:
        writer.add_rope_freq_base(1000.0)
    if experts:
        writer.add_moe_every_n_layers(2)
        writer.add_expert_count(N_EXPERT)
        writer.add_expert_used_count(2)
    writer.add_token_type_count(2)
    keys.get("vocabulary", word_pieces)(writer)
    for name, value in values.items():
        writer.add_tensor(name, value.astype(keys.get("dtype", np.float32)) if value.ndim > 1 else value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def norm(t: Tensors, name: str, x: Array) -> Array:
    x = x - x.mean(1, keepdims=True)
    return x / np.sqrt((x**2).mean(1, keepdims=True) + EPS) * t[f"{name}.weight"] + t[f"{name}.bias"]


def forward(values: Tensors, tokens: list[int]) -> Array:
    """Hidden states (tokens, N_EMBD) of one text, of BERT; llama.cpp is the reference of its relatives."""
    t = {name: value.astype(np.float64) for name, value in values.items()}

    def linear(name: str, x: Array) -> Array:
        return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", 0.0)

    x = t["token_embd.weight"][tokens] + t["token_types.weight"][0] + t["position_embd.weight"][: len(tokens)]
    x = norm(t, "token_embd_norm", x)
    d = N_EMBD // N_HEAD
    for i in range(N_LAYER):
        b = f"blk.{i}."
        q, k, v = (linear(f"{b}attn_{c}", x) for c in "qkv")
        y = np.empty_like(x)
        for h in range(N_HEAD):
            of_head = slice(h * d, (h + 1) * d)
            s = q[:, of_head] @ k[:, of_head].T / math.sqrt(d)
            p = np.exp(s - s.max(1, keepdims=True))
            y[:, of_head] = p / p.sum(1, keepdims=True) @ v[:, of_head]
        x = norm(t, f"{b}attn_output_norm", x + linear(f"{b}attn_output", y))
        up = linear(f"{b}ffn_up", x)
        up = 0.5 * up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        x = norm(t, f"{b}layer_output_norm", x + linear(f"{b}ffn_down", up))
    return x


def score(values: Tensors, x: Array) -> Array:
    t = {name: value.astype(np.float64) for name, value in values.items()}
    x = np.tanh(t["cls.weight"] @ x + t["cls.bias"])
    return t["cls.output.weight"] @ x + t["cls.output.bias"]

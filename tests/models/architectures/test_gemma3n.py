"""Gemma 3n and 4: per-layer heads and widths, KV sharing, per-layer embeddings."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import read_hparams
from tests.helpers.reference_model import Spec, write
from tests.models.architectures.test_registry import compute, tokens

PATTERN = [True, True, False] * 3
KEYS: dict[str, Any] = {
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": PATTERN,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "rope.dimension_count": 32,
    "rope.dimension_count_swa": 16,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
    "final_logit_softcapping": 30.0,
    "embedding_length_per_layer_input": 0,
    "attention.shared_kv_layers": 0,
}
SMALL = Spec(
    "gemma4",
    n_layer=9,
    head_dim=32,
    factors={"rope_freqs": 1e30},
    keys=KEYS
    | {
        "embedding_length_per_layer_input": 32,
        "attention.shared_kv_layers": 3,
        "feed_forward_length": [96] * 6 + [192] * 3,
    },
    traits=("layer_output_scale",),
)
LARGE = Spec(
    "gemma4",
    n_layer=6,
    head_dim=32,
    factors={"rope_freqs": 8.0},
    keys=KEYS | {"attention.sliding_window_pattern": PATTERN[:6], "attention.head_count_kv": [2, 2, 1] * 2},
    traits=("keys as values", "layer_output_scale"),
)
EXPERTS = replace(
    LARGE,
    n_expert=8,
    n_expert_used=3,
    keys=LARGE.keys | {"expert_feed_forward_length": 32},
    traits=(*LARGE.traits, "fused experts"),
)
WIDE = replace(  # heads of the size that they have
    LARGE,
    n_layer=3,
    n_head=2,
    head_dim=512,
    keys=KEYS
    | {
        "attention.sliding_window_pattern": PATTERN[:3],
        "attention.head_count_kv": [2, 2, 1],
        "attention.key_length_swa": 256,
        "attention.value_length_swa": 256,
        "rope.dimension_count": 512,
        "rope.dimension_count_swa": 256,
    },
)
GEMMA4 = {
    "gemma4 wide": WIDE,
    "gemma4 small": SMALL,
    "gemma4 with what nobody uses": replace(SMALL, traits=("unused",)),
    "gemma4 large": LARGE,
    "gemma4 experts": EXPERTS,
    "gemma4 experts apart": replace(EXPERTS, traits=LARGE.traits),
    "gemma4 experts of 21": replace(
        EXPERTS, keys=EXPERTS.keys | {"expert_feed_forward_length": 21}, types={"ffn_down_exps": "f16"}
    ),
    "gemma4 plain": replace(LARGE, n_layer=3, keys=KEYS | {"attention.sliding_window_pattern": PATTERN[:3]}, traits=()),
}
KEYS_3N: dict[str, Any] = {
    "attention.sliding_window": 8,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
    "embedding_length_per_layer_input": 256,  # and other numbers that llama.cpp does not read
    "altup.num_inputs": 4,
    "altup.active_idx": 0,
}
F32 = dict.fromkeys(("altup_router", "altup_predict_coef", "altup_correct_coef"), "f32")


def of_3n(n_layer: int, n_shared: int, **more: Any) -> Spec:
    keys = KEYS_3N | {
        "attention.sliding_window_pattern": [i % 5 != 4 for i in range(n_layer)],
        "attention.shared_kv_layers": n_shared,
        "activation_sparsity_scale": ([1.6448536] * 10 + [float("-inf")] * 15)[:n_layer],
    }
    return Spec("gemma3n", n_layer=n_layer, keys=keys, types=F32, **more)


GEMMA3N = {"gemma3n": of_3n(25, 5, n_ff=64, traits=("unused",)), "gemma3n, all keep keys": of_3n(5, 0, head_dim=32)}
SHORT_3N = of_3n(10, 5, n_ff=64, traits=("unused",))  # llama.cpp takes 20 layers for those that keep keys
SPECS = GEMMA4 | GEMMA3N


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gemma4 small", "attention.shared_kv_layers", 8),  # none that sees everything would keep keys
        ("gemma4 small", "attention.shared_kv_layers", 9),
        ("gemma4 small", "attention.sliding_window_pattern", None),
        ("gemma4 small", "attention.sliding_window_pattern", "every second"),
        ("gemma4 small", "attention.sliding_window", None),
        ("gemma4 small", "feed_forward_length", [96] * 7 + [192]),
        ("gemma4 small", "rope.dimension_count_swa", 32),
        ("gemma4 large", "attention.head_count_kv", [2, 2, 0] * 2),
        ("gemma3n, all keep keys", "altup.num_inputs", 1),
        ("gemma3n, all keep keys", "altup.num_inputs", 10**9),
        ("gemma3n, all keep keys", "altup.active_idx", 1),
        ("gemma3n, all keep keys", "activation_sparsity_scale", [1.0] * 4),
        ("gemma3n, all keep keys", "activation_sparsity_scale", [float("nan")] * 5),
    ],
)
def test_impossible_key_is_refused(tmp_path: Path, name: str, key: str, value: object) -> None:
    write(path := tmp_path / "m.gguf", SPECS[name])
    with GGUFFile.open(path) as gguf:
        metadata = {k: v for k, v in gguf.metadata.items() if k != f"{SPECS[name].arch}.{key}"}
        if value is not None:
            metadata[f"{SPECS[name].arch}.{key}"] = np.array(value) if isinstance(value, list) else value
    with pytest.raises(ModelFileError, match=re.escape(f"key '{SPECS[name].arch}.{key}'")):
        read_hparams(metadata, 101, "m.gguf")


@pytest.mark.parametrize(
    ("name", "dtype", "cache"),
    [
        *((name, "q8_0", "f16" if name == "gemma4 wide" else "f32") for name in SPECS),
        *(("gemma4 small", "f32", "f16"), ("gemma3n", "f32", "f16")),
    ],
)
def test_the_same_bits_however_a_prompt_is_cut(tmp_path: Path, name: str, dtype: str, cache: str) -> None:
    s = SHORT_3N if name == "gemma3n" else SPECS[name]
    s = replace(s, dtype=dtype, types={"ffn_gate_inp": "f32"} | F32 | s.types)
    write(path := tmp_path / "m.gguf", s)
    ids = tokens(s)
    whole, *others = (compute(path, s, ids, chunks, (cache, cache)) for chunks in ((40,), (1,) * 40, (3, 19, 18)))
    assert whole.std() > 0.1
    for other in others:
        np.testing.assert_array_equal(whole, other)

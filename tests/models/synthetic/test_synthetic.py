"""Synthetic models: valid files, the asked-for types, the same bytes for the same seed, and text in the vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.models.gguf.file import GGUFFile
from logitless.models.quantization.quantize import DTYPES, block_of, quantize, storable_dtype
from logitless.models.synthetic.model import SHAPES, ModelShape, parse_dtype, synthesize
from logitless.models.synthetic.vocabulary import SMALLEST, SPACE, vocabulary

# relative RMS error on normal values; the larger of a type's own and what a simple encoder reaches
ERRORS = {"f32": 0.0, "f16": 3e-4, "bf16": 2e-3, "q8_0": 0.007, "q6_k": 0.023, "q5_0": 0.05, "q5_1": 0.045}
ERRORS |= {"q5_k": 0.045, "q4_0": 0.1, "q4_1": 0.09, "q4_k": 0.09, "iq4_nl": 0.085, "mxfp4": 0.13}
ERRORS |= {"iq4_xs": 0.085, "q3_k": 0.17, "q2_k": 0.35}


def dequantize(data: np.ndarray, dtype: str) -> np.ndarray:
    return quants.dequantize(data, GGMLQuantizationType[dtype.upper()])


def relative_error(x: np.ndarray, dtype: str) -> float:
    y = dequantize(quantize(x, dtype), dtype)
    assert y.shape == x.shape
    return float(np.sqrt(np.mean((y - x) ** 2) / np.mean(x**2)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 3.0, -3.0])
def test_quantize_error(dtype: str, offset: float) -> None:
    x = np.random.default_rng(0).standard_normal((40, 512), np.float32) * np.float32(0.02)
    assert relative_error(x, dtype) <= ERRORS[dtype]
    assert quantize(x, dtype.upper()).shape == (40, 512 // block_of(dtype)[0] * block_of(dtype)[1])
    shifted = x + np.float32(
        0.02 * offset
    )  # blocks of one sign: the minimum is not below zero, or the maximum not above
    assert relative_error(shifted, dtype) <= ERRORS[dtype]


@pytest.mark.parametrize("dtype", ["q4_k", "q5_k", "q6_k"])
def test_k_types_at_the_edges(dtype: str) -> None:
    x = np.random.default_rng(1).standard_normal((5, 256), np.float32)
    x[0] = 0
    x[1, :64] = 0  # whole sub-blocks of zeros
    x[2, 100:] *= np.float32(1e-6)  # sub-blocks that vanish beside the others
    x[3] = 0.25
    x[4] = np.float32(1e-12)  # below the smallest scale in 16 bits
    y = dequantize(quantize(x, dtype), dtype)
    assert not y[0].any()
    assert not y[4].any()
    assert not y[1, :64].any()
    np.testing.assert_allclose(y[3], 0.25, rtol=1e-2)
    assert np.abs(y - x).max() < 0.2


def test_types_of_codes_at_the_edges() -> None:
    x = np.random.default_rng(1).standard_normal((6, 32), np.float32)
    x[0] = 0
    x[1, 1:] = 0
    x[2] *= np.float32(1e30)
    x[3] = 0.25
    x[4] = np.float32(1e-39)  # below the smallest scale of either
    for dtype in ("iq4_nl", "mxfp4"):
        y = dequantize(quantize(np.delete(x, 2, 0) if dtype == "iq4_nl" else x, dtype), dtype)
        assert not y[0].any()
        assert np.abs(y[1] - x[1]).max() <= 0.2 * np.abs(x[1, 0])
        assert np.abs(y[-2]).max() < 1e-38
        np.testing.assert_allclose(y[-3], 0.25, rtol=1e-3)
    np.testing.assert_array_equal(y, dequantize(quants.quantize(x, GGMLQuantizationType.MXFP4), "mxfp4"))


@given(st.integers(0, 2**32), st.floats(1e-3, 1e3), st.sampled_from(["q4_k", "q5_k", "q6_k"]))
@settings(max_examples=40)
def test_k_types_at_any_scale(seed: int, scale: float, dtype: str) -> None:
    x = np.random.default_rng(seed).standard_normal((2, 256), np.float32) * np.float32(scale)
    assert relative_error(x, dtype) <= 1.3 * ERRORS[dtype]  # few values: more spread than the test above


def test_quantize_across_chunks() -> None:
    x = np.random.default_rng(2).standard_normal((4100, 256), np.float32)
    for dtype in ("q4_k", "q6_k"):
        np.testing.assert_array_equal(quantize(x, dtype)[4090:], quantize(x[4090:], dtype))


def test_quantize_refuses() -> None:
    with pytest.raises(ValueError, match="rows of 100 elements"):
        quantize(np.zeros((2, 100), np.float32), "q8_0")
    with pytest.raises(ValueError, match="'iq2_xs'"):
        quantize(np.zeros((2, 256), np.float32), "iq2_xs")
    for dtype in ("q8_0", "q4_k"):
        with pytest.raises(ValueError, match="not finite"):
            quantize(np.full((2, 256), np.nan, np.float32), dtype)


def test_fallback_types() -> None:
    assert [storable_dtype("q4_k", n) for n in (512, 288, 33)] == ["q4_k", "q5_0", "f16"]
    assert [storable_dtype("q5_k", n) for n in (512, 288, 33)] == ["q5_k", "q5_1", "f16"]
    assert [storable_dtype("q6_k", n) for n in (512, 288, 33)] == ["q6_k", "q8_0", "f16"]
    assert [storable_dtype(t, 33) for t in ("q8_0", "mxfp4", "f32", "bf16")] == ["f16", "f16", "f32", "bf16"]


@pytest.mark.parametrize(
    "dtype", ["F32", "f16", "BF16", "Q8_0", "Q4_0", "Q4_1", "q5_0", "Q5_1", "iq4_nl", "MXFP4", "Q4_K", "Q5_K", "Q6_K"]
)
@pytest.mark.parametrize("shape", ["tiny", "mini"])
def test_files_are_valid(tmp_path: Path, shape: str, dtype: str) -> None:
    path, s = tmp_path / "m.gguf", SHAPES[shape]
    synthesize(path, shape, dtype)
    assert list(tmp_path.iterdir()) == [path]
    reader = GGUFReader(path)
    with GGUFFile.open(path) as file:
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["llama.rope.dimension_count"] == s.n_embd // s.n_head
        assert len(file.metadata["tokenizer.ggml.tokens"]) == s.n_vocab
        assert "output.weight" not in file.tensors
        for t in reader.tensors:
            info = file.tensors[t.name]
            np.testing.assert_array_equal(file.bytes_of(t.name), t.data.reshape(-1).view(np.uint8))
            values = dequantize(t.data.reshape(-1).view(np.uint8).reshape(info.shape[0], -1), info.dtype)
            if len(info.shape) == 1:
                assert info.dtype == "f32"
                assert (values > 0).all()
                continue
            values = values.reshape(info.shape)
            assert info.dtype == storable_dtype(dtype.lower(), info.shape[1])
            assert np.std(values) == pytest.approx(info.shape[1] ** -0.5, rel=0.05)
            assert abs(np.mean(values)) < 0.1 * np.std(values)
            assert len(np.unique(values, axis=0)) == info.shape[0]  # no two rows alike


def test_mixed_types(tmp_path: Path) -> None:
    assert parse_dtype("Q5_K_M") == ("q5_k", "q6_k")
    synthesize(tmp_path / "m.gguf", "mini", "Q4_K_M")
    with GGUFFile.open(tmp_path / "m.gguf") as file:
        assert file.tensors["token_embd.weight"].dtype == "q6_k"
        assert file.tensors["blk.0.attn_q.weight"].dtype == "q4_k"
        assert file.metadata["general.file_type"] == 15
    synthesize(tmp_path / "m.gguf", ModelShape(288, 1, 6, 6, 768, 400), "Q4_K_M")
    with GGUFFile.open(tmp_path / "m.gguf") as file:
        types = {name: info.dtype for name, info in file.tensors.items()}
        assert types["token_embd.weight"] == "q8_0"
        assert types["blk.0.ffn_up.weight"] == "q5_0"
        assert types["blk.0.ffn_down.weight"] == "q4_k"


def test_rows_are_not_a_multiple_of_anything(tmp_path: Path) -> None:
    synthesize(tmp_path / "m.gguf", ModelShape(60, 1, 2, 1, 100, 1000), "Q8_0")
    with GGUFFile.open(tmp_path / "m.gguf") as file:
        assert file.tensors["token_embd.weight"].dtype == "f16"
        rows = file.bytes_of("token_embd.weight").view(np.float16).reshape(1000, 60)
        assert len(np.unique(rows, axis=0)) == 1000


def test_rows_of_a_single_block_differ(tmp_path: Path) -> None:
    synthesize(tmp_path / "m.gguf", ModelShape(32, 1, 2, 1, 64, 5000), "Q4_0")
    with GGUFFile.open(tmp_path / "m.gguf") as file:
        assert len(np.unique(file.bytes_of("token_embd.weight").reshape(5000, -1), axis=0)) == 5000


def test_bytes_depend_on_the_seed_only(tmp_path: Path) -> None:
    def content(seed: int) -> bytes:
        synthesize(tmp_path / "m.gguf", "mini", "Q4_K", seed)
        return (tmp_path / "m.gguf").read_bytes()

    first = content(7)
    assert content(7) == first
    assert content(8) != first


def test_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    synthesize(tmp_path / "m.gguf", "tiny", progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]


def test_failures_leave_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for arguments, message in (
        (("2M", "Q8_0"), "unknown shape '2M'"),
        (("tiny", "IQ1_S"), "unknown type 'IQ1_S'"),
        ((ModelShape(32, 1, 2, 1, 64, 353), "F32"), "too small"),
    ):
        with pytest.raises(ValueError, match=message):
            synthesize(path, *arguments)
    with pytest.raises(ValueError, match="unknown architecture 'mamba'"):
        synthesize(path, "tiny", arch="mamba")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize(path, "tiny", progress=interrupt)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("n_vocab", [SMALLEST, 512, 32000, 128256])
def test_vocabulary(n_vocab: int) -> None:
    tokens, scores, types = vocabulary(n_vocab)
    assert len(tokens) == len(scores) == len(types) == len(set(tokens)) == n_vocab
    assert tokens[:4] == [b"<unk>", b"<s>", b"</s>", b"<0x00>"]
    assert types[:4] == [2, 3, 3, 6]
    pieces = [token.decode() for token in tokens[259:]]
    assert set(map(chr, range(33, 127))) | {SPACE} <= set(pieces)
    known = set(pieces[-95:])
    for piece in pieces[:-95]:  # each is the merge of an earlier one and a character
        assert piece[:-1] in known
        known.add(piece)

"""Quantized files: tensors equal gguf's and recorded ones, importances, refusals, and a full disk."""

from __future__ import annotations

import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from logitless.backends.registry import open_backends
from logitless.graph.execution.session import Session
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import define_model, hparams_of
from logitless.models.quantization.imatrix import Imatrix, read_imatrix, write_imatrix
from logitless.models.quantization.presets import TypeOptions
from logitless.models.quantization.quantize import dequantized, quantize
from logitless.models.quantization.quantize_model import plan_quantization
from logitless.training.score import window_losses
from tests.helpers.llama_cpp_library import activations, needs_llama_cpp
from tests.helpers.reference_model import Spec, write

WIDE = Spec(n_embd=256, n_ff=256, dtype="f32")
NAME = "blk.0.ffn_up.weight"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "wide.gguf"
    write(path, WIDE)
    return path


@contextmanager
def quantized(path: Path, out: Path, name: str, **more: Any) -> Iterator[tuple[GGUFFile, GGUFFile]]:
    with GGUFFile.open(path) as before:
        plan_quantization(before, name, **more).write(out)
        with GGUFFile.open(out) as after:
            yield before, after


def refusal(path: Path, name: str, **more: Any) -> str:
    with GGUFFile.open(path) as gguf, pytest.raises(ModelFileError) as error:
        plan_quantization(gguf, name, **more)
    return str(error.value)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_recorded_files(name: str, shared_data: Path, tmp_path: Path) -> None:
    models = shared_data / "models"
    source = models / "prometheus-shakespeare-2.3M-F32.gguf"
    options = TypeOptions(pure=True)
    with (
        quantized(source, tmp_path / "q.gguf", name, options=options) as (_, ours),
        GGUFFile.open(models / f"prometheus-shakespeare-2.3M-{name}.gguf") as recorded,
    ):
        assert ours.metadata["general.file_type"] == recorded.metadata["general.file_type"]
        for tensor, info in recorded.tensors.items():
            assert (ours.tensors[tensor].dtype, ours.tensors[tensor].shape) == (info.dtype, info.shape)
            assert ours.bytes_of(tensor).tobytes() == recorded.bytes_of(tensor).tobytes(), tensor


def test_a_mixture_is_a_model(wide: Path, tmp_path: Path) -> None:
    with quantized(wide, tmp_path / "q.gguf", "q4_k_m") as (before, after):
        assert hparams_of(after) == hparams_of(before)
        assert (after.metadata["general.file_type"], after.metadata["general.quantization_version"]) == (15, 2)
        assert list(after.tensors) == list(before.tensors)
        assert {after.tensors[NAME].dtype, after.tensors["blk.0.attn_norm.weight"].dtype} == {"q4_k", "f32"}
        values = dequantized(before.tensors[NAME], before.bytes_of(NAME))
        assert after.bytes_of(NAME).tobytes() == quantize(values, "q4_k").tobytes()


def test_importances_weigh_each_expert_by_its_own(tmp_path: Path) -> None:
    write(tmp_path / "moe.gguf", Spec(n_embd=256, n_ff=256, n_expert=4, n_expert_used=2, dtype="f32"))
    name, rng = "blk.0.ffn_up_exps.weight", np.random.default_rng(0)
    means = (rng.random((4, 256)) ** 4).astype(np.float32)
    imatrix = Imatrix(tmp_path / "i.gguf", {name: means.reshape(-1)}, ["a.txt"], 3)
    with quantized(tmp_path / "moe.gguf", tmp_path / "q.gguf", "Q4_K_S", imatrix=imatrix) as (before, after):
        values = dequantized(before.tensors[name], before.bytes_of(name))
        expected = b"".join(quantize(values[i], "q4_k", means[i]).tobytes() for i in range(4))
        assert after.bytes_of(name).tobytes() == expected
        keys = ("file", "dataset", "entries_count", "chunks_count")
        assert [after.metadata[f"quantize.imatrix.{key}"] for key in keys] == [str(imatrix.path), "a.txt", 1, 3]
    with GGUFFile.open(tmp_path / "moe.gguf") as gguf:
        plan = plan_quantization(gguf, "Q4_K_S", imatrix=imatrix)
        assert name not in plan.without_importance
        assert "blk.0.attn_q.weight" in plan.without_importance


def test_rows_that_are_no_whole_blocks_fall_back(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", Spec(n_embd=64, n_ff=80, dtype="f32"))
    with GGUFFile.open(tmp_path / "m.gguf") as gguf:
        plan = plan_quantization(gguf, "Q4_K_S")
        assert plan.types[NAME] == "q5_0"
        assert plan.types["blk.0.ffn_down.weight"] == "f16"
        assert NAME in plan.fallbacks["q4_k", "q5_0"]


def test_quantized_input_is_refused_unless_allowed(wide: Path, tmp_path: Path) -> None:
    with quantized(wide, tmp_path / "q8.gguf", "Q8_0"):
        pass
    assert "is quantized already (q8_0); --allow-requantize" in refusal(tmp_path / "q8.gguf", "Q4_0")
    with quantized(tmp_path / "q8.gguf", tmp_path / "q4.gguf", "Q4_0", allow_requantize=True) as (before, after):
        values = dequantized(before.tensors[NAME], before.bytes_of(NAME))
        assert after.bytes_of(NAME).tobytes() == quantize(values, "q4_0").tobytes()
    with quantized(tmp_path / "q8.gguf", tmp_path / "same.gguf", "Q8_0") as (before, after):
        assert after.bytes_of(NAME).tobytes() == before.bytes_of(NAME).tobytes()


def test_an_imatrix_of_another_model_is_refused(wide: Path, tmp_path: Path) -> None:
    one = np.ones(256, np.float32)
    path = tmp_path / "i.gguf"
    told = refusal(wide, "Q4_0", imatrix=Imatrix(path, {"blk.77.ffn_up.weight": one}))
    assert told == f"{path}: is of another model: this one has no tensor 'blk.77.ffn_up.weight'"
    told = refusal(wide, "Q4_0", imatrix=Imatrix(path, {NAME: one[:64]}))
    assert told == f"{path}: is of another model: '{NAME}' has 256 inputs, the file has 64"
    assert "needs an importance matrix for Q2_K_S" in refusal(wide, "Q2_K_S")


def test_numbers_that_a_type_lacks_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path, WIDE)
    with GGUFFile.open(path) as gguf:
        at = gguf.tensors[NAME].offset
    for value, told in ((1e6, "has 1e\\+06, too large for f16"), (float("nan"), "is NaN or infinite")):
        data = bytearray(path.read_bytes())
        data[at : at + 4] = struct.pack("<f", value)
        path.write_bytes(data)
        with GGUFFile.open(path) as gguf, pytest.raises(ModelFileError, match=f"tensor '{NAME}'.*{told}"):
            plan_quantization(gguf, "F16").write(tmp_path / "q.gguf")
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_no_file(wide: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with GGUFFile.open(wide) as gguf, pytest.raises(OSError, match=r"q\.gguf"):
            plan_quantization(gguf, "Q8_0").write(tmp_path / "q.gguf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_a_file_of_another_alignment_is_written_again(wide: Path, tmp_path: Path) -> None:
    other = tmp_path / "aligned.gguf"
    with GGUFFile.open(wide) as gguf:
        writer = GGUFWriter(other, str(gguf.metadata["general.architecture"]))
        writer.add_custom_alignment(256)
        for key, value in gguf.metadata.items():
            if key.startswith(("llama.", "general.file_type")):
                kind, item = gguf.metadata.types[key]
                writer.add_key_value(key, value, kind, item)  # type: ignore[arg-type]
        for name, info in gguf.tensors.items():
            writer.add_tensor(name, np.array(gguf.bytes_of(name).view(np.float32).reshape(info.shape)))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    with quantized(other, tmp_path / "q.gguf", "F32") as (before, after):
        assert (before.alignment, after.alignment) == (256, 32)
        assert after.bytes_of(NAME).tobytes() == before.bytes_of(NAME).tobytes()


def test_imatrix_files_of_both_formats(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    sums, counts = rng.random((2, 8)).astype(np.float32), np.array([4, 0], np.float32)
    dense = rng.random((1, 6)).astype(np.float32)
    path = tmp_path / "i.gguf"
    both = {"blk.0.up_exps.weight": (sums, counts), "blk.0.q.weight": (dense, np.array([2], np.float32))}
    write_imatrix(path, "llama", both, datasets=["text.txt"], n_chunks=5, chunk_size=512)
    read = read_imatrix(path)
    assert (list(read.datasets), read.n_chunks) == (["text.txt"], 5)
    np.testing.assert_array_equal(read.means["blk.0.up_exps.weight"], [*(sums[0] / 4), *np.ones(8)])
    np.testing.assert_array_equal(read.means["blk.0.q.weight"], dense[0] / 2)

    write_imatrix(path, "llama", both, datasets=[], n_chunks=5, chunk_size=512)
    assert list(read_imatrix(path).datasets) == []

    name, values = b"blk.0.q.weight", np.array([2, 4, 6], "<f4")
    old = struct.pack("<ii", 1, len(name)) + name + struct.pack("<ii", 2, 3) + values.tobytes()
    for tail, datasets in ((b"", []), (struct.pack("<ii", 7, 5) + b"a.txt", ["a.txt"])):
        (tmp_path / "i.dat").write_bytes(old + tail)
        read = read_imatrix(tmp_path / "i.dat")
        np.testing.assert_array_equal(read.means["blk.0.q.weight"], [1, 2, 3])
        assert list(read.datasets) == datasets
    for wrong in (old[:-1], b"", struct.pack("<ii", 1, -5), struct.pack("<i", 0)):
        (tmp_path / "i.dat").write_bytes(wrong)
        with pytest.raises(ModelFileError, match="is no importance matrix"):
            read_imatrix(tmp_path / "i.dat")
    (tmp_path / "i.dat").write_bytes(old[:-4] + np.array([-1], "<f4").tobytes())
    with pytest.raises(ModelFileError, match=r"'blk\.0\.q\.weight' has a number that is not finite, or negative"):
        read_imatrix(tmp_path / "i.dat")
    with pytest.raises(ModelFileError, match="cannot be opened"):
        read_imatrix(tmp_path / "none.dat")


@needs_llama_cpp
@pytest.mark.parametrize("name", ["Q2_K", "Q4_K_M"])
def test_llama_cpp_reads_the_file(name: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", Spec(n_embd=256, n_ff=256, n_vocab=512, dtype="f32", vocabulary=True, untied=True))
    window = np.random.default_rng(4).integers(3, 512, 48).astype(np.int32)
    losses = []
    with quantized(tmp_path / "m.gguf", tmp_path / "q.gguf", name) as files:
        for gguf in files:
            with Session(open_backends(["cpu"], 1)) as session:
                losses.append(window_losses(session, define_model(session, gguf, hparams_of(gguf), 48), window))
    exact, ours = losses
    theirs = activations(tmp_path / "q.gguf", window[None], 512, tmp_path, collect=False)["losses"][0]
    # each rounds activations in its own way
    assert 0 < np.abs(ours - theirs).mean() < 0.25 * np.abs(theirs - exact).mean()

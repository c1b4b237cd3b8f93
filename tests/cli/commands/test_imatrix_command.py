"""`logitless imatrix` and `perplexity`: windows of a text, the way to a weighted file, llama.cpp's losses, refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.cli.main import main
from logitless.models.gguf.file import GGUFFile
from logitless.models.quantization.imatrix import read_imatrix
from logitless.models.quantization.quantize import dequantized, quantize
from logitless.models.tokenizer import from_metadata
from tests.helpers.llama_cpp_library import activations, needs_llama_cpp
from tests.helpers.reference_model import Spec, write

TEXT = "To be, or not to be, that is the question: whether it is nobler to suffer. " * 3
NAME = "blk.0.ffn_up.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imatrix")
    write(folder / "m.gguf", Spec(n_embd=64, n_ff=96, n_vocab=512, dtype="f32", vocabulary=True, untied=True))
    (folder / "t.txt").write_text(TEXT)
    return folder


def windows(folder: Path, size: int) -> np.ndarray[Any, Any]:
    with GGUFFile.open(folder / "m.gguf") as gguf:
        vocabulary = from_metadata(gguf.metadata)
    ids = vocabulary.encode(TEXT)
    rows = np.array(ids[: len(ids) // size * size]).reshape(-1, size)
    rows[:, 0] = vocabulary.bos_id
    return rows


def test_a_file_weighted_by_a_text(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["-m", str(folder / "m.gguf"), "-f", str(folder / "t.txt"), "-c", "32", "--chunks", "2", "-t", "1"]
    assert main(["imatrix", *words, "-o", str(tmp_path / "i.gguf"), "--process-output"]) == 0
    assert capfd.readouterr().err.endswith(f"{tmp_path / 'i.gguf'}: 15 matrices, 2 windows of 32 tokens\n")
    imatrix = read_imatrix(tmp_path / "i.gguf")
    assert (list(imatrix.datasets), imatrix.n_chunks) == ([str(folder / "t.txt")], 2)
    with GGUFFile.open(tmp_path / "i.gguf") as gguf:
        keys = {"general.type": "imatrix", "imatrix.chunk_size": 32, "imatrix.chunk_count": 2}
        assert {key: gguf.metadata[key] for key in keys} == keys
        assert gguf.bytes_of(f"{NAME}.counts").view(np.float32).tolist() == [64]
        assert gguf.tensors[f"{NAME}.in_sum2"].shape == (1, 64)
    model, out = str(folder / "m.gguf"), str(tmp_path / "q.gguf")
    assert main(["quantize", model, out, "Q4_1", "--imatrix", str(tmp_path / "i.gguf")]) == 0
    with GGUFFile.open(out) as after, GGUFFile.open(model) as before:
        values = dequantized(before.tensors[NAME], before.bytes_of(NAME))
        assert after.bytes_of(NAME).tobytes() == quantize(values, "q4_1", imatrix.means[NAME]).tobytes()
        assert after.metadata["quantize.imatrix.entries_count"] == 15


@needs_llama_cpp
def test_perplexity_is_llama_cpps(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["perplexity", "-m", str(folder / "m.gguf"), "-f", str(folder / "t.txt"), "-c", "32", "-t", "1"]) == 0
    match = re.fullmatch(r"perplexity ([\d.]+) ± ([\d.]+) of (\d+) tokens\n", capfd.readouterr().out)
    assert match
    losses = activations(folder / "m.gguf", windows(folder, 32), 512, tmp_path, collect=False)["losses"][:, 16:]
    assert int(match[3]) == losses.size
    assert float(match[1]) == pytest.approx(np.exp(losses.mean()), rel=2e-3)
    assert float(match[2]) == pytest.approx(np.exp(losses.mean()) * losses.std() / (losses.size - 1) ** 0.5, rel=2e-3)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("imatrix -m M -f T -o O -c 512", "--ctx-size 512: is more than the model's 64"),
        ("imatrix -m M -f T -c 64", "imatrix: -o FILE is required"),
        ("imatrix -m M -o O -c 64", "imatrix: -f FILE is required: the text"),
        ("imatrix -m M -f none.txt -o O -c 64", "none.txt: No such file"),
        ("imatrix -m M -f T -o M -c 64", "is the file of -m, and would take its place"),
        ("imatrix -m M -f T -o O -c 64 --chunk 900", "too few for 901 windows of 64 (--ctx-size)"),
        ("perplexity -f T", "perplexity: -m FILE is required"),
        ("perplexity -m M -f T -c 3", "--ctx-size is less than 4"),
    ],
)
def test_refusals(words: str, line: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = {"M": str(folder / "m.gguf"), "T": str(folder / "t.txt"), "O": str(tmp_path / "i.gguf")}
    assert main([files.get(word, word) for word in words.split()]) in (1, 2)
    (told,) = capfd.readouterr().err.splitlines()
    assert line in told
    assert not (tmp_path / "i.gguf").exists()


@pytest.mark.parametrize("command", ["imatrix", "perplexity"])
def test_a_window_without_a_flag_is_no_longer_than_the_models_context(
    command: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "long.txt").write_text(TEXT * 20)
    with GGUFFile.open(folder / "m.gguf") as gguf:
        n = int(gguf.metadata["llama.context_length"])
    assert n < 512
    words = [command, "-m", str(folder / "m.gguf"), "-f", str(tmp_path / "long.txt"), "--chunks", "1", "-t", "1"]
    words += ["-o", str(tmp_path / "i.gguf")] if command == "imatrix" else []
    assert main(words) == 0
    told = capsys.readouterr()
    assert (f"1 windows of {n} tokens" if command == "imatrix" else f"of {n // 2 - 1} tokens") in told.err + told.out
    assert main([*words, "-c", str(n + 1)]) == 1  # a flag's number is not cut
    assert f"--ctx-size {n + 1}: is more than the model's {n}" in capsys.readouterr().err

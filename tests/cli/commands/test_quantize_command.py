"""`logitless quantize`: words without flags, warnings, sizes and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

import logitless
from logitless.cli.main import main
from logitless.models.gguf.file import GGUFFile
from tests.helpers.reference_model import Spec, write


@pytest.fixture
def model(tmp_path: Path) -> str:
    write(tmp_path / "m.gguf", Spec(n_embd=64, n_ff=96, dtype="f32"))
    return str(tmp_path / "m.gguf")


def said(capfd: pytest.CaptureFixture[str], *args: str, code: int = 0) -> list[str]:
    assert main(["quantize", *args]) == code
    return capfd.readouterr().err.splitlines()


def test_words_and_warnings(model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "q.gguf")
    lines = said(capfd, "--token-embedding-type", "q8_0", model, out, "q4_k_s")
    assert lines[0].startswith("logitless: warning: rows of ")
    assert lines[0].endswith("tensors ('blk.0.attn_k.weight', …) are no multiple of 256: q5_0 in place of q4_k")
    assert lines[-1].startswith(f"{out}: Q4_K_S, ")
    with GGUFFile.open(out) as gguf:
        assert gguf.tensors["token_embd.weight"].dtype == "q8_0"
        assert gguf.tensors["blk.0.ffn_down.weight"].dtype == "q5_0"
    assert said(capfd, model, "Q8_0", "--dry-run")[0].startswith(f"{model}: Q8_0, ")


def test_the_same_file_from_python(model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one, other = tmp_path / "1.gguf", tmp_path / "2.gguf"
    said(capfd, model, str(one), "Q4_0", "--pure")
    logitless.quantize(model, other, "Q4_0", pure=True)
    assert one.read_bytes() == other.read_bytes()
    with pytest.warns(UserWarning, match="q8_0 in place of q6_k"):
        logitless.quantize(model, other, "Q6_K")
    with pytest.raises(logitless.OptionError, match="'IQ1_S' is not written here"):
        logitless.quantize(model, other, "IQ1_S")
    with pytest.raises(logitless.ModelError, match="is quantized already"):
        logitless.quantize(one, other, "Q5_0")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("M", "IN.gguf, OUT.gguf and TYPE are required"),
        ("M O Q4_9", "'Q4_9' is no type of a file; the types are F32,"),
        ("M M Q4_0", "is the file of IN, and would take its place"),
        ("M O Q4_0 4 5", "unexpected argument: 5"),
        ("M O Q4_0 --tensor-type attn", "--tensor-type: 'attn' is not NAME=TYPE"),
        ("M O Q4_0 --tensor-type (=q8_0", "'(' is no regular expression"),
        ("M O Q4_0 --output-tensor-type q9", "'q9' is no type that is written here"),
        ("M O Q4_0 --imatrix M", "is no importance matrix"),
        ("M O Q4_0 --imatrix none.dat", "cannot be opened"),
        ("none.gguf O Q4_0", "no such file"),
    ],
)
def test_refusals(words: str, line: str, model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = {"M": model, "O": str(tmp_path / "q.gguf")}
    assert main(["quantize", *(files.get(word, word) for word in words.split())]) in (1, 2)
    (told,) = capfd.readouterr().err.splitlines()
    assert line in told
    assert not (tmp_path / "q.gguf").exists()

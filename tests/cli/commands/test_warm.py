"""`logitless warm`: a start after it compiles nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from logitless import LLM, SamplingParams
from logitless.backends.cpu.compiler import jit
from logitless.cli.main import main
from tests.helpers.bert_model import tensors, write
from tests.helpers.paths import MODELS
from tests.helpers.reference_model import write as write_spec
from tests.models.architectures.test_t5 import SPEC as T5

MODEL = MODELS / "stories260K-conv-Q8_0.gguf"


def kernels(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the kernels that a call loads, as if none were loaded before it."""
    monkeypatch.setattr(jit, "_addresses", {})
    call()
    return {*jit._addresses}


def later() -> None:
    """Requests of each kind to the model."""
    with LLM(MODEL, ctx_size=256, parallel=2) as llm:
        llm.generate(["hi", "Once upon a time " * 9], SamplingParams(max_tokens=9, logprobs=1))
        llm.embed(["text"])
        llm.score(["text"])


@pytest.mark.skipif(not MODEL.exists(), reason="no stories260K-conv-Q8_0.gguf beside the checkout")
def test_all_kernels_of_later_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["warm", "-m", str(MODEL), "-c", "256", "-np", "2", "-t", "1"]
    warm = kernels(lambda: main(words), monkeypatch)
    expected = kernels(later, monkeypatch)
    assert len(expected) > 30
    assert expected <= warm


def test_a_model_that_only_embeds(tmp_path: Path) -> None:
    assert main(["warm", "-m", str(write(tmp_path / "bert.gguf", tensors())), "-t", "1"]) == 0


def test_a_model_with_an_encoder_in_front(tmp_path: Path) -> None:
    write_spec(tmp_path / "t5.gguf", T5)
    assert main(["warm", "-m", str(tmp_path / "t5.gguf"), "-t", "1"]) == 0


def test_file_that_is_no_model_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("no model")
    for words, code, line in (
        ([], 2, "warm: -m FILE is required"),
        (["-m", str(tmp_path / "none.gguf")], 1, "no such file"),
        (["-m", str(tmp_path / "m.gguf")], 1, "is not a GGUF file"),
        (["-m", "x", "--port", "1"], 2, "unknown flag: --port"),
    ):
        assert main(["warm", *words]) == code
        told = capsys.readouterr().err
        assert line in told
        assert told.count("\n") == 1

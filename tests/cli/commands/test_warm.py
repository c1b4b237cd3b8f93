"""`logitless warm`: a start after it compiles nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from logitless.cli.main import main
from tests.helpers.bert_model import tensors, write
from tests.helpers.paths import MODELS, ROOT

MODEL = MODELS / "stories260K-conv-Q8_0.gguf"
REST = """
with LLM(MODEL, ctx_size=256, parallel=2) as llm:
    llm.generate(["hi", "Once upon a time " * 9], SamplingParams(max_tokens=9, logprobs=1))
    llm.embed(["text"])
    llm.score(["text"])
"""


def kernels(code: str) -> set[str]:
    """Names of the kernels that a process has loaded when this code is done."""
    head = "from logitless import LLM, SamplingParams\nfrom logitless.cli.main import main\n"
    tail = "\nfrom logitless.backends.cpu.compiler import jit\nprint(*jit._addresses, sep='\\n')"
    code = f"{head}MODEL = {str(MODEL)!r}\n{code}{tail}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    return {*done.stdout.split("\n")} - {""}


@pytest.mark.skipif(not MODEL.exists(), reason="no stories260K-conv-Q8_0.gguf beside the checkout")
def test_all_kernels_of_later_are_loaded() -> None:
    warm = kernels('assert main(["warm", "-m", MODEL, "-c", "256", "-np", "2", "-t", "1"]) == 0')
    later = kernels(REST)
    assert len(later) > 30
    assert later <= warm


def test_a_model_that_only_embeds(tmp_path: Path) -> None:
    assert main(["warm", "-m", str(write(tmp_path / "bert.gguf", tensors())), "-t", "1"]) == 0


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

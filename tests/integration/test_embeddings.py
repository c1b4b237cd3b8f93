"""Embedding servers of a BERT and of a decoder, each in a process of its own."""

from __future__ import annotations

import json
import urllib.error
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.cli.main import main
from tests.helpers.bert_model import TOKENS, forward, tensors, write


def test_a_bert_is_served(serve_here: Any, tmp_path: Path) -> None:
    flags = ("--embedding", "--ctx-size", "64", "--data-dir", str(tmp_path / "data"))
    server = serve_here(write(tmp_path / "bert.gguf", tensors()), *flags)
    reply = server.post("/v1/embeddings", {"input": "the cat sat"})
    ids = [2, *(TOKENS.index(f"▁{word}") for word in ("the", "cat", "sat")), 3]
    x = forward(tensors(), ids)[0]  # the file says: by its first token
    np.testing.assert_allclose(reply["data"][0]["embedding"], x / np.sqrt((x**2).sum()), atol=1e-5)
    for path, body in (
        ("/v1/completions", {"prompt": "the"}),
        ("/v1/score", {"input": "the cat"}),
        ("/v1/fine_tuning/jobs", {"model": "bert.gguf", "training_file": "file-1"}),
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            server.post(path, body)
        with caught.value as error:
            assert error.code == 400
            assert "makes vectors of texts" in json.load(error)["error"]["message"]
    assert server.get("/health") == {"status": "ok"}
    assert server.get("/props")["total_slots"] == 4


@pytest.mark.parametrize(
    "command", ["generate -p the", "bench -p 4 -n 2", "plan", "selftest", "finetune --lora-out a.gguf --file F"]
)
def test_completion_of_embedding_model_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write(tmp_path / "bert.gguf", tensors())
    (tmp_path / "text").write_text("the cat sat")
    words = [str(tmp_path / "text") if word == "F" else word for word in command.split()]
    assert main([*words, "-m", str(model)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"logitless: {model}: ")
    assert "makes vectors of texts" in error

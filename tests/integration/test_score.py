"""/v1/score against the trainer's first loss, log-probabilities of the server, and finite differences."""

from __future__ import annotations

import json
import math
import urllib.error
from io import BytesIO
from pathlib import Path

import numpy as np
import openai
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.execution.session import Session
from logitless.models import tokenizer
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import define_model, hparams_of
from logitless.training.adapters.lora import lora
from logitless.training.adapters.options import LoraOptions
from logitless.training.config import TrainingConfig
from logitless.training.data.packing import PackedExamples
from logitless.training.data.sources import read_rows
from logitless.training.data.tokenize_rows import examples_of
from logitless.training.step import Steps, outcome
from logitless.training.trainable import full
from tests.integration.conftest import ServerFactory

ROWS = [
    {"prompt": "Once upon a time", "completion": ", there was a little girl named Lily."},
    {"text": "The cat sat on the mat and looked at the big red ball."},
]


def test_scores_are_the_trainers(serve_here: ServerFactory, shared_data: Path) -> None:
    path = shared_data / "models" / "stories260K.gguf"
    server = serve_here(path, "-c", "512", "-t", "1", "-ctk", "f32", "-ctv", "f32")
    found = server.post("/v1/score", {"input": ROWS, "gradient_norm": True})["data"]

    backend = CPUBackend(1)
    with GGUFFile.open(path) as gguf:
        h = hparams_of(gguf)
        session = Session([backend])
        trainable = lora(session, define_model(session, gguf, h, 512), LoraOptions(rank=4))
        vocabulary = tokenizer.from_metadata(gguf.metadata, path=path)
        rows = BytesIO("\n".join(map(json.dumps, ROWS)).encode())
        examples = list(examples_of(read_rows(rows, "rows"), vocabulary, None))
        steps = Steps(trainable, TrainingConfig(batch_size=2, ctx_size=32))
        dataset = PackedExamples(examples, 32, pack=False)
        windows = [dataset.sample(i, np.random.default_rng(0)) for i in range(2)]
        ((result,), _) = outcome(steps.step([windows], 1, 1e-3))  # measured before the step changes anything
        for i, row in enumerate(found):
            of_row = result.losses[32 * i : 32 * (i + 1)]
            assert row["loss"] == float(of_row.sum(dtype=np.float64)) / row["n_counted"]
        whole = full(session, trainable.model, gguf, h)
        steps = Steps(whole, TrainingConfig(max_grad_norm=0, batch_size=1, ctx_size=32), prefix="whole")
        norms = [outcome(steps.step([windows[i : i + 1]], 1, 0.0))[1] for i in range(2)]
        assert [row["gradient_norm"] for row in found] == pytest.approx(norms, rel=1e-6)
        session.close()
        backend.close()

    assert found[0]["n_counted"] == sum(found[0]["counted"]) < len(found[0]["tokens"]) - 1
    text = server.post("/v1/score", {"input": ROWS[1]["text"]})["data"][0]
    reply = server.post("/v1/completions", {"prompt": text["tokens"], "max_tokens": 0, "echo": True, "logprobs": 0})
    expected = reply["choices"][0]["logprobs"]["token_logprobs"]
    np.testing.assert_allclose(text["token_logprobs"][1:], expected[1:], atol=1e-4)
    body = {"prompt": text["tokens"], "max_tokens": 2, "echo": True, "logprobs": 0, "temperature": 0}
    (whole,) = server.post("/v1/completions", body)["choices"]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        parts = [chunk.choices[0] for chunk in client.completions.create(model="m", **body, stream=True)]
    streamed = [value for part in parts if part.logprobs for value in part.logprobs.token_logprobs]
    assert streamed == whole["logprobs"]["token_logprobs"]
    assert "".join(part.text for part in parts) == whole["text"]
    assert math.isclose(text["loss"], -sum(text["token_logprobs"][1:]) / text["n_counted"], rel_tol=1e-5)


def test_text_that_cannot_be_scored_is_refused(serve_here: ServerFactory, shared_data: Path) -> None:
    server = serve_here(shared_data / "models" / "stories260K.gguf", "-c", "512", "-t", "1")
    for body, told in (
        ({}, "field 'input': is required"),
        ({"input": []}, "field 'input'"),
        ({"input": [True]}, "field 'input[0]'"),
        ({"input": {"prompt": "a"}}, "field 'completion' must be a string"),
        ({"input": [1]}, "field 'input[0]': needs at least two tokens"),
        ({"input": [[1, 10**9]]}, "field 'input[0]': token 1000000000 is outside the vocabulary"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.post("/v1/score", body)
        assert refused.value.code == 400
        assert told in refused.value.read().decode()

"""Embeddings and reranking through the real port and OpenAI's client, with a small BERT on the CPU."""

from __future__ import annotations

import base64
import logging
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.engine.runner.embedder import Embedder
from logitless.frontend.texts.embeddings import normalized
from logitless.graph.execution.session import Session
from logitless.models import tokenizer
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import AdaptedModel, define_model, hparams_of
from logitless.server.api.openai.embeddings import _log_pooling
from tests.helpers.bert_model import N_CTX, N_EMBD, TOKENS, forward, score, tensors, write
from tests.helpers.http_fakes import Running, running

Model = tuple[Embedder, Any]
CAT, DOG, SAT, DOT = (TOKENS.index(word) for word in ("▁cat", "▁dog", "▁sat", "▁."))
CLS, SEP = 2, 3


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path: Path = write(tmp_path_factory.mktemp("bert") / "bert.gguf", tensors())
    with GGUFFile.open(path) as gguf:
        hparams = hparams_of(gguf)
        session = Session([CPUBackend(2)])
        model = define_model(session, gguf, hparams, hparams.n_ctx_train)
        embedder = Embedder(lambda _: AdaptedModel(session, lambda _: model), hparams, 64, 64)
        embedder.load()
        yield embedder, tokenizer.from_metadata(gguf.metadata)
    session.close()


@pytest.fixture
async def server(bert: Model) -> AsyncIterator[Running]:
    async with running(tokenizer=bert[1], embedder=bert[0], pooling="mean") as started:
        yield started


def wanted(ids: list[int]) -> np.ndarray[Any, Any]:
    """The unit vector of a text by mean pooling."""
    x = forward(tensors(), ids).mean(0)
    return x / np.sqrt((x**2).sum())


async def test_openai(server: Running):
    reply = await server.openai.embeddings.create(model="m", input=["cat sat.", "dog"])
    assert (reply.object, reply.model, [d.index for d in reply.data]) == ("list", "fake", [0, 1])
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (8, 8)
    stats = server.scheduler.stats
    assert (stats.prompt_tokens, stats.tokens_predicted) == (8, 0)
    assert stats.n_decode > 0
    np.testing.assert_allclose(reply.data[0].embedding, wanted([CLS, CAT, SAT, DOT, SEP]), atol=1e-5)
    np.testing.assert_allclose(reply.data[1].embedding, wanted([CLS, DOG, SEP]), atol=1e-5)
    floats = await server.openai.embeddings.create(model="m", input="dog", encoding_format="float")
    assert floats.data[0].embedding == reply.data[1].embedding  # its own default is base64
    tokens = await server.openai.embeddings.create(model="m", input=[[CLS, DOG, SEP]])
    assert tokens.data[0].embedding == reply.data[1].embedding
    _, body = await server.post("/v1/embeddings", {"input": "dog", "encoding_format": "base64"})
    raw = base64.b64decode(body["data"][0]["embedding"])
    assert np.frombuffer(raw, "<f4").tolist() == pytest.approx(reply.data[1].embedding)


async def test_native(server: Running, bert: Model):
    for path in ("/embedding", "/embeddings"):
        _, body = await server.post(path, {"content": "dog"})
        assert [set(item) for item in body] == [{"index", "embedding"}]
        (vector,) = body[0]["embedding"]
        np.testing.assert_allclose(vector, wanted([CLS, DOG, SEP]), atol=1e-5)
    _, body = await server.post("/embedding", {"input": "dog", "embd_normalize": -1})
    np.testing.assert_allclose(body[0]["embedding"][0], forward(tensors(), [CLS, DOG, SEP]).mean(0), atol=1e-4)
    async with running(tokenizer=bert[1], embedder=bert[0], pooling="none") as server:
        _, body = await server.post("/embedding", {"content": ["dog", "cat sat"]})
        for item, ids in zip(body, ([CLS, DOG, SEP], [CLS, CAT, SAT, SEP]), strict=True):
            np.testing.assert_allclose(item["embedding"], forward(tensors(), ids), atol=1e-4)
        with pytest.raises(openai.BadRequestError, match="pooling"):
            await server.openai.embeddings.create(model="m", input="dog")


async def test_many_texts_at_once(server: Running):
    words = ["cat", "dog sat", "sun", "moon sat on mat .", "cat cat", "the cat sat on the mat and ran"] * 12
    together = await server.openai.embeddings.create(model="m", input=words)
    assert len(together.data) == 72
    for i in (0, 3, 5, 71):
        alone = await server.openai.embeddings.create(model="m", input=words[i])
        assert alone.data[0].embedding == together.data[i].embedding


async def test_rerank_by_the_model_s_own_template(bert: Model, monkeypatch: pytest.MonkeyPatch):
    """What stands for the other text in a text stays as it is; special tokens are the template's."""
    monkeypatch.setattr(bert[0], "template", "[CLS] {document} on {query}[SEP]")
    on = TOKENS.index("▁on")
    async with running(tokenizer=bert[1], embedder=bert[0], pooling="rank") as server:
        _, body = await server.post("/rerank", {"query": "dog {document}", "documents": ["cat", "sat."]})
        expected = [
            float(score(tensors(), forward(tensors(), [CLS, *ids, on, DOG, *rest, SEP])[0])[0])
            for rest in [bert[1].encode("{document}", add_special=False)]
            for ids in ([CAT], [SAT, DOT])
        ]
    scores = {item["index"]: item["relevance_score"] for item in body["results"]}
    assert [scores[0], scores[1]] == pytest.approx(expected, abs=1e-4)


async def test_rerank(bert: Model):
    documents = ["cat sat", "moon", "dog . dog"]
    pairs = [[CLS, DOG, SEP, *bert[1].encode(text, add_special=False)] for text in documents]
    scores = [float(score(tensors(), forward(tensors(), pair)[0])[0]) for pair in pairs]
    order = sorted(range(3), key=lambda i: -scores[i])
    async with running(tokenizer=bert[1], embedder=bert[0], pooling="rank") as server:
        for path in ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"):
            status, body = await server.post(path, {"query": "dog", "documents": documents, "return_documents": True})
            assert status == 200
            assert [result["index"] for result in body["results"]] == order
            assert [r["relevance_score"] for r in body["results"]] == pytest.approx(
                [scores[i] for i in order], abs=1e-4
            )
            assert body["results"][0]["document"] == {"text": documents[order[0]]}
            assert body["usage"] == {"prompt_tokens": sum(map(len, pairs)), "total_tokens": sum(map(len, pairs))}
        _, body = await server.post("/rerank", {"query": "dog", "texts": documents, "top_n": 2, "return_text": True})
        assert [item["index"] for item in body] == order[:2]
        assert body[0] == {
            "index": order[0],
            "score": pytest.approx(scores[order[0]], abs=1e-4),
            "text": documents[order[0]],
        }
        for fields, named in (
            ({}, "documents"), ({"documents": []}, "documents"), ({"documents": [1]}, "documents[0]"),
            ({"documents": ["a"], "query": 1}, "query"), ({"documents": ["a"], "top_n": 0}, "top_n"),
            ({"documents": "a"}, "documents"),
        ):  # fmt: skip
            status, body = await server.post("/rerank", {"query": "dog", **fields})
            assert status == 400
            assert f"'{named}'" in body["error"]["message"]


async def test_dimensions_are_the_first_ones_normalized(server: Running):
    x = forward(tensors(), [CLS, CAT, SEP]).mean(0)
    for n in (1, 4, N_EMBD):
        reply = await server.openai.embeddings.create(model="m", input="cat", dimensions=n)
        np.testing.assert_allclose(reply.data[0].embedding, x[:n] / np.sqrt((x[:n] ** 2).sum()), atol=1e-5)
        _, native = await server.post("/embedding", {"input": "cat", "dimensions": n})
        np.testing.assert_allclose(native[0]["embedding"][0], reply.data[0].embedding)


async def test_a_model_that_names_no_pooling_has_one(bert: Model, caplog: pytest.LogCaptureFixture):
    embedder, tokens = bert
    chosen, embedder.default = embedder.default, "none"
    caplog.set_level(logging.INFO, "logitless.http")
    _log_pooling.cache_clear()
    try:
        async with running(tokenizer=tokens, embedder=embedder) as started:
            for _ in range(2):
                reply = await started.openai.embeddings.create(model="m", input="cat")
                np.testing.assert_allclose(reply.data[0].embedding, wanted([CLS, CAT, SEP]), atol=1e-5)
        assert caplog.text.count("names no pooling of embeddings: it is mean") == 1
        async with running(tokenizer=tokens, embedder=embedder, pooling="none") as started:
            with pytest.raises(openai.BadRequestError, match="pooling type 'none'"):
                await started.openai.embeddings.create(model="m", input="cat")
    finally:
        embedder.default = chosen


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({}, 400, "'input'"),
    ({"input": []}, 400, "'input'"),
    ({"input": 1}, 400, "'input'"),
    ({"content": [1.5]}, 400, "'content'"),
    ({"input": [[99999]]}, 400, "'input': token 99999 is outside the vocabulary"),
    ({"input": "cat " * N_CTX}, 400, "is too large to process"),
    ({"input": "cat", "encoding_format": "hex"}, 400, "encoding_format"),
    ({"input": "cat", "dimensions": N_EMBD + 1}, 400, "dimensions"),
    ({"input": "cat", "dimensions": 0}, 400, "dimensions"),
    ({"input": "cat", "dimensions": "few"}, 400, "dimensions"),
    ({"input": "cat", "embd_normalize": -2}, 400, "embd_normalize"),
]


@pytest.mark.parametrize(("body", "code", "named"), BAD)
async def test_refusals(server: Running, body: dict[str, Any], code: int, named: str):
    for path in ("/v1/embeddings", "/embedding"):
        status, reply = await server.post(path, body)
        assert (status, reply["error"]["code"]) == (code, code)
        assert named in reply["error"]["message"]


async def test_rerank_without_its_flag_is_refused(server: Running):
    status, body = await server.post("/rerank", {"query": "a", "documents": ["b"]})
    assert (status, body["error"]["message"].endswith("start it with --reranking")) == (501, True)
    async with running() as plain:
        for path in ("/v1/embeddings", "/embedding", "/rerank"):
            status, _ = await plain.post(path, {"input": "x", "query": "x", "documents": ["x"]})
            assert status == 400


def test_norms():
    x = np.array([3.0, -4.0, 0.0], np.float32)
    assert normalized(x, -1).tolist() == [3, -4, 0]
    assert normalized(x, 0).tolist() == [24570, -32760, 0]
    assert normalized(x, 1).tolist() == pytest.approx([3 / 7, -4 / 7, 0])
    assert normalized(x, 2).tolist() == pytest.approx([0.6, -0.8, 0])
    cubic = (27 + 64) ** (1 / 3)
    assert normalized(x, 3).tolist() == pytest.approx([3 / cubic, -4 / cubic, 0])
    assert all(math.isfinite(v) for v in normalized(x, 2**15))
    assert normalized(np.zeros(N_EMBD, np.float32), 2).tolist() == [0] * N_EMBD


async def test_typed_parts_are_one_text(server: Running):
    parts = [{"type": "text", "text": "cat "}, {"type": "text", "text": "sat."}]
    for given in ({"content": parts}, ["cat sat.", {"content": parts}], {"prompt_string": "cat sat."}):
        status, body = await server.post("/v1/embeddings", {"input": given})
        assert status == 200
        _, alone = await server.post("/v1/embeddings", {"input": "cat sat."})
        assert all(item["embedding"] == alone["data"][0]["embedding"] for item in body["data"])
    for content, message in (
        ("cat", "field 'input.content': expected an array of parts"),
        (
            [{"type": "image_url", "image_url": {"url": "data:"}}],
            "field 'input.content[0].image_url.url': images need a model",
        ),
        ([{"type": "other"}], "field 'input.content[0].type': must be text"),
    ):
        status, body = await server.post("/v1/embeddings", {"input": {"content": content}})
        assert status == 400
        assert message in body["error"]["message"]


async def test_the_servers_scale_is_of_requests_that_do_not_say(bert: Model):
    async with running(tokenizer=bert[1], embedder=bert[0], pooling="mean", embd_normalize=-1) as server:
        answers = [
            await server.post("/v1/embeddings", {"input": "dog", **more}) for more in ({}, {"embd_normalize": 2})
        ]
    raw, asked = (np.array(body["data"][0]["embedding"]) for _, body in answers)
    assert abs(np.linalg.norm(asked) - 1) < 1e-5 < abs(np.linalg.norm(raw) - 1)
    np.testing.assert_allclose(raw / np.linalg.norm(raw), asked, atol=1e-6)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings", "/api/embed"])
@pytest.mark.parametrize("pooling", ["mean", "none"])
async def test_vectors_written_in_pieces_are_the_vectors(
    bert: Model, monkeypatch: pytest.MonkeyPatch, path: str, pooling: str
):
    body = {"model": "fake", "input": ["cat sat.", "dog", "cat"]}
    async with running(tokenizer=bert[1], embedder=bert[0], pooling=pooling if path == "/embeddings" else "") as server:
        status, whole = await server.post(path, body)
        monkeypatch.setattr("logitless.server.api.openai.embeddings._LARGE", 0)
        monkeypatch.setattr("logitless.server.api.ollama.routes._LONG", 0)
        for module in ("frontend.replies.encoding", "server.api.generate"):
            monkeypatch.setattr(f"logitless.{module}.PIECE", 64)
        async with server.http.post(server.url + path, json=body) as reply:
            pieces = await reply.json()
            assert (status, reply.headers.get("Transfer-Encoding")) == (200, "chunked")
    for answer in (whole, pieces) if path == "/api/embed" else ():
        del answer["total_duration"]
    assert pieces == whole


async def test_vectors_of_too_many_tokens_are_refused_before_they_are_made(
    bert: Model, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("logitless.server.api.openai.embeddings.MOST_NUMBERS", 6 * N_EMBD)
    async with running(tokenizer=bert[1], embedder=bert[0], pooling="none") as server:
        status, answer = await server.post("/embeddings", {"input": ["cat sat.", "dog"]})
        assert (status, "at most 6 tokens, a vector each" in answer["error"]["message"]) == (400, True)
        assert (await server.post("/embeddings", {"input": ["cat sat."]}))[0] == 200

"""Speculative decoding fields over HTTP: accepted and refused forms.

Their effect is tested with a real model (tests/integration/test_speculation.py)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from logitless.engine.speculation.settings import SpeculationParams
from logitless.frontend.speculation import continuation
from tests.helpers.http_fakes import N_CTX, FakeTokenizer, Running, running
from tests.server.test_refusals import refused

DEFAULT = SpeculationParams(("ngram-mod",), n_min=2)


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(speculation=DEFAULT) as started:
        yield started


async def asked(server: Running, path: str = "/completion", **fields: Any) -> SpeculationParams:
    status, reply = await server.post(path, {"prompt": "say:hi", "n_predict": 3, **fields})
    assert status == 200, reply
    return server.scheduler.requests[-1].speculation


async def test_kinds_and_limits(server: Running):
    assert await asked(server) == DEFAULT
    assert (await asked(server, **{"speculative.type": "none"})).kinds == ()
    both = await asked(server, **{"speculative.type": "ngram-simple, ngram-map-k", "speculative.n_max": 5})
    assert (both.kinds, both.n_max, both.n_min) == (("ngram-simple", "ngram-map-k"), 5, 2)
    nested = await asked(server, speculative={"n_max": 0, "n_min": 1, "p_min": 0.5, "type": "ngram-cache"})
    assert nested == SpeculationParams(("ngram-cache",), 0, 1, 0.5)
    assert (await asked(server, **{"speculative.n_max": None, "prediction": None})) == DEFAULT


async def test_settings_are_shown(server: Running):
    reply = (await server.post("/completion", {"prompt": "say:hi", "speculative.n_max": 5}))[1]
    shown = reply["generation_settings"]
    assert (shown["speculative.type"], shown["speculative.n_max"], shown["speculative.n_min"]) == ("ngram-mod", 5, 2)
    assert "draft_n" not in reply["timings"]


async def test_drafts_of_the_client(server: Running):
    hello = list(b"hello there")
    for path in ("/completion", "/v1/completions"):
        assert (await asked(server, path, draft_tokens=hello)).draft == tuple(hello)
        prediction: Any = {"type": "content", "content": "hi there"}
        assert (await asked(server, path, prediction=prediction)).draft == tuple(b"hi there")
    prediction["content"] = [{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}]
    assert (await asked(server, prediction=prediction)).draft == tuple(b"hi there")
    messages = [{"role": "user", "content": "say:x"}]
    status, reply = await server.post("/v1/chat/completions", {"messages": messages, "prediction": prediction})
    assert status == 200
    assert server.scheduler.requests[-1].speculation.draft == tuple(b"hi there")
    assert reply["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }
    assert len((await asked(server, draft_tokens=[1] * (2 * N_CTX))).draft) == N_CTX


async def test_predictions_that_are_refused(server: Running):
    for value in (1, "x", []):
        await refused(server, "/completion", {"prompt": "a", "prediction": value}, named="'prediction'")
    for value in ({"content": "x"}, {"type": "image", "content": "x"}):
        await refused(server, "/completion", {"prompt": "a", "prediction": value}, named="'prediction.type'")
    for content in (None, 1, {}, [1], [{"type": "text"}], [{"type": "text", "text": 1}], [{"type": "image_url"}]):
        body = {"prompt": "a", "prediction": {"type": "content", "content": content}}
        await refused(server, "/completion", body, named="'prediction.content'")
    body = {"prompt": "a", "prediction": {"type": "content", "content": "x"}, "draft_tokens": [1]}
    await refused(server, "/completion", body, named="'draft_tokens'")


class MergingTokenizer(FakeTokenizer):
    """Blanks belong to the token after them, and the beginning of a text gets one, as in SPM vocabularies."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        words = ("" if text.startswith(" ") else " ") + text
        ids: list[int] = []
        for char in words.encode():
            if ids and ids[-1] == ord(" "):
                ids[-1] = char + 1000
            else:
                ids.append(char)
        return ids

    def piece(self, id: int, *, special: bool = True) -> bytes:
        return b" " + bytes([id - 1000]) if id >= 1000 else bytes([id])


def test_a_prediction_is_tokenized_where_the_prompt_ends():
    tokenizer: Any = MergingTokenizer()
    prompt = tuple(tokenizer.encode("so it"))
    assert continuation(tokenizer, prompt, "self") == list(b"self")
    assert continuation(tokenizer, prompt, " is") == [1000 + ord("i"), ord("s")]
    assert continuation(tokenizer, (*prompt, ord(" ")), "is") == tokenizer.encode("is")  # no token ends at the seam
    assert continuation(tokenizer, (), "is") == tokenizer.encode("is")


async def test_verifying(server: Running):
    hi = list(b"hi")
    status, reply = await server.post("/v1/verify", {"prompt": "say:hi", "draft_tokens": hi, "n_probs": 2})
    assert status == 200
    assert (reply["n_draft"], reply["n_accepted"], reply["tokens"]) == (2, 2, [*hi, 257])
    assert (reply["stop_type"], reply["content"], reply["object"]) == ("eos", "hi", "verification")
    assert [entry["id"] for entry in reply["completion_probabilities"]] == [*hi, 257]
    request = server.scheduler.requests[-1]
    assert (request.verify, request.n_predict, request.stop, request.speculation.kinds) == (True, 3, (), ())
    status, reply = await server.post(
        "/verify", {"prompt": "say:hx", "draft_tokens": hi, "seed": 3, "rng_used": [4, 1], "temperature": 1}
    )
    assert (reply["n_accepted"], reply["seed"]) == (1, 42)
    assert server.scheduler.requests[-1].sampling.rng_used == (4, 1)


async def test_verify_with_bad_field_is_refused(server: Running):
    good = {"prompt": "say:hi", "draft_tokens": [1]}
    await refused(server, "/v1/verify", {"draft_tokens": [1]}, named="'prompt'")
    await refused(server, "/v1/verify", {"prompt": "a"}, named="'draft_tokens'")
    await refused(server, "/v1/verify", {"prompt": ["a", "b"], "draft_tokens": [1]}, named="'prompt'")
    await refused(server, "/v1/verify", {"id_slot": 9, "draft_tokens": [1]}, named="'id_slot'")
    for name, value in (("stream", True), ("n", 2), ("stop", ["x"]), ("n_predict", 5), ("prediction", {"a": 1})):
        await refused(server, "/v1/verify", {**good, name: value}, named=f"'{name}'")
    for words in (1, [1], [1, 2, 3], [-1, 0], [0, 10**9], ["x", 1]):
        await refused(server, "/v1/verify", {**good, "rng_used": words}, named="'rng_used'")

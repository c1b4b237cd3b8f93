"""Log-probabilities take bounded memory: compact until they are written, and a stream waits for its reader."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from logitless.engine import async_engine, stream
from logitless.engine.async_engine import AsyncEngine
from logitless.engine.errors import InvalidRequest, TooManyRequests
from logitless.engine.loading.open_model import open_model
from logitless.engine.loading.options import ModelOptions
from logitless.engine.requests import CompletionRequest, Event, Failed, Finished, Ranking, Token, TokenProb
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.stream import MOST_WHOLE, Delivery
from logitless.frontend.replies import encoding, reply
from logitless.frontend.replies.encoding import encode_json, json_pieces, lazy, plain
from logitless.frontend.replies.responses import ResponsesReply
from logitless.server.api import generate
from tests.helpers.http_fakes import FakeScheduler, Running, running
from tests.helpers.scheduler_fakes import Bench, prompt
from tests.server.test_service import started

REQUEST = CompletionRequest((97,), n_predict=40, sampling=SamplingParams(n_probs=20))
CHAT = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20, "max_tokens": 40}
WHOLE = Delivery(True, MOST_WHOLE)
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/completion", {"prompt": "x", "n_probs": 20, "n_predict": 40, "n": 2}),
    ("/v1/completions", {"prompt": "x", "logprobs": 20, "max_tokens": 40, "echo": True}),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", {"input": "x", "top_logprobs": 20, "max_output_tokens": 40}),
    (
        "/api/generate",
        {
            "model": "fake",
            "prompt": "x",
            "logprobs": True,
            "top_logprobs": 20,
            "stream": False,
            "options": {"num_predict": 40},
        },
    ),
]


def test_alternatives_of_a_token_take_eight_bytes_each() -> None:
    n = 1000
    ranking = Ranking(array("i", range(n)), array("f", [-float(i) for i in range(n)]))
    assert sum(sys.getsizeof(part) for part in (ranking._ids, ranking._values)) < 9 * n
    assert ranking == tuple((i, -float(i)) for i in range(n))
    assert ranking[:2] == ((0, 0.0), (1, -1.0))
    assert ranking[-1] == (n - 1, 1.0 - n)
    assert ranking != ranking[1:]
    assert TokenProb(1, 0.0, ranking).weight == n + stream.event_weight(Token(1, "", TokenProb(1, 0.0)))


def test_a_lazy_list_is_written_as_the_list_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"a": [1, "\0"], "b": [{"n": i, "text": '"\\,[\0'} for i in range(100)], "c": [], "d": math.inf}
    made = {**data, "b": lazy(lambda: iter(data["b"])), "c": lazy(lambda: iter([]))}  # type: ignore[call-overload]
    assert encode_json(made) == encode_json(data) == b"".join(json_pieces(made))
    assert plain(made) == data
    monkeypatch.setattr(encoding, "PIECE", 64)
    pieces = list(json_pieces(made))
    assert max(map(len, pieces)) < 200
    assert b"".join(pieces) == encode_json(data)
    surrogate = {"text": "\ud800", "b": lazy(lambda: iter([1, 2]))}
    assert encode_json(surrogate) == b'{"text":"?","b":[1,2]}'


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_large_answer_in_pieces_is_the_answer(path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    async with running() as server:
        status, whole = await server.post(path, body)
        monkeypatch.setattr(encoding, "PIECE", 256)
        monkeypatch.setattr(generate, "PIECE", 256)
        async with server.http.post(server.url + path, json=body) as response:
            assert (status, response.status) == (200, 200)
            assert response.headers.get("Transfer-Encoding") == "chunked"
            pieces = json.loads(await response.read())
    assert _logprobs(pieces) == _logprobs(whole)
    assert len(_logprobs(whole)) > 40 * 20


def _logprobs(answer: Any) -> list[float]:
    """All log-probabilities of an answer."""
    if isinstance(answer, dict):
        named = [v for k, v in answer.items() if k == "logprob" and isinstance(v, float)]
        return named + [n for value in answer.values() for n in _logprobs(value)]
    if isinstance(answer, list):
        return [n for value in answer for n in _logprobs(value)]
    return [answer] if isinstance(answer, float) and answer < 0 else []


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_an_answer_with_too_many_log_probabilities_is_refused(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reply.Reply, "most_logprobs", 600)
    monkeypatch.setattr(ResponsesReply, "most_logprobs", 600)
    async with running() as server:
        status, answer = await server.post(path, body)
        assert status == 400
        assert "log-probabilities: one answer has room for 600" in json.dumps(answer)
        few = json.loads(json.dumps(body).replace(": 40", ": 5"))
        assert (await server.post(path, few))[0] == 200
        assert server.service._weight_unread() == 0


async def test_log_probabilities_of_a_prompt_are_refused_before_they_are_computed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reply.Reply, "most_logprobs", 600)
    async with running() as server:
        long = {"prompt": "x" * 40, "prompt_logprobs": 20, "max_tokens": 1}
        assert (await server.post("/v1/completions", long))[0] == 400
        assert (await server.post("/v1/completions", {**long, "prompt": "x" * 10}))[0] == 200
        assert len(server.scheduler.requests) == 1


async def test_all_answers_together_have_a_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(async_engine, "MOST_TOGETHER", 600)
    service = await started(FakeScheduler())
    first = service.begin([REQUEST], delivery=WHOLE)
    events = [event async for _, event in first]
    assert isinstance(events[-1], Failed)
    assert events[-1].code == TooManyRequests.code
    with pytest.raises(TooManyRequests):  # until the first one is written
        service.begin([REQUEST], delivery=WHOLE)
    async with service.begin([replace(REQUEST, sampling=SamplingParams())], delivery=Delivery(True, 1)) as plainly:
        assert isinstance([event async for _, event in plainly][-1], Finished)
    first.close()
    async with service.begin([replace(REQUEST, n_predict=4)], delivery=WHOLE) as again:
        assert isinstance([event async for _, event in again][-1], Finished)
    await service.stop()


async def test_a_python_caller_has_no_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(async_engine, "MOST_TOGETHER", 1)
    monkeypatch.setattr(async_engine, "UNREAD", 1)
    service = await started(FakeScheduler())
    async with await service.submit([REQUEST]) as reading:
        assert sum(isinstance(event, Token) for _, event in [item async for item in reading]) == 40
        assert not reading.is_held
    await service.stop()


async def test_a_stream_that_is_not_read_waits_and_goes_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(async_engine, "UNREAD", 100)
    monkeypatch.setattr(stream, "UNREAD", 100)
    monkeypatch.setattr(stream, "TURN", 60)
    scheduler = FakeScheduler()
    service = await started(scheduler)

    async def ids(most: int | None) -> list[int]:
        async with await service.submit([REQUEST], delivery=Delivery(most_logprobs=most)) as reading:
            if most is not None:
                async with asyncio.timeout(5):
                    while not reading.is_held:
                        await asyncio.sleep(0)
                await service.ask(lambda _: None)
                assert scheduler.running[0].n_generated < 10
            batches: list[list[tuple[int, Event]]] = []
            while batch := await reading.batch():
                batches.append(batch)
            assert most is None or max(map(len, batches)) <= 4
            return [event.id for batch in batches for _, event in batch if isinstance(event, Token)]

    assert await ids(MOST_WHOLE) == await ids(None)
    assert not service._held_streams
    await service.stop()


async def test_a_stream_that_nobody_reads_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(async_engine, "UNREAD", 100)
    monkeypatch.setattr(async_engine, "UNREAD_SECONDS", 0)
    scheduler = FakeScheduler()
    service = await started(scheduler)
    async with await service.submit([REQUEST], delivery=Delivery(most_logprobs=MOST_WHOLE)) as unread:
        async with asyncio.timeout(5):
            while not unread.ended:
                await asyncio.sleep(0)
        await service.ask(lambda _: None)
        assert scheduler.cancelled  # its slot is free
        last = [event async for _, event in unread][-1]
        assert isinstance(last, Failed)
        assert "does not read" in last.message
    assert not service._held_streams
    await service.stop()


def test_a_sequence_that_waits_delays_no_other_and_goes_on_with_the_same_tokens() -> None:
    bench = Bench()
    alone = bench.run(prompt(5, 1), n_predict=12).ids
    waiting = bench.submit(prompt(5, 1), n_predict=12)
    while not waiting.n_generated:
        bench.step()
    waiting.is_held = True
    other = bench.submit(prompt(5, 2), n_predict=12)
    n_before = waiting.n_generated
    while not other.done:
        bench.step()
    assert waiting.n_generated == n_before
    waiting.is_held = False
    bench.drain()
    assert bench.answers[waiting].ids == alone


async def test_tokens_without_a_text_are_told_before_the_end(monkeypatch: pytest.MonkeyPatch):
    from logitless.frontend.replies import openai

    monkeypatch.setattr(openai, "MAX_PENDING", 100)

    async def sizes(server: Running) -> list[int]:
        body = {"prompt": "x", "logprobs": 20, "max_tokens": 40, "stream": True, "logit_bias": {}}
        async with server.http.post(server.url + "/v1/completions", json=body) as response:
            return [len(line) for line in (await response.text()).splitlines() if "top_logprobs" in line]

    async with running() as server:
        monkeypatch.setattr(server.scheduler.tokenizer, "pieces", server.scheduler.tokenizer.pieces)
        n_shown = await sizes(server)
        advance = server.scheduler._advance
        server.scheduler._advance = lambda s: [
            structs.replace(event, text="") if isinstance(event, Token) else event for event in advance(s)
        ]
        n_hidden = await sizes(server)
    assert len(n_shown) == 40
    assert 5 <= len(n_hidden) <= 20


async def test_refusals_leave_no_pending_future(monkeypatch: pytest.MonkeyPatch):
    service = await started(FakeScheduler())
    for _ in range(3):
        with pytest.raises(InvalidRequest):
            await service.submit([replace(REQUEST, prompt=(97,) * 50, prompt_logprobs=20)], delivery=Delivery(False, 1))
    await service.ask(lambda _: None)
    await asyncio.sleep(0)
    assert not service._pending
    await service.stop()


async def test_a_newcomer_takes_the_only_slot_of_a_stream_that_is_not_read(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(async_engine, "UNREAD", 100)
    monkeypatch.setattr(stream, "UNREAD", 100)
    monkeypatch.setattr(stream, "TURN", 60)
    opened = open_model(shared_data / "models" / "stories260K.gguf", ModelOptions(parallel=1, ctx_size=128))
    request = replace(REQUEST, ignore_eos=True, sampling=SamplingParams(n_probs=20, seed=1, mirostat=2))
    service = AsyncEngine()
    service.start(opened.load)
    await service.loaded()

    async def ids(reading: stream.Stream) -> list[int]:
        return [event.id async for _, event in reading if isinstance(event, Token)]

    async with await service.submit([request]) as alone:
        expected = await ids(alone)
    async with await service.submit([request], delivery=Delivery(most_logprobs=MOST_WHOLE)) as slow:
        async with asyncio.timeout(5):
            while not slow.is_held:
                await asyncio.sleep(0)
            async with await service.submit([replace(request, prompt=(98,))]) as newcomer:
                assert len(await ids(newcomer)) == 40
        assert await ids(slow) == expected
    await service.stop()

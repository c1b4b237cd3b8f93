"""Bounds of requests: refused before the work, in one line, while others are served."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from logitless.engine.errors import ExceedsContext, InvalidRequest
from logitless.frontend.parser import MAX_RESULTS, Prompt, RequestParser, Room
from logitless.server.api import context
from logitless.server.api.llamacpp import routes
from logitless.server.bodies import room as bodies
from logitless.server.bodies.json_body import json_object
from logitless.server.config import ServerConfig
from tests.helpers.http_fakes import N_CTX, FakeTokenizer, Running, running

LARGEST = 1 << 20
SIZE = N_CTX * 10  # of texts to tokenize


class Untouched(FakeTokenizer):
    """A tokenizer that no text may reach."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        raise AssertionError(f"{len(text)} characters were tokenized")


# -- texts


@pytest.mark.parametrize(
    ("path", "body", "status", "wrong"),
    [
        ("/completion", {"prompt": ["a"] * (MAX_RESULTS + 1)}, 400, "field 'prompt': one request has at most 2048"),
        ("/v1/completions", {"prompt": ["a"] * 1025, "n": 2}, 400, "at most 2048 results, not 2050"),
        ("/v1/completions", {"prompt": [[97]] * 110, "best_of": 20}, 400, "at most 2048 results, not 2200"),
        ("/completion", {"prompt": "x" * (N_CTX * 5 + 5), "n_predict": 1}, 400, "exceeds the available context size"),
        ("/completion", {"prompt": [97], "logit_bias": [["a", 1]] * 260}, 400, "has more than the 259 tokens"),
        ("/completion", {"prompt": [97], "logit_bias": {"a" * (1 << 20): 1, "b": 1}}, 400, "has texts of more than"),
        ("/completion", {"prompt": [97], "grammar": "a" * (1 << 22) + "b"}, 400, "'grammar': has more than 4194304"),
        ("/tokenize", {"content": "x" * (SIZE + 1)}, 413, "'content': a text has at most 5120 characters"),
        ("/tokenize", {"content": ["x" * SIZE, 97, "y"]}, 413, "field 'content'"),
        ("/detokenize", {"tokens": [97] * (SIZE + 1)}, 413, "field 'tokens': at most 5120"),
    ],
)
async def test_refused_before_it_is_tokenized(
    path: str, body: Any, status: int, wrong: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("logitless.frontend.parser.LONG_TEXT", N_CTX)
    monkeypatch.setattr(routes, "MAX_TEXT", SIZE)
    async with running(tokenizer=Untouched()) as server:
        got, reply = await server.post(path, None, data=io.BytesIO(json.dumps(body).encode()))
        assert (got, reply["error"]["code"]) == (status, status)
        assert wrong in reply["error"]["message"]


async def test_texts_of_the_largest_size_are_served(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(routes, "MAX_TEXT", SIZE)
    ids = [97] * SIZE

    class Quick(FakeTokenizer):
        def encode_parts(self, text: str, **how: bool) -> Iterator[list[int]]:
            yield list(text.encode())

    async with running(tokenizer=Quick()) as server:
        for path, body, told in (
            ("/tokenize", {"content": "a" * SIZE}, {"tokens": ids}),
            ("/detokenize", {"tokens": ids}, {"content": "a" * SIZE, "prompt": "a" * SIZE}),
        ):
            assert await server.post(path, None, data=io.BytesIO(json.dumps(body).encode())) == (200, told)


async def test_pieces_of_tokens():
    async with running() as server:
        body = {"content": 'a"hello\u00e9', "with_pieces": True}
        assert (await server.post("/tokenize", body))[1]["tokens"] == [
            {"id": 97, "piece": "a"},
            {"id": 34, "piece": '"'},
            {"id": 258, "piece": "hello"},
            {"id": 0xC3, "piece": [0xC3]},
            {"id": 0xA9, "piece": [0xA9]},
        ]


class Endless(FakeTokenizer):
    """A tokenizer whose long texts never end."""

    n_parts = 0

    def encode_parts(self, text: str, **how: bool) -> Iterator[list[int]]:
        while True:
            self.n_parts += 1
            yield [97] * 100


def test_tokenizing_ends_where_the_context_does(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("logitless.frontend.parser.LONG_TEXT", N_CTX)
    parser = RequestParser(Endless(), ServerConfig(), N_CTX)  # type: ignore[arg-type]
    with pytest.raises(ExceedsContext, match=r"request \(at least 600 tokens\) exceeds .* \(512 tokens\)") as refused:
        parser.encode("a" * N_CTX)
    assert refused.value.extra == {"n_prompt_tokens": 600, "n_ctx": N_CTX}
    with pytest.raises(ExceedsContext, match="at least 1000 tokens"):
        parser.encode("a" * N_CTX, most=950)


@pytest.mark.parametrize("path", ["/tokenize", "/completion"])
async def test_tokenizing_ends_when_the_client_leaves(path: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("logitless.frontend.parser.LONG_TEXT", 10)
    monkeypatch.setattr("logitless.frontend.parser.MAX_TOKENS", 1 << 60)
    left = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Told(FakeTokenizer):
        def encode_parts(self, text: str, **how: bool) -> Iterator[list[int]]:
            try:
                while True:
                    yield []
            finally:
                loop.call_soon_threadsafe(left.set)

    async with running(tokenizer=Told()) as server:
        body = {"content": "a" * 5000, "prompt": "a" * 2000}
        asking = asyncio.create_task(server.post(path, body))
        await asyncio.wait([asking], timeout=0.05)
        assert not left.is_set()
        assert (await server.get("/health"))[0] == 200
        asking.cancel()
        await asyncio.wait_for(left.wait(), 10)


def test_prompts_have_to_fit():
    assert Room(10).take(Prompt((97,) * 10)).ids == (97,) * 10
    for room, n in ((Room(10), 11), (Room(10, spare=1), 10)):
        with pytest.raises(ExceedsContext, match=rf"request \({n} tokens\) exceeds"):
            room.take(Prompt((97,) * n))


def test_the_first_prompt_that_does_not_fit_is_the_last_one_tokenized():
    class Counting(FakeTokenizer):
        n = 0

        def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
            self.n += 1
            return [97] * len(text)

    tokenizer = Counting()
    parser = RequestParser(tokenizer, ServerConfig(), N_CTX)  # type: ignore[arg-type]
    for parse in (parser.native, parser.openai):
        tokenizer.n = 0
        with pytest.raises(ExceedsContext):
            parse({"prompt": ["a", "b" * N_CTX, *["c"] * 100]})
        assert tokenizer.n == 2


def test_tokens_of_all_prompts_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("logitless.frontend.parser.MAX_TOKENS", 25)
    Room(30).take(Prompt((97,) * 30))
    room = Room(20)
    for n in (10, 15):
        room.take(Prompt((97,) * n))
    with pytest.raises(InvalidRequest, match="at most 25 tokens in all its prompts"):
        room.take(Prompt((98,)))


# -- bodies


@asynccontextmanager
async def half_sent(server: Running, nbytes: int, length: int = LARGEST) -> AsyncIterator[asyncio.StreamReader]:
    """A connection that sends so many bytes of a body, and then nothing."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    writer.write(head.encode() + b" " * nbytes)
    try:
        yield reader
    finally:
        writer.transport.abort()


async def settled(server: Running, nbytes: int) -> None:
    """Until so many bytes of bodies have arrived."""
    while sum(server.bodies._taken.values()) != nbytes:
        await asyncio.sleep(0)


async def test_bodies_share_their_room():
    async with running(max_body=LARGEST) as server:
        async with half_sent(server, LARGEST - 1), half_sent(server, LARGEST - 1), asyncio.timeout(10):
            await settled(server, 2 * LARGEST - 2)
            async with half_sent(server, LARGEST - 1) as reader:
                assert b" 503 " in await reader.readline()
            status, reply = await server.post("/completion", {"prompt": "say:a", "x": "y" * (bodies.SMALL // 2)})
            assert (status, reply["content"]) == (200, "a")  # small ones always have room
            status, reply = await server.post("/completion", {"prompt": "say:a", "x": "y" * bodies.SMALL})
            assert (status, reply["error"]["message"]) == (503, "too many large requests arrive at once")
            headers = {"Authorization": "Bearer other"}
            status, reply = await server.post("/completion", {"prompt": "say:a", "x": "y" * 500_000}, headers=headers)
            assert (status, reply["content"]) == (200, "a")  # nor do they take another client's
        async with asyncio.timeout(10):
            await settled(server, 0)
        status, _ = await server.post("/completion", {"prompt": "say:a", "x": "y" * 500_000})
        assert status == 200
        assert not server.bodies._taken


async def test_the_bytes_of_a_huge_body_are_free_while_its_values_are_parsed(monkeypatch: pytest.MonkeyPatch):
    raws: list[bytearray] = []
    monkeypatch.setattr(context, "_HUGE", bodies.SMALL)
    monkeypatch.setattr(context, "json_object", lambda raw: (raws.append(raw), json_object(raw))[1])
    async with running(max_body=LARGEST) as server:
        status, reply = await server.post("/completion", {"prompt": "say:a", "x": "y" * 500_000})
        assert (status, reply["content"], len(raws[0])) == (200, "a", 0)
        assert not server.bodies._taken


async def test_a_body_that_is_announced_too_large_is_not_read():
    async with running(max_body=LARGEST) as server, half_sent(server, 0, LARGEST + 1) as reader, asyncio.timeout(10):
        assert b" 413 " in await reader.readline()


@pytest.mark.parametrize("nbytes", [0, 100, bodies.STRIDE + 1])
async def test_a_body_that_does_not_come(nbytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bodies, "STRIDE_SECONDS", 0.02)
    async with running() as server, half_sent(server, nbytes) as reader, asyncio.timeout(10):
        assert b" 408 " in await reader.readline()

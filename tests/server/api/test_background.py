"""Responses in the background: polled, resumed, cancelled and bounded, on a fake engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from logitless.engine.errors import InvalidRequest
from logitless.models.chat.template import ChatTemplate
from logitless.server.api.llamacpp import sessions
from logitless.server.api.llamacpp.sessions import StreamSession
from logitless.server.api.openai.responses import _offset
from tests.helpers.chat_fakes import HERMES_LIKE, THOUGHT, Scripted, says
from tests.helpers.http_fakes import Running, running, while_stepping
from tests.server.api.test_strict_types import parsed

ASKED: Any = {"model": "m", "input": "1 + 1?", "background": True}


@asynccontextmanager
async def stepping(**settings: Any) -> AsyncIterator[tuple[Running, threading.Semaphore]]:
    """A server that makes a token for each release of the gate."""
    gate = threading.Semaphore(0)
    template = ChatTemplate(HERMES_LIKE, bos_token="", eos_token="</s>")
    async with running(scheduler=Scripted(4, gate), template=template, **settings) as server:
        says(server, f"{THOUGHT}Two, é.")
        yield server, gate
        gate.release(1000)


async def after_steps(server: Running, gate: threading.Semaphore, id: str, *statuses: str) -> Any:
    """The response, once its status is one of these."""
    while True:
        _, told = await server.get(f"/v1/responses/{id}")
        if told["status"] in statuses:
            return told
        gate.release()


async def test_it_is_polled_until_it_is_whole():
    async with stepping() as (server, gate):
        made = await server.openai.responses.create(**ASKED)
        assert (made.status, made.background, made.output) == ("queued", True, [])
        _, told = await server.get(f"/v1/responses/{made.id}")
        assert told["status"] == "queued"
        with pytest.raises(openai.BadRequestError, match="wait for its end"):
            await server.openai.responses.create(model="m", input="x", previous_response_id=made.id)
        told = await after_steps(server, gate, made.id, "in_progress", "completed")
        assert (parsed(Response, told).status, told["output"]) == ("in_progress", [])
        parsed(Response, await after_steps(server, gate, made.id, "completed"))
        whole = await server.openai.responses.retrieve(made.id)
        assert (whole.output_text, whole.background, whole.id) == ("Two, é.", True, made.id)
        assert whole.usage.output_tokens > 9  # type: ignore[union-attr]
        (item,) = (await server.openai.responses.input_items.list(made.id)).data
        assert item.content[0].text == "1 + 1?"  # type: ignore[union-attr]
        asked: Any = {"model": "m", "input": "Sure?", "previous_response_id": made.id}
        again = await while_stepping(gate, server.openai.responses.create(**asked))
        assert again.output_text == "Two, é."


async def test_a_stream_is_resumed_after_any_event():
    async with stepping() as (server, gate):
        first: list[Any] = []
        stream: Any = await server.openai.responses.create(**ASKED, stream=True)
        while len(first) < 6:
            first.append(await while_stepping(gate, anext(stream)))
        await stream.close()  # the client leaves
        id = first[0].response.id
        assert [event.type for event in first[:3]] == [*("response.created", "response.queued", "response.in_progress")]
        assert [event.response.status for event in first[:3]] == ["queued", "queued", "in_progress"]

        async def rest(after: int) -> list[Any]:
            told: Any = await server.openai.responses.retrieve(id, stream=True, starting_after=after)
            return [event async for event in told]

        events = [*first, *await while_stepping(gate, rest(5))]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        for event in events:
            parsed(ResponseStreamEvent, event.model_dump(mode="json", exclude_unset=True))
        assert server.scheduler.cancelled == []
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Two, é."
        whole = await server.openai.responses.retrieve(id)
        assert (events[-1].type, events[-1].response) == ("response.completed", whole)
        for after in (0, len(events) - 2, len(events) - 1, 10**6):
            assert await rest(after) == events[after + 1 :]
        status, told = await server.get(f"/v1/responses/{id}?stream=true&starting_after=x")
        assert (status, "starting_after" in told["error"]["message"]) == (400, True)


async def test_cancelling_frees_its_slot():
    async with stepping(api_keys=("one", "two")) as (server, gate):
        api, other = server.openai.responses, server.openai.with_options(api_key="two").responses
        made = await api.create(**ASKED)
        await after_steps_of("one", server, gate, made.id)
        follower: Any = await api.retrieve(made.id, stream=True)
        for refused in (other.cancel, other.retrieve, other.delete):
            with pytest.raises(openai.NotFoundError):
                await refused(made.id)
        for _ in range(2):
            assert (await api.cancel(made.id)).status == "cancelled"
        assert await while_stepping(gate, asyncio.to_thread(server.scheduler.n_cancelled.acquire, timeout=60))
        assert len(server.scheduler.cancelled) == 1
        assert (await api.retrieve(made.id)).status == "cancelled"
        assert [event.type async for event in follower][-1] != "response.completed"
        plain = await while_stepping(gate, api.create(model="m", input="x"))
        with pytest.raises(openai.BadRequestError, match="with background"):
            await api.cancel(plain.id)
        made = await while_stepping(gate, api.create(**ASKED))
        await api.delete(made.id)
        assert await while_stepping(gate, asyncio.to_thread(server.scheduler.n_cancelled.acquire, timeout=60))
        with pytest.raises(openai.NotFoundError):
            await api.retrieve(made.id)


async def after_steps_of(key: str, server: Running, gate: threading.Semaphore, id: str) -> None:
    while (await server.openai.with_options(api_key=key).responses.retrieve(id)).status == "queued":
        gate.release()


async def test_a_failure_is_its_last_state():
    async with stepping() as (server, gate):
        made = await server.openai.responses.create(model="m", input="step-boom", background=True)
        gate.release()
        told = await after_steps(server, gate, made.id, "failed")
        assert parsed(Response, told).error.code == "server_error"
        _, refused = await server.post("/v1/responses", {**ASKED, "input": "a" * 2000})
        assert refused["error"]["code"] in (400, 500)


async def test_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    async with stepping() as (server, gate):
        ids = [(await while_stepping(gate, server.openai.responses.create(**ASKED))).id for _ in range(2)]
        status, told = await server.post("/v1/responses", ASKED)
        assert (status, told["error"]["type"]) == (503, "unavailable_error")
        assert len(server.scheduler.requests) == 2
        for id in ids:
            await after_steps(server, gate, id, "completed")
        assert (await while_stepping(gate, server.openai.responses.create(**ASKED))).status == "queued"


@pytest.mark.parametrize(
    ("change", "field"),
    [({"store": False}, "background"), ({"background": "yes"}, "background"), ({"input": []}, "input")],
)
async def test_background_response_with_conflicting_field_is_refused(
    server: Running, change: dict[str, Any], field: str
):
    status, told = await server.post("/v1/responses", {**ASKED, **change})
    assert (status, told["error"]["message"].startswith(f"field '{field}':")) == (400, True)
    assert server.scheduler.requests == []


def test_only_the_end_of_a_long_stream_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_BYTES", 150)
    session = StreamSession("x")
    pieces = [b'event: a\ndata: {"type":"a","sequence_number":%d,"x":"%s"}\n\n' % (i, b"y" * i) for i in range(9)]
    for piece in pieces:
        session.add(piece)
    first = next(i for i in range(9) if len(b"".join(pieces[i:])) <= 150)
    assert b"".join(pieces[: first + 1]) == b"".join(pieces)[: _offset(session, first)]
    with pytest.raises(InvalidRequest, match=f"only the events after {first - 1} are still kept"):
        _offset(session, first - 2)

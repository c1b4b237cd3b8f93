"""Resumable streams (X-Conversation-Id): continued without their client, and found again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from logitless.server.api.llamacpp import sessions
from logitless.server.api.llamacpp.sessions import StreamSession
from tests.helpers.http_fakes import FakeScheduler, Running, running, while_stepping

BODY = {"prompt": "say:" + "wörds " * 6, "stream": True}
NAMED = {"X-Conversation-Id": "c/1::m"}
AT = "/v1/stream?conv_id=c/1::m"


async def lookup(server: Running, *ids: str, **headers: str) -> Any:
    status, found = await server.post("/v1/streams/lookup", {"conversation_ids": ids}, headers=headers)
    assert status == 200
    return found


async def read(server: Running, at: str, **headers: str) -> bytes:
    async with server.http.get(server.url + at, headers=headers) as reply:
        assert (reply.status, reply.content_type) == (200, "text/event-stream")
        return await reply.read()


async def leave_after(server: Running, gate: threading.Semaphore, n: int) -> bytes:
    """The first bytes of a stream whose client goes away in the middle."""
    got = b""
    async with server.http.post(server.url + "/v1/completions", json=BODY, headers=NAMED) as reply:
        while len(got) < n:
            got += await while_stepping(gate, reply.content.readany())
        reply.close()
    return got


async def test_a_lost_stream_goes_on_and_is_read_again():
    gate = threading.Semaphore(0)
    async with running(scheduler=FakeScheduler(1, gate)) as server:
        got = await leave_after(server, gate, 500)
        (told,) = await lookup(server, "other", "c/1::m", "c/1::m")
        assert (told["conversation_id"], told["is_done"], told["completed_at"]) == ("c/1::m", False, 0)
        waiting = asyncio.create_task(read(server, f"{AT}&from={len(got)}"))  # two at once, while it goes on
        whole = await while_stepping(gate, read(server, AT))
        assert got + await waiting == whole
        assert whole.startswith(got)
        assert whole.endswith(b"data: [DONE]\n\n")
        assert whole.count(b'"text":') > 30
        (told,) = await lookup(server, "c/1::m")
        assert (told["is_done"], told["total_bytes"]) == (True, len(whole))
        assert told["completed_at"] >= told["started_at"] > 0
        assert [await read(server, f"{AT}&from={len(whole) + n}") for n in (-5, 0, 9)] == [whole[-5:], b"", b""]
        assert server.scheduler.cancelled == []


async def test_without_the_header_leaving_frees_the_slot():
    gate = threading.Semaphore(0)
    async with running(scheduler=FakeScheduler(1, gate)) as server:
        async with server.http.post(server.url + "/completion", json=BODY) as reply:
            await while_stepping(gate, reply.content.readany())
            reply.close()
        assert await while_stepping(gate, asyncio.to_thread(server.scheduler.n_cancelled.acquire, timeout=60))
        assert len(server.scheduler.cancelled) == 1


@pytest.mark.parametrize("by", ["delete", "the same name"])
async def test_ending_a_stream_frees_its_slot(by: str):
    gate = threading.Semaphore(0)
    async with running(scheduler=FakeScheduler(1, gate)) as server:
        await leave_after(server, gate, 100)
        follower = await server.http.get(server.url + AT)
        if by == "delete":
            for _ in range(2):
                async with server.http.delete(server.url + AT) as reply:
                    assert reply.status == 204
            assert await lookup(server, "c/1::m") == []
        else:
            body = {"prompt": "say:x", "stream": True}
            again = server.http.post(server.url + "/completion", json=body, headers=NAMED)
            async with await while_stepping(gate, again) as reply:  # type: ignore[arg-type]
                text = await while_stepping(gate, reply.text())
            assert '"content":"x"' in text
            assert (await read(server, AT)).decode() == text
        assert await while_stepping(gate, asyncio.to_thread(server.scheduler.n_cancelled.acquire, timeout=60))
        assert len(server.scheduler.cancelled) == 1
        assert not (await follower.read()).endswith(b"[DONE]\n\n")


async def test_every_key_has_names_of_its_own():
    async with running(api_keys=("one", "two")) as server:
        one, two = {"X-Api-Key": "one"}, {"Authorization": "Bearer two"}
        async with server.http.post(server.url + "/completion", json=BODY, headers=NAMED | one) as reply:
            text = await reply.read()
        assert await lookup(server, "c/1::m", **two) == []
        async with server.http.get(server.url + AT, headers=two) as reply:
            assert reply.status == 404
        async with server.http.delete(server.url + AT, headers=two) as reply:
            assert reply.status == 204
        assert await read(server, AT, Authorization="Bearer one") == text
        assert (await server.get(AT))[0] == 401


async def test_bad_stream_request_is_refused():
    async with running() as server:
        for at, status in (
            ("", 400),
            ("?conv_id=x", 404),
            ("/x", 404),
            ("/x?from=-1", 400),
            ("/x?from=" + "9" * 99, 400),
        ):
            assert (await server.get("/v1/stream" + at))[0] == status
        for ids in (None, "x", [1], ["x"] * 1001):
            assert (await server.post("/v1/streams/lookup", {"conversation_ids": ids}))[0] == 400
        for id in ("", "x" * 257):
            assert (await server.post("/completion", BODY, headers={"X-Conversation-Id": id}))[0] == 400
        long = {"prompt": "x" * 600, "stream": True}
        assert (await server.post("/completion", long, headers=NAMED))[0] == 400
        assert await lookup(server, "c/1::m") == []  # a refused request leaves nothing


async def test_only_the_end_of_a_long_stream_is_kept(monkeypatch: pytest.MonkeyPatch):
    gate = threading.Semaphore(0)
    async with running(scheduler=FakeScheduler(1, gate)) as server:
        await leave_after(server, gate, 100)
        monkeypatch.setattr(sessions, "MAX_BYTES", 100)
        gate.release(1000)
        while not (told := (await lookup(server, "c/1::m"))[0])["is_done"]:
            await asyncio.sleep(0.01)
        first = told["total_bytes"] - 100
        assert (await read(server, f"{AT}&from={first}")).endswith(b"data: [DONE]\n\n")
        status, body = await server.get(f"{AT}&from={first - 1}")
        assert (status, f"only the bytes from {first} on" in body["error"]["message"]) == (400, True)


async def test_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    gate = threading.Semaphore(0)
    async with running(scheduler=FakeScheduler(4, gate)) as server:
        await leave_after(server, gate, 100)

        async def post(id: str) -> tuple[int, str]:
            async with server.http.post(
                server.url + "/completion", json=BODY, headers={"X-Conversation-Id": id}
            ) as reply:
                return reply.status, await reply.text()

        endless = {"prompt": "x", "stream": True, "n_predict": -1}
        second = server.http.post(server.url + "/completion", json=endless, headers={"X-Conversation-Id": "2"})
        async with await while_stepping(gate, second):  # type: ignore[arg-type]
            status, text = await post("3")
            assert (status, "unavailable_error" in text) == (503, True)
            await while_stepping(gate, read(server, AT))
            assert (await while_stepping(gate, post("3")))[0] == 200
        gate.release(1000)
        await read(server, "/v1/stream/2")
        assert [told["conversation_id"] for told in await lookup(server, "2", "3", "c/1::m")] == [
            "2",
            "3",
        ]  # the oldest made room
        monkeypatch.setattr(sessions, "KEEP", 0.0)
        assert await lookup(server, "2", "3") == []


async def test_a_stream_that_nobody_wants_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sessions, "KEEP", -1.0)
    gate = threading.Semaphore(0)
    async with running(scheduler=FakeScheduler(1, gate)) as server:
        await leave_after(server, gate, 100)
        assert await while_stepping(gate, asyncio.to_thread(server.scheduler.n_cancelled.acquire, timeout=60))
        assert len(server.scheduler.cancelled) == 1


async def test_a_reader_who_is_too_slow_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sessions, "MAX_BYTES", 4)
    session = StreamSession("x")
    reader = session.read(0)
    session.add(b"abc")
    assert await anext(reader) == b"abc"
    session.add(b"defg")
    session.add(b"hi")
    assert (session.start, session.total) == (5, 9)
    with pytest.raises(ConnectionError):
        await anext(reader)


async def test_comments_that_fill_a_silence_are_part_of_what_is_kept():
    async def silent() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        await asyncio.Event().wait()

    session, closed = StreamSession("x"), []
    session.begin(SimpleNamespace(close=lambda: closed.append(1)), silent(), 0.001)  # type: ignore[arg-type]
    got = b""
    async for piece in session.read(0):
        got += piece
        if got.count(b":\n\n") == 2:
            session.end()
    assert got == b"data: 1\n\n" + b":\n\n" * 2
    assert (session.total, closed) == (len(got), [1])


async def test_behind_a_router_it_says_whose_a_stream_is():
    """All of its requests have one key, its own; to others these headers say nothing."""

    def of(client: str) -> dict[str, str]:
        return {"X-Logitless-Key": client, "X-Logitless-Address": f"10.0.0.{len(client)}", "X-Api-Key": "router"}

    at = "/v1/stream?conv_id=c"
    for behind in (True, False):
        scheduler = FakeScheduler()
        async with running(scheduler=scheduler, behind_router=behind, api_keys=("router",)) as server:
            for client in ("one", ""):
                named = {"X-Conversation-Id": "c" if client else "d", **of(client)}
                async with server.http.post(server.url + "/v1/completions", json=BODY, headers=named) as reply:
                    await reply.read()
            assert (await read(server, at, **of("one"))).endswith(b"data: [DONE]\n\n")
            async with server.http.get(server.url + at, headers=of("other")) as reply:
                assert reply.status == (404 if behind else 200)
        assert scheduler.clients == (["one ", "10.0.0.0 "] if behind else ["router ", "router "])

"""Engine thread and server lifetime: start, stop, and requests in flight at a stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from logitless.engine.async_engine import AsyncEngine, LoadedModel, ModelInfo
from logitless.engine.errors import RequestError, ServerFault, Unavailable
from logitless.engine.requests import CompletionRequest, Failed, Finished, Token
from logitless.engine.stream import Delivery
from logitless.frontend.workers import to_thread
from logitless.server.app import serve
from logitless.server.config import ServerConfig
from tests.helpers.http_fakes import N_CTX, FakeScheduler, FakeTemplate, FakeTokenizer, running, while_stepping

REQUEST = CompletionRequest((97,), n_predict=3)


async def started(scheduler: FakeScheduler) -> AsyncEngine:
    """A service whose model has loaded."""
    service = AsyncEngine()
    service.start(lambda: LoadedModel(scheduler, FakeTokenizer(), FakeTemplate(), ModelInfo(N_CTX)))  # type: ignore[arg-type]
    await service.loaded()
    return service


async def test_events_come_in_order_and_end():
    service = await started(FakeScheduler())
    async with await service.submit([REQUEST, replace(REQUEST, n_predict=1)]) as stream:
        got = [(index, event) async for index, event in stream]
    assert [event.text for index, event in got if index == 0 and isinstance(event, Token)] == ["a", "b", "c"]
    assert sum(isinstance(event, Finished) for _, event in got) == 2
    assert await stream.batch() == []
    await service.stop()
    with pytest.raises(Unavailable):
        await service.submit([REQUEST])


async def test_events_of_a_whole_stream_come_with_the_first_token_and_the_last():
    gate = threading.Semaphore(0)
    service = await started(FakeScheduler(gate=gate))
    async with await service.submit([REQUEST, replace(REQUEST, n_predict=2)], delivery=Delivery(whole=True)) as stream:
        gate.release()
        assert [(i, event.text) for i, event in await stream.batch() if isinstance(event, Token)] == [
            (0, "a"),
            (1, "a"),
        ]
        gate.release()
        assert [(i, type(event)) for i, event in await stream.batch()] == [(1, Token), (1, Finished)]
        gate.release()
        assert [(i, type(event)) for i, event in await stream.batch()] == [(0, Token), (0, Token), (0, Finished)]
    gate.release(9)
    await service.stop()


async def test_submitting_while_loading_is_refused():
    with pytest.raises(Unavailable, match="Loading model"):
        await AsyncEngine().submit([REQUEST])
    await AsyncEngine().stop()


async def test_a_request_that_nobody_waits_to_be_admitted_is_refused_by_its_stream():
    service = await started(FakeScheduler())
    async with service.begin([REQUEST]) as stream:
        assert isinstance([event async for event in stream][-1][1], Finished)
    async with service.begin([replace(REQUEST, prompt=(97,) * (N_CTX + 1))]) as stream:
        await service.ask(lambda scheduler: None)  # the refusal comes before anybody waits for it
        with pytest.raises(RequestError, match="context"):
            await stream.batch()
    assert service.n_streams == 0
    await service.stop()
    with pytest.raises(Unavailable):
        service.begin([REQUEST])


async def test_stop_lets_a_running_request_finish():
    gate = threading.Semaphore(0)
    service = await started(FakeScheduler(gate=gate))
    stream = await service.submit([REQUEST])
    stopping = asyncio.create_task(service.stop(5))
    await asyncio.wait([stopping], timeout=0.01)
    assert not stopping.done()
    gate.release(10)
    assert isinstance([event async for _, event in stream][-1], Finished)
    await stopping


async def test_stop_cancels_what_takes_too_long():
    gate = threading.Semaphore(0)
    scheduler = FakeScheduler(gate=gate)
    service = await started(scheduler)
    stream = await service.submit([CompletionRequest((97,))])
    await while_stepping(gate, service.stop(0.2))
    last = [event async for _, event in stream][-1]
    assert isinstance(last, Failed)
    assert last.code == 503
    # On a busy machine the engine's thread may get to it only now.
    assert await while_stepping(gate, asyncio.to_thread(scheduler.n_cancelled.acquire, timeout=60))
    assert len(scheduler.cancelled) == 1


async def test_a_stuck_engine_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture):
    gate = threading.Semaphore(0)
    service = await started(FakeScheduler(gate=gate))
    await service.submit([REQUEST])
    async with asyncio.timeout(3):
        await service.stop(0.7)
    assert "still busy" in caplog.text
    gate.release(100)


async def test_an_abandoned_submit_is_cancelled():
    gate = threading.Semaphore(0)
    scheduler = FakeScheduler(gate=gate)
    service = await started(scheduler)
    first = await service.submit([REQUEST])
    await asyncio.to_thread(scheduler.n_begun.acquire)  # the engine is in its step
    second = asyncio.create_task(service.submit([REQUEST]))
    await asyncio.wait([second], timeout=0.01)
    second.cancel()
    await asyncio.wait([second])
    assert await while_stepping(gate, asyncio.to_thread(scheduler.n_cancelled.acquire, timeout=60))
    first.close()
    await while_stepping(gate, service.stop())
    assert scheduler.idle


async def test_a_scheduler_that_cannot_even_cancel_does_not_spin(caplog: pytest.LogCaptureFixture):
    class Broken(FakeScheduler):
        n_steps = 0

        def cancel(self, seq: Any) -> None:
            raise RuntimeError("cannot")

        def step(self) -> Any:
            self.n_steps += 1
            raise RuntimeError("broken")

    scheduler = Broken()
    service = await started(scheduler)
    for n in (1, 2):
        stream = await service.submit([REQUEST])
        assert [type(event) for _, event in [item async for item in stream]] == [Failed]
        assert scheduler.n_steps == n
    assert "cannot" in caplog.text
    await service.stop()


async def serving(
    config: ServerConfig, caplog: pytest.LogCaptureFixture, scheduler: FakeScheduler | None = None
) -> tuple[asyncio.Task[None], str]:
    """A server as the command line runs it, and its address from the log."""
    caplog.set_level(logging.INFO, "logitless")
    service = await started(scheduler or FakeScheduler())
    task = asyncio.create_task(serve(service, config))
    while "listening on " not in caplog.text:
        assert not task.done(), task.exception()
        await asyncio.wait([task], timeout=0.01)
    return task, caplog.text.split("listening on ")[1].split()[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_end_the_server(number: signal.Signals, caplog: pytest.LogCaptureFixture):
    task, url = await serving(ServerConfig(port=0), caplog)
    async with aiohttp.ClientSession() as http:
        async with http.get(url + "/health") as reply:
            assert reply.status == 200
        async with http.post(url + "/completion", json={"prompt": "say:" + "x" * 200, "stream": True}) as reply:
            os.kill(os.getpid(), number)
            assert b'"stop":true' in await reply.read()  # it was running, so it finishes
        async with asyncio.timeout(5):
            await task


async def test_the_log_is_quiet_about_what_is_no_http(caplog: pytest.LogCaptureFixture):
    task, url = await serving(ServerConfig(port=0), caplog)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    writer.write(b"GARBAGE\r\n\r\n")
    assert b" 400 " in await reader.readline()
    writer.close()
    await writer.wait_closed()
    os.kill(os.getpid(), signal.SIGTERM)
    await task
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_work_beside_the_loop_does_not_hold_up_the_end():
    forever = threading.Event()

    async def main() -> None:
        assert await to_thread(lambda: 5) == 5
        with pytest.raises(ZeroDivisionError):
            await to_thread(lambda: 1 // 0)
        left = asyncio.create_task(to_thread(forever.wait))
        await asyncio.sleep(0)
        left.cancel()

    asyncio.run(main())
    forever.set()


async def test_a_port_in_use_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        service = await started(FakeScheduler())
        with pytest.raises(OSError, match="in use"):
            await serve(service, ServerConfig(port=taken.getsockname()[1]))


async def test_a_model_that_does_not_load_ends_the_server():
    def build() -> LoadedModel:
        raise ValueError("not a model")

    service = AsyncEngine()
    service.start(build)
    with pytest.raises(ValueError, match="not a model"):
        await serve(service, ServerConfig(port=0))


async def test_a_client_that_does_not_read_is_dropped():
    class Wordy(FakeScheduler):
        def step(self) -> Any:
            assert self.gate is not None
            self.gate.acquire()
            return [(sequence, Token(97, "x" * (1 << 18))) for sequence in self.running]

    gate = threading.Semaphore(0)
    scheduler = Wordy(1, gate)
    async with running(scheduler=scheduler, timeout=0.05, sse_ping_interval=-1) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            body = b'{"prompt":"x","stream":true}'
            client.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            assert await while_stepping(gate, asyncio.to_thread(scheduler.n_cancelled.acquire, timeout=60))
        assert len(scheduler.cancelled) == 1


class Dying(FakeScheduler):
    """Its step ends the engine's thread, as nothing should."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.inside = threading.Event()

    def step(self) -> Any:
        self.inside.set()
        if self.gate is not None:
            self.gate.acquire()
        raise SystemExit("the engine is gone")


async def test_request_to_ended_engine_fails_at_once():
    gate = threading.Semaphore(0)
    scheduler = Dying(gate=gate)
    service = await started(scheduler)
    stream = await service.submit([REQUEST])
    assert await asyncio.to_thread(scheduler.inside.wait, 10)
    question = asyncio.create_task(service.ask(lambda scheduler: scheduler.idle))
    late = asyncio.create_task(service.submit([REQUEST]))
    await asyncio.wait([question, late], timeout=0.01)
    gate.release()
    (_, failed) = [item async for item in stream][-1]
    assert isinstance(failed, Failed)
    assert (failed.code, failed.message) == (503, "the engine has ended: SystemExit: the engine is gone")
    for task in (question, late):
        with pytest.raises(Unavailable, match="the engine has ended"):
            await task
    with pytest.raises(Unavailable, match="the engine has ended"):
        await service.ask(lambda scheduler: scheduler.idle)
    with pytest.raises(Unavailable):
        await service.submit([REQUEST])
    with pytest.raises(ServerFault, match="the engine has ended"):
        await service.ended()
    await service.stop()


async def test_questions_to_a_server_that_has_stopped():
    service = await started(FakeScheduler())
    assert await service.ask(lambda scheduler: scheduler.idle)
    await service.stop()
    await service.ended()
    with pytest.raises(Unavailable, match="the server is shutting down"):
        await service.ask(lambda scheduler: scheduler.idle)


async def test_a_server_without_an_engine_ends(caplog: pytest.LogCaptureFixture):
    task, url = await serving(ServerConfig(port=0), caplog, Dying())
    async with aiohttp.ClientSession() as http, http.post(url + "/completion", json={"prompt": "x"}) as reply:
        assert reply.status == 503
        assert "the engine has ended" in (await reply.json())["error"]["message"]
    async with asyncio.timeout(5):
        with pytest.raises(ServerFault, match="the engine has ended"):
            await task

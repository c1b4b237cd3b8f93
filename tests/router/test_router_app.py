"""Router endpoints of its own: the refusals of a server of one model, and the OpenAPI document."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from logitless.router.app import Router
from logitless.router.cached import Cache
from logitless.router.fleet import Entry, Fleet, StartFailed
from logitless.router.jobs import RouterJobs
from logitless.router.process import ServerProcess
from logitless.server.config import ServerConfig
from tests.helpers.http_fakes import running


async def _broken(entry: Entry) -> ServerProcess:
    raise StartFailed(
        f"{entry.path} is broken, see /var/log/x/y.log and http://h/z/log" if entry.path else "is broken", 1
    )


async def _fetch(*_: Any) -> None:
    raise AssertionError("nothing is downloaded")


def made(
    *, autoload: bool = True, entry: Entry | None = None, names: str = "a", start: Any = _broken, **settings: Any
) -> tuple[Fleet[ServerProcess], Router]:
    """A router of models that do not start, unless `start` starts them."""
    fleet = Fleet([entry] if entry else [Entry(name, ()) for name in names], start, len(names))
    cache = Cache(str, _fetch, lambda _: None, lambda _: None)
    return fleet, Router(
        fleet, ServerConfig(**settings), list, RouterJobs(""), cache, autoload=autoload, limit=len(names)
    )


@asynccontextmanager
async def routing(**settings: Any) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """The router, answering."""
    fleet, router = made(**settings)
    runner = web.AppRunner(router.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession() as session:
            yield session, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await fleet.close()
        await runner.cleanup()


async def test_paths_and_methods() -> None:
    async with routing() as (session, url):
        for method, path in (("GET", "/nope"), ("POST", "/nope"), ("POST", "/v1"), ("GET", "/%2e%2e/etc/passwd")):
            async with session.request(method, url + path, json={"model": "a"}) as reply:
                assert (reply.status, (await reply.json())["error"]["type"]) == (404, "not_found_error"), path
        for method, path in (("GET", "/completion"), ("DELETE", "/v1/models"), ("PUT", "/props"), ("GET", "/infill")):
            async with session.request(method, url + path, json={"model": "a"}) as reply:
                assert (reply.status, (await reply.json())["error"]["code"]) == (405, 405), path
                assert "Allow" in reply.headers
        async with session.options(url + "/completion") as reply:
            assert reply.status == 200
        async with session.head(url + "/slots", params={"model": "a"}) as reply:
            assert reply.status == 502  # asked of the model, which does not start


async def test_a_form_names_its_model() -> None:
    async with routing() as (session, url):
        for fields, status, text in (
            ({"model": "a", "file": "x" * 100_000}, 502, "model 'a'"),  # asked of it; it does not start
            ({"model": "b"}, 404, "'b'"),
            ({"prompt": "a"}, 400, "model name is missing"),
        ):
            form = aiohttp.FormData(fields, default_to_multipart=True)
            async with session.post(f"{url}/v1/audio/transcriptions", data=form) as reply:
                assert (reply.status, text in await reply.text()) == (status, True), await reply.text()


async def test_every_endpoint_of_a_model_is_passed_on() -> None:
    async with running() as server:
        _, told = await server.get("/openapi.json")
    async with routing() as (session, url):
        for path, methods in told["paths"].items():
            for method in methods:
                place = url + re.sub(r"{\w+}", "x", path)
                async with session.request(method.upper(), place, json={"model": "a"}) as reply:
                    assert reply.status != 405, (method, path)
                    assert "no such endpoint" not in await reply.text(), (method, path)


@pytest.mark.parametrize("prefix", ["", "/api"])
async def test_the_description_needs_no_model(prefix: str) -> None:
    async with running(api_prefix=prefix) as server, routing(api_prefix=prefix) as (session, url):
        expected = await server.get(f"{prefix}/openapi.json")
        async with session.get(f"{url}{prefix}/openapi.json") as reply:
            assert (reply.status, await reply.json()) == expected


async def test_metrics_without_a_loaded_model() -> None:
    async with routing() as (session, url), session.get(url + "/metrics") as reply:
        assert (reply.status, "start the server with --metrics" in await reply.text()) == (501, True)
    async with routing(metrics=True) as (session, url), session.get(url + "/metrics") as reply:
        assert reply.status == 200
        assert reply.content_type == "text/plain"
        told = [line for line in (await reply.text()).splitlines() if not line.startswith("#")]
    assert told == ["logitless:models 1.0", "logitless:models_loaded 0.0"]


async def test_refusals_of_messages_have_anthropic_s_form() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    async with routing() as (session, url):
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            for model, status in (({}, 400), ({"model": "b"}, 404), ({"model": "a"}, 502)):
                async with session.post(url + path, json={**body, **model}) as reply:
                    told = await reply.json()
                    assert (reply.status, told["type"], told["error"]["code"]) == (status, "error", status)


@pytest.mark.parametrize("word", ["", "1", "true", "TRUE", "yes", "0", "false"])
async def test_a_request_may_choose_whether_its_model_is_loaded(word: str) -> None:
    for autoload in (True, False):
        loads = {"1": True, "true": True, "0": False, "false": False}.get(word.lower(), autoload)
        async with routing(autoload=autoload) as (session, url):
            for method, path in (("POST", "/completion"), ("GET", "/slots")):
                where = {"model": "a", "autoload": word}
                async with session.request(method, url + path, params=where, json={"prompt": "x"}) as reply:
                    assert reply.status == (502 if loads else 400), (autoload, path)


async def test_users_see_models_without_paths() -> None:
    entry = Entry(
        "a", ("-m", "/secret place/m.gguf"), path="/secret place/m.gguf", preset="[a]\nmodel = /secret place/m.gguf"
    )
    settings: dict[str, Any] = {"entry": entry, "api_keys": ("k",), "admin_api_key": "admin"}
    async with routing(**settings) as (session, url):

        async def get(path: str, key: str) -> tuple[int, str]:
            async with session.get(url + path, headers={"Authorization": f"Bearer {key}"}) as reply:
                return reply.status, await reply.text()

        async with session.post(url + "/completion", json={"model": "a"}, headers={"X-Api-Key": "k"}) as reply:
            told = (await reply.json())["error"]["message"]
            assert told == "model 'a' could not be loaded: m.gguf is broken, see y.log and http://h/z/log"
        for path in ("/models", "/v1/models", "/v1/models/a", "/models/", "//v1/models"):
            for key in ("", "wrong"):
                assert (await get(path, key))[0] == 401, path
            status, text = await get(path, "k")
            assert (status, "secret" in text, '"a"' in text, "is broken" in text) == (200, False, True, True)
            status, text = await get(path, "admin")
            assert (status, "/secret place/m.gguf" in text) == (200, True)
        assert (await get("/health", ""))[0] == 200
    async with routing(entry=entry) as (session, url), session.get(url + "/models") as reply:
        assert (await reply.json())["data"][0]["path"] == entry.path  # without keys there are no users
    async with (
        routing(entry=entry, api_keys=("k",)) as (session, url),
        session.get(url + "/models", headers={"api-key": "k"}) as reply,
    ):
        assert "secret" not in await reply.text()


class Child:
    """A server's process whose port answers with these bytes, one connection each, or b"" by closing it."""

    def __init__(self, answers: list[bytes | None]) -> None:
        self.answers, self.key, self.url = answers, "k", ""
        self.end = asyncio.Event()
        self.n_requests = 0

    async def start(self) -> ServerProcess:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            self.n_requests += 1
            answer = self.answers.pop(0)
            if answer is None:
                await self.end.wait()
            elif not answer:
                self.end.set()  # it dies with the request
                self._server.close()
            else:
                writer.write(answer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._server = server
        return cast("ServerProcess", self)

    async def ended(self) -> int:
        await self.end.wait()
        self._server.close()
        return -9

    async def stop(self, seconds: float) -> None:
        self.end.set()
        self._server.close()  # also where nobody waits for its end


_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize(("once", "status", "n_starts"), [((), 200, 2), (("/completion",), 502, 1)])
async def test_a_request_to_a_child_that_just_died_is_served_by_the_next_start(
    once: tuple[str, ...], status: int, n_starts: int, monkeypatch: pytest.MonkeyPatch
):
    """Only one that may have left a trace is not repeated."""
    monkeypatch.setattr("logitless.router.proxy._ONCE", once)
    children = [Child([b""]), Child([_OK])]
    starts = iter(children)

    async def start(_: Entry) -> ServerProcess:
        return await next(starts).start()

    async with routing(start=start) as (session, url):
        async with session.post(f"{url}/completion", json={"model": "a", "prompt": "x"}) as reply:
            assert reply.status == status
        assert sum(child.n_requests for child in children) == n_starts


async def test_a_request_that_ends_two_children_is_not_tried_a_third_time():
    children = [Child([b""]) for _ in range(3)]
    starts = iter(children)

    async def start(_: Entry) -> ServerProcess:
        return await next(starts).start()

    body = {"model": "a", "prompt": "x"}
    async with routing(start=start) as (session, url), session.post(f"{url}/completion", json=body) as reply:
        assert reply.status == 502
    assert [child.n_requests for child in children] == [1, 1, 0]


async def test_the_list_of_models_does_not_wait_for_a_child_that_hangs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("logitless.router.app._AT_ONCE", 0.01)
    child = Child([_OK, None])

    async def start(_: Entry) -> ServerProcess:
        return await child.start()

    async with routing(start=start) as (session, url):
        async with session.post(f"{url}/completion", json={"model": "a", "prompt": "x"}) as reply:
            assert reply.status == 200
        for _ in range(3):
            async with asyncio.timeout(2), session.get(f"{url}/v1/models") as reply:
                assert [model["status"]["value"] for model in (await reply.json())["data"]] == ["loaded"]
        assert child.n_requests == 2  # it is asked once


async def test_one_child_answers_while_others_hang() -> None:
    children = {"a": Child([_OK, None]), "b": Child([_OK, _OK]), "c": Child([_OK, None])}

    async def start(entry: Entry) -> ServerProcess:
        return await children[entry.name].start()

    async with routing(names="abc", start=start) as (session, url):
        for name in children:
            async with session.post(f"{url}/completion", json={"model": name, "prompt": "x"}) as reply:
                assert reply.status == 200
        async with asyncio.timeout(4), session.get(f"{url}/v1/responses/resp_1") as reply:  # less than _SOON
            assert reply.status == 200
        assert children["b"].n_requests == 2


async def test_metrics_and_lookups_leave_out_a_child_that_hangs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("logitless.router.app._SOON", 0.05)
    child = Child([_OK, None, None])

    async def start(_: Entry) -> ServerProcess:
        return await child.start()

    async with routing(start=start) as (session, url):
        async with session.post(f"{url}/completion", json={"model": "a", "prompt": "x"}) as reply:
            assert reply.status == 200
        for path, status in (("/metrics", 501), ("/v1/responses/resp_1", 404)):
            async with asyncio.timeout(5), session.get(url + path) as reply:
                assert reply.status == status
        assert child.n_requests == 3

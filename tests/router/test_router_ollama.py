"""Ollama's API of a router: names, lists, downloads, keys. Its models do not start."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from logitless.router.app import Router
from logitless.router.cached import Cache
from logitless.router.downloads import DownloadFailed, Report
from logitless.router.fleet import CACHE, Entry, Fleet
from logitless.router.jobs import RouterJobs
from logitless.server.config import ServerConfig
from tests.helpers.paths import DATA
from tests.router.test_router_app import _broken

Ask = Any
VOCABULARY = DATA / "vocabs" / "ggml-vocab-gpt-2.gguf"


async def _fetch(source: str, report: Report) -> None:
    report("m.gguf", 1, 2)
    if source == "u/broken":
        raise DownloadFailed("the hub has lost it")
    report("m.gguf", 2, 2)


@asynccontextmanager
async def routing(**settings: Any) -> AsyncIterator[Ask]:
    """A function that asks the router: (status, lines of JSON) of a method, a path, a body and a key."""
    removed: list[str] = []
    entries = [Entry("a", (), str(VOCABULARY)), Entry("u/r:Q8_0", (), source=CACHE), Entry("h", (), hidden=True)]
    fleet = Fleet(entries, _broken, 1)
    cache = Cache(str, _fetch, removed.append, lambda _: None)
    config = ServerConfig(**settings)
    router = Router(fleet, config, lambda: entries, RouterJobs(""), cache, autoload=True, limit=1)
    runner = web.AppRunner(router.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def ask(method: str, path: str, body: Any = None, key: str = "") -> tuple[int, list[Any]]:
        headers = {"Authorization": f"Bearer {key}"}
        async with session.request(method, url + path, json=body, headers=headers) as reply:
            return reply.status, [json.loads(line) for line in (await reply.read()).splitlines()]

    try:
        async with aiohttp.ClientSession() as session:
            yield ask
    finally:
        await fleet.close()
        await runner.cleanup()


async def test_lists() -> None:
    async with routing() as ask:
        status, (tags,) = await ask("GET", "/api/tags")
        assert (status, [m["name"] for m in tags["models"]]) == (200, ["a:latest", "u/r:Q8_0"])
        assert await ask("GET", "/api/ps") == (200, [{"models": []}])
        assert (await ask("GET", "/api/version"))[1][0]["version"]
    async with routing(api_keys=("k",)) as ask:
        for path in ("/api/tags", "/api/ps"):
            assert (await ask("GET", path))[0] == 401
            assert (await ask("GET", path, key="k"))[0] == 200


@pytest.mark.skipif(not VOCABULARY.exists(), reason="no vocabularies beside the checkout")
async def test_a_model_is_shown_without_being_loaded() -> None:
    async with routing() as ask:
        for body in ({"model": "a"}, {"name": "a:latest"}, {"model": "a", "verbose": True}):
            status, (shown,) = await ask("POST", "/api/show", body)
            assert (status, shown["model_info"]["general.architecture"]) == (200, "gpt2")


async def test_names() -> None:
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/api/generate", {"prompt": "x"}),
        ("/api/chat", {"messages": [{"role": "user", "content": "x"}]}),
        ("/api/embed", {"input": "x"}),
        ("/api/embeddings", {"prompt": "x"}),
    ]
    async with routing() as ask:
        for path, body in [*calls, ("/api/show", {})]:
            for name, expected in (("nobody", 404), ("", 400), (7, 400), (None, 400), ([], 400)):
                status, (told,) = await ask("POST", path, {**body, "model": name})
                assert (status, list(told)) == (expected, ["error"]), (path, name)
            status, (told,) = await ask("POST", path, body)
            assert (status, "'model'" in told["error"]) == (400, True), path
        for path, body in calls:
            for name in ({"model": "a"}, {"model": "a:latest"}, {"name": "hf.co/u/r:Q8_0"}, {"model": "h"}):
                status, (told,) = await ask("POST", path, body | name)
                assert (status, "could not be loaded" in told["error"]) == (502, True), (path, name)


@pytest.mark.parametrize("keep", ["x", [], True, "1x", {}])
async def test_keep_alive_is_a_time(keep: Any) -> None:
    async with routing() as ask:
        status, (told,) = await ask("POST", "/api/generate", {"model": "a", "keep_alive": keep})
        assert (status, "'keep_alive'" in told["error"]) == (400, True)


async def test_downloads() -> None:
    async with routing() as ask:
        counts = {"digest": "m.gguf", "total": 2}
        status, lines = await ask("POST", "/api/pull", {"model": "hf.co/u/new"})
        assert (status, lines[0], lines[-1]) == (200, {"status": "pulling manifest"}, {"status": "success"})
        assert all(line | counts == line for line in lines[1:-1])
        assert await ask("POST", "/api/pull", {"model": "u/new", "stream": False}) == (200, [{"status": "success"}])
        here = [{"status": "pulling manifest"}, {"status": "success"}]
        assert await ask("POST", "/api/pull", {"model": "a:latest"}) == (200, here)
        status, lines = await ask("POST", "/api/pull", {"model": "u/broken"})
        assert lines[-1] == {"error": "the hub has lost it"}
        status, lines = await ask("POST", "/api/pull", {"model": "u/broken", "stream": False})
        assert (status, lines) == (502, [{"error": "the hub has lost it"}])


async def test_deleting() -> None:
    async with routing() as ask:
        assert await ask("DELETE", "/api/delete", {"model": "hf.co/u/r:Q8_0"}) == (200, [])
        status, (told,) = await ask("DELETE", "/api/delete", {"model": "a"})
        assert (status, "cannot be removed" in told["error"]) == (400, True)
        assert (await ask("DELETE", "/api/delete", {"model": "nobody"}))[0] == 404
        status, (told,) = await ask("POST", "/api/push", {"model": "a"})
        assert (status, "models are files here" in told["error"]) == (501, True)
        for path in ("/api/copy", "/api/create", "/api/blobs/sha256:0"):
            status, (told,) = await ask("POST", path, {"model": "a"})
            assert (status, "start the router with --models-dir FOLDER" in told["error"]) == (501, True), path


async def test_changes_need_the_admin_key() -> None:
    unload = {"model": "a", "keep_alive": 0}
    changes: list[tuple[str, str, Any]] = [
        ("POST", "/api/pull", {"model": "u/new"}),
        ("DELETE", "/api/delete", {"model": "u/r:Q8_0"}),
        ("POST", "/api/generate", unload),
        ("POST", "/api/chat", {**unload, "messages": []}),
    ]
    async with routing(api_keys=("k",), admin_api_key="chief") as ask:
        for method, path, body in changes:
            told = [(await ask(method, path, body, key))[0] for key in ("", "k", "chief")]
            assert told == [401, 403, 200], path


async def test_lmstudio_lists_models_that_are_not_loaded() -> None:
    async with routing() as ask:
        status, (listed,) = await ask("GET", "/api/v0/models")
        assert (status, listed["object"]) == (200, "list")
        assert [(model["id"], model["state"], model["arch"]) for model in listed["data"]] == [
            ("a", "not-loaded", "gpt2"),
            ("u/r:Q8_0", "not-loaded", ""),
        ]
        assert "loaded_context_length" not in listed["data"][0]


async def test_each_route_of_get_has_head() -> None:
    fleet = Fleet([], _broken, 1)
    cache = Cache(str, _fetch, list.append, lambda _: None)
    app = Router(fleet, ServerConfig(), list, RouterJobs(""), cache, autoload=True, limit=1).app()
    for resource in app.router.resources():
        methods = {route.method for route in resource}
        assert "GET" not in methods or "HEAD" in methods, resource
    async with routing() as ask:
        for path in ("/api/version", "/api/tags", "/models/sse", "/health"):
            assert await ask("HEAD", path) == (200, [])

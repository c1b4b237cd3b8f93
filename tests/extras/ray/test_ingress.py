"""Ingress and replicas of a fleet in one process, without Ray: routes, keys, lost replicas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from logitless import OptionError
from logitless.extras.ray.config import ModelConfig, read_config
from logitless.extras.ray.ingress import Ingress, ReplicaEnded
from logitless.extras.ray.prefixes import PrefixRoute
from logitless.extras.ray.replica import Replica, joined
from logitless.server.asgi import Message
from tests.helpers.asgi_hosts import hosted
from tests.helpers.otlp import collecting


class Replicas:
    """Replicas of a model in this process. `ends_after`: messages before a replica ends, by request."""

    def __init__(self, *replicas: Replica) -> None:
        self.replicas = list(replicas)
        self.routes: list[PrefixRoute] = []
        self.ends_after: list[int] = []
        self.n_closed = 0

    async def ask(self, scope: Message, body: bytes, route: PrefixRoute) -> AsyncGenerator[list[Message], None]:
        self.routes.append(route)
        replica = self.replicas[len(self.routes) % len(self.replicas)]
        rest = self.ends_after.pop(0) if self.ends_after else None
        try:
            async with aclosing(replica.exchange(scope, body, route)) as answer:
                async for messages in answer:
                    for message in messages:
                        if rest == 0:
                            raise ReplicaEnded
                        rest = None if rest is None else rest - 1
                        yield [message]
        finally:
            self.n_closed += 1


async def started(**fields: Any) -> Replica:
    """A replica of the demo."""
    replica = Replica.__new__(Replica)
    options = {"parallel": 2, "ctx_size": 512}
    await Replica.__init__(replica, ModelConfig(options=options, **fields))
    return replica


@asynccontextmanager
async def fleet(
    names: tuple[str, ...] = ("demo",), **server: Any
) -> AsyncIterator[tuple[str, aiohttp.ClientSession, dict[str, Replicas]]]:
    """URL, client and models of an ingress with one replica of the demo for each name."""
    models = {name: Replicas(await started(name=name)) for name in names}
    config = read_config({"models": [{"name": name} for name in names], "server": server})
    try:
        async with hosted(Ingress(config, models).app(), "aiohttp") as url, aiohttp.ClientSession() as http:
            yield url, http, models
    finally:
        for each in models.values():
            for replica in each.replicas:
                await replica.check_health()
                await replica.close()


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Speak."}], "max_tokens": 6, "temperature": 0, **fields}


async def test_a_trace_goes_through_the_ingress(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        collecting(monkeypatch) as collector,
        fleet() as (url, http, _),
        http.post(f"{url}/v1/chat/completions", json=chat()) as reply,
    ):
        assert reply.status == 200
    spans = {span["id"]: span for span in collector.spans}
    (chat_span,) = [span for span in collector.spans if span["name"] == "chat demo"]
    replica = spans[chat_span["parent"]]
    ingress = spans[replica["parent"]]
    assert replica["name"] == ingress["name"] == "POST /v1/chat/completions"
    assert (ingress["parent"], len({span["trace"] for span in collector.spans})) == ("", 1)


async def test_requests_of_one_model() -> None:
    async with fleet() as (url, http, models):
        async with http.get(f"{url}/health") as reply:
            assert (reply.status, await reply.json()) == (200, {"status": "ok"})
        async with http.get(f"{url}/v1/models") as reply:
            assert [model["id"] for model in (await reply.json())["data"]] == ["demo"]
        async with http.post(f"{url}/v1/chat/completions", json=chat()) as reply:
            whole = (await reply.json())["choices"][0]["message"]["content"]
            assert reply.status == 200
            assert whole
        async with http.post(f"{url}/v1/chat/completions", json=chat(stream=True)) as reply:
            lines = [line async for line in reply.content if line.startswith(b"data: {")]
        pieces = [json.loads(line[6:])["choices"][0]["delta"].get("content") for line in lines]
        assert "".join(piece or "" for piece in pieces) == whole
        async with http.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": "many"}) as reply:
            assert reply.status == 400
            assert "max_tokens" in (await reply.json())["error"]["message"]
        async with http.post(f"{url}/v1/completions", data=b'{"prompt": ') as reply:
            assert reply.status == 400
        async with http.get(f"{url}/nope") as reply:
            assert reply.status == 404
        long = {"prompt": "O" * 140, "max_tokens": 1, "session_id": "s"}
        async with http.post(f"{url}/v1/completions", json=long) as reply:
            assert reply.status == 200
        assert len(models["demo"].routes[-1].blocks) == 1
        assert models["demo"].routes[-1].session == "s"


async def test_several_models_are_found_by_name() -> None:
    async with fleet(("a", "b")) as (url, http, models):
        async with http.get(f"{url}/v1/models") as reply:
            assert [model["id"] for model in (await reply.json())["data"]] == ["a", "b"]
        for name in ("b", "ft:b:mine:1"):
            before = len(models["b"].routes)
            async with http.post(f"{url}/v1/chat/completions", json=chat(model=name)) as reply:
                assert reply.status in (200, 404)
            assert len(models["b"].routes) == before + 1
        async with http.get(f"{url}/v1/models/a") as reply:
            assert (await reply.json())["id"] == "a"
        async with http.post(f"{url}/v1/chat/completions", json=chat(model="c")) as reply:
            assert reply.status == 404
            assert "is none of a, b" in (await reply.json())["error"]["message"]


async def test_keys_are_judged_before_replicas_are_asked() -> None:
    async with fleet(api_keys=("user",), admin_api_key="chief") as (url, http, models):
        for key, path, status in (
            ("", "/v1/chat/completions", 401),
            ("user", "/v1/chat/completions", 200),
            ("user", "/lora-adapters", 403),
        ):
            async with http.post(url + path, json=chat(), headers={"X-Api-Key": key}) as reply:
                assert reply.status == status, path
        assert len(models["demo"].routes) == 1


async def test_a_replica_that_ends_costs_only_what_it_had_begun() -> None:
    async with fleet() as (url, http, models):
        demo = models["demo"]
        demo.ends_after = [0, 0]
        async with http.post(f"{url}/v1/chat/completions", json=chat()) as reply:
            assert reply.status == 200
        assert len(demo.routes) == 3
        demo.ends_after = [0, 0, 0]
        async with http.post(f"{url}/v1/chat/completions", json=chat()) as reply:
            assert reply.status == 502
            assert "ask again" in (await reply.json())["error"]["message"]
        demo.ends_after = [1]
        async with http.post(f"{url}/v1/chat/completions", json=chat(stream=True, max_tokens=9)) as reply:
            assert reply.status == 200
            last = [line async for line in reply.content if line.strip()][-1]
        assert json.loads(last[6:])["error"]["code"] == 502
        before = len(demo.routes)
        demo.ends_after = [0]
        async with http.post(f"{url}/lora-adapters", json=[]) as reply:  # may not be done twice
            assert reply.status == 502
        assert len(demo.routes) == before + 1
        async with http.post(f"{url}/v1/chat/completions", json=chat()) as reply:
            assert reply.status == 200


async def test_a_client_that_leaves_frees_the_replica() -> None:
    async with fleet() as (url, http, models):
        demo = models["demo"]
        async with http.post(f"{url}/v1/chat/completions", json=chat(stream=True, max_tokens=-1)) as reply:
            await reply.content.readline()
            reply.close()
        while demo.n_closed == 0:
            await asyncio.sleep(0)
        while (await demo.replicas[0].record_routing_stats())["requests_processing"]:
            await asyncio.sleep(0)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(OptionError, match="api_kays"):
        Ingress(read_config({"models": [{}], "server": {"api_kays": ["x"]}}), {})


def test_consecutive_parts_of_a_body_are_one_message() -> None:
    start = {"type": "http.response.start", "status": 200}
    parts: list[Message] = [
        {"type": "http.response.body", "body": b"a", "more_body": True},
        {"type": "http.response.body", "body": b"b", "more_body": True},
        {"type": "http.response.body"},
    ]
    assert joined([start, *parts[:2]]) == [start, {**parts[0], "body": b"ab"}]
    assert joined(parts) == [{"type": "http.response.body", "body": b"ab"}]
    assert joined([]) == []

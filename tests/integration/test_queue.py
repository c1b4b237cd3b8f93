"""Waiting queue of a real server: limits, order, time limits, clients that leave."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from tests.helpers.paths import MODELS

MODEL = MODELS / "stories260K.gguf"
LONG = {"prompt": "Once upon a time", "n_predict": 1500, "ignore_eos": True, "stream": True, "user": "ann"}
SHORT = {"prompt": "The sun", "n_predict": 2}


async def until(session: aiohttp.ClientSession, url: str, name: str, value: int) -> None:
    async with asyncio.timeout(60):
        while True:
            async with session.get(f"{url}/metrics") as reply:
                if f"llamacpp:{name} {value}.0" in await reply.text():
                    return


async def test_the_queue(serve_here: Any) -> None:
    if not MODEL.exists():
        pytest.skip("no stories260K.gguf beside the checkout")
    flags = ("-c", "2048", "-np", "1", "-t", "1", "--metrics", "--queue-requests", "4", "--queue-tokens", "40")
    url = serve_here(MODEL, *flags).url
    order: list[str] = []

    async with aiohttp.ClientSession() as session:

        async def ask(name: str, **fields: Any) -> dict[str, Any]:
            async with session.post(f"{url}/completion", json={**SHORT, **fields}) as reply:
                answer: dict[str, Any] = await reply.json()
                order.append(name)
                return {"status": reply.status, "retry": reply.headers.get("Retry-After"), **answer}

        async with session.post(f"{url}/completion", json=LONG) as stream:
            await stream.content.readline()  # it has the only slot
            waiting = []
            for name, fields in (
                ("ann's first", {"user": "ann"}),
                ("ann's second", {"user": "ann"}),
                ("bob's", {"user": "bob"}),
                ("urgent", {"user": "ann", "priority": -1}),
            ):
                waiting.append(asyncio.create_task(ask(name, **fields)))
                await until(session, url, "requests_deferred", len(waiting))
            own, other = await ask("", user="ann"), await ask("", user="eve")
            for refused, code in ((own, 429), (other, 503)):
                assert (refused["status"], refused["error"]["code"]) == (code, code)
                assert int(refused["retry"]) >= 1
                assert "4 requests wait already" in refused["error"]["message"]
            waiting.pop(1).cancel()  # a client that leaves the queue disturbs nobody
            await until(session, url, "requests_deferred", 3)
            tokens = await ask("", user="eve", prompt="The sun was warm and the boy saw a dog. " * 4)
            assert tokens["status"] == 503
            assert "no more than 40 may" in tokens["error"]["message"]
            order.clear()
        answers = await asyncio.gather(*waiting)  # leaving the stream has given the slot to them
        assert [answer["status"] for answer in answers] == [200] * 3
        assert order == ["urgent", "bob's", "ann's first"]  # ann has had two turns
        assert {answer["tokens_predicted"] for answer in answers} == {2}

        newline = await ask("", logit_bias=[["\n", 1000]], n_predict=1500, t_max_predict_ms=1)
        assert (newline["stop_type"], newline["content"].strip()) == ("limit", "")
        assert newline["tokens_predicted"] < 1500

"""Oversubscribed KV cache: 32 long requests on a quarter of their blocks all get their text."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import aiohttp
import pytest

from tests.helpers.paths import MODELS

MODEL = MODELS / "stories260K.gguf"
N, N_PREDICT = 32, 80


def bodies() -> list[dict[str, Any]]:
    common = {"n_predict": N_PREDICT, "ignore_eos": True, "return_tokens": True, "temperature": 1.0}
    return [{**common, "prompt": f"The {i}th day was warm and", "seed": i} for i in range(N)]


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[str, list[int]]:
    async with session.post(f"{url}/completion", json=body) as response:
        assert response.status == 200, await response.text()
        answer = await response.json()
        return answer["content"], answer["tokens"]


async def test_four_times_too_much(serve_here: Any) -> None:
    """Without host memory what was paused is computed again, with it most of that comes back."""
    if not MODEL.exists():
        pytest.skip("no stories260K.gguf beside the checkout")
    cells = str(N * (N_PREDICT + 16) // 4)
    alone = serve_here(MODEL, "-c", cells, "-np", "1")
    recomputed = []
    async with aiohttp.ClientSession() as session:
        expected = [await ask(session, alone.url, body) for body in bodies()]
        for cache_ram in ("0", "64"):
            crowd = serve_here(MODEL, "-c", cells, "-np", str(N), "-kvu", "--cache-ram", cache_ram, "--metrics")
            answers = await asyncio.gather(*(ask(session, crowd.url, body) for body in bodies()))
            assert answers == expected
            found = dict(re.findall(r"^\w+:(\w+) (\S+)$", crowd.get("/metrics"), re.M))
            assert float(found["preemptions_total"]) > 0
            assert float(found["tokens_predicted_total"]) == N * N_PREDICT
            recomputed.append(float(found["recomputed_tokens_total"]))
    assert recomputed[1] < recomputed[0] / 3

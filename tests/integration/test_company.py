"""Batch invariance: a request's text and log-probabilities are the same bits in any batch."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from logitless.models.synthetic.model import synthesize
from tests.helpers.paths import MODELS

STORY = "Once upon a time there was a little girl who lived in a house near the forest and"
FILES = ("stories260K.gguf", "stories260K-conv-F16.gguf", "stories260K-conv-Q8_0.gguf")


def requests() -> list[dict[str, Any]]:
    """Sixteen: mixed samplers, seeds and lengths, some with a common prefix, some with probabilities."""
    mixed: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.2, "top_k": 0, "top_p": 0.9},
        {"mirostat": 2, "mirostat_tau": 4},
        {"repeat_penalty": 1.3, "frequency_penalty": 0.2},
        {"dry_multiplier": 0.8, "temperature": 0.9},
        {"xtc_probability": 0.5, "xtc_threshold": 0.1},
        {"typical_p": 0.6},
        {"min_p": 0.2, "dynatemp_range": 0.4},
    ]
    made = []
    for i in range(16):
        prompt = STORY[: 20 + 7 * (i % 8)] if i % 2 else f"The {i}th day was warm. " * (1 + i)
        made.append({"prompt": prompt, "n_predict": 12 + 3 * i, "seed": 100 + i, "return_tokens": True, **mixed[i % 8]})
        if i % 3 == 0:
            made[-1]["n_probs"] = 4
    return made


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[str, list[int], list[Any]]:
    """The text, the tokens and their probabilities, streamed or not."""
    async with session.post(f"{url}/completion", json=body) as response:
        assert response.status == 200, await response.text()
        if not body.get("stream"):
            answer = await response.json()
            return answer["content"], answer["tokens"], answer.get("completion_probabilities", [])
        text, tokens, probs = "", [], []
        async for line in response.content:
            if line.startswith(b"data: "):
                chunk = json.loads(line[6:])
                text += chunk["content"]
                if not chunk["stop"]:
                    tokens += chunk["tokens"]
                    probs += chunk.get("completion_probabilities", [])
        return text, tokens, probs


async def leave_early(session: aiohttp.ClientSession, url: str, n_chunks: int) -> None:
    """A client that goes away after some chunks of a long answer."""
    body = {"prompt": STORY, "n_predict": 400, "stream": True, "ignore_eos": True, "seed": 5}
    async with session.post(f"{url}/completion", json=body) as response:
        async for _ in response.content:
            n_chunks -= 1
            if n_chunks == 0:
                response.close()
                return


@pytest.mark.parametrize("name", [*FILES, "tiny-moe"])
async def test_sixteen_at_once_equal_each_alone(serve_here: Any, name: str, tmp_path: Path) -> None:
    """Also with more threads."""
    model: Path = MODELS / name
    if name == "tiny-moe":  # how many rows an expert has depends on who else is there
        synthesize(model := tmp_path / "moe.gguf", name)
    elif not model.exists():
        pytest.skip(f"no {name} beside the checkout")
    bodies = requests()
    alone = serve_here(model, "-c", "512", "-np", "1")
    async with aiohttp.ClientSession() as session:
        expected = [await ask(session, alone.url, {**b, "cache_prompt": False}) for b in bodies]
        for n_ubatch in ("32", "512"):
            crowd = serve_here(model, "-c", "4096", "-np", "6", "-kvu", "-ub", n_ubatch, "-t", "2", "--metrics")
            asked = [ask(session, crowd.url, {**b, "stream": i % 2 == 0}) for i, b in enumerate(bodies)]
            leavers = [leave_early(session, crowd.url, n) for n in (3, 9, 20)]
            answers = (await asyncio.gather(*asked, *leavers))[: len(bodies)]
            for i, (got, want) in enumerate(zip(answers, expected, strict=True)):
                assert got == want, (n_ubatch, bodies[i])
            assert not any(slot["is_processing"] for slot in crowd.get("/slots"))

"""Serving on OpenCL and Vulkan: llama.cpp's recorded answers, and eight independent streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from logitless.graph.backend import Backend
from tests.helpers.op_cases import ONE_GPU
from tests.integration.test_company import ask, requests
from tests.integration.test_goldens import DATA, agrees_on_text_and_likelihood, samples_as_recorded

MODEL = DATA / "models" / "stories260K.gguf"
N_STREAMS = 8


@pytest.fixture(scope="module", params=ONE_GPU)
def server(request: pytest.FixtureRequest, open_device: Callable[[str], Backend], serve_here_module: Any) -> Any:
    if not MODEL.exists():
        pytest.skip(f"no {MODEL.name} beside the checkout")
    open_device(request.param)
    flags = ("-c", "4096", "-np", str(N_STREAMS), "-kvu", "-ub", "64", "-ctk", "f32", "-ctv", "f32")
    if request.param == "opencl:0":  # and the same model drafts for it elsewhere, which changes nothing
        flags += ("-md", str(MODEL), "-devd", "cpu", "--spec-type", "draft-simple")
    return serve_here_module(MODEL, "--device", request.param, *flags)


def test_greedy_text_and_likelihood(server: Any) -> None:
    agrees_on_text_and_likelihood(server, json.loads((DATA / "expected" / "stories260K.gguf.json").read_text()))


def test_the_same_seed_gives_llama_cpps_tokens(server: Any, request: pytest.FixtureRequest) -> None:
    """On Vulkan every other request, which takes 0.3 s here; tests/conformance has each sampler."""
    expected = json.loads((DATA / "expected" / "sampling-stories260K.json").read_text())
    if request.node.callspec.params["server"] == "vulkan:0":
        expected["cases"] = expected["cases"][1::2]  # with the grammar
    samples_as_recorded(server, expected)


async def test_eight_streams_equal_each_alone(server: Any) -> None:
    bodies = [{**body, "cache_prompt": False, "n_predict": 12} for body in requests()[:N_STREAMS]]
    async with aiohttp.ClientSession() as session:
        alone = [await ask(session, server.url, body) for body in bodies]
        together = await asyncio.gather(*(ask(session, server.url, {**body, "stream": True}) for body in bodies))
    for got, want, body in zip(together, alone, bodies, strict=True):
        assert got == want, body

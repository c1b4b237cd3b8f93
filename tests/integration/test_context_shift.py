"""Context shift: moved keys have the RoPE of their new positions; texts continue past the context."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import numpy as np
import pytest

from logitless.backends.errors import DeviceError
from logitless.engine.batch import BLOCK_SIZE, UBatch
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.graph.backend import Backend
from tests.helpers.paths import MODELS

ROPES = ("llama-gqa", "llama-linear", "llama-yarn", "llama3-rope", "qwen3", "gemma3", "phi3")
N = 40


def first_layer(engine: ModelRunner) -> tuple[Any, Any]:
    """Keys and values of the first layer by cell, as the device keeps them."""
    keys, values = engine.session.read("k.0"), engine.session.read("v.0")
    return np.moveaxis(keys, 3, 1).reshape(-1, *keys.shape[1:3]), np.moveaxis(values, 2, 1).reshape(
        -1, values.shape[1], values.shape[3]
    )


@pytest.mark.parametrize(
    ("name", "cache_type", "tolerance", "device"),
    [
        *((name, "f32", 2e-5, "cpu") for name in ROPES),
        ("gemma3", "f16", 2e-3, "cpu"),
        pytest.param("gemma3", "f16", 2e-3, "opencl:0", marks=pytest.mark.long),
        ("gemma3", "f16", 2e-3, "vulkan:0"),
    ],
)
def test_turned_keys_are_those_of_their_new_places(
    name: str, cache_type: str, tolerance: float, device: str, open_device: Callable[[str], Backend]
) -> None:
    """The first layer's keys depend on nothing but token and position, so both ways must agree. Its values stay."""
    path = MODELS / f"arch-{name}-F32.gguf"
    if not path.exists():
        pytest.skip(f"no {path.name} beside the checkout")
    if device != "cpu":
        open_device(device)
    options = RunnerOptions(
        n_ctx=256, n_slots=2, threads=1, type_k=cache_type, type_v=cache_type, devices=(device,), moves=True
    )
    engine = ModelRunner(path, options)
    engine.load()
    tokens = np.random.default_rng(1).integers(3, 200, N).tolist()
    tables = {0: [4, 9, 2], 1: [7, 5, 6]}
    for slot, start in ((0, 57), (1, 20)):  # positions only have to be different, and nothing is read before them
        batch = UBatch(tables={slot: tables[slot]})
        batch.tokens, batch.pos, batch.slot = tokens, list(range(start, start + N)), [slot] * N
        batch.slot_mapping = [tables[slot][i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(N)]
        engine.step(batch)
    cells = {slot: [tables[slot][i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(N)] for slot in tables}
    before, held = first_layer(engine)
    assert np.abs(before[cells[0]] - before[cells[1]]).max() > 0.05
    target = [10 * BLOCK_SIZE + i for i in range(N)]
    engine.move_cells([(a, b, -37) for a, b in zip(cells[0], target, strict=True)])
    after, values = first_layer(engine)
    np.testing.assert_array_equal(values[target], held[cells[0]])
    np.testing.assert_allclose(after[target].astype(float), before[cells[1]].astype(float), atol=tolerance * 4)
    assert np.array_equal(after[cells[0]], before[cells[0]])
    engine.move_cells([(b, b - 3, 0) for b in target])  # onto cells that are read in the same go
    again, _ = first_layer(engine)
    np.testing.assert_array_equal(again[[b - 3 for b in target]], after[target])
    engine.close()


@pytest.mark.parametrize("kind", ["q8_0", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("q5_0", "iq4_nl"))])
def test_cells_of_blocks_move_without_a_change_where_nothing_turns(kind: str) -> None:
    path = MODELS / "arch-gemma3-F32.gguf"
    if not path.exists():
        pytest.skip(f"no {path.name} beside the checkout")
    engine = ModelRunner(path, RunnerOptions(n_ctx=128, n_slots=1, threads=1, type_k=kind, type_v=kind))
    engine.load()
    batch = UBatch(tables={0: [0]}, tokens=list(range(5, 21)), pos=list(range(16)), slot=[0] * 16)
    batch.slot_mapping = list(range(16))
    engine.step(batch)
    page = engine.full_kv.read(0)
    engine.move_cells([(i, BLOCK_SIZE + i, 0) for i in range(BLOCK_SIZE)])
    np.testing.assert_array_equal(engine.full_kv.read(1), page)
    engine.move_cells([(i, BLOCK_SIZE + i, 5) for i in range(BLOCK_SIZE)])
    engine.move_cells([(BLOCK_SIZE + i, BLOCK_SIZE + i, -5) for i in range(BLOCK_SIZE)])
    there_and_back = engine.full_kv.read(1)
    assert not np.array_equal(there_and_back, page)
    engine.close()


def test_a_device_that_cannot_move_cells_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    path = MODELS / "arch-llama-gqa-F32.gguf"
    if not path.exists():
        pytest.skip(f"no {path.name} beside the checkout")
    engine = ModelRunner(path, RunnerOptions(n_ctx=64, n_slots=1, threads=1, moves="--context-shift"))
    monkeypatch.setattr(type(engine.session.backends[0]), "supports", lambda self, t: t.op != "load_k")
    with pytest.raises(DeviceError, match=r"^--context-shift: the device cannot move cells"):
        engine.load()
    engine.close()


async def test_texts_go_on_past_the_context(serve_here: Any) -> None:
    """The same text alone and in company that takes its pages away."""
    path = MODELS / "stories260K.gguf"
    if not path.exists():
        pytest.skip("no stories260K.gguf beside the checkout")
    alone = serve_here(path, "-c", "384", "-np", "3", "--context-shift")  # 128 for each slot
    crowd = serve_here(path, "-c", "128", "-np", "4", "-kvu", "--context-shift", "--metrics")
    body = {"n_predict": 200, "temperature": 1.0, "ignore_eos": True, "return_tokens": True, "n_probs": 1}
    bodies = [{**body, "prompt": f"The {i}th day was", "seed": i, "n_keep": (0, 5, -1, 20)[i % 4]} for i in range(6)]
    bodies[5]["n_discard"] = 7

    async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
        async with session.post(f"{url}/completion", json=body) as response:
            assert response.status == 200, await response.text()
            answer: dict[str, Any] = await response.json()
            return answer

    async with aiohttp.ClientSession() as session:
        expected = [await ask(session, alone.url, b) for b in bodies]
        answers = await asyncio.gather(*(ask(session, crowd.url, b) for b in bodies))
    for got, want in zip(answers, expected, strict=True):
        assert (want["truncated"], want["stop_type"], len(want["tokens"])) == (True, "limit", 200)
        for key in ("content", "tokens", "truncated", "completion_probabilities"):
            assert got[key] == want[key]
    paused = next(line for line in crowd.get("/metrics").splitlines() if line.startswith("logitless:preemptions_total"))
    assert float(paused.split()[-1]) > 0
    ended = serve_here(path, "-c", "256", "-np", "2").post("/completion", bodies[0])
    assert ended["truncated"]
    assert len(ended["tokens"]) < 128
    assert ended["tokens"] == expected[0]["tokens"][: len(ended["tokens"])]

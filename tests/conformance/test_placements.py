"""Layers on several real devices: llama.cpp's text for every placement."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.cli import main
from logitless.cli.commands.benchmark.bench import greedy
from logitless.engine.batch import UBatch
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.engine.runner.placement import PlacementOptions
from logitless.graph.backend import Backend
from logitless.graph.ops.sampling import samplers
from tests.conformance.test_random_placements import Part

PLACEMENTS = {
    "three places": PlacementOptions(4, split=True, shares=(3, 1)),
    "weights": PlacementOptions(overrides=(("attn_(q|k)", "vulkan:0"), ("blk.2.ffn", "cpu"), ("token_embd", "cpu"))),
}


class Kept(Part):
    """A device that all tests share."""

    def supports(self, t: Any) -> bool:
        return self.inner.supports(t)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch, open_device: Callable[[str], Backend]) -> tuple[str, ...]:
    for name in (names := ("opencl:0", "vulkan:0")):
        open_device(name)

    def open_(name: str, _: int) -> Any:
        return CPUBackend(1) if name == "cpu" else Kept(open_device(name), 0, {})

    monkeypatch.setattr("logitless.backends.registry._open_backend", open_)
    return names


def continued(engine: ModelRunner, prompt: list[int], n_more: int) -> list[int]:
    """The greedy tokens after a prompt, from an empty cache."""
    tokens, n_done = list(prompt), 0
    for _ in range(n_more):
        n = len(tokens) - n_done
        pos = list(range(n_done, n_done + n))
        batch = UBatch(
            tokens=tokens[n_done:],
            pos=pos,
            slot=[0] * n,
            slot_mapping=pos,
            out=[n - 1],
            rows=[greedy()],
            targets=[-1],
            tables={} if n_done else {0: list(range(engine.n_blocks))},
        )
        n_done += n
        tokens.append(int(engine.step(batch).ids[0]) & samplers.ID)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_greedy_text_is_the_same_on_any_placement(
    placement: PlacementOptions, devices: tuple[str, ...], shared_data: Path
) -> None:
    expected = json.loads((shared_data / "expected" / "stories260K.gguf.json").read_text())
    options = RunnerOptions(512, 1, 64, type_k="f32", type_v="f32", devices=devices, placement=placement)
    engine = ModelRunner(shared_data / "models" / "stories260K.gguf", options)
    engine.load()
    assert continued(engine, expected["prompt_ids"], 24) == expected["greedy_ids"][:24]
    page = engine.full_kv.read(0)
    engine.full_kv.write(1, page)
    assert engine.full_kv.read(1).tobytes() == page.tobytes()
    engine.close()


def test_plan_lists_layers_of_each_device(
    devices: tuple[str, ...], shared_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(shared_data / "models" / "stories260K.gguf")
    flags = ("--device", ",".join(devices), "-ngl", "4", "-ts", "1,1", "-ot", r"blk\.4\.ffn_down=cpu", "-ub", "16")
    assert main.main(["plan", "-m", model, "-c", "64", "--json", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {d["device"]: d["parts"] for d in report["devices"]} == {
        "opencl:0": ["layers 2-3"],
        "vulkan:0": ["layers 4 (8 of 9 weights)", "output_norm", "output"],
        "cpu": ["layers 0-1", "layers 4 (1 of 9 weights)", "token_embd", "rope.frequency"],
    }
    # bytes of a token between layers; of the last layer's second half only the wanted row goes on
    row = 4 * 64
    crossing = {(c["from"], c["to"]): c["bytes"] for c in report["crossings"] if c["op"] != "rope_angles"}
    assert crossing["cpu", "opencl:0"] == crossing["opencl:0", "vulkan:0"] == 16 * row
    assert crossing["cpu", "vulkan:0"] == 4 * row

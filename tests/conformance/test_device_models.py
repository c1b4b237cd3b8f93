"""Tiny models of every architecture, whole on OpenCL and Vulkan: placement and logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.backend import Backend
from logitless.graph.execution.partition import partition
from logitless.graph.execution.session import Session
from logitless.graph.ops.attention.paged_attention import PAGE, load_k, load_v, store_k, store_v
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor, feed
from logitless.graph.testing.conformance import decode
from logitless.graph.testing.evaluate import evaluate
from logitless.models.batch import Batch, PagedMemory
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import define_model, hparams_of
from tests.helpers.architecture_specs import MAPPED, PLAIN
from tests.helpers.op_cases import ONE_GPU
from tests.helpers.paths import MODELS
from tests.helpers.reference_model import Spec, write
from tests.models.architectures.test_gemma3n import EXPERTS, SHORT_3N, SMALL

FILES = sorted(MODELS.glob("arch-*.gguf"))
if not FILES:
    FILES = [pytest.param(MODELS, marks=pytest.mark.skip(reason="no arch-*.gguf beside the checkout"))]  # type: ignore[list-item]
TOKENS = np.random.default_rng(0).integers(3, 400, 22).astype(np.int32)
TABLE = np.array([3, 1, 0, 2], np.int32)
SPLIT = 19  # tokens of the first step, in the second page of two
Array = np.ndarray[Any, Any]
MADE_UP = (
    *("gpt-oss", "deepseek2 in groups", "deepseek2 together", "hunyuan-moe", "command-r plus", "apertus"),
    *("qwen35", "qwen35 with a state last", "lfm2"),
    *("mixtral, experts of 172", "deepseek2 of odd heads"),
    *("granitehybrid", "nemotron_h_moe of shorter rows", "falcon-h1", "mamba", "kimi-linear", "llama4"),
    *(
        "olmo",
        "bloom",
        "rwkv6",
        "rwkv7",
        "rwkv6qwen2",
        "kimi-k3",
        "glm5-next",
        "hy_v4 with an indexer",
        "minimax-m3",
        "qwen4exp",
        "glm-dsa of shared choices",
        "deepseek4",
    ),
)


def steps() -> list[dict[str, Array]]:
    """The feeds of a prompt in two parts, and of one token more."""
    made = []
    for step, pos in enumerate(np.split(np.arange(22, dtype=np.int32), [SPLIT, 21])):
        cells = TABLE[pos // 16] * 16 + pos % 16
        last = {"out": pos[-1:] - pos[0], "out.pos": pos[-1:], "out.slot": 0 * pos[-1:]}
        begin, end = np.full_like(pos, -1), np.full_like(pos, -1)  # of layers that keep states
        begin[0], end[-1] = step, step + 1
        made.append({"tokens": TOKENS[pos], "pos": pos, "slot": 0 * pos, "slot_mapping": cells, **last})
        made[-1] |= {"begin": begin, "end": end}
    return made


class TinyModel:
    def __init__(self, path: Path, backends: list[Backend]) -> None:
        self.gguf = GGUFFile.open(path)
        self.session, h = Session(backends), hparams_of(self.gguf)
        self.model = define_model(self.session, self.gguf, h, 64)
        self.memory = PagedMemory.define(self.session, h, 5, (1, 4), "f32", "f32", n_states=4)
        self.session.write("tables", TABLE)

    def build(self, n_tokens: int) -> list[Tensor]:
        return [self.model.logits(Batch.feeds(n_tokens, 1), self.memory)]

    def oracle(self) -> list[Array]:
        """Logits in float64 with the numbers that the file's weights mean."""
        states: dict[str, Array] = {}
        logits = []
        for feeds in steps():
            roots = self.build(len(feeds["pos"]))
            for t in toposort(roots):
                if t.op == "variable" and t.name not in states:
                    held = self.session._variable(t.name)
                    states[t.name] = decode(held.initial_bytes() if held.source is None else held.source(), t)
            logits.append(evaluate(roots, feeds, states)[0])
        return logits


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
@pytest.mark.parametrize("device", ONE_GPU)
def test_device_logits_match_float64(path: Path, device: str, open_device: Callable[[str], Backend]) -> None:
    check(path, open_device(device))


@pytest.mark.parametrize("device", ONE_GPU)
@pytest.mark.parametrize("name", MADE_UP)
def test_device_logits_of_synthetic_models_match_float64(
    name: str, device: str, tmp_path: Path, open_device: Callable[[str], Backend]
) -> None:
    write(path := tmp_path / "m.gguf", replace((PLAIN | MAPPED)[name], n_vocab=400))
    check(path, open_device(device))


SIZES = {"key_length_swa": 256, "value_length_swa": 256}  # Gemma 4's own: 512 where all is seen
WIDE = replace(SMALL, head_dim=512, keys=SMALL.keys | {"rope.dimension_count": 512, "rope.dimension_count_swa": 256})
WIDE = replace(WIDE, keys=WIDE.keys | {f"attention.{name}": n for name, n in SIZES.items()})


@pytest.mark.parametrize("spec", [SMALL, EXPERTS, SHORT_3N, WIDE], ids=["small", "experts", "gemma3n", "wide"])
@pytest.mark.parametrize("device", ONE_GPU)
def test_device_logits_of_gemma_layers_match_float64(
    spec: Spec, device: str, tmp_path: Path, open_device: Callable[[str], Backend]
) -> None:
    write(path := tmp_path / "m.gguf", replace(spec, n_vocab=400))
    check(path, open_device(device))


def check(path: Path, device: Backend) -> None:
    model = TinyModel(path, [device, CPUBackend(1)])
    for feeds, want in zip(steps(), model.oracle(), strict=True):
        graph = model.build(len(feeds["pos"]))
        assert [segment.backend for segment in partition(graph, model.session.backends).segments] == [0]
        expected = {t.name: feeds[t.name] for t in toposort(graph) if t.op == "feed"}
        (got,) = model.session.plan(lambda graph=graph: graph).run(expected)  # type: ignore[misc]
        assert np.abs(got - want).max() < 1e-3 * np.abs(want).max()
        assert got.argmax() == want.argmax()


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize(("dtype", "bound"), [("f32", 0.0), ("f16", 5e-4), ("q8_0", 4.1e-3)])
@pytest.mark.parametrize("device", ["opencl:0", "vulkan:0"])
def test_stored_cells_are_loaded(
    device: str, dtype: str, bound: float, keys: bool, open_device: Callable[[str], Backend]
) -> None:
    """Half a step of 1/127 for q8_0, 11 bits for f16."""
    shape = (3, 2, 64, PAGE) if keys else (3, 2, PAGE, 64)
    store, load = (store_k, load_k) if keys else (store_v, load_v)
    x = np.random.default_rng(1).uniform(-1, 1, (4, 2, 64)).astype(np.float32)
    session, cells = Session([open_device(device)]), feed("cells", (4,), "i32")
    cache = session.define("cache", shape, dtype)
    graph = [load(store(cache, feed("x", x.shape), cells), cells)]
    (got,) = session.plan(lambda: graph).run({"x": x, "cells": np.array([17, 3, 40, 0], np.int32)})
    assert np.abs(got - x).max() <= bound

"""Decode steps are native for every architecture: no op runs as its numpy reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.execution.session import Session
from logitless.graph.ops.sampling import samplers
from logitless.graph.ops.sampling.sample import log_probs, sample
from logitless.graph.tensor import Tensor, feed
from logitless.models.batch import Batch, PagedMemory
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import define_model, hparams_of

MODELS = ("llama-gqa-F32", "qwen2-F32", "qwen3-F32", "gemma2-F32", "gemma3-F32", "phi3-F32", "llama-gqa-Q4_K_M")
N_SLOTS, N_LIST, N_OUT, N_TOP = 2, 16, 2, 3


def sampling_feeds() -> list[Tensor]:
    """Feeds of `sample` beside the logits and its state."""
    return [
        feed("params", (N_OUT, samplers.N_PARAMS)),
        feed("chain", (N_OUT, 8), "i32"),
        feed("draws", (N_OUT, 4), "u32"),
        feed("list_ptr", (N_OUT + 1,), "i32"),
        feed("list_kind", (N_LIST,), "i32"),
        feed("list_id", (N_LIST,), "i32"),
        feed("list_value", (N_LIST,)),
        feed("seat", (N_OUT,), "i32"),
    ]


@pytest.mark.parametrize(
    ("name", "cache_type"), [*((name, "f32") for name in MODELS), ("llama-gqa-F32", "f16"), ("llama-gqa-F32", "q8_0")]
)
def test_decode_step_has_no_fallbacks(name: str, cache_type: str, shared_data: Path) -> None:
    gguf = GGUFFile.open(shared_data / "models" / f"arch-{name}.gguf")
    session, h = Session([CPUBackend(1)]), hparams_of(gguf)
    model = define_model(session, gguf, h, 64)
    memory = PagedMemory.define(session, h, 5, (N_SLOTS, 4), cache_type, cache_type)
    seats = session.define("sampler_state", (N_SLOTS, samplers.N_STATE))

    def build(n_tokens: int) -> list[Tensor]:
        logits = model.logits(Batch.feeds(n_tokens, N_OUT), memory)
        ids = sample(logits, seats, *sampling_feeds(), n_probs=N_TOP)
        return [ids, log_probs(logits, ids, feed("targets", (N_OUT,), "i32"), n=N_TOP)]

    for n_tokens in (2, 7):
        programs: list[Any] = session.plan(lambda n=n_tokens: build(n)).programs  # type: ignore[misc]
        assert [program.fallbacks for program in programs] == [[]]
    session.close()


def last_logits(path: Path, cache_type: str) -> Any:
    """After a prompt that fills more than a page, and one token more."""
    tokens = np.random.default_rng(0).integers(3, 400, 22).astype(np.int32)
    table = np.array([3, 1, 0, 2], np.int32)
    gguf = GGUFFile.open(path)
    session, h = Session([CPUBackend(1)]), hparams_of(gguf)
    model, memory = (
        define_model(session, gguf, h, 64),
        PagedMemory.define(session, h, 5, (1, 4), cache_type, cache_type),
    )
    session.write("tables", table)
    for pos in np.split(np.arange(22, dtype=np.int32), [21]):
        cells = table[pos // 16] * 16 + pos % 16
        last = {"out": pos[-1:] - pos[0], "out.pos": pos[-1:], "out.slot": 0 * pos[-1:]}
        feeds = {"tokens": tokens[pos], "pos": pos, "slot": 0 * pos, "slot_mapping": cells, **last}
        graph = [model.logits(Batch.feeds(len(pos), 1), memory)]
        (logits,) = session.plan(lambda graph=graph: graph).run(feeds)  # type: ignore[misc]
    session.close()
    return logits


@pytest.mark.parametrize(("cache_type", "bound"), [("f16", 2e-3), ("q8_0", 3e-2)])
def test_quantised_cache_costs_little_precision(cache_type: str, bound: float, shared_data: Path) -> None:
    path = shared_data / "models" / "arch-llama-gqa-F32.gguf"
    exact, got = last_logits(path, "f32"), last_logits(path, cache_type)
    assert 0 < np.abs(got - exact).max() < bound * np.abs(exact).max()

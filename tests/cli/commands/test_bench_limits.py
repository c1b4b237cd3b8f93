"""`logitless bench` limits: the arithmetic of `limit_fraction`, against numbers worked by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from logitless.cli.commands.benchmark.limits import decode_work, prompt_work
from logitless.graph.execution.cost import Cost
from logitless.models.hparams.layer_sizes import LayerSizes

MACHINE = {"read_gb_s": 10.0, "int8_gmac_s": 100.0, "f32_gmac_s": 20.0}


def engine(window: int = 0, untied: bool = False, n_expert: int = 0) -> Any:
    """Two layers; 4 heads and 2 KV heads of 8; one int8 and one float matrix per layer; vocabulary 100. Of experts, if
    there are, 2 are used, with a matrix (8, 32) of q8_0 each."""
    tensors = {"token_embd.weight": SimpleNamespace(shape=(100, 32), dtype="q8_0", nbytes=3400)}
    if untied:
        tensors["output.weight"] = SimpleNamespace(shape=(100, 32), dtype="f32", nbytes=12800)
    for i in range(2):
        tensors[f"blk.{i}.a.weight"] = SimpleNamespace(shape=(64, 32), dtype="q8_0", nbytes=2176)
        tensors[f"blk.{i}.b.weight"] = SimpleNamespace(shape=(32, 10), dtype="f16", nbytes=640)
        if n_expert:
            shape = (n_expert, 8, 32)
            tensors[f"blk.{i}.c.weight"] = SimpleNamespace(shape=shape, dtype="q8_0", nbytes=n_expert * 272)
        tensors[f"blk.{i}.norm.weight"] = SimpleNamespace(shape=(32,), dtype="f32", nbytes=128)
    hparams = SimpleNamespace(
        n_layer=2,
        n_head=4,
        sizes=lambda layer: LayerSizes(0, 4, 2, 8, 8, 8),
        kv_source=lambda layer: layer,
        attends=lambda layer: True,
        recurrent=None,
        mla=None,
        compression=None,
        window=window,
        is_local=lambda layer: window > 0 and layer == 0,
        experts=SimpleNamespace(n=n_expert, n_used=2) if n_expert else None,
    )
    options = SimpleNamespace(n_ubatch=4, type_k="f32", type_v="f16")
    return SimpleNamespace(gguf=SimpleNamespace(tensors=tensors), hparams=hparams, options=options)


def test_decode() -> None:
    work = decode_work(engine(), n_gen=3, n_batch=2)
    cells = 2 * 2 * (1 + 2 + 3)  # sequences × layers × cells seen by each token
    assert work.nbytes == 3 * (2 * (2176 + 640) + 3400) + cells * 2 * 8 * (4 + 2)
    assert work.int8_macs == 6 * (2 * 64 * 32 + 100 * 32)
    assert work.f32_macs == 6 * 2 * 32 * 10 + 2 * 4 * 8 * cells


def test_of_experts_those_are_read_that_somebody_has() -> None:
    plain, mixed = (decode_work(engine(n_expert=n), n_gen=1, n_batch=3) for n in (0, 4))
    assert mixed.int8_macs - plain.int8_macs == 3 * 2 * 2 * 8 * 32  # rows × layers × experts of each
    assert mixed.nbytes - plain.nbytes == pytest.approx(2 * 4 * 272 * (1 - 0.5**3))  # by chance an eighth has nobody
    plain, mixed = (prompt_work(engine(n_expert=n), n_prompt=8, n_batch=1) for n in (0, 4))
    assert mixed.nbytes - plain.nbytes == pytest.approx(2 * 2 * 4 * 272 * (1 - 0.5**4))  # two steps of 4


def test_prompt_has_logits_for_last_tokens_only() -> None:
    work = prompt_work(engine(untied=True), n_prompt=6, n_batch=2)
    assert work.nbytes == 3 * 2 * (2176 + 640) + 12800  # 12 tokens in steps of 4
    assert work.int8_macs == 12 * 2 * 64 * 32
    assert work.f32_macs == 12 * 2 * 32 * 10 + 2 * 100 * 32 + 2 * 4 * 8 * (2 * 2 * 21)


def test_tokens_before_are_seen_by_all_and_counted_once() -> None:
    deep, flat = (prompt_work(engine(), n_prompt=4, n_batch=1, depth=d) for d in (10, 0))
    assert deep.f32_macs - flat.f32_macs == 2 * 4 * 8 * 2 * 4 * 10  # layers × tokens × depth
    assert deep.nbytes == flat.nbytes


def test_a_window_bounds_what_a_layer_reads() -> None:
    everything = decode_work(engine(), n_gen=5, n_batch=1)
    windowed = decode_work(engine(window=2), n_gen=5, n_batch=1)
    fewer = 15 - (1 + 2 + 2 + 2 + 2)  # in one of the two layers
    assert everything.nbytes - windowed.nbytes == fewer * 2 * 8 * (4 + 2)
    assert everything.f32_macs - windowed.f32_macs == 2 * 4 * 8 * fewer


@pytest.mark.parametrize(
    ("cost", "seconds"),
    [(Cost(20e9, 0, 0), (2.0, 0.0)), (Cost(0, 100e9, 40e9), (0.0, 3.0)), (Cost(50e9, 100e9, 40e9), (5.0, 3.0))],
)
def test_seconds_at_the_limits(cost: Cost, seconds: tuple[float, float]) -> None:
    assert cost.seconds(MACHINE) == pytest.approx(seconds)

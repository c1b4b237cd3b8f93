"""Cache of experts on devices: the bits of products do not depend on the slots."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.cli.commands.benchmark.bench import greedy
from logitless.cli.commands.planning.plan import experts_of
from logitless.engine.batch import UBatch
from logitless.engine.runner.buckets import draft_shape
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.engine.runner.placement import PlacementOptions
from logitless.graph.backend import Backend, Bytes
from logitless.graph.execution import expert_cache
from logitless.graph.execution.expert_cache import CacheMemory, CacheUse, LayerExperts, SlotTable
from logitless.graph.execution.partition import LOOKUP
from logitless.graph.execution.preemptible_plan import PreemptiblePlan
from logitless.graph.execution.session import Session
from logitless.graph.ops.elementwise import add, mul
from logitless.graph.ops.moe import (
    expert_linear,
    expert_matmul,
    expert_order,
    expert_rows,
    expert_sum,
    expert_weights,
    top_experts,
)
from logitless.graph.ops.sampling import samplers
from logitless.graph.tensor import Tensor, feed
from logitless.graph.testing.conformance import encode, register_all
from logitless.models.synthetic.model import synthesize
from tests.helpers.mtp_specs import NEXTN
from tests.helpers.reference_model import write

register_all()
N, TOP, WIDE, N_FF, N_LAYER = 6, 2, 256, 256, 3
DRAW = np.random.default_rng(3)
VALUES = {f"logits.{i}": DRAW.normal(size=(40, N)).astype(np.float32) for i in range(N_LAYER)}
VALUES["x"] = DRAW.normal(size=(40, WIDE)).astype(np.float32)


@cache
def encoded(layer: int, dtype: str) -> list[Bytes]:
    """The expert weights of a layer."""
    draw = np.random.default_rng(layer)
    return [encode(draw.normal(size=(N * N_FF, WIDE)).astype(np.float32) / 8, dtype) for _ in range(3)]


class Layers:
    """A session with some layers of experts."""

    def __init__(self, backend: Backend, dtype: str, share: float = 0.0, *, host_nbytes: int | None = None) -> None:
        """`share`: experts that have room in the cache; 0: there is none."""
        self.session, self.memory = Session([backend]), None
        self.weights = []
        for i in range(N_LAYER):
            raws = encoded(i, dtype)
            self.weights.append(
                tuple(
                    self.session.define(f"{i}.{j}", (N * N_FF, WIDE), dtype, lambda raw=raw: raw, constant=True)
                    for j, raw in enumerate(raws)
                )
            )
        if share:
            nbytes = sum(backend.constant_nbytes(w) + N for of_layer in self.weights for w in of_layer)
            self.memory = CacheMemory(int(share * nbytes), host_nbytes)
            self.session.cache_experts([LayerExperts(ws, N, 0) for ws in self.weights], self.memory)
            assert self.session.expert_cache is not None
            self.session.expert_cache.load()

    def build(self, rows: int, *, again: bool = False) -> list[Tensor]:
        """The layers' sum; `again`: and then products with each layer's weights as gradients have them."""
        x, gradients = feed("x", (rows, WIDE)), []
        for i, (gate, up, down) in enumerate(self.weights):
            logits = feed(f"logits.{i}", (rows, N))
            ids = top_experts(logits, n=TOP)
            order = expert_order(ids, n=N)
            placed = expert_rows(x, order)
            inner = mul(*(expert_linear(placed, w, order, n=N) for w in (gate, up)))
            y = expert_linear(inner, down, order, n=N)
            x = add(x, expert_sum(y, expert_weights(logits, ids), order))
            gradients.append((y, down, order))
        if again:
            x = add(x, expert_sum(expert_matmul(*gradients[0], n=N), expert_weights(logits, ids), gradients[0][2]))
        return [x]

    def run(self, first: int, rows: int, *, again: bool = False) -> bytes:
        feeds = {name: value[first : first + rows] for name, value in VALUES.items()}
        plan = self.session.cached_plan((rows, again), lambda: self.build(rows, again=again))
        return plan.run(feeds)[0].tobytes()


@pytest.fixture(scope="module", params=["opencl:0", "vulkan:0"])
def device(request: pytest.FixtureRequest, open_device: Callable[[str], Backend]) -> Backend:
    return open_device(request.param)


@pytest.mark.parametrize("dtype", ["q4_k", "iq2_xxs"])
def test_products_have_the_same_bits_whatever_is_cached(dtype: str, device: Backend) -> None:
    runs = [(0, 40), (0, 1), (7, 3), (1, 1), (0, 40)]
    whole = Layers(device, dtype)
    expected = [whole.run(*rows) for rows in runs]
    assert whole.run(0, 40)[: 4 * WIDE] == expected[1]  # a row alone
    n_needed = set()
    for share, host_nbytes in ((1 / N_LAYER + 1e-3, None), (0.4, 0), (1.0, None)):  # least; each upload packs; all
        cached = Layers(device, dtype, share, host_nbytes=host_nbytes)
        assert [cached.run(*rows) for rows in runs] == expected
        assert cached.memory is not None
        use = cached.memory.use
        n_needed.add(use.hits + use.misses)
        (sizes,) = cached.session.device_bytes([cached.session.measure(lambda c=cached: c.build(40))])
        assert sizes.weights <= cached.memory.nbytes + 4096 * N_LAYER
    assert use.misses == N * N_LAYER  # each once
    assert len(n_needed) == 1


def test_experts_that_are_read_again_are_brought_again(device: Backend) -> None:
    """A gradient reads the weights of the first layer after all others have taken their slots."""
    cached = Layers(device, "q4_k", 1 / N_LAYER + 1e-3)
    assert cached.run(3, 20, again=True) == Layers(device, "q4_k").run(3, 20, again=True)
    placement, _ = cached.session.measure(lambda: cached.build(20, again=True))
    assert sum(s.nodes[0].op == LOOKUP for s in placement.segments) > N_LAYER


def test_preempted_plan_has_its_experts_when_it_goes_on(device: Backend) -> None:
    cached = Layers(device, "q4_k", 1 / N_LAYER + 1e-3)
    feeds = {name: value[5:25] for name, value in VALUES.items()}
    plan = cached.session.plan(lambda: cached.build(20), "apart")
    assert isinstance(plan, PreemptiblePlan)
    for _ in plan.parts(feeds):
        cached.run(30, 8)
    assert plan.results()[0].tobytes() == Layers(device, "q4_k").run(5, 20)


def test_pools_beyond_the_largest_buffer_are_divided(device: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """By layers, down to the experts of one: 64 GiB of experts are no buffer that a driver allocates."""
    whole = Layers(device, "q4_k")
    expected, slot = whole.run(3, 20), device.constant_nbytes(whole.weights[0][0]) // N
    for share, most, n_slots in ((1.0, 2 * N, [2 * N, N]), (1.0, 1, [N] * N_LAYER), (0.7, 1, [2 * N])):
        monkeypatch.setattr(expert_cache, "POOL_NBYTES", most * slot + N)
        cached = Layers(device, "q4_k", share)
        assert cached.session.expert_cache is not None
        pools = [name.split(".") for name in cached.session.expert_cache.pool_names]
        assert [int(size) for _, _, part, size in pools if part == "0"] == n_slots
        assert [cached.run(3, 20) for _ in range(2)] == [expected] * 2
    packed = weakref.ref(cached.session.expert_cache)
    cached.session.release()  # as a model does that sleeps
    assert packed() is None


def test_cache_below_one_layer_is_refused(device: Backend) -> None:
    with pytest.raises(ValueError, match=r"^--moe-cache-mib 0: the experts of one layer need \d+$"):
        Layers(device, "q4_k", 0.9 / N_LAYER)


def test_slot_table_gives_each_expert_a_slot_and_keeps_those_used_most() -> None:
    table, draw = SlotTable(3, 16, 20), np.random.default_rng(1)
    popular = np.array([2, 3, 11])
    n_missing = []
    for step in range(200):
        for layer in range(3):
            others = draw.permutation(16)[: 16 if step % 50 == 0 else 2]  # now and then a prompt, which reads all
            experts = np.unique([*popular, *others])
            slots, missing = table.claim(layer, experts)
            assert len(set(slots[experts])) == len(experts)
            assert (slots[experts] >= 0).all()
            assert set(missing) <= set(experts)
            if step % 50 > 1:
                n_missing.append(len(set(missing) & set(popular)))
    assert sum(n_missing) == 0  # they stay, though each step brings others


def test_model_with_cached_experts_answers_as_on_the_device_alone(
    open_device: Callable[[str], Backend], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_device("vulkan:0")
    path = tmp_path / "moe.gguf"
    synthesize(path, "tiny-moe", "Q8_0")

    def answer(**placement: Any) -> tuple[list[int], CacheUse, dict[str, Any] | None]:
        options = RunnerOptions(64, 1, 8, devices=("vulkan:0",), placement=PlacementOptions(99, **placement))
        engine = ModelRunner(path, options)
        engine.load()
        report, tokens = experts_of(engine), [5, 9, 3, 7]
        for _ in range(6):
            n = len(tokens)
            feeds = {"tokens": tokens, "pos": list(range(n)), "slot": [0] * n, "slot_mapping": list(range(n))}
            batch = UBatch(**feeds, out=[n - 1], rows=[greedy()], targets=[-1], tables={0: [0]})
            tokens.append(int(engine.step(batch).ids[0]) & samplers.ID)
            tokens = tokens[-8:]
        engine.close()
        return tokens, engine.expert_memory.use, report

    expected, unused, none = answer()
    assert (unused.hits + unused.misses, none) == (0, None)
    caplog.set_level("INFO")
    for n_slots in (8, 11):
        tokens, use, report = answer(expert_cache=n_slots * 20500)
        assert tokens == expected
        assert report is not None
        assert (report["slots"], report["experts"], report["of_token"]) == (n_slots, 16, 6)
        assert use.misses >= n_slots
        assert use.nbytes == use.misses * report["bytes_of_token"] // 6
    assert "expert cache: 11 of 16 experts (68.8 %) have room on the devices" in caplog.text


def test_experts_of_an_mtp_block_share_the_cache(open_device: Callable[[str], Backend], tmp_path: Path) -> None:
    open_device("vulkan:0")
    write(path := tmp_path / "m.gguf", NEXTN["glm4moe"])
    placement = PlacementOptions(99, expert_cache=1 << 20)
    engine = ModelRunner(
        path, RunnerOptions(64, 1, 8, devices=("vulkan:0",), placement=placement, n_draft_tokens=1, threads=1)
    )
    assert engine.hidden is not None
    engine.measure()
    assert (cache := engine.session.expert_cache) is not None
    layers = [i for i in range(engine.hparams.n_layer + 1) if engine.hparams.experts_of(i)]
    assert cache.n_layers == len(layers)
    n_block = engine.hidden.n_block
    draft, _ = engine.session.measure(lambda: engine.build(draft_shape(1, n_block)))
    runs = {t.op: b for t, b in draft.backend_of.items()}
    assert runs[LOOKUP] == runs["expert_order"] == 0
    engine.close()

"""Mixture of experts on devices: kernels for every case; a row's bits do not depend on other rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from logitless.backends.gpu.language.dialect import SIMT
from logitless.graph.backend import Backend
from logitless.graph.execution.session import Session
from logitless.graph.ops.elementwise import mul
from logitless.graph.ops.moe import expert_linear, expert_order, expert_rows, expert_sum, expert_weights, top_experts
from logitless.graph.tensor import Tensor, feed
from logitless.graph.testing.conformance import OK, encode, register_all, run
from tests.helpers.op_cases import cases

if TYPE_CHECKING:
    from logitless.backends.opencl.backend import OpenCLBackend
    from logitless.backends.vulkan.backend import VulkanBackend

register_all()
N, TOP, WIDE, N_FF, OUT = 5, 2, 512, 256, 48
ON_DEVICES = (
    "top_experts",
    "expert_weights",
    "expert_gather",
    "expert_scatter",
    "expert_order",
    "expert_rows",
    "expert_linear",
    "expert_parts",
    "expert_matmul",
    "expert_products",
    "expert_sum",
)


@pytest.fixture(scope="module", params=["opencl:0", "vulkan:0", "gpu", "dots"])
def device(request: pytest.FixtureRequest, open_device: Callable[[str], Backend]) -> Iterator[Backend]:
    """A device as it is, or one of Vulkan's as if it were a GPU, with integer dot products or
    without.
    """
    if request.param not in ("gpu", "dots"):
        yield open_device(request.param)
        return
    from logitless.backends.vulkan.backend import VulkanBackend

    open_device("vulkan:0")
    backend = VulkanBackend()
    if request.param == "dots" and "shaderIntegerDotProduct" not in backend.device.info.features:
        pytest.skip(f"{backend.device.info.name} has no integer dot products")
    backend.shape = replace(SIMT, dot=request.param == "dots")
    yield backend
    backend.close()


@pytest.mark.parametrize("op", ON_DEVICES)
def test_moe_cases_have_kernels(op: str, device: OpenCLBackend | VulkanBackend, request: pytest.FixtureRequest) -> None:
    outcomes = [run(problem, [device]) for problem in cases(request, op, device)]
    assert outcomes
    assert [o for o in outcomes if o.status != OK] == []


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8_0", "mxfp4", "q4_k", "q6_k"])
def test_moe_rows_are_batch_invariant(
    dtype: str, device: OpenCLBackend | VulkanBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone its experts have a row each, and in company many, which are other kernels; places move
    with neighbours.
    """
    draw, session = np.random.default_rng(3), Session([device])
    values = {name: draw.normal(size=(40, n)).astype(np.float32) for name, n in (("x", WIDE), ("logits", N))}
    values["logits"][7:11] = values["logits"][7]  # neighbours with the same experts

    def weight(name: str, n: int, k: int) -> Tensor:
        raw = encode((draw.normal(size=(N * n, k)) / 8).astype(np.float32), dtype)
        return session.define(name, (N * n, k), dtype, lambda: raw, constant=True)

    gate, up, down = weight("gate", N_FF, WIDE), weight("up", N_FF, WIDE), weight("down", OUT, N_FF)

    def build(rows: int) -> list[Tensor]:
        x, logits = feed("x", (rows, WIDE)), feed("logits", (rows, N))
        ids = top_experts(logits, n=TOP)
        order = expert_order(ids, n=N)
        placed = expert_rows(x, order)
        inner = mul(*(expert_linear(placed, w, order, n=N) for w in (gate, up)))
        return [expert_sum(expert_linear(inner, down, order, n=N), expert_weights(logits, ids), order)]

    def of(first: int, rows: int) -> np.ndarray:
        feeds = {name: value[first : first + rows] for name, value in values.items()}
        return np.array(session.plan(lambda: build(rows)).run(feeds)[0])

    whole = of(0, 40)
    assert np.isfinite(whole).all()
    assert whole.any(axis=1).all()
    for first, rows in ((0, 1), (7, 1), (39, 1), (5, 4), (3, 9), (8, 32)):
        assert of(first, rows).tobytes() == whole[first : first + rows].tobytes()
    # rows that are brought together by a launch of their own
    monkeypatch.setattr(device, "refused", {"expert_parts"})
    assert of(0, 40).tobytes() == whole.tobytes()
    assert of(7, 1).tobytes() == whole[7:8].tobytes()

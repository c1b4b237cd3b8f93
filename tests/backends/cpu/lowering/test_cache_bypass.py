"""Selection of kernels with non-temporal prefetch."""

from __future__ import annotations

import pytest

from logitless.backends.cpu import backend  # noqa: F401 — registers what lowers a node
from logitless.backends.cpu.compiler import warmup
from logitless.backends.cpu.kernels.matmul import layout
from logitless.backends.cpu.lowering import cache_bypass
from logitless.backends.cpu.threads.pool import Task
from logitless.backends.host import Host
from logitless.graph.ops.linear import linear_q8, quantize_act
from logitless.graph.tensor import Tensor, feed, variable

ZEN = Host("znver4", "+avx512f,+avx512vl")
XEON = Host("sapphirerapids", "+avx512f,+avx512vl")
OLDER = Host("haswell", "+avx2,-avx512f")
CACHE = 1 << 20
ROWS = CACHE // 576  # rows of weights that fill it


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_bypass, "cache_nbytes", lambda level: {3: CACHE}[level])


def on(monkeypatch: pytest.MonkeyPatch, host: Host) -> None:
    for module in (cache_bypass, layout):
        monkeypatch.setattr(module, "target_host", lambda: host)


def product(n: int) -> Tensor:
    """A product with a packed weight of 576 · n bytes."""
    return linear_q8(quantize_act(feed("x", (1, 1024))), variable(f"w{n}", (n, 1024), "q4_0", constant=True))


def named(kernels: list[str], rows: int) -> list[str]:
    """Kernels that run for these, each with a weight of so many rows."""
    tasks = [Task(k, (), 4) for k in kernels]
    many = cache_bypass.exceed_l3([product(rows) for _ in kernels])
    return [i.kernel for i in (cache_bypass.with_nontemporal(tasks) if many else tasks)]


@pytest.mark.parametrize("host", [ZEN, Host("znver3", "+avx2")])
def test_zen_prefetches_large_weights_nontemporally(monkeypatch: pytest.MonkeyPatch, host: Host) -> None:
    on(monkeypatch, host)
    kernels = ["linear:q4_0:1x1", "linear_glu:q4_0:silu:1", "linear:q6_k:1x1"]
    assert named(kernels, ROWS // 3 // 16 * 16) == kernels
    assert named(kernels, ROWS // 3 // 16 * 16 + 16) == [f"{k}:nontemporal" for k in kernels]


def test_other_kernels_have_no_nontemporal_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, ZEN)
    others = ["linear:q4_0:8x1", "linear:q4_0:6x2:add", "linear:q8_0:1x1", "linear:f16:1x4", "linear_glu:q4_0:silu"]
    others += ["linear_glu:q8_0:silu:1", "rms_norm", "attention:f16:f16:64:3"]
    assert named(others, 4 * ROWS) == others


@pytest.mark.parametrize("host", [XEON, OLDER])
def test_other_processors_use_no_nontemporal_variant(monkeypatch: pytest.MonkeyPatch, host: Host) -> None:
    on(monkeypatch, host)
    assert named(["linear:q4_0:1x1"], 4 * ROWS) == ["linear:q4_0:1x1"]


@pytest.mark.parametrize(("n", "prepared"), [(512, False), (4096, True)])
def test_prepare_loads_nontemporal_variants(monkeypatch: pytest.MonkeyPatch, n: int, prepared: bool) -> None:
    on(monkeypatch, ZEN)
    loaded: set[str] = set()
    monkeypatch.setattr(warmup.jit, "load", loaded.update)
    warmup.prepare([product(n)])
    assert "linear:q4_0:1x1" in loaded
    assert ("linear:q4_0:1x1:nontemporal" in loaded) == prepared

"""Weights that are read past the caches: which kernels do so, and that nothing else about them differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from backends.cpu import backend, past, warm  # noqa: F401 — registers what lowers a node
from backends.cpu.isa import Host
from backends.cpu.kernels import layout
from backends.cpu.lowering import LOWERINGS
from backends.cpu.memory import aligned
from backends.cpu.pool import Instruction, Pool, Table
from backends.cpu.weights import pack_instructions, packed_nbytes
from graph.ops.fused import linear_glu_act
from graph.ops.linear import linear_q8, quantize_act
from graph.tensor import Tensor, feed, state

ZEN = Host("znver4", "+avx512f,+avx512vl")
XEON = Host("sapphirerapids", "+avx512f,+avx512vl")
OLDER = Host("znver3", "+avx2,-avx512f")
CACHE = 1 << 20


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past, "cache_nbytes", lambda level: {3: CACHE}[level])


def on(monkeypatch: pytest.MonkeyPatch, host: Host) -> None:
    for module in (past, layout):
        monkeypatch.setattr(module, "compiled_for", lambda: host)


def named(kernels: list[str], nbytes: int) -> list[str]:
    """What becomes of these, each streaming so many bytes in 4 units."""
    return [i.kernel for i in past.past_caches(Instruction(k, (), 4, streams=(64, nbytes // 4)) for k in kernels)]


def test_a_zen_core_reads_past_the_caches_what_they_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, ZEN)
    kernels = ["linear:q4_0:1x1", "linear_glu:q4_0:silu:1", "linear:q6_k:1x1"]
    assert named(kernels, CACHE // 3 // 4 * 4) == kernels
    assert named(kernels, CACHE // 3 + 4) == [f"{k}:past" for k in kernels]


def test_several_rows_floats_and_bytes_have_no_such_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, ZEN)
    others = ["linear:q4_0:8x1", "linear:q4_0:6x2:add", "linear:q8_0:1x1", "linear:f16:1x4", "linear_glu:q4_0:silu"]
    others += ["linear_glu:q8_0:silu:1", "rms_norm", "attention:f16:f16:64:3"]
    assert named(others, 4 * CACHE) == others


@pytest.mark.parametrize("host", [XEON, OLDER])
def test_other_processors_read_as_before(monkeypatch: pytest.MonkeyPatch, host: Host) -> None:
    on(monkeypatch, host)
    assert named(["linear:q4_0:1x1"], 4 * CACHE) == ["linear:q4_0:1x1"]


@pytest.mark.parametrize(("n", "prepared"), [(512, False), (4096, True)])
def test_a_start_makes_them_ready(monkeypatch: pytest.MonkeyPatch, n: int, prepared: bool) -> None:
    on(monkeypatch, ZEN)
    loaded: set[str] = set()
    monkeypatch.setattr(warm.jit, "load", loaded.update)
    act = quantize_act(feed("x", (1, 1024)))
    warm.prepare([linear_q8(act, state("w", (n, 1024), "q4_0", constant=True))])
    assert "linear:q4_0:1x1" in loaded
    assert ("linear:q4_0:1x1:past" in loaded) == prepared


class Places:
    """Addresses by name, and memory of its own for each other node."""

    def __init__(self, **memory: np.ndarray) -> None:
        self.memory = memory

    def __call__(self, t: Tensor) -> int:
        key = t.name or str(id(t))
        if key not in self.memory:
            self.memory[key] = aligned(t.nbytes)
        return int(self.memory[key].ctypes.data)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


def packed(pool: Pool, rng: np.random.Generator, dtype: str, n: int, k: int) -> np.ndarray:
    import gguf

    raw = gguf.quants.quantize(rng.normal(size=(n, k)).astype(np.float32), gguf.GGMLQuantizationType[dtype.upper()])
    memory = aligned(packed_nbytes(dtype, n, k))
    pool.run(Table(pack_instructions(dtype, raw.ctypes.data, memory.ctypes.data, n, k)))
    return memory


@pytest.mark.parametrize("op", ["linear_q8", "linear_glu_act"])
def test_the_bits_are_the_same(pool: Pool, op: str) -> None:
    n, k, dtype = 96, 256, "q4_0"
    rng = np.random.default_rng(3)
    x = rng.normal(size=(1, k)).astype(np.float32)
    places = Places(x=x, a=packed(pool, rng, dtype, n, k), b=packed(pool, rng, dtype, n, k))
    a, b = (state(name, (n, k), dtype, constant=True) for name in "ab")
    act = quantize_act(feed("x", x.shape))
    t = linear_q8(act, a) if op == "linear_q8" else linear_glu_act(act, a, b, activation="silu")
    pool.run(Table(LOWERINGS["quantize_act"](act, places)))
    (plain,) = LOWERINGS[op](t, places)
    seen = []
    for kernel in (plain.kernel, f"{plain.kernel}:past"):
        y = places.memory[str(id(t))]
        y[:] = 0xCB
        pool.run(Table([replace(plain, kernel=kernel)]))
        seen.append(y.copy())
    assert (seen[0] != 0xCB).any()
    np.testing.assert_array_equal(seen[0], seen[1])

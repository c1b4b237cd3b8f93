"""CPU GEMM with packed weights, against the gguf package's dequantisation and float64."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import gguf
import numpy as np
import pytest

from logitless.backends.cpu.fusion.packing import pack_tasks, packed_nbytes
from logitless.backends.cpu.kernels.matmul.layout import (
    ACT_BLOCK,
    ACT_HALF,
    ACT_OFFSET,
    ACT_SCALE,
    ACT_SUM,
    LAYOUTS,
    MAX_TILE,
    act_panels,
    rows_per_pass,
    tile_for,
    tiles,
)
from logitless.backends.cpu.lowering import linear as lower_linear
from logitless.backends.cpu.lowering.registry import LOWERINGS, REWRITES
from logitless.backends.cpu.threads import peaks
from logitless.backends.cpu.threads.pool import Task, TaskList, WorkerPool
from logitless.backends.host import ISAS, available_isas, isa
from logitless.backends.host_memory import aligned
from logitless.graph.dtype import DTYPES, dequantize
from logitless.graph.ops.fused import linear_glu_act
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.linear import linear, linear_q8, pack_act, quantize_act
from logitless.graph.tensor import Tensor, feed, variable
from logitless.graph.testing.conformance import put_scale
from tests.helpers.op_cases import KINDS
from tests.helpers.paths import ROOT

# Types of 256 k round dots to ones: the worst error, and the mean one as a share of what rounded activations make.
# Those of few bits round more, since their dots are small.
DOT_ROUNDING = {"q2_k": (4e-4, 0.05), "tq1_0": (2.2e-4, 0.03)}
QUANTISED = [name for name, layout in LAYOUTS.items() if layout.block > 1]
FLOATS = ["f32", "f16", "bf16"]
GUARD = 64


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(2)
    yield pool
    pool.close()


def guarded(nbytes: int, fill: int = 0xCB) -> np.ndarray:
    """Memory at a multiple of 64 with a guard on either side."""
    memory = aligned(nbytes + 2 * GUARD)
    memory[:] = fill
    return memory


def intact(memory: np.ndarray) -> bool:
    return bool((memory[:GUARD] == 0xCB).all() and (memory[-GUARD:] == 0xCB).all())


def gguf_bytes(rng: np.random.Generator, dtype: str, n: int, k: int) -> np.ndarray:
    """A weight as a GGUF file holds it. gguf quantises the simple types; others are random blocks."""
    if dtype in FLOATS or (DTYPES[dtype].block == 32 and dtype != "iq4_nl"):
        values = rng.normal(size=(n, k)).astype(np.float32)
        kind = gguf.GGMLQuantizationType[dtype.upper()]
        return np.ascontiguousarray(gguf.quants.quantize(values, kind)).view(np.uint8).reshape(-1)
    blocks = rng.integers(0, 256, (n * k // DTYPES[dtype].block, DTYPES[dtype].nbytes), dtype=np.uint8)
    put_scale(blocks, dtype, rng.uniform(0.001, 0.01, (len(blocks), 1)))
    return blocks.reshape(-1)


def values_of(raw: np.ndarray, dtype: str, n: int, k: int) -> np.ndarray:
    if dtype in ("f32", "f16"):
        return raw.view(np.float32 if dtype == "f32" else np.float16).reshape(n, k).astype(np.float64)
    return dequantize(raw.reshape(n, -1), dtype).astype(np.float64).reshape(n, k)


def pack(pool: WorkerPool, raw: np.ndarray, dtype: str, n: int, k: int) -> np.ndarray:
    """Packed weight; the source is at an odd address, as in a mapped file."""
    source = np.empty(len(raw) + 1, np.uint8)[1:]
    source[:] = raw
    out = guarded(packed_nbytes(dtype, n, k))
    pool.run(TaskList(pack_tasks(dtype, source.ctypes.data, out.ctypes.data + GUARD, n, k)))
    assert intact(out)
    return out[GUARD:-GUARD]


class Memory:
    """Addresses of nodes, and NaN-filled results between guards."""

    def __init__(self, **arrays: np.ndarray) -> None:
        self.arrays, self.results = arrays, dict[Tensor, np.ndarray]()

    def __call__(self, t: Tensor) -> int:
        if t.name in self.arrays:
            return int(self.arrays[t.name].ctypes.data)
        if t not in self.results:
            memory = guarded(t.nbytes)
            memory[GUARD:-GUARD].view(np.float32)[:] = np.nan
            self.results[t] = memory
        return int(self.results[t].ctypes.data) + GUARD

    def result(self, t: Tensor) -> np.ndarray:
        memory = self.results[t]
        assert intact(memory)
        return memory[GUARD:-GUARD]


def nodes(t: Tensor) -> list[Tensor]:
    return [t] if t.is_leaf else [n for s in t.src for n in nodes(s) if not n.is_leaf] + [t]


def run(pool: WorkerPool, t: Tensor, memory: Memory, grain: int = 0) -> np.ndarray:
    """Rewrite, lower and run a node; returns the f32 result."""
    t = REWRITES[t.op](t) if t.op in REWRITES else t
    tasks: list[Task] = []
    for node in nodes(t):
        tasks += LOWERINGS[node.op](node, memory)
    if grain:
        tasks = [Task(i.kernel, i.args, i.n_units, grain, i.scratch) for i in tasks]
    pool.run(TaskList(tasks))
    return memory.result(t).view(np.float32).reshape(t.shape).copy()


def multiply(pool: WorkerPool, x: np.ndarray, w: np.ndarray, dtype: str, n: int, grain: int = 0) -> np.ndarray:
    """linear(x, w) with a packed weight."""
    node = linear(feed("x", x.shape), variable("w", (n, x.shape[1]), dtype, constant=True))
    return run(pool, node, Memory(x=x, w=w), grain)


def rounded(pool: WorkerPool, x: np.ndarray, group: int = 32) -> np.ndarray:
    """Activations after `quantize_act`, read back by the layout's description."""
    m, k = x.shape
    node = quantize_act(feed("x", x.shape), group=group)
    memory = Memory(x=x)
    pool.run(TaskList(LOWERINGS["quantize_act"](node, memory)))
    panel_rows, n_panels = act_panels(m, isa(), group)
    blocks = memory.result(node).reshape(-1, ACT_BLOCK)
    out = np.empty((m, k // 32, 32))
    for panel in range(n_panels):
        r0 = panel * panel_rows
        r1 = m if panel == n_panels - 1 else r0 + panel_rows
        block = blocks[r0 * (k // 32) : r1 * (k // 32)].reshape(k // 32, r1 - r0, ACT_BLOCK).swapaxes(0, 1)
        q = block[..., :32].view(np.int8).astype(np.float64)
        scale = np.ascontiguousarray(block[..., ACT_SCALE:ACT_SUM]).view(np.float32)
        total = np.ascontiguousarray(block[..., ACT_SUM:ACT_OFFSET]).view(np.float32)
        offsets = np.ascontiguousarray(block[..., ACT_OFFSET : ACT_HALF + 8]).view(np.float32)
        sums = q.reshape(*q.shape[:2], 2, 16).sum(-1)
        np.testing.assert_array_equal(
            offsets, 1.5 * 2**23 - 128 * np.concatenate([sums.sum(-1, keepdims=True), sums], -1)
        )
        np.testing.assert_array_equal(total[..., 0], q.sum(-1))
        out[r0:r1] = q * scale
    return out.reshape(m, k)


def worst(y: np.ndarray, reference: np.ndarray) -> float:
    return float(np.abs(y - reference).max() / np.abs(reference).max())


@pytest.mark.parametrize("dtype", QUANTISED)
def test_quantised_weights(pool: WorkerPool, dtype: str, request: pytest.FixtureRequest) -> None:
    """Each kind of type in every kernel; the others in those of one row and of many, with --long in every kernel."""
    rng, every = np.random.default_rng(1), dtype in KINDS or request.config.getoption("--long")
    for n, k in ((37, 512), (5, 256), (64, 768)):
        raw = gguf_bytes(rng, dtype, n, k)
        w, packed = values_of(raw, dtype, n, k), pack(pool, raw, dtype, n, k)
        for m in (1, 2, 3, 5, 8, 9, 17, 33):
            x = rng.normal(size=(m, k)).astype(np.float32)
            if not every and m not in (1, 33):
                continue
            y = multiply(pool, x, packed, dtype, n)
            inexact = rounded(pool, x, DTYPES[dtype].act_group) @ w.T
            exact = LAYOUTS[dtype].scale_blocks == 1 or LAYOUTS[dtype].grid
            most, share = (1e-6, 1e-3) if exact else DOT_ROUNDING.get(dtype, (2e-4, 0.03))
            assert worst(y, inexact) < most
            assert worst(y, x.astype(np.float64) @ w.T) < linear.tolerance_quantised
            ours, theirs = np.abs(y - inexact).mean(), np.abs(inexact - x.astype(np.float64) @ w.T).mean()
            assert ours < share * theirs


@pytest.mark.parametrize("dtype", FLOATS)
def test_float_weights(pool: WorkerPool, dtype: str) -> None:
    rng = np.random.default_rng(2)
    for n, k in ((37, 101), (5, 3), (64, 256), (100, 1)):
        raw = gguf_bytes(rng, dtype, n, k)
        w, packed = values_of(raw, dtype, n, k), pack(pool, raw, dtype, n, k)
        for m in (1, 2, 3, 5, 8, 9, 17, 33):
            x = rng.normal(size=(m, k)).astype(np.float32)
            assert worst(multiply(pool, x, packed, dtype, n), x.astype(np.float64) @ w.T) < 2e-6


def test_trainable_weights(pool: WorkerPool) -> None:
    rng = np.random.default_rng(3)
    for m, n, k in ((1, 5, 7), (9, 33, 64), (3, 16, 100), (40, 20, 50)):
        x, w = (rng.normal(size=s).astype(np.float32) for s in ((m, k), (n, k)))
        node = linear(feed("x", x.shape), feed("w", w.shape))
        y = run(pool, node, Memory(x=x, w=w))
        assert worst(y, x.astype(np.float64) @ w.T.astype(np.float64)) < 2e-6
        packed = pack(pool, w.view(np.uint8).reshape(-1), "f32", n, k)
        np.testing.assert_array_equal(y, multiply(pool, x, packed, "f32", n))


@pytest.mark.parametrize("dtype", ["q8_0", "q2_k", "q3_k", "q4_k", "q6_k", "f16", "bf16"])
def test_row_bits_do_not_depend_on_other_rows(pool: WorkerPool, dtype: str) -> None:
    rng = np.random.default_rng(4)
    n, k = 53, 1024
    packed = pack(pool, gguf_bytes(rng, dtype, n, k), dtype, n, k)
    x = rng.normal(size=(300, k)).astype(np.float32)
    alone = np.concatenate([multiply(pool, x[i : i + 1], packed, dtype, n) for i in range(300)])
    lone = WorkerPool(1)
    for m in (2, 3, 4, 7, 8, 9, 12, 13, 16, 25, 31, 100, 119, 300):
        first = int(rng.integers(0, 301 - m))
        part = np.ascontiguousarray(x[first : first + m])
        for where, grain in ((pool, 0), (pool, 1), (lone, 3)):
            np.testing.assert_array_equal(multiply(where, part, packed, dtype, n, grain), alone[first : first + m])
    lone.close()


@pytest.mark.parametrize("dtype", ["q8_0", "q4_k"])
def test_buffered_results_have_the_same_bits(pool: WorkerPool, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(12)
    monkeypatch.setattr(lower_linear, "MIN_CHUNKS", 3)
    monkeypatch.setattr(lower_linear, "BUFFERED_GROUP_BYTES", 0)
    for n in (16, 53, 320):  # rows at multiples of 64 bytes or not, units that divide evenly or not
        packed = pack(pool, gguf_bytes(rng, dtype, n, 512), dtype, n, 512)
        x = rng.normal(size=(19, 512)).astype(np.float32)
        monkeypatch.setattr(lower_linear, "cache_nbytes", lambda level: 1 << 20)
        expected = {m: multiply(pool, x[:m], packed, dtype, n) for m in (2, 5, 8, 11, 16, 19)}
        monkeypatch.setattr(lower_linear, "cache_nbytes", lambda level: 0 if level == 2 else 1 << 20)
        for m, y in expected.items():
            for grain in (0, 1, 5, 100):
                np.testing.assert_array_equal(multiply(pool, x[:m], packed, dtype, n, grain), y)


@pytest.mark.parametrize("dtype", ["q4_0", "q6_k", "f32"])
def test_all_tiles_have_the_same_bits(pool: WorkerPool, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    n, k = 40, 512
    packed = pack(pool, gguf_bytes(rng, dtype, n, k), dtype, n, k)
    x = rng.normal(size=(19, k)).astype(np.float32)
    monkeypatch.setattr(lower_linear, "act_panels", lambda m, *_: (m, 1))  # one panel suits every tile
    results = []
    for shape in tiles(dtype, isa()):
        monkeypatch.setattr(lower_linear, "tile_for", lambda *_, shape=shape: shape)
        results.append(multiply(pool, x, packed, dtype, n))
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


@pytest.mark.parametrize("op", ["linear_q8", "linear_glu_act"])
def test_nontemporal_prefetch_has_the_same_bits(pool: WorkerPool, op: str) -> None:
    n, k, dtype = 96, 256, "q4_0"
    rng = np.random.default_rng(3)
    weights = {name: pack(pool, gguf_bytes(rng, dtype, n, k), dtype, n, k) for name in "ab"}
    memory = Memory(x=rng.normal(size=(1, k)).astype(np.float32), **weights)
    a, b = (variable(name, (n, k), dtype, constant=True) for name in "ab")
    act = quantize_act(feed("x", (1, k)))
    t = linear_q8(act, a) if op == "linear_q8" else linear_glu_act(act, a, b, activation="silu")
    pool.run(TaskList(LOWERINGS["quantize_act"](act, memory)))
    (plain,) = LOWERINGS[op](t, memory)
    results = []
    for kernel in (plain.kernel, f"{plain.kernel}:nontemporal"):
        memory.result(t)[:] = 0xCB
        pool.run(TaskList([replace(plain, kernel=kernel)]))
        results.append(memory.result(t).copy())
    assert (results[0] != 0xCB).any()
    np.testing.assert_array_equal(results[0], results[1])


FINGERPRINT = ("q8_0", "q4_k", "f16", "iq3_xxs")  # each way to multiply
MORE = ("q6_k", "mxfp4", "q4_1", "q5_0", "q2_k", "q3_k", "q1_0", "tq1_0", "iq1_m")  # and each way to unpack a block


def fingerprint(*types: str) -> str:
    """Digest of results that every instruction set must agree on."""
    rng = np.random.default_rng(6)
    pool, digest = WorkerPool(1), hashlib.sha256()
    for dtype in types:
        packed = pack(pool, gguf_bytes(rng, dtype, 20, 512), dtype, 20, 512)
        x = rng.normal(size=(39, 512)).astype(np.float32)
        x[0], x[1, :32] = 1e3, 0  # the largest quants everywhere: 16-bit sums would saturate
        for m in (1, 5, 16, 39):
            digest.update(multiply(pool, x[:m], packed, dtype, 20).tobytes())
    pool.close()
    return digest.hexdigest()


@pytest.mark.parametrize("types", [FINGERPRINT, pytest.param(MORE, marks=pytest.mark.long)], ids=["kinds", "more"])
@pytest.mark.parametrize("other", [*ISAS[1:-1], pytest.param(ISAS[-1], marks=pytest.mark.long)])
def test_all_isas_have_the_same_bits(other: str, types: tuple[str, ...]) -> None:
    if other not in available_isas()[1:]:
        pytest.skip(f"this machine has no {other} beside its best")
    code = f"from tests.backends.cpu.kernels.test_packed_matmul import fingerprint; print(fingerprint(*{types}))"
    environment = {**os.environ, "LOGITLESS_ISA": other, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == fingerprint(*types)


def test_extreme_quants(pool: WorkerPool) -> None:
    """−128 and 127 in weights, ±127 in activations: the largest integer sums possible."""
    n, k = 16, 64
    blocks = np.zeros((n, k // 32), np.dtype([("d", "<f2"), ("q", "i1", 32)]))
    blocks["d"] = 1.0
    for i in range(n):
        blocks["q"][i] = (-128, 127, 0)[i % 3]
    packed = pack(pool, blocks.view(np.uint8).reshape(-1), "q8_0", n, k)
    x = np.full((3, k), 127, np.float32)
    x[1], x[2, ::2] = -127, -127
    expected = x @ blocks["q"].reshape(n, k).T.astype(np.float32)
    np.testing.assert_array_equal(multiply(pool, x, packed, "q8_0", n), expected)


def test_zeros_denormals_and_nan(pool: WorkerPool) -> None:
    rng = np.random.default_rng(7)
    n, k = 16, 96
    raw = gguf_bytes(rng, "q8_0", n, k)
    raw.reshape(n, -1)[3] = 0  # a row of scale 0
    w, packed = values_of(raw, "q8_0", n, k), pack(pool, raw, "q8_0", n, k)
    x = rng.normal(size=(6, k)).astype(np.float32)
    x[0] = 0
    x[1] = 1e-40
    x[2, :32] *= 1e-30
    x[3, 5], x[4, 40], x[5, 7] = np.inf, np.nan, 3e38
    y = multiply(pool, x, packed, "q8_0", n)
    assert (y[:2] == 0).all()
    assert (y[:3, 3] == 0).all()
    assert worst(y[2], x[2].astype(np.float64) @ w.T) < 0.01
    assert not np.isfinite(y[3:5]).any()
    assert np.isfinite(y[5]).any()


def test_padding_rows_are_zero(pool: WorkerPool) -> None:
    """Padding is zero, whatever the memory held before."""
    raw = gguf_bytes(np.random.default_rng(8), "q5_0", 17, 64)
    out = np.full(packed_nbytes("q5_0", 17, 64), 0xFF, np.uint8)
    pool.run(TaskList(pack_tasks("q5_0", raw.ctypes.data, out.ctypes.data, 17, 64)))
    # of the second group, at the end of its only bundle
    quants = out[len(out) // 2 :][-512:].reshape(2, 4, 16, 4)
    assert (quants[:, :, 1:] == 0).all()
    assert (quants[:, :, 0] != 0).any()


@pytest.mark.parametrize("dtype", list(LAYOUTS))
def test_rows_of_a_packed_table(pool: WorkerPool, dtype: str) -> None:
    rng = np.random.default_rng(9)
    n, k = 37, 512
    raw = gguf_bytes(rng, dtype, n, k)
    ids = np.array([0, 36, 5, 17, 5, 16], np.int32)
    node = get_rows(variable("table", (n, k), dtype, constant=True), feed("ids", ids.shape, "i32"))
    rows = run(pool, node, Memory(table=pack(pool, raw, dtype, n, k), ids=ids))
    np.testing.assert_array_equal(rows, values_of(raw, dtype, n, k)[ids].astype(np.float32))


def test_rows_of_a_plain_table(pool: WorkerPool) -> None:
    table, ids = np.random.default_rng(10).normal(size=(7, 3)).astype(np.float32), np.array([6, 0, 6], np.int32)
    node = get_rows(feed("table", table.shape), feed("ids", ids.shape, "i32"))
    np.testing.assert_array_equal(run(pool, node, Memory(table=table, ids=ids)), table[ids])


def test_products_read_packed_activations() -> None:
    x, rule = feed("x", (3, 64)), REWRITES["linear"]
    quantised = rule(linear(x, variable("q", (8, 64), "q8_0", constant=True), name="q"))
    assert (quantised.op, quantised.name, quantised.src[0].op) == ("linear_q8", "q", "quantize_act")
    plain = rule(linear(x, feed("w", (4, 64))))
    assert (plain.op, plain.src[0].op) == ("linear_f32", "pack_act")


def test_packed_weights_keep_their_size(pool: WorkerPool) -> None:
    for dtype, layout in LAYOUTS.items():
        source = 64 * 2048 // layout.block * layout.gguf_nbytes
        assert source <= packed_nbytes(dtype, 64, 2048) <= source * 1.03


@pytest.mark.parametrize(("dtype", "n", "k"), [("q8_0", 4, 33), ("q4_k", 4, 128), ("i32", 4, 4), ("f32", 0, 4)])
def test_unpackable_weights_raise(dtype: str, n: int, k: int) -> None:
    with pytest.raises(ValueError, match=dtype):
        packed_nbytes(dtype, n, k)


def test_panels_hold_every_row() -> None:
    for m in (*range(1, 300), 511, 512, 513, 4096):
        for row_nbytes in (52, 3328, 1 << 14, 1 << 20):
            rows, count = rows_per_pass(m, row_nbytes)
            last = m - rows * (count - 1)
            assert last == m if count == 1 else MAX_TILE <= last < rows + MAX_TILE
            for kind in ISAS:
                for group in (32, 256):
                    panel_rows, n_panels = act_panels(m, kind, group)
                    assert count == 1 or n_panels == 1 or rows % panel_rows == 0  # no tile is in two panels


@pytest.mark.parametrize("kind", ISAS)
def test_dtypes_that_share_activations_agree_on_panels(kind: str) -> None:
    """No tile's rows are in two panels, for any dtype."""
    for m in (*range(1, 300), 511, 512, 513):
        for dtype in QUANTISED:
            panel_rows, n_panels = act_panels(m, kind, DTYPES[dtype].act_group)
            rows, groups = tile_for(dtype, kind, m)
            assert rows <= m
            assert n_panels == 1 or rows == panel_rows
            assert (rows, groups) in tiles(dtype, kind)


def test_shape_rules() -> None:
    x = feed("x", (3, 64))
    for wrong in (
        lambda: linear(x, feed("w", (4, 32))),
        lambda: linear(feed("x", (64,)), feed("w", (4, 64))),
        lambda: quantize_act(feed("x", (3, 40))),
        lambda: pack_act(feed("x", (3, 40), "i32")),
        lambda: get_rows(x, feed("ids", (3,))),
    ):
        with pytest.raises(ValueError, match=r"expected|needs|must be"):
            wrong()


def test_peaks_are_measured(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "READ_BYTES", 8 << 20)
    monkeypatch.setattr(peaks, "ITERATIONS", 1000)
    measured = peaks.Peaks(pool).measure()
    assert set(measured) == {"read_gb_s", "int8_gmac_s", "f32_gmac_s"}
    assert all(value > 0 for value in measured.values())

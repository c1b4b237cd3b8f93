"""Cast of activations to bf16 on the CPU, against the gguf package and float64."""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import numpy as np
import pytest

from logitless.backends import host as isa
from logitless.backends.cpu.backend import CPUBackend
from logitless.backends.cpu.fusion import packing
from logitless.backends.cpu.kernels.matmul.layout import gemm_tile
from logitless.backends.cpu.lowering.registry import REWRITES
from logitless.backends.cpu.threads import peaks
from logitless.graph.execution.cost import Cost
from logitless.graph.execution.plan import Array
from logitless.graph.execution.session import Session
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.linear import linear, linear_bf16, round_act
from logitless.graph.ops.moe import expert_linear, expert_order, expert_rows
from logitless.graph.ops.shape import reshape, slice_rows
from logitless.graph.tensor import Tensor, feed, variable

BF16 = gguf.GGMLQuantizationType.BF16
has_products = pytest.mark.skipif(not isa.has_bf16_dots(), reason="this processor has no products of bf16")


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session([CPUBackend(2)])
    yield session
    session.close()
    session.backends[0].close()


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (packing, peaks):
        monkeypatch.setattr(module, "casts_to_bf16", lambda: True)


def rounded(x: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(gguf.quants.quantize(x.astype(np.float32), BF16), BF16)


def product(session: Session, x: np.ndarray, weights: list[Tensor]) -> list[Array]:
    def products() -> list[Tensor]:
        rows = feed("x", x.shape)
        return [linear(rows, w) for w in weights]

    return session.run(len(x), products, {"x": x})


def weight(session: Session, rng: np.random.Generator, name: str, n: int, k: int) -> tuple[Tensor, np.ndarray]:
    raw = gguf.quants.quantize(rng.normal(size=(n, k)).astype(np.float32), BF16)
    data = np.ascontiguousarray(raw).view(np.uint8).reshape(-1)
    values = gguf.quants.dequantize(raw, BF16).astype(np.float64)
    return session.define(name, (n, k), "bf16", lambda: data, constant=True), values


@has_products
@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize(("n", "k"), [(33, 66), (112, 600), (7, 1450)])
def test_products_of_bf16_rows(session: Session, n: int, k: int) -> None:
    """Products agree with float64 on rows cast by gguf, with the same bits for any other rows."""
    rng = np.random.default_rng(n)
    (first, values), (second, others) = (weight(session, rng, name, n + i, k) for i, name in enumerate("wv"))
    x = rng.normal(size=(81, k)).astype(np.float32)
    expected = rounded(x).astype(np.float64) @ values.T
    unrounded = np.abs(x.astype(np.float64) @ values.T - expected).max()
    whole = product(session, x, [first, second])
    assert np.abs(whole[0] - expected).max() < unrounded / 100
    np.testing.assert_allclose(whole[1], rounded(x).astype(np.float64) @ others.T, atol=1e-4)
    for m in (1, 2, 3, 5, 8, 9, 16, 17, 33, 63, 64, 65):
        for all_rows, some in zip(whole, product(session, x[:m], [first, second]), strict=True):
            np.testing.assert_array_equal(some, all_rows[:m], err_msg=f"{m} rows")


@has_products
@pytest.mark.usefixtures("rounding")
def test_expert_rows_are_cast_to_bf16(session: Session) -> None:
    """16 experts of 32 rows, two for every row; the same bits for any other rows."""
    rng, n, k = np.random.default_rng(5), 16, 130
    experts, values = weight(session, rng, "experts", n * 32, k)
    x, ids = rng.normal(size=(90, k)).astype(np.float32), np.stack([rng.permutation(n)[:2] for _ in range(90)])
    ids[:40] = ids[0]  # so that tiles of all heights are used

    def run(rows: int) -> Array:
        def products() -> list[Tensor]:
            order = expert_order(feed("ids", (rows, 2), "i32"), n=n)
            placed = expert_linear(expert_rows(feed("x", (rows, k)), order), experts, order, n=n)
            places = reshape(slice_rows(order, start=1, stop=2), shape=(2 * rows,))
            return [get_rows(placed, places)]

        return session.run(rows, products, {"x": x[:rows], "ids": ids[:rows].astype(np.int32)})[0]

    expected = np.einsum("tk,tjnk->tjn", rounded(x).astype(np.float64), values.reshape(n, 32, k)[ids]).reshape(180, 32)
    whole = run(90)
    assert np.abs(whole - expected).max() < 1e-4
    for rows in (1, 2, 3, 7, 40, 61):
        np.testing.assert_array_equal(run(rows), whole[: 2 * rows], err_msg=f"{rows} rows")


def test_cast_agrees_with_gguf(session: Session) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(3, 130)).astype(np.float32)
    x[0, :6] = [1 + 2**-8, 1 + 3 * 2**-8, -0.0, np.inf, 2.0**-130, 3e38]  # two ties, and the ends of the range
    words = session.run("few", lambda: [round_act(feed("x", x.shape))], {"x": x})[0].view(np.uint16)
    expected = gguf.quants.quantize(x, BF16).view(np.uint16).reshape(3, 65, 2).transpose(1, 0, 2)
    np.testing.assert_array_equal(words.reshape(65, 3, 2), expected)


def test_cast_keeps_nan(session: Session) -> None:
    x = np.array([[0x7F800001, 0xFFFFFFFF, 0x7FC00000, 0x3F800000]], np.uint32).view(np.float32)
    words = session.run("nan", lambda: [round_act(feed("x", x.shape))], {"x": x})[0].view(np.uint16).reshape(-1)
    values = (words.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(values, [np.nan, np.nan, np.nan, 1])


def test_cast_tiles_are_padded_with_zeros(session: Session) -> None:
    rows, _, _ = gemm_tile(isa.isa())
    x = np.random.default_rng(2).normal(size=(2 * rows + 1, 70)).astype(np.float32)
    words = session.run("tiles", lambda: [round_act(feed("x", x.shape), rows=rows)], {"x": x})[0].view(np.uint16)
    padded = np.concatenate([x, np.zeros((rows - 1, 70), np.float32)])
    expected = gguf.quants.quantize(padded, BF16).view(np.uint16).reshape(3, rows, 35, 2).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(words.reshape(3, 35, rows, 2), expected)


@pytest.mark.usefixtures("rounding")
def test_only_bf16_weights_of_even_length_take_bf16() -> None:
    """Activations are cast only for bf16 weights of an even length."""
    rule, x = REWRITES["linear"], feed("x", (3, 64))
    even, odd = (variable("w", (8, k), "bf16", constant=True) for k in (64, 63))
    assert [t.op for t in (rule(linear(x, even)), rule(linear(x, even)).src[0])] == ["linear_bf16", "round_act"]
    assert rule(linear(feed("x", (3, 63)), odd)).op == "linear_f32"
    assert rule(linear(x, variable("w", (8, 64), "f16", constant=True))).op == "linear_f32"
    assert rule(linear(x, feed("w", (8, 64)))).op == "linear_f32"


def test_bf16_is_off_by_default() -> None:
    assert (
        REWRITES["linear"](linear(feed("x", (3, 64)), variable("w", (8, 64), "bf16", constant=True))).op == "linear_f32"
    )


@pytest.mark.parametrize(
    ("value", "features", "message"),
    [("2", "+avx512bf16", "LOGITLESS_CPU_BF16=2: must be 0 or 1"), ("1", "", "LOGITLESS_CPU_BF16=1: this processor")],
)
def test_invalid_setting_raises(monkeypatch: pytest.MonkeyPatch, value: str, features: str, message: str) -> None:
    monkeypatch.setenv("LOGITLESS_CPU_BF16", value)
    monkeypatch.setattr(isa, "host", lambda: isa.Host("some", features))
    with pytest.raises(ValueError, match=message):
        isa.casts_to_bf16.__wrapped__()


@has_products
def test_environment_switches_bf16_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("1", True), ("0", False)):
        monkeypatch.setenv("LOGITLESS_CPU_BF16", value)
        assert isa.casts_to_bf16.__wrapped__() is expected


@has_products
@pytest.mark.usefixtures("rounding")
def test_bf16_peak_is_measured(monkeypatch: pytest.MonkeyPatch, session: Session) -> None:
    monkeypatch.setattr(peaks, "READ_BYTES", 8 << 20)
    monkeypatch.setattr(peaks, "ITERATIONS", 1000)
    measured = peaks.Peaks(session.backends[0].pool).measure()  # type: ignore[attr-defined]
    assert measured["bf16_gmac_s"] > 0
    assert Cost(bf16_macs=1e9).seconds(measured | {"bf16_gmac_s": 2.0})[1] == 0.5


def test_shape_rules() -> None:
    x, w = feed("x", (3, 64)), variable("w", (8, 64), "bf16", constant=True)
    for wrong in (
        lambda: round_act(feed("x", (3, 63))),
        lambda: round_act(feed("x", (3, 64), "i32")),
        lambda: linear_bf16(x, w, m=3),
        lambda: linear_bf16(round_act(x), w, m=4),
        lambda: linear_bf16(round_act(feed("x", (3, 32))), w, m=3),
    ):
        with pytest.raises(ValueError, match=r"expected|needs|must be"):
            wrong()

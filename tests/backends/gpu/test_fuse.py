"""Fusion on devices: the bits of the nodes alone, and only nodes with one reader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from logitless.backends.gpu.device import lower_all
from logitless.backends.gpu.fuse import fuse
from logitless.backends.gpu.language.dialect import SIMT, Shape
from logitless.graph.backend import Backend
from logitless.graph.execution.session import Session
from logitless.graph.ops.attention.paged_attention import attention, store_k, store_v
from logitless.graph.ops.elementwise import add, glu
from logitless.graph.ops.linear import linear
from logitless.graph.ops.moe import expert_linear, expert_rows
from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.rope import rope
from logitless.graph.ops.shape import reshape
from logitless.graph.order import toposort
from logitless.graph.tensor import ALIASES, Tensor, const, feed, variable
from logitless.graph.testing.conformance import encode

K = 64


STORED = (("wk", "q8_0"), ("wv", "q4_0"))  # keys and values of products that no launch joins


def weight(name: str, n: int, dtype: str = "q8_0") -> Tensor:
    return variable(name, (n, K), dtype, constant=True)


def fused(*fetches: Tensor, refused: tuple[str, ...] = ()) -> list[str]:
    """The ops that are left, sources first."""
    order = toposort(fuse(fetches, lambda t: not t.is_leaf, set(refused)))
    return [t.op for t in order if not t.is_leaf and t.op not in ALIASES]


X, Y = feed("x", (3, K)), feed("y", (3, 48))


def test_fuse_products_of_the_same_activations_gives_one_launch() -> None:
    q, k, v = (linear(X, weight(name, n)) for name, n in (("q", 48), ("k", 20), ("v", 20)))
    assert fused(q, k, v) == ["linear_parts"]
    assert fused(q, k, v, refused=("linear_parts",)) == ["linear"] * 3


def test_fuse_unrelated_products_keeps_them_apart() -> None:
    a, b = linear(X, weight("a", 48)), linear(X, weight("b", 48, "q4_0"))
    c = linear(feed("other", (3, K)), weight("c", 48))
    assert fused(a, b, c) == ["linear"] * 3  # another type, other activations
    assert fused(linear(X, variable("moving", (48, K), "f32"))) == ["linear"]


def test_fuse_expert_products_sorts_their_rows() -> None:
    order = feed("order", (3, 6), "i32")
    rows = expert_rows(X, order)
    gate, up, down = (expert_linear(rows, weight(name, 5 * 48), order, n=5) for name in ("gate", "up", "down"))
    other = expert_linear(rows, weight("other", 5 * 48, "q4_0"), order, n=5)
    assert fused(gate, up) == ["expert_parts"]
    assert fused(gate, up, down, other) == ["expert_parts"] * 3  # two of three have room; another type, alone
    assert fused(gate, rows) == ["expert_parts", "expert_rows"]  # rows are wanted for themselves
    assert fused(gate, up, refused=("expert_parts",)) == ["expert_rows", "expert_linear", "expert_linear"]
    halves = expert_linear(rows, weight("halves", 5 * 24), order, n=5)  # an expert's outputs are no whole groups
    assert fused(halves) == ["expert_rows", "expert_linear"]


def test_fuse_products_of_one_row_contain_its_norm() -> None:
    dot = replace(SIMT, dot=True, threads=1024)

    def ops(rows: int, *extra: str, shape: Shape = dot) -> list[str]:
        x, g = feed("x", (rows, K)), const(1.0) if "unweighted" in extra else feed("g", (K,))
        normed = rms_norm(x, g, eps=1e-5)
        parts = [linear(normed, weight(name, 48)) for name in ("q", "k")]
        gated = rms_norm(x, g, eps=1e-6)
        gated = glu(linear(gated, weight("gate", 64)), linear(gated, weight("up", 64)), activation="gelu")
        fetches = [*parts, gated, *([normed] if "normed" in extra else [])]
        order = toposort(fuse(fetches, lambda t: not t.is_leaf, set(extra), shape))
        return [t.op for t in order if not t.is_leaf and t.op not in ALIASES]

    assert ops(1) == ["norm_parts", "norm_glu"]
    assert ops(2) == ops(1, shape=SIMT) == ["rms_norm", "linear_parts", "rms_norm", "linear_glu"]
    assert ops(1, shape=replace(dot, threads=128)) == ops(2)
    assert ops(1, "norm_parts", "norm_glu") == ops(2)
    assert ops(1, "normed") == ["rms_norm", "linear_parts", "norm_glu"]  # wanted for itself
    assert ops(1, "unweighted") == ops(2)  # norms of OLMo


def test_fuse_glu_contains_both_products() -> None:
    gate, up = linear(X, weight("gate", 48)), linear(X, weight("up", 48))
    assert fused(glu(gate, up, activation="silu")) == ["linear_glu"]
    assert fused(glu(gate, up, activation="silu"), up) == ["linear_parts", "glu"]  # up is wanted for itself
    assert fused(glu(gate, up, activation="silu"), refused=("linear_glu",)) == ["linear_parts", "glu"]


def test_fuse_sum_contains_its_product() -> None:
    y, bias = linear(X, weight("o", 48)), variable("bias", (48,), "f32", constant=True)
    assert fused(add(Y, y)) == fused(add(y, Y)) == fused(add(y, bias)) == ["linear_add"]
    assert fused(add(Y, y), y) == ["linear", "add"]
    assert fused(add(y, feed("column", (3, 1)))) == ["linear", "add"]
    assert fused(add(Y, y), refused=("linear_add",)) == ["linear", "add"]


def test_fuse_kv_store_applies_rope_to_keys() -> None:
    cells, angles, keys = feed("cells", (3,), "i32"), feed("angles", (3, 2, 4)), feed("keys", (3, 2, 8))
    turned = rope(keys, angles, interleaved=True)
    cache = variable("cache", (2, 2, 8, 16), "f16")
    assert fused(store_k(cache, turned, cells)) == ["store_k_rope"]
    assert fused(store_k(cache, turned, cells), turned) == ["rope", "store_k"]
    assert fused(store_k(variable("small", (2, 2, 32, 16), "q8_0"), feed("k", (3, 2, 32)), cells)) == ["store_k"]


def test_fuse_attention_applies_rope_to_queries() -> None:
    angles, queries = feed("angles", (3, 2, 4)), feed("queries", (3, 4, 8))
    turned = rope(queries, angles, interleaved=True)
    caches = variable("k", (2, 2, 8, 16), "f16"), variable("v", (2, 2, 16, 8), "f16")
    places = feed("tables", (1, 2), "i32"), feed("slot", (3,), "i32"), feed("pos", (3,), "i32")
    result = attention(turned, *caches, *places, scale=0.5)
    assert fused(result) == ["attention_rope"]
    assert fused(result, turned) == ["rope", "attention"]
    assert fused(result, refused=("attention_rope",)) == ["rope", "attention"]
    sinks = variable("sinks", (4,), "f32", constant=True)
    assert fused(attention(turned, *caches, *places, sinks, scale=0.5)) == ["attention_rope"]


def test_kv_stores_of_keys_and_values_are_one_launch() -> None:
    cells, angles = feed("cells", (3,), "i32"), feed("angles", (3, 2, 4))
    turned = rope(feed("keys", (3, 2, 8)), angles, interleaved=True)
    keys = store_k(variable("k", (2, 2, 8, 16), "f16"), turned, cells)

    def kernels(values: Tensor) -> list[str]:
        order = toposort(fuse((keys, values), lambda t: not t.is_leaf, set()))
        return [d.kernel for d in lower_all([t for t in order if not t.is_leaf], SIMT)]

    rows = feed("values", (3, 2, 8))
    assert kernels(store_v(variable("v", (2, 2, 16, 8), "f16"), rows, cells)) == ["store_kv_rope_f16"]
    assert kernels(store_v(variable("v", (2, 2, 16, 8), "f32"), rows, cells)) == ["store_k_rope_f16", "store_v_f32"]
    other = feed("other", (3,), "i32")
    assert kernels(store_v(variable("v", (2, 2, 16, 8), "f16"), rows, other)) == ["store_k_rope_f16", "store_v_f16"]


def test_kv_stores_wait_for_values_of_another_product() -> None:
    places = feed("tables", (1, 2), "i32"), feed("slot", (3,), "i32"), feed("pos", (3,), "i32")
    cells, angles = feed("cells", (3,), "i32"), feed("angles", (3, 2, 4))
    keys, values = (reshape(linear(X, weight(name, 16, dtype)), shape=(3, 2, 8)) for name, dtype in STORED)
    k = store_k(variable("k", (2, 2, 8, 16), "f16"), rope(keys, angles, interleaved=True), cells)
    v = store_v(variable("v", (2, 2, 16, 8), "f16"), values, cells)
    for readers, stores in (((), ["store_kv_rope_f16"]), ((k,), ["store_k_rope_f16", "store_v_f16"])):
        y = attention(feed("queries", (3, 4, 8)), k, v, *places, scale=0.5)
        order = toposort(fuse((y, *readers), lambda t: not t.is_leaf, set()))
        launches = lower_all([t for t in order if not t.is_leaf and t.op not in ALIASES], SIMT)
        assert [d.kernel for d in launches if d.kernel.startswith("store")] == stores


@pytest.mark.parametrize("device", ["opencl:0", "vulkan:0"])
@pytest.mark.parametrize("n_rows", [1, 5, 20])
def test_fused_nodes_have_the_bits_of_the_nodes_alone(
    device: str, n_rows: int, open_device: Callable[[str], Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row alone, too: a launch of one row is another kernel than that of many."""
    backend, r = open_device(device), np.random.default_rng(5)
    sizes = {"q": 48, "k": 20, "v": 36, "gate": 40, "up": 40, "down": K}
    values = {name: r.normal(size=(n, 40 if name == "down" else K)).astype(np.float32) for name, n in sizes.items()}
    values["down"] = r.normal(size=(K, K)).astype(np.float32)

    def outputs(x: np.ndarray, *, fuses: bool) -> list[np.ndarray]:
        monkeypatch.setattr(backend, "refused", set() if fuses else {"linear_parts", "linear_add", "linear_glu"})
        session = Session([backend])
        for name, value in values.items():
            session.define(name, value.shape, "q8_0", lambda v=value: encode(v, "q8_0"), constant=True)  # type: ignore[misc]

        def build() -> list[Tensor]:
            rows = feed("x", x.shape)
            w = {name: variable(name, value.shape, "q8_0", constant=True) for name, value in values.items()}
            parts = [linear(rows, w[name]) for name in ("q", "k", "v")]
            gated = glu(linear(rows, w["gate"]), linear(rows, w["up"]), activation="silu")
            return [*(reshape(p, shape=(-1, 4)) for p in parts), gated, add(rows, linear(rows, w["down"]))]

        return [a.reshape(len(x), -1) for a in session.plan(build).run({"x": x})]

    x = r.normal(size=(n_rows, K)).astype(np.float32)
    together = outputs(x, fuses=True)
    for mine, plain in zip(together, outputs(x, fuses=False), strict=True):
        assert mine.tobytes() == plain.tobytes()
    for mine, alone in zip(together, outputs(x[-1:], fuses=True), strict=True):
        assert mine[-1:].tobytes() == alone.tobytes()

"""Declarations of ops: shape rules, gradients, errors."""

from __future__ import annotations

import numpy as np
import pytest

from logitless.graph.op import OPS, op
from logitless.graph.ops.attention.compressed import block_cells, compressed_attention
from logitless.graph.ops.attention.paged_attention import attention, store_k
from logitless.graph.ops.elementwise import add, glu
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.linear import add_product, linear
from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.shape import reshape, slice_rows
from logitless.graph.ops.slicing import concat
from logitless.graph.tensor import Tensor, feed, variable
from logitless.graph.testing.conformance import register_all
from logitless.graph.testing.evaluate import evaluate


def test_op_declared_twice_is_refused() -> None:
    def silu(x: float) -> float:
        return x

    before = OPS["silu"]
    with pytest.raises(ValueError, match="silu declared twice"):
        op()(silu)
    assert OPS["silu"] is before


def test_op_declaration_defines_shape_and_gradient() -> None:
    try:

        @op()
        def thrice(x: float) -> float:
            return 3 * x

        y = thrice(feed("x", (2, 2)), name="y")
        assert (y.shape, y.dtype, y.name) == ((2, 2), "f32", "y")
        np.testing.assert_array_equal(evaluate([y], {"x": np.ones((2, 2))}, {})[0], 3)
    finally:
        OPS.pop("thrice", None)


def test_integer_sources_without_bounds_are_no_indices() -> None:
    register_all()
    unbounded = {
        (name, source.name)
        for name, declared in OPS.items()
        for source in declared.signature.sources
        if source.types == {"i32"} and not source.bounds
    }
    assert unbounded == {
        *(("token_columns", "tokens"), ("ngram_rows", "tokens"), ("ngram_rows", "hashes")),
        *(("block_cells", "pos"), ("get_ids", "table")),  # whose results have bounds
        ("log_probs", "ids"),  # words of `sample`
        *(("sample", name) for name in ("list_kind", "list_id", "slot")),  # which kernels check
    }


def compressed(size: int, n_cells: int, *others: str) -> Tensor:
    """Attention over blocks of so many tokens in pages of so many cells, with these optional sources."""
    sources = [feed("q", (2, 4, 8)), variable("k", (9, 16, 1, 8)), feed("tables", (2, 3), "i32")]
    sources += [*(feed(name, (2,), "i32") for name in ("slot", "pos")), feed("sinks", (4,))]
    more = {"blocks": variable("blocks", (9, n_cells, 1, 8)), "tables": feed("block_tables", (2, 3), "i32")}
    return compressed_attention(*sources, *(more[name] for name in others), scale=1.0, window=3, size=size)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: add(feed("a", (2, 3)), feed("b", (4,))), r"add: .*f32\[2, 3\].*f32\[4\]"),
        (lambda: glu(feed("a", (2, 3)), feed("b", (2, 4)), activation="silu"), r"glu: .*\[2, 3\].*\[2, 4\]"),
        (lambda: linear(feed("x", (2, 3)), variable("w", (5, 4))), r"linear: .*\[2, 3\].*'w' f32\[5, 4\]"),
        (lambda: get_rows(feed("x", (2, 3)), feed("i", (2,))), r"get_rows: ids must be i32"),
        (lambda: reshape(feed("x", (2, 3)), shape=(4, 2)), r"reshape: cannot become \(4, 2\).*\[2, 3\]"),
        (
            lambda: slice_rows(feed("x", (2, 3)), start=1, stop=3),
            r"slice_rows: needs .*start = 1, stop = 3, N = 2 .*\[2, 3\]",
        ),
        (lambda: rms_norm(feed("x", (2, 3)), feed("w", (2,)), eps=1.0), r"rms_norm: .*\[2, 3\].*\[2\]"),
        (lambda: store_k(variable("k", (1, 2, 8, 16)), feed("x", (3, 2, 4)), feed("c", (3,), "i32")), r"store_k: "),
        (
            lambda: attention(
                feed("q", (3, 2, 8)),
                variable("k", (1, 2, 8, 16)),
                variable("v", (1, 2, 8, 16)),
                *(feed(n, (3,), "i32") for n in "tsp"),
                scale=1.0,
            ),
            r"attention: expected q \(T, H, D\), k \(pages, G, D, 16\).*'k'",
        ),
        (lambda: concat(), r"concat: takes \*parts \(…, _\), not 0 tensors"),
        (
            lambda: add_product(feed("x", (63, 7)), feed("a", (6, 30, 6)), feed("b", (30, 7))),
            r"add_product: needs .*M = 63 .*\[6, 30, 6\]",
        ),
        *(
            (
                lambda size=size: block_cells(*(feed(n, (3,), "i32") for n in "pc"), size=size, spare=0),
                f"size = {size},",
            )
            for size in (0, 3, -16)
        ),
        (lambda: compressed(1, 16, "blocks"), r"compressed_attention: needs .*N = 16, size = 1 "),
        (lambda: compressed(3, 5, "blocks", "tables"), r"compressed_attention: needs .*N = 5, size = 3 "),
        (lambda: feed("x", (2, 32), "q8_0"), r"feed 'x': numpy has no q8_0"),
        (lambda: variable("w", (2, 33), "q8_0").nbytes, r"q8_0 packs 32 elements.*\(2, 33\)"),
    ],
)
def test_wrong_shapes_fail_where_the_graph_is_built(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()  # type: ignore[operator]

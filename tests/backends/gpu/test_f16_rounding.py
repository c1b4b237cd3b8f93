"""f16 that a device writes: nearest even, to the bit, as numpy rounds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from logitless.graph.backend import Backend
from logitless.graph.execution.session import Session
from logitless.graph.ops.attention.paged_attention import PAGE, store_k, store_v
from logitless.graph.tensor import feed, variable

N = 64


def values() -> np.ndarray:
    """Ties, their neighbours, subnormals, the edges of the range, both signs, and numbers at random."""
    r = np.random.default_rng(5)
    grid = np.arange(1, 0x7BFF, 61, dtype=np.uint16).view(np.float16).astype(np.float64)
    above = np.nextafter(grid.astype(np.float16), np.float16(np.inf)).astype(np.float64)
    middle = ((grid + above) / 2).astype(np.float32)
    beside = [np.nextafter(middle, np.float32(end)) for end in (-np.inf, np.inf)]
    edges = np.array(
        [0.0, 65504, 65519.996, 65520, 65536, 1e30, 2**-24, 2**-25, 2**-25 * 1.0001, 2**-26, 1e-40], np.float32
    )
    spread = (r.normal(size=2000) * 10.0 ** r.integers(-8, 5, 2000)).astype(np.float32)
    one = np.concatenate([middle, *beside, edges, spread])
    both = np.concatenate([one, -one])
    return np.resize(both, (-(-len(both) // N), 1, N)).astype(np.float32)


@pytest.mark.parametrize("name", ["cpu", "opencl:0", "vulkan:0"])
@pytest.mark.parametrize("op", [store_k, store_v], ids=["store_k", "store_v"])
def test_stored_rows_are_rounded_to_nearest_even(
    op: Callable[..., object], name: str, open_device: Callable[[str], Backend]
) -> None:
    rows = values()
    n = len(rows)
    pages = -(-n // PAGE)
    shape = (pages, 1, N, PAGE) if op is store_k else (pages, 1, PAGE, N)
    session = Session([open_device(name)])
    session.define("cache", shape, "f16", lambda: np.zeros(np.prod(shape) * 2, np.uint8))
    cells = np.arange(n, dtype=np.int32)
    stored = op(variable("cache", shape, "f16"), feed("x", rows.shape), feed("cells", (n,), "i32"))
    session.plan(lambda: [stored]).run({"x": rows, "cells": cells})
    got = session.read("cache").view(np.uint16).reshape(shape)
    got = np.moveaxis(got, -1, 2) if op is store_k else got
    with np.errstate(over="ignore"):
        expected = rows.astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(got.reshape(-1, N)[:n], expected[:, 0])


def test_no_shader_leaves_f16_rounding_to_the_driver() -> None:
    """`packHalf2x16` and conversions to f16 round as the driver likes."""
    from logitless.backends.vulkan.pipelines import SHADERS

    pack_half, extended, convert, float_type = 58, 0x6000C, 0x40073, 0x30016
    for path in sorted(SHADERS.rglob("*.spv")):
        w = np.frombuffer(path.read_bytes(), np.uint32)
        calls = np.flatnonzero(w[:-5] == extended)
        assert pack_half not in w[calls + 4], path.name
        halves = [w[i + 1] for i in np.flatnonzero(w[:-2] == float_type) if w[i + 2] == 16]
        converted = np.flatnonzero(w[:-3] == convert)
        assert not set(w[converted + 1].tolist()) & {int(half) for half in halves}, path.name

"""Paged attention as GPUs run it, on PoCL and lavapipe: spans in parallel, and in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from logitless.backends.gpu.attention import paged_attention
from logitless.backends.gpu.device import lower_all
from logitless.backends.gpu.language.dialect import SIMT
from logitless.graph.backend import Backend
from logitless.graph.execution.session import Session
from logitless.graph.op import OPS
from logitless.graph.ops.attention.mla import latent_attention
from logitless.graph.ops.attention.paged_attention import (
    PAGE,
    attention,
    biased_attention,
    load_k,
    load_v,
    store_k,
    store_v,
)
from logitless.graph.ops.rope import rope
from logitless.graph.tensor import Tensor, feed, variable
from logitless.graph.testing.conformance import OK, problems, register_all, run

PAGES = 44  # of a sequence: 704 cells, three spans
SEEN = [0, 15, 16, 255, 256, 300, 511, 512, 703]  # last cells


@pytest.fixture
def gpu(
    request: pytest.FixtureRequest, open_device: Callable[[str], Backend], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Backend]:
    """A backend of its own that takes its device for a GPU. A few groups keep OpenCL's busy, so that
    prompts run in tiles, which lavapipe compiles for 12 s.
    """
    name: str = request.param
    open_device(f"{name}:0")
    if name == "vulkan":
        from logitless.backends.vulkan.backend import VulkanBackend

        vulkan = VulkanBackend()
        vulkan.shape = SIMT
        yield vulkan
        vulkan.close()
        return
    from logitless.backends.opencl import programs
    from logitless.backends.opencl.backend import OpenCLBackend

    monkeypatch.setattr(paged_attention, "FEW_GROUPS", 4)
    # PoCL 3.1 makes wrong code of the loops that are written out; oclgrind finds no fault in them.
    monkeypatch.setattr(programs, "OPTIONS", [*programs.OPTIONS, "-cl-opt-disable"])
    opencl = OpenCLBackend()
    opencl.shape = replace(SIMT, units=opencl.shape.units, narrow=True)  # q8_0 in tiles of 8 rows
    opencl.programs = programs.Programs(opencl._context, opencl.identity, opencl.shape)
    yield opencl
    opencl.close()


@pytest.mark.parametrize(
    ("gpu", "types", "heads", "size", "window", "cap", "sinks"),
    [
        ("vulkan", ("f16", "f16"), (3, 3), 64, 0, 0.0, ()),
        ("opencl", ("f16", "f16"), (6, 1), 64, 0, 0.0, ()),
        pytest.param("opencl", ("q8_0", "f32"), (4, 2), 64, 270, 0.0, (), marks=pytest.mark.long),
        pytest.param("opencl", ("f32", "q8_0"), (2, 2), 64, 0, 3.0, (), marks=pytest.mark.long),
        ("vulkan", ("f16", "f16"), (3, 3), 64, 270, 0.0, (-200.0, 4.0, 150.0)),
        ("opencl", ("q8_0", "q8_0"), (6, 1), 64, 0, 0.0, (6.0, -200.0, 0.0, 150.0, 3.0, 8.0)),
        pytest.param("opencl", ("f16", "f16"), (3, 1), 512, 0, 0.0, (), marks=pytest.mark.long),
        pytest.param("opencl", ("q8_0", "q8_0"), (1, 1), 320, 270, 0.0, (4.0,), marks=pytest.mark.long),
        pytest.param("opencl", ("q8_0", "q8_0"), (14, 2), 96, 0, 0.0, (), marks=pytest.mark.long),
        ("opencl", ("f32", "f32"), (4, 1), 132, 300, 3.0, ()),
        pytest.param("opencl", ("q5_1", "q5_1"), (6, 1), 64, 0, 0.0, (), marks=pytest.mark.long),
        ("opencl", ("q8_0", "q4_0"), (4, 2), 96, 270, 0.0, ()),
        pytest.param("vulkan", ("iq4_nl", "q4_1"), (3, 3), 64, 0, 0.0, (), marks=pytest.mark.long),
        ("vulkan", ("f16", "f16"), (3, 3), 64, None, 0.0, (0.5, 0.02, 0.004)),
        ("opencl", ("q8_0", "q8_0"), (6, 1), 64, None, 0.0, (0.7, 0.3, 0.1, 0.05, 0.02, 0.01)),
    ],
    indirect=["gpu"],
)
def test_paged_attention_in_spans_is_right_and_batch_invariant(
    gpu: Backend,
    types: tuple[str, str],
    heads: tuple[int, int],
    size: int,
    window: int | None,
    cap: float,
    sinks: tuple[float, ...],
) -> None:
    """The reference's values, and the same bits with one span a group or all, beside others
    and alone. `window` None: `sinks` are the slopes of ALiBi's biases.
    """
    op = partial(attention, window=window, cap=cap) if window is not None else biased_attention
    slopes = sinks if window is None else (0.0,) * heads[0]
    (n_heads, n_kv), n = heads, len(SEEN)
    draw = np.random.default_rng(4)
    tables = draw.permutation(n * PAGES).reshape(n, PAGES).astype(np.int32)
    session = Session([gpu])
    shapes = {"k": (n * PAGES, n_kv, size, PAGE), "v": (n * PAGES, n_kv, PAGE, size)}
    k, v = (session.define(name, shapes[name], kind) for name, kind in zip("kv", types, strict=True))
    n_cells = n * PAGES * PAGE
    feeds = {name: draw.normal(size=(n_cells, n_kv, size)).astype(np.float32) for name in "xy"}
    feeds["cells"] = np.arange(n_cells, dtype=np.int32)
    x, y, cells = feed("x", (n_cells, n_kv, size)), feed("y", (n_cells, n_kv, size)), feed("cells", (n_cells,), "i32")
    session.run("store", lambda: [store_k(k, x, cells), store_v(v, y, cells)], feeds)
    keys, values = session.run("load", lambda: [load_k(k, cells), load_v(v, cells)], {"cells": feeds["cells"]})
    q = draw.normal(size=(n, n_heads, size)).astype(np.float32)
    rest = np.array(sinks, np.float32)
    if window is None:
        rest = np.outer(rest, np.arange(1 - PAGES * PAGE, 1)).astype(np.float32).reshape(-1)
    learned = None
    if sinks:
        learned = session.define("sinks", rest.shape, "f32", lambda: rest.view(np.uint8), constant=True)

    def rows(*tokens: tuple[int, int]) -> np.ndarray:
        """Attention of tokens of these sequences, so many cells before the last."""
        many, before = map(list, zip(*tokens, strict=True))

        def build() -> list[Tensor]:
            x, table = feed("q", (len(many), n_heads, size)), feed("tables", tables.shape, "i32")
            slot, pos = feed("slot", (len(many),), "i32"), feed("pos", (len(many),), "i32")
            more = [learned] if learned is not None else []
            return [op(x, k, v, table, slot, pos, *more, scale=size**-0.5)]

        feeds = {
            "q": q[many],
            "slot": np.array(many, np.int32),
            "pos": np.maximum(np.array(SEEN)[many] - before, 0).astype(np.int32),
            "tables": tables,
        }
        return session.run(len(many), build, feeds)[0].copy()

    prompts = [(i, j) for i in range(n) for j in range(30, -1, -1)]  # tiles of one sequence and of two
    alone = np.concatenate([rows((i, 0)) for i in range(n)])
    together = rows(*prompts)
    assert together[30::31].tobytes() == alone.tobytes()
    for token in (5, 29), (6, 0), (8, 13):
        assert rows(token).tobytes() == together[prompts.index(token)].tobytes()
    for i, last in enumerate(SEEN):
        seen = np.arange(max(0, last + 1 - window) if window else 0, last + 1)
        where = tables[i][seen // PAGE] * PAGE + seen % PAGE
        for h in range(n_heads):
            own = h // (n_heads // n_kv)
            scores = keys[where, own].astype(np.float64) @ q[i, h] * size**-0.5
            scores = cap * np.tanh(scores / cap) if cap else scores - slopes[h] * (last - seen)
            of_head = rest[h : h + 1] if window is not None else rest[:0]
            top = max([scores.max(), *of_head])
            weights = np.exp(scores - top)
            total = weights.sum() + np.exp(of_head - top).sum()
            expected = weights @ values[where, own].astype(np.float64) / total
            np.testing.assert_allclose(alone[i, h], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("gpu", "kind", "size"), [("vulkan", "f16", 72), ("opencl", "q8_0", 160), ("opencl", "f32", 576)], indirect=["gpu"]
)
def test_mla_is_right_and_batch_invariant(gpu: Backend, kind: str, size: int) -> None:
    """The reference's values of MLA, and the same bits beside others and alone."""
    n, n_heads, draw = len(SEEN), 6, np.random.default_rng(4)
    tables = draw.permutation(n * PAGES).reshape(n, PAGES).astype(np.int32)
    session, n_cells = Session([gpu]), n * PAGES * PAGE
    k, cells = session.define("k", (n * PAGES, 1, size, PAGE), kind), feed("cells", (n_cells,), "i32")
    feeds = {"x": draw.normal(size=(n_cells, 1, size)).astype(np.float32), "cells": np.arange(n_cells, dtype=np.int32)}
    session.run("store", lambda: [store_k(k, feed("x", (n_cells, 1, size)), cells)], feeds)
    rows = session.run("load", lambda: [load_k(k, cells)], {"cells": feeds["cells"]})[0][:, 0].astype(np.float64)
    q = draw.normal(size=(n, n_heads, size)).astype(np.float32)

    def attended(which: list[int]) -> np.ndarray:
        def build() -> list[Tensor]:
            table, x = feed("tables", tables.shape, "i32"), feed("q", (len(which), n_heads, size))
            slot, pos = feed("slot", (len(which),), "i32"), feed("pos", (len(which),), "i32")
            return [latent_attention(x, k, table, slot, pos, scale=size**-0.5)]

        own = np.array(which, np.int32)
        feeds = {"q": q[own], "slot": own, "pos": np.array(SEEN, np.int32)[own], "tables": tables}
        return session.run(len(which), build, feeds)[0].copy()

    together = attended(list(range(n)))
    assert together.tobytes() == np.concatenate([attended([i]) for i in range(n)]).tobytes()
    for i, last in enumerate(SEEN):
        seen = rows[tables[i][np.arange(last + 1) // PAGE] * PAGE + np.arange(last + 1) % PAGE]
        scores = q[i] @ seen.T * size**-0.5
        weights = np.exp(scores - scores.max(1, keepdims=True))
        np.testing.assert_allclose(together[i], weights @ seen / weights.sum(1, keepdims=True), rtol=0, atol=2e-5)


@pytest.mark.parametrize("op", ["attention", "attention_rope", "glu_clamped"])
@pytest.mark.parametrize("device", ["opencl:0", "vulkan:0"])
def test_ops_of_gpt_oss_have_kernels(op: str, device: str, open_device: Callable[[str], Backend]) -> None:
    register_all()
    outcomes = [run(problem, [open_device(device)]) for problem in problems(op)]
    assert len(outcomes) >= len(OPS[op].cases) > 0
    assert [o for o in outcomes if o.status != OK] == []


@pytest.mark.parametrize(
    ("gpu", "device", "types"),
    [
        *(("vulkan", device, ("f16", "f16")) for device in ("opencl:0", "vulkan:0", "gpu")),
        *(("vulkan", device, ("f32", "q8_0")) for device in ("opencl:0", "vulkan:0")),
        ("opencl", "gpu", ("f32", "q8_0")),  # lavapipe takes 10 s to compile it
    ],
    indirect=["gpu"],
)
def test_attention_sinks_with_rope_has_the_bits_of_rope_alone(
    types: tuple[str, str],
    device: str,
    gpu: Backend,
    open_device: Callable[[str], Backend],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same bits whether attention applies RoPE to its queries or not, alone and in a batch."""
    backend = gpu if device == "gpu" else open_device(device)
    n, heads, n_kv, size, pages = 20, 4, 2, 32, 20
    draw, n_cells = np.random.default_rng(6), pages * PAGE
    x, y = (draw.normal(size=(n_cells, n_kv, size)).astype(np.float32) for _ in range(2))
    q, a = draw.normal(size=(n, heads, size)).astype(np.float32), draw.normal(size=(n, 2, 12)).astype(np.float32)
    sinks, pos = draw.normal(size=heads).astype(np.float32) * 4, draw.integers(0, n_cells, n).astype(np.int32)

    def rows(which: slice, *, fuses: bool) -> bytes:
        monkeypatch.setattr(backend, "refused", set() if fuses else {"attention_rope"})
        session = Session([backend])
        shapes = (pages, n_kv, size, PAGE), (pages, n_kv, PAGE, size)
        k, v = (session.define(name, *kind) for name, kind in zip("kv", zip(shapes, types, strict=True), strict=True))
        s = session.define("sinks", sinks.shape, "f32", lambda: sinks.view(np.uint8), constant=True)

        def build() -> list[Tensor]:
            cells = feed("cells", (n_cells,), "i32")
            stored = store_k(k, feed("x", x.shape), cells), store_v(v, feed("y", y.shape), cells)
            m = len(q[which])
            queries = rope(feed("q", (m, *q.shape[1:])), feed("a", (m, *a.shape[1:])), interleaved=False)
            places = feed("tables", (1, pages), "i32"), feed("slot", (m,), "i32"), feed("pos", (m,), "i32")
            return [attention(queries, *stored, *places, s, scale=0.2, window=130)]

        feeds = {"x": x, "y": y, "cells": np.arange(n_cells, dtype=np.int32), "q": q[which], "a": a[which]}
        feeds |= {"tables": np.arange(pages, dtype=np.int32)[None], "slot": np.zeros(n, np.int32)[which]}
        return session.run("rows", build, feeds | {"pos": pos[which]})[0].tobytes()

    whole = rows(slice(None), fuses=True)
    assert rows(slice(None), fuses=False) == whole
    assert rows(slice(7, 8), fuses=True) == whole[7 * q[0].nbytes : 8 * q[0].nbytes]


def test_paged_attention_of_few_rows_runs_spans_in_parallel() -> None:
    """The choice of kernels that test_paged_attention_in_spans_is_right_and_batch_invariant relies on."""

    def kernels(rows: int, pages: int = PAGES) -> list[str]:
        k, v = variable("k", (PAGES, 2, 64, PAGE), "f16"), variable("v", (PAGES, 2, PAGE, 64), "f16")
        inputs = feed("tables", (1, pages), "i32"), feed("slot", (rows,), "i32"), feed("pos", (rows,), "i32")
        return [d.kernel for d in lower_all([attention(feed("q", (rows, 2, 64)), k, v, *inputs, scale=0.125)], SIMT)]

    assert kernels(9) == ["attention_spans_f16_f16", "attention_join"]
    assert kernels(300) == ["attention_spans_f16_f16"]
    assert kernels(2048) == ["attention_tiles_f16_f16", "attention_spans_f16_f16"]  # of one sequence, of several
    assert kernels(1, 640_000) == ["attention_spans_f16_f16"]  # more groups than a launch may have


def test_tiles_of_blocks_are_half_as_large_where_subgroups_are_narrow() -> None:
    def rows(kind: str, narrow: bool) -> tuple[int, int]:
        """Rows and tokens of a group."""
        k, v = variable("k", (PAGES, 2, 128, PAGE), kind), variable("v", (PAGES, 2, PAGE, 128), kind)
        inputs = feed("tables", (1, PAGES), "i32"), feed("slot", (2048,), "i32"), feed("pos", (2048,), "i32")
        node = attention(feed("q", (2048, 4, 128)), k, v, *inputs, scale=0.125)
        tiles, _ = lower_all([node], replace(SIMT, narrow=narrow))
        return dict(tiles.defines)["ROWS"], 2048 // tiles.groups[1]

    assert [rows(kind, True) for kind in ("f16", "q8_0", "q4_0")] == [(16, 8), (8, 4), (8, 4)]
    assert [rows(kind, False) for kind in ("f16", "q8_0", "q4_0")] == [(16, 8)] * 3

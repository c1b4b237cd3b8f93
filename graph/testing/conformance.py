"""Conformance tests: each case of an op on a backend against its float64 numpy reference.

Both get the same numbers. The backend's memory is filled with NaN beforehand and has guard bytes on
both sides: an element that is not written, a write beside the result and a changed input are found.
Cases with f32 matrices also run with their sources at odd offsets (rows of larger arrays)."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.graph import ops
from logitless.graph.backend import Backend, Buffer, Bytes, Location, Program
from logitless.graph.dtype import DTYPES, dequantize, nbytes
from logitless.graph.execution.session import Session
from logitless.graph.op import OPS, Variable, Weight
from logitless.graph.order import toposort
from logitless.graph.tensor import ALIASES, Tensor, const, feed
from logitless.graph.testing.evaluate import evaluate
from logitless.graph.testing.kv_pages import decode_pages, encode_pages, is_paged

GUARD = 256  # bytes before and after every buffer; a multiple of any alignment
FILL = 0xFF  # NaN in every float type, -1 in the integer types
OK, WRONG, UNSUPPORTED = "ok", "wrong", "unsupported"
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Outcome:
    """The result of one case.

    `error`: the largest difference, relative to the reference's largest magnitude."""

    op: str
    case: str
    status: str
    error: float = 0.0
    detail: str = ""


@dataclass
class Problem:
    """A graph with values of its leaves, for `run`: constants are GGUF bytes, all others arrays."""

    op: str
    label: str
    roots: Sequence[Tensor]
    tolerance: float
    feeds: dict[str, Array] = field(default_factory=dict)
    constants: dict[str, tuple[Tensor, Bytes]] = field(default_factory=dict)
    variables: dict[str, tuple[Tensor, Array]] = field(default_factory=dict)


def register_all() -> None:
    """Import every module below graph/ops, so that the registry of ops is complete."""
    for module in pkgutil.walk_packages(ops.__path__, "logitless.graph.ops."):
        importlib.import_module(module.name)


def problems(op_name: str, seed: int = 0) -> Iterator[Problem]:
    """The test cases of an op, each as it is and, where possible, with sources at odd offsets."""
    for i, make in enumerate(OPS[op_name].cases):
        for odd in (False, True):
            sources, attrs = make(np.random.default_rng([seed, i]))
            if odd and not any(_can_be_odd(s) for s in sources):
                continue
            problem = Problem(op_name, "", (), OPS[op_name].tolerance)
            src = [_source(problem, f"s{j}", s, odd) for j, s in enumerate(sources)]
            node = OPS[op_name](*src, **attrs)
            if any(DTYPES[t.dtype].quantised for t in src):
                problem.tolerance = max(problem.tolerance, OPS[op_name].tolerance_quantised)
            problem.label = f"#{i} {signature(node)}" + (" at odd offsets" if odd else "")
            problem.roots = (_fetchable(node),)
            yield problem


def signature(node: Tensor) -> str:
    """Format a node's sources and attributes: `f32[4, 6] q8_0[37, 64] eps=1e-05`."""
    attrs = (f"{k}={v}" for k, v in node.attrs.items())
    return " ".join((*(f"{s.dtype}{list(s.shape)}" for s in node.src), *attrs))


def _can_be_odd(source: Any) -> bool:
    return isinstance(source, np.ndarray) and source.ndim > 1 and source.dtype.kind == "f"


def _source(problem: Problem, name: str, source: Any, odd: bool) -> Tensor:
    """Make a leaf (or a slice of one) for a case's source and note its values in the problem."""
    if isinstance(source, Weight):
        raw = encode(np.asarray(source.array, np.float32), source.dtype)
        return add_constant(problem, name, source.array.shape, source.dtype, raw)
    if isinstance(source, Variable):
        return add_variable(problem, name, np.asarray(source.array), source.dtype)
    values = np.asarray(source)
    kind = "f32" if values.dtype.kind == "f" else "u32" if values.dtype == np.uint32 else "i32"
    values = values.astype(DTYPES[kind].numpy)
    if odd and _can_be_odd(source):
        from logitless.graph.ops.shape import slice_rows

        padded = np.concatenate([np.full((1, *values.shape[1:]), np.nan, values.dtype), values])
        problem.feeds[name] = padded
        return slice_rows(feed(name, padded.shape, kind), start=1, stop=len(padded))
    problem.feeds[name] = values
    return feed(name, values.shape, kind)


def add_constant(problem: Problem, name: str, shape: tuple[int, ...], dtype: str, raw: Bytes) -> Tensor:
    t = Tensor("variable", (), shape, dtype, {"constant": True}, name)
    problem.constants[name] = t, raw
    return t


def add_variable(problem: Problem, name: str, values: Array, dtype: str) -> Tensor:
    t = Tensor("variable", (), values.shape, dtype, {"constant": False}, name)
    problem.variables[name] = t, values
    return t


def _fetchable(node: Tensor) -> Tensor:
    """The node, or a copy of it where it is an alias, which has no bytes of its own."""
    return OPS["add"](node, const(0.0)) if node.op in ALIASES else node


def encode(values: Array, dtype: str) -> Bytes:
    """Encode values as bytes of any type; types that are slow to quantise to get random blocks."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    kind = DTYPES[dtype].numpy
    if kind is not None:
        return np.ascontiguousarray(values, kind).reshape(-1).view(np.uint8)
    if dtype.startswith(("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "bf16", "mxfp4", "tq")):
        raw: Bytes = quantize(np.ascontiguousarray(values, np.float32), GGMLQuantizationType[dtype.upper()])
        return raw.reshape(-1)
    rng = np.random.default_rng(values.size)
    blocks = rng.integers(0, 256, (nbytes(dtype, values.shape) // DTYPES[dtype].nbytes, DTYPES[dtype].nbytes), np.uint8)
    put_scale(blocks, dtype, 1.0)
    greatest = np.abs(dequantize(blocks, dtype)).max(initial=1e-3)
    put_scale(blocks, dtype, np.abs(values).max(initial=1e-3) / greatest)
    return blocks.reshape(-1)


def put_scale(blocks: Bytes, dtype: str, scale: npt.ArrayLike) -> None:
    """Write f16 scales, one or (n, 1), into blocks (n, bytes of a block)."""
    d = np.asarray(scale, np.float16).reshape(-1, 1).view(np.uint8)
    if dtype == "iq1_m":  # in the upper halves of four words
        blocks[:, 49::2] = blocks[:, 49::2] & 15 | (d[:, [0, 0, 1, 1]] >> np.array([0, 4, 0, 4], np.uint8)) << 4
    if dtype == "nvfp4":  # four scales, below 2
        blocks[:, :4] &= 0x3F
    for at in DTYPES[dtype].scales:
        blocks[:, at : at + 2] = d


def decode(raw: Bytes, t: Tensor) -> Array:
    """Decode bytes of a tensor's type to float64 (integers as they are)."""
    if is_paged(t):
        return decode_pages(raw, t.dtype, t.shape)
    kind = DTYPES[t.dtype].numpy
    if kind is not None:
        values = np.asarray(raw).reshape(-1).view(np.uint8).view(kind).reshape(t.shape)
        return values.astype(np.float64) if values.dtype.kind == "f" else values.copy()
    rows = np.asarray(raw).reshape(-1).view(np.uint8).reshape(*t.shape[:-1], -1)
    return dequantize(rows, t.dtype).reshape(t.shape).astype(np.float64)


def run(problem: Problem, backends: Sequence[Backend]) -> Outcome:
    """Judge one problem on backends in order of preference (just one, for conformance)."""
    outcome = Outcome(problem.op, problem.label, OK)
    guarded = [Guarded(b) for b in backends]
    session = Session(guarded)
    stored: dict[str, Array] = {}
    for t, raw in problem.constants.values():
        session.define(t.name, t.shape, t.dtype, lambda raw=raw: raw, constant=True)  # type: ignore[misc]
        stored[t.name] = decode(raw, t)
    for t, values in problem.variables.values():
        raw = encode_pages(values, t.dtype) if is_paged(t) else encode(values, t.dtype)
        session.define(t.name, t.shape, t.dtype, lambda raw=raw: raw)  # type: ignore[misc]
        stored[t.name] = decode(raw, t)
    if not any(all(b.supports(t) for t in problem.roots) for b in backends):
        return replace(outcome, status=UNSUPPORTED)
    expected = evaluate(problem.roots, problem.feeds, stored)
    inputs = [t for t in toposort(problem.roots) if t.op == "feed"]
    fetched = session.plan(lambda: [*problem.roots, *inputs]).run(problem.feeds)
    got, after = fetched[: len(problem.roots)], fetched[len(problem.roots) :]
    worst = 0.0
    pairs = [(f"result {t.op}", e, decode(g, t)) for t, e, g in zip(problem.roots, expected, got, strict=True)]
    variables = [t for t, _ in problem.variables.values()]
    for name, (t, _) in problem.variables.items():
        pairs.append((f"variable {name}", stored[name], decode(session.read(name), t)))
    for (what, reference, value), t in zip(pairs, (*problem.roots, *variables), strict=True):
        if is_paged(t):  # a store rounds to the blocks of its row
            reference = decode_pages(encode_pages(np.asarray(reference), t.dtype), t.dtype, t.shape)
        elif t.dtype == "bf16":
            reference = decode(encode(np.asarray(reference), t.dtype), t)
        error, detail = difference(np.asarray(reference), value)
        worst = max(worst, error)
        if error > problem.tolerance:
            return replace(outcome, status=WRONG, error=error, detail=f"{what}: {detail}")
    for t, values in zip(inputs, after, strict=True):
        if values.tobytes() != np.ascontiguousarray(problem.feeds[t.name], values.dtype).tobytes():
            return replace(outcome, status=WRONG, error=worst, detail=f"the input {t.name} was modified")
    for b in guarded:
        if detail := b.damage():
            return replace(outcome, status=WRONG, error=worst, detail=detail)
    return replace(outcome, error=worst)


def difference(reference: Array, values: Array) -> tuple[float, str]:
    """The largest difference relative to the largest magnitude, and its position as text.

    inf where only one of both is not finite."""
    if reference.shape != values.shape:
        return np.inf, f"shape {values.shape}, expected {reference.shape}"
    if reference.size == 0:
        return 0.0, ""
    w, f = reference.astype(np.float64), values.astype(np.float64)
    finite = np.isfinite(w)
    same = np.where(finite, np.isfinite(f), (w == f) | (np.isnan(w) & np.isnan(f)))
    if not same.all():
        at = tuple(int(i) for i in np.argwhere(~same)[0])
        return np.inf, f"{int((~same).sum())} of {w.size} elements, first {at}: {f[at]}, expected {w[at]}"
    if not finite.any():
        return 0.0, ""
    gap = np.where(finite, np.abs(np.where(finite, f, 0) - np.where(finite, w, 0)), 0)
    scale = 1.0 if values.dtype.kind != "f" else max(float(np.abs(w[finite]).max()), 1e-30)
    at = tuple(int(i) for i in np.unravel_index(int(gap.argmax()), gap.shape))
    return float(gap[at]) / scale, f"at {at}: {f[at]}, expected {w[at]}"


def run_all(backends: Sequence[Backend], names: Iterable[str] = ()) -> Iterator[Outcome]:
    """Every case of every op (or of the named ones)."""
    register_all()
    for name in names or sorted(OPS):
        for problem in problems(name):
            yield run(problem, backends)


@dataclass(frozen=True)
class GuardedBuffer:
    """A buffer with GUARD bytes on both sides that nobody may write."""

    inner: Buffer
    nbytes: int


class Guarded(Backend):
    """A backend whose memory starts as NaN and has guard bytes; it wraps the backend under test."""

    def __init__(self, inner: Backend) -> None:
        self.inner, self.name, self.alignment, self.memory_bytes = inner, inner.name, inner.alignment, 0
        self._buffers: list[GuardedBuffer] = []

    def supports(self, t: Tensor) -> bool:
        return self.inner.supports(t)

    def rewrite(self, t: Tensor) -> Tensor:
        return self.inner.rewrite(t)

    def fuse(self, fetches: Sequence[Tensor], mine: Callable[[Tensor], bool]) -> Sequence[Tensor]:
        return self.inner.fuse(fetches, mine)

    def constant_nbytes(self, t: Tensor) -> int:
        return self.inner.constant_nbytes(t)

    def load(self, t: Tensor, raw: Bytes) -> Buffer:
        return self.inner.load(t, raw)

    def alloc(self, nbytes: int, *, feeds: bool = False) -> Buffer:
        buffer = GuardedBuffer(self.inner.alloc(nbytes + 2 * GUARD, feeds=feeds), nbytes)
        self.inner.upload(Location(buffer.inner), np.full(nbytes + 2 * GUARD, FILL, np.uint8))
        self._buffers.append(buffer)
        return buffer

    def damage(self) -> str:
        """Describe a write beside a buffer; "" when there was none."""
        for b in self._buffers:
            for side, start in (("before", 0), ("after", GUARD + b.nbytes)):
                guard = np.array(self.inner.download(Location(b.inner, start), GUARD))
                if (guard != FILL).any():
                    return f"{int((guard != FILL).sum())} bytes written {side} a buffer of {b.nbytes} bytes"
        return ""

    def upload(self, location: Location, data: Bytes) -> None:
        self.inner.upload(_inside(location), data)

    def download(self, location: Location, nbytes: int) -> Bytes:
        return self.inner.download(_inside(location), nbytes)

    def wait(self) -> None:
        self.inner.wait()

    def compile(self, nodes: Sequence[Tensor], locate: Callable[[Tensor], Location]) -> Program:
        return self.inner.compile(nodes, lambda t: _inside(locate(t)))

    def close(self) -> None:
        """The backend itself belongs to the caller."""


def _inside(location: Location) -> Location:
    if isinstance(location.buffer, GuardedBuffer):
        return Location(location.buffer.inner, location.offset + GUARD, location.host)
    return location

"""Lowering of slices, concatenations, transposes, casts, and image ops."""

from __future__ import annotations

from typing import Any

from logitless.backends.cpu.fusion.packing import packed, unpack_task
from logitless.backends.cpu.lowering.elementwise import rows_of
from logitless.backends.cpu.lowering.registry import At, Work, lower, lower_plain
from logitless.backends.cpu.threads.pool import Task, bits
from logitless.graph.tensor import Shape, Tensor, strides

CHUNK = 4096  # kernels/slicing.py: CHUNK


def _chunks(t: Tensor) -> int:
    return -(-t.size // CHUNK)


def _first_four(values: tuple[int, ...], missing: int) -> tuple[int, ...]:
    return (missing,) * (4 - len(values)) + values


def _block(
    how: str, shape: Shape, x: int, x_steps: tuple[int, ...], y: int, y_steps: tuple[int, ...]
) -> list[Task] | None:
    if len(shape) > 4:
        return None
    d0, d1, d2, n = _first_four(shape, 1)
    args = (x, y, n, d1, d2, *_first_four(x_steps, 0), *_first_four(y_steps, 0))
    return [Task(f"block:{how}", args, d0 * d1 * d2, max(1, CHUNK // n))]


@lower("transpose")
def _(t: Tensor, at: At) -> list[Task] | None:
    x, steps = t.src[0], strides(t.src[0].shape)
    return _block("copy", t.shape, at(x), tuple(steps[i] for i in t.attrs["axes"]), at(t), strides(t.shape))


def _offset(steps: tuple[int, ...], start: tuple[int, ...]) -> int:
    return 4 * sum(s * i for s, i in zip(steps, start, strict=True))


@lower("take_block")
def _(t: Tensor, at: At) -> list[Task] | None:
    steps = strides(t.src[0].shape)
    return _block("copy", t.shape, at(t.src[0]) + _offset(steps, t.attrs["start"]), steps, at(t), strides(t.shape))


def _put(how: str, t: Tensor, at: At) -> list[Task] | None:
    x, part = t.src
    steps = strides(t.shape)
    into = at(t) + _offset(steps, t.attrs["start"])
    put = _block(how, part.shape, at(part), strides(part.shape), into, steps)
    if put is None or at(x) == at(t):
        return put
    return [Task("copy", (at(x), at(t), t.size), _chunks(t), 8), *put]


@lower("set_block")
def _(t: Tensor, at: At) -> list[Task] | None:
    return _put("copy", t, at)


@lower("add_block")
def _(t: Tensor, at: At) -> list[Task] | None:
    return _put("add", t, at)


@lower("concat")
def _(t: Tensor, at: At) -> list[Task] | None:
    steps, into = strides(t.shape), at(t)
    tasks: list[Task] = []
    for part in t.src:
        put = _block("copy", part.shape, at(part), strides(part.shape), into, steps)
        if put is None:
            return None
        tasks += put
        into += 4 * part.shape[1] * steps[1]
    return tasks


def _masked(x: Tensor, past: int, fill: float, **_: Any) -> Work:
    rows, n, grain = rows_of(x)
    return (x.shape[-2], n, past, bits(fill)), rows, grain


lower_plain(
    causal_mask=_masked,
    diag=lambda n, **_: ((n,), n, max(1, CHUNK // n)),
    argmax=lambda x, R, K, **_: ((K,), R, rows_of(x)[2]),
    max_pool=lambda N, H, W, C, size, **_: ((H, W, C, size), N * (H // size), 4),
    max_pool_back=lambda N, H, W, C, size, **_: ((H, W, C, size), N, 1),
)


@lower("diagonal")
def _(t: Tensor, at: At) -> list[Task] | None:
    return _block("copy", t.shape, at(t.src[0]), (t.shape[0] + 1,), at(t), (1,))


@lower("cast")
def _(t: Tensor, at: At) -> list[Task] | None:
    x, n = t.src[0], t.size
    if packed(x):
        return [unpack_task(x.dtype, at(x), at(t), *x.shape)]
    if x.dtype == t.dtype:
        return [Task("copy", (at(x), at(t), n), _chunks(t), 8)]
    if {x.dtype, t.dtype} != {"f32", "f16"}:
        return None
    return [Task(f"cast:{x.dtype}:{t.dtype}", (at(x), at(t), n), _chunks(t), 4)]


@lower("clear_cells")
def _(t: Tensor, at: At) -> list[Task] | None:
    cache, cells = t.src
    if cache.dtype != "f32":
        return None
    keys = t.attrs["keys"]
    args = (at(cells), at(t), cache.shape[1], cache.shape[2 if keys else 3])
    clear = Task(f"clear_cells:{'keys' if keys else 'values'}", args, cells.shape[0], 4)
    if at(cache) == at(t):
        return [clear]
    return [Task("copy", (at(cache), at(t), t.size), _chunks(t), 8), clear]


def _patches(t: Tensor, image: Shape, units: int, at: At) -> list[Task]:
    _, h, w, c = image
    (kh, kw), stride, padding = t.attrs["size"], t.attrs.get("stride", 1), t.attrs.get("padding", 0)
    rows, columns = (h + 2 * padding - kh) // stride + 1, (w + 2 * padding - kw) // stride + 1
    args = (at(t.src[0]), at(t), h, w, c, rows, columns, kh, kw, stride, padding)
    return [Task(t.op, args, units or image[0] * rows, 4)]


@lower("patches")
def _(t: Tensor, at: At) -> list[Task]:
    return _patches(t, t.src[0].shape, 0, at)


@lower("patches_back")
def _(t: Tensor, at: At) -> list[Task]:
    return _patches(t, t.shape, t.shape[0] * t.shape[1], at)

"""Autotuning: integer dot products or cooperative matrices for quantised weights.

Both give the same bits, so the choice, and the number of rows from which it holds, affects time
alone. It is measured on the user's device, once, as long as device, driver and kernels stay the
same."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from logitless.backends import disk_cache
from logitless.backends.errors import DeviceLost
from logitless.backends.gpu.language.dialect import SIMT, Shape
from logitless.backends.gpu.matmul.linear_coop_matrix import LEAST_ROWS
from logitless.backends.vulkan.device import Device
from logitless.backends.vulkan.instance import DeviceInfo
from logitless.backends.vulkan.pipelines import MANIFEST, SOFT_SHADERS
from logitless.graph.backend import Backend, Bytes, Location
from logitless.graph.ops.linear import linear
from logitless.graph.tensor import feed, variable

log = logging.getLogger("logitless.devices")
# 1: wherever a device has them, 0: nowhere
DOTS, MATRICES = "LOGITLESS_VULKAN_DOT", "LOGITLESS_VULKAN_MATRICES"
# rows, outputs and depth of the products that are timed
SIZES = ((64, 256, 1024), (256, 4096, 1024))
QUALCOMM = 0x5143  # eight rows of floats do not fit its registers, nor those of narrow subgroups (Intel)
TURNS = 4  # of each kernel, by turns; the first does not count
GROWTH = 64  # from one size to the next
BUDGET_S = 0.25  # seconds for all sizes, beside compiling kernels that are needed anyway
# Matrices of few rows do not fill a large GPU: rows that are timed, and where matrices begin if
# they win there.
ROWS = ((96, 65), (48, LEAST_ROWS))
MOST_ROWS = 129  # where they begin if they win in none


@dataclass(frozen=True)
class TunedKernel:
    """True if cooperative matrices are used, the reason, and the number of rows from which they are."""

    used: bool
    why: str
    rows: int = LEAST_ROWS


class Tunable(Backend, Protocol):
    """A Vulkan backend whose choice of kernels (`shape`) can be switched between two programs."""

    device: Device
    shape: Shape


def class_of(info: DeviceInfo) -> Shape:
    """The class of a device, not yet with cooperative matrices."""
    wish = os.environ.get(DOTS, "")
    dot = "shaderIntegerDotProduct" in info.features and wish != "0" and (info.fast_dots or wish == "1")
    narrow = info.lanes < 32
    rows = 4 if info.vendor == QUALCOMM or (narrow and not dot) else SIMT.rows
    gpu = replace(SIMT, dot=dot, threads=info.max_invocations, local_bytes=info.local_bytes, rows=rows, narrow=narrow)
    if dot:
        return gpu
    able = info.kind == "cpu" and info.broadcasts and "shaderInt64" in info.features
    soft = able and SOFT_SHADERS.exists()
    return replace(gpu, name="soft") if soft else gpu


def known(info: DeviceInfo) -> TunedKernel | None:
    """A choice that needs no measurement, or was measured before; None when the device must be measured."""
    if info.matrices is None:
        return TunedKernel(False, "the device has none that fit")
    if not class_of(info).dot:
        return TunedKernel(False, "the device has no fast integer dot products to do the same for few rows")
    if (wish := os.environ.get(MATRICES, "")) in ("0", "1"):
        return TunedKernel(wish == "1", f"{MATRICES}={wish}")
    cached = disk_cache.read(_path(info))
    return TunedKernel(**json.loads(cached)) if cached else None


def measure(backend: Tunable) -> TunedKernel:
    """Time both kernels on a device that has both, and cache the choice."""
    before, path = backend.shape, _path(backend.device.info)
    # the next start is not to find out again
    _keep(path, TunedKernel(False, "the driver did not survive the trial"))
    try:
        choice = _race(backend)
    except DeviceLost:
        raise
    except (OSError, MemoryError) as error:  # a driver that refuses the kernel
        choice = TunedKernel(False, str(error).replace("\n", " "))
    finally:
        backend.shape = before
    _keep(path, choice)
    log.info("%s: cooperative matrices are %s: %s", backend.name, "used" if choice.used else "not used", choice.why)
    return choice


def _keep(path: Path, choice: TunedKernel) -> None:
    disk_cache.write(path, json.dumps(asdict(choice)).encode())


def _path(info: DeviceInfo) -> Path:
    of = hashlib.sha256(info.identity + f"{info.matrices}".encode() + MANIFEST.read_bytes()).hexdigest()
    return disk_cache.cache_folder() / "vulkan" / f"{of[:16]}.choice"


def _race(backend: Tunable) -> TunedKernel:
    begun, dots, matrices, finished = time.perf_counter(), 0.0, 0.0, True
    for size in SIZES:
        # two turns of both kernels: the times so far must do
        if 4 * GROWTH * max(dots, matrices) > BUDGET_S:
            finished = False
            break
        dots, matrices, right = _timed(backend, *size, begun)
        if not right:
            return TunedKernel(False, "the driver computes them wrongly")
    ratio = f"{max(dots, matrices) / min(dots, matrices):.2f}"
    if matrices >= dots:
        return TunedKernel(False, f"integer dot products are {ratio} times as fast")
    rows = _first_rows(backend, begun) if finished else LEAST_ROWS
    return TunedKernel(True, f"{ratio} times as fast as integer dot products", rows)


def _first_rows(backend: Tunable, begun: float) -> int:
    """The number of rows from which matrices are faster."""
    first_rows = MOST_ROWS
    for m, rows in ROWS:
        dots, matrices, _ = _timed(backend, m, 2048, 2048, begun)
        if matrices >= dots:
            break
        first_rows = rows
    return first_rows


def _timed(backend: Tunable, m: int, n: int, k: int, begun: float) -> tuple[float, float, bool]:
    """Seconds of a product with dots and with matrices, and whether their bits are equal."""
    programs, result = _programs(backend, m, n, k)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    results: dict[bool, bytes] = {}
    for turn in range(TURNS):
        for coop, run in programs.items():
            start = time.perf_counter()
            run()
            backend.wait()
            seconds[coop].append(time.perf_counter() - start)
            if turn == 0:
                results[coop] = bytes(result())
        another = sum(times[-1] for times in seconds.values())
        if turn and time.perf_counter() - begun + another > BUDGET_S:
            break
    return min(seconds[False][1:]), min(seconds[True][1:]), results[False] == results[True]


def _programs(backend: Tunable, m: int, n: int, k: int) -> tuple[dict[bool, Callable[[], None]], Callable[[], Bytes]]:
    """Runs of a product with dots and with matrices, and a function that downloads the result."""
    draw = np.random.default_rng(0)
    raw = draw.integers(0, 256, (n, k // 32, 34), np.uint8)
    raw[..., :2] = np.array([0.01], np.float16).view(np.uint8)  # scales of Q8_0
    x, w = feed("x", (m, k)), variable("w", (n, k), "q8_0", constant=True)
    y = linear(x, w)
    places = {
        x: Location(backend.alloc(x.nbytes)),
        w: Location(backend.load(w, raw.reshape(-1))),
        y: Location(backend.alloc(y.nbytes)),
    }
    backend.upload(places[x], draw.standard_normal((m, k), np.float32).reshape(-1).view(np.uint8))
    programs = {}
    for coop in (False, True):
        backend.shape = replace(backend.shape, coop=LEAST_ROWS if coop else 0)
        programs[coop] = backend.compile([y], lambda t: places[t]).run
    return programs, lambda: backend.download(places[y], y.nbytes)

"""Default device: the GPUs that compute rightly and faster than the CPU, else the CPU.

On a machine without a GPU no loader of drivers is opened, for that takes longer than all else at
start. A GPU is tried once, with the products of a prompt and of single tokens, by turns with the
CPU; the verdict is kept as long as device, driver and CPU stay the same."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from logitless.backends import disk_cache
from logitless.backends.errors import DeviceError
from logitless.graph.backend import Backend, Bytes
from logitless.graph.execution.session import Session
from logitless.graph.ops.linear import linear
from logitless.graph.tensor import Tensor, feed

log = logging.getLogger("logitless.devices")
AUTO = "auto"  # of --device
NO_GPU = "no GPU"
DEVICE_FILES = (  # of Linux; drivers of graphics cards, and what WSL, Android and Mali have instead
    "dri/renderD*",
    "nvidia[0-9]*",
    "kfd",
    "dxg",
    "kgsl-3d*",
    "mali*",
)
GPU_KINDS = ("discrete", "integrated", "virtual")  # the best first
N, K = 8192, 4096  # of a matrix of Q8_0: 36 MB, more than most caches
PROMPT, DECODE = 256, 64  # rows of a product, and products of one row: the work that decides
RUNS = 4  # of each product; the first does not count
PATIENCE_S = 1.0  # seconds of the runs of a product that are enough
TOLERANCE = 0.02  # of the largest result: devices round activations differently

Open = Callable[[str], Backend]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class DefaultDevice:
    """Devices in order of preference, and the reason in a few words."""

    names: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Candidate:
    """A GPU. `card`: equal for one card under two drivers, empty where that is unknown."""

    name: str
    description: str
    kind: str
    memory_bytes: int
    identity: bytes
    card: bytes = b""

    @property
    def text(self) -> str:
        return f"{self.name} ({self.description})"


@dataclass(frozen=True)
class Verdict:
    """`fault`: why a GPU cannot be used, "" for a good one; `speed`: times the CPU's."""

    fault: str = ""
    speed: float = 0.0


def default_device(open_backend: Open) -> DefaultDevice:
    """The devices that run a model when --device is left out."""
    if not has_gpu():
        return DefaultDevice(("cpu",), NO_GPU)
    reasons: list[str] = []
    chosen: list[Candidate] = []
    speed = 0.0
    for gpu in candidates():
        if chosen and (gpu.kind != "discrete" or any(gpu.card and gpu.card == other.card for other in chosen)):
            continue
        if chosen and gpu.name.startswith("opencl") != chosen[0].name.startswith("opencl"):
            continue  # cards cannot be told apart across the two
        verdict = judge(gpu, open_backend)
        if verdict.fault:
            reasons.append(f"{gpu.text}: {verdict.fault}")
        elif verdict.speed <= 1:
            reasons.append(f"{gpu.text} has {verdict.speed:.2f} times the CPU's speed")
        else:
            chosen.append(gpu)
            speed = speed or verdict.speed
    if not chosen:
        return DefaultDevice(("cpu",), "; ".join(reasons) or "no GPU has a driver for Vulkan or OpenCL")
    why = f"{', '.join(gpu.description for gpu in chosen)}: {speed:.1f} times the CPU's speed"
    return DefaultDevice(tuple(gpu.name for gpu in chosen), why)


def has_gpu(dev: Path = Path("/dev")) -> bool:
    """False where no GPU can be used: Linux has no file of one."""
    return not sys.platform.startswith("linux") or any(any(dev.glob(pattern)) for pattern in DEVICE_FILES)


def candidates() -> Iterator[Candidate]:
    """GPUs of this machine, Vulkan's first, discrete ones before others, then by memory.

    OpenCL's loader is opened only where the caller goes on after Vulkan's."""
    for find in (_vulkan, _opencl):
        gpus = [gpu for gpu in find() if gpu.kind in GPU_KINDS]
        yield from sorted(gpus, key=lambda gpu: (GPU_KINDS.index(gpu.kind), -gpu.memory_bytes))


def _vulkan() -> list[Candidate]:
    from logitless.backends.vulkan.instance import all_devices

    try:
        physical = all_devices()
    except (DeviceError, OSError):
        return []
    return [
        Candidate(f"vulkan:{d.index}", d.name, d.kind, d.memory_bytes, d.identity, d.card)
        for d in physical
        if not d.missing
    ]


def _opencl() -> list[Candidate]:
    from logitless.backends.opencl.devices import find

    gpus = [d for d in find() if d.kind == "gpu"]
    return [
        Candidate(
            d.name,
            d.description,
            "integrated" if d.integrated else "discrete",
            d.memory_bytes,
            f"{d.description} {d.driver}".encode(),
            d.card,
        )
        for d in gpus
    ]


def judge(gpu: Candidate, open_backend: Open) -> Verdict:
    """The verdict on a GPU: an earlier one, or that of a trial now."""
    path = _path(gpu)
    if cached := disk_cache.read(path):
        return Verdict(**json.loads(cached))
    # a driver that ends the process is not tried again
    _keep(path, Verdict("its driver did not survive the trial"))
    try:
        verdict = trial(gpu.name, open_backend)
    except (DeviceError, OSError, MemoryError) as error:
        verdict = Verdict(" ".join(str(error).split()))
        _keep(path, None)
    else:
        _keep(path, verdict)
    log.info("%s: %s", gpu.text, verdict.fault or f"{verdict.speed:.2f} times the CPU's speed")
    return verdict


def trial(name: str, open_backend: Open) -> Verdict:
    """Compute the products on a device and on the CPU."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((PROMPT, K), np.float32)
    weights = [_weights(draw, n, k) for n, k in ((N, K), (32, N))]
    results, seconds = [], []
    for device in (name, "cpu"):
        backend = open_backend(device)
        try:
            result, time_of_all = _work(backend, x, weights)
        finally:
            backend.close()
        results.append(result)
        seconds.append(time_of_all)
    ours, cpu = results
    wrong = not np.isfinite(ours).all() or np.abs(ours - cpu).max() > TOLERANCE * np.abs(cpu).max()
    return Verdict("computes a product wrongly") if wrong else Verdict(speed=seconds[1] / seconds[0])


def _weights(draw: np.random.Generator, n: int, k: int) -> Bytes:
    """A matrix of Q8_0."""
    raw = draw.integers(0, 256, (n, k // 32, 34), np.uint8)
    raw[..., :2] = np.array([0.001], np.float16).view(np.uint8)  # scales
    return raw.reshape(-1)


def _work(backend: Backend, x: Floats, weights: Sequence[Bytes]) -> tuple[Floats, float]:
    """The result of a prompt's products, and seconds of the work that decides."""
    session = Session([backend])
    first = session.define("first", (N, K), "q8_0", lambda: weights[0], constant=True)
    second = session.define("second", (32, N), "q8_0", lambda: weights[1], constant=True)  # few results to fetch
    total, result = 0.0, x
    for rows, times in ((1, DECODE), (PROMPT, 1)):

        def build(rows: int = rows) -> list[Tensor]:
            return [linear(linear(feed("x", (rows, K)), first), second)]

        plan = session.cached_plan(("trial", rows), build)
        runs: list[float] = []
        while len(runs) < 2 or (len(runs) < RUNS and sum(runs[1:]) < PATIENCE_S):
            start = time.perf_counter()
            result = np.array(plan.run({"x": x[:rows]})[0])
            runs.append(time.perf_counter() - start)
        total += times * min(runs[1:])
    session.release()
    return result, total


def _keep(path: Path, verdict: Verdict | None) -> None:
    """Store a verdict; None: the next start tries again."""
    disk_cache.write(path, json.dumps(asdict(verdict)).encode() if verdict else b"")


def _path(gpu: Candidate) -> Path:
    from logitless.backends.cores import cores
    from logitless.backends.host import isa

    of = hashlib.sha256(gpu.identity + f"{gpu.name} {isa()} {cores()}".encode()).hexdigest()
    return disk_cache.cache_folder() / "trust" / f"default-{of[:16]}"

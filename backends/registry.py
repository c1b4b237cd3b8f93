"""Backend registry: devices by name, and services of the CPU backend that need no open device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from logitless.backends import default_device as default_devices
from logitless.backends.default_device import AUTO, DefaultDevice
from logitless.backends.errors import DeviceError
from logitless.graph.backend import Backend
from logitless.graph.tensor import Tensor

if TYPE_CHECKING:
    from logitless.backends.cpu.threads.peaks import Peaks


def open_backends(names: Sequence[str], threads: int = 0) -> list[Backend]:
    """Open backends in this order, and last the CPU if it is not named: it runs every op.

    `names`: of devices; `auto` stands for those of `default_device`.
    `threads`: of the CPU, 0 for every core. DeviceError names a device that is missing, and why."""
    opened: list[Backend] = []
    try:
        named = [n for name in names for n in (default_device(threads).names if name == AUTO else (name,))]
        for name in dict.fromkeys((*named, "cpu")):
            opened.append(_open_backend(name, threads))
            _check_cards(opened)
    except Exception:
        for backend in opened:
            backend.close()
        raise
    return opened


def _check_cards(backends: Sequence[Backend]) -> None:
    """DeviceError where the last device is the card of another: its memory would count twice."""
    *others, last = backends
    for other in others:
        if last.card and last.card == other.card:
            raise DeviceError(f"devices {other.name} and {last.name} are one card under two drivers: name one")


def default_device(threads: int = 0) -> DefaultDevice:
    """The devices to use where the user names none, and why. `threads`: as in `open_backends`."""
    return default_devices.default_device(lambda name: _open_backend(name, threads))


def can_open(name: str) -> bool:
    """True if the device can be opened now."""
    try:
        _open_backend(name, 1).close()
    except DeviceError:
        return False
    return True


def _open_backend(name: str, threads: int) -> Backend:
    if name == "cpu":
        from logitless.backends.cpu.backend import CPUBackend

        return CPUBackend(threads)
    if name.startswith("opencl"):
        from logitless.backends.opencl.backend import OpenCLBackend

        return OpenCLBackend(name)
    if name.startswith("vulkan"):
        from logitless.backends.vulkan.backend import VulkanBackend

        return VulkanBackend(name)
    if name.startswith("rpc:"):
        from logitless.backends.rpc.backend import RemoteBackend

        return RemoteBackend(name)
    raise DeviceError(f"device {name!r} is not available: see `logitless devices`")


def prefetch_kernels() -> None:
    """Start to compile the CPU kernels that every model needs and that are not cached; returns at once."""
    from logitless.backends.cpu.compiler import warmup

    warmup.begin()


def finish_compiling() -> None:
    """Wait until the CPU kernels are cached whose compilation has begun in the background."""
    from logitless.backends.cpu.compiler import jit

    jit.finish()


def on_compile(report: Callable[[str, int], None] | None) -> None:
    """Call `report` before each CPU kernel is compiled, with its name and how many kernels wait behind it."""
    from logitless.backends.cpu.compiler import jit

    jit.on_compile = report


def has_cpu_kernel(t: Tensor) -> bool:
    """True when the CPU runs this node by a kernel, not by its numpy reference. Nothing is compiled."""
    from logitless.backends.cpu.lowering.registry import LOWERINGS

    rule = LOWERINGS.get(t.op)
    return rule is not None and rule(t, lambda _: 0) is not None


def cpu_peaks(backend: Backend) -> Peaks:
    """A meter of the CPU's memory bandwidth and multiply-adds a second, on the threads of this
    backend.

    TypeError for a backend of another device."""
    from logitless.backends.cpu.backend import CPUBackend
    from logitless.backends.cpu.threads.peaks import Peaks

    if not isinstance(backend, CPUBackend):
        raise TypeError(f"{backend.name} is not the CPU")
    return Peaks(backend.pool)

"""Devices by their names."""

from __future__ import annotations

from collections.abc import Sequence

from logitless.backends.errors import DeviceError
from logitless.graph.backend import Backend


def open_backends(names: Sequence[str], threads: int = 0) -> list[Backend]:
    """Backends in the order given; the CPU is added last when it is not named, because it runs every op.

    DeviceError says in one line which of them is not there, and why.
    """
    opened: list[Backend] = []
    try:
        for name in dict.fromkeys((*names, "cpu")):
            opened.append(_open_backend(name, threads))
    except Exception:
        for backend in opened:
            backend.close()
        raise
    return opened


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

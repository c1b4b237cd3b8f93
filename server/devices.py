"""Devices by name: what `--device` accepts, in order of preference."""

from __future__ import annotations

from collections.abc import Sequence

from graph.backend import Backend


class DeviceError(ValueError):
    """A device that this version or this machine does not have; the message names it."""


def open_backends(names: Sequence[str], threads: int = 0) -> list[Backend]:
    """Backends in the order given; the CPU is added last when it is not named, because it runs every op."""
    from backends.cpu.backend import CPUBackend

    for name in names:
        if name != "cpu":
            raise DeviceError(f"device {name!r} is not available: this version runs on cpu")
    return [CPUBackend(threads)]

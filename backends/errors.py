"""Errors of devices, for every backend."""

from __future__ import annotations


class DeviceError(ValueError):
    """A device is missing or unusable; the message names it in one line."""


class KernelRefused(OSError):
    """A driver does not compile a kernel."""


class DeviceLost(OSError):
    """A device stopped working in use: a reset, a failed driver, an unplugged card."""

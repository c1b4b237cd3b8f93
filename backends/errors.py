"""What can go wrong with a device, for every backend."""

from __future__ import annotations


class DeviceError(ValueError):
    """A device that this machine does not have, or that cannot be used; the message names it in one line."""


class DeviceLost(OSError):
    """A device stopped working while it was in use: a reset, a driver that gave up, an unplugged card."""

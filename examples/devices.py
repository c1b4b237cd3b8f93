"""Command line of the examples: devices, threads, seed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from logitless.backends.errors import DeviceError
from logitless.backends.registry import open_backends
from logitless.engine.loading.options import OPTIONS, OptionError
from logitless.graph.execution.session import Session
from logitless.training.errors import TrainingError


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the flags that all examples have."""
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--device", default="cpu", help="such as cpu, opencl, vulkan, or several with commas")
    flags.add_argument("-t", "--threads", type=int, default=0, help="of the CPU; 0: all cores")
    flags.add_argument("-s", "--seed", type=int, default=1337, help="of everything random")
    return flags


@contextmanager
def open_session(o: argparse.Namespace) -> Iterator[Session]:
    """A session on the devices that the flags name. SystemExit names in one line the fault of
    a device, a file or a size."""
    try:
        session = Session(open_backends(OPTIONS["device"].check(o.device).split(","), o.threads))
        try:
            yield session
        finally:
            session.close()
    except (DeviceError, OptionError, TrainingError, OSError) as error:
        raise SystemExit(f"error: {error}") from None

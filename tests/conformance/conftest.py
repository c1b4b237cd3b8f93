"""Backends on which every case of the registry runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.backend import Backend


@pytest.fixture(scope="module", params=["cpu-1", "cpu-2", "opencl:0", "vulkan:0"])
def backend(request: pytest.FixtureRequest, open_device: Callable[[str], Backend]) -> Iterator[Backend]:
    if request.param.startswith("cpu"):
        made = CPUBackend(int(request.param[-1]))
        yield made
        made.close()
    else:
        yield open_device(request.param)

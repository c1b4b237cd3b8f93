"""Launches straight into the driver: a step has hundreds, and each costs 2 µs so, 9 µs through the binding.

The functions are those of the loader that the binding itself is linked with. Python's lock is kept: a launch only puts
kernels into a queue, and to get the lock back hundreds of times a step would cost more.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pyopencl as cl

Launch = tuple[Any, tuple[int, int, int], tuple[int, int, int]]  # kernel, threads in all, threads a group
Sizes = ctypes.c_size_t * 3


@functools.cache
def _function() -> Any:
    """clEnqueueNDRangeKernel; None where the loader's functions cannot be found so (Windows)."""
    try:
        found = ctypes.PyDLL(cl._cl.__file__).clEnqueueNDRangeKernel
    except (AttributeError, OSError):
        return None
    pointer = ctypes.c_void_p
    found.argtypes = [pointer, pointer, ctypes.c_uint, pointer, pointer, pointer, ctypes.c_uint, pointer, pointer]
    found.restype = ctypes.c_int
    return found


def bound(queue: Any, launches: Sequence[Launch]) -> Callable[[], None]:
    """A function that queues these kernels in order. It raises what the binding would."""
    function = _function()
    if function is None:
        return lambda: _by_binding(queue, launches)
    q = queue.int_ptr
    calls = [(q, k.int_ptr, 3, None, Sizes(*size), Sizes(*local), 0, None, None) for k, size, local in launches]
    kept = list(launches)  # kernels live as long as the function does

    def run() -> None:
        for call in calls:
            if function(*call):
                _by_binding(queue, kept)  # once more, for the error and its name
                return

    return run


def _by_binding(queue: Any, launches: Sequence[Launch]) -> None:
    for kernel, size, local in launches:
        cl.enqueue_nd_range_kernel(queue, kernel, size, local)

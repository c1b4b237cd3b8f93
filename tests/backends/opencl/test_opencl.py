"""The OpenCL backend itself: a refused launch is a lost device, and plans that are gone leave nothing behind."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from logitless.backends.errors import DeviceLost
from logitless.graph.backend import Backend, Place
from logitless.graph.execution.session import Session
from logitless.graph.ops.elementwise import add, mul
from logitless.graph.ops.norm import rms_norm
from logitless.graph.tensor import Tensor, feed

if TYPE_CHECKING:
    from logitless.backends.opencl.backend import OpenCLBackend


@pytest.fixture
def device(open_device: Callable[[str], Backend]) -> OpenCLBackend:
    return cast("OpenCLBackend", open_device("opencl:0"))


def program(device: OpenCLBackend) -> Any:
    import pyopencl as cl

    return cl.Program(device._context, "__kernel void f(__global float *x, const ulong at) { x[at] = 1; }").build([])


def test_a_refused_launch_is_a_lost_device(device: OpenCLBackend) -> None:
    launches = device.launches()
    launches.add(program(device), "f", [], (1, 1, 1), 1)  # nothing is bound
    with pytest.raises(DeviceLost, match=r"opencl:0: clEnqueueNDRangeKernel failed with -52"):  # CL_INVALID_KERNEL_ARGS
        device.queue(launches)


def test_a_kernel_that_a_program_lacks_and_an_argument_of_the_wrong_size(device: OpenCLBackend) -> None:
    import pyopencl as cl

    made = program(device)
    with pytest.raises(cl.Error, match="clCreateKernel failed with -46"):  # CL_INVALID_KERNEL_NAME
        device.launches().add(made, "g", [], (1, 1, 1), 1)
    with pytest.raises(cl.Error, match="clSetKernelArg failed with -51"):  # CL_INVALID_ARG_SIZE
        device.launches().add(made, "f", [b"", b"\0" * 3], (1, 1, 1), 1)


def test_bound_kernels_run_and_are_given_back_with_their_plan(device: OpenCLBackend) -> None:
    made, memory = program(device), device.alloc(8)
    before = made.reference_count
    launches = device.launches()
    arguments = [struct.pack("@P", memory.buffer.int_ptr), struct.pack("@Q", 1)]
    launches.add(made, "f", arguments, (1, 1, 1), 1)
    device.queue(launches)
    assert device.download(Place(memory), 8).view("f4").tolist() == [0.0, 1.0]
    held = made.reference_count
    del launches
    end = time.monotonic() + 10
    while made.reference_count > before and time.monotonic() < end:  # PoCL's thread forgets its command a moment later
        pass
    counts = "Portable Computing Language" in device.identity  # NVIDIA's kernels are not counted
    assert (held, made.reference_count) == (before + counts, before)


@pytest.mark.parametrize(("workers", "patience"), [(2, 1000), (3, 0)], ids=["two", "three that leave at once"])
def test_many_launches_are_one_to_the_same_bits(
    workers: int, patience: int, device: OpenCLBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages of one group and of many, whose sums need all of the stage before."""
    if device.chains is None:
        pytest.skip("groups are no threads of this process")
    from logitless.backends.opencl import chain
    from logitless.backends.opencl.backend import OpenCLBackend, OpenCLProgram

    def build() -> list[Tensor]:
        y, w = feed("x", (37, 96)), feed("w", (96,))
        for i in range(20):
            y = add(rms_norm(y, w, eps=1e-5), y) if i % 2 else mul(y, rms_norm(y, w, eps=1e-5))
        return [y]

    feeds = {
        name: np.random.default_rng(3).normal(size=n).astype(np.float32) for name, n in (("x", (37, 96)), ("w", 96))
    }
    session = Session([device])
    monkeypatch.setattr(chain, "LEAST", 1000)
    (alone,) = session.plan(build).run(feeds)
    monkeypatch.setattr(chain, "LEAST", 40)
    monkeypatch.setattr(chain, "PATIENCE", patience)
    other = OpenCLBackend("opencl:0")
    assert other.chains is not None
    other.chains.workers = workers
    plan = Session([other]).plan(build)
    (program,) = cast("list[OpenCLProgram]", plan.programs)
    assert len(program._launches._rows) == chain.TRIES
    for _ in range(3):  # what is counted begins with zeros again
        assert plan.run(feeds)[0].tobytes() == alone.tobytes()
    other.close()

"""OpenCL backend: kernels with bound arguments on one in-order queue."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from logitless.backends.errors import DeviceLost, KernelRefused
from logitless.backends.gpu import device as kernels
from logitless.backends.gpu.language.dialect import CPU, KERNELS, Defines, Shape
from logitless.backends.gpu.lowering import Dispatch
from logitless.backends.host_memory import STATES_SLAB, Slabs
from logitless.backends.opencl.devices import OpenCLDeviceInfo, device_named
from logitless.backends.submissions import DeviceProgram, Launch, Stopwatch, prepared
from logitless.graph.backend import Bytes, Location
from logitless.graph.tensor import Tensor

if TYPE_CHECKING:
    from logitless.backends.opencl.native_launch import Kernels, Row, Table

ALIGNMENT = 128
SLACK = 64  # bytes after a buffer: lanes that are masked read there


class OpenCLMemory:
    """A buffer of the device."""

    __slots__ = ("buffer", "nbytes")

    def __init__(self, buffer: Any, nbytes: int) -> None:
        self.buffer, self.nbytes = buffer, nbytes


class OpenCLBackend(kernels.GPUBackend):
    """An OpenCL device. DeviceError when it does not exist. Used by one thread at a time."""

    alignment = ALIGNMENT

    def __init__(self, name: str = "opencl:0") -> None:
        from logitless.backends.opencl.programs import Programs, use_cache_of_pocl

        super().__init__()
        use_cache_of_pocl()
        import pyopencl as cl

        info = device_named(name)
        self._cl, self.device, self.name, self.memory_bytes = cl, info, info.name, info.memory_bytes
        self.shape, self.card = _shape(info), info.card
        self.rates.compiles_late = info.kind == "cpu"
        self._context = cl.Context([info.device])
        self._queue = cl.CommandQueue(self._context)
        self.identity = f"{info.description} {info.driver}"
        self.programs = Programs(self._context, self.identity, self.shape)
        # this process' memory is the device's
        self._slabs = Slabs(STATES_SLAB) if info.kind == "cpu" else None
        self._scratch: OpenCLMemory | None = None  # of whichever program runs
        self._sending: list[Any] = []  # memory that uploads still read
        self.stopwatch = Stopwatch()

    def alloc(self, nbytes: int, *, feeds: bool = False) -> OpenCLMemory:
        size, flags = -(-nbytes // 4) * 4 + SLACK, self._cl.mem_flags
        try:
            # in large pages, which drivers do not ask for, and zero already
            if self._slabs is not None:
                host_array = self._slabs.take(size)
                buffer = self._cl.Buffer(self._context, flags.READ_WRITE | flags.USE_HOST_PTR, hostbuf=host_array)
                return OpenCLMemory(buffer, nbytes)
            buffer = self._cl.Buffer(self._context, flags.READ_WRITE, size)
            self._cl.enqueue_fill_buffer(self._queue, buffer, np.zeros(1, np.uint32), 0, size)
            return OpenCLMemory(buffer, nbytes)
        except self._cl.Error as error:
            raise self._translated(error) from error

    def free_bytes(self) -> int:
        try:  # of AMD's drivers, in KiB
            return int(self.device.device.get_info(self._cl.device_info.GLOBAL_FREE_MEMORY_AMD)[0]) << 10
        except (self._cl.Error, AttributeError, IndexError):
            return self.memory_bytes

    def load(self, t: Tensor, raw: Bytes) -> OpenCLMemory:
        packed = np.ascontiguousarray(kernels.pack(t, raw, self.shape))
        memory = self.alloc(len(packed))
        try:
            self._cl.enqueue_copy(self._queue, memory.buffer, packed, is_blocking=True)
        except self._cl.Error as error:
            raise self._translated(error) from error
        return memory

    def upload(self, location: Location, data: Bytes) -> None:
        copy = np.array(data)
        self._sending.append(copy)
        try:
            self._cl.enqueue_copy(
                self._queue, location.buffer.buffer, copy, dst_offset=location.offset, is_blocking=False
            )
        except self._cl.Error as error:
            raise self._translated(error) from error

    def download(self, location: Location, nbytes: int) -> Bytes:
        out = np.empty(nbytes, np.uint8)
        try:
            if nbytes:
                source, at = location.buffer.buffer, location.offset
                self.stopwatch.wait(
                    lambda: self._cl.enqueue_copy(self._queue, out, source, src_offset=at, is_blocking=True)
                )
        except self._cl.Error as error:
            raise self._translated(error) from error
        self._sending.clear()
        return out

    def wait(self) -> None:
        try:
            self.stopwatch.wait(self._queue.finish)
        except self._cl.Error as error:
            raise self._translated(error) from error

    def compile(self, nodes: Sequence[Tensor], locate: Callable[[Tensor], Location]) -> OpenCLProgram:
        try:
            return OpenCLProgram(self, self._bound(kernels.lower_all(nodes, self.shape), locate))
        except self._cl.Error as error:
            raise self._translated(error) from error

    def _bound(self, dispatches: Sequence[Dispatch], locate: Callable[[Tensor], Location]) -> list[Launch]:
        """Launches with bound arguments."""
        from logitless.backends.opencl.native_launch import Kernels

        bound, scratch = Kernels(), max((d.scratch for d in dispatches), default=0)
        places: dict[Tensor | None, Location] = {None: Location(self.scratch(scratch))} if scratch else {}
        contents = []
        for d in dispatches:
            arguments: list[bytes] = []
            memories = []
            for tensor, offset in d.buffers:
                if tensor not in places:
                    assert tensor is not None
                    places[tensor] = locate(tensor)
                at = places[tensor]
                memories.append(at.buffer)
                arguments += struct.pack("@P", at.buffer.buffer.int_ptr), struct.pack("@Q", at.offset + offset)
            arguments += (struct.pack("@I", word) for word in d.words)
            bind = functools.partial(self._row, bound, d.kernel, d.groups, arguments)
            if d.choice is None:
                contents.append(_Content(bind(d.defines), bound, memories))
            else:
                number = d.choice.of_run(locate(d.choice.by).host)
                variants = [functools.partial(bind, defines) for defines in d.choice.variants]
                contents.append(_Content((), bound, memories, number, variants))
        return prepared(dispatches, contents, self.rates)

    def _row(
        self, bound: Kernels, kernel: str, groups: Sequence[int], arguments: Sequence[bytes], defines: Defines
    ) -> Row:
        """A launch with bound arguments of a variant of a kernel, which is compiled at its first use."""
        program, threads = self.programs.program(kernel, defines), KERNELS[kernel].threads(defines)
        return bound.bind(program, kernel, arguments, groups, threads)

    def table(self, launches: Sequence[Launch], variant: int) -> Table:
        """A submission of launches; those that have variants are of this one."""
        from logitless.backends.opencl.native_launch import table

        contents: list[_Content] = [launch.content for launch in launches]
        try:
            return table([c.variants[variant]() if c.variants else c.row for c in contents])
        except self._cl.Error as error:
            raise self._translated(error) from error

    def scratch(self, nbytes: int) -> OpenCLMemory:
        """Scratch memory that every program may use while it runs."""
        if self._scratch is None or self._scratch.nbytes < nbytes:
            self._scratch = self.alloc(nbytes)
        return self._scratch

    def queue(self, launches: Table) -> None:
        """Queue a submission of launches, which run in order; returns at once."""
        from logitless.backends.opencl.native_launch import queue_all

        try:
            queue_all(self._queue, launches)
            self._queue.flush()
        except self._cl.Error as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> Exception:
        """A driver error as the engine knows it: MemoryError, KernelRefused or DeviceLost."""
        line = f"{self.name}: {error}".replace("\n", " ")
        out_of_memory = (
            self._cl.status_code.MEM_OBJECT_ALLOCATION_FAILURE,
            self._cl.status_code.OUT_OF_HOST_MEMORY,
            self._cl.status_code.INVALID_BUFFER_SIZE,
        )
        code = getattr(error, "code", None)
        if code in (self._cl.status_code.BUILD_PROGRAM_FAILURE, self._cl.status_code.INVALID_KERNEL):
            return KernelRefused(line)
        return MemoryError(line) if code in out_of_memory else DeviceLost(line)

    def close(self) -> None:
        self.closed = True
        self._queue.finish()
        self._sending.clear()
        self._scratch = None


def _shape(info: OpenCLDeviceInfo) -> Shape:
    if info.kind == "cpu":
        return Shape("cpu", max(CPU.units, 4 * info.units), threads=info.threads, local_bytes=info.local_bytes)
    return Shape("simt", 8 * info.units, threads=info.threads, local_bytes=info.local_bytes)


@dataclass(frozen=True, slots=True)
class _Content:
    """A launch, and the objects that it refers to."""

    row: Row
    kernels: Kernels
    memories: Sequence[OpenCLMemory]
    number: Callable[[], int] | None = None  # of the variant of a run
    variants: Sequence[Callable[[], Row]] = ()  # instead of `row`

    def part(self, first: int, count: int) -> _Content:
        from logitless.backends.opencl.native_launch import part

        return replace(self, row=part(self.row, first, count))


class OpenCLProgram(DeviceProgram):
    """Kernels with bound arguments. Launches that have variants are bound anew for each, at its first use."""

    def submission(self, launches: Sequence[Launch], variant: int) -> Table:
        table: Table = self._backend.table(launches, variant)
        return table

    def run(self) -> None:
        tables = self.of_run()
        self._backend.stopwatch.start(self)
        for launches in tables:
            self._backend.queue(launches)


OpenCLBackend.program = OpenCLProgram

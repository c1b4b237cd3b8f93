"""Vulkan backend: kernels of backends/gpu as SPIR-V, recorded command buffers per program."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from logitless.backends.errors import DeviceError
from logitless.backends.gpu import device as shared
from logitless.backends.gpu.language.dialect import KERNELS, Defines, Kernel
from logitless.backends.gpu.lowering import Dispatch
from logitless.backends.submissions import DeviceProgram, Launch, prepared
from logitless.backends.vulkan import autotune
from logitless.backends.vulkan.device import Device, VulkanMemory
from logitless.backends.vulkan.instance import all_devices, free_bytes
from logitless.backends.vulkan.pipelines import Pipelines
from logitless.backends.vulkan.record import Range, Recording
from logitless.graph.backend import Bytes, Location
from logitless.graph.tensor import Tensor

ALIGNMENT = 64
STAGING_NBYTES = 16 << 20
RESULT_NBYTES = 1 << 16  # bytes of a result that is copied by a submission behind the running one


class VulkanBackend(shared.GPUBackend):
    """A Vulkan device; `vulkan` is the first. `validation` and `mapped` are for tests: see Instance and Device."""

    alignment = ALIGNMENT

    def __init__(self, name: str = "vulkan:0", *, validation: bool = False, mapped: bool = True) -> None:
        super().__init__()
        index = int(name.partition(":")[2] or 0)
        self.name = f"vulkan:{index}"
        try:
            devices = all_devices(validation)
            if index >= len(devices):
                raise DeviceError(f"this machine has vulkan:0 to {len(devices) - 1}")
            if devices[index].missing:
                raise DeviceError(f"{devices[index].name} lacks {devices[index].missing}")
        except DeviceError as error:
            raise DeviceError(f"device {self.name!r} is not available: {error}") from None
        self.card = devices[index].card
        self.device, self.memory_bytes = Device(devices[index], mapped=mapped), devices[index].memory_bytes
        self.pipelines = Pipelines(self.device)
        self.shape = autotune.class_of(devices[index])
        self.rates.compiles_late = devices[index].kind == "cpu"
        self._staging: VulkanMemory | None = None
        self._scratch: VulkanMemory | None = None
        self._copies, self._last = Recording(self.device), Recording(self.device)
        self._results: VulkanMemory | None = None
        choice = autotune.known(devices[index]) or autotune.measure(self)
        self.shape = replace(self.shape, coop=choice.rows if choice.used else 0)
        self.identity = f"{devices[index].name} {devices[index].driver}{' with dot products' * self.shape.dot}"
        self.identity += f" and matrices of {devices[index].matrices}" * choice.used

    def alloc(self, nbytes: int, *, feeds: bool = False) -> VulkanMemory:
        memory = self.device.memory(nbytes, "feeds" if feeds else "device")
        if memory.array is not None:
            memory.array.fill(0)
        else:
            self._copies.begin()
            self._copies.fill_zero(memory)
            self._copies.finish()
            self._copies.submit()
        return memory

    def free_bytes(self) -> int:
        return free_bytes(self.device.info)

    def load(self, t: Tensor, raw: Bytes) -> VulkanMemory:
        packed = shared.pack(t, raw, self.shape)
        memory = self.device.memory(len(packed))
        self.upload(Location(memory), packed)
        return memory

    def upload(self, location: Location, data: Bytes) -> None:
        self.device.idle()
        memory: VulkanMemory = location.buffer
        if memory.array is not None:
            memory.array[location.offset : location.offset + len(data)] = data
            return
        for at in range(0, len(data), STAGING_NBYTES):
            part = data[at : at + STAGING_NBYTES]
            self.device.idle()
            staging, host_array = self._staged(len(part))
            host_array[: len(part)] = part
            self._copy(staging, 0, memory, location.offset + at, len(part))

    def download(self, location: Location, nbytes: int) -> Bytes:
        memory: VulkanMemory = location.buffer
        if memory.array is not None:
            self.device.idle()
            view: Bytes = memory.array[location.offset : location.offset + nbytes]
            return view
        if nbytes <= RESULT_NBYTES:
            return self._small(memory, location.offset, nbytes)
        self.device.idle()
        result = np.empty(nbytes, np.uint8)
        for at in range(0, nbytes, STAGING_NBYTES):
            n = min(STAGING_NBYTES, nbytes - at)
            staging, host_array = self._staged(n)
            self._copy(memory, location.offset + at, staging, 0, n)
            self.device.idle()
            result[at : at + n] = host_array[:n]
        return result

    def _small(self, memory: VulkanMemory, at: int, nbytes: int) -> Bytes:
        """Download few bytes, such as a step's tokens, by a copy that is recorded while the
        step runs, and follows it."""
        if self._results is None:
            self._results = self.device.memory(RESULT_NBYTES, "staging")
        self._last.begin()
        self._last.copy(memory, at, self._results, 0, nbytes)
        self._last.finish()
        self._last.submit(follows=True)
        self.device.idle()
        assert self._results.array is not None
        return self._results.array[:nbytes].copy()

    def _staged(self, nbytes: int) -> tuple[VulkanMemory, Bytes]:
        """Staging memory of at least so many bytes, visible to host and device."""
        if self._staging is None or self._staging.nbytes < nbytes:
            self._staging = self.device.memory(max(nbytes, 1 << 16), "staging")
        assert self._staging.array is not None
        return self._staging, self._staging.array

    def _copy(
        self, source: VulkanMemory, source_at: int, destination: VulkanMemory, destination_at: int, nbytes: int
    ) -> None:
        self._copies.begin()
        self._copies.copy(source, source_at, destination, destination_at, nbytes)
        self._copies.finish()
        self._copies.submit()

    def wait(self) -> None:
        self.device.idle()

    def compile(self, nodes: Sequence[Tensor], locate: Callable[[Tensor], Location]) -> VulkanProgram:
        work = shared.lower_all(nodes, self.shape)
        need = max((d.scratch for d in work), default=0)
        if need and (self._scratch is None or self._scratch.nbytes < need):
            self._scratch = self.device.memory(need)
        launches = _Binder(self, work, locate, self._scratch if need else None).launches
        return VulkanProgram(self, launches)

    def close(self) -> None:
        self.closed = True
        if self.device.open:
            self.pipelines.close()
            self.device.close()


@dataclass(frozen=True, slots=True)
class _Content:
    """A launch's commands, and the objects that they refer to."""

    kernel: Kernel
    variants: Sequence[Defines]  # of which `number` tells that of a run; one without it
    number: Callable[[], int] | None
    push: bytes
    groups: Sequence[int]
    reads: Sequence[Range]
    writes: Sequence[Range]
    memories: Sequence[VulkanMemory]
    base: Sequence[int] = (0, 0, 0)

    def part(self, first: int, count: int) -> _Content:
        """A range of the groups, along the axis that has most."""
        axis = self.groups.index(max(self.groups))
        base, groups = list(self.base), list(self.groups)
        base[axis] += first
        groups[axis] = count
        return replace(self, base=base, groups=groups)


class _Binder:
    """Binds launches to memory. `launches` no longer refer to the graph or to the session."""

    def __init__(
        self,
        backend: VulkanBackend,
        work: Sequence[Dispatch],
        locate: Callable[[Tensor], Location],
        scratch: VulkanMemory | None,
    ) -> None:
        self._backend, self._place, self._scratch = backend, locate, scratch
        # the range where order matters
        self._places: dict[Tensor, tuple[Location, Range | None]] = {}
        self.launches = prepared(work, [self._bound(d) for d in work], backend.rates)

    def _bound(self, d: Dispatch) -> _Content:
        addresses, memories, reads, writes = [], [], [], []
        for arg, (t, offset) in zip(KERNELS[d.kernel].args, d.buffers, strict=True):
            span: Range | None
            if t is None:
                assert self._scratch is not None
                at, span = Location(self._scratch), (self._scratch.address, self._scratch.address + d.scratch)
            else:
                if t not in self._places:
                    self._places[t] = self._where(t, self._place(t))
                at, span = self._places[t]
            addresses.append(int(at.buffer.address + at.offset + offset))
            memories.append(at.buffer)
            if span is not None:
                if arg.access != "w":
                    reads.append(span)
                if arg.access != "r":
                    writes.append(span)
        push = struct.pack(f"<{len(addresses)}Q{len(d.words)}I", *addresses, *d.words)
        choice = d.choice
        variants: Sequence[Defines] = (d.defines,) if choice is None else choice.variants
        number = None if choice is None else choice.of_run(self._place(choice.by).host)
        return _Content(KERNELS[d.kernel], variants, number, push, d.groups, reads, writes, memories)

    def _where(self, t: Tensor, at: Location) -> tuple[Location, Range | None]:
        start = at.buffer.address + at.offset
        constant = t.op == "const" or (t.op == "variable" and t.attrs["constant"])
        return at, None if constant else (start, start + max(t.nbytes, 1))


class VulkanProgram(DeviceProgram):
    """Recorded launches. `run` submits them; readers of their results wait for the device."""

    def submission(self, launches: Sequence[Launch], variant: int) -> Recording:
        recording, pipelines = Recording(self._backend.device), self._backend.pipelines
        recording.begin()
        for launch in launches:
            c: _Content = launch.content
            pipeline = pipelines.get(c.kernel, c.variants[variant if c.number is not None else 0])
            recording.dispatch(pipeline, c.push, c.groups, c.reads, c.writes, c.base)
        recording.finish()
        return recording

    def prepare(self, variant: int) -> list[Recording]:
        ready: list[Recording] = super().prepare(variant)
        self._backend.pipelines.save()
        return ready

    def run(self) -> None:
        if not self.launches:
            return
        recordings, device = self.of_run(), self._backend.device
        device.idle()
        device.stopwatch.start(self)
        for i, recording in enumerate(recordings):
            recording.submit(follows=i > 0)


VulkanBackend.program = VulkanProgram

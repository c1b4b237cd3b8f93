"""Command buffers: recorded once, submitted often, with barriers only where they are needed."""

from __future__ import annotations

import weakref
from bisect import bisect
from collections.abc import Sequence
from typing import Any

from logitless.backends.vulkan import api
from logitless.backends.vulkan.api import Keep, binding, check
from logitless.backends.vulkan.device import Device
from logitless.backends.vulkan.pipelines import Pipeline

Range = tuple[int, int]  # device addresses: start, end


class Hazards:
    """Memory that commands wrote or read since the last barrier: decides where a barrier is needed."""

    def __init__(self) -> None:
        self._written, self._read = _Ranges(), _Ranges()

    def meets(self, reads: Sequence[Range], writes: Sequence[Range]) -> bool:
        """True if a command with these reads and writes needs a barrier first. The command is noted."""
        conflict = (
            any(self._written.overlap(r) for r in reads)
            or any(self._written.overlap(w) for w in writes)
            or any(self._read.overlap(w) for w in writes)
        )
        if conflict:
            self._written, self._read = _Ranges(), _Ranges()
        for r in reads:
            self._read.add(r)
        for w in writes:
            self._written.add(w)
        return conflict


class _Ranges:
    """A union of address ranges, kept as disjoint ones in order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def overlap(self, r: Range) -> bool:
        i = bisect(self._ends, r[0])  # the first that ends after r begins
        return i < len(self._ends) and self._starts[i] < r[1]

    def add(self, r: Range) -> None:
        start, end = r
        i = bisect(self._ends, start - 1)  # neighbours that touch become one
        j = i
        while j < len(self._starts) and self._starts[j] <= end:
            start, end = min(start, self._starts[j]), max(end, self._ends[j])
            j += 1
        self._starts[i:j], self._ends[i:j] = [start], [end]


class Recording:
    """A VkCommandBuffer: `begin`, record, `finish`, then `submit` again and again.

    A submission starts after the one before has ended. The host sees its writes when it has ended.
    """

    def __init__(self, device: Device) -> None:
        ffi, lib = self._api = binding()
        self.device, keep = device, Keep()
        info = keep.struct("CommandBufferAllocateInfo", commandPool=device.commands, commandBufferCount=1)
        self.handle = ffi.new("VkCommandBuffer *")
        check(lib.vkAllocateCommandBuffers(device.handle, info, self.handle), "vkAllocateCommandBuffers")
        weakref.finalize(self, device.discard_commands, self.handle)
        self._hazards = Hazards()
        self._bound: Any = None
        self._copied = False  # since the last barrier
        self._number = 0  # of its last submission
        everything = api.SHADER_READ | api.SHADER_WRITE | api.TRANSFER_READ | api.TRANSFER_WRITE
        writes = api.SHADER_WRITE | api.TRANSFER_WRITE
        self._keep = keep
        self._between = keep.struct("MemoryBarrier", srcAccessMask=writes, dstAccessMask=everything)
        shaders = api.SHADER_READ | api.SHADER_WRITE
        self._kernels = keep.struct("MemoryBarrier", srcAccessMask=api.SHADER_WRITE, dstAccessMask=shaders)
        self._to_host = keep.struct("MemoryBarrier", srcAccessMask=writes, dstAccessMask=api.HOST_READ)

    def begin(self) -> None:
        """Start to record; earlier commands are dropped."""
        if self._number > self.device.ended:
            self.device.idle()
        begin = Keep().struct("CommandBufferBeginInfo")
        check(binding()[1].vkBeginCommandBuffer(self.handle[0], begin), "vkBeginCommandBuffer")
        self._hazards, self._bound, self._copied = Hazards(), None, True
        self._barrier()

    def _barrier(self, *, copies: bool = False) -> None:
        """Record a barrier. One between kernels alone costs GPUs less."""
        ffi, lib = self._api
        kernels = not copies and not self._copied
        stages = api.STAGE_COMPUTE if kernels else api.STAGE_COMPUTE | api.STAGE_TRANSFER
        memory, null = self._kernels if kernels else self._between, ffi.NULL
        lib.vkCmdPipelineBarrier(self.handle[0], stages, stages, 0, 1, memory, 0, null, 0, null)
        self._copied = False

    def _order(self, reads: Sequence[Range], writes: Sequence[Range], *, copies: bool = False) -> None:
        if self._hazards.meets(reads, writes):
            self._barrier(copies=copies)
        self._copied |= copies

    def dispatch(
        self,
        pipeline: Pipeline,
        push: bytes,
        groups: Sequence[int],
        reads: Sequence[Range],
        writes: Sequence[Range],
        base: Sequence[int] = (0, 0, 0),
    ) -> None:
        """Record a launch. `base`: its first group."""
        ffi, lib = self._api
        self._order(reads, writes)
        commands = self.handle[0]
        if self._bound is not pipeline.handle:
            lib.vkCmdBindPipeline(commands, api.BIND_COMPUTE, pipeline.handle)
            self._bound = pipeline.handle
        lib.vkCmdPushConstants(commands, pipeline.layout, api.COMPUTE, 0, len(push), ffi.from_buffer(push))
        if any(base):
            lib.vkCmdDispatchBase(commands, *base, *groups)
        else:
            lib.vkCmdDispatch(commands, *groups)

    def copy(self, source: Any, source_at: int, destination: Any, destination_at: int, nbytes: int) -> None:
        """Copy bytes between two `Memory`s."""
        ffi, lib = self._api
        self._order(
            [(source.address + source_at, source.address + source_at + nbytes)],
            [(destination.address + destination_at, destination.address + destination_at + nbytes)],
            copies=True,
        )
        region = ffi.new("VkBufferCopy *", (source_at, destination_at, nbytes))
        lib.vkCmdCopyBuffer(self.handle[0], source.handle, destination.handle, 1, region)

    def fill_zero(self, memory: Any) -> None:
        """Fill a `Memory` with zeros."""
        self._order([], [(memory.address, memory.address + memory.nbytes)], copies=True)
        binding()[1].vkCmdFillBuffer(self.handle[0], memory.handle, 0, api.WHOLE_SIZE, 0)

    def finish(self) -> None:
        ffi, lib = self._api
        null, done = ffi.NULL, api.STAGE_COMPUTE | api.STAGE_TRANSFER
        lib.vkCmdPipelineBarrier(self.handle[0], done, api.STAGE_HOST, 0, 1, self._to_host, 0, null, 0, null)
        check(lib.vkEndCommandBuffer(self.handle[0]), "vkEndCommandBuffer")

    def submit(self, *, follows: bool = False) -> None:
        """Submit. `follows`: see Device.submit. It begins with a barrier, so it runs after
        what was submitted before."""
        self._number = self.device.submit(self.handle, follows=follows)

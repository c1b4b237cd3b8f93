"""Logical device: its queue, its memory, and one submission at a time on a timeline semaphore."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from logitless.backends.submissions import Stopwatch
from logitless.backends.vulkan import api
from logitless.backends.vulkan.api import Keep, binding, check
from logitless.backends.vulkan.instance import (
    COOPERATIVE_MATRIX,
    CORE_FEATURES,
    FEATURES,
    PORTABILITY_SUBSET,
    DeviceInfo,
    feature_chain,
)
from logitless.graph.backend import Bytes

ANY = 0xFFFFFFFF  # every memory type


class VulkanMemory:
    """A buffer with a device address. `array`: its bytes in this process, None if not host-visible."""

    __slots__ = ("__weakref__", "_finalizer", "address", "array", "handle", "nbytes")

    def __init__(self, device: Device, nbytes: int, kinds: tuple[int, ...]) -> None:
        """`kinds`: property flags, the best first. MemoryError when no memory of these kinds is left."""
        ffi, lib = binding()
        self.nbytes, keep = nbytes, Keep()
        info = keep.struct("BufferCreateInfo", size=nbytes, usage=api.USAGE)
        out = ffi.new("VkBuffer *")
        check(lib.vkCreateBuffer(device.handle, info, ffi.NULL, out), f"a buffer of {nbytes} bytes")
        self.handle = out[0]
        needs = ffi.new("VkMemoryRequirements *")
        lib.vkGetBufferMemoryRequirements(device.handle, self.handle, needs)
        flags = keep.struct("MemoryAllocateFlagsInfo", flags=api.ALLOCATE_DEVICE_ADDRESS)
        request = keep.struct("MemoryAllocateInfo", allocationSize=needs.size, pNext=flags)
        memory = ffi.new("VkDeviceMemory *")
        result = -2
        for kind in device.memory_types(needs.memoryTypeBits, kinds):
            request.memoryTypeIndex = kind
            result = lib.vkAllocateMemory(device.handle, request, ffi.NULL, memory)
            if result == 0:
                break
        if result:
            lib.vkDestroyBuffer(device.handle, self.handle, ffi.NULL)
            check(result, f"a buffer of {nbytes} bytes on {device.info.name}")
        self._finalizer = weakref.finalize(self, device.discard, self.handle, memory[0])
        check(lib.vkBindBufferMemory(device.handle, self.handle, memory[0], 0), "vkBindBufferMemory")
        self.array: Bytes | None = None
        if device.type_flags[request.memoryTypeIndex] & api.HOST_VISIBLE and kinds[0] & api.HOST_VISIBLE:
            start = ffi.new("void **")
            check(lib.vkMapMemory(device.handle, memory[0], 0, api.WHOLE_SIZE, 0, start), "vkMapMemory")
            self.array = np.frombuffer(ffi.buffer(start[0], nbytes), np.uint8)
        self.address = int(
            lib.vkGetBufferDeviceAddress(device.handle, keep.struct("BufferDeviceAddressInfo", buffer=self.handle))
        )

    def release(self) -> None:
        """Free the memory now."""
        self.array = None
        self._finalizer()


class Device:
    """A logical device. `mapped` False: act as if its memory were not host-visible, as on most discrete GPUs."""

    def __init__(self, info: DeviceInfo, *, mapped: bool = True) -> None:
        ffi, lib = binding()
        self.info, self.open = info, False
        keep = Keep()
        chain, structs = feature_chain(keep, info.api[0] << 22 | info.api[1] << 12, info.extensions)
        for name in CORE_FEATURES:
            setattr(chain.features, name, int(name in info.features))
        for struct, names in FEATURES.items():
            for name in names if struct in structs else ():
                setattr(structs[struct], name, int(name in info.features))
        queue = keep.struct("DeviceQueueCreateInfo", queueFamilyIndex=info.queue_family, queueCount=1)
        queue.pQueuePriorities = keep.new("float[]", [1.0])
        create_info = keep.struct("DeviceCreateInfo", pNext=chain, queueCreateInfoCount=1, pQueueCreateInfos=queue)
        extensions = sorted(info.extensions & {COOPERATIVE_MATRIX, PORTABILITY_SUBSET})
        create_info.enabledExtensionCount, create_info.ppEnabledExtensionNames = len(extensions), keep.names(extensions)
        device = ffi.new("VkDevice *")
        check(lib.vkCreateDevice(info.handle, create_info, ffi.NULL, device), f"opening {info.name}")
        self.handle, self.open = device[0], True
        out = ffi.new("VkQueue *")
        lib.vkGetDeviceQueue(self.handle, info.queue_family, 0, out)
        self.queue = out[0]
        memory = ffi.new("VkPhysicalDeviceMemoryProperties *")
        lib.vkGetPhysicalDeviceMemoryProperties(info.handle, memory)
        self.type_flags = [int(memory.memoryTypes[i].propertyFlags) for i in range(memory.memoryTypeCount)]
        both = api.HOST_VISIBLE | api.HOST_COHERENT
        unified = info.kind in ("integrated", "cpu") and mapped
        # A unified memory is read in place; otherwise results are copied to memory that the host
        # reads fast.
        self._kinds = {
            "device": (both | api.DEVICE_LOCAL | api.HOST_CACHED,) if unified else (api.DEVICE_LOCAL,),
            "feeds": (both | api.DEVICE_LOCAL, both) if mapped else (both,),
            "staging": (both | api.HOST_CACHED, both),
        }
        if not self.memory_types(ANY, self._kinds["device"]):
            self._kinds["device"] = (api.DEVICE_LOCAL,)
        pool = keep.struct("CommandPoolCreateInfo", queueFamilyIndex=info.queue_family, flags=api.RESETTABLE)
        out = ffi.new("VkCommandPool *")
        check(lib.vkCreateCommandPool(self.handle, pool, ffi.NULL, out), "vkCreateCommandPool")
        self.commands = out[0]
        kind = keep.struct("SemaphoreTypeCreateInfo", semaphoreType=api.TIMELINE)
        out = ffi.new("VkSemaphore *")
        semaphore = keep.struct("SemaphoreCreateInfo", pNext=kind)
        check(lib.vkCreateSemaphore(self.handle, semaphore, ffi.NULL, out), "vkCreateSemaphore")
        self.semaphore = out
        # of the last submission; the semaphore reaches it when that is done
        self._value = ffi.new("uint64_t *")
        self.ended = 0  # the last submission known to be done
        self.stopwatch = Stopwatch()
        self._live: weakref.WeakSet[VulkanMemory] = weakref.WeakSet()
        # buffer (None of commands) and memory, or commands
        self._garbage: list[tuple[Any, Any]] = []
        self._keep = keep = Keep()
        timeline = keep.struct("TimelineSemaphoreSubmitInfo", signalSemaphoreValueCount=1)
        timeline.pSignalSemaphoreValues = self._value
        self._submit = keep.struct("SubmitInfo", pNext=timeline, commandBufferCount=1, signalSemaphoreCount=1)
        self._submit.pSignalSemaphores = out
        self._wait = keep.struct("SemaphoreWaitInfo", semaphoreCount=1, pSemaphores=out, pValues=self._value)

    def memory_types(self, allowed: int, kinds: tuple[int, ...]) -> list[int]:
        """Indices of the memory types that have all of the flags, for each choice of flags in turn."""
        return [
            i
            for flags in kinds
            for i, has in enumerate(self.type_flags)
            if allowed >> i & 1 and has & flags == flags and has <= api.ORDINARY
        ]

    def memory(self, nbytes: int, use: str = "device") -> VulkanMemory:
        """`use`: "device", "feeds" (written by the host at every run), or "staging" (read by it)."""
        self.sweep()
        memory = VulkanMemory(self, -(-max(nbytes, 1) // 16) * 16, self._kinds[use])
        self._live.add(memory)
        return memory

    def discard(self, buffer: Any, memory: Any) -> None:
        """Free memory later: the garbage collector may call this on any thread."""
        self._garbage.append((buffer, memory))

    def discard_commands(self, commands: Any) -> None:
        """Free a command buffer (VkCommandBuffer *) later."""
        self._garbage.append((None, commands))

    def sweep(self) -> None:
        """Free discarded memory."""
        if self._garbage:
            ffi, lib = binding()
            self.idle()
            while self._garbage:
                buffer, memory = self._garbage.pop()
                if buffer is None:
                    lib.vkFreeCommandBuffers(self.handle, self.commands, 1, memory)
                else:
                    lib.vkDestroyBuffer(self.handle, buffer, ffi.NULL)
                    lib.vkFreeMemory(self.handle, memory, ffi.NULL)

    def submit(self, commands: Any, *, follows: bool = False) -> int:
        """Submit a recorded command buffer (VkCommandBuffer *) after the one before it has
        ended. Returns its number.

        `follows`: the device orders it after the one before, and the host does not wait. A wait
        then covers both."""
        if not follows:
            self.idle()
        self._submit.pCommandBuffers = commands
        self._value[0] += 1
        result = binding()[1].vkQueueSubmit(self.queue, 1, self._submit, binding()[0].NULL)
        if result:
            self.ended = self._value[0]
            check(result, f"a submission to {self.info.name}")
        return int(self._value[0])

    def idle(self) -> None:
        """Wait for the last submission. DeviceLost when it does not end."""
        if self.ended < self._value[0]:
            self.stopwatch.wait(self._await)

    def _await(self) -> None:
        result = binding()[1].vkWaitSemaphores(self.handle, self._wait, api.TIMEOUT_NS)
        self.ended = self._value[0]
        check(result, f"waiting for {self.info.name}")

    def close(self) -> None:
        """Destroy the device, and the memory of all buffers."""
        if self.open:
            ffi, lib = binding()
            lib.vkDeviceWaitIdle(self.handle)
            self.ended = self._value[0]
            for memory in list(self._live):
                memory.release()
            self.sweep()
            self.open = False
            lib.vkDestroySemaphore(self.handle, self.semaphore[0], ffi.NULL)
            lib.vkDestroyCommandPool(self.handle, self.commands, ffi.NULL)
            lib.vkDestroyDevice(self.handle, ffi.NULL)

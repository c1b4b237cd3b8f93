"""Views of buffers as texels: one descriptor set for all kernels, which are told the number of a view."""

from __future__ import annotations

from typing import Any

from logitless.backends.vulkan import api
from logitless.backends.vulkan.api import Keep, binding, check

MOST = 4096
TEXEL = 16  # bytes: four words


class Views:
    """Of a device. A view lives as long as its memory; its number is given to another one then."""

    def __init__(self, device: Any) -> None:
        ffi, lib = binding()
        self._device, self._free, keep = device, list(range(MOST))[::-1], Keep()
        binding_of = keep.new(
            "VkDescriptorSetLayoutBinding *",
            {"binding": 0, "descriptorType": api.UNIFORM_TEXELS, "descriptorCount": MOST, "stageFlags": api.COMPUTE},
        )
        flags = keep.struct("DescriptorSetLayoutBindingFlagsCreateInfo", bindingCount=1)
        flags.pBindingFlags = keep.new("uint32_t[]", [api.WRITTEN_LATER | api.PARTIALLY])
        info = keep.struct("DescriptorSetLayoutCreateInfo", flags=api.LAYOUT_WRITTEN_LATER, pNext=flags)
        info.bindingCount, info.pBindings = 1, binding_of
        self.layout = keep.new("VkDescriptorSetLayout *")
        check(lib.vkCreateDescriptorSetLayout(device, info, ffi.NULL, self.layout), "vkCreateDescriptorSetLayout")
        pool = keep.struct("DescriptorPoolCreateInfo", flags=api.POOL_WRITTEN_LATER, maxSets=1, poolSizeCount=1)
        pool.pPoolSizes = keep.new("VkDescriptorPoolSize *", (api.UNIFORM_TEXELS, MOST))
        self._pool = keep.new("VkDescriptorPool *")
        check(lib.vkCreateDescriptorPool(device, pool, ffi.NULL, self._pool), "vkCreateDescriptorPool")
        wanted = keep.struct("DescriptorSetAllocateInfo", descriptorPool=self._pool[0], descriptorSetCount=1)
        wanted.pSetLayouts = self.layout
        self.set = keep.new("VkDescriptorSet *")
        check(lib.vkAllocateDescriptorSets(device, wanted, self.set), "vkAllocateDescriptorSets")
        self._keep = keep

    def number(self, memory: Any, at: int) -> int:
        """Of the view of a `Memory` from byte `at`, made when it is asked for first. MemoryError after too many."""
        if memory.nbytes < at + TEXEL:
            return 0  # of a program that is made to be measured: its weights are nowhere yet, and it never runs
        if at not in memory.views:
            if not self._free:
                raise MemoryError(f"Vulkan: more than {MOST} views of weights")
            ffi, lib = binding()
            keep, number = Keep(), self._free.pop()
            length = (memory.nbytes - at) // TEXEL * TEXEL
            info = keep.struct("BufferViewCreateInfo", buffer=memory.handle, format=api.FOUR_WORDS)
            info.offset, info.range = at, length
            made = keep.new("VkBufferView *")
            check(lib.vkCreateBufferView(self._device, info, ffi.NULL, made), f"a view of {length} bytes")
            write = keep.struct("WriteDescriptorSet", dstSet=self.set[0], dstArrayElement=number, descriptorCount=1)
            write.descriptorType, write.pTexelBufferView = api.UNIFORM_TEXELS, made
            lib.vkUpdateDescriptorSets(self._device, 1, write, 0, ffi.NULL)
            memory.views[at] = number, made[0]
        return int(memory.views[at][0])

    def forget(self, number: int, view: Any) -> None:
        """A view that no kernel will read any more."""
        binding()[1].vkDestroyBufferView(self._device, view, binding()[0].NULL)
        self._free.append(number)

    def close(self) -> None:
        ffi, lib = binding()
        lib.vkDestroyDescriptorPool(self._device, self._pool[0], ffi.NULL)
        lib.vkDestroyDescriptorSetLayout(self._device, self.layout[0], ffi.NULL)

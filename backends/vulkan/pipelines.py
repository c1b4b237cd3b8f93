"""Compute pipelines by kernel and variant, and the driver's pipeline cache on disk."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logitless.backends import disk_cache
from logitless.backends.errors import DeviceLost, KernelRefused
from logitless.backends.gpu.language.dialect import SIMT, Defines, Kernel
from logitless.backends.vulkan.api import COMPUTE, DISPATCH_BASE, FULL_SUBGROUPS, Keep, binding, check
from logitless.backends.vulkan.device import Device

SHADERS = Path(__file__).parent / "shaders"
SOFT_SHADERS = SHADERS / "soft"  # of Vulkan on a CPU, for tests: a wheel has none of them
MANIFEST = SHADERS / "manifest.json"


@functools.cache
def manifest() -> dict[str, dict[str, str]]:
    """By file name: hashes of its GLSL source and of the file (scripts/build-shaders)."""
    entries: dict[str, dict[str, str]] = json.loads(MANIFEST.read_text(encoding="utf-8"))["shaders"]
    return entries


def shader_name(kernel: Kernel, defines: Defines) -> str:
    """The file of a variant: `linear-ROWS4-WG64.spv`, in `soft/` where no GPU uses it."""
    folder = "" if defines in kernel.variants(SIMT) else f"{SOFT_SHADERS.name}/"
    return folder + "-".join((kernel.name, *(f"{name}{value}" for name, value in defines))) + ".spv"


@dataclass(frozen=True)
class Pipeline:
    handle: Any
    layout: Any
    push_bytes: int


class Pipelines:
    """Pipelines of a device; `save` writes the driver's cache for the next start."""

    def __init__(self, device: Device) -> None:
        ffi, lib = binding()
        self.device = device
        self._pipelines: dict[tuple[str, Defines], Pipeline] = {}
        self._layouts: dict[int, Any] = {}  # by bytes of push constants
        self._unsaved = False
        self._path = (
            disk_cache.cache_folder() / "vulkan" / f"{hashlib.sha256(device.info.identity).hexdigest()[:16]}.cache"
        )
        keep, cached = Keep(), disk_cache.read(self._path)
        info = keep.struct("PipelineCacheCreateInfo", initialDataSize=len(cached), pInitialData=ffi.from_buffer(cached))
        out = ffi.new("VkPipelineCache *")
        check(lib.vkCreatePipelineCache(device.handle, info, ffi.NULL, out), "vkCreatePipelineCache")
        self._cache = out[0]

    def get(self, kernel: Kernel, defines: Defines) -> Pipeline:
        """The pipeline of a variant, compiled at first use. KernelRefused names one that the driver
        does not compile."""
        pipeline = self._pipelines.get((kernel.name, defines))
        if pipeline is None:
            pipeline = self._pipelines[kernel.name, defines] = self._make(kernel, defines)
            self._unsaved = True
        return pipeline

    def _make(self, kernel: Kernel, defines: Defines) -> Pipeline:
        ffi, lib = binding()
        keep, name = Keep(), shader_name(kernel, defines)
        code = (SHADERS / name).read_bytes()
        words = keep.new("uint32_t[]", len(code) // 4)
        ffi.memmove(words, code, len(code))
        module = ffi.new("VkShaderModule *")
        module_info = keep.struct("ShaderModuleCreateInfo", codeSize=len(code), pCode=words)
        _check(lib.vkCreateShaderModule(self.device.handle, module_info, ffi.NULL, module), f"shader {name}")
        try:
            push_bytes = 8 * len(kernel.args) + 4 * len(kernel.words)
            flags = DISPATCH_BASE if kernel.divisible else 0
            info = keep.struct("ComputePipelineCreateInfo", layout=self._layout(push_bytes), flags=flags)
            stage = keep.struct("PipelineShaderStageCreateInfo", stage=COMPUTE, module=module[0])
            stage.pName = keep.new("char[]", b"main")
            if kernel.special:
                self._fit_matrices(stage, kernel, keep)
            info.stage = stage[0]
            out = ffi.new("VkPipeline *")
            result = lib.vkCreateComputePipelines(self.device.handle, self._cache, 1, info, ffi.NULL, out)
            _check(result, f"compiling {name} for {self.device.info.name}")
        finally:
            lib.vkDestroyShaderModule(self.device.handle, module[0], ffi.NULL)
        return Pipeline(out[0], info.layout, push_bytes)

    def _fit_matrices(self, stage: Any, kernel: Kernel, keep: Keep) -> None:
        """Set the constants of this device's cooperative matrices, and the subgroup size that they need."""
        sizes = self.device.info.matrices
        if sizes is None:
            raise KernelRefused(f"{kernel.name}: {self.device.info.name} has no cooperative matrices that fit")
        _specialise(stage, [sizes.constants[name] for name in kernel.special], keep)
        stage.flags = FULL_SUBGROUPS
        if not sizes.fixed:
            stage.pNext = keep.struct(
                "PipelineShaderStageRequiredSubgroupSizeCreateInfo", requiredSubgroupSize=sizes.subgroup
            )

    def _layout(self, push_bytes: int) -> Any:
        """Pipeline layout for a size of push constants, which are all arguments."""
        if push_bytes not in self._layouts:
            ffi, lib = binding()
            keep = Keep()
            push = keep.new("VkPushConstantRange *", {"stageFlags": COMPUTE, "offset": 0, "size": push_bytes})
            info = keep.struct("PipelineLayoutCreateInfo", pushConstantRangeCount=1, pPushConstantRanges=push)
            out = ffi.new("VkPipelineLayout *")
            check(lib.vkCreatePipelineLayout(self.device.handle, info, ffi.NULL, out), "vkCreatePipelineLayout")
            self._layouts[push_bytes] = out[0]
        return self._layouts[push_bytes]

    def save(self) -> None:
        """Write the driver's cache if it has new pipelines."""
        if self._unsaved:
            self._unsaved = False
            ffi, lib = binding()
            size = ffi.new("size_t *")
            if lib.vkGetPipelineCacheData(self.device.handle, self._cache, size, ffi.NULL) == 0 and size[0]:
                data = ffi.new("char[]", size[0])
                if lib.vkGetPipelineCacheData(self.device.handle, self._cache, size, data) == 0:
                    disk_cache.write(self._path, bytes(ffi.buffer(data, size[0])))

    def close(self) -> None:
        self.save()
        ffi, lib = binding()
        lib.vkDeviceWaitIdle(self.device.handle)
        for pipeline in self._pipelines.values():
            lib.vkDestroyPipeline(self.device.handle, pipeline.handle, ffi.NULL)
        for layout in self._layouts.values():
            lib.vkDestroyPipelineLayout(self.device.handle, layout, ffi.NULL)
        lib.vkDestroyPipelineCache(self.device.handle, self._cache, ffi.NULL)
        self._pipelines.clear()
        self._layouts.clear()


def _check(result: int, what: str) -> None:
    """MemoryError, DeviceLost; KernelRefused for any other failure."""
    try:
        check(result, what)
    except DeviceLost:
        raise
    except OSError as error:
        raise KernelRefused(str(error)) from None


def _specialise(stage: Any, values: Sequence[int], keep: Keep) -> None:
    """Set specialisation constants, in the order in which the kernel declares them."""
    data = keep.new("uint32_t[]", list(values))
    entries = keep.new("VkSpecializationMapEntry[]", [(i, 4 * i, 4) for i in range(len(values))])
    stage.pSpecializationInfo = keep.new(
        "VkSpecializationInfo *", (len(values), entries, 4 * len(values), binding()[0].cast("void *", data))
    )

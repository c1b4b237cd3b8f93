"""Vulkan API: raw calls of the binding, struct makers, constants and errors.

The binding's own wrappers check the type of every argument of every call (1 to 3 µs), and free
nested structs too early. Raw calls through its `lib` take a third of that, and `Keep` holds nested
structs. All of them release the GIL."""

from __future__ import annotations

import functools
import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any

from logitless.backends.errors import DeviceError, DeviceLost

# Literals that the binding lacks or has wrong, and those used on hot paths.
WHOLE_SIZE = (1 << 64) - 1
API_1_2 = 1 << 22 | 2 << 12
API_1_3 = 1 << 22 | 3 << 12
COMPUTE = 0x20  # VK_SHADER_STAGE_COMPUTE_BIT
BIND_COMPUTE = 1
STAGE_COMPUTE, STAGE_TRANSFER, STAGE_HOST = 0x800, 0x1000, 0x4000
SHADER_READ, SHADER_WRITE = 0x20, 0x40
TRANSFER_READ, TRANSFER_WRITE = 0x800, 0x1000
HOST_READ = 0x2000
USAGE = 0x1 | 0x2 | 0x20 | 0x20000  # transfer source and destination, storage, device address
DEVICE_LOCAL, HOST_VISIBLE, HOST_COHERENT, HOST_CACHED = 1, 2, 4, 8
# all of these; memory types with other flags are protected, uncached or made for tiles
ORDINARY = 15
ALLOCATE_DEVICE_ADDRESS = 2
QUEUE_GRAPHICS, QUEUE_COMPUTE = 1, 2
RESETTABLE = 2  # command buffers of a pool, one by one
DISPATCH_BASE = 0x10  # VK_PIPELINE_CREATE_DISPATCH_BASE_BIT
FULL_SUBGROUPS = 2  # VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT
TIMELINE = 1
TIMEOUT_NS = 600 * 10**9  # of one submission

NOT_ENOUGH = {-1: "host memory", -2: "device memory", -1000072003: "device addresses"}
LOST = -4
TIMEOUT = 2

TYPES = {  # VkStructureType
    "ApplicationInfo": 0,
    "InstanceCreateInfo": 1,
    "DeviceQueueCreateInfo": 2,
    "DeviceCreateInfo": 3,
    "SubmitInfo": 4,
    "MemoryAllocateInfo": 5,
    "SemaphoreCreateInfo": 9,
    "BufferCreateInfo": 12,
    "ShaderModuleCreateInfo": 16,
    "PipelineCacheCreateInfo": 17,
    "PipelineShaderStageCreateInfo": 18,
    "ComputePipelineCreateInfo": 29,
    "PipelineLayoutCreateInfo": 30,
    "CommandPoolCreateInfo": 39,
    "CommandBufferAllocateInfo": 40,
    "CommandBufferBeginInfo": 42,
    "MemoryBarrier": 46,
    "PhysicalDeviceVulkan11Features": 49,
    "PhysicalDeviceVulkan11Properties": 50,
    "PhysicalDeviceVulkan12Features": 51,
    "PhysicalDeviceVulkan12Properties": 52,
    "PhysicalDeviceVulkan13Features": 53,
    "PhysicalDeviceVulkan13Properties": 54,
    "PhysicalDeviceFeatures2": 1000059000,
    "PhysicalDeviceProperties2": 1000059001,
    "PhysicalDeviceMemoryProperties2": 1000059006,
    "PhysicalDeviceMemoryBudgetPropertiesEXT": 1000237000,
    "MemoryAllocateFlagsInfo": 1000060000,
    "DebugUtilsMessengerCreateInfoEXT": 1000128004,
    "SemaphoreTypeCreateInfo": 1000207002,
    "TimelineSemaphoreSubmitInfo": 1000207003,
    "SemaphoreWaitInfo": 1000207004,
    "BufferDeviceAddressInfo": 1000244001,
    "ValidationFeaturesEXT": 1000247000,
    "PhysicalDeviceCooperativeMatrixFeaturesKHR": 1000506000,
    "CooperativeMatrixPropertiesKHR": 1000506001,
    "PipelineShaderStageRequiredSubgroupSizeCreateInfo": 1000225001,
}


HOMEBREW = ("/opt/homebrew", "/usr/local")
LOADERS = {  # by sys.platform
    "win32": ("vulkan-1.dll",),
    "darwin": (
        "libvulkan.1.dylib",
        "libMoltenVK.dylib",
        *(f"{folder}/lib/{name}.dylib" for folder in HOMEBREW for name in ("libvulkan.1", "libMoltenVK")),
    ),
}
OTHER_LOADERS = ("libvulkan.so.1", "libvulkan.so")  # of Linux and the BSDs


@functools.cache
def binding() -> tuple[Any, Any]:
    """The binding's `ffi`, and the loader that is opened with it. DeviceError without one of them.

    The package's own module knows fewer names of the loader, and takes longer to import."""
    package = importlib.util.find_spec("vulkan")
    if package is None or not package.submodule_search_locations:
        raise DeviceError("Vulkan: the Python package vulkan is missing")
    path = Path(package.submodule_search_locations[0]) / "_vulkancache.py"
    declarations = runpy.run_path(str(path))
    names = LOADERS.get(sys.platform, OTHER_LOADERS)
    for name in names:
        try:
            return declarations["ffi"], declarations["ffi"].dlopen(name)
        except OSError:
            continue
    raise DeviceError(f"Vulkan: no loader ({names[0]}): install a GPU driver with Vulkan")


def check(result: int, what: str) -> None:
    """Raise MemoryError or DeviceLost for those results of a call, OSError for any other failure."""
    if result == 0:
        return
    if result in NOT_ENOUGH:
        raise MemoryError(f"Vulkan: not enough {NOT_ENOUGH[result]} ({what})")
    if result == LOST:
        raise DeviceLost(f"Vulkan: the device was lost ({what})")
    if result == TIMEOUT:
        raise DeviceLost(f"Vulkan: the device did not finish within {TIMEOUT_NS // 10**9} s ({what})")
    raise OSError(f"Vulkan: {what} failed with VkResult {result}")


class Keep(list[Any]):
    """C memory that lives as long as this list."""

    def new(self, ctype: str, init: Any = None) -> Any:
        out = binding()[0].new(ctype, init)
        self.append(out)
        return out

    def struct(self, name: str, **fields: Any) -> Any:
        """A pointer to a Vk struct with its sType set."""
        out = self.new(f"Vk{name} *")
        out.sType = TYPES[name]
        for field, value in fields.items():
            setattr(out, field, value)
        return out

    def names(self, values: list[str]) -> Any:
        """char *[] of strings."""
        return self.new("char *[]", [self.new("char[]", v.encode()) for v in values])


def listed(call: Any, ctype: str, *before: Any, struct: str = "") -> list[Any]:
    """The items that a Vulkan function f(…, &count, array) enumerates. They point into memory
    that the list keeps.

    `struct`: the name in TYPES, where items have an sType."""
    ffi, _ = binding()
    count = ffi.new("uint32_t *")
    call(*before, count, ffi.NULL)
    array = ffi.new(f"{ctype}[]", max(count[0], 1))
    for i in range(count[0] if struct else 0):
        array[i].sType = TYPES[struct]
    call(*before, count, array)
    return _Items((array[i] for i in range(count[0])), array)


class _Items(list[Any]):
    def __init__(self, items: Any, array: Any) -> None:
        super().__init__(items)
        self.array = array  # structs among the items are views of it

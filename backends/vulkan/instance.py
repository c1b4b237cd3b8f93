"""Vulkan instance of the process, and its physical devices."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace
from typing import Any

from logitless.backends import disk_cache
from logitless.backends.errors import DeviceError
from logitless.backends.vulkan import coop_matrix as matrices
from logitless.backends.vulkan.api import API_1_2, API_1_3, QUEUE_COMPUTE, QUEUE_GRAPHICS, Keep, binding, check, listed

VALIDATION_LAYER = "VK_LAYER_KHRONOS_validation"
SYNCHRONIZATION = 4  # VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT
WARNING_AND_ERROR, ALL_TYPES = 0x1100, 7
CPU = 4  # VK_PHYSICAL_DEVICE_TYPE_CPU
KINDS = {0: "other", 1: "integrated", 2: "discrete", 3: "virtual", 4: "cpu"}
ORDER = {kind: i for i, kind in enumerate(("discrete", "integrated", "virtual", "other", "cpu"))}
FEATURES = {  # a device's features by struct; all that it has of these are enabled
    "PhysicalDeviceVulkan11Features": ("storageBuffer16BitAccess",),
    "PhysicalDeviceVulkan12Features": (
        "bufferDeviceAddress",
        "timelineSemaphore",
        "storageBuffer8BitAccess",
        "shaderFloat16",
        "shaderInt8",
        "vulkanMemoryModel",
        "vulkanMemoryModelDeviceScope",
    ),
    "PhysicalDeviceVulkan13Features": (
        "shaderIntegerDotProduct",
        "subgroupSizeControl",
        "computeFullSubgroups",
        "maintenance4",
    ),
    "PhysicalDeviceCooperativeMatrixFeaturesKHR": ("cooperativeMatrix",),
}
CORE_FEATURES = ("shaderInt16", "shaderInt64", "shaderFloat64")
REQUIRED = (
    "bufferDeviceAddress",
    "timelineSemaphore",
    "storageBuffer8BitAccess",
    "storageBuffer16BitAccess",
    "shaderInt16",
)
BALLOT = 8  # VK_SUBGROUP_FEATURE_BALLOT_BIT
COOPERATIVE_MATRIX = "VK_KHR_cooperative_matrix"
# Of drivers on another API, such as MoltenVK on Metal: the loader hides them from programs that do not
# enable the first, and a device that has the second wants it enabled.
PORTABILITY_ENUMERATION, PORTABILITY_SUBSET = "VK_KHR_portability_enumeration", "VK_KHR_portability_subset"
ENUMERATE_PORTABILITY = 1  # VK_INSTANCE_CREATE_ENUMERATE_PORTABILITY_BIT_KHR
MEMORY_BUDGET = "VK_EXT_memory_budget"


@dataclass(frozen=True)
class DeviceInfo:
    """A physical device. `missing`: why this backend cannot use it; empty when it can."""

    index: int
    name: str
    kind: str
    driver: str
    api: tuple[int, int, int]
    memory_bytes: int
    features: frozenset[str]
    extensions: frozenset[str]
    queue_family: int
    fast_dots: bool  # integer dot products of packed bytes are instructions of the device
    # constants of kernels with cooperative matrices on this device
    matrices: matrices.Matrices | None
    broadcasts: bool  # subgroups of eight lanes at least can tell each other values
    lanes: int  # of the smallest subgroup
    vendor: int
    max_invocations: int
    local_bytes: int  # most memory of a work group
    identity: bytes  # of device and driver version: caches are kept under it
    card: bytes  # the same for one card under two drivers
    missing: str
    handle: Any
    instance: Instance


class Instance:
    """VkInstance. `messages`: the validation layer's messages, when validation is on."""

    def __init__(self, validation: bool = False) -> None:
        # Mesa reads this when it starts. lavapipe's shader cache ignores the vector width, so each
        # width has a folder. Its default of 256 bits compiles twice as fast as 512.
        width = os.environ.get("LP_NATIVE_VECTOR_WIDTH", "256")
        os.environ.setdefault("MESA_SHADER_CACHE_DIR", str(disk_cache.writable_folder() / f"mesa-{width}"))
        ffi, self.lib = binding()
        self.keep = keep = Keep()
        self.messages: list[str] = []
        app = keep.struct("ApplicationInfo", apiVersion=API_1_3)
        info = keep.struct("InstanceCreateInfo", pApplicationInfo=app)
        extensions = []
        if PORTABILITY_ENUMERATION in _extensions(self.lib.vkEnumerateInstanceExtensionProperties, ffi.NULL):
            extensions.append(PORTABILITY_ENUMERATION)
            info.flags = ENUMERATE_PORTABILITY
        if validation:
            info.enabledLayerCount, info.ppEnabledLayerNames = 1, keep.names([VALIDATION_LAYER])
            extensions += ["VK_EXT_debug_utils", "VK_EXT_validation_features"]
            enabled = keep.new("VkValidationFeatureEnableEXT[]", [SYNCHRONIZATION])
            info.pNext = keep.struct(
                "ValidationFeaturesEXT", enabledValidationFeatureCount=1, pEnabledValidationFeatures=enabled
            )
        info.enabledExtensionCount, info.ppEnabledExtensionNames = len(extensions), keep.names(extensions)
        out = ffi.new("VkInstance *")
        result = self.lib.vkCreateInstance(info, ffi.NULL, out)
        if result == -9:
            raise DeviceError("Vulkan: no driver is installed (the loader finds none)")
        check(result, "vkCreateInstance")
        self.handle = out[0]
        if validation:
            self._listen()

    def _listen(self) -> None:
        ffi, lib = binding()

        @ffi.callback("PFN_vkDebugUtilsMessengerCallbackEXT")  # type: ignore[untyped-decorator]
        def heard(severity: int, kind: int, data: Any, user: Any) -> int:
            self.messages.append(ffi.string(data.pMessage).decode(errors="replace"))
            return 0

        self.keep.append(heard)
        info = self.keep.struct("DebugUtilsMessengerCreateInfoEXT")
        info.messageSeverity, info.messageType, info.pfnUserCallback = WARNING_AND_ERROR, ALL_TYPES, heard
        create = lib.vkGetInstanceProcAddr(self.handle, b"vkCreateDebugUtilsMessengerEXT")
        out = ffi.new("VkDebugUtilsMessengerEXT *")
        check(
            ffi.cast("PFN_vkCreateDebugUtilsMessengerEXT", create)(self.handle, info, ffi.NULL, out),
            "vkCreateDebugUtilsMessengerEXT",
        )

    def devices(self) -> list[DeviceInfo]:
        """Physical devices: discrete GPUs before integrated ones, then as the loader orders them."""
        handles = listed(self.lib.vkEnumeratePhysicalDevices, "VkPhysicalDevice", self.handle)
        devices = sorted((self._describe(i, handle) for i, handle in enumerate(handles)), key=lambda d: ORDER[d.kind])
        return [replace(d, index=i) for i, d in enumerate(devices)]

    def _describe(self, index: int, handle: Any) -> DeviceInfo:
        ffi, lib = binding()
        keep = Keep()
        properties = keep.struct("PhysicalDeviceProperties2")
        p11 = keep.struct("PhysicalDeviceVulkan11Properties")
        p12 = keep.struct("PhysicalDeviceVulkan12Properties", pNext=p11)
        p13 = keep.struct("PhysicalDeviceVulkan13Properties")
        lib.vkGetPhysicalDeviceProperties(handle, ffi.addressof(properties.properties))
        core = properties.properties
        api = (core.apiVersion >> 22, core.apiVersion >> 12 & 0x3FF, core.apiVersion & 0xFFF)
        extensions = _extensions(lib.vkEnumerateDeviceExtensionProperties, handle, ffi.NULL)
        features: set[str] = set()
        if core.apiVersion >= API_1_2:
            properties.pNext = p12
            if core.apiVersion >= API_1_3:
                p11.pNext = p13
            lib.vkGetPhysicalDeviceProperties2(handle, properties)
            chain, structs = feature_chain(keep, core.apiVersion, extensions)
            lib.vkGetPhysicalDeviceFeatures2(handle, chain)
            features = {n for n in CORE_FEATURES if getattr(chain.features, n)}
            features |= {n for name, s in structs.items() for n in FEATURES[name] if getattr(s, n)}
        memory = ffi.new("VkPhysicalDeviceMemoryProperties *")
        lib.vkGetPhysicalDeviceMemoryProperties(handle, memory)
        local = [memory.memoryHeaps[i].size for i in range(memory.memoryHeapCount) if memory.memoryHeaps[i].flags & 1]
        families = listed(lib.vkGetPhysicalDeviceQueueFamilyProperties, "VkQueueFamilyProperties", handle)
        # a queue without graphics has longer submissions and does not hold up the desktop
        able = [i for i, f in enumerate(families) if f.queueFlags & QUEUE_COMPUTE]
        able.sort(key=lambda i: families[i].queueFlags & QUEUE_GRAPHICS)
        if core.apiVersion < API_1_2:
            missing = f"Vulkan 1.2 (the driver has {api[0]}.{api[1]})"
        elif not able:
            missing = "a compute queue"
        else:
            missing = ", ".join(n for n in REQUIRED if n not in features)
        return DeviceInfo(
            index=index,
            name=ffi.string(core.deviceName).decode(errors="replace"),
            kind=KINDS.get(core.deviceType, "other"),
            driver=f"{ffi.string(p12.driverName).decode()} {ffi.string(p12.driverInfo).decode()}".strip(),
            api=api,
            memory_bytes=max(local, default=0),
            features=frozenset(features),
            extensions=extensions & {COOPERATIVE_MATRIX, MEMORY_BUDGET, PORTABILITY_SUBSET},
            queue_family=able[0] if able else 0,
            fast_dots=bool(p13.integerDotProduct4x8BitPackedSignedAccelerated),
            matrices=matrices.find(self.handle, handle, features, core, p11.subgroupSize, p13),
            broadcasts=p11.subgroupSize >= 8 and bool(p11.subgroupSupportedOperations & BALLOT),
            lanes=p13.minSubgroupSize or p11.subgroupSize,
            vendor=core.vendorID,
            max_invocations=min(core.limits.maxComputeWorkGroupInvocations, core.limits.maxComputeWorkGroupSize[0]),
            local_bytes=core.limits.maxComputeSharedMemorySize,
            identity=bytes(core.pipelineCacheUUID)
            + b"".join(n.to_bytes(4, "little") for n in (core.vendorID, core.deviceID, core.driverVersion)),
            card=bytes(p11.deviceLUID) if p11.deviceLUIDValid else bytes(p11.deviceUUID),
            missing=missing,
            handle=handle,
            instance=self,
        )


def _extensions(call: Any, *before: Any) -> frozenset[str]:
    """Names of the extensions that a Vulkan function lists."""
    ffi, _ = binding()
    return frozenset(ffi.string(e.extensionName).decode() for e in listed(call, "VkExtensionProperties", *before))


def free_bytes(info: DeviceInfo) -> int:
    """Bytes of the largest local heap that no process uses; all where the driver does not tell."""
    if MEMORY_BUDGET not in info.extensions:
        return info.memory_bytes
    keep = Keep()
    budget = keep.struct("PhysicalDeviceMemoryBudgetPropertiesEXT")
    properties = keep.struct("PhysicalDeviceMemoryProperties2", pNext=budget)
    binding()[1].vkGetPhysicalDeviceMemoryProperties2(info.handle, properties)
    heaps = properties.memoryProperties
    local = [(heaps.memoryHeaps[i].size, i) for i in range(heaps.memoryHeapCount) if heaps.memoryHeaps[i].flags & 1]
    if not local:
        return info.memory_bytes
    size, i = max(local)
    return min(int(size), max(0, int(budget.heapBudget[i]) - int(budget.heapUsage[i])))


def feature_chain(keep: Keep, api: int, extensions: frozenset[str]) -> tuple[Any, dict[str, Any]]:
    """VkPhysicalDeviceFeatures2, chained with the structs of FEATURES that the device knows."""
    names = ["PhysicalDeviceVulkan11Features", "PhysicalDeviceVulkan12Features"]
    if api >= API_1_3:
        names.append("PhysicalDeviceVulkan13Features")
    if COOPERATIVE_MATRIX in extensions:
        names.append("PhysicalDeviceCooperativeMatrixFeaturesKHR")
    chain = keep.struct("PhysicalDeviceFeatures2")
    structs, last = {}, chain
    for name in names:
        last.pNext = structs[name] = keep.struct(name)
        last = structs[name]
    return chain, structs


@functools.cache
def instance(validation: bool = False) -> Instance:
    """The process' instance (a second one with validation for tests). DeviceError names what is not installed."""
    return Instance(validation)


def all_devices(validation: bool = False) -> list[DeviceInfo]:
    """Every device that the loader knows, at least one. DeviceError names the missing library or driver."""
    devices = instance(validation).devices()
    if not devices:
        raise DeviceError("Vulkan: no driver has a device")
    return devices


def has_validation() -> bool:
    """True if the validation layer is installed."""
    ffi, lib = binding()
    layers = listed(lib.vkEnumerateInstanceLayerProperties, "VkLayerProperties")
    return VALIDATION_LAYER in (ffi.string(layer.layerName).decode() for layer in layers)

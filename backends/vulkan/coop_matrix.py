"""Cooperative matrices: the int8 sizes that a device supports, and the one that kernels use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from logitless.backends.gpu.matmul.linear_coop_matrix import SHARED_BYTES, TM, TN, WG
from logitless.backends.vulkan.api import COMPUTE, binding, listed

F32, I8, I32 = 1, 3, 5  # VkComponentTypeKHR
SUBGROUP = 3  # VK_SCOPE_SUBGROUP_KHR
NEEDS = {"cooperativeMatrix", "shaderInt8", "vulkanMemoryModel", "subgroupSizeControl", "computeFullSubgroups"}
# lavapipe (Mesa 26.2) crashes where its vectors do not have the matrices' 8 columns
CPU, CPU_SUBGROUP = 4, 8
INTEL = 0x8086  # its matrix units take the smallest subgroups: compilers cut larger ones into them
SIZES = (8, 16, 32)  # rows, columns and depth that the kernels' tiles and local memory allow


@dataclass(frozen=True)
class Matrices:
    """Size of cooperative matrices: rows and columns of a result, depth, threads of a subgroup.

    `fixed`: the device has subgroups of this size alone, so that a pipeline need not require it."""

    rows: int
    columns: int
    depth: int
    subgroup: int
    fixed: bool = False

    @property
    def constants(self) -> dict[str, int]:
        """Specialisation constants of the kernels (matmul/linear_coop_matrix.py)."""
        return {"CM": self.rows, "CN": self.columns, "CK": self.depth, "SG": self.subgroup}

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.depth}"


@dataclass(frozen=True)
class CoopMatrixEntry:
    """A supported combination: sizes, and the types of A, B, C and the result."""

    sizes: tuple[int, int, int]
    types: tuple[int, int, int, int]


def find(instance: Any, device: Any, features: set[str], core: Any, subgroup: int, v13: Any) -> Matrices | None:
    """The matrices that kernels use, from a device's features and properties; None where they cannot run."""
    limits, fixed = core.limits, v13.minSubgroupSize == v13.maxSubgroupSize == subgroup
    if core.vendorID == INTEL and v13.requiredSubgroupSizeStages & COMPUTE:
        subgroup = v13.minSubgroupSize
    if (
        not features >= NEEDS
        or limits.maxComputeSharedMemorySize < SHARED_BYTES
        or limits.maxComputeWorkGroupInvocations < WG
        or not (fixed or v13.requiredSubgroupSizeStages & COMPUTE)
        or v13.maxComputeWorkgroupSubgroups * subgroup < WG
    ):
        return None
    if core.deviceType == CPU and subgroup != CPU_SUBGROUP:
        return None
    sizes = choose(entries(instance, device), subgroup)
    return sizes and replace(sizes, fixed=fixed)


def entries(instance: Any, device: Any) -> list[CoopMatrixEntry]:
    """The combinations that a device (VkPhysicalDevice) reports for subgroups."""
    ffi, lib = binding()
    name = "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR"
    enumerate_all = ffi.cast(f"PFN_{name}", lib.vkGetInstanceProcAddr(instance, name.encode()))
    return [
        CoopMatrixEntry((p.MSize, p.NSize, p.KSize), (p.AType, p.BType, p.CType, p.ResultType))
        for p in listed(
            enumerate_all, "VkCooperativeMatrixPropertiesKHR", device, struct="CooperativeMatrixPropertiesKHR"
        )
        if p.scope == SUBGROUP and not p.saturatingAccumulation
    ]


def choose(supported: Iterable[CoopMatrixEntry], subgroup: int) -> Matrices | None:
    """The largest size of bytes times bytes that the kernels can use; None when there is none.

    Scales are applied in matrices of f32 of the same rows and columns, so the device must have
    these too."""
    supported = list(supported)
    floats = {e.sizes[:2] for e in supported if F32 in e.types[2:]}
    fitting = [
        Matrices(*e.sizes, subgroup)
        for e in supported
        if e.types == (I8, I8, I32, I32) and e.sizes[:2] in floats and _fits(e.sizes, subgroup)
    ]
    return max(fitting, key=lambda m: (m.rows * m.columns * m.depth, m.rows), default=None)


def _fits(sizes: tuple[int, int, int], subgroup: int) -> bool:
    """True if tiles divide a group's rows, columns and subgroups."""
    return (
        all(size in SIZES for size in sizes)
        and subgroup in (8, 16, 32, 64, 128)
        and TM * TN // (sizes[0] * sizes[1]) % (WG // subgroup) == 0
    )

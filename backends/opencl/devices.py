"""OpenCL device list: `opencl:0` is the first device of the first platform."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from logitless.backends.errors import DeviceError

UUID, LUID_VALID, LUID = 0x106A, 0x106C, 0x106D  # CL_DEVICE_UUID_KHR and others


@dataclass(frozen=True)
class OpenCLDeviceInfo:
    """A device, as `logitless devices` lists it."""

    name: str
    description: str
    driver: str
    kind: str  # cpu, gpu, accelerator
    memory_bytes: int
    units: int
    threads: int  # of a group, at most
    local_bytes: int  # of a group's memory, at most
    features: tuple[str, ...]
    card: bytes  # the same for one card under two drivers; empty where that is unknown
    integrated: bool  # a GPU in the host's memory
    device: Any


def driver_error() -> str:
    """Reason why this machine has no OpenCL, in one line; empty when it has."""
    try:
        import pyopencl as cl
    except (ImportError, OSError) as error:
        return f"the OpenCL loader is missing ({error})".replace("\n", " ")
    try:
        return "" if any(p.get_devices() for p in cl.get_platforms()) else "no OpenCL driver has a device"
    except cl.Error as error:
        return f"no OpenCL driver is installed ({error})".replace("\n", " ")


def find() -> list[OpenCLDeviceInfo]:
    """Every device that can run our kernels; none where OpenCL is missing."""
    if driver_error():
        return []
    import pyopencl as cl

    devices = [(p, d) for p in cl.get_platforms() for d in p.get_devices() if d.available and d.compiler_available]
    return [_describe(f"opencl:{i}", p, d) for i, (p, d) in enumerate(devices)]


def _describe(name: str, platform: Any, d: Any) -> OpenCLDeviceInfo:
    import pyopencl as cl

    kinds = {cl.device_type.CPU: "cpu", cl.device_type.GPU: "gpu"}
    kind = next((word for bit, word in kinds.items() if d.type & bit), "accelerator")
    extensions = set(d.extensions.split())
    feature_names = {
        "cl_khr_fp16": "fp16",
        "cl_khr_subgroups": "subgroups",
        "cl_khr_integer_dot_product": "integer dot",
    }
    features = tuple(word for extension, word in feature_names.items() if extension in extensions)
    description = f"{d.name.strip()} ({platform.name.strip()})"
    driver = f"{platform.version.strip()} / {d.driver_version.strip()}"
    threads = min(d.max_work_group_size, d.max_work_item_sizes[0])
    return OpenCLDeviceInfo(
        name=name,
        description=description,
        driver=driver,
        kind=kind,
        memory_bytes=d.global_mem_size,
        units=d.max_compute_units,
        threads=threads,
        local_bytes=d.local_mem_size,
        features=features,
        card=_card(d) if "cl_khr_device_uuid" in extensions else b"",
        integrated=bool(d.host_unified_memory),
        device=d,
    )


def _card(d: Any) -> bytes:
    from logitless.backends.opencl.native_launch import device_info

    has_luid = any(device_info(d, LUID_VALID, 4))
    return device_info(d, LUID, 8) if has_luid else device_info(d, UUID, 16)


def device_named(name: str) -> OpenCLDeviceInfo:
    """The device of `--device opencl:N` (`opencl` is the first). DeviceError lists the devices."""
    full_name = "opencl:0" if name == "opencl" else name
    devices = find()
    for device in devices:
        if device.name == full_name:
            return device
    why = driver_error() or f"this machine has {', '.join(d.name for d in devices)}"
    raise DeviceError(f"device {name!r} is not available: {why}")

"""`logitless devices`: available devices, and missing backends with the reason."""

from __future__ import annotations

import json
import platform
from types import SimpleNamespace
from typing import Any


def run(options: SimpleNamespace) -> int:
    entries = devices()
    print(json.dumps({"devices": entries}, indent=2) if options.json else as_text(entries))
    return 0


def devices() -> list[dict[str, Any]]:
    """One entry per device, and one per backend without a device; `available`: `--device` takes it."""
    return [cpu(), *opencl_devices(), *vulkan_devices()]


def cpu() -> dict[str, Any]:
    from logitless.backends.cores import cores
    from logitless.backends.host import casts_to_bf16, isa
    from logitless.backends.host_memory import total_memory

    return {
        "name": "cpu",
        "available": True,
        "description": cpu_name(),
        "isa": isa(),
        "rounds_bf16": casts_to_bf16(),
        "features": cpu_features(),
        "cores": cores(),
        "memory_bytes": total_memory(),
    }


def opencl_devices() -> list[dict[str, Any]]:
    from logitless.backends.opencl.devices import driver_error, find

    if why := driver_error():
        return [{"name": "opencl", "available": False, "description": f"OpenCL: {why}"}]
    return [
        {
            "name": d.name,
            "available": True,
            "description": d.description,
            "type": d.kind,
            "driver": d.driver,
            "units": d.units,
            "features": sorted(d.features),
            "memory_bytes": d.memory_bytes,
        }
        for d in find()
    ]


def vulkan_devices() -> list[dict[str, Any]]:
    from logitless.backends.errors import DeviceError
    from logitless.backends.vulkan.autotune import class_of, known
    from logitless.backends.vulkan.instance import all_devices

    try:
        physical = all_devices()
    except (DeviceError, OSError) as error:
        return [{"name": "vulkan", "available": False, "description": str(error)}]
    return [
        {
            "name": f"vulkan:{d.index}",
            "available": not d.missing,
            "description": d.name + (f": lacks {d.missing}" if d.missing else ""),
            "type": d.kind,
            "driver": d.driver,
            "api": ".".join(map(str, d.api)),
            "features": sorted(d.features),
            "memory_bytes": d.memory_bytes,
            "products": {
                "integer_dots": class_of(d).dot,
                "matrices": str(d.matrices or "") or None,
                "matrices_used": choice.used if (choice := known(d)) else None,
                "why": choice.why if choice else "timed when the device is first opened",
            },
        }
        for d in physical
    ]


def as_text(entries: list[dict[str, Any]]) -> str:
    lines = []
    for d in entries:
        lines.append(f"{d['name']:<10}{d['description']}")
        if d["available"]:
            memory = f"{d['memory_bytes'] / 2**30:.1f} GiB of memory"
            if "cores" in d:
                lines.append(f"{'':<10}{d['cores']} cores, {memory}, kernels: {d['isa']}{rounding_as_text(d)}")
            else:
                lines.append(f"{'':<10}{d['type']}, {memory}, driver: {d['driver']}")
            if products := d.get("products"):
                lines.append(f"{'':<10}{products_as_text(products)}")
            lines.append(f"{'':<10}features: {', '.join(d['features']) or 'none'}")
    return "\n".join(lines)


def products_as_text(products: dict[str, Any]) -> str:
    """Kernels with which a Vulkan device multiplies quantised weights."""
    dots = f"integer dot products: {'used' if products['integer_dots'] else 'not used'}"
    if not products["matrices"]:
        return f"{dots}; cooperative matrices: none"
    used = {True: "used", False: "not used", None: "not yet known"}[products["matrices_used"]]
    return f"{dots}; cooperative matrices ({products['matrices']}): {used} ({products['why']})"


def cpu_name() -> str:
    for line in _cpuinfo():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return platform.processor() or platform.machine()


def rounding_as_text(d: dict[str, Any]) -> str:
    """Precision of matrix products with bf16 weights."""
    from logitless.backends.host import BF16, has_bf16_dots

    if d["rounds_bf16"]:
        return ", bf16 weights meet rows rounded to bf16"
    return f" ({BF16}=1: faster prompts of BF16 models)" if has_bf16_dots() else ""


def cpu_features() -> list[str]:
    """CPU extensions that the kernels use, by LLVM's names."""
    from logitless.backends.host import host

    names = ["avx2", "fma", "f16c", "avxvnni", "avx512f", "avx512vnni", "avx512bf16", "neon", "dotprod", "i8mm"]
    return [name for name in names if host().has(name)]


def _cpuinfo() -> list[str]:
    try:
        with open("/proc/cpuinfo") as f:
            return f.read().splitlines()
    except OSError:
        return []

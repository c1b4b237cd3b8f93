"""`logitless doctor`: state of this machine and this installation, with the reason for each slowness and its remedy.

A finding is `ok`, a `note` (it works, more slowly than it could) or a `problem` (a server would fail). The exit code is
1 with a problem. Nothing is sent anywhere, and no model is needed; `logitless plan` tells whether a model fits.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

from logitless.cli.flags.help import wrapped

GIB = 1 << 30
BUSY = 0.5  # cores that other programs may use before they slow down a server
LOW_DISK = GIB  # bytes free in the folder of the cache
LOW_MEMORY = 2 * GIB
FEW_FILES = 1024  # open files: a stream takes one
SOFTWARE_DRIVERS = ("llvmpipe", "lavapipe", "pocl", "portable computing language", "swiftshader")
VARIABLES = (  # ours that are no flag's
    *("LOGITLESS_CACHE", "LOGITLESS_CPU_BF16", "LOGITLESS_ISA", "LOGITLESS_RPC_API_KEY", "LOGITLESS_RPC_CA_FILE"),
    *("LOGITLESS_VULKAN_DOT", "LOGITLESS_VULKAN_MATRICES"),
)


@dataclass(frozen=True)
class Finding:
    """A line of the report. `remedy` is a command or a setting; "" where there is nothing to do."""

    subject: str
    level: Literal["ok", "note", "problem"]
    text: str
    remedy: str = ""


def run(options: SimpleNamespace) -> int:
    findings = list(examine(measure=options.measure))
    print(json.dumps({"findings": [asdict(f) for f in findings]}, indent=2) if options.json else as_text(findings))
    return 1 if any(f.level == "problem" for f in findings) else 0


def examine(*, measure: bool = True) -> Iterator[Finding]:
    """All findings. `measure`: the processor's and memory's speed too, which takes a second."""
    yield from _versions()
    yield from _processor()
    yield from _load()
    yield from _memory()
    if measure:
        yield from _speed()
    yield from _devices()
    yield from _cache()
    yield from _models()
    yield from _limits()
    yield from _environment()


def as_text(findings: list[Finding]) -> str:
    left = 11 + max(len(f.subject) for f in findings)
    lines = []
    for f in findings:
        lines.append(wrapped(f.text, left, f"{f.level:<9}{f.subject}"))
        if f.remedy:
            lines.append(wrapped(f"→ {f.remedy}", left))
    counts = {level: sum(f.level == level for f in findings) for level in ("note", "problem")}
    words = [f"{n} {level}{'' if n == 1 else 's'}" for level, n in counts.items()]
    return "\n".join([*lines, "", ", ".join(words)])


def _versions() -> Iterator[Finding]:
    from importlib import metadata

    from logitless.cli.main import version

    yield Finding("version", "ok", f"{version()}, Python {platform.python_version()}, {platform.platform()}")
    try:
        requirements = metadata.requires("logitless") or []
    except metadata.PackageNotFoundError:
        return
    missing = [name for name in map(_name_of, (r for r in requirements if "extra ==" not in r)) if not _is_there(name)]
    if missing:
        yield Finding("packages", "problem", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    extras: dict[str, list[str]] = {}
    for requirement in requirements:
        package, _, condition = requirement.partition(";")
        if "extra ==" in condition:
            extra = condition.rpartition("extra ==")[2].strip(" \"'")
            extras.setdefault(extra, []).append(_name_of(package))
    present = sorted(e for e, packages in extras.items() if all(map(_is_there, packages)))
    yield Finding("extras", "ok", f"installed: {', '.join(present) or 'none'} (of {', '.join(sorted(extras))})")


def _name_of(requirement: str) -> str:
    """Name of the package in a requirement such as `ray[serve]>=2.50`."""
    end = next((i for i, c in enumerate(requirement) if not (c.isalnum() or c in "-_.")), len(requirement))
    return requirement[:end]


def _is_there(package: str) -> bool:
    from importlib import metadata

    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _processor() -> Iterator[Finding]:
    from logitless.backends.cores import cores, memory_nodes, quota
    from logitless.backends.host import BF16, available_isas, casts_to_bf16, has_bf16_dots, isa
    from logitless.cli.commands.machine.devices import cpu_name

    try:
        variant = isa()
        cast = casts_to_bf16()
    except ValueError as error:
        yield Finding("processor", "problem", str(error), "unset the variable")
        return
    yield Finding("processor", "ok", f"{cpu_name()}: {cores()} cores, kernels for {variant}")
    if variant != (best := available_isas()[0]):
        yield Finding("processor", "note", f"LOGITLESS_ISA={variant}, this processor has {best}", "unset LOGITLESS_ISA")
    if variant == "plain":
        yield Finding("processor", "note", "no AVX2 and no NEON dot products: prefill is several times slower")
    if has_bf16_dots() and not cast:
        yield Finding("processor", "note", "bf16 dot products are unused: BF16 models prefill faster", f"{BF16}=1")
    if (allowed := quota()) is not None:
        yield Finding("processor", "ok", f"the control group allows {allowed:.2f} cores: {cores()} threads compute")
    if (nodes := len(memory_nodes())) > 1:
        text, remedy = f"{nodes} NUMA nodes: threads also read the other node's memory", "--numa isolate, or numactl"
        yield Finding("processor", "note", text, remedy)
    governor = _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor == "powersave" and not _read("/sys/devices/system/cpu/intel_pstate/status"):
        yield Finding(
            "processor", "note", "the frequency governor is powersave", "cpupower frequency-set -g performance"
        )


def _load() -> Iterator[Finding]:
    from logitless.backends.cores import cores

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > BUSY:
        yield Finding(
            "load",
            "note",
            f"other programs keep {load:.1f} of {cores()} cores busy: steps wait for the slowest thread",
            "end them, or give the server fewer cores with -t",
        )


def _memory() -> Iterator[Finding]:
    from logitless.backends.host_memory import total_memory

    facts = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    available = int(facts["MemAvailable"].split()[0]) << 10 if "MemAvailable" in facts else total_memory()
    text = f"{available / GIB:.1f} GiB available of {total_memory() / GIB:.1f}"
    if available < LOW_MEMORY:
        yield Finding("memory", "note", text, "a smaller quantisation, or a smaller context with -c")
    else:
        yield Finding("memory", "ok", text)
    pages = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    if "[never]" in pages:
        yield Finding(
            "memory",
            "note",
            "huge pages are off: the KV cache and weights miss the TLB",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )


def _speed() -> Iterator[Finding]:
    from logitless.backends.registry import cpu_peaks, open_backends

    (backend,) = open_backends(["cpu"])
    try:
        limits = cpu_peaks(backend).measure()
    finally:
        backend.close()
    read = limits["read_gb_s"]
    yield Finding(
        "speed",
        "ok",
        f"memory {read:.1f} GB/s, int8 {limits['int8_gmac_s']:.0f} and f32 {limits['f32_gmac_s']:.0f} "
        f"billion multiply-adds a second: a model of 1 GB decodes at most {read:.0f} tokens/s for one stream",
    )


def _devices() -> Iterator[Finding]:
    from logitless.cli.commands.machine.devices import opencl_devices, vulkan_devices

    for d in (*vulkan_devices(), *opencl_devices()):
        name, text = d["name"], d["description"]
        if not d["available"]:
            yield Finding("device", "ok", f"no {name}: {text}")
        elif any(word in text.lower() for word in SOFTWARE_DRIVERS) or d["type"] == "cpu":
            yield Finding("device", "ok", f"{name}: {text} is the processor again, slower than --device cpu")
        else:
            yield Finding("device", "ok", f"{name}: {text}, {d['memory_bytes'] / GIB:.1f} GiB", f"--device {name}")


def _cache() -> Iterator[Finding]:
    from logitless.backends import disk_cache

    folder, used = disk_cache.cache_folder(), disk_cache.writable_folder()
    if used != folder or not os.access(used, os.W_OK):
        yield Finding(
            "cache",
            "note",
            f"{folder} cannot be written: kernels are kept in {used}, and may be compiled at every start",
            "LOGITLESS_CACHE=FOLDER",
        )
    files = [p for p in used.rglob("*") if p.is_file()]
    kernels = sum("cpu" in p.relative_to(used).parts and not p.name.startswith("host-") for p in files)
    size = sum(p.stat().st_size for p in files if p.exists())
    yield Finding(
        "cache",
        "ok" if kernels else "note",
        f"{used}: {len(files)} files, {size / (1 << 20):.0f} MiB"
        + ("" if kernels else "; the first start of a model compiles its kernels"),
        "" if kernels else "logitless warm -m FILE",
    )
    with contextlib.suppress(OSError):
        if (free := shutil.disk_usage(used).free) < LOW_DISK:
            yield Finding("disk", "problem", f"{free >> 20} MiB are free in {used}", "free some space")


def _models() -> Iterator[Finding]:
    from logitless.cli.hub import cached

    models = cached.models()
    names = ", ".join(sorted(models)[:5])
    more = f" and {len(models) - 5} more" if len(models) > 5 else ""
    yield Finding("models", "ok", f"downloaded: {names}{more}" if models else "none downloaded: `serve` is the demo")


def _limits() -> Iterator[Finding]:
    with contextlib.suppress(ImportError):  # Windows
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= soft < FEW_FILES:
            remedy = f"ulimit -n {hard if 0 < hard < 65536 else 65536}"
            yield Finding("limits", "note", f"{soft} open files: about {max(0, soft - 64)} clients at once", remedy)


def _environment() -> Iterator[Finding]:
    """Variables with our prefix that nothing reads: most are misspelt."""
    from logitless.cli.command_table import COMMANDS

    known = {*VARIABLES, *(v for c in COMMANDS for g in c.groups for f in g.flags for v in f.env.split())}
    for name in sorted(os.environ):
        if name.startswith("LOGITLESS_") and name not in known:
            yield Finding("variables", "note", f"{name} is set, and nothing reads it", f"unset {name}")
    if sys.flags.optimize:
        yield Finding("variables", "note", "PYTHONOPTIMIZE removes checks of the engine", "unset PYTHONOPTIMIZE")


def _read(path: str) -> str:
    """Content of one of the system's files; "" where the system has none."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""

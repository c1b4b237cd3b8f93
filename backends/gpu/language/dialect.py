"""Kernels of the portable C subset: declaration, and rendering to OpenCL C and GLSL."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from logitless.backends.gpu.language import prelude

Defines = tuple[tuple[str, int], ...]
Access = Literal["r", "w", "rw"]
PUSH_CONSTANT_BYTES = 128  # the minimum of every Vulkan device
LANES = 16
CL_TYPES = {
    "u32x4": "uint4",
    "u32x2": "uint2",
    "f32": "float",
    "u32": "uint",
    "i32": "int",
    "u16": "ushort",
    "u8": "uchar",
}
GL_TYPES = {
    "u32x4": "uvec4",
    "u32x2": "uvec2",
    "u64": "uint64_t",
    "f32": "float",
    "u32": "uint",
    "i32": "int",
    "u16": "uint16_t",
    "u8": "uint8_t",
}
GL_SIZES = {"u32x4": 16, "u32x2": 8, "u64": 8, "f32": 4, "u32": 4, "i32": 4, "u16": 2, "u8": 1}
NO_CONSTANTS: Mapping[str, int] = MappingProxyType({})
KERNELS: dict[str, Kernel] = {}
BUFFER, MEMORY = re.compile(r"(\w+)(?:\[(\d+)\])?"), re.compile(r"(\w+)\[([^]]*)\]")
CONDITION = re.compile(r"\(([^()?:]+)\?([^()?:]+):([^()?:]+)\)")


class TooLarge(ValueError):
    """A kernel needs more threads or memory of a group than the device has."""


@dataclass(frozen=True)
class Shape:
    """A device class, and the limits of a device. `units`: how many groups keep it busy; no result
    depends on it.

    `dot`: Vulkan GPUs that use integer dot products (matmul/linear_int_dot.py). `coop`: the number
    of rows from which they use cooperative matrices (matmul/linear_coop_matrix.py); 0: never.
    `threads` and `local_bytes`: most threads of a group, and most bytes of its memory. `rows`: most
    rows of a group in products of floats, whose sums its threads have registers for. `narrow`: a
    subgroup may have fewer than 32 threads; each has at most 128 registers then."""

    name: Literal["simt", "cpu", "soft"]
    units: int = 64
    dot: bool = False
    coop: int = 0
    threads: int = 256
    local_bytes: int = 32 << 10
    rows: int = 8
    narrow: bool = False


SIMT = Shape("simt")
CPU = Shape("cpu", 8, local_bytes=64 << 10)
SOFT = Shape("soft")


@dataclass(frozen=True)
class Arg:
    """A buffer of a kernel: name in capitals, element type, and whether it is read, written
    or both.

    `of`: number of buffers in a row, of which the body takes one: after `CHOOSE(i)` the name means
    buffer i."""

    name: str
    dtype: str
    access: Access = "r"
    of: int = 1


def _typed(declarations: str) -> Iterator[tuple[str, str]]:
    """Types, and the rest of each declaration."""
    for part in filter(None, declarations.split(", ")):
        kind, _, rest = part.partition(" ")
        yield kind, rest


def buffers(declarations: str) -> list[Arg]:
    """The buffers of declarations such as `f32 X W[3], w f32 Y`."""
    args = []
    for first, rest in _typed(declarations):
        written: Access | None = "w" if first == "w" else "rw" if first == "rw" else None
        dtype, *names = rest.split() if written else (first, *rest.split())
        args += [Arg(name, dtype, written or "r", int(of or 1)) for name, of in BUFFER.findall(" ".join(names))]
    return args


class Kernel:
    """A kernel: arguments, body and variants. Registers itself in `KERNELS`.

    Declared as text are its buffers `args` (`f32 X W, i32 IDS, w f32 Y`: those written are `w` or
    `rw`, `W[3]` is three to choose from), its 32-bit parameters `words` (`uint n size, float eps`),
    and a group's memory `local` (`float sums[WG] parts[64]`). A kernel has `wg` threads a group on a
    GPU and one on a CPU, with these constants; otherwise `simt`, `cpu` and `soft` (where it differs
    from `simt`) are the variants of the device classes: dicts of the constants, `WG` (threads a
    group) among them. `functions` is code before the kernel: device functions and macros.
    `extensions`: GLSL extensions beside the usual ones. `special`: specialisation constants, which
    the Vulkan device sets, with valid values."""

    def __init__(  # noqa: PLR0913  (a kernel is a row of these)
        self,
        name: str,
        args: str,
        words: str,
        body: str,
        *,
        wg: int = 64,
        constants: Mapping[str, int] = NO_CONSTANTS,
        simt: Sequence[Mapping[str, int]] = (),
        cpu: Sequence[Mapping[str, int]] = (),
        soft: Sequence[Mapping[str, int]] = (),
        local: str = "",
        functions: str = "",
        extensions: Sequence[str] = (),
        special: Mapping[str, int] | None = None,
    ) -> None:
        if not (simt or cpu or soft):
            simt, cpu = [{"WG": wg, **constants}], [{"WG": 1, **constants}]
        self.name, self.body, self.functions = name, body, functions
        self.local = [(kind, *place) for kind, places in _typed(local) for place in MEMORY.findall(places)]
        self.extensions, self.special = tuple(extensions), dict(special or {})
        declared = buffers(args)
        self.choices = tuple(a for a in declared if a.of > 1)
        # One a buffer: those to choose from are numbered.
        self.args = tuple(b for a in declared for b in ([a] if a.of == 1 else _numbered(a)))
        self.words = [(kind, name) for kind, names in _typed(words) for name in names.split()]
        self._variants = {
            "simt": [_sorted(v) for v in simt],
            "cpu": [_sorted(v) for v in cpu],
            "soft": [_sorted(v) for v in soft or simt],
        }
        if 8 * len(self.args) + 4 * len(self.words) > PUSH_CONSTANT_BYTES:
            raise ValueError(f"kernel {name}: more than {PUSH_CONSTANT_BYTES} bytes of arguments")
        if name in KERNELS:
            raise ValueError(f"kernel {name} declared twice")
        KERNELS[name] = self

    def variants(self, shape: Shape) -> list[Defines]:
        return self._variants[shape.name]

    def find(self, shape: Shape, **constants: int) -> Defines | None:
        """The first variant of a class that has these constants and fits the device."""
        return next((v for v in self._with(shape, constants) if not self.excess(v, shape)), None)

    def variant(self, shape: Shape, **constants: int) -> Defines:
        """As `find`. TooLarge where none fits; KeyError when there is none."""
        fitting = self.find(shape, **constants)
        if fitting is not None:
            return fitting
        if large := self._with(shape, constants):
            raise TooLarge(f"{self.name} needs {self.excess(large[-1], shape)}")
        raise KeyError(f"kernel {self.name} has no variant {constants} for {shape.name}")

    def _with(self, shape: Shape, constants: Mapping[str, int]) -> list[Defines]:
        return [v for v in self.variants(shape) if constants.items() <= dict(v).items()]

    def excess(self, defines: Defines, shape: Shape) -> str:
        """The limit of the device that a variant exceeds; empty when it fits."""
        threads, local_bytes = self.threads(defines), self.local_bytes(defines)
        if threads > shape.threads:
            return f"groups of {threads} threads, the device has {shape.threads}"
        if local_bytes > shape.local_bytes:
            return f"{local_bytes} bytes of a group's memory, the device has {shape.local_bytes}"
        return ""

    @functools.cached_property
    def divisible(self) -> bool:
        """True if a range of a launch's groups can be a launch: no group depends on another one or on their number."""
        return not re.search(r"\b(NGX|FOR_EACH|DEVICE_BARRIER|ATOMIC_\w+)\b", self.functions + self.body)

    def threads(self, defines: Defines) -> int:
        return dict(defines)["WG"]

    @functools.cache  # noqa: B019  (kernels live as long as the process)
    def local_bytes(self, defines: Defines) -> int:
        """Bytes of a group's memory. Elements have 4 bytes each, vectors 16."""
        names = {**self.special, **dict(defines)}
        return sum((16 if kind == "vec4" else 4) * _value(size, names) for kind, _, size in self.local)


def _value(size: str, names: Mapping[str, int]) -> int:
    """The value of a C expression of integers."""
    before = ""
    while size != before:
        before, size = size, CONDITION.sub(r"((\2) if (\1) else (\3))", size)
    return int(eval(size, {"__builtins__": {}}, dict(names)))


def _numbered(a: Arg) -> list[Arg]:
    return [Arg(f"{a.name}{i}", a.dtype, a.access) for i in range(a.of)]


def glsl_type(a: Arg) -> str:
    return f"B_{a.dtype}_{a.access}"


def glsl_name(a: Arg) -> str:
    """Macro for a buffer's elements; the GLSL variable has the buffer's name and a `_`."""
    return f"#define {a.name} {a.name}_.v\n"


def glsl_types(args: Iterable[Arg]) -> str:
    """Declarations of these buffers' types."""
    text = ""
    for dtype, access in dict.fromkeys((a.dtype, a.access) for a in args):
        qualifier = {"r": "readonly ", "w": "", "rw": ""}[access]
        text += (
            f"layout(buffer_reference, std430, buffer_reference_align = {GL_SIZES[dtype]}) "
            f"{qualifier}buffer B_{dtype}_{access} {{ {GL_TYPES[dtype]} v[]; }};\n"
        )
    return text


def choose(kernel: Kernel, end: str) -> str:
    """Macro `CHOOSE(i)`; `end` is the last part of the names of buffer variables."""
    if not kernel.choices:
        return ""
    n = min(a.of for a in kernel.choices)
    takes = [" ".join(f"{a.name}{end} = {a.name}{i}{end};" for a in kernel.choices) for i in range(n)]
    tests = "".join(f"if ((i) == {i}u) {{ {text} }} else " for i, text in enumerate(takes[:-1]))
    return f"#define CHOOSE(i) {{ {tests}{{ {takes[-1]} }} }}\n"


def _sorted(variant: Mapping[str, int]) -> Defines:
    return tuple(sorted(variant.items()))


def constants(defines: Defines) -> str:
    return "".join(f"#define {name} {value}\n" for name, value in defines)


def render_opencl(kernel: Kernel, defines: Defines, shape: Shape) -> str:
    """OpenCL C of a variant: one kernel of the kernel's name, with `WG` threads a group."""
    params, views = [], []
    for a in kernel.args:
        kind = ("const " if a.access == "r" else "") + CL_TYPES[a.dtype]
        params += [f"__global {kind}* {a.name}_", f"const ulong {a.name}_at"]
        byte = "const uchar" if a.access == "r" else "uchar"
        views.append(f"  __global {kind}* {a.name} = (__global {kind}*)((__global {byte}*){a.name}_ + {a.name}_at);\n")
    params += [f"const {kind} {name}" for kind, name in kernel.words]
    views += [
        f"  __global {'const ' if a.access == 'r' else ''}{CL_TYPES[a.dtype]}* {a.name};\n" for a in kernel.choices
    ]
    local = "".join(f"  __local {kind} {name}[{size}];\n" for kind, name, size in kernel.local)
    lanes = prelude.CL_CPU if shape.name == "cpu" else prelude.CL_SIMT
    return (
        f"{constants(defines)}{prelude.CL}{lanes}{prelude.COMMON}{kernel.functions}{choose(kernel, '')}\n"
        f"__attribute__((reqd_work_group_size(WG, 1, 1)))\n"
        f"__kernel void {kernel.name}({', '.join(params)}) {{\n{local}{''.join(views)}{kernel.body}\n}}\n"
    )


def render_glsl(kernel: Kernel, defines: Defines) -> str:
    """GLSL of a variant, for Vulkan 1.2."""
    members = [f"{glsl_type(a)} {a.name}_;" for a in kernel.args] + [f"{kind} {name};" for kind, name in kernel.words]
    names = "".join(map(glsl_name, kernel.args))
    chosen = "".join(f"{glsl_type(a)} {a.name}_;\n{glsl_name(a)}" for a in kernel.choices)
    local = "".join(f"shared {kind} {name}[{size}];\n" for kind, name, size in kernel.local)
    special = "".join(
        f"layout(constant_id = {i}) const uint {name} = {value}u;\n"
        for i, (name, value) in enumerate(kernel.special.items())
    )
    extensions = "".join(f"#extension {name} : require\n" for name in kernel.extensions)
    return (
        f"#version 460\n{prelude.GL_EXTENSIONS}{extensions}{constants(defines)}{special}"
        f"layout(local_size_x = WG) in;\n{glsl_types(kernel.args)}"
        f"layout(push_constant) uniform Push {{ {' '.join(members)} }};\n{names}{chosen}{local}"
        f"{prelude.GL}{prelude.COMMON}{kernel.functions}{choose(kernel, '_')}\nvoid main() {{\n{kernel.body}\n}}\n"
    )

"""Many launches as one, where the groups of a kernel are threads of this process (PoCL).

A launch costs some 8 µs there, and a thread that slept between two of them 20 or 30 until it works again. So one launch
walks a table of what would be launches otherwise, *stages*: one ends before the next begins. Each of its groups is a
worker, which takes a stage's groups from a stretch of its own, then from the others', and then waits for those that
others have taken. It never waits for a worker that has not begun. One that has must go on while another waits: OpenCL
does not promise it of groups, but threads do. What a group of a stage computes is the text that is launched otherwise.

Where a worker waits for long, the other's core was taken away, and would get this one's if it were free. So it leaves,
the others do as soon as they have ended their stage, and the next launch goes on: a chain has several launches, and all
but the first find nothing to do as a rule. The last one's workers do not leave.

The table has addresses, so kernels must see this process' memory where the process does: `Chains` tries it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pyopencl as cl

from logitless.backends.gpu.language import prelude
from logitless.backends.gpu.language.dialect import CL_TYPES, CPU, KERNELS, Defines, Kernel, choose, constants
from logitless.backends.gpu.lowering import Dispatch
from logitless.backends.gpu.software.stages import HEAD, LINE, Piece, row_words
from logitless.backends.opencl.programs import build_program

LEAST = 40  # launches of a plan that are worth a program: it takes seconds to compile, once
PATIENCE = 1000  # looks at a count, some 50 µs, that a worker takes before it leaves
TRIES = 16  # launches of a chain: each goes on where the one before stopped, because a worker had left
# What steps are made of. Not samplers, which are one launch and take longest to compile.
CHAINED = re.compile(
    r"linear_.*|rms_norm|layer_norm|rope.*|store_.*|attention_(f32|f16|q8_0)_.*|get_rows.*|(unary|binary|broadcast)_.*"
    r"|top_experts|expert_.*"
)
ATOMICS = """
#define TAKE(p) __atomic_fetch_add(p, 1u, __ATOMIC_RELAXED)
#define ADD(p, n) __atomic_add_fetch(p, n, __ATOMIC_ACQ_REL)
#define SEE(p) __atomic_load_n(p, __ATOMIC_ACQUIRE)
#define PUT(p, n) __atomic_store_n(p, n, __ATOMIC_RELEASE)
#if defined(__x86_64__)
#define REST() __builtin_ia32_pause()
#else
#define REST()
#endif
"""
PROBE = (
    ATOMICS
    + """
__kernel void probe(__global ulong* where, __global uint* counter) {
  TAKE(counter);
  while (SEE(counter) == 0u) REST();
  if (ADD(counter, 1u) == 2u) where[0] = (ulong)where;
}"""
)
PLACE = """
#undef LID
#undef GX
#undef GY
#undef NGX
#define LID 0u
#define GX gx_
#define GY gy_
#define NGX ngx_
"""
CHAIN = """
__attribute__((reqd_work_group_size(1, 1, 1)))
__kernel void chain(__global const ulong* table, const uint stages, __global uint* counters, const uint last) {
  uint me = (uint)get_group_id(0), workers = (uint)get_num_groups(0), counted = (workers + 1u) * LINE;
  __global uint* reached = counters; /* the first stage that is not done */
  __global uint* parting = counters + LINE; /* whether everybody is to leave */
  __global uint* left = counters + 2u * LINE;
  counters += 3u * LINE;
  uint s = SEE(reached);
  for (bool on = s < stages && SEE(parting) == 0u; on;) {
    __global const ulong* row = table + s * ROW;
    __global uint* taken = counters + s * counted;
    __global uint* done = taken + workers * LINE;
    uint groups = (uint)row[1], across = (uint)row[2], mine = 0u;
    for (uint v = 0u; v < workers; v++) {
      ulong whose = (me + v) % workers;
      uint first = (uint)(groups * whose / workers), end = (uint)(groups * (whose + 1u) / workers);
      for (uint i; (i = first + TAKE(taken + whose * LINE)) < end; mine++) {
        uint gx = i % across, gy = i / across;
        switch ((uint)row[0]) { CASES }
      }
    }
    if (mine > 0u) ADD(done, mine);
    uint waited = 0u;
    while (SEE(done) < groups && (waited < PATIENCE || last != 0u)) { REST(); waited++; }
    if (SEE(done) < groups) {
      PUT(parting, 1u);
      on = false;
    } else {
      s++;
      on = s < stages && SEE(parting) == 0u;
      if (!on) PUT(reached, s);
    }
  }
  if (ADD(left, 1u) != workers) return;
  PUT(parting, 0u);
  PUT(left, 0u);
  if (last == 0u) return;
  PUT(reached, 0u);
  for (uint i = 0u; i < stages * counted; i += LINE) counters[i] = 0u;
}
"""


class Chains:
    """The programs of a device that walk tables, each as soon as a plan wants it."""

    def __init__(self, context: Any, queue: Any, workers: int) -> None:
        self._context, self._queue, self.workers = context, queue, workers
        self._programs: dict[tuple[Piece, ...], Any] = {}

    @functools.cached_property
    def possible(self) -> bool:
        """Whether kernels of this device find memory at the process' addresses, and know the atomics."""
        where, flags = np.zeros(2, np.uint64), cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR
        try:
            buffer = cl.Buffer(self._context, flags, hostbuf=where)
            counter = cl.Buffer(self._context, flags, hostbuf=np.zeros(1, np.uint32))
            build_program(self._context, PROBE).probe(self._queue, (1,), (1,), buffer, counter)
            cl.enqueue_copy(self._queue, found := np.zeros(2, np.uint64), buffer)
        except cl.Error:
            return False
        return bool(found[0] == where.ctypes.data)

    def parts(self, dispatches: Sequence[Dispatch]) -> Iterator[tuple[tuple[Piece, ...], list[Dispatch]]]:
        """Launches in order: several that are to be one, with the pieces of its program; or without, on their own."""
        worth = sum(map(_chained, dispatches)) >= LEAST and self.possible
        pieces = self._pieces(dispatches) if worth else ()
        for chained, found in groupby(dispatches, _chained):
            part = list(found)
            yield pieces if chained and len(part) > 1 else (), part

    def _pieces(self, dispatches: Sequence[Dispatch]) -> tuple[Piece, ...]:
        """Of a program that has all of these; products of any number of rows, so that most plans share one."""
        wanted = {(d.kernel, d.defines) for d in dispatches if _chained(d)}
        for held in self._programs:
            if wanted <= set(held):
                return held
        wanted |= {(name, v) for name, _ in wanted if "linear_" in name for v in KERNELS[name].variants(CPU)}
        return tuple(sorted(wanted))

    def program(self, pieces: tuple[Piece, ...]) -> Any:
        if pieces not in self._programs:
            self._programs[pieces] = build_program(self._context, render(pieces))
        return self._programs[pieces]

    def counters_nbytes(self, stages: int) -> int:
        """Bytes of what a launch of so many stages counts, zero before and after."""
        return (3 + stages * (self.workers + 1)) * LINE * 4


def _chained(d: Dispatch) -> bool:
    return CHAINED.fullmatch(d.kernel) is not None


def render(pieces: Sequence[Piece]) -> str:
    """The program: a function for each piece, and the kernel `chain`."""
    functions = (_function(KERNELS[name], defines, i) for i, (name, defines) in enumerate(pieces))
    cases = " ".join(f"case {i}u: piece_{i}(row + {HEAD}, gx, gy, across); break;" for i in range(len(pieces)))
    sizes = f"#define ROW {row_words(pieces)}u\n#define LINE {LINE}u\n#define PATIENCE {PATIENCE}u\n"
    text = prelude.CL + prelude.CL_CPU + prelude.COMMON + PLACE + "".join(functions)
    return text + ATOMICS + sizes + CHAIN.replace("CASES", cases)


def _function(kernel: Kernel, defines: Defines, number: int) -> str:
    """A kernel as a function of its row in the table; what its text defines is forgotten behind it."""
    lines = []
    for i, a in enumerate(kernel.args):
        kind = f"__global {'const ' if a.access == 'r' else ''}{CL_TYPES[a.dtype]}*"
        lines.append(f"  {kind} {a.name} = ({kind})a_[{i}];\n")
    for i, (kind, name) in enumerate(kernel.words, len(kernel.args)):
        lines.append(f"  const {kind} {name} = {'as_float' if kind == 'float' else f'({kind})'}((uint)a_[{i}]);\n")
    for a in kernel.choices:
        lines.append(f"  __global {'const ' if a.access == 'r' else ''}{CL_TYPES[a.dtype]}* {a.name};\n")
    lines += [f"  {kind} {name}[{size}];\n" for kind, name, size in kernel.local]  # a group is a thread
    before = constants(defines) + kernel.functions + choose(kernel, "")
    for name in dict.fromkeys(re.findall(r"^FN \w+ (\w+)\(", kernel.functions, re.MULTILINE)):
        before = f"#define {name} {name}_{number}\n{before}"
    forget = "".join(f"#undef {name}\n" for name in dict.fromkeys(re.findall(r"^#define (\w+)", before, re.MULTILINE)))
    head = f"__attribute__((noinline)) void piece_{number}(__global const ulong* a_, uint gx_, uint gy_, uint ngx_)"
    return f"{before}\n{head} {{\n{''.join(lines)}{kernel.body}\n}}\n{forget}"

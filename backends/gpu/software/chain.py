"""A decode step's launches as one, for Vulkan on a CPU (lavapipe), whose groups are threads of the process.

A launch costs some 17 µs there, in which the driver wakes its threads and waits for them. So one kernel walks a table
of stages (stages.py). Each of its groups is a worker: it takes a stage's groups one by one, and when none is left waits
for those that others have taken; never for a worker that has not begun. One that has must go on while another waits:
Vulkan does not promise it of groups, but threads do. What a group of a stage computes is the text that is launched
otherwise, of kernels whose groups are one subgroup.

Where a worker waits for long, the other's core was taken away, and would get this one's if it were free. So it leaves,
the others do as soon as they have ended their stage, and the next attempt goes on: several launches make one chain, and
all but the first find nothing to do as a rule. The last one's workers do not leave.

`COUNTS` is zero before the first attempt: the first stage that is not done; for each attempt whether everybody is to
leave; for each stage how many groups are taken, and how many are done. Each of these has a cache line of its own.
"""

from __future__ import annotations

import re

from logitless.backends.gpu import norm  # noqa: F401  (registers kernels of a chain, like the next)
from logitless.backends.gpu.attention import attention_cpu  # noqa: F401
from logitless.backends.gpu.language import prelude
from logitless.backends.gpu.language.dialect import (
    KERNELS,
    SOFT,
    TEXELS,
    Arg,
    Kernel,
    choose,
    constants,
    glsl_name,
    glsl_type,
    glsl_types,
)
from logitless.backends.gpu.matmul import unpack
from logitless.backends.gpu.software import linear_texels  # noqa: F401
from logitless.backends.gpu.software.stages import HEAD, LINE, Piece, row_words

LANES = 16  # of a subgroup, and threads of a group: nobody has to wait for anybody in it
TRIES = 16  # launches of a chain
PATIENCE = 1000  # looks at a count that a worker takes before it leaves; a special constant, so that tests can try 0
ARGS = [Arg("STAGES", "u64"), Arg("COUNTS", "u32", "rw")]
MACROS = "".join(f"{line}\n" for line in prelude.GL.splitlines() if line.startswith("#define"))
PLACE = f"""
#undef GX
#undef GY
#undef NGX
#undef FOR_EACH
#undef BARRIER
#define GX gx_
#define GY gy_
#define NGX ngx_
#define FOR_EACH(i, n) for (uint i = GX * {LANES}u + LID; i < (n); i += NGX * {LANES}u)
#define BARRIER() {{ subgroupMemoryBarrierShared(); subgroupBarrier(); }}
"""
FUNCTIONS = f"""
#define LINE {LINE}u
uint take(uint at) {{ uint n = 0u; if (LID == 0u) n = atomicAdd(COUNTS[at], 1u); return subgroupBroadcastFirst(n); }}
uint see(uint at) {{ uint n = 0u; if (LID == 0u) n = atomicAdd(COUNTS[at], 0u); return subgroupBroadcastFirst(n); }}
"""
# What a chain can do. Products last: their text gives the lanes' names another meaning.
NAMES = ("rms_norm", "store_kv_rope_f16", f"attention_soft_{LANES}", *(f"linear_texels_{t}" for t in unpack.BLOCKS))
PIECES: tuple[Piece, ...] = tuple((name, defines) for name in NAMES for defines in KERNELS[name].variants(SOFT))
BODY = f"""
  uint parting = (1u + attempt) * LINE, s = see(0u);
  for (bool on = s < stages; on;) {{
    uint row = s * ROW, taken = ({1 + TRIES}u + 2u * s) * LINE, done = taken + LINE, mine = 0u;
    uint groups = uint(STAGES[row + 1u]);
    ngx_ = uint(STAGES[row + 2u]);
    switch (uint(STAGES[row])) {{
CASES
    }}
    memoryBarrierBuffer();
    if (LID == 0u && mine > 0u) atomicAdd(COUNTS[done], mine);
    bool ended = see(done) >= groups;
    for (uint waited = 0u; !ended && (waited < PATIENCE || last != 0u); waited++) ended = see(done) >= groups;
    memoryBarrierBuffer();
    if (!ended) {{
      if (LID == 0u) atomicExchange(COUNTS[parting], 1u);
      on = false;
    }} else {{
      s++;
      on = s < stages && see(parting) == 0u;
      if (!on && LID == 0u) atomicExchange(COUNTS[0], s);
    }}
  }}"""


def counts_nbytes(stages: int) -> int:
    return (1 + TRIES + 2 * stages) * LINE * 4


def _function(piece: Piece, number: int) -> str:
    """A kernel as a function of its arguments; what its text defines is forgotten behind it."""
    kernel = KERNELS[piece[0]]
    params = [f"{glsl_type(a)} {a.name}_" for a in kernel.args] + [f"{kind} {name}" for kind, name in kernel.words]
    own = dict.fromkeys(re.findall(r"^(?:FN )?\w+ (\w+)\(", kernel.functions, re.MULTILINE))
    own |= dict.fromkeys(name for _, name, _ in kernel.local)
    before = constants(piece[1]) + "".join(f"#define {name} {name}_{number}\n" for name in own)
    before += "".join(map(glsl_name, (*kernel.args, *kernel.choices))) + kernel.functions + choose(kernel, "_")
    local = "".join(f"shared {kind} {name}[{size}];\n" for kind, name, size in kernel.local)
    chosen = "".join(f"  {glsl_type(a)} {a.name}_;\n" for a in kernel.choices)
    defined = dict.fromkeys(re.findall(r"^#define (\w+)", before + MACROS, re.MULTILINE))
    forget = "".join(f"#undef {name}\n" for name in defined) + MACROS + PLACE
    return f"{before}{local}void piece_{number}({', '.join(params)}) {{\n{chosen}{kernel.body}\n}}\n{forget}"


def _case(kernel: Kernel, number: int) -> str:
    """Takes groups of the stage, whose arguments are read once."""
    values = [f"{glsl_type(a)} a{i} = {_buffer(a, f'STAGES[row + {HEAD + i}u]')};" for i, a in enumerate(kernel.args)]
    for i, (kind, _) in enumerate(kernel.words, len(kernel.args)):
        word = f"uint(STAGES[row + {HEAD + i}u])"
        values.append(f"{kind} a{i} = {f'uintBitsToFloat({word})' if kind == 'float' else word};")
    call = ", ".join(f"a{i}" for i in range(len(values)))
    return f"""      case {number}u: if (HAS{number} != 0u) {{
        {" ".join(values)}
        for (uint i; (i = take(taken)) < groups; mine++) {{ gx_ = i % ngx_; gy_ = i / ngx_; piece_{number}({call}); }}
      }} break;"""


def _buffer(a: Arg, word: str) -> str:
    return f"unpackUint2x32({word})" if a.dtype == TEXELS else f"{glsl_type(a)}({word})"


_kernels = [KERNELS[name] for name, _ in PIECES]
_held = {glsl_type(a) for a in ARGS}
_types = glsl_types(a for k in _kernels for a in k.args if glsl_type(a) not in _held)
_texts = "".join(_function(piece, i) for i, piece in enumerate(PIECES))
Kernel(
    "chain_texels",
    ARGS,
    ["uint stages", "uint attempt", "uint last"],
    BODY.replace("CASES", "\n".join(_case(k, i) for i, k in enumerate(_kernels))),
    simt=(),
    cpu=(),
    soft=[{"WG": LANES}],
    functions=f"#undef WG\n#define ROW {row_words(PIECES)}u\n{_types}uint gx_, gy_, ngx_;\n{FUNCTIONS}{PLACE}{_texts}",
    extensions=("GL_KHR_shader_subgroup_basic",),
    special={f"HAS{i}": 1 for i in range(len(PIECES))} | {"PATIENCE": PATIENCE},
    texels=True,
)

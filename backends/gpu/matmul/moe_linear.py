"""Mixture-of-experts matmul on GPUs: each row times the packed weights of its expert (graph/ops/moe.py).

Rows are sorted by expert. A group of threads has some outputs of MT consecutive rows and takes
those of one expert together, so they read its weights once. Sums are those of `linear`, in its
order: a row has the same bits alone and beside any others.

A launch has one weight or two, whose results are concatenated (`expert_parts`). It reads x's rows
in sorted order or, with `per_row`, as they are before `expert_rows` repeats each so many times."""

from __future__ import annotations

from collections.abc import Sequence

from logitless.backends.gpu.language.dialect import KERNELS, LANES, Kernel, Shape
from logitless.backends.gpu.lowering import At, Buffers, Dispatch, dispatch, is_packed, lower, lower_plain
from logitless.backends.gpu.matmul import (
    launch,
    layout,
    linear,
    linear_int_dot,
    linear_software,
    split_k,
    unpack,
    unpack_low,
)
from logitless.backends.gpu.quantize import rounding
from logitless.graph.tensor import Tensor

WG = 64
PARTS = 2  # weights of a launch, at most
# Few rows of an expert, whose sums threads of a group share, or many. A group that shares sums has
# one place: its sums are not written twice.
SIMT_TILES = [
    {"WG": LANES * split_k.SPLITS[0], "MT": 1, "SPLIT": split_k.SPLITS[0], "CHUNKS": split_k.CHUNKS, "R": 1},
    {"WG": WG, "MT": 4, "SPLIT": 1, "CHUNKS": split_k.CHUNKS, "R": 1},
]
SOFT_TILE = {"WG": linear_software.WG, "MT": 2, "R": 2}  # one for any number of rows
MANY = 4  # rows of an expert, as a mean, that are worth a group of MT
EXPERT = "#define EXPERT(place) UINT(ORDER[2u * n_rows + (place)])\n"
FUNCTIONS = f"""
#define PAIR 0
{launch.MACROS}{EXPERT}
#define X_ROW(place) (per_row > 0u ? UINT(ORDER[place]) / per_row : (place))
"""
SOFT_FUNCTIONS = f"{linear_software.UNDEF}{linear_software.MACROS}#undef FIRST\n#define FIRST unit\n"


def _begin(unit: str) -> str:
    """Code that finds a thread's weight and begins a loop over the experts of its group's
    rows, `place` up to n_m.

    Groups of 16 outputs are counted through all experts: one expert's are `own_groups` up to
    `groups`, a thread's the R from `unit` on.
    """
    return f"""
  uint n_n = n_0, y_at = 0u, own_unit = {unit}, end = min(GX * MT + MT, n_rows), n_m = 0u;
  CHOOSE(0u)
  if (n_1 > 0u && own_unit >= UNITS(n_0)) {{
    own_unit -= UNITS(n_0); y_at = n_rows * n_0; n_n = n_1;
    CHOOSE(1u)
  }}
  for (uint place = GX * MT; place < end; place = n_m) {{
  uint expert = EXPERT(place), own_groups = expert * (n_n / 16u), groups = own_groups + n_n / 16u;
  uint unit = own_groups + own_unit * R;
  n_m = place + 1u;
  while (n_m < end && EXPERT(n_m) == expert) n_m++;"""


def _end(value: str, kept: str, group: str) -> str:
    return f"""{{
      uint row = place + m, first_y = y_at + row * n_n, column = ({group} - own_groups) * 16u;
      if (row < n_m && {group} < groups) {{ LSTN(Y, first_y + column, first_y + n_n, {value}); }}
    }}"""


def _args(x: str, own: str, of: int = PARTS) -> str:
    return f"{x} X, {unpack.several(own, of)}, i32 ORDER, w f32 Y"


ROW = "X_ROW(min(place + m, n_m - 1u))"
WORDS = "uint n_rows n_k n_0 n_1 per_row"
BACK_WORDS = "uint n n_rows n_n n_k"
for _dtype in layout.PACKINGS:
    _weights = unpack.args(_dtype)
    Kernel(
        f"expert_linear_{_dtype}",
        _args("f32", _weights),
        WORDS,
        linear.n_blocks(_dtype) + split_k.frame(_begin(split_k.UNIT), linear.step(_dtype), row=ROW, end=_end) + "  }",
        simt=SIMT_TILES,
        cpu=[tile | {"R": 1} for tile in linear.CPU_TILES],
        local=split_k.SUMS,
        functions=FUNCTIONS + unpack_low.functions(_dtype),
    )
    Kernel(
        f"expert_linear_soft_{_dtype}",
        _args("f32", linear_software.wider(_weights)),
        WORDS,
        linear_software.frame(_begin(linear_software.UNIT), linear_software.steps(_dtype), row=ROW, end=_end) + "  }",
        simt=(),
        cpu=(),
        soft=[SOFT_TILE],
        functions=FUNCTIONS + SOFT_FUNCTIONS + unpack_low.functions(_dtype, soft=True),
    )
    if _dtype in unpack.BLOCKS:
        Kernel(
            f"expert_linear_dot_{_dtype}",
            _args("u32x4", unpack.args(_dtype, wide=True)),
            WORDS,
            linear.n_blocks(_dtype)
            + split_k.frame(_begin(split_k.UNIT), linear_int_dot.block_step(_dtype), row=ROW, end=_end)
            + "  }",
            simt=SIMT_TILES,
            cpu=(),
            local=split_k.SUMS,
            functions=FUNCTIONS + linear_int_dot.FUNCTIONS + unpack_low.functions(_dtype),
            extensions=("GL_EXT_spirv_intrinsics",),
        )
    # Gradients pass back through the very bytes that are served.
    Kernel(
        f"expert_matmul_{_dtype}",
        _args("f32", _weights, 1),
        f"{BACK_WORDS} wide",
        """
  FOR_EACH(i, n) {
    uint place = i / n_k, first = EXPERT(place) * n_n;
    PRECISE float total = 0.0f;
    for (uint j = 0u; j < n_n; j++) {
      ELEMENT(w, first + j, i % n_k)
      total = FMA(X[place * n_n + j], w, total);
    }
    Y[i] = total;
  }""",
        functions=EXPERT + unpack.element(_dtype),
    )
# With weights that are no constants: element (n, k) of an expert's is n · wn + k · wk behind its
# first.
Kernel(
    "expert_product",
    "f32 X W, i32 ORDER, w f32 Y",
    f"{BACK_WORDS} wn wk",
    """
  FOR_EACH(i, n) {
    uint place = i / n_n, at = EXPERT(place) * n_n * n_k + i % n_n * wn;
    PRECISE float total = 0.0f;
    for (uint k = 0u; k < n_k; k++) total = FMA(X[place * n_k + k], W[at + k * wk], total);
    Y[i] = total;
  }""",
    functions=EXPERT,
)
# An expert's rows begin where a bisection finds its first place.
Kernel(
    "expert_products",
    "f32 A B, i32 ORDER, w f32 Y",
    "uint n n_rows n_m n_k",
    """
  FOR_EACH(i, n) {
    uint row = i / n_k, expert = row / n_m, first = 0u, behind = n_rows;
    while (first < behind) {
      uint place = (first + behind) / 2u;
      if (EXPERT(place) < expert) first = place + 1u; else behind = place;
    }
    PRECISE float total = 0.0f;
    for (uint place = first; place < n_rows && EXPERT(place) == expert; place++)
      total = FMA(A[place * n_m + row % n_m], B[place * n_k + i % n_k], total);
    Y[i] = total;
  }""",
    functions=EXPERT,
)


@lower("expert_linear")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    x, w, order = t.src
    return _product(t, x, order, [w], 0, shape) if is_packed(w) else _of_floats(t, shape, w.shape[1], (w.shape[1], 1))


@lower("expert_parts")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    x, order, *parts = t.src
    return _product(t, x, order, parts, order.shape[1] // x.shape[0], shape)


def whole_groups(w: Tensor, n: int) -> bool:
    """True if a packed weight has groups of 16 outputs for each of n experts."""
    return is_packed(w) and layout.packs(w) and w.shape[0] // n % LANES == 0


def _product(
    t: Tensor, x: Tensor, order: Tensor, parts: Sequence[Tensor], per_row: int, shape: Shape
) -> list[Dispatch] | None:
    n, rows, dtype = t.attrs["n"], order.shape[1], parts[0].dtype
    if len(parts) > PARTS or not all(whole_groups(w, n) and w.dtype == dtype for w in parts):
        return None
    mt, per_unit, units, dots = 1, 1, 1, shape.dot and dtype in unpack.BLOCKS
    name = "expert_linear_dot" if dots else "expert_linear"
    if shape.name == "soft":
        name, mt, per_unit, units = "expert_linear_soft", SOFT_TILE["MT"], SOFT_TILE["R"], SOFT_TILE["WG"] // 8
    elif rows >= MANY * n or not KERNELS[f"{name}_{dtype}"].find(shape, MT=1):
        mt, units = 4, 1 if shape.name == "cpu" else WG // LANES
    sizes = [w.shape[0] // n for w in parts] + [0] * (PARTS - len(parts))
    groups = (-(-rows // mt), -(-sum(-(-size // (LANES * per_unit)) for size in sizes) // units))
    full = [*parts, *[parts[0]] * (PARTS - len(parts))]
    sections: list[At] = [at for of_all in zip(*map(unpack.buffers, full), strict=True) for at in of_all]
    buffers: Buffers = (x, *sections, order, t)
    product = dispatch(f"{name}_{dtype}", shape, buffers, (rows, x.shape[1], *sizes, per_row), groups, MT=mt)
    return linear_int_dot.of_rounded(product, rounding(x, shape)) if dots else [product]


@lower("expert_matmul")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    x, w, order = t.src
    (rows, n), k = x.shape, w.shape[1]
    if not is_packed(w):
        return _of_floats(t, shape, n, (1, k))
    buffers: Buffers = (x, *unpack.buffers(w), order, t)
    words = (rows * k, rows, n, k, int(shape.dot))
    return [dispatch(f"expert_matmul_{w.dtype}", shape, buffers, words)]


def _of_floats(t: Tensor, shape: Shape, depth: int, steps: tuple[int, int]) -> list[Dispatch] | None:
    """Product with weights that are not constant; `steps`: strides to the next output and the
    next k.
    """
    if t.src[1].dtype != "f32":
        return None
    (rows, n), total = t.shape, t.size
    words = (total, rows, n, depth, *steps)
    return [dispatch("expert_product", shape, (*t.src, t), words)]


lower_plain(expert_products=lambda R, M, K, n, **_: (n * M * K, R, M, K))

"""Elementwise kernels: unary, binary with numpy's broadcasting, GLU, their gradients."""

from __future__ import annotations

from logitless.backends.gpu.language.dialect import Arg, Kernel, Shape
from logitless.backends.gpu.lowering import Dispatch, bits, dispatch, groups_for, lower, n_elements, rewrite
from logitless.graph.ops.elementwise import gated
from logitless.graph.tensor import Tensor

WG = 128
FUNCTIONS = """
FN float sigmoid(float x) { return 1.0f / (1.0f + EXP(-x)); }
FN float silu_back(float g, float x) { float s = sigmoid(x); return g * s * (1.0f + x * (1.0f - s)); }
FN float gelu_tanh(float x) { return TANH(0.7978845608f * (x + 0.044715f * x * x * x)); }
FN float gelu_back(float g, float x) {
  float t = gelu_tanh(x);
  return g * (0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * 0.7978845608f * (1.0f + 0.134145f * x * x));
}
"""
UNARY = {
    "silu": "SILU(x)",
    "gelu": "GELU(x)",
    "scale": "x * p",
    "softcap": "p * TANH(x / p)",
    "sqrt": "sqrt(x)",
    "log": "LOG(x)",
    "exp": "EXP(x)",
    "tanh": "TANH(x)",
    "sin": "SIN(x)",
    "cos": "COS(x)",
    "step": "x > 0.0f ? 1.0f : 0.0f",
    "sign": "x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x",
    "relu": "x < 0.0f ? 0.0f : x",
    "sigmoid": "sigmoid(x)",
    "softplus": "(x < 0.0f ? 0.0f : x) + LOG(1.0f + EXP(-FABS(x)))",
    "elu": "x > 0.0f ? x : EXP(x) - 1.0f",
}
BINARY = {
    "add": "a + b",
    "sub": "a - b",
    "mul": "a * b",
    "div": "a / b",
    "relu_back": "b > 0.0f ? a : 0.0f",
    "elu_back": "b > 0.0f ? a : a * (b + 1.0f)",
    "gate": "b == 0.0f ? 0.0f : a * b",
    "silu_back": "silu_back(a, b)",
    "gelu_back": "gelu_back(a, b)",
    "glu_silu": "SILU(a) * b",
    "glu_gelu": "GELU(a) * b",
}
# ops with a kernel for all of numpy's broadcasting
BROADCAST = ("add", "sub", "mul", "div")
PARAMETER = {"scale": "factor", "softcap": "cap"}
MAX_DIMS = 4

for _name, _formula in UNARY.items():
    Kernel(
        f"unary_{_name}",
        [Arg("X", "f32"), Arg("Y", "f32", "w")],
        ["uint n", "float p"],
        f"  FOR_EACH(i, n) {{ float x = X[i]; Y[i] = {_formula}; }}",
        wg=WG,
        functions=FUNCTIONS,
    )
for _name, _formula in BINARY.items():
    # b has the same shape (period n), is one row for all (period of a row), or one number (period
    # 1)
    Kernel(
        f"binary_{_name}",
        [Arg("A", "f32"), Arg("B", "f32"), Arg("Y", "f32", "w")],
        ["uint n", "uint period"],
        "  if (period == n) {\n"
        f"    FOR_EACH(i, n) {{ float a = A[i], b = B[i]; Y[i] = {_formula}; }}\n"
        "  } else {\n"
        f"    FOR_EACH(i, n) {{ float a = A[i], b = B[i % period]; Y[i] = {_formula}; }}\n"
        "  }",
        wg=WG,
        functions=FUNCTIONS,
    )
# Compared, because `min` may lose a NaN.
Kernel(
    "binary_glu_clamped",
    [Arg("A", "f32"), Arg("B", "f32"), Arg("Y", "f32", "w")],
    ["uint n", "float alpha", "float limit"],
    """
  FOR_EACH(i, n) {
    float a = A[i], b = B[i];
    a = a > limit ? limit : a;
    b = b > limit ? limit : b < -limit ? -limit : b;
    Y[i] = a * sigmoid(alpha * a) * (1.0f + b);
  }""",
    wg=WG,
    functions=FUNCTIONS,
)
Kernel(
    "unary_clamp",
    [Arg("X", "f32"), Arg("Y", "f32", "w")],
    ["uint n", "float low", "float high"],
    "  FOR_EACH(i, n) { float x = X[i]; Y[i] = x < low ? low : x > high ? high : x; }",
    wg=WG,
)
for _name in BROADCAST:
    Kernel(
        f"broadcast_{_name}",
        [Arg("A", "f32"), Arg("B", "f32"), Arg("Y", "f32", "w")],
        ["uint n", *(f"uint {v}{i}" for v in "nab" for i in range(1, MAX_DIMS)), "uint a0", "uint b0"],
        "  FOR_EACH(i, n) {\n"
        "    uint i3 = i % n3, r = i / n3, i2 = r % n2; r /= n2;\n"
        "    uint i1 = r % n1, i0 = r / n1;\n"
        "    float a = A[i0 * a0 + i1 * a1 + i2 * a2 + i3 * a3], b = B[i0 * b0 + i1 * b1 + i2 * b2 + i3 * b3];\n"
        f"    Y[i] = {BINARY[_name]};\n"
        "  }",
        wg=WG,
    )
Kernel(
    "broadcast_to",
    [Arg("X", "f32"), Arg("Y", "f32", "w")],
    ["uint n", *(f"uint {v}{i}" for v in "na" for i in range(1, MAX_DIMS)), "uint a0"],
    """
  FOR_EACH(i, n) {
    uint i3 = i % n3, r = i / n3, i2 = r % n2; r /= n2;
    uint i1 = r % n1, i0 = r / n1;
    Y[i] = X[i0 * a0 + i1 * a1 + i2 * a2 + i3 * a3];
  }""",
    wg=WG,
)
# Sums over a box of up to 4 axes of x for each element of the result, one after the other.
Kernel(
    "sum_to",
    [Arg("X", "f32"), Arg("Y", "f32", "w")],
    ["uint n", *(f"uint {v}{i}" for v in "nak" for i in range(MAX_DIMS))],
    """
  FOR_EACH(i, n) {
    uint i3 = i % n3, r = i / n3, i2 = r % n2; r /= n2;
    uint i1 = r % n1, i0 = r / n1;
    uint s1 = a1, s2 = a2, s3 = a3;
    uint at = i0 * (n0 == 1u ? 0u : a0) + i1 * (n1 == 1u ? 0u : a1) + i2 * (n2 == 1u ? 0u : a2)
            + i3 * (n3 == 1u ? 0u : a3);
    PRECISE float total = 0.0f;
    PRECISE float lost = 0.0f; /* Kahan's compensation: a sum over all tokens may have millions of terms */
    for (uint j0 = 0u; j0 < k0; j0++) for (uint j1 = 0u; j1 < k1; j1++)
      for (uint j2 = 0u; j2 < k2; j2++) for (uint j3 = 0u; j3 < k3; j3++) {
        PRECISE float y = X[at + j0 * a0 + j1 * s1 + j2 * s2 + j3 * s3] - lost;
        PRECISE float next = total + y;
        lost = (next - total) - y;
        total = next;
      }
    Y[i] = total;
  }""",
    wg=WG,
)


def _unary(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    n = n_elements(t)
    p = t.attrs.get(PARAMETER.get(t.op, ""), 0.0)
    return [dispatch(f"unary_{t.op}", shape, (t.src[0], t), (n, bits(p)), groups_for(n, shape, WG))]


for _name in UNARY:
    lower(_name)(_unary)


@lower("clamp")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    n = n_elements(t)
    words = (n, bits(t.attrs["low"]), bits(t.attrs["high"]))
    return [dispatch("unary_clamp", shape, (t.src[0], t), words, groups_for(n, shape, WG))]


def period(a: Tensor, b: Tensor) -> int | None:
    """Number of elements of a after which those of b repeat; None where full broadcasting is
    needed.
    """
    n = n_elements(b)
    return n if n == 1 or b.shape == a.shape[len(a.shape) - len(b.shape) :] else None


def _binary(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    a, b = t.src
    if a.dtype != "f32" or b.dtype != "f32":
        return None
    n = n_elements(t)
    every = period(a, b)
    if t.shape == a.shape and every is not None:
        name = f"glu_{t.attrs['activation']}" if t.op == "glu" else t.op
        return [dispatch(f"binary_{name}", shape, (a, b, t), (n, every), groups_for(n, shape, WG))]
    if t.op not in BROADCAST or len(t.shape) > MAX_DIMS:
        return None
    full = (1,) * (MAX_DIMS - len(t.shape)) + t.shape
    sa, sb = strides(a, full), strides(b, full)
    words = (n, *full[1:], *sa[1:], *sb[1:], sa[0], sb[0])
    return [dispatch(f"broadcast_{t.op}", shape, (a, b, t), words, groups_for(n, shape, WG))]


for _name in (*BROADCAST, "gate", "silu_back", "gelu_back", "relu_back", "elu_back", "glu"):
    lower(_name)(_binary)


@lower("glu_clamped")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    if any(s.shape != t.shape or s.dtype != "f32" for s in t.src):
        return None
    n = n_elements(t)
    words = (n, bits(t.attrs["alpha"]), bits(t.attrs["limit"]))
    return [dispatch("binary_glu_clamped", shape, (*t.src, t), words, groups_for(n, shape, WG))]


def strides(t: Tensor, full: tuple[int, ...]) -> tuple[int, ...]:
    """Elements from one index to the next in each axis of the full shape; 0 where t is
    broadcast.
    """
    own = (1,) * (len(full) - len(t.shape)) + t.shape
    steps, step = [], 1
    for size in reversed(own):
        steps.append(0 if size == 1 else step)
        step *= size
    return tuple(reversed(steps))


rewrite("mul")(gated)


@lower("broadcast_to")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    if len(t.shape) > MAX_DIMS:
        return None
    n, full = n_elements(t), (1,) * (MAX_DIMS - len(t.shape)) + t.shape
    step = strides(t.src[0], full)
    words = (n, *full[1:], *step[1:], step[0])
    return [dispatch("broadcast_to", shape, (t.src[0], t), words, groups_for(n, shape, WG))]


@lower("sum_to")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    x = t.src[0]
    if len(x.shape) > MAX_DIMS:
        return None
    full = (1,) * (MAX_DIMS - len(x.shape)) + x.shape
    shape_of_y = (1,) * (MAX_DIMS - len(t.shape)) + t.shape
    summed = tuple(f if k == 1 else 1 for f, k in zip(full, shape_of_y, strict=True))
    n = n_elements(t)
    words = (n, *shape_of_y, *strides(x, full), *summed)
    return [dispatch("sum_to", shape, (x, t), words, groups_for(n, shape, 1))]

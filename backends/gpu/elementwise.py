"""Elementwise kernels: formulas of graph/scalar.py as C text, arithmetic with numpy's broadcasting."""

from __future__ import annotations

from logitless.backends.gpu.language.dialect import Kernel, Shape
from logitless.backends.gpu.lowering import Dispatch, bits, dispatch, groups_for, lower, rewrite
from logitless.graph import scalar
from logitless.graph.ops import pointwise  # noqa: F401  (declares formulas)
from logitless.graph.ops.elementwise import gated
from logitless.graph.ops.training import optimizer  # noqa: F401  (declares formulas)
from logitless.graph.tensor import Tensor, broadcast_strides

WG = 128
CALL = (0, 0)
# Operators of graph/scalar.py as text, how tightly they bind, and how tightly arguments have to.
FORMS: dict[str, scalar.Form] = {
    **{name: (f"{name.upper()}({{}})", 8, CALL) for name in ("exp", "log", "tanh", "sin", "cos", "silu", "gelu")},
    "sqrt": ("sqrt({})", 8, CALL),
    "abs": ("FABS({})", 8, CALL),
    "neg": ("-{}", 6, (7,)),
    "mul": ("{} * {}", 5, (5, 6)),
    "div": ("{} / {}", 5, (5, 6)),
    "add": ("{} + {}", 4, (4, 5)),
    "sub": ("{} - {}", 4, (4, 5)),
    "fma": ("{2} + {0} * {1}", 4, (5, 6, 4)),
    "log1p": ("LOG(1.0f + {})", 8, (5,)),
    "sigmoid": ("1.0f / (1.0f + EXP(-{}))", 5, (7,)),
    "times_sigmoid": ("{} * (1.0f / (1.0f + EXP(-{})))", 5, (5, 7)),
    "less": ("{} < {}", 3, (4, 4)),
    "equal": ("{} == {}", 2, (3, 3)),
    "where": ("{} ? {} : {}", 1, (2, 1, 1)),
}
# the same derivative as the tree's, with products in another order (docs/experiments/scalar.md)
GELU_BACK = """
FN float gelu_tanh(float x) { return TANH(0.7978845608f * (x + 0.044715f * x * x * x)); }
FN float gelu_back(float g, float x) {
  float t = gelu_tanh(x);
  return g * (0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * 0.7978845608f * (1.0f + 0.134145f * x * x));
}
"""
BROADCAST = ("add", "sub", "mul", "div")  # with a kernel for all of numpy's broadcasting
BUFFERS = "ABC"  # of sources
MAX_DIMS = 4


def _text(tree: scalar.Tree) -> tuple[list[tuple[str, str]], str]:
    return scalar.text(tree.result, FORMS, lambda value: f"{value!r}f")


def _kernel_name(key: str) -> str:
    return f"map_{key.replace(':', '_')}"


def _map(key: str) -> None:
    """The kernel of an op whose sources have one shape."""
    tree = scalar.tree(key)
    parts, result = _text(tree)
    if key == "gelu_back":
        parts, result = [], "gelu_back(g, x)"
    loads = ", ".join(f"{name} = {buffer}[i]" for buffer, name in zip(BUFFERS, tree.sources, strict=False))
    steps = "".join(f"float {name} = {value}; " for name, value in parts)
    Kernel(
        _kernel_name(key),
        f"f32 {' '.join(BUFFERS[: len(tree.sources)])}, w f32 Y",
        "uint n" + "".join(f", float {name}" for name in tree.attributes),
        f"  FOR_EACH(i, n) {{ float {loads}; {steps}Y[i] = {result}; }}",
        wg=WG,
        functions=GELU_BACK if key == "gelu_back" else "",
    )


MAPPED = [name for name in scalar.FORMULAS if name not in BROADCAST]
for _name in MAPPED:
    for _key in scalar.keys(_name):
        _map(_key)
for _name in BROADCAST:
    _formula = _text(scalar.tree(_name))[1]
    # b has the same shape (period n), is one row for all (period of a row), or one number (period
    # 1)
    Kernel(
        f"binary_{_name}",
        "f32 A B, w f32 Y",
        "uint n period",
        "  if (period == n) {\n"
        f"    FOR_EACH(i, n) {{ float a = A[i], b = B[i]; Y[i] = {_formula}; }}\n"
        "  } else {\n"
        f"    FOR_EACH(i, n) {{ float a = A[i], b = B[i % period]; Y[i] = {_formula}; }}\n"
        "  }",
        wg=WG,
    )
    Kernel(
        f"broadcast_{_name}",
        "f32 A B, w f32 Y",
        "uint n n1 n2 n3 a1 a2 a3 b1 b2 b3 a0 b0",
        "  FOR_EACH(i, n) {\n"
        "    uint i3 = i % n3, r = i / n3, i2 = r % n2; r /= n2;\n"
        "    uint i1 = r % n1, i0 = r / n1;\n"
        "    float a = A[i0 * a0 + i1 * a1 + i2 * a2 + i3 * a3], b = B[i0 * b0 + i1 * b1 + i2 * b2 + i3 * b3];\n"
        f"    Y[i] = {_formula};\n"
        "  }",
        wg=WG,
    )
# Sums over a box of up to 4 axes of x for each element of the result, one after the other.
Kernel(
    "sum_to",
    "f32 X, w f32 Y",
    "uint n n0 n1 n2 n3 a0 a1 a2 a3 k0 k1 k2 k3",
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


def _elementwise(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    if any(s.shape != t.shape or s.dtype != "f32" for s in t.src):
        return None
    n, key = t.size, scalar.key(t)
    words = (n, *(bits(t.attrs[name]) for name in scalar.tree(key).attributes))
    return [dispatch(_kernel_name(key), shape, (*t.src, t), words)]


for _name in MAPPED:
    lower(_name)(_elementwise)


def period(a: Tensor, b: Tensor) -> int | None:
    """Number of elements of a after which those of b repeat; None where full broadcasting is needed."""
    n = b.size
    return n if n == 1 or b.shape == a.shape[len(a.shape) - len(b.shape) :] else None


def _binary(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    a, b = t.src
    if a.dtype != "f32" or b.dtype != "f32":
        return None
    n = t.size
    every = period(a, b)
    if t.shape == a.shape and every is not None:
        return [dispatch(f"binary_{t.op}", shape, (a, b, t), (n, every))]
    if len(t.shape) > MAX_DIMS:
        return None
    full = (1,) * (MAX_DIMS - len(t.shape)) + t.shape
    sa, sb = broadcast_strides(a.shape, full), broadcast_strides(b.shape, full)
    words = (n, *full[1:], *sa[1:], *sb[1:], sa[0], sb[0])
    return [dispatch(f"broadcast_{t.op}", shape, (a, b, t), words)]


for _name in BROADCAST:
    lower(_name)(_binary)


rewrite("mul")(gated)


@lower("sum_to")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    x = t.src[0]
    if len(x.shape) > MAX_DIMS:
        return None
    full = (1,) * (MAX_DIMS - len(x.shape)) + x.shape
    shape_of_y = (1,) * (MAX_DIMS - len(t.shape)) + t.shape
    summed = tuple(f if k == 1 else 1 for f, k in zip(full, shape_of_y, strict=True))
    n = t.size
    words = (n, *shape_of_y, *broadcast_strides(x.shape, full), *summed)
    return [dispatch("sum_to", shape, (x, t), words, groups_for(n, shape, 1))]

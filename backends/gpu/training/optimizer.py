"""Optimizer step on variables, in place, and the norm of a set of gradients."""

from __future__ import annotations

from logitless.backends.gpu.language.dialect import Kernel, Shape
from logitless.backends.gpu.lowering import Dispatch, dispatch, lower, row_groups
from logitless.backends.gpu.training.loss import LOCAL, row_sum
from logitless.graph.ops.training import optimizer
from logitless.graph.tensor import Tensor

WG = 128
COLUMNS = ("RATE", "BETA_1", "BETA_2", "REST_1", "REST_2", "EPS", "DECAY", "CORRECTION_1", "CORRECTION_2")
NAMES = "".join(f"#define {name} P[{getattr(optimizer, name)}]\n" for name in COLUMNS)

Kernel(
    "adamw_step",
    "rw f32 W M V, f32 G P F",
    "uint n decays",
    """
  float keep = decays != 0u ? 1.0f - RATE * DECAY : 1.0f;
  FOR_EACH(i, n) {
    float g = G[i] * F[0];
    float m = BETA_1 * M[i] + REST_1 * g;
    float v = BETA_2 * V[i] + REST_2 * g * g;
    M[i] = m;
    V[i] = v;
    W[i] = W[i] * keep - RATE * (m * CORRECTION_1) / (sqrt(v * CORRECTION_2) + EPS);
  }""",
    wg=WG,
    functions=NAMES,
)
Kernel(
    "sgd_step",
    "rw f32 W, f32 G P F",
    "uint n decays",
    """
  float keep = decays != 0u ? 1.0f - P[0] * P[1] : 1.0f;
  FOR_EACH(i, n) W[i] = W[i] * keep - P[0] * (G[i] * F[0]);""",
    wg=WG,
)
Kernel("accumulate", "rw f32 Y, f32 X", "uint n", "  FOR_EACH(i, n) Y[i] = Y[i] + X[i];", wg=WG)
# Row `row` of n elements, the last one shorter: its sum of squares, or its sum, at element `first +
# row` of the result.
for _name, _term in (("square_sums", "X[at + i] * X[at + i]"), ("sums", "X[at + i]")):
    Kernel(
        _name,
        "f32 X, w f32 Y",
        "uint chunk n_all rows first",
        "  for (uint row = GX; row < rows; row += NGX) {\n"
        f"    uint at = row * chunk, n = min(chunk, n_all - at);{row_sum('total', _term)}\n"
        "    if (LID == 0u) Y[first + row] = total;\n    BARRIER();\n  }",
        local=LOCAL,
    )
Kernel(
    "root_of_sum",
    "f32 X, w f32 Y",
    "uint n",
    f"    uint at = 0u;{row_sum('total', 'X[at + i]')}\n    if (LID == 0u) Y[0] = sqrt(total);",
    local=LOCAL,
)


@lower("adamw_step")
@lower("sgd_step")
def _(t: Tensor, shape: Shape) -> list[Dispatch]:
    return [dispatch(t.op, shape, t.src, (t.size, int(t.attrs.get("decays", True))))]


@lower("accumulate")
def _(t: Tensor, shape: Shape) -> list[Dispatch]:
    return [dispatch("accumulate", shape, t.src, (t.size,))]


@lower("clear")
def _(t: Tensor, shape: Shape) -> list[Dispatch]:
    return [dispatch("fill", shape, (t,), (t.size, 0))]


@lower("square_sums")
def _(t: Tensor, shape: Shape) -> list[Dispatch]:
    words = (optimizer.SUM_CHUNK, t.src[0].size, t.shape[0], 0)
    return [dispatch("square_sums", shape, (t.src[0], t), words, row_groups(t.shape[0], shape))]


@lower("norm_of_sums")
def _(t: Tensor, shape: Shape) -> list[Dispatch]:
    """Each vector's sum goes to the scratch; then the root of the sum of these."""
    scratch = 4 * len(t.src)
    launches = []
    for i, s in enumerate(t.src):
        n = s.size
        launches.append(dispatch("sums", shape, (s, None), (max(n, 1), n, 1, i), 1, scratch))
    return [*launches, dispatch("root_of_sum", shape, (None, t), (len(t.src),), 1, scratch)]

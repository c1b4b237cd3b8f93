"""Softmax and losses: a work group a row, 64 partial sums in the same order on every device."""

from __future__ import annotations

from logitless.backends.gpu.language.dialect import Kernel
from logitless.backends.gpu.lowering import lower_rows, rows_of

LOCAL = "float parts[64]"


def row_sum(name: str, term: str) -> str:
    """Code that declares `name`: the sum over i of a term of a row of n elements from `at`."""
    return f"""
    for (uint j = LID; j < 64u; j += WG) {{
      PRECISE float part = 0.0f;
      for (uint i = j; i < n; i += 64u) part = part + ({term});
      parts[j] = part;
    }}
    BARRIER();
    PRECISE float {name} = 0.0f;
    for (uint j = 0u; j < 64u; j++) {name} = {name} + parts[j];
    BARRIER();"""


ROW_TOP = """
    for (uint j = LID; j < 64u; j += WG) {
      float part = -INF;
      for (uint i = j; i < n; i += 64u) part = max(part, X[at + i]);
      parts[j] = part;
    }
    BARRIER();
    float top = parts[0];
    for (uint j = 1u; j < 64u; j++) top = max(top, parts[j]);
    BARRIER();"""
TOTAL = ROW_TOP + row_sum("total", "EXP(X[at + i] - top)")
EACH = "for (uint i = LID; i < n; i += WG)"
BODIES = {
    "softmax": ("f32 X, w f32 Y", f"{TOTAL}\n    {EACH} Y[at + i] = EXP(X[at + i] - top) / total;"),
    "softmax_back": (
        "f32 G X, w f32 Y",
        f"{row_sum('dot_product', 'G[at + i] * X[at + i]')}\n"
        f"    {EACH} Y[at + i] = X[at + i] * (G[at + i] - dot_product);",
    ),
    "cross_entropy": (
        "f32 X, i32 T, w f32 Y",
        f"{TOTAL}\n    if (LID == 0u) Y[row] = T[row] < 0 ? 0.0f : LOG(total) + top - X[at + UINT(T[row])];",
    ),
    "cross_entropy_back": (
        "f32 G X, i32 T, w f32 Y",
        f"{TOTAL}\n    int target = T[row];\n    float g = G[row];\n    {EACH} {{\n"
        "      float p = EXP(X[at + i] - top) / total;\n"
        "      Y[at + i] = target < 0 ? 0.0f : (INT(i) == target ? p - 1.0f : p) * g;\n    }",
    ),
    "soft_cross_entropy": (
        "f32 X T, w f32 Y",
        f"{TOTAL}\n    float lse = LOG(total);{row_sum('loss', 'T[at + i] * (lse + top - X[at + i])')}\n"
        "    if (LID == 0u) Y[row] = loss;",
    ),
    "soft_cross_entropy_back": (
        "f32 G X T, w f32 Y",
        f"{TOTAL}\n    float g = G[row];\n    {EACH} Y[at + i] = g * (EXP(X[at + i] - top) / total - T[at + i]);",
    ),
}
for _name, (_args, _body) in BODIES.items():
    Kernel(
        _name,
        _args,
        "uint n rows",
        f"  for (uint row = GX; row < rows; row += NGX) {{\n    uint at = row * n;{_body}\n    BARRIER();\n  }}",
        local=LOCAL,
    )


lower_rows(
    softmax=lambda x, **_: rows_of(x),
    softmax_back=lambda y, **_: rows_of(y),
    cross_entropy=lambda R, V, **_: (V, R),
    cross_entropy_back=lambda R, V, **_: (V, R),
    soft_cross_entropy=lambda R, V, **_: (V, R),
    soft_cross_entropy_back=lambda R, V, **_: (V, R),
)

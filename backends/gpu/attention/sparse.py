"""Choice of the cells of sparse attention (graph/ops/attention/mla.py): scores, then masks in their place.

A score is one thread's. A group has a row's masks: it finds the n-th greatest score bit by bit, counting those that
reach a value, and then, also bit by bit, the last cell of equal scores that is chosen."""

from __future__ import annotations

from logitless.backends.gpu.attention.kv_nibbles import FUNCTIONS as NIBBLE_FUNCTIONS
from logitless.backends.gpu.attention.kv_nibbles import NIBBLES, family, kind_of
from logitless.backends.gpu.attention.kv_store import CACHE_TYPES, ELEMENT, before_page, fits, scales_of
from logitless.backends.gpu.attention.mla import element_of
from logitless.backends.gpu.language.dialect import Arg, Kernel, Shape
from logitless.backends.gpu.lowering import Dispatch, dispatch, groups_for, lower, n_elements
from logitless.graph.tensor import Tensor

WG = 64


def _scores(dtype: str) -> None:
    scales = [Arg("KS", "u16")] if ELEMENT[dtype] == "u8" else []
    Kernel(
        f"index_scores_{dtype}",
        [
            *(Arg("Q", "f32"), Arg("W", "f32"), Arg("K", ELEMENT[dtype]), *scales, Arg("TABLE", "i32")),
            *(Arg("SLOT", "i32"), Arg("POS", "i32"), Arg("Y", "f32", "w")),
        ],
        ["uint n", "uint width", "uint n_heads", "uint size", "uint table_pages", *["uint kind"] * (dtype == NIBBLES)],
        f"""
  FOR_EACH(i, n) {{
    uint t = i / width, cell = i % width, c = cell % 16u;
    PRECISE float total = 0.0f;
    if (cell <= UINT(POS[t])) {{
      uint cell_page = UINT(TABLE[UINT(SLOT[t]) * table_pages + cell / 16u]), row_at = {before_page(dtype)};
      for (uint h = 0u; h < n_heads; h++) {{
        PRECISE float s = 0.0f;
        for (uint e = 0u; e < size; e++) {{
          float x = {element_of(dtype)};
          s = FMA(Q[(t * n_heads + h) * size + e], x, s);
        }}
        total = FMA(W[t * n_heads + h], max(s, 0.0f), total);
      }}
    }}
    Y[i] = total;
  }}""",
        wg=WG,
        functions=NIBBLE_FUNCTIONS * (dtype == NIBBLES),
    )


for _dtype in CACHE_TYPES:
    _scores(_dtype)

# Code that counts the row's cells for which a condition on `key` and `c` holds, in `found`.
_COUNT = """
    {{
      uint own = 0u;
      for (uint c = LID; c < count; c += WG) {{
        uint bits = F2U(Y[from + c]), key = bits ^ ((bits >> 31) != 0u ? 0xffffffffu : 0x80000000u);
        if ({condition}) own++;
      }}
      parts[LID] = own;
      BARRIER();
      found = 0u;
      for (uint i = 0u; i < WG; i++) found += parts[i];
      BARRIER();
    }}"""
Kernel(
    "choose_cells",
    [Arg("POS", "i32"), Arg("Y", "f32", "rw")],
    ["uint width", "uint most"],
    f"""
  uint t = GX, from = t * width, count = UINT(POS[t]) + 1u, least = 0u, last = 0u, found = 0u;
  if (count > most) {{
    for (uint j = 0u; j < 32u; j++) {{
      uint tried = least | (0x80000000u >> j);
      {_COUNT.format(condition="key >= tried")}
      if (found >= most) least = tried;
    }}
    {_COUNT.format(condition="key > least")}
    uint equal = most - found;
    for (uint j = 0u; j < 31u; j++) {{
      uint tried = last | (0x40000000u >> j);
      {_COUNT.format(condition="key == least && c < tried")}
      if (found < equal) last = tried;
    }}
  }}
  for (uint c = LID; c < width; c += WG) {{
    uint bits = F2U(Y[from + c]), key = bits ^ ((bits >> 31) != 0u ? 0xffffffffu : 0x80000000u);
    bool chosen = count <= most || key > least || (key == least && c <= last);
    Y[from + c] = c < count && chosen ? 0.0f : -1e30f;
  }}""",
    simt=[{"WG": 128}],
    cpu=[{"WG": 1}],
    soft=[{"WG": 16}],
    local=[("uint", "parts", "WG")],
)


@lower("chosen_cells")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    q, weights, k, tables, slot, pos = t.src
    tokens, n_heads, size = q.shape
    if not fits(size, k):
        return None
    n, width = n_elements(t), t.shape[1]
    bufs = (q, weights, k, *scales_of(k), tables, slot, pos, t)
    words = (n, width, n_heads, size, tables.shape[1], *kind_of(k))
    return [
        dispatch(f"index_scores_{family(k.dtype)}", shape, bufs, words, groups_for(n, shape, WG)),
        dispatch("choose_cells", shape, (pos, t), (width, t.attrs["n"]), (tokens, 1)),
    ]

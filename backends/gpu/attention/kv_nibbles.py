"""Blocks of 4 and 5 bits in the KV cache: one kernel has all their types.

The word `kind` tells them apart: 1 for fifth bits, 2 for minima, 4 for codes. Layout: graph/dtype.py (`KVType`).
"""

from __future__ import annotations

import itertools

from logitless.graph.dtype import KV_TYPES
from logitless.graph.tensor import Tensor

NIBBLES = "nibbles"  # their name in names of kernels
(CODES,) = {kind.codes for kind in KV_TYPES.values() if kind.codes}


def family(dtype: str) -> str:
    """The name of a cache's type in names of kernels."""
    return NIBBLES if KV_TYPES[dtype].rotated else dtype


def kind_of(*caches: Tensor) -> tuple[int, ...]:
    """The word that kernels of nibbles have more: the kinds of caches, three bits each; nothing without any."""
    kinds = [KV_TYPES[c.dtype] for c in caches]
    words = [int(k.bits == 5) + 2 * k.mins + 4 * bool(k.codes) if k.rotated else 0 for k in kinds]
    return (sum(word << 3 * i for i, word in enumerate(words)),) if any(k.rotated for k in kinds) else ()


def _words() -> list[str]:
    return [f"0x{int.from_bytes(bytes(c & 255 for c in CODES[i : i + 4]), 'little'):08x}u" for i in range(0, 16, 4)]


def _packed(cases: list[str]) -> str:
    return f"(q < 8u ? (q < 4u ? {cases[0]} : {cases[1]}) : (q < 12u ? {cases[2]} : {cases[3]}))"


# NIBBLE: the number of a quant in units of the scale.
FUNCTIONS = f"""
#define PAGE_OF(kind) (9u + 2u * ((kind) & 1u) + ((kind) >> 1 & 1u)) /* bytes for each element of the head */
#define SCALES_OF(kind) (8u + 2u * ((kind) & 1u))
FN float NIBBLE(uint q, uint kind) {{
  if ((kind & 4u) != 0u) {{
    uint word = {_packed(_words())};
    return FLOAT(INT(word << (24u - q % 4u * 8u)) >> 24);
  }}
  return FLOAT(INT(q) - ((kind & 2u) != 0u ? 0 : (kind & 1u) != 0u ? 16 : 8));
}}
"""


def number(
    data: str, words: str, page: str, cell: str, e: str, *, keys: bool, kind: str = "kind", part: str = "size"
) -> str:
    """Expression for element e of a cell, whose page begins at byte `page` of `data`, the bytes of `words`.

    `part`: the head's size for the places of the page's parts, a sixteenth of it in pages of one cell."""
    if keys:
        byte, shift, block = f"{e} / 2u * 16u + {cell}", f"{e} % 2u * 4u", f"{e} / 32u * 16u + {cell}"
    else:
        byte = f"{cell} * (size / 2u) + {e} / 32u * 16u + {e} % 16u"
        shift, block = f"{e} % 32u / 16u * 4u", f"{cell} * (size / 32u) + {e} / 32u"
    fifth = (
        f"(LOAD16({words}, ({page} + {part} * 8u) / 2u + ({block}) * 2u + {e} % 32u / 16u) >> ({e} % 16u) & 1u) << 4"
    )
    quant = f"(LOAD8({data}, {page} + {byte}) >> ({shift}) & 15u) | (({kind} & 1u) != 0u ? {fifth} : 0u)"
    scale = f"({page} + {part} * SCALES_OF({kind})) / 2u + {block}"
    low = f"({kind} & 2u) != 0u ? F16(LOAD16({words}, {scale} + {part} / 2u)) : 0.0f"
    return f"FMA(NIBBLE({quant}, {kind}), F16(LOAD16({words}, {scale})), {low})"


def store(*, keys: bool, part: str = "size") -> str:
    """Code that stores block j of a row: numbers X[from + …], cell `cell` of the page at byte `at`."""
    byte = "(j * 16u + k) * 16u + cell" if keys else "cell * (size / 2u) + j * 16u + k"
    block = "j * 16u + cell" if keys else "cell * (size / 32u) + j"
    first, apart = ("2u * k", 1) if keys else ("k", 16)
    steps = "".join(f" + UINT(v >= {(a + b) / 2}f)" for a, b in itertools.pairwise(CODES))
    return f"""
    uint from = row * size + j * 32u;
    float low = X[from], high = low, top = low;
    for (uint k = 1u; k < 32u; k++) {{
      float v = X[from + k];
      low = min(low, v);
      high = max(high, v);
      if (FABS(v) > FABS(top)) top = v;
    }}
    uint most = (kind & 1u) != 0u ? 31u : 15u;
    bool minima = (kind & 2u) != 0u, codes = (kind & 4u) != 0u;
    PRECISE float span = high - low;
    PRECISE float scale = minima ? span / FLOAT(most) : top / (codes ? -127.0f : -FLOAT(most / 2u + 1u));
    PRECISE float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
    if (!minima) low = 0.0f;
    float half_ = minima ? 0.5f : FLOAT(most / 2u + 1u) + 0.5f;
    uint quants[32];
    PRECISE float product = 0.0f;
    PRECISE float square = 0.0f;
    for (uint k = 0u; k < 32u; k++) {{
      PRECISE float v = X[from + k] - low;
      PRECISE float weight = v * v;
      v = v * inverse;
      if (codes) {{
        quants[k] = 0u{steps};
        PRECISE float weighted = NIBBLE(quants[k], kind);
        PRECISE float q = weighted;
        weighted = weight * weighted;
        PRECISE float a = weighted * X[from + k];
        PRECISE float b = weighted * q;
        product = product + a;
        square = square + b;
      }} else {{
        v = v + half_;
        quants[k] = min(most, UINT(v));
      }}
    }}
    if (codes) {{
      scale = square > 0.0f ? product / square : 0.0f;
      if (FABS(top) < 1e-15f) {{
        scale = 0.0f;
        for (uint k = 0u; k < 32u; k++) quants[k] = 8u;
      }}
    }}
    uint fifth = 0u;
    for (uint k = 0u; k < 32u; k++) fifth |= (quants[k] >> 4 & 1u) << k;
    for (uint k = 0u; k < 16u; k++)
      STORE8(C, at + {byte}, (quants[{first}] & 15u) | (quants[{first} + {apart}u] & 15u) << 4);
    if ((kind & 1u) != 0u) {{
      STORE16(S, (at + {part} * 8u) / 2u + ({block}) * 2u, fifth & 0xffffu);
      STORE16(S, (at + {part} * 8u) / 2u + ({block}) * 2u + 1u, fifth >> 16);
    }}
    uint scale_at = (at + {part} * SCALES_OF(kind)) / 2u + {block};
    STORE16(S, scale_at, TO_F16(scale));
    if (minima) STORE16(S, scale_at + {part} / 2u, TO_F16(low));"""

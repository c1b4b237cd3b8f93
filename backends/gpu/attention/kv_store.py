"""KV cache stores, loads and page copies.

The layout of pages is that of graph/dtype.py (`KVType`).
"""

from __future__ import annotations

from logitless.backends.gpu.attention.kv_nibbles import FUNCTIONS, NIBBLES, family, kind_of, number, store
from logitless.backends.gpu.language.dialect import Kernel, Shape
from logitless.backends.gpu.lowering import Dispatch, bits, dispatch, lower
from logitless.graph.dtype import KV_TYPES
from logitless.graph.ops.attention.paged_attention import PAGE
from logitless.graph.tensor import Tensor

ELEMENT = {"f32": "f32", "f16": "u16", "bf16": "u16", "q8_0": "u8", NIBBLES: "u8"}
CACHE_TYPES = tuple(ELEMENT)
# Types of keys and values that attention has kernels for; the others run on the CPU.
PAIRS = [(k, v) for k in ("f32", "f16", "q8_0") for v in ("f32", "f16", "q8_0")]
PAIRS += [("bf16", "bf16"), (NIBBLES, NIBBLES), ("q8_0", NIBBLES)]


def fits(size: int, *caches: Tensor) -> bool:
    """True if heads of this size are whole blocks of the caches' types."""
    return size % 32 == 0 or not any(KV_TYPES[c.dtype].bits for c in caches)


def cache_buffers(dtype: str, name: str, scales: str, access: str = "") -> str:
    """Declaration of a cache's buffer, and of that of its scales where it has some."""
    return f"{access}{ELEMENT[dtype]} {name}" + f", {access}u16 {scales}" * (ELEMENT[dtype] == "u8")


def page_elements(dtype: str, size: int) -> int:
    """Elements of a page of one head; those of block types are bytes."""
    return size * (KV_TYPES[dtype].page or PAGE)


def before_page(dtype: str, kind: str = "kind") -> str:
    """Expression for the elements before the page `cell_page` of one head.

    It stands in for a parameter: attention kernels have no room for another one.
    """
    size = {"q8_0": "size * 16u + size", NIBBLES: f"size * PAGE_OF({kind})"}.get(dtype, f"size * {PAGE}u")
    return f"(cell_page * ({size}))"


def scales_of(*caches: Tensor) -> tuple[Tensor, ...]:
    """The caches that have scales, which are separate buffers of a kernel."""
    return tuple(c for c in caches if KV_TYPES[c.dtype].bits)


# A row is a head of a token; its cell's page of that head begins at `at`.
WHERE = """
    uint row = i / per_row, t = row / n_heads, h = row % n_heads, cell = UINT(CELLS[t]) % 16u;
    uint at = (UINT(CELLS[t]) / 16u * n_heads + h) * page;"""
WORDS = "uint n n_heads size page"
TO_BF16 = """
FN uint TO_BF16(float x) { /* nearest even */
  uint bits = F2U(x);
  return (bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 64u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
"""


def _load(name: str, dtype: str) -> None:
    place = "at + d * 16u + cell" if name == "load_k" else "at + cell * size + d"
    scale = "d / 32u * 16u + cell" if name == "load_k" else "cell * (size / 32u) + d / 32u"
    value = {
        "f32": f"C[{place}]",
        "f16": f"F16(LOAD16(C, {place}))",
        "bf16": f"U2F(LOAD16(C, {place}) << 16)",
        NIBBLES: number("C", "S", "at", "cell", "d", keys=name == "load_k"),
        "q8_0": f"FLOAT((INT(LOAD8(C, {place})) << 24) >> 24) * F16(LOAD16(S, (at + size * 16u) / 2u + {scale}))",
    }[dtype]
    Kernel(
        f"{name}_{dtype}",
        f"{cache_buffers(dtype, 'C', 'S')}, i32 CELLS, w f32 Y",
        WORDS + " kind" * (dtype == NIBBLES),
        f"""
  uint per_row = size;
  FOR_EACH(i, n) {{{WHERE}
    uint d = i % size;
    Y[i] = {value};
  }}""",
        functions=FUNCTIONS * (dtype == NIBBLES),
    )


def block_store(dtype: str, *, keys: bool, part: str = "size") -> str:
    """Code that stores block j of row `row` in cell `cell` of the page at byte `at`. `part`: see kv_nibbles.py."""
    if dtype == NIBBLES:
        return store(keys=keys, part=part)
    place, scale_place = (
        ("d * 16u + cell", "j * 16u + cell") if keys else ("cell * size + d", "cell * (size / 32u) + j")
    )
    return f"""
    float most = 0.0f;
    for (uint k = 0u; k < 32u; k++) most = max(most, FABS(X[row * size + j * 32u + k]));
    float scale = most / 127.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    STORE16(S, (at + {part} * 16u) / 2u + {scale_place}, TO_F16(scale));
    for (uint k = 0u; k < 32u; k++) {{
      uint d = j * 32u + k;
      STORE8(C, at + {place}, UINT(INT(RINT(X[row * size + d] * inverse)) & 255));
    }}"""


def _store(name: str, dtype: str) -> None:
    """Declare the kernel that stores element d of a row in [D][16] (keys) or [16][D] (values)
    of its page.
    """
    place = "d * 16u + cell" if name == "store_k" else "cell * size + d"
    if ELEMENT[dtype] == "u8":
        body = f"""
  uint per_row = size / 32u;
  FOR_EACH(i, n) {{{WHERE}
    uint j = i % per_row;{block_store(dtype, keys=name == "store_k")}
  }}"""
    else:
        value = {
            "f32": f"C[at + {place}] = X[i];",
            "f16": f"STORE16(C, at + {place}, TO_F16(X[i]));",
            "bf16": f"STORE16(C, at + {place}, TO_BF16(X[i]));",
        }[dtype]
        body = f"""
  uint per_row = size;
  FOR_EACH(i, n) {{{WHERE}
    uint d = i % size;
    {value}
  }}"""
    Kernel(
        f"{name}_{dtype}",
        f"{cache_buffers(dtype, 'C', 'S', 'rw ')}, f32 X, i32 CELLS",
        WORDS + " kind" * (dtype == NIBBLES),
        body,
        functions={NIBBLES: FUNCTIONS, "bf16": TO_BF16}.get(dtype, ""),
    )


for _name in ("store_k", "store_v"):
    for _dtype in CACHE_TYPES:
        _store(_name, _dtype)
        _load(_name.replace("store", "load"), _dtype)
# `rope` of a pair of a head's elements, and where they go: 16 cells apart by element. With `both`,
# a pair of the head's values goes into their cache, too, whose pages are as large.
TURN_AND_STORE = """
  uint per_row = size / 2u + size % 2u;
  FOR_EACH(i, n) {WHERE
    uint p = i % per_row, from = row * size;
    if (p < half_n) {
      uint first = interleaved != 0u ? 2u * p : p, second = first + (interleaved != 0u ? 1u : half_n);
      float c = A[2u * t * half_n + p], s = A[(2u * t + 1u) * half_n + p] * direction;
      float a = X[from + first], b = X[from + second];
      PUT(C, at + first * 16u + cell, a * c - b * s);
      PUT(C, at + second * 16u + cell, a * s + b * c);
    } else {
      PUT(C, at + 2u * p * 16u + cell, X[from + 2u * p]);
      if (2u * p + 1u < size) PUT(C, at + (2u * p + 1u) * 16u + cell, X[from + 2u * p + 1u]);
    }
    VALUES
  }""".replace("WHERE", WHERE)
VALUES = """
    PUT(V, at + cell * size + 2u * p, Z[from + 2u * p]);
    if (2u * p + 1u < size) PUT(V, at + cell * size + 2u * p + 1u, Z[from + 2u * p + 1u]);"""
for _dtype, _put in (("f32", "b[i] = (v)"), ("f16", "STORE16(b, i, TO_F16(v))")):
    for _both in (False, True):
        Kernel(
            f"store_{'kv' if _both else 'k'}_rope_{_dtype}",
            f"rw {ELEMENT[_dtype]} C, f32 X, i32 CELLS, f32 A" + f", rw {ELEMENT[_dtype]} V, f32 Z" * _both,
            "uint n n_heads size page half_n interleaved, float direction",
            TURN_AND_STORE.replace("VALUES", VALUES if _both else ""),
            wg=64,
            functions=f"#define PUT(b, i, v) {_put}\n",
        )
# Pairs are copied in order; a thread has the same words of all of them.
Kernel(
    "copy_pages",
    "rw u32 C, i32 PAIRS",
    "uint n n_pairs",
    """
  FOR_EACH(i, n) {
    for (uint p = 0u; p < n_pairs; p++) C[UINT(PAIRS[2u * p + 1u]) * n + i] = C[UINT(PAIRS[2u * p]) * n + i];
  }""",
)


@lower("store_k")
@lower("store_v")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    cache, x, cells = t.src
    size = x.shape[2]
    if not fits(size, cache):
        return None
    n = x.size // (32 if KV_TYPES[cache.dtype].bits else 1)
    words = (n, x.shape[1], size, page_elements(cache.dtype, size), *kind_of(cache))
    bufs = (cache, *scales_of(cache), x, cells)
    return [dispatch(f"{t.op}_{family(cache.dtype)}", shape, bufs, words)]


def store_turned(t: Tensor, shape: Shape, values: Tensor | None = None) -> list[Dispatch] | None:
    """Launch a store of keys with RoPE; `values`: the node that stores their values in the
    same launch.
    """
    cache, x, cells, angles = t.src
    if cache.dtype not in ("f32", "f16"):
        return None
    tokens, heads, size = x.shape
    n = tokens * heads * (size // 2 + size % 2)
    turn = (angles.shape[2], int(t.attrs["interleaved"]), bits(t.attrs.get("sign", 1.0)))
    words = (n, heads, size, page_elements(cache.dtype, size), *turn)
    bufs = (cache, x, cells, angles, *(values.src[:2] if values else ()))
    name = f"store_{'kv' if values else 'k'}_rope_{cache.dtype}"
    return [dispatch(name, shape, bufs, words)]


lower("store_k_rope")(store_turned)


def stores_together(keys: Tensor, values: Tensor) -> bool:
    """True if one launch can do the stores of two consecutive nodes."""
    if (keys.op, values.op) != ("store_k_rope", "store_v"):
        return False
    alike = keys.src[1].shape == values.src[1].shape and keys.src[2] is values.src[2]
    return alike and keys.dtype == values.dtype and keys is not values.src[1] and values.dtype in ("f32", "f16")


@lower("load_k")
@lower("load_v")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    cache, cells = t.src
    (_, heads, size), n = t.shape, t.size
    if not fits(size, cache):
        return None
    bufs = (cache, *scales_of(cache), cells, t)
    words = (n, heads, size, page_elements(cache.dtype, size), *kind_of(cache))
    return [dispatch(f"{t.op}_{family(cache.dtype)}", shape, bufs, words)]


@lower("copy_pages")
def _(t: Tensor, shape: Shape) -> list[Dispatch]:
    cache, pairs = t.src
    n = cache.nbytes // cache.shape[0] // 4
    return [dispatch("copy_pages", shape, (cache, pairs), (n, pairs.shape[0]))]

"""Unpacking of weights on GPUs: device code that reads the blocks and elements of layout.py.

Codebook quants are looked up four at a time, whose bytes are a word: a lookup of each would be a
load, or several operations.

In the code, `g` is the group of 16 rows, `b` the block of 32 k and `n_blocks` the number of blocks
in a row."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from logitless.backends.gpu.language import dialect
from logitless.backends.gpu.lowering import At
from logitless.backends.gpu.matmul import layout, unpack_low
from logitless.graph.dtype import DTYPES
from logitless.graph.tensor import Tensor

FLOATS = ("f32", "f16", "bf16")
BLOCKS = ("q8_0", "iq4_nl", "mxfp4", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", *unpack_low.TYPES)
K_TYPES = ("q4_k", "q5_k", "q6_k")
# values are scale · a byte with a sign, which some types' quants stand for
BYTES = ("q8_0", "iq4_nl", "mxfp4", *unpack_low.SIGNED)
HALVES = ("q6_k", *unpack_low.HALVES)  # types with scales for each 16 k
OFFSET = {"q4_0": 8, "q5_0": 16, "q6_k": 32}  # values are scale · (q − offset)


def args(dtype: str, *, wide: bool = False) -> str:
    """Buffers of a type's sections: W quants, H high bits, F fine scales, C coarse scales, G codebook.
    `wide`: quants are loaded 16 bytes at a time (8 or 4 where a block has no more)."""
    if dtype in FLOATS:
        return "f32 W" if dtype == "f32" else "u16 W"
    packing = layout.PACKINGS[dtype]
    quants = {1: "u32", 2: "u32x2", 4: "u32x4"}[unpack_low.side(dtype)] if wide else "u32"
    high, fine = ", u32 H" * bool(packing.high), ", u8 F" * bool(packing.fine)
    coarse = f", {'u8' if packing.coarse == 16 else 'u16'} C" * bool(packing.coarse)
    return f"{quants} W{high}{fine}{coarse}" + ", u32 G" * bool(DTYPES[dtype].grid)


def several(own: str, n: int) -> str:
    """The buffers, each of which is n to choose from."""
    return re.sub(r"\b([A-Z])\b", rf"\1[{n}]", own)


def buffers(w: Tensor) -> list[At]:
    """The sections of a weight, in the order of `args`."""
    *sections, _ = layout.sections(w.dtype, w.shape[0], w.shape[1])
    place = dict(zip("WHFCG", sections, strict=True))
    return [(w, place[a.name]) for a in dialect.buffers(args(w.dtype))]


def has_minimum(dtype: str) -> bool:
    """True if a value is scale · q + minimum; an offset of q counts as one."""
    return dtype not in BYTES


def pairs(dtype: str, *, dots_of_a_row: bool = False) -> tuple[int, ...]:
    """Values of `PAIR` that have variants. Of two weights rare types have those for integer dots of one row."""
    return (0, 1) if dots_of_a_row or dtype not in unpack_low.RARE else (0,)


def worth(dtype: str, tile: Mapping[str, int], rows: Sequence[int]) -> bool:
    """True if a type has this variant. Those of few bits have the smaller groups, these numbers of rows and
    the variant for many rows: the files would be twice as large."""
    low = dtype in unpack_low.TYPES
    return tile["SPLIT"] == 1 or not low or (tile["SPLIT"] == 16 and tile["MT"] in rows)


def float_lanes(dtype: str, at: str) -> str:
    """Expression for 16 rows' elements of one k."""
    return {"f32": f"LLD(W, {at})", "f16": f"LLDH(W, {at})", "bf16": f"LU2F(LLD16(W, {at}) << 16u)"}[dtype]


def quant(dtype: str, j: int, t: int) -> str:
    """Expression for the quant of k = 4·j + t, from the words q0…, h0… of its block, as LF."""
    if dtype in BYTES:
        left = f"q{j} << {24 - 8 * t}u" if t < 3 else f"q{j}"
        return f"LTOF(LTOI({left}) >> 24)"
    low = f"((q{j % 4} >> {8 * t + 4 * (j // 4)}u) & 15u)"
    if dtype in ("q5_0", "q5_1", "q5_k"):
        low = f"({low} | (((h0 >> {8 * t + j}u) & 1u) << 4u))"
    elif dtype == "q6_k":
        low = f"({low} | (((h{j // 4} >> {8 * t + 2 * (j % 4)}u) & 3u) << 4u))"
    return f"LTOF({low})"


def quants(dtype: str, j: int) -> str:
    """Expression for the four quants of k = 4·j … 4·j + 3 as the bytes of a word; all are in
    -128 … 127. Of types of few bits, wide `load_block` has declared them.
    """
    if dtype in unpack_low.TYPES:
        return f"v[{j}]"
    if dtype in BYTES:
        return f"q{j}"
    low = f"((q{j % 4} >> {4 * (j // 4)}u) & 0x0f0f0f0fu)"
    if dtype in ("q5_0", "q5_1", "q5_k"):
        return f"({low} | (((h0 >> {j}u) & 0x01010101u) << 4u))"
    if dtype == "q6_k":
        return f"({low} | (((h{j // 4} >> {2 * (j % 4)}u) & 0x03030303u) << 4u))"
    return low


def load_block(dtype: str, *, wide: bool = False) -> str:
    """Code that loads the words and the scales `d`, `low` (and `d1`, `low1` for the second 16
    k) of block b. `wide`: four words at a time (layout.py).
    """
    if dtype in unpack_low.TYPES:
        steps = f"LU v[8]; for (uint j = 0u; j < 8u; j++) {{ {unpack_low.step(dtype, 'word', 'j')} v[j] = word; }}"
        return f"{unpack_low.load(dtype, wide=wide)}\n      {steps}"
    packing = layout.PACKINGS[dtype]
    words = packing.quants // 64
    name = "w" if DTYPES[dtype].codes else "q"
    if wide:
        block = f"(g * n_blocks + b) * {words // 4}u"
        lines = [f"uvec4 quad{i} = W[({block} + {i}u) * 16u + LANE];" for i in range(words // 4)]
        lines += [f"LU {name}{i} = quad{i // 4}.{'xyzw'[i % 4]};" for i in range(words)]
    else:
        lines = [f"LU {name}{i} = LLD(W, ((g * n_blocks + b) * {words}u + {i}u) * 16u);" for i in range(words)]
        lines += [f"AHEAD(AHEAD_W, (AHEAD_BLOCK * {words}u + {i}u) * 16u);" for i in range(words)]
    high = packing.high // 64
    lines += [f"LU h{i} = LLD(H, ((g * n_blocks + b) * {high}u + {i}u) * 16u);" for i in range(high)]
    block = "(g * n_blocks + b)" if dtype not in K_TYPES else "(g * (n_blocks / 8u) + b / 8u)"
    if dtype == "mxfp4":
        lines.append(f"LF d = LU2F(LLD8(C, {block} * 16u) << 23u) * 0.5f;")
    else:
        lines.append(f"LF d = LLDH(C, {block} * {packing.coarse // 2}u);")
    if DTYPES[dtype].codes:
        lines += [_codes(dtype, "LU", f"w{j % 4} >> {4 * (j // 4)}u", f"q{j}") for j in range(8)]
    if dtype in ("q4_1", "q5_1"):
        lines.append(f"LF low = LLDH(C, {block} * 32u + 16u);")
    elif dtype in ("q4_k", "q5_k"):
        fine = "(g * n_blocks + b) * 32u"
        lines.append(f"LF low = -LLDH(C, {block} * 32u + 16u) * LTOF(LLD8(F, {fine} + 16u));")
        lines.append(f"d = d * LTOF(LLD8(F, {fine}));")
    elif dtype == "q6_k":
        fine = "(g * n_blocks + b) * 32u"
        lines.append(f"LF d1 = d * ITOF(LLDS8(F, {fine} + 16u));")
        lines.append(f"d = d * ITOF(LLDS8(F, {fine}));")
        lines.append("LF low = d * -32.0f; LF low1 = d1 * -32.0f;")
    elif dtype in OFFSET:
        lines.append(f"LF low = d * -{OFFSET[dtype]}.0f;")
    return "\n      ".join(lines)


def _codes(dtype: str, kind: str, places: str, name: str) -> str:
    return f"{kind} {name}; {{ {kind} places = {places};{unpack_low.coded(dtype, kind, name)} }}"


def element(dtype: str) -> str:
    """Macro `ELEMENT(y, row, k)`: declares y, the value at a row and a column, read by one
    thread. The kernel's word `wide` tells the layout.
    """
    if dtype in unpack_low.TYPES:
        return unpack_low.scalar(dtype)
    places = "#define PLACE(w) (wide != 0u ? ((w) / 4u * 16u + lane) * 4u + (w) % 4u : (w) * 16u + lane)\n"
    head = "#define ELEMENT(y, row, k) float y; { uint g = (row) / 16u, lane = (row) % 16u; "
    if dtype in FLOATS:
        at = "(g * n_k + (k)) * 16u + lane"
        value = {"f32": f"W[{at}]", "f16": f"F16(LOAD16(W, {at}))", "bf16": f"U2F(LOAD16(W, {at}) << 16u)"}[dtype]
        return f"{head}y = {value}; }}\n"
    packing = layout.PACKINGS[dtype]
    block = "at" if dtype not in K_TYPES else "(g * (n_k / 256u) + (k) / 256u)"
    scale = f"F16(LOAD16(C, {block} * {packing.coarse // 2}u + lane))"
    if dtype == "mxfp4":
        scale = "U2F(LOAD8(C, at * 16u + lane) << 23u) * 0.5f"
    steps = [
        head,
        "uint at = g * (n_k / 32u) + (k) / 32u, j = ((k) / 4u) % 8u, t = (k) % 4u;",
        f"float d = {scale}, low = 0.0f;",
    ]
    if dtype in BYTES:
        bytes_of = "uint bytes = W[PLACE(at * 8u + j)];"
        if DTYPES[dtype].codes:
            bytes_of = _codes(dtype, "uint", "W[PLACE(at * 4u + j % 4u)] >> (4u * (j / 4u))", "bytes")
        steps.append(f"{bytes_of} int q = U2I(bytes << (24u - 8u * t)) >> 24;")
    else:
        steps.append("int q = INT((W[PLACE(at * 4u + j % 4u)] >> (8u * t + 4u * (j / 4u))) & 15u);")
    if dtype in ("q5_0", "q5_1", "q5_k"):
        steps.append("q |= INT(((H[at * 16u + lane] >> (8u * t + j)) & 1u) << 4u);")
    if dtype == "q6_k":
        steps.append("q |= INT(((H[(at * 2u + j / 4u) * 16u + lane] >> (8u * t + 2u * (j % 4u))) & 3u) << 4u);")
        steps.append("d *= FLOAT((INT(LOAD8(F, at * 32u + (j / 4u) * 16u + lane)) << 24) >> 24);")
    if dtype in ("q4_1", "q5_1"):
        steps.append("low = F16(LOAD16(C, at * 32u + 16u + lane));")
    elif dtype in ("q4_k", "q5_k"):
        steps.append(f"low = -F16(LOAD16(C, {block} * 32u + 16u + lane)) * FLOAT(LOAD8(F, at * 32u + 16u + lane));")
        steps.append("d *= FLOAT(LOAD8(F, at * 32u + lane));")
    if dtype in OFFSET:
        steps.append(f"q -= {OFFSET[dtype]};")
    steps.append("y = FMA(d, FLOAT(q), low); }")
    return places + " ".join(steps) + "\n"


def block_step(dtype: str, x: Callable[[int | str], str], acc: str, zero: str) -> str:
    """A block of 32 k: two partial sums of q · x, by the parity of k, then scale and minimum.

    `x(i)`: element i of row m's activations; `acc`: its sums; `zero`: no partial sum.
    """
    if dtype in unpack_low.TYPES:
        return unpack_low.block_step(dtype, x, acc, zero)
    lines = [load_block(dtype), "PRECISE LF even[MT]; PRECISE LF odd[MT]; PRECISE float xs[MT];"]
    halves = 2 if dtype == "q6_k" else 1
    minimum = has_minimum(dtype)
    for half in range(halves):
        lines.append(
            f"UNROLL for (uint m = 0u; m < MT; m++) {{ even[m] = LSPLAT(0.0f); odd[m] = {zero}; xs[m] = 0.0f; }}"
        )
        for j in range(half * 8 // halves, (half + 1) * 8 // halves):
            values = " ".join(f"LF v{t} = {quant(dtype, j, t)};" for t in range(4))
            xs = " ".join(f"float x{t} = {x(4 * j + t)};" for t in range(4))
            steps = " ".join(
                f"{side}[m] = FMA(v{t}, LSPLAT(x{t}), {side}[m]);" for t, side in enumerate(("even", "odd") * 2)
            )
            total = "xs[m] = xs[m] + ((x0 + x1) + (x2 + x3));" if minimum else ""
            lines.append(f"{{ {values} UNROLL for (uint m = 0u; m < MT; m++) {{ {xs} {steps} {total} }} }}")
        scale, low = ("d", "low") if half == 0 else ("d1", "low1")
        low_term = f"{acc} = FMA({low}, LSPLAT(xs[m]), {acc});" if minimum else ""
        lines.append(
            f"UNROLL for (uint m = 0u; m < MT; m++) {{ {acc} = FMA(even[m] + odd[m], {scale}, {acc}); {low_term} }}"
        )
    return "\n      ".join(lines)

"""Unpacking of weights of few bits on GPUs, as device code for all kernels.

`load` declares the words and scales of block b, `step` the four quants of one of its eight steps as
the bytes of a word. Both are in the macros of lanes; `scalar` makes them code of one thread."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from logitless.backends.gpu.language.dialect import LANES
from logitless.backends.gpu.matmul import layout
from logitless.graph.dtype import DTYPES

# Words are q and h, bytes of fine scales f0 and f1, the block's scale d; C has others from `coarse` on.
SCALES = {
    "q2_k": """LF low = -LLDH(C, coarse + 16u), low1 = low * LTOF(f1 >> 4u), d1 = d * LTOF(f1 & 15u);
      low = low * LTOF(f0 >> 4u); d = d * LTOF(f0 & 15u);""",
    "q3_k": """LU s = LLD16(C, coarse + 16u + b % 8u / 4u * 16u) >> (4u * (b % 4u));
      LF d1 = d * (LTOF(f0 >> 4u | (s >> 2u & 3u) << 4u) - 32.0f); d = d * (LTOF(f0 & 15u | (s & 3u) << 4u) - 32.0f);
      LF low = d * -4.0f, low1 = d1 * -4.0f;""",
    "iq4_xs": "d = d * ITOF(LTOI(f0 << 24u) >> 24);",
}
TWO_BITS = "{q} = q[{j} / 4u] >> (2u * ({j} % 4u)) & 0x03030303u;"
# The word {q} of step {j}; of types with a codebook of numbers, the places of these.
STEPS = {
    "q2_k": TWO_BITS,
    "q3_k": f"{TWO_BITS} {{q}} = {{q}} | (h >> {{j}} & 0x01010101u) << 2u;",
    "iq4_xs": "{q} = q[{j} % 4u] >> (4u * ({j} / 4u));",
}
TYPES = tuple(STEPS)
RARE = tuple(name for name in TYPES if name not in ("q2_k", "q3_k", "iq4_xs"))  # types with fewer variants
SIGNED = ("iq4_xs",)  # types whose bytes have a sign; the others have a minimum
HALVES = ("q2_k", "q3_k")  # types with scales for each 16 k
SOFT = "#define SOFT\n"  # in kernels of Vulkan on a CPU
LANE_WORDS = re.compile(r"\b(?=(?:LU2F|LU|LF|LTOF|LTOI|ITOF|LLDH|LLD8|LLD16|LLD)\b)")
SCALAR = """
#define E_LU uint
#define E_LF float
#define E_LU2F(x) U2F(x)
#define E_LTOF(x) FLOAT(x)
#define E_LTOI(x) U2I(x)
#define E_ITOF(x) FLOAT(x)
#define E_LLD(b, i) b[(i) + lane]
#define E_LLD8(b, i) LOAD8(b, (i) + lane)
#define E_LLD16(b, i) LOAD16(b, (i) + lane)
#define E_LLDH(b, i) F16(LOAD16(b, (i) + lane))
"""


def side(dtype: str) -> int:
    """Words of a row's quants that lie side by side for wide loads."""
    return math.gcd(layout.n_words(dtype), 4)


def load(dtype: str, *, wide: bool = False) -> str:
    """Code that declares the words of block b, and its scales."""
    n, at = layout.n_words(dtype), "(g * n_blocks + b)"
    words = [f"LU q[{n}];"]
    if wide and side(dtype) > 1:
        words.append(f"uvec{n} side = W[{at} * 16u + LANE];")
        words += [f"q[{i}] = side.{'xyzw'[i]};" for i in range(n)]
    else:
        words += [f"q[{i}] = LLD(W, ({at} * {n}u + {i}u) * 16u);" for i in range(n)]
        words += [f"AHEAD(AHEAD_W, (AHEAD_BLOCK * {n}u + {i}u) * 16u);" for i in range(n)]
    return " ".join([*words, _scales(dtype)])


def _scales(dtype: str) -> str:
    packing, per = layout.PACKINGS[dtype], DTYPES[dtype].block // 32
    at, fine = "(g * n_blocks + b)", packing.fine // LANES
    lines = [f"LU h = LLD(H, {at} * 16u);"] if packing.high else []
    lines += [f"LU f{i} = LLD8(F, {at} * {16 * fine}u + {16 * i}u);" for i in range(fine)]
    if packing.coarse:
        lines.append(f"uint coarse = (g * (n_blocks / {per}u) + b / {per}u) * {packing.coarse // 2}u;")
        lines.append("LF d = LLDH(C, coarse);")
    return " ".join([*lines, SCALES[dtype]])


def step(dtype: str, name: str, j: str, kind: str = "LU") -> str:
    """Code that declares the word of the four quants of step j."""
    text = STEPS[dtype].format(q=name, j=j)
    if not DTYPES[dtype].codes:
        return f"{kind} {text}"
    return f"{kind} {name}; {{ {kind} {text.replace(name, 'places', 1)} {coded(dtype, kind, name)} }}"


def coded(dtype: str, kind: str, name: str) -> str:
    """Code that sets a word to the codes of four codebook indices, the low halves of the bytes of `places`.

    Of each two codes (of four, of eight) that differ in a bit of the index, it selects by that bit:
    two operations where these are constants, else three, or one on devices that have it.
    """
    codes = [(code & 255) * 0x01010101 for code in DTYPES[dtype].codes]
    text = ""
    for bit in range(4):
        text += f" {kind} m{bit} = ((places >> {bit}u) & 0x01010101u) * 255u;"
        for i in range(8 >> bit):
            no, differing = f"c{bit - 1}{2 * i}", f"(c{bit - 1}{2 * i} ^ c{bit - 1}{2 * i + 1})"
            if bit == 0:
                no, differing = f"0x{codes[2 * i]:08x}u", f"0x{codes[2 * i] ^ codes[2 * i + 1]:08x}u"
            text += f" {kind} c{bit}{i} = {no} ^ (m{bit} & {differing});"
    return f"{text} {name} = c30;"


def block_step(dtype: str, x: Callable[[str], str], acc: str, zero: str) -> str:
    """As `unpack.block_step`, but the steps are a loop. Vulkan's drivers unroll it as they see fit: files of
    unrolled code would be three times as large."""
    halves = 2 if dtype in HALVES else 1
    lines = [load(dtype), "PRECISE LF even[MT]; PRECISE LF odd[MT]; PRECISE float xs[MT];"]
    minimum = dtype not in SIGNED
    total = "xs[m] = xs[m] + ((x0 + x1) + (x2 + x3));" if minimum else ""
    shifted = (f"LTOF(LTOI(word << {24 - 8 * t}u) >> 24)" for t in range(4))
    byte = shifted if not minimum else (f"LTOF(word >> {8 * t}u & 255u)" for t in range(4))
    values = " ".join(f"LF v{t} = {value};" for t, value in enumerate(byte))
    xs = " ".join(f"float x{t} = {x(f'4u * j + {t}')};" for t in range(4))
    steps = " ".join(f"{side}[m] = FMA(v{t}, LSPLAT(x{t}), {side}[m]);" for t, side in enumerate(("even", "odd") * 2))
    for half in range(halves):
        first, behind = half * 8 // halves, (half + 1) * 8 // halves
        scale, low = ("d", "low") if half == 0 else ("d1", "low1")
        low_term = f"{acc} = FMA({low}, LSPLAT(xs[m]), {acc});" if minimum else ""
        lines += [
            f"UNROLL for (uint m = 0u; m < MT; m++) {{ even[m] = LSPLAT(0.0f); odd[m] = {zero}; xs[m] = 0.0f; }}",
            f"\n#if !defined(VULKAN) || defined(SOFT)\n      UNROLL\n#endif\n      "
            f"for (uint j = {first}u; j < {behind}u; j++) {{ {step(dtype, 'word', 'j')} {values}",
            f"UNROLL for (uint m = 0u; m < MT; m++) {{ {xs} {steps} {total} }} }}",
            f"UNROLL for (uint m = 0u; m < MT; m++) {{ {acc} = FMA(even[m] + odd[m], {scale}, {acc}); {low_term} }}",
        ]
    return "\n      ".join(lines)


def scalar(dtype: str) -> str:
    """As `unpack.element`."""
    n, words = layout.n_words(dtype), side(dtype)
    place = f"(g * n_blocks + b) * {n}u + w"
    load_word = f"q[w] = wide != 0u ? W[((g * n_blocks + b) * 16u + lane) * {words}u + w] : W[({place}) * 16u + lane];"
    if words == 1:
        load_word = f"q[w] = W[({place}) * 16u + lane];"
    scales = "if (j >= 4u) d = d1;" if dtype in HALVES else ""
    low = "0.0f"
    if dtype not in SIGNED:
        low = "(j >= 4u ? low1 : low)" if dtype in HALVES else "low"
    shift = "U2I(word << (24u - 8u * t)) >> 24" if dtype in SIGNED else "INT(word >> (8u * t) & 255u)"
    code = (
        f"uint n_blocks = n_k / 32u, b = k_ / 32u, j = (k_ / 4u) % 8u, t = k_ % 4u; LU q[{n}]; "
        f"for (uint w = 0u; w < {n}u; w++) {{ {load_word} }} {_scales(dtype)} {step(dtype, 'word', 'j')} "
        f"{scales} y = FMA(d, FLOAT({shift}), {low}); }}"
    )
    head = "#define ELEMENT(y, row, k) float y; { uint g = (row) / 16u, lane = (row) % 16u, k_ = (k);"
    return f"{SCALAR}{head} {LANE_WORDS.sub('E_', ' '.join(code.split()))}\n"

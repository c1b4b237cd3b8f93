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

# An unsigned number of 4 bits of exponent and 3 of fraction, and the half of the codes' unit.
E4M3 = "LU2F((max({0} >> 3u & 15u, 1u) + 116u) << 23u) * LTOF(min({0} >> 3u & 15u, 1u) * 8u + ({0} & 7u))"
BY_HALVES = "LF d1 = d * ((LTOF(f0 >> 4u) + 0.5f) * 0.25f); d = d * ((LTOF(f0 & 15u) + 0.5f) * 0.25f);"
# Words are q and h, bytes of fine scales f0 and f1, the block's scale d; C has others from `coarse` on.
SCALES = {
    "q2_k": """LF low = -LLDH(C, coarse + 16u), low1 = low * LTOF(f1 >> 4u), d1 = d * LTOF(f1 & 15u);
      low = low * LTOF(f0 >> 4u); d = d * LTOF(f0 & 15u);""",
    "q3_k": """LU s = LLD16(C, coarse + 16u + b % 8u / 4u * 16u) >> (4u * (b % 4u));
      LF d1 = d * (LTOF(f0 >> 4u | (s >> 2u & 3u) << 4u) - 32.0f); d = d * (LTOF(f0 & 15u | (s & 3u) << 4u) - 32.0f);
      LF low = d * -4.0f, low1 = d1 * -4.0f;""",
    "iq4_xs": "d = d * ITOF(LTOI(f0 << 24u) >> 24);",
    "nvfp4": f"LF d = {E4M3.format('f0')}, d1 = {E4M3.format('f1')};",
    "tq2_0": "LF low = -d;",
    "q2_0": "LF low = -d;",
    "q1_0": "LF low = -d; d = d * 2.0f;",
    "tq1_0": "LF low = -d;",
    "iq2_xxs": "d = d * ((LTOF(q[1] >> 28u) + 0.5f) * 0.25f);",
    "iq2_xs": BY_HALVES,
    "iq2_s": BY_HALVES,
    "iq3_xxs": "d = d * ((LTOF(h >> 28u) + 0.5f) * 0.5f);",
    "iq3_s": """LU s = LLD16(C, coarse + 16u + b % 8u / 4u * 16u) >> (4u * (b % 4u)) & 15u;
      LU high = LLD16(C, coarse + 48u + b % 8u / 2u * 16u) >> (8u * (b % 2u)); d = d * (LTOF(s) * 2.0f + 1.0f);""",
    "iq1_s": "LU high = f0 | f1 << 8u; d = d * ((LTOF(high >> 12u & 7u) * 2.0f + 1.0f) * 0.125f);",
    "iq1_m": """LU high = f0 | f1 << 8u, s = LLD16(C, coarse + 16u) >> (2u * (b % 8u)) & 3u;
      LU s1 = LLD16(C, coarse + 32u) >> (2u * (b % 8u)) & 3u, s2 = LLD16(C, coarse + 48u) >> (2u * (b % 8u)) & 3u;
      LF d1 = d * ((LTOF(s >> 1u | s1 >> 1u << 1u | s2 >> 1u << 2u) * 2.0f + 1.0f) * 0.125f);
      d = d * ((LTOF(s & 1u | (s1 & 1u) << 1u | (s2 & 1u) << 2u) * 2.0f + 1.0f) * 0.125f);""",
}
TWO_BITS = "{q} = q[{j} / 4u] >> (2u * ({j} % 4u)) & 0x03030303u;"
NIBBLES = "{q} = q[{j} % 4u] >> (4u * ({j} / 4u));"
# A word of the codebook, negative where a bit of `s` says so. Of seven signs the eighth is the parity. A nibble
# times 0x00204081 has its bit t in bit 8t.
SIGNS = """{kind} m = ((s >> (4u * ({j} % 2u)) & 15u) * 0x00204081u & 0x01010101u) * 255u;
  {q} = (grid ^ m) + (m & 0x01010101u); }}"""
SEVEN_SIGNS = f"""{{kind}} p = s ^ s >> 4u; p = p ^ p >> 2u; s = s | ((p ^ p >> 1u) & 1u) << 7u; {SIGNS}"""
# Numbers plus an eighth of either sign, times 8. The codebook has them plus 1, whose 8 the last line takes away
# with the 2 that keep each byte positive before.
EIGHTHS = """{kind} grid = LOOK(G, place) >> (4u * ({j} % 2u)) & 0x0f0f0f0fu;
  grid = grid * 8u + (3u - up * 2u) * 0x01010101u;
  {q} = ((grid | 0x80808080u) - 0x0a0a0a0au) ^ 0x80808080u; }}"""
# The word {q} of step {j}; of types with a codebook of numbers, the places of these.
STEPS = {
    "q2_k": TWO_BITS,
    "q3_k": f"{TWO_BITS} {{q}} = {{q}} | (h >> {{j}} & 0x01010101u) << 2u;",
    "iq4_xs": NIBBLES,
    "nvfp4": NIBBLES,
    "tq2_0": TWO_BITS,
    "q2_0": TWO_BITS,
    "q1_0": "{q} = q[0] >> {j} & 0x01010101u;",
    # Runs of 32, 16 and 4 bytes have five, five and four trits a byte: 160, 80 and 16 k.
    "tq1_0": """{q}; {{ uint c = b % 8u, n = c < 5u ? c : 2u * (c - 5u) + {j} / 4u, w = c < 5u ? {j} : 8u + {j} % 4u;
  if (n == 5u) {{ w = 12u; n = {j} % 4u; }}
  uint power = n == 0u ? 1u : n == 1u ? 3u : n == 2u ? 9u : n == 3u ? 27u : 81u;
  {kind} trits = LLD(W, ((g * (n_blocks / 8u) + b / 8u) * 13u + w) * 16u);
  {kind} even = (trits & 0x00ff00ffu) * power & 0x00ff00ffu, odd = (trits >> 8u & 0x00ff00ffu) * power & 0x00ff00ffu;
  {q} = (even * 3u >> 8u & 0x00ff00ffu) | (odd * 3u & 0xff00ff00u); }}""",
    "iq2_xxs": f"""{{q}}; {{{{ {{kind}} grid = LOOK(G, (q[0] >> ({{j}} / 2u * 8u) & 255u) * 2u + {{j}} % 2u);
  {{kind}} s = q[1] >> ({{j}} / 2u * 7u) & 127u; {SEVEN_SIGNS}""",
    "iq2_xs": f"""{{q}}; {{{{ {{kind}} place = q[{{j}} / 4u] >> ({{j}} / 2u % 2u * 16u) & 0xffffu, s = place >> 9u;
  {{kind}} grid = LOOK(G, (place & 511u) * 2u + {{j}} % 2u); {SEVEN_SIGNS}""",
    "iq2_s": f"""{{q}}; {{{{ {{kind}} s = q[1] >> ({{j}} / 2u * 8u);
  {{kind}} place = q[0] >> ({{j}} / 2u * 8u) & 255u | (f1 >> ({{j}} / 2u * 2u) & 3u) << 8u;
  {{kind}} grid = LOOK(G, place * 2u + {{j}} % 2u); {SIGNS}""",
    "iq3_xxs": f"""{{q}}; {{{{ {{kind}} grid = LOOK(G, q[{{j}} / 4u] >> ({{j}} % 4u * 8u) & 255u);
  {{kind}} s = h >> ({{j}} / 2u * 7u) & 127u; {SEVEN_SIGNS}""",
    "iq3_s": f"""{{q}}; {{{{ {{kind}} s = h >> ({{j}} / 2u * 8u);
  {{kind}} grid = LOOK(G, q[{{j}} / 4u] >> ({{j}} % 4u * 8u) & 255u | (high >> {{j}} & 1u) << 8u); {SIGNS}""",
    "iq1_s": f"""{{q}}; {{{{ {{kind}} up = high >> 15u & 1u;
  {{kind}} place = q[0] >> ({{j}} / 2u * 8u) & 255u | (high >> ({{j}} / 2u * 3u) & 7u) << 8u; {EIGHTHS}""",
    "iq1_m": f"""{{q}}; {{{{ {{kind}} up = high >> ({{j}} / 2u * 4u + 3u) & 1u;
  {{kind}} place = q[0] >> ({{j}} / 2u * 8u) & 255u | (high >> ({{j}} / 2u * 4u) & 7u) << 8u; {EIGHTHS}""",
}
TYPES = tuple(STEPS)
RARE = tuple(name for name in TYPES if name not in ("q2_k", "q3_k", "iq4_xs"))  # types with fewer variants
# types whose bytes have a sign; the others have a minimum
SIGNED = tuple(name for name in TYPES if DTYPES[name].codes or DTYPES[name].grid)
HALVES = ("q2_k", "q3_k", "nvfp4", "iq2_xs", "iq2_s", "iq1_m")  # types with scales for each 16 k
SOFT = "#define SOFT\n"  # before the functions of kernels of Vulkan on a CPU
# Words of a buffer at the places of each lane.
FUNCTIONS = """
#if defined(SOFT)
#define LOOK(b, i) uvec2(b[(i).x], b[(i).y])
#elif defined(VULKAN) || WG > 1
#define LOOK(b, i) b[i]
#else
FN uint16 look(__global const uint* b, uint16 i) {
  return (uint16)(b[i.s0], b[i.s1], b[i.s2], b[i.s3], b[i.s4], b[i.s5], b[i.s6], b[i.s7], b[i.s8], b[i.s9], b[i.sa],
    b[i.sb], b[i.sc], b[i.sd], b[i.se], b[i.sf]);
}
#define LOOK(b, i) look(b, i)
#endif
"""
LANE_WORDS = re.compile(r"\b(?=(?:LU2F|LU|LF|LTOF|LTOI|ITOF|LLDH|LLD8|LLD16|LLD|LOOK)\b)")
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
#define E_LOOK(b, i) b[i]
#define E_LLDH(b, i) F16(LOAD16(b, (i) + lane))
"""


def functions(dtype: str, *, soft: bool = False) -> str:
    """Macros that kernels of a type need."""
    text = SOFT if soft and dtype in TYPES else ""
    return text + FUNCTIONS if DTYPES[dtype].grid else text


def side(dtype: str) -> int:
    """Words of a row's quants that lie side by side for wide loads."""
    return math.gcd(layout.n_words(dtype), 4)


def load(dtype: str, *, wide: bool = False) -> str:
    """Code that declares the words of block b, and its scales."""
    n, at = layout.n_words(dtype), "(g * n_blocks + b)"
    if dtype == "tq1_0":  # whose steps load words themselves
        return _scales(dtype)
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
    text = STEPS[dtype].format(q=name, j=j, kind=kind)
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
    words_of = f"LU q[{n}]; for (uint w = 0u; w < {n}u; w++) {{ {load_word} }}" if dtype != "tq1_0" else ""
    code = (
        "uint n_blocks = n_k / 32u, b = k_ / 32u, j = (k_ / 4u) % 8u, t = k_ % 4u; "
        f"{words_of} {_scales(dtype)} {step(dtype, 'word', 'j')} {scales} y = FMA(d, FLOAT({shift}), {low}); }}"
    )
    head = "#define ELEMENT(y, row, k) float y; { uint g = (row) / 16u, lane = (row) % 16u, k_ = (k);"
    return f"{SCALAR}{head} {LANE_WORDS.sub('E_', ' '.join(code.split()))}\n"

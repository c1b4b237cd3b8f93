"""Requantization: block types that a device lacks become types with the same or near numbers.

| file | graph | difference | |---|---|---| | Q3_K | Q6_K | none: scales of 16 numbers, and quants
with fewer bits | | IQ1_M | Q6_K | none: quants are eighths from −9 to 9 | | TQ1_0, TQ2_0 | Q4_0 |
none: quants are −1, 0 and 1 | | IQ1_S | Q5_0 | quants are eighths; a scale, a product of two, is
rounded to f16: at most 1 in 2,048 | | IQ4_XS | IQ4_NL | the same rounding of scales; values are
those of IQ4_NL | | IQ2_XXS, IQ3_XXS, IQ3_S | Q8_0 | the same rounding of scales; values are bytes |
| Q2_K, IQ2_XS, IQ2_S | Q8_0 | Q8_0 lacks scales of 16: at most 1 in 250 of the largest of 32
numbers |

For Q2_K that is the largest number that its scale and minimum allow. New scales are in f16, as a
file's are: below 2^-14 rounding is an error of up to 2^-25."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from logitless.models.quantization import requantize_blocks, requantize_grids
from logitless.models.quantization.requantize_blocks import Bytes

NUMBERS = 1 << 19  # at once, by each thread: a few megabytes of temporaries
# type of the file → type of the graph, numbers of a block, its bytes in either, and the conversion
REQUANTIZED: dict[str, tuple[str, int, int, int, Callable[[Bytes], Bytes]]] = {
    "q2_k": ("q8_0", 256, 84, 272, requantize_blocks.of_q2_k),
    "q3_k": ("q6_k", 256, 110, 210, requantize_blocks.of_q3_k),
    "iq1_s": ("q5_0", 256, 50, 176, requantize_grids.of_iq1_s),
    "iq1_m": ("q6_k", 256, 56, 210, requantize_grids.of_iq1_m),
    "iq2_xxs": ("q8_0", 256, 66, 272, requantize_grids.of_iq2_xxs),
    "iq2_xs": ("q8_0", 256, 74, 272, requantize_grids.of_iq2_xs),
    "iq2_s": ("q8_0", 256, 82, 272, requantize_grids.of_iq2_s),
    "iq3_xxs": ("q8_0", 256, 98, 272, requantize_grids.of_iq3_xxs),
    "iq3_s": ("q8_0", 256, 110, 272, requantize_grids.of_iq3_s),
    "iq4_xs": ("iq4_nl", 256, 136, 144, requantize_blocks.of_iq4_xs),
    "tq1_0": ("q4_0", 256, 54, 144, requantize_blocks.of_tq1_0),
    "tq2_0": ("q4_0", 256, 66, 144, requantize_blocks.of_tq2_0),
}


def requantized_type(dtype: str, native: frozenset[str] = frozenset()) -> str:
    """Type in the graph of weights of this type in a file, where devices multiply the `native`
    types."""
    return dtype if dtype in native or dtype not in REQUANTIZED else REQUANTIZED[dtype][0]


def requantized_nbytes(dtype: str, nbytes: int, native: frozenset[str]) -> int:
    """Bytes in the graph of this many bytes in a file."""
    same = requantized_type(dtype, native) == dtype
    return nbytes if same else nbytes // REQUANTIZED[dtype][2] * REQUANTIZED[dtype][3]


def requantize(raw: Bytes, dtype: str, native: frozenset[str] = frozenset()) -> Bytes:
    """A matrix's bytes in its graph type. OverflowError for numbers that it cannot represent."""
    if requantized_type(dtype, native) == dtype:
        return raw
    _, numbers, before, after, change = REQUANTIZED[dtype]
    at_once = NUMBERS // numbers
    blocks = raw.reshape(-1, before)
    out = np.empty((len(blocks), after), np.uint8)

    def some(i: int) -> None:
        out[i : i + at_once] = change(blocks[i : i + at_once])

    with ThreadPoolExecutor() as pool:
        list(pool.map(some, range(0, len(blocks), at_once)))
    return out.reshape(-1)

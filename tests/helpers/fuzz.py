"""Examples of the fuzz tests: their number (`--fuzz N`: N times as many), and mutated files."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping

VARIABLE = "LOGITLESS_FUZZ"  # the flag's value, which workers inherit


def examples(n: int) -> int:
    """`n`, or N times as many with --fuzz N."""
    return n * int(os.environ.get(VARIABLE, "1"))


def mutated(files: Mapping[str, bytes], r: random.Random) -> bytes:
    """One of the files, perhaps cut off, with up to six changes of a few bytes, often at its head."""
    whole = files[r.choice(sorted(files))]
    data = bytearray(whole if r.random() < 0.7 else whole[: r.randint(1, len(whole))])
    for _ in range(r.randint(0, 6)):
        at = r.randrange(min(len(data) + 1, r.choice((40, len(whole)))))
        data[at : at + r.randint(0, 2)] = r.randbytes(r.randint(0, 3))
    return bytes(data)

"""Number of examples of the fuzz tests: few in every run, `--fuzz N` times as many to explore."""

from __future__ import annotations

import os

VARIABLE = "LOGITLESS_FUZZ"  # the flag's value, which workers inherit


def examples(n: int) -> int:
    """`n`, or N times as many with --fuzz N."""
    return n * int(os.environ.get(VARIABLE, "1"))

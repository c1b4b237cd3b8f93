"""Matmuls on a common instruction set that CI's processor does not select by itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from logitless.backends.host import available_isas, isa
from tests.helpers.paths import ROOT

PRODUCTS = ("linear", "matmul", "matmul_tn", "add_product")
PROGRAM = """
import sys
from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.testing.conformance import OK, problems, register_all, run
register_all()
outcomes = [run(case, [CPUBackend(1)]) for op in sys.argv[1:] for case in problems(op)]
print(*sorted({o.op for o in outcomes}), *(o for o in outcomes if o.status != OK))
"""


@pytest.mark.long
@pytest.mark.skipif("avx2" not in available_isas() or isa() == "avx2", reason="test_ops runs on AVX2, or it is absent")
def test_products_on_avx2_match_the_reference() -> None:
    """test_packed_matmul.py compares its bits with those of the processor's best instructions."""
    command = [sys.executable, "-c", PROGRAM, *PRODUCTS]
    environment = {**os.environ, "LOGITLESS_ISA": "avx2"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == sorted(PRODUCTS)  # and no outcome beside them

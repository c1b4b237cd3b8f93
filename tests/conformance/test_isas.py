"""Matmuls on a common instruction set that CI's processor does not select by itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from logitless.backends.host import available_isas, isa

PRODUCTS = ("linear", "matmul", "matmul_tn", "add_product")


@pytest.mark.skipif("avx2" not in available_isas() or isa() == "avx2", reason="test_ops runs on AVX2, or it is absent")
def test_products_on_avx2_match_the_reference() -> None:
    command = [sys.executable, "-m", "logitless", "selftest", *(part for op in PRODUCTS for part in ("--op", op))]
    done = subprocess.run(command, env={**os.environ, "LOGITLESS_ISA": "avx2"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(op in done.stdout for op in PRODUCTS)

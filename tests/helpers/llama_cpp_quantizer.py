"""llama.cpp's quantizer as the oracle of ours: the package xllamacpp exports ggml's functions.

It runs in a process of its own, which an instruction that the processor lacks may end."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

needs_llama_cpp = pytest.mark.skipif(find_spec("xllamacpp") is None, reason="no llama.cpp (the package xllamacpp)")
CODE = """
import ctypes, importlib.util, pathlib, sys
import numpy as np
folder = pathlib.Path(importlib.util.find_spec("xllamacpp").origin).parent
chunk = ctypes.CDLL(str(next(folder.glob("*.so")))).ggml_quantize_chunk
chunk.restype = ctypes.c_size_t
chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
cases, results = np.load(sys.argv[1]), {}
for name in cases["names"]:
    kind, nbytes, weighted = cases[f"{name}.how"].tolist()
    x, weights = cases[f"{name}.x"], cases[f"{name}.weights"]
    out = np.zeros((len(x), nbytes), np.uint8)
    size = chunk(kind, x.ctypes.data, out.ctypes.data, 0, *x.shape, weights.ctypes.data if weighted else None)
    assert size == out.nbytes
    results[name] = out
np.savez(sys.argv[2], **results)
"""
Case = tuple[np.ndarray[Any, Any], str, np.ndarray[Any, Any] | None]  # rows, type, importance


def quantized(cases: dict[str, Case], folder: Path) -> dict[str, np.ndarray[Any, np.dtype[np.uint8]]]:
    """llama.cpp's bytes of each case: (rows, bytes of a row)."""
    arrays: dict[str, Any] = {"names": np.array(list(cases))}
    for name, (x, dtype, weights) in cases.items():
        kind = GGMLQuantizationType[dtype.upper()]
        block, nbytes = GGML_QUANT_SIZES[kind]
        arrays[f"{name}.x"] = np.ascontiguousarray(x, np.float32)
        arrays[f"{name}.weights"] = np.ascontiguousarray(x[0] if weights is None else weights, np.float32)
        arrays[f"{name}.how"] = np.array([int(kind), x.shape[1] // block * nbytes, weights is not None])
    np.savez(folder / "cases.npz", **arrays)
    code = [sys.executable, "-c", CODE, str(folder / "cases.npz"), str(folder / "results.npz")]
    done = subprocess.run(code, capture_output=True, text=True, timeout=60)
    if done.returncode == -signal.SIGILL:
        pytest.skip("the package of llama.cpp is not built for this processor")
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(folder / "results.npz") as results:
        return {name: results[name] for name in cases}

"""llama.cpp's library as the oracle of quantized bytes, activations and losses: the package xllamacpp exports it.

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
Array = np.ndarray[Any, Any]
LIBRARY = """
import ctypes, importlib.util, pathlib, sys
import numpy as np
folder = pathlib.Path(importlib.util.find_spec("xllamacpp").origin).parent
lib = ctypes.CDLL(str(next(folder.glob("*.so"))))
cases, results = np.load(sys.argv[1]), {}
"""
QUANTIZE = """
lib.ggml_quantize_chunk.restype = ctypes.c_size_t
lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
for name in cases["names"]:
    kind, nbytes, weighted = cases[f"{name}.how"].tolist()
    x, weights = cases[f"{name}.x"], cases[f"{name}.weights"]
    out = np.zeros((len(x), nbytes), np.uint8)
    given = weights.ctypes.data if weighted else None
    assert lib.ggml_quantize_chunk(kind, x.ctypes.data, out.ctypes.data, 0, *x.shape, given) == out.nbytes
    results[name] = out
np.savez(sys.argv[2], **results)
"""
# Parameters of models and contexts are passed whole: only the fields that are set need a place.
# `cb_eval` and its data are null, and followed by the types of keys and values, 1 and 1.
OPENED = """
class Blob(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint8 * 1024)]
class Batch(ctypes.Structure):
    _fields_ = [("size", ctypes.c_int32), *((c, ctypes.c_void_p) for c in "tepnsl")]
pointer, floats = ctypes.c_void_p, ctypes.POINTER(ctypes.c_float)
for name, result, arguments in (
    ("llama_model_default_params", Blob, []),
    ("llama_context_default_params", Blob, []),
    ("llama_model_load_from_file", pointer, [ctypes.c_char_p, Blob]),
    ("llama_init_from_model", pointer, [pointer, Blob]),
    ("llama_get_logits", floats, [pointer]),
    ("llama_decode", ctypes.c_int, [pointer, Batch]),
    ("llama_get_memory", pointer, [pointer]),
    ("llama_memory_clear", None, [pointer, ctypes.c_bool]),
    ("ggml_op_name", ctypes.c_char_p, [ctypes.c_int]),
    ("ggml_get_name", ctypes.c_char_p, [pointer]),
):
    getattr(lib, name).restype, getattr(lib, name).argtypes = result, arguments
quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, pointer)(lambda *_: None)
lib.llama_log_set(quiet, None)
n_vocab = int(cases["n_vocab"])
model = lib.llama_model_load_from_file(str(cases["path"]).encode(), lib.llama_model_default_params())
def opened(size, collects=None):
    parameters = lib.llama_context_default_params()
    raw = bytes(parameters.bytes)
    place = next(i for i in range(40, 200, 8) if raw[i:i + 24] == bytes(16) + b"\\x01\\0\\0\\0" * 2)
    np.frombuffer(parameters.bytes, np.uint32)[:3] = max(size, 512)
    if collects:
        pointer.from_address(ctypes.addressof(parameters) + place).value = ctypes.cast(collects, pointer).value
    return lib.llama_init_from_model(model, parameters)
"""
RUN = (
    OPENED
    + """
windows = cases["windows"]
size = windows.shape[1]

class Tensor:  # ggml_tensor: type, buffer, ne, nb, op, parameters, sources, view, data
    def __init__(self, at):
        self.at = at
        self.ne, self.nb = ([self.number(start + 8 * i) for i in range(4)] for start in (16, 48))
        self.data = self.number(248)
    def number(self, offset):
        return ctypes.c_int64.from_address(self.at + offset).value
    def source(self, i):
        return Tensor(self.number(152 + 8 * i))
    def row(self, kind, *places):
        at = self.data + sum(place * step for place, step in zip(places, self.nb[1:]))
        return np.ctypeslib.as_array(ctypes.cast(at, ctypes.POINTER(kind)), (self.ne[0],))

def collect(at, ask, _):
    op = lib.ggml_op_name(ctypes.c_int.from_address(at + 80).value)
    if ask:
        return op in (b"MUL_MAT", b"MUL_MAT_ID")
    t = Tensor(at)
    w, x = t.source(0), t.source(1)
    name = lib.ggml_get_name(w.at).decode()
    if not name.startswith("blk.") or not name.endswith("weight"):
        return True
    n = w.ne[2] if op == b"MUL_MAT_ID" else 1
    squares = results.setdefault(name + ".sums", np.zeros((n, x.ne[0])))
    counts = results.setdefault(name + ".counts", np.zeros(n))
    for row in range(x.ne[2] if n > 1 else x.ne[1]):
        for expert, places in (
            [(e, (i % x.ne[1], row)) for i, e in enumerate(t.source(2).row(ctypes.c_int32, row))]
            if n > 1 else [(0, (row,))]
        ):
            squares[expert] += np.square(x.row(ctypes.c_float, *places).astype(np.float64))
            counts[expert] += 1
    return True

callback = ctypes.CFUNCTYPE(ctypes.c_bool, pointer, ctypes.c_bool, pointer)(collect)
context = opened(size, callback if cases["collect"] else None)
if "control" in cases:  # rows (layers, n_embd) from layer 1 on
    control, layers = cases["control"], cases["layers"].tolist()
    apply = lib.llama_set_adapter_cvec
    apply.argtypes = [pointer, pointer, ctypes.c_size_t, *[ctypes.c_int32] * 3]
    assert apply(context, control.ctypes.data, control.size, control.shape[1], *layers) == 0
losses, every = [], np.ones(size, np.int8)
for tokens in windows:
    lib.llama_memory_clear(lib.llama_get_memory(context), True)
    batch = Batch(size, tokens.ctypes.data, None, None, None, None, every.ctypes.data)
    assert lib.llama_decode(context, batch) == 0
    z = np.ctypeslib.as_array(lib.llama_get_logits(context), (size, n_vocab)).astype(np.float64)
    z -= z.max(axis=1, keepdims=True)
    losses.append((np.log(np.exp(z).sum(axis=1)) - z[np.arange(size), np.roll(tokens, -1)])[:-1])
np.savez(sys.argv[2], losses=np.array(losses), **results)
"""
)
Case = tuple[Array, str, Array | None]  # rows, type, importance


def answers(code: str, arrays: dict[str, Any], folder: Path) -> dict[str, Array]:
    np.savez(folder / "cases.npz", **arrays)
    words = [sys.executable, "-c", LIBRARY + code, str(folder / "cases.npz"), str(folder / "results.npz")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    if done.returncode == -signal.SIGILL:
        pytest.skip("the package of llama.cpp is not built for this processor")
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(folder / "results.npz") as results:
        return dict(results)


def quantized(cases: dict[str, Case], folder: Path) -> dict[str, Array]:
    """llama.cpp's bytes of each case: (rows, bytes of a row)."""
    arrays: dict[str, Any] = {"names": np.array(list(cases))}
    for name, (x, dtype, weights) in cases.items():
        kind = GGMLQuantizationType[dtype.upper()]
        block, nbytes = GGML_QUANT_SIZES[kind]
        arrays[f"{name}.x"] = np.ascontiguousarray(x, np.float32)
        arrays[f"{name}.weights"] = np.ascontiguousarray(x[0] if weights is None else weights, np.float32)
        arrays[f"{name}.how"] = np.array([int(kind), x.shape[1] // block * nbytes, weights is not None])
    return answers(QUANTIZE, arrays, folder)


def activations(
    path: Path, windows: Array, n_vocab: int, folder: Path, *, collect: bool = True, **control: Any
) -> dict[str, Array]:
    """`losses` (windows, tokens - 1), and with `collect` the inputs of each matrix of the blocks: `NAME.sums`
    (experts, inputs) of squares, `NAME.counts` of rows. `control`: vectors (layers, n_embd) from layer 1 on, and
    `layers`, the first and the last that get them."""
    arrays = {"path": str(path), "windows": windows.astype(np.int32), "n_vocab": n_vocab, "collect": collect, **control}
    return answers(RUN, arrays, folder)

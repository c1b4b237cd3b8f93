"""llama.cpp's side of bench_llama.py, through the C interface of its shared libraries (include/llama.h)."""

from __future__ import annotations

import ctypes as C
import time
from pathlib import Path

CONTEXT, UBATCH = 512, 512  # tokens: of each sequence behind its depth, of a step


class _ModelParams(C.Structure):
    """Passed on as llama.cpp fills it; larger than any version's so far, which the calling convention allows."""

    _fields_ = [("bytes", C.c_uint8 * 256)]


class _ContextParams(C.Structure):
    _fields_ = [
        ("n_ctx", C.c_uint32),
        ("n_batch", C.c_uint32),
        ("n_ubatch", C.c_uint32),
        ("n_seq_max", C.c_uint32),
        ("rest", C.c_uint8 * 256),
    ]


class _Batch(C.Structure):
    _fields_ = [
        ("n_tokens", C.c_int32),
        ("token", C.POINTER(C.c_int32)),
        ("embd", C.c_void_p),
        ("pos", C.POINTER(C.c_int32)),
        ("n_seq_id", C.POINTER(C.c_int32)),
        ("seq_id", C.POINTER(C.POINTER(C.c_int32))),
        ("logits", C.POINTER(C.c_int8)),
    ]


_LOG = C.CFUNCTYPE(None, C.c_int, C.c_char_p, C.c_void_p)
_SILENT = _LOG(lambda level, text, data: None)


def _library(folder: str) -> C.CDLL:
    """libllama of the folder, with the backend for this processor loaded. OSError without them."""
    found = []
    for name in ("libggml-base", "libggml", "libllama"):
        files = sorted(Path(folder).glob(f"{name}.*so*"))  # a version may stand before or after .so
        if not files:
            raise OSError(f"--llama: {folder} has no {name}.so")
        found.append(C.CDLL(str(files[0]), mode=C.RTLD_GLOBAL))
    _, ggml, llama = found
    llama.llama_log_set(_SILENT, None)
    ggml.ggml_backend_load_all_from_path.argtypes = [C.c_char_p]
    ggml.ggml_backend_load_all_from_path(folder.encode())
    llama.llama_model_default_params.restype = _ModelParams
    llama.llama_context_default_params.restype = _ContextParams
    llama.llama_model_load_from_file.argtypes = [C.c_char_p, _ModelParams]
    llama.llama_model_load_from_file.restype = C.c_void_p
    llama.llama_init_from_model.argtypes = [C.c_void_p, _ContextParams]
    llama.llama_init_from_model.restype = C.c_void_p
    llama.llama_set_n_threads.argtypes = [C.c_void_p, C.c_int32, C.c_int32]
    llama.llama_batch_init.argtypes = [C.c_int32] * 3
    llama.llama_batch_init.restype = _Batch
    llama.llama_decode.argtypes = [C.c_void_p, _Batch]
    llama.llama_synchronize.argtypes = [C.c_void_p]
    llama.llama_get_memory.argtypes = [C.c_void_p]
    llama.llama_get_memory.restype = C.c_void_p
    llama.llama_memory_clear.argtypes = [C.c_void_p, C.c_bool]
    llama.llama_memory_seq_rm.argtypes = [C.c_void_p, *[C.c_int32] * 3]
    llama.llama_memory_seq_rm.restype = C.c_bool
    return llama


class Peer:
    """llama.cpp with one model; what it does stands behind `depth` tokens of each sequence."""

    def __init__(self, folder: str, path: str, threads: int, n_seqs: int, depth: int) -> None:
        self.llama = _library(folder)
        self.llama.llama_backend_init()
        model = self.llama.llama_model_load_from_file(path.encode(), self.llama.llama_model_default_params())
        params = self.llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_seqs * (CONTEXT + depth), UBATCH, UBATCH
        params.n_seq_max = n_seqs
        self.context = model and self.llama.llama_init_from_model(model, params)
        if not self.context:
            raise OSError(f"llama.cpp does not load {path}")
        self.llama.llama_set_n_threads(self.context, threads, threads)
        self.memory = self.llama.llama_get_memory(self.context)
        self.batch = self.llama.llama_batch_init(UBATCH, 0, 1)
        self.depth, self.n_filled = depth, 0

    def prompt(self, n: int) -> float:
        """Seconds of evaluating n tokens, with the last one's logits."""
        self._begin(1)
        began = time.perf_counter()
        self._prompt(0, self.depth, n)
        return time.perf_counter() - began

    def decode(self, n_batch: int, n: int) -> float:
        """Seconds of n steps of one token of each sequence, with the logits of each."""
        self._begin(n_batch)
        began = time.perf_counter()
        for pos in range(self.depth, self.depth + n):
            self._decode([((7919 * seq + 31 * pos) % 30000, pos, seq, True) for seq in range(n_batch)])
        return time.perf_counter() - began

    def _begin(self, n_seqs: int) -> None:
        """Have so many sequences, each with `depth` tokens and no more."""
        if not self.depth:
            self.llama.llama_memory_clear(self.memory, False)
            return
        for seq in range(self.n_filled, n_seqs):
            self._prompt(seq, 0, self.depth)
        self.n_filled = max(self.n_filled, n_seqs)
        for seq in range(self.n_filled):
            self.llama.llama_memory_seq_rm(self.memory, seq, self.depth, -1)

    def _prompt(self, seq: int, begin: int, n: int) -> None:
        for start in range(begin, begin + n, UBATCH):
            positions = range(start, min(begin + n, start + UBATCH))
            self._decode([(7919 * pos % 30000, pos, seq, pos == begin + n - 1) for pos in positions])

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, pos, seq, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, pos, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
        if code := self.llama.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode: {code}")
        self.llama.llama_synchronize(self.context)

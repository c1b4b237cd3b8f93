"""The other side of bench_llama.py: llama.cpp or ik_llama.cpp through the C interface of its shared libraries."""

from __future__ import annotations

import ctypes as C
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
        ("older", C.c_int32 * 3),  # of ik_llama.cpp alone
    ]


_LOG = C.CFUNCTYPE(None, C.c_int, C.c_char_p, C.c_void_p)
_SILENT = _LOG(lambda level, text, data: None)


@dataclass
class Library:
    """A peer's libllama, and the functions of its KV cache."""

    llama: C.CDLL
    model_params: Any  # a structure with the peer's defaults
    context_params: Any
    cache_of: Callable[[int], int]  # a context's
    clear: Any  # f(cache, without its data); ik_llama.cpp takes the cache alone, and ignores the other
    remove: Any  # f(cache, sequence, first position, end or -1)
    several: dict[str, Any] = field(default_factory=dict)  # context parameters where sequences share a step


def _llama(folder: str | None) -> Library:
    """llama.cpp's libraries in a folder, with the backend for this processor loaded. OSError without them."""
    if not folder:
        raise OSError("--peer llama needs --llama FOLDER, of llama.cpp's shared libraries")
    libraries = []
    for name in ("libggml-base", "libggml", "libllama"):
        files = sorted(Path(folder).glob(f"{name}.*so*"))  # a version may stand before or after .so
        if not files:
            raise OSError(f"--llama: {folder} has no {name}.so")
        libraries.append(C.CDLL(str(files[0]), mode=C.RTLD_GLOBAL))
    _, ggml, llama = libraries
    llama.llama_log_set(_SILENT, None)
    ggml.ggml_backend_load_all_from_path.argtypes = [C.c_char_p]
    ggml.ggml_backend_load_all_from_path(folder.encode())
    llama.llama_get_memory.argtypes = [C.c_void_p]
    llama.llama_get_memory.restype = C.c_void_p
    model, context = (_defaults(llama, *row) for row in (("model", _ModelParams), ("context", _ContextParams)))
    return Library(llama, model, context, llama.llama_get_memory, llama.llama_memory_clear, llama.llama_memory_seq_rm)


def _ik_llama(_folder: str | None) -> Library:
    """ik_llama.cpp as its package has it, which repacks weights when it loads them. OSError without it."""
    try:
        api = importlib.import_module("ik_llama_cpp._ctypes_api")
    except ImportError:
        raise OSError("--peer ik needs a package: .venv/bin/pip install ik-llama-cpp-python") from None
    llama = C.CDLL(api._lib._name)
    llama.llama_log_set(_SILENT, None)
    model, context = (
        _defaults(llama, "model", api.llama_model_params),
        _defaults(llama, "context", api.llama_context_params),
    )
    model.repack_tensors, model.use_mmap = True, False
    clear, remove = llama.llama_kv_cache_clear, llama.llama_kv_cache_seq_rm
    several = {"flash_attn": False}  # with it ik_llama.cpp aborts where sequences share a step
    return Library(llama, model, context, lambda context: context, clear, remove, several)


def _defaults(llama: C.CDLL, what: str, kind: Any) -> Any:
    function = llama[f"llama_{what}_default_params"]
    function.restype = kind
    return function()


PEERS: dict[str, tuple[str, Callable[[str | None], Library]]] = {
    "llama": ("llama.cpp", _llama),
    "ik": ("ik_llama.cpp", _ik_llama),
}


class _Context:
    """A context, its KV cache and how many of its sequences have `depth` tokens."""

    def __init__(self, library: Library, model: int, threads: int, n_seqs: int, depth: int) -> None:
        params = library.context_params
        params.n_ctx, params.n_batch, params.n_ubatch = n_seqs * (CONTEXT + depth), UBATCH, UBATCH
        params.n_seq_max, self.n_filled = n_seqs, 0
        self.address = library.llama.llama_init_from_model(model, params)
        if not self.address:
            raise OSError(f"no context for {n_seqs} sequences of {CONTEXT + depth} tokens")
        library.llama.llama_set_n_threads(self.address, threads, threads)
        self.cache = library.cache_of(self.address)


class Peer:
    """A peer with one model; `prompt` and `decode` begin behind `depth` tokens of each sequence."""

    def __init__(
        self,
        peer: str,
        folder: str | None,
        path: str,
        threads: int,
        n_seqs: int,
        depth: int,
        clock: Callable[[], float],
    ) -> None:
        name, open_library = PEERS[peer]
        self.library = library = open_library(folder)
        self.llama = llama = library.llama
        llama.llama_model_load_from_file.argtypes = [C.c_char_p, type(library.model_params)]
        llama.llama_model_load_from_file.restype = C.c_void_p
        llama.llama_init_from_model.argtypes = [C.c_void_p, type(library.context_params)]
        llama.llama_init_from_model.restype = C.c_void_p
        llama.llama_set_n_threads.argtypes = [C.c_void_p, C.c_int32, C.c_int32]
        llama.llama_batch_init.argtypes = [C.c_int32] * 3
        llama.llama_batch_init.restype = _Batch
        llama.llama_decode.argtypes = [C.c_void_p, _Batch]
        llama.llama_synchronize.argtypes = [C.c_void_p]
        library.clear.argtypes = [C.c_void_p, C.c_bool]
        library.remove.argtypes = [C.c_void_p, *[C.c_int32] * 3]
        library.remove.restype = C.c_bool
        llama.llama_backend_init()
        model = llama.llama_model_load_from_file(path.encode(), library.model_params)
        if not model:
            raise OSError(f"{name} does not load {path}")
        self.one = self.several = _Context(library, model, threads, 1 if library.several else n_seqs, depth)
        if library.several:
            for key, value in library.several.items():
                setattr(library.context_params, key, value)
            self.several = _Context(library, model, threads, n_seqs, depth)
        self.context = self.one
        self.batch = llama.llama_batch_init(UBATCH, 0, 1)
        self.depth, self.clock = depth, clock

    def prompt(self, n: int) -> float:
        """Seconds of evaluating n tokens, with the last one's logits."""
        self._begin(1)
        began = self.clock()
        self._prompt(0, self.depth, n)
        return self.clock() - began

    def decode(self, n_batch: int, n: int) -> float:
        """Seconds of n steps of one token of each sequence, with the logits of each."""
        self._begin(n_batch)
        began = self.clock()
        for pos in range(self.depth, self.depth + n):
            self._decode([((7919 * seq + 31 * pos) % 30000, pos, seq, True) for seq in range(n_batch)])
        return self.clock() - began

    def _begin(self, n_seqs: int) -> None:
        """Bring so many sequences to `depth` tokens each."""
        self.context = context = self.one if n_seqs == 1 else self.several
        if not self.depth:
            self.library.clear(context.cache, False)
            return
        for seq in range(context.n_filled, n_seqs):
            self._prompt(seq, 0, self.depth)
        context.n_filled = max(context.n_filled, n_seqs)
        for seq in range(context.n_filled):
            self.library.remove(context.cache, seq, self.depth, -1)

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
        if code := self.llama.llama_decode(self.context.address, batch):
            raise RuntimeError(f"llama_decode: {code}")
        self.llama.llama_synchronize(self.context.address)

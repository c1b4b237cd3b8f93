"""Saving a run's result: the trained model, or the LoRA adapter."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.models.adapters.lora import write_adapter
from logitless.models.gguf.file import GGUFFile, TensorInfo
from logitless.models.gguf.write import Data, copied_keys, u32, write_gguf
from logitless.models.hparams.hparams import Hparams
from logitless.models.quantization.quantize import dequantized, quantize, storable_dtype
from logitless.models.weights.tensor_map import TensorSlice
from logitless.models.weights.weights import check_weights
from logitless.training.trainable import LORA, Trainable


def save_result(path: str | Path, trainable: Trainable, gguf: GGUFFile, h: Hparams, dtype: str = "f32") -> None:
    """Write the adapter, or the model: trained matrices in `dtype`, the rest as in the file."""
    if trainable.kind == LORA:
        write_adapter(path, trainable.adapter(), gguf, h, Path(path).stem)
        return
    declared = check_weights(gguf, h)
    trained = set(trainable.names)
    keys = copied_keys(gguf.metadata)
    file_types = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
    if dtype in file_types:
        keys["general.file_type"] = u32(file_types[dtype])

    def rows(source: str, kind: str, parts: list[tuple[str, TensorSlice]]) -> Iterator[npt.NDArray[Any]]:
        if len(parts) > 1 and parts[0][1].n_experts:  # parts lie between each other
            whole = dequantized(gguf.tensors[source], gguf.bytes_of(source)).copy()
            for name, part in parts:
                if name in trained:
                    part.scatter(whole, np.concatenate(list(trainable.pieces(name))))
            whole = whole.reshape(-1, whole.shape[-1])
            yield whole if kind == "f32" else quantize(whole, kind)
            return
        for name, part in parts:
            if name in trained:
                pieces = trainable.pieces(name)
            else:  # beside parts of the same matrix that were trained
                pieces = iter([part.gather(dequantized(gguf.tensors[source], gguf.bytes_of(source)))])
            for piece in pieces:
                yield piece if kind == "f32" else quantize(piece, kind)

    tensors = []
    for source, info in gguf.tensors.items():
        parts = sorted(((n, p) for n, p in declared.items() if p.source == source), key=lambda found: found[1].start)
        if any(name in trained for name, _ in parts):
            loose = any(part.as_f32 for _, part in parts)
            kind = "f32" if loose or _stays_f32(source, info) else storable_dtype(dtype, info.shape[-1])
            data = Data(partial(rows, source, kind, parts), info.shape, kind)
        else:
            data = Data(partial(_as_it_was, gguf, source), info.shape, info.dtype)
        tensors.append((source, data))
    write_gguf(path, h.arch, keys, tensors)


def _stays_f32(name: str, info: TensorInfo) -> bool:
    """True for tensors that llama.cpp needs in f32: vectors (also as columns) and router
    matrices."""
    return len(info.shape) == 1 or name.endswith((".bias", ".ssm_a", ".ssm_d", "_norm.weight", "ffn_gate_inp.weight"))


def _as_it_was(gguf: GGUFFile, name: str) -> Iterator[npt.NDArray[Any]]:
    """A tensor's bytes from the file; its pages leave the process again."""
    raw = gguf.bytes_of(name)
    yield raw.view(np.float32) if gguf.tensors[name].dtype == "f32" else raw
    gguf.release()

"""What a run leaves behind: the trained model, or the adapter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from models.gguf_file import GGUFFile
from models.gguf_write import Data, copied_keys, u32, write_gguf
from models.hparams import Hparams
from models.lora import write_adapter
from models.merge import dequantized
from models.quantize import quantize, storable_dtype
from models.weights import check_weights
from training.trainable import LORA, Trainable


def save_result(path: str | Path, trainable: Trainable, gguf: GGUFFile, h: Hparams, dtype: str = "f32") -> None:
    """The adapter, or the whole model: trained matrices in `dtype`, what was not trained as it was."""
    if trainable.kind == LORA:
        write_adapter(path, trainable.adapter(), gguf, h, Path(path).stem)
        return
    values = trainable.read()
    declared = check_weights(gguf, h)
    keys = copied_keys(gguf.path)
    file_types = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
    if dtype in file_types:
        keys["general.file_type"] = u32(file_types[dtype])

    def tensors() -> Iterator[tuple[str, Data]]:
        for source, info in gguf.tensors.items():
            parts = [(name, part) for name, part in declared.items() if part.source == source]
            if not any(name in values for name, _ in parts):
                raw = gguf.bytes_of(source)
                yield (
                    source,
                    Data(
                        raw.view(np.float32) if info.dtype == "f32" else raw.reshape(info.shape[0], -1),
                        info.shape,
                        info.dtype,
                    ),
                )
                continue
            whole = np.array(dequantized(info, gguf.bytes_of(source)))
            for name, part in parts:
                if name in values:
                    whole[part.start : part.start + part.shape[0]] = values[name]
            kind = storable_dtype(dtype, info.shape[-1]) if len(info.shape) == 2 else "f32"
            yield source, Data(whole if kind == "f32" else quantize(whole, kind), info.shape, kind)

    write_gguf(path, h.arch, keys, tensors())

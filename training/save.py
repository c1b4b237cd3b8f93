"""Saving a run's result: the trained model, or the LoRA adapter."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.models.adapters.lora import write_adapter
from logitless.models.gguf.file import GGUFFile
from logitless.models.gguf.write import Data, write_gguf
from logitless.models.hparams.hparams import Hparams
from logitless.models.quantization.quantize import quantize
from logitless.models.quantization.quantize_model import plan_export
from logitless.models.weights.finite import FLOAT_TYPES, is_finite
from logitless.models.weights.tensor_map import TensorSlice
from logitless.models.weights.weights import check_weights, numbers_of
from logitless.training.errors import TrainingDiverged
from logitless.training.trainable import LORA, Trainable


def save_result(path: str | Path, trainable: Trainable, gguf: GGUFFile, h: Hparams, file_type: str = "F32") -> None:
    """Write the adapter, or the model: trained matrices in the types of `file_type`, and matrices of floats, too,
    where these are quantized; the rest as in the file. PresetError: there is no such type.
    TrainingDiverged: a trained number is not finite, or not in its type."""
    if trainable.kind == LORA:
        write_adapter(path, trainable.adapter(), gguf, h, Path(path).stem)
        return
    declared = check_weights(gguf, h)
    trained = set(trainable.names)
    plan = plan_export(gguf, file_type, {part.source for name, part in declared.items() if name in trained})

    def encoded(source: str, values: npt.NDArray[Any], kind: str) -> npt.NDArray[Any]:
        if kind == "f32":
            return values
        entry = quantize(values, kind)
        if kind in FLOAT_TYPES and not is_finite(entry.reshape(-1), kind):
            raise TrainingDiverged(f"the trained tensor '{source}' has a number that is too large for {kind.upper()}")
        return entry

    def rows(source: str, kind: str, parts: list[tuple[str, TensorSlice]]) -> Iterator[npt.NDArray[Any]]:
        if len(parts) > 1 and parts[0][1].n_experts:  # parts lie between each other
            whole = numbers_of(gguf, declared, source).copy()
            for name, part in parts:
                if name in trained:
                    part.scatter(whole, np.concatenate(list(trainable.pieces(name))))
            whole = whole.reshape(-1, whole.shape[-1])
            yield encoded(source, whole, kind)
            return
        for name, part in parts:
            if name in trained:
                pieces = trainable.pieces(name)
            else:  # beside parts of the same matrix that were trained
                pieces = iter([part.gather(numbers_of(gguf, declared, source))])
            for piece in pieces:
                yield encoded(source, piece, kind)

    tensors = []
    for source, info in gguf.tensors.items():
        parts = sorted(((n, p) for n, p in declared.items() if p.source == source), key=lambda entry: entry[1].start)
        if any(name.removesuffix("factor") + "weight" in trained for name, _ in parts if name.endswith(".factor")):
            data = Data(np.ones(info.shape, np.float32), info.shape)  # the trained numbers have it
        elif any(name in trained for name, _ in parts):
            kind = plan.types[source]
            data = Data(partial(rows, source, kind, parts), info.shape, kind)
        else:
            data = Data(partial(plan.pieces, source), info.shape, plan.types[source])
        tensors.append((source, data))
    write_gguf(path, h.arch, plan.keys(), tensors)

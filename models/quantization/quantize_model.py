"""Quantization of a model file: another GGUF file with the types of a preset."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logitless.models.errors import ModelFileError, shown
from logitless.models.gguf.file import GGUFFile, TensorInfo
from logitless.models.gguf.write import Data, Key, Progress, copied_keys, text, u32, write_gguf
from logitless.models.model import check_is_model
from logitless.models.quantization.imatrix import Imatrix
from logitless.models.quantization.presets import (
    PRESETS,
    TypeOptions,
    file_type,
    is_quantizable,
    preset,
    tensor_types,
)
from logitless.models.quantization.quantize import F32, block_of, dequantized, quantize, storable_dtype

FLOATS = ("f32", "f16", "bf16")
_NUMBERS = 1 << 24  # at once: 64 MB of floats
_F16_MOST = 65504


@dataclass(frozen=True)
class Quantization:
    """Types of the tensors of a quantized file, and where they are not as asked."""

    gguf: GGUFFile
    preset: str  # "": those of the model
    types: dict[str, str]
    imatrix: Imatrix | None = None
    fallbacks: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # (type asked for, type) → tensors
    without_importance: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(_data_nbytes(info.shape, self.types[name]) for name, info in self.gguf.tensors.items())

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.gguf.n_params

    def warnings(self) -> list[str]:
        """A line for each type that does not suit some rows, and one for matrices without importances."""
        lines = [
            f"rows of {_listed(names)} are no multiple of {block_of(target)[0]}: {dtype} in place of {target}"
            for (target, dtype), names in self.fallbacks.items()
        ]
        if self.without_importance:
            lines.append(f"the importance matrix has nothing about {_listed(self.without_importance)}")
        return lines

    def write(self, path: str | Path, progress: Progress | None = None) -> None:
        """Write the file; `progress` is called with bytes of tensors written and in all. ModelFileError names a tensor
        with numbers that its type cannot represent."""
        tensors = [
            (name, Data(partial(self.pieces, name), info.shape, self.types[name]))
            for name, info in self.gguf.tensors.items()
        ]
        write_gguf(path, str(self.gguf.metadata["general.architecture"]), self.keys(), tensors, progress)

    def keys(self) -> dict[str, Key]:
        """Keys of the file: the model's, and those of its types."""
        keys = copied_keys(self.gguf.metadata)
        keys["general.quantization_version"] = u32(2)
        if self.preset:
            keys["general.file_type"] = u32(file_type(self.preset))
        if self.imatrix is not None:
            keys["quantize.imatrix.file"] = text(str(self.imatrix.path))
            keys["quantize.imatrix.dataset"] = text(self.imatrix.datasets[0] if self.imatrix.datasets else "")
            keys["quantize.imatrix.entries_count"] = u32(len(self.imatrix.means))
            keys["quantize.imatrix.chunks_count"] = u32(self.imatrix.n_chunks)
        return keys

    def pieces(self, name: str) -> Iterator[NDArray[Any]]:
        """A tensor in its type, some rows at a time; the file's pages leave the process again."""
        yield from self._pieces(self.gguf.tensors[name])
        self.gguf.release()

    def _pieces(self, info: TensorInfo) -> Iterator[NDArray[Any]]:
        raw, dtype = self.gguf.bytes_of(info.name), self.types[info.name]
        if dtype == info.dtype:
            yield raw.view(np.float32) if dtype == "f32" else raw
            return
        row, n_matrices = info.shape[-1], math.prod(info.shape[:-2])
        matrices = raw.reshape(n_matrices, -1, info.nbytes // math.prod(info.shape[:-1]))
        importance = self._importance(info.name, n_matrices)
        at_once = max(1, _NUMBERS // row)
        for i, matrix in enumerate(matrices):
            for start in range(0, len(matrix), at_once):
                part = matrix[start : start + at_once]
                values = dequantized(replace(info, shape=(len(part), row)), part.reshape(-1))
                yield self._quantized(info.name, values, dtype, None if importance is None else importance[i])

    def _quantized(self, name: str, values: F32, dtype: str, importance: F32 | None) -> NDArray[Any]:
        most = np.abs(values).max()
        if not np.isfinite(most):
            raise ModelFileError(self.gguf.path, f"tensor {shown(name)} has a number that is NaN or infinite")
        if dtype == "f32":
            return values
        piece = quantize(values, dtype, importance)
        if most > _F16_MOST:
            written = TensorInfo(name, values.shape, dtype, 0, piece.nbytes)
            if not np.isfinite(dequantized(written, piece)).all():
                raise ModelFileError(self.gguf.path, f"tensor {shown(name)} has {most:g}, too large for {dtype}")
        return piece

    def _importance(self, name: str, n_matrices: int) -> F32 | None:
        if self.imatrix is None or name not in self.imatrix.means or block_of(self.types[name])[0] == 1:
            return None
        means = self.imatrix.means[name]
        n = math.prod(self.gguf.tensors[name].shape[:-2]) * self.gguf.tensors[name].shape[-1]
        return means.reshape(n_matrices, -1) if len(means) == n else None  # of the embedding, see `_check_imatrix`


def plan_quantization(
    gguf: GGUFFile,
    name: str,
    *,
    imatrix: Imatrix | None = None,
    options: TypeOptions | None = None,
    allow_requantize: bool = False,
) -> Quantization:
    """Types of a model's tensors in a preset, by llama-quantize's name.

    PresetError for a type that is not written here. ModelFileError for a file that is no model, a
    tensor that is quantized already, and an importance matrix of another model, by the tensor.
    """
    check_is_model(gguf)
    name = preset(name)
    targets = tensor_types(gguf, name, options or TypeOptions(), weighted=imatrix is not None)
    types = {t: storable_dtype(dtype, gguf.tensors[t].shape[-1]) for t, dtype in targets.items()}
    plan = Quantization(gguf, name, types, imatrix)
    for t, dtype in targets.items():
        if types[t] != dtype:
            plan.fallbacks.setdefault((dtype, types[t]), []).append(t)
        before = gguf.tensors[t].dtype
        if types[t] != before and before not in FLOATS and not allow_requantize:
            raise ModelFileError(
                gguf.path, f"tensor '{t}' is quantized already ({before}); --allow-requantize loses more of it"
            )
    if imatrix is not None:
        _check_imatrix(plan, imatrix)
    for t, dtype in types.items():
        weighted = imatrix is not None and t in imatrix.means
        if name == "Q2_K_S" and dtype == "q2_k" and t.startswith("blk.") and not weighted:
            raise ModelFileError(gguf.path, f"tensor '{t}' needs an importance matrix for Q2_K_S")
        if imatrix is not None and not weighted and t.startswith("blk.") and block_of(dtype)[0] > 1:
            plan.without_importance.append(t)
    return plan


def plan_copy(gguf: GGUFFile) -> Quantization:
    """The types that the model or projector has, of a folder for example."""
    return Quantization(gguf, "", {name: info.dtype for name, info in gguf.tensors.items()})


def plan_export(gguf: GGUFFile, name: str, changed: Collection[str]) -> Quantization:
    """Types of a file whose `changed` tensors have new numbers: these get those of the preset, vectors and small
    matrices F32. Others keep theirs, but for floats, which a quantized preset quantizes, too. PresetError: as in
    `plan_quantization`."""
    name = preset(name)
    targets = tensor_types(gguf, name, TypeOptions(), weighted=False)
    is_quantized = block_of(PRESETS[name])[0] > 1
    types = {}
    for t, info in gguf.tensors.items():
        if is_quantizable(t, info.shape) and (t in changed or (is_quantized and info.dtype in FLOATS)):
            types[t] = storable_dtype(targets[t], info.shape[-1])
        else:
            types[t] = "f32" if t in changed else info.dtype
    return Quantization(gguf, name, types)


def _check_imatrix(plan: Quantization, imatrix: Imatrix) -> None:
    """ModelFileError names a matrix that the model does not have, or that has other inputs."""
    for name, means in imatrix.means.items():
        info = plan.gguf.tensors.get(name)
        if info is None:
            raise ModelFileError(imatrix.path, f"is of another model: this one has no tensor {shown(name)}")
        n = math.prod(info.shape[:-2]) * info.shape[-1]
        if len(means) != n and name != "token_embd.weight":
            raise ModelFileError(
                imatrix.path, f"is of another model: {shown(name)} has {n} inputs, the file has {len(means)}"
            )


def _listed(names: list[str]) -> str:
    return f"tensor '{names[0]}'" if len(names) == 1 else f"{len(names)} tensors ('{names[0]}', …)"


def _data_nbytes(shape: tuple[int, ...], dtype: str) -> int:
    block, nbytes = block_of(dtype)
    return math.prod(shape) // block * nbytes

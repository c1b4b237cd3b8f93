"""Weights of a folder: its safetensors files, checked against their index, as tensors of GGUF's types."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.models.errors import ModelFileError, shown
from logitless.models.gguf.parse import Part, TensorInfo, close_buffer
from logitless.models.huggingface.config import INDEX, read_json
from logitless.models.huggingface.safetensors import Stored, read_safetensors

Array = npt.NDArray[Any]
FLOATS = {"F32": "f32", "F16": "f16", "BF16": "bf16", "F64": "f32"}
_NUMPY = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}
_WHOLE = {"I64": np.int64, "I32": np.int32}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Weight:
    """A matrix, vector or stack in a GGUF type. `read`: its numbers (bf16 as their bits), or the bytes of each row's
    blocks."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[Sequence[Part]], Array]
    sources: tuple[Stored, ...]
    floats: Weight | None = None  # of blocks: the same numbers as floats
    scale: Weight | None = None  # of blocks: the number that they all are multiplied by, (1,)


@dataclass(frozen=True)
class Checkpoint:
    """The files of a folder and their tensors by name."""

    folder: Path
    parts: list[Part]
    tensors: dict[str, Stored]

    def error(self, name: str, problem: str) -> ModelFileError:
        stored = self.tensors.get(name)
        path = self.folder if stored is None else self.parts[stored.part].path
        return ModelFileError(path, f"tensor {shown(name)} {problem}")

    def by_name(self, tensors: Iterable[tuple[str, TensorInfo]]) -> dict[str, TensorInfo]:
        """GGUF tensors that are made of the folder's. ModelFileError: two become the same one."""
        by_name: dict[str, TensorInfo] = {}
        for name, info in tensors:
            if name in by_name:
                raise ModelFileError(self.folder, f"has two tensors that are {shown(name)} in GGUF")
            by_name[name] = info
        return by_name

    def close(self) -> None:
        for part in self.parts:
            close_buffer(part.buffer)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Map all files. ModelFileError names the file or tensor that is missing or damaged."""
    files, named = _files(folder)
    checkpoint = Checkpoint(folder, [], {})
    try:
        for i, path in enumerate(files):
            part, tensors = read_safetensors(path, i)
            checkpoint.parts.append(part)
            for name, stored in tensors.items():
                if name in checkpoint.tensors:
                    raise ModelFileError(path, f"tensor {shown(name)} is in another file of the folder, too")
                checkpoint.tensors[name] = stored
        for name, path in named.items():
            stored_at = checkpoint.tensors.get(name)
            if stored_at is None or checkpoint.parts[stored_at.part].path != path:
                raise ModelFileError(path, f"has no tensor {shown(name)}, which {INDEX} says is in it")
    except BaseException:
        checkpoint.close()
        raise
    if not checkpoint.tensors:
        checkpoint.close()
        raise ModelFileError(files[0], "has no tensors")
    return checkpoint


def _files(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """The weight files in order, and the file of each tensor that the index names."""
    weight_map = read_json(folder / INDEX).get("weight_map", {})
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelFileError(folder / INDEX, "'weight_map' does not name a file for each tensor")
    if weight_map:
        for file in (names := sorted(set(weight_map.values()))):
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise ModelFileError(folder / INDEX, f"{shown(file)} is no safetensors file of the folder")
            if not os.path.exists(folder / file):  # False, too, of names that are too long
                raise ModelFileError(folder / file, f"is missing, and {INDEX} names it: download it, too")
        return [folder / file for file in names], {name: folder / file for name, file in weight_map.items()}
    whole = folder / "model.safetensors"
    files = (
        [whole]
        if whole.exists()
        else sorted(folder.glob("model-*.safetensors")) or sorted(folder.glob("*.safetensors"))
    )
    if not files:
        pickle = next((path.name for pattern in _PICKLES for path in sorted(folder.glob(pattern))), "")
        problem = f"has {pickle}, a pickle, which may run any code" if pickle else "has no weights"
        raise ModelFileError(folder, f"{problem}: it needs *.safetensors (save_pretrained writes them)")
    if len(files) > 1 or "-of-" in files[0].name:
        last = files[-1].stem.rpartition("-of-")[2]
        if last.isdecimal() and int(last) != len(files):
            raise ModelFileError(folder, f"has {len(files)} of {int(last)} safetensors files, and no {INDEX}")
    return files, {}


def plain(stored: Stored) -> Weight:
    """A tensor of floats as it is."""
    dtype = FLOATS[stored.dtype]

    def read(parts: Sequence[Part]) -> Array:
        raw = stored.raw(parts)
        if stored.dtype == "F64":
            return raw.view(np.float64).astype(np.float32).reshape(stored.shape)
        return raw.view(_NUMPY[dtype]).reshape(stored.shape)

    return Weight(dtype, stored.shape, read, (stored,))


def whole_numbers(stored: Stored) -> Weight:
    """A tensor of whole numbers as 32-bit ones."""

    def read(parts: Sequence[Part]) -> Array:
        return stored.raw(parts).view(_WHOLE[stored.dtype]).astype(np.int32).reshape(stored.shape)

    return Weight("i32", stored.shape, read, (stored,))


def of_f32(array: npt.NDArray[np.float32], dtype: str) -> Array:
    """f32 as a float type, rounded to the nearest, to even ones between."""
    if dtype == "bf16":
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return array.astype(_NUMPY[dtype])


def as_f32(array: Array, dtype: str) -> npt.NDArray[np.float32]:
    """Numbers of a float type as f32."""
    if dtype == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)

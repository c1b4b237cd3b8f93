"""A fine-tuned model as a Hugging Face folder: the files of its base, with the numbers that have changed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from logitless.models.errors import ModelFileError, shown
from logitless.models.gguf.file import GGUFFile
from logitless.models.huggingface.checkpoint import FLOATS, Array, Checkpoint, of_f32, open_checkpoint
from logitless.models.huggingface.folder import Converted
from logitless.models.huggingface.safetensors import write_safetensors
from logitless.models.quantization.quantize import dequantized

_COPIED = (".json", ".jinja", ".model", ".txt")


def write_folder(out: Path, base: GGUFFile, tuned: GGUFFile) -> None:
    """Write `tuned`, which has the tensors of `base`, a folder, in the form and types of that folder. ModelFileError
    names a changed tensor that the folder has in a form that is not written."""
    checkpoint = open_checkpoint(base.path)
    try:
        changed = dict(_changed(checkpoint, base, tuned))
        out.mkdir(exist_ok=True)
        for file in sorted(base.path.iterdir()):
            if file.suffix in _COPIED and file.is_file():
                shutil.copyfile(file, out / file.name)
        for module in base.path.glob("[1-9]_*"):  # of sentence-transformers
            shutil.copytree(module, out / module.name)
        for i, part in enumerate(checkpoint.parts):
            tensors = {name: stored for name, stored in checkpoint.tensors.items() if stored.part == i}
            pieces = {n: changed.get(n, partial(_stored, checkpoint, n)) for n in tensors}
            arrays = {n: (s.dtype, s.shape, _once(pieces[n])) for n, s in tensors.items()}
            write_safetensors(out / part.path.name, arrays)
    finally:
        checkpoint.close()


def _once(make: partial[Array]) -> Iterator[Array]:
    yield make()


def _stored(checkpoint: Checkpoint, name: str) -> Array:
    return checkpoint.tensors[name].raw(checkpoint.parts)


def _changed(checkpoint: Checkpoint, base: GGUFFile, tuned: GGUFFile) -> Iterator[tuple[str, partial[Array]]]:
    names = {(stored.part, stored.offset): name for name, stored in checkpoint.tensors.items()}
    for name, info in base.tensors.items():
        source = info.source
        new = tuned.tensors.get(name)
        if new is None or new.shape != info.shape:
            raise ModelFileError(
                tuned.path, f"is not of {base.path}: tensor {shown(name)} is missing or of another shape"
            )
        if not isinstance(source, Converted) or (
            new.dtype == info.dtype and np.array_equal(base.bytes_of(name), tuned.bytes_of(name))
        ):
            continue
        places = [(weight.sources[0].part, weight.sources[0].offset) for weight in source.weights]
        if not names.keys() >= set(places):
            problem = (
                f"tensor {shown(name)} is of a module of sentence-transformers, which is not written: save FILE.gguf"
            )
            raise ModelFileError(base.path, problem)
        own = [names[place] for place in places]
        is_plain = all(checkpoint.tensors[n].dtype in FLOATS for n in own) and all(
            len(weight.sources) == 1 for weight in source.weights
        )
        if not is_plain or (source.move is not None and source.move.inverse is None):
            problem = f"tensor {shown(own[0])} has another form than in GGUF, which is not written: save FILE.gguf"
            raise ModelFileError(base.path, problem)
        for i, n in enumerate(own):
            yield n, partial(_numbers, checkpoint, n, source, tuned, name, i, len(own))


def _numbers(checkpoint: Checkpoint, n: str, source: Converted, tuned: GGUFFile, name: str, i: int, of: int) -> Array:
    """The numbers of a tensor of the folder, in its type."""
    values, stored = dequantized(tuned.tensors[name], tuned.bytes_of(name)), checkpoint.tensors[n]
    if source.move is not None and source.move.inverse is not None:
        values = source.move.inverse(values, source.config)
    result = of_f32(values.reshape(of, *stored.shape)[i], FLOATS[stored.dtype])
    if stored.dtype == "F64":
        return result.astype(np.float64)
    if stored.dtype == "F16" and not np.isfinite(result).all():
        raise checkpoint.error(n, "has a number that is too large for F16")
    return result

"""Importance matrix files of llama.cpp: for each matrix of a model the sums of squares of its inputs.

A GGUF file has two tensors for each: `NAME.in_sum2` (matrices, inputs) and `NAME.counts` (matrices, 1), the rows that
were summed; of experts, an expert's own. Older files (.dat) are lists of names, numbers and means."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from logitless.models.errors import ModelFileError, shown
from logitless.models.gguf.file import GGUFFile
from logitless.models.gguf.write import tensor, text, texts, u32, write_gguf

F32 = NDArray[np.float32]
SUMS, COUNTS = ".in_sum2", ".counts"


@dataclass(frozen=True)
class Imatrix:
    """Mean squares of the inputs by name of the matrix, flat: an expert's after the other's."""

    path: Path
    means: Mapping[str, F32]
    datasets: Sequence[str] = ()
    n_chunks: int = 0


def read_imatrix(path: str | Path) -> Imatrix:
    """Read a file of either format. ModelFileError names the fault, and the matrix."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
    except OSError as error:
        raise ModelFileError(path, f"cannot be opened: {error.strerror}") from None
    imatrix = _read_gguf(path) if is_gguf else _read_dat(path)
    if not imatrix.means:
        raise ModelFileError(path, "is no importance matrix")
    for name, means in imatrix.means.items():
        if not np.isfinite(means).all() or (means < 0).any():
            raise ModelFileError(path, f"the importance of {shown(name)} has a number that is not finite, or negative")
    return imatrix


def _read_gguf(path: Path) -> Imatrix:
    with GGUFFile.open(path) as gguf:
        means = {}
        for name in (t.removesuffix(SUMS) for t in gguf.tensors if t.endswith(SUMS)):
            if f"{name}{COUNTS}" not in gguf.tensors:
                raise ModelFileError(path, f"tensor {shown(name + COUNTS)} is missing")
            sums, counts = (_floats(gguf, name + end) for end in (SUMS, COUNTS))
            if len(sums) % len(counts):
                raise ModelFileError(path, f"{shown(name)} has {len(sums)} sums, which are no rows of {len(counts)}")
            sums, n = sums.reshape(len(counts), -1), counts[:, None]
            # an expert that had no row counts evenly
            means[name] = np.where(n > 0, sums / np.where(n > 0, n, np.float32(1)), np.float32(1)).reshape(-1)
        datasets = gguf.metadata.get("imatrix.datasets", [])
        names = [d.decode(errors="replace") for d in datasets if isinstance(d, bytes)]
        n_chunks = gguf.metadata.get("imatrix.chunk_count", 0)
        return Imatrix(path, means, names, n_chunks if isinstance(n_chunks, int) else 0)


def _floats(gguf: GGUFFile, name: str) -> F32:
    if gguf.tensors[name].dtype != "f32":
        raise ModelFileError(gguf.path, f"tensor {shown(name)} has type {gguf.tensors[name].dtype}, not f32")
    return np.array(gguf.bytes_of(name).view(np.float32))


def _read_dat(path: Path) -> Imatrix:
    data, at = path.read_bytes(), 0

    def take(n: int) -> bytes:
        nonlocal at
        if not 0 <= n <= len(data) - at:
            raise ModelFileError(path, f"is no importance matrix: {n} bytes are expected at byte {at} of {len(data)}")
        at += n
        return data[at - n : at]

    def number() -> int:
        return int(struct.unpack("<i", take(4))[0])

    means, n_chunks, datasets = {}, 0, []
    for _ in range(number()):
        name = take(number()).decode(errors="replace")
        n_calls, n_values = number(), number()
        values = np.frombuffer(take(4 * n_values), "<f4").astype(np.float32)
        means[name] = values / np.float32(n_calls) if n_calls > 0 else values
    if at < len(data):  # the first files end here
        n_chunks = number()
        datasets = [take(number()).decode(errors="replace")] if at < len(data) else []
    return Imatrix(path, means, datasets, n_chunks)


def write_imatrix(
    path: str | Path,
    arch: str,
    sums: Mapping[str, tuple[F32, F32]],
    *,
    datasets: Sequence[str],
    n_chunks: int,
    chunk_size: int,
) -> None:
    """Write a file of `NAME: (sums (matrices, inputs), counts (matrices,))`."""
    keys = {
        "general.type": text("imatrix"),
        "imatrix.datasets": texts(list(datasets)),
        "imatrix.chunk_count": u32(n_chunks),
        "imatrix.chunk_size": u32(chunk_size),
    }
    tensors = []
    for name, (squares, counts) in sorted(sums.items()):
        tensors += [(f"{name}{SUMS}", tensor(squares)), (f"{name}{COUNTS}", tensor(counts.reshape(-1, 1)))]
    write_gguf(path, arch, keys, tensors)

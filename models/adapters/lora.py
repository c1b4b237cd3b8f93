"""LoRA adapter files (Hu et al., 2021) in llama.cpp's format: W x + scale · (alpha / r) · B (A x).

DoRA's (Liu et al., 2024) have a third tensor, `.lora_delta`, which llama.cpp refuses: d − 1 for the
factor d of each output of W. Their B has the factor already: d ∘ (W x + …) = W x + δ ∘ W x + B (A x)."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from logitless.models.adapters.low_rank import EMBEDDING, EXPERTS, NORMS
from logitless.models.errors import ModelFileError, shown
from logitless.models.gguf.file import GGUFFile
from logitless.models.gguf.write import Key, f32, flag, tensor, text, write_gguf
from logitless.models.hparams.hparams import Hparams
from logitless.models.weights.tensor_map import TensorSlice, is_unused
from logitless.models.weights.weights import MATRIX_TYPES, check_weights

F32 = npt.NDArray[np.float32]
MAX_RANK = 4096
_TRAINED = ("adapter.lora.trained_alpha", "adapter.lora.trained_rslora")  # our own
log = logging.getLogger("logitless.lora")


@dataclass(frozen=True)
class Pair:
    """A (r, n_in) and B (n_out, r) of one weight; the token embedding's A is (n_vocab, r), and those
    of n experts lie one after the other, (n · r, n_in) and (n · n_out, r). `delta`
    (n_out,): of DoRA, d − 1 for the factor d of each output of W."""

    a: F32
    b: F32
    delta: F32 | None = None

    @property
    def rank(self) -> int:
        return int(self.b.shape[1])


@dataclass(frozen=True)
class Scaling:
    """Factor of a pair in training: alpha / r, with `rslora` alpha / √r."""

    alpha: float
    rslora: bool = False

    def factor(self, rank: int) -> float:
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)


@dataclass(frozen=True)
class Adapter:
    """Pairs by the graph's weight names, which split a file's fused matrices."""

    pairs: Mapping[str, Pair]
    alpha: float = 0.0  # 0: each pair's rank
    # adapter.lora.task_name, prompt_prefix
    metadata: Mapping[str, str] = field(default_factory=dict)
    trained: Scaling | None = None  # of rsLoRA and DoRA, which B has already

    def factor(self, name: str) -> float:
        """alpha / r of a pair."""
        return self.alpha / self.pairs[name].rank if self.alpha else 1.0

    @property
    def digest(self) -> str:
        """Hex digest of all numbers."""
        digest = blake2b(digest_size=16)
        for name, pair in sorted(self.pairs.items()):
            digest.update(f"{name} {pair.a.shape} {pair.b.shape} {self.factor(name)!r} ".encode())
            digest.update(np.ascontiguousarray(pair.a).data)
            digest.update(np.ascontiguousarray(pair.b).data)
            if pair.delta is not None:
                digest.update(pair.delta.data)
        return digest.hexdigest()

    @property
    def rank(self) -> int:
        return max((pair.rank for pair in self.pairs.values()), default=0)


def read_adapter(path: str | Path, base: GGUFFile, h: Hparams) -> Adapter:
    """Read an adapter of this model, a GGUF file or a folder of peft. ModelFileError names the tensor that does not
    fit."""
    with _open(Path(path), h, base) as gguf:
        kind = gguf.metadata.get("general.type"), gguf.metadata.get("adapter.type")
        if kind != ("adapter", "lora"):
            raise ModelFileError(path, f"is not a LoRA adapter (general.type {kind[0]!r}, adapter.type {kind[1]!r})")
        arch = gguf.metadata.get("general.architecture")
        if arch != h.arch:
            raise ModelFileError(path, f"is an adapter for {arch!r}, the model is {h.arch!r}")
        alpha = gguf.metadata.get("adapter.lora.alpha", 0.0)
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not np.isfinite(alpha) or alpha < 0:
            raise ModelFileError(path, f"key 'adapter.lora.alpha' is {alpha!r}")
        declared = check_weights(base, h)
        files = _file_pairs(gguf, base, declared, h)
        pairs = {name: pair for source, whole in files.items() for name, pair in _taken_apart(source, whole, declared)}
        keys = ("adapter.lora.task_name", "adapter.lora.prompt_prefix")
        texts = {key.rpartition(".")[2]: gguf.metadata[key] for key in keys if isinstance(gguf.metadata.get(key), str)}
        trained = _trained(gguf)
    return Adapter(pairs, float(alpha), texts, trained)


def _open(path: Path, h: Hparams, base: GGUFFile) -> GGUFFile:
    """A GGUF file, or a folder of peft read as one."""
    if not os.path.isfile(path / "adapter_config.json"):
        return GGUFFile.open(path)
    from logitless.models.huggingface.adapter import read_peft  # here: files do not need it

    return GGUFFile(read_peft(path, h, base), path)


def _trained(gguf: GGUFFile) -> Scaling | None:
    """The scaling in training that a file of ours tells."""
    alpha, rslora = (gguf.metadata.get(key) for key in _TRAINED)
    if alpha is None and rslora is None:
        return None
    if not (isinstance(alpha, float) and 0 < alpha < math.inf and isinstance(rslora, bool)):
        raise ModelFileError(gguf.path, f"keys {' and '.join(_TRAINED)} are {alpha!r} and {rslora!r}")
    return Scaling(alpha, rslora)


class _AdapterFile:
    """The matrices of an adapter's file, checked against those of the model."""

    def __init__(self, gguf: GGUFFile, base: GGUFFile, declared: Mapping[str, TensorSlice]) -> None:
        self._gguf, self._base, self._declared = gguf, base, declared

    def _error(self, text: str) -> ModelFileError:
        return ModelFileError(self._gguf.path, text)

    def _finite(self, name: str, array: F32) -> F32:
        if not np.isfinite(array).all():
            raise self._error(f"tensor {shown(name)} holds a number that is not finite")
        return np.array(array, np.float32)

    def values(self, name: str) -> F32:
        """A tensor's values, (rows, row)."""
        from logitless.models.quantization.quantize import dequantized

        info = self._gguf.tensors[name]
        if info.dtype not in MATRIX_TYPES:
            raise self._error(f"tensor {shown(name)} has type {info.dtype}, which is not supported")
        return self._finite(name, dequantized(info, self._gguf.bytes_of(name)).reshape(-1, info.shape[-1]))

    def delta(self, weight: str, n_out: int) -> F32 | None:
        """The added vector of a weight, (n_out,)."""
        info = self._gguf.tensors.get(name := f"{weight}.lora_delta")
        if info is None:
            return None
        if info.shape != (n_out,) or info.dtype != "f32" or weight == EMBEDDING or NORMS.fullmatch(weight):
            raise self._error(f"tensor {shown(name)} has shape {info.shape}, expected f32 {(n_out,)}")
        return self._finite(name, self._gguf.bytes_of(name).view(np.float32))

    def pair(self, weight: str) -> Pair:
        """A and B of a weight."""
        name, other = f"{weight}.lora_a", f"{weight}.lora_b"
        target = self._base.tensors.get(weight)
        parts = [(n, part) for n, part in self._declared.items() if part.source == weight and n.endswith(".weight")]
        names = [n for n, part in parts if not (part.n_experts or part.in_file or part.as_f32)]
        of_experts = len(parts) == 1 and bool(EXPERTS.fullmatch(weight))
        is_vector = any(map(NORMS.fullmatch, names))
        if target is None or not (of_experts or is_vector or (names and len(target.shape) == 2)):
            raise self._error(f"tensor {shown(name)}: the model has no matrix {shown(weight)}")
        a, b = self._gguf.tensors[name].shape, self._gguf.tensors[other].shape
        for half, shape in ((name, a), (other, b)):
            if len(shape) != (3 if of_experts else 2) or (of_experts and shape[0] != target.shape[0]):
                kind = f"{target.shape[0]} matrices" if of_experts else "a matrix"
                raise self._error(f"tensor {shown(half)} has shape {shape}, expected {kind}")
        a, b = a[-2:], b[-2:]
        n_out, n_in = matrix_shape(target.shape)
        fits = (a[0], b[0]) == (n_out, n_in) if weight == EMBEDDING else (b[0], a[1]) == (n_out, n_in)
        rank = a[1] if weight == EMBEDDING else a[0]
        if not fits or b[1] != rank:
            raise self._error(f"tensors {shown(name)} {a} and lora_b {b} do not fit {(n_out, n_in)}")
        if not 0 < rank <= MAX_RANK:
            raise self._error(f"tensor {shown(name)}: a rank of {rank} is not supported")
        return Pair(self.values(name), self.values(other), self.delta(weight, n_out))


def _file_pairs(gguf: GGUFFile, base: GGUFFile, declared: Mapping[str, TensorSlice], h: Hparams) -> dict[str, Pair]:
    file, pairs = _AdapterFile(gguf, base, declared), {}
    for name in gguf.tensors:
        # a norm as a whole
        if name.endswith("_norm.weight") or is_unused(h, name.rpartition(".lora_")[0]):
            log.warning("%s: tensor %s is ignored, as llama.cpp does", gguf.path, shown(name))
            continue
        weight, _, half = name.rpartition(".lora_")
        if half == "delta" and f"{weight}.lora_a" in gguf.tensors:
            continue
        if half not in ("a", "b"):
            raise ModelFileError(gguf.path, f"tensor {shown(name)} is not part of an adapter")
        other = f"{weight}.lora_{'b' if half == 'a' else 'a'}"
        if other not in gguf.tensors:
            raise ModelFileError(gguf.path, f"tensor {shown(other)} is missing")
        if half == "a":
            pairs[weight] = file.pair(weight)
    if not pairs:
        raise ModelFileError(gguf.path, "has no tensors")
    return pairs


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(n_out, n_in) of a weight; a vector is one row."""
    return (1, *shape)[-2:]  # type: ignore[return-value]


def turned(b: F32, n: int) -> F32:
    """Matrices (n · p, q) of n experts, each transposed: (n · q, p)."""
    return np.ascontiguousarray(b.reshape(n, -1, b.shape[1]).swapaxes(1, 2)).reshape(-1, len(b) // n)


def _taken_apart(source: str, whole: Pair, declared: Mapping[str, TensorSlice]) -> list[tuple[str, Pair]]:
    parts = [(name, part) for name, part in declared.items() if part.source == source]
    if len(parts) == 1:
        return [(parts[0][0], whole)]
    result = []
    for name, part in parts:
        rows = slice(part.start, part.start + part.shape[0])
        result.append((name, Pair(whole.a, whole.b[rows], None if whole.delta is None else whole.delta[rows])))
    return result


def write_adapter(path: str | Path, adapter: Adapter, base: GGUFFile, h: Hparams, name: str = "") -> None:
    """Write an adapter that llama.cpp can load."""
    keys: dict[str, Key] = {
        "general.type": text("adapter"),
        "adapter.type": text("lora"),
        "adapter.lora.alpha": f32(adapter.alpha or adapter.rank),
    }
    if name:
        keys["general.name"] = text(name)
    for key, value in adapter.metadata.items():
        keys[f"adapter.lora.{key}"] = text(value)
    if adapter.trained is not None:
        keys |= dict(zip(_TRAINED, (f32(adapter.trained.alpha), flag(adapter.trained.rslora)), strict=True))
    if EMBEDDING in adapter.pairs and "output.weight" not in base.tensors:
        log.warning("%s: llama.cpp ends when it uses an adapter of an embedding that is the output, too", path)
    tensors = []
    for source, pair in fused(_with_one_alpha(adapter), base, h).items():
        by_expert = (base.tensors[source].shape[0],) if EXPERTS.fullmatch(source) else ()
        for half, values in (("a", pair.a), ("b", pair.b)):
            shape = (*by_expert, -1, values.shape[1]) if by_expert else values.shape
            tensors.append((f"{source}.lora_{half}", tensor(values.reshape(shape))))
        if pair.delta is not None:
            tensors.append((f"{source}.lora_delta", tensor(pair.delta)))
    write_gguf(path, h.arch, keys, tensors)


def _with_one_alpha(adapter: Adapter) -> Adapter:
    """The adapter with one alpha for all ranks, as files have it."""
    if adapter.alpha:
        return adapter
    rank = adapter.rank
    scaled = {name: replace(p, b=p.b * np.float32(p.rank / rank)) for name, p in adapter.pairs.items()}
    return replace(adapter, pairs=scaled, alpha=float(rank))


def fused(adapter: Adapter, base: GGUFFile, h: Hparams) -> dict[str, Pair]:
    """Pairs by the file's tensor names; those of a fused matrix become one, with A stacked and B block-diagonal."""
    declared = check_weights(base, h)
    groups: dict[str, list[tuple[TensorSlice, Pair]]] = {}
    for name, pair in adapter.pairs.items():
        groups.setdefault(declared[name].source, []).append((declared[name], pair))
    result = {}
    for source, members in groups.items():
        if len(members) == 1 and math.prod(members[0][0].shape) == math.prod(base.tensors[source].shape):
            result[source] = members[0][1]
            continue
        rank = sum(pair.rank for _, pair in members)
        b = np.zeros((base.tensors[source].shape[0], rank), np.float32)
        delta = np.zeros(len(b), np.float32) if any(pair.delta is not None for _, pair in members) else None
        at = 0
        for part, pair in members:
            columns = slice(at, at + pair.rank)
            b[part.start : part.start + part.shape[0], columns] = pair.b * np.float32(rank / pair.rank)
            at += pair.rank
            if delta is not None and pair.delta is not None:
                delta[part.start : part.start + part.shape[0]] = pair.delta
        result[source] = Pair(np.concatenate([pair.a for _, pair in members]), b, delta)
    return result

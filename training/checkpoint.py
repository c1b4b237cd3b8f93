"""Training checkpoints, GGUF files with llama.cpp's keys: parameters, optimizer state, data position.

A run that is restored goes on to the same bytes. Version 0 files, which have no
`training.epoch_count` and no optimizer version of their own, are still read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.gguf.types import ValueType
from logitless.models.gguf.write import Data, Key, f32, flag, tensor, text, u32, u64, write_gguf
from logitless.models.weights.finite import is_finite
from logitless.training.adapters.options import RANKS, LoraOptions
from logitless.training.config import SUPERVISED
from logitless.training.data.packing import Groups
from logitless.training.errors import TrainingError
from logitless.training.reporting.results import Result
from logitless.training.schedule import Stopping
from logitless.training.trainable import LORA
from logitless.training.trainer import Counters, Trainer

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
FILE_VERSION = 1
OPTIMIZER_VERSION = 0
_FIRST, _SECOND = "optimizer.adam.first_moments", "optimizer.adam.second_moments"
_PAST = "optimizer.adam.past_loss_values"
_EXACT = "training.past_losses"  # the same as doubles, so that a run goes on to the same bytes
_BATCH = "training.batch"  # answers of reinforcement learning that have steps before them
_REFERENCE = "training.reference"  # log-probability of each row of data before the first step
_LORA = "training.lora.options"  # all of them; llama.cpp's keys have the ranks and alpha
_OPTIMIZERS = {"adamw": "adam"}  # our names → llama.cpp's, where they differ
# our names for the kinds of tensors → llama.cpp's
_RANK_KEYS = {
    "tok_embd": "token_embd",
    "out": "output",
    "wq": "attn_q",
    "wk": "attn_k",
    "wv": "attn_v",
    "wo": "attn_output",
    "w1": "ffn_gate",
    "w2": "ffn_down",
    "w3": "ffn_up",
    "att_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "out_norm": "output_norm",
}


def save_checkpoint(path: str | Path, trainer: Trainer, arch: str) -> None:
    """Write all that the rest of the run depends on. OSError when the disk is full."""
    state, trainable = trainer.state(), trainer.trainable
    c, order, stopping = state["counters"], state["order"], state["stopping"]
    optimizer, result = trainer.settings.optimizer, state["epoch_result"]
    keys: dict[str, Key] = {
        "general.type": text("checkpoint"),
        "training.type": text(trainable.kind),
        "training.file_version": u32(FILE_VERSION),
        "training.iteration_count": u64(c.iterations),
        "training.sample_count": u64(c.samples),
        "training.token_count": u64(c.tokens),
        "training.epoch_count": u64(c.epochs),
        "training.shuffle.samples_hash": u64(order["samples_hash"]),
        "training.shuffle.rng_state": text(order["rng_state"]),
        "training.shuffle.sample_count": u64(order["sample_count"]),
        "training.shuffle.next_sample": u64(order["next_sample"]),
        "training.shuffle.epoch": u64(order["epoch"]),
        "training.shuffle.seed": u64(order["seed"]),
        "training.epoch_result": text(json.dumps(asdict(result), separators=(",", ":"))),
        "training.settings": text(json.dumps(structs.asdict(trainer.settings), separators=(",", ":"), sort_keys=True)),
        "optimizer.type": text(_OPTIMIZERS.get(optimizer, optimizer)),
        "optimizer.file_version": u32(OPTIMIZER_VERSION),
        "optimizer.convergence_past_count": u32(max(0, trainer.stopping.past)),
        "optimizer.parameter_count": u64(trainable.n_params),
        "optimizer.iteration_count": u64(c.iterations),
        "optimizer.just_initialized": flag(state["just_initialized"]),
        "optimizer.adam.best_loss": Key(stopping["best_loss"], ValueType.FLOAT64),
        "optimizer.adam.previous_loss": Key(stopping["previous_loss"], ValueType.FLOAT64),
        "optimizer.adam.no_improvement_count": u32(stopping["no_improvement"]),
        "training.validation.best_loss": Key(stopping["best_valid_loss"], ValueType.FLOAT64),
        "training.validation.best_iteration": u64(stopping["best_step"]),
        "training.validation.no_improvement_count": u32(stopping["n_worse"]),
    }
    if trainer.method != SUPERVISED:
        keys["training.method"] = text(trainer.method)
    for name, values in state.get("batch", {}).items():
        item = ValueType.FLOAT64 if values.dtype == np.float64 else ValueType.INT32
        keys[f"{_BATCH}.{name}"] = Key(values.tolist(), ValueType.ARRAY, item)
    if trainer.reference is not None:
        keys[_REFERENCE] = Key(trainer.reference.tolist(), ValueType.ARRAY, ValueType.FLOAT64)
    if trainable.lora is not None:
        options = {**asdict(trainable.lora), "targets": list(trainable.lora.targets)}
        keys[_LORA] = text(json.dumps(options, separators=(",", ":"), sort_keys=True))
        keys["training.lora.alpha"] = f32(trainable.lora.alpha)
        keys["training.lora.rank"] = u32(trainable.lora.rank)
        for kind, key in _RANK_KEYS.items():
            name = RANKS[kind].replace("*", "0")
            keys[f"training.lora.rank.{key}"] = u32(trainable.lora.rank_of(name))
    named = (*zip(trainable.names, trainable.params, strict=True), *trainable.frozen)
    tensors = [(name, Data(partial(trainable.numbers, p), p.shape)) for name, p in named]
    if optimizer == "adamw":
        for i, name in enumerate((_FIRST, _SECOND)):
            tensors.append((name, Data(partial(_moments, trainer, i), (trainable.n_params,))))
    if stopping["history"]:
        keys[_EXACT] = Key(list(stopping["history"]), ValueType.ARRAY, ValueType.FLOAT64)
        tensors.append((_PAST, tensor(np.array(stopping["history"]))))
    write_gguf(path, arch, keys, tensors)


def _moments(trainer: Trainer, i: int) -> Iterator[F32]:
    """First or second moments of all parameters, concatenated."""
    for pair in trainer.steps.moments:
        yield from trainer.trainable.numbers(pair[i])


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, read."""

    path: Path
    kind: str
    arch: str
    lora: LoraOptions | None
    state: dict[str, Any]
    tensors: dict[str, F32]
    optimizer: str
    method: str = SUPERVISED
    reference: F64 | None = None

    def restore(self, trainer: Trainer, *, force_reshuffle: bool = False) -> bool:
        """Resume a run at the checkpoint. False: the data differ, and begin anew. TrainingError names the mismatch."""
        trainable = trainer.trainable
        if self.kind != trainable.kind:
            raise TrainingError(f"{self.path}: is a checkpoint of {self.kind}, not of {trainable.kind}")
        method = trainer.method
        if self.method != method:
            raise TrainingError(f"{self.path}: is a checkpoint of method {self.method}, not of {method}")
        if self.reference is not None:
            self._check_rows(trainer)
            trainer.reference = self.reference
        kind = _OPTIMIZERS.get(trainer.settings.optimizer, trainer.settings.optimizer)
        if self.optimizer != kind:
            raise TrainingError(f"{self.path}: the optimizer was {self.optimizer}, not {kind}")
        try:
            trainable.write(self.tensors)
        except TrainingError as error:
            raise TrainingError(f"{self.path}: {error}") from None
        for i, name in enumerate((_FIRST, _SECOND) if kind == "adam" else ()):
            flat = self.tensors.get(name)
            if flat is None or flat.shape != (trainable.n_params,):
                raise TrainingError(f"{self.path}: tensor '{name}' is missing, or not of {trainable.n_params} numbers")
            at = 0
            for p, pair in zip(trainable.params, trainer.steps.moments, strict=True):
                n = p.nbytes // 4
                trainable.session.write(pair[i].name, flat[at : at + n])
                at += n
        return trainer.restore(self.state, force_reshuffle=force_reshuffle)

    def _check_rows(self, trainer: Trainer) -> None:
        """TrainingError: the reference log-probabilities are those of other data."""
        assert self.reference is not None
        dataset = trainer.order.dataset
        n = len(dataset.values) if isinstance(dataset, Groups) else 0
        if self.state["order"]["samples_hash"] != trainer.order.hash or len(self.reference) != n:
            raise TrainingError(
                f"{self.path}: has the reference log-probabilities of other data: {self.method} goes on with the same"
            )


def steps_behind(path: str | Path) -> int:
    """Optimizer steps of a checkpoint, without reading tensors. ModelFileError as `read_checkpoint`."""
    with GGUFFile.open(path) as gguf:
        steps = gguf.metadata.get("training.iteration_count")
    if not isinstance(steps, int) or isinstance(steps, bool):
        raise ModelFileError(path, "key 'training.iteration_count' is missing or not an int: no checkpoint")
    return steps


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint. ModelFileError or TrainingError names the file's fault."""
    with GGUFFile.open(path) as gguf:
        m = gguf.metadata

        def get(key: str, kind: type, default: Any = None) -> Any:
            value = m.get(key, default)
            if kind is float and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
                raise ModelFileError(path, f"key '{key}' is missing or not a {kind.__name__}: no checkpoint")
            return value

        version = get("training.file_version", int)
        if version > FILE_VERSION:
            raise ModelFileError(path, f"key 'training.file_version' is {version}; this version reads {FILE_VERSION}")
        version = get("optimizer.file_version", int, OPTIMIZER_VERSION)
        if version > OPTIMIZER_VERSION:
            reads = f"this version reads {OPTIMIZER_VERSION}"
            raise ModelFileError(path, f"key 'optimizer.file_version' is {version}; {reads}")
        kind = get("training.type", str)
        tensors: dict[str, F32] = {}
        for name, info in gguf.tensors.items():
            if info.dtype != "f32":
                raise ModelFileError(path, f"tensor '{name}' has type {info.dtype}, expected f32")
            raw = gguf.bytes_of(name)
            if name != _PAST and not is_finite(raw, "f32"):
                raise ModelFileError(path, f"tensor '{name}' has a number that is NaN or infinite")
            tensors[name] = np.array(raw.view(np.float32).reshape(info.shape))
        updates = get("optimizer.iteration_count", int)
        past = tensors.pop(_PAST, None)
        state = {
            "counters": Counters(
                get("training.iteration_count", int),
                get("training.sample_count", int),
                get("training.token_count", int),
                get("training.epoch_count", int, 0),
            ),
            "order": {
                "samples_hash": get("training.shuffle.samples_hash", int),
                "rng_state": get("training.shuffle.rng_state", str),
                "sample_count": get("training.shuffle.sample_count", int),
                "next_sample": get("training.shuffle.next_sample", int),
                "epoch": get("training.shuffle.epoch", int, get("training.epoch_count", int, 0)),
                "seed": get("training.shuffle.seed", int, -1),  # -1: an older file
            },
            "stopping": {
                **Stopping().counters(),
                "best_loss": get("optimizer.adam.best_loss", float),
                "previous_loss": get("optimizer.adam.previous_loss", float),
                "no_improvement": get("optimizer.adam.no_improvement_count", int),
                "best_valid_loss": get("training.validation.best_loss", float, math.inf),
                "best_step": get("training.validation.best_iteration", int, 0),
                "n_worse": get("training.validation.no_improvement_count", int, 0),
                "history": () if past is None else _history(gguf, past, updates),
                "n_updates": updates,
            },
            "epoch_result": _result(get("training.epoch_result", str, "{}"), path),
            "just_initialized": get("optimizer.just_initialized", bool),
            "batch": {k.removeprefix(f"{_BATCH}."): np.array(m[k]) for k in m if k.startswith(f"{_BATCH}.")},
        }
        lora = None
        if kind == LORA:
            ranks = {k: int(get(f"training.lora.rank.{key}", int, 0)) for k, key in _RANK_KEYS.items()}
            lora = LoraOptions(
                int(get("training.lora.rank", int, max(ranks.values()))), get("training.lora.alpha", float, 0.0), ranks
            )
            if _LORA in m:
                lora = _lora(get(_LORA, str), path)
        reference = m.get(_REFERENCE)
        if reference is not None and (not isinstance(reference, np.ndarray) or reference.dtype != np.float64):
            raise ModelFileError(path, f"key '{_REFERENCE}' is not an array of doubles")
        if reference is not None and not np.isfinite(reference).all():
            raise ModelFileError(path, f"key '{_REFERENCE}' has a number that is NaN or infinite")
        return Checkpoint(
            Path(path),
            kind,
            get("general.architecture", str),
            lora,
            state,
            tensors,
            get("optimizer.type", str),
            get("training.method", str, SUPERVISED),
            None if reference is None else np.array(reference),
        )


def _history(gguf: GGUFFile, past: F32, n_updates: int) -> tuple[float, ...]:
    """Losses of the last steps, oldest first."""
    m = gguf.metadata

    def check(expected: str) -> None:
        if f"{past.shape}" != expected:
            raise ModelFileError(gguf.path, f"tensor '{_PAST}' has shape {past.shape}, expected {expected}")

    if _EXACT in m:
        exact = m[_EXACT]
        if not isinstance(exact, np.ndarray) or exact.dtype != np.float64:
            raise ModelFileError(gguf.path, f"key '{_EXACT}' is not an array of doubles")
        check(f"({len(exact)},)")
        return tuple(exact.tolist())
    if "training.settings" in m:  # ours, when the tensor had the halves of doubles
        check(f"({past.size},)" if past.size % 2 == 0 else "(2·n,)")
        return tuple(past.view(np.float64).tolist())
    check(f"({m.get('optimizer.convergence_past_count')},)")  # ggml's: a ring, step i (from 0) at i modulo its size
    turned = np.roll(past, -n_updates) if n_updates > past.size else past
    return tuple(turned[:n_updates].tolist())


def _lora(raw: str, path: str | Path) -> LoraOptions:
    try:
        record = json.loads(raw)
        return LoraOptions(**{**record, "targets": tuple(record["targets"])})
    except (ValueError, TypeError, KeyError):
        raise ModelFileError(path, f"key '{_LORA}' is not a checkpoint's") from None


def _result(raw: str, path: str | Path) -> Result:
    try:
        record = json.loads(raw)
        sums = {str(name): (float(total), int(n)) for name, (total, n) in record.pop("sums", {}).items()}
        return Result(**record, sums=sums)
    except (ValueError, TypeError, AttributeError):
        raise ModelFileError(path, "key 'training.epoch_result' is not a checkpoint's") from None

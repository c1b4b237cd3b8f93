"""Trainable parameters: all weights of a model, or LoRA adapters beside frozen weights."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.graph.execution.session import UPLOAD_NBYTES, Session
from logitless.graph.tensor import Tensor
from logitless.models.adapters.lora import Adapter, Pair
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams
from logitless.models.model import Model
from logitless.models.weights.finite import is_finite
from logitless.models.weights.tensor_map import TensorSlice
from logitless.models.weights.weights import Weights, check_weights, numbers_of
from logitless.training.adapters.options import LoraOptions, adapter_of
from logitless.training.errors import TrainingDiverged, TrainingError

F32 = npt.NDArray[np.float32]
FULL, LORA = "train_model", "finetune_lora"
Owner = Callable[[Callable[[], Any]], Any]  # runs a call on the devices' thread


def at_once(call: Callable[[], Any]) -> Any:
    return call()


# constants, router biases, scales of matrices, and embedding or ranking heads: the language-model loss has no gradient
_WITHOUT_GRADIENT = re.compile(r"rope_|blk\.\d+\.(?:exp_probs_b|indexer)\.|cls\.|dense_|.*\.factor$")


@dataclass(frozen=True)
class Trainable:
    """A model with its trained parameters (variables of the session) in a fixed order, and their
    names in files. `owner`: runs a call on the thread that owns the devices."""

    kind: str  # FULL | LORA
    session: Session
    model: Model
    params: tuple[Tensor, ...]
    names: tuple[str, ...]  # in checkpoints
    lora: LoraOptions | None = None
    owner: Owner = at_once
    frozen: tuple[tuple[str, Tensor], ...] = ()  # variables by file name that the start decides, not the steps

    @property
    def n_params(self) -> int:
        return sum(p.nbytes // 4 for p in self.params)

    @property
    def state(self) -> tuple[Tensor, ...]:
        """All variables that the model's weights are made of, beside its file."""
        return (*self.params, *(t for _, t in self.frozen))

    def read(self) -> dict[str, F32]:
        """Parameters by file name."""
        return {name: self.owner(partial(self.session.read, p.name)) for name, p in self._named}

    @property
    def _named(self) -> Iterator[tuple[str, Tensor]]:
        return zip(self.names, self.params, strict=True)

    def pieces(self, name: str) -> Iterator[F32]:
        """A parameter by file name, a block of rows at a time."""
        return self.numbers(self.params[self.names.index(name)])

    def numbers(self, t: Tensor) -> Iterator[F32]:
        """An f32 variable, a block of rows at a time, never copied as a whole. TrainingDiverged: a
        number is not finite."""
        row = t.nbytes // t.shape[0]
        step = max(1, UPLOAD_NBYTES // row) * row
        for start in range(0, t.nbytes, step):
            raw = self.owner(partial(self.session.read_bytes, t.name, start, min(step, t.nbytes - start)))
            _check_finite(t.name, raw)
            yield raw.view(np.float32).reshape(-1, *t.shape[1:])

    def write(self, values: Mapping[str, F32]) -> None:
        for name, p in (*self._named, *self.frozen):
            value = values.get(name)
            if value is None or value.shape != p.shape:
                shape = "missing" if value is None else f"of shape {value.shape}, expected {p.shape}"
                raise TrainingError(f"tensor '{name}' is {shape}")
            self.session.write(p.name, np.ascontiguousarray(value, np.float32))

    def adapter(self) -> Adapter:
        """The current adapter; its products are those of the forward pass to the bit.
        TrainingDiverged: a number is not finite."""
        adapter = self._adapter()
        for name, pair in adapter.pairs.items():
            for values in (pair.a, pair.b, pair.delta):
                if values is not None:
                    _check_finite(name, values)
        return adapter

    def _adapter(self) -> Adapter:
        assert self.lora is not None
        low_rank = self.model.weights.low_rank
        assert low_rank is not None
        if not self.lora.dora:
            values = self.read()
            frozen = {name: self.owner(partial(self.session.read, t.name)) for name, t in self.frozen}
            return adapter_of(self.lora, values | frozen)
        pairs = {}
        for name, (a, b) in low_rank.pairs.items():
            computed = self.owner(partial(self.session.compute, [b, low_rank.deltas[name]]))
            pairs[name] = Pair(self.owner(partial(self.session.read, a.name)), *computed)
        return Adapter(pairs, trained=self.lora.trained)


def _check_finite(name: str, values: npt.NDArray[Any]) -> None:
    if not is_finite(np.ascontiguousarray(values).reshape(-1).view(np.uint8), "f32"):
        raise TrainingDiverged(f"the trained tensor '{name}' has a number that is NaN or infinite")


def full(
    session: Session, model: Model, gguf: GGUFFile, h: Hparams, patterns: Sequence[str] = ("*",), prefix: str = "train"
) -> Trainable:
    """Full finetuning: weights whose name matches a pattern, in f32; the others stay as in the file."""
    tensors = dict(model.weights.tensors)
    params, names = [], []
    declared = check_weights(gguf, h)
    for name, part in declared.items():
        if _WITHOUT_GRADIENT.match(name) or not any(fnmatch.fnmatchcase(name, p) for p in patterns):
            continue

        def start(part: TensorSlice = part) -> F32:
            return part.gather(numbers_of(gguf, declared, part.source))

        tensors.pop(name.removesuffix("weight") + "factor", None)  # the trained numbers have it
        source = _bytes_from(start)
        tensors[name] = session.define(f"{prefix}.{name}", part.graph_shape, source=source, on_loaded=gguf.release)
        params.append(tensors[name])
        names.append(name)
    if not params:
        raise TrainingError(f"no tensor is named like {', '.join(patterns)}")
    trained = replace(model, weights=Weights(tensors, directions=model.weights.directions))  # without its adapters
    return Trainable(FULL, session, trained, tuple(params), tuple(names))


def _bytes_from(make: Callable[[], F32]) -> Callable[[], npt.NDArray[np.uint8]]:
    return lambda: np.ascontiguousarray(make(), np.float32).reshape(-1).view(np.uint8)

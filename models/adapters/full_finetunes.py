"""Full finetunes beside a model: other weights for the same graph, by handle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from logitless.graph.execution.session import Session
from logitless.models.architectures.mtp import can_guess
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams
from logitless.models.model import Model, hparams_of
from logitless.models.weights.fingerprint import fingerprint
from logitless.models.weights.weights import Weights, check_weights, define_weight


class FullFinetunes:
    """Finetuned weights by handle; 0 is the model's own. Handles are never reused. Tensors with
    the same bytes as the model's are shared with it."""

    def __init__(self, session: Session, base: Model, gguf: GGUFFile, block: str = "") -> None:
        """`block`: the model's MTP file (models/gguf/mtp_file.py), for finetunes without the block."""
        self._session, self._base, self._gguf, self._block = session, base, gguf, block
        # the names are of its own states
        self._sets: dict[int, tuple[GGUFFile, Model, list[str]]] = {}
        self._digests: dict[int, str] = {}  # finetunes on the device or remembered
        self._lent: dict[int, Model] = {}  # weights that a training run changes
        self._next = 1

    def lend(self, model: Model) -> int:
        """Add a model whose weights are variables that somebody else owns and may change."""
        handle, self._next = self._next, self._next + 1
        self._lent[handle], self._digests[handle] = model, f"run {handle}"
        return handle

    def recall(self, handle: int) -> None:
        """Forget a model that `lend` added."""
        self._lent.pop(handle, None)

    def put(self, path: str | Path) -> int:
        """Add a file's weights; they are read at first use. ModelFileError for one of another model."""
        gguf = GGUFFile.open(path)
        try:
            digest = _digest(gguf)
            if self._block and not can_guess(gguf, hparams_of(gguf)):
                gguf.close()
                gguf = GGUFFile.open(path, block=self._block)
            h = hparams_of(gguf)
            if h != self._base.hparams or gguf.tensors.keys() != self._gguf.tensors.keys():
                raise ModelFileError(path, "is a model of other sizes than the one that is served")
            handle, self._next = self._next, self._next + 1
            self._digests[handle] = digest
            self._sets[handle] = (gguf, *self._define(handle, gguf, h))
        except BaseException:
            gguf.close()
            raise
        return handle

    def _define(self, handle: int, gguf: GGUFFile, h: Hparams) -> tuple[Model, list[str]]:
        tensors, block = dict(self._base.weights.tensors), self._base.mtp
        if block is not None:
            tensors |= block.tensors
        names = []
        for name, part in check_weights(gguf, h, mtp=block is not None).items():
            ours, theirs = gguf.tensors[part.source], self._gguf.tensors[part.source]
            same = (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            if same and np.array_equal(gguf.bytes_of(part.source), self._gguf.bytes_of(part.source)):
                continue
            tensors[name] = define_weight(self._session, gguf, name, part, f"weights.{handle}.{name}")
            names.append(tensors[name].name)
        weights, own = Weights(tensors, directions=self._base.weights.directions).apart(h.n_layer)
        return replace(self._base, weights=weights, mtp=own if block is not None else None), names

    def digest(self, handle: int) -> str:
        """Digest of a finetune, the same in every process."""
        return self._digests[handle]

    def model(self, handle: int) -> Model:
        if handle in self._lent:
            return self._lent[handle]
        return self._sets[handle][1] if handle else self._base

    def __contains__(self, handle: int) -> bool:
        return handle in self._sets

    def keep(self, handles: Iterable[int], remembered: Iterable[int] = ()) -> None:
        """Free all weights but these; `remembered`: others whose digests are still needed."""
        for handle in self._sets.keys() - set(handles):
            gguf, _, names = self._sets.pop(handle)
            self._session.delete(names)
            gguf.close()
        known = self._sets.keys() | self._lent.keys() | set(remembered)
        self._digests = {handle: digest for handle, digest in self._digests.items() if handle in known}

    def move_to(self, session: Session, base: Model) -> None:
        """Define the same weights in another session, after a device was lost."""
        self._session, self._base = session, base
        self._lent.clear()  # its weights were those of the other session
        for handle, (gguf, _, _) in list(self._sets.items()):
            self._sets[handle] = (gguf, *self._define(handle, gguf, base.hparams))

    def close(self) -> None:
        for gguf, _, _ in self._sets.values():
            gguf.close()
        self._sets.clear()


def digest_of(path: str | Path) -> str:
    """Digest of a file's weights. OSError and ModelFileError for one that cannot be read."""
    gguf = GGUFFile.open(path)
    try:
        return _digest(gguf)
    finally:
        gguf.close()


def _digest(gguf: GGUFFile) -> str:
    h = hparams_of(gguf)
    return f"weights {fingerprint(gguf, h, h.n_ctx_train)}"

"""A tiny llama with a prefill and a decode step, on any backends and as a float64 oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from logitless.graph.backend import Backend
from logitless.graph.execution.session import Session
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor
from logitless.graph.testing.evaluate import evaluate
from logitless.models.batch import Batch, PagedMemory
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import Model, define_model, hparams_of

PROMPT, DECODE = (1, 17, 300, 42, 5), (7,)


@dataclass
class Tiny:
    """One sequence in slot 0, with pages 2 and 0."""

    session: Session
    model: Model
    memory: PagedMemory

    @classmethod
    def open(cls, path: Path, backends: Sequence[Backend]) -> Tiny:
        gguf = GGUFFile.open(path)
        session, h = Session(backends), hparams_of(gguf)
        model = define_model(session, gguf, h, 32)
        memory = PagedMemory.define(session, h, 3, (1, 2), "f32", "f32")
        session.write("tables", np.array([[2, 0]], np.int32))
        return cls(session, model, memory)

    def build(self, n_tokens: int) -> list[Tensor]:
        return [self.model.logits(Batch.feeds(n_tokens, 1), self.memory)]

    @staticmethod
    def feeds(tokens: Sequence[int], start: int) -> dict[str, Any]:
        n = len(tokens)
        pos = np.arange(start, start + n, dtype=np.int32)
        return {
            "tokens": np.array([t % 256 for t in tokens], np.int32),
            "pos": pos,
            "slot": np.zeros(n, np.int32),
            "slot_mapping": pos + 32,
            "out": np.array([n - 1], np.int32),
            "out.pos": pos[-1:],
            "out.slot": np.zeros(1, np.int32),
        }

    def logits(self) -> np.ndarray[Any, Any]:
        """Logits (2, n_vocab): after the prefill and after one more token."""
        steps = ((PROMPT, 0), (DECODE, len(PROMPT)))
        rows = [self.session.run(len(t), lambda t=t: self.build(len(t)), self.feeds(t, at))[0] for t, at in steps]  # type: ignore[misc]
        return np.concatenate(rows)

    def oracle(self) -> np.ndarray[Any, Any]:
        """The same in float64, from the defined states."""
        states: dict[str, Any] = {}
        rows = []
        for tokens, at in ((PROMPT, 0), (DECODE, len(PROMPT))):
            roots = self.build(len(tokens))
            for t in toposort(roots):
                if t.op == "variable" and t.name not in states:
                    values = self.session.read(t.name)
                    states[t.name] = values.astype(np.float64) if values.dtype.kind == "f" else values
            rows.append(evaluate(roots, self.feeds(tokens, at), states)[0])
        return np.concatenate(rows)

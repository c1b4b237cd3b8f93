"""The forward pass of training by the server's own ops.

They are the paged KV cache in its types, and the sampler's log-probabilities. So the
log-probability that a sampler reports is that of the trainer, bit for bit, and gradients are of the
numbers that were sampled from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.graph.execution.session import Session
from logitless.graph.ops.attention.paged_attention import PAGE
from logitless.graph.ops.elementwise import scale
from logitless.graph.ops.sampling.sample import log_probs
from logitless.graph.ops.shape import reshape
from logitless.graph.tensor import Tensor
from logitless.models.batch import Batch, Cached, PagedMemory
from logitless.models.hparams.hparams import Hparams

ALIGNMENT = PAGE  # tokens: sequences of a window begin at multiples of it


def is_served(h: Hparams, types: Sequence[str]) -> bool:
    """True if the server's ops have gradients in this architecture: attention over keys and values of
    f32 or f16 (`types`), without recurrent states, latent attention, sinks, ALiBi and chunks."""
    attention = h.architecture.attention
    others = h.recurrent or h.mla or h.has_sinks or h.alibi or attention.chunked
    return not others and {*types} <= {"f32", "f16"}


@dataclass(frozen=True)
class ServedForward:
    """A KV cache for `n` windows of `length` tokens, in which every sequence has pages of its own.

    Page p of the cache holds the tokens from 16 · p on, and a sequence that begins there has row p
    of the tables."""

    memory: PagedMemory
    n: int
    length: int
    names: tuple[str, ...]  # of its variables

    @classmethod
    def define(
        cls, session: Session, h: Hparams, n: int, length: int, types: tuple[str, str], prefix: str
    ) -> ServedForward:
        """Define its variables. `types`: of keys and values, as the server's."""
        assert length % PAGE == 0
        n_pages, per_window = n * length // PAGE, length // PAGE
        shape = n_pages, per_window
        memory = PagedMemory.define(session, h, n_pages, shape, *types, prefix=f"{prefix}.")
        pages = np.arange(n_pages)[:, None] + np.arange(per_window)
        session.write(memory.full.tables.name, np.minimum(pages, n_pages - 1).astype(np.int32))
        names = (memory.full.tables.name, *(t.name for t in memory.full.caches))
        return cls(memory, n, length, names)

    def inputs(self) -> tuple[Batch, Cached]:
        """Rows, and the memory that they attend to."""
        batch = Batch.feeds(self.n * self.length)
        return batch, Cached(self.memory, batch)

    def feeds(self, start: npt.NDArray[np.int32]) -> dict[str, npt.NDArray[Any]]:
        """Inputs beside tokens and positions. `start` (n, length): first token of each one's sequence in its window."""
        first = start + np.arange(self.n, dtype=np.int32)[:, None] * self.length
        return {
            "slot": (first // PAGE).reshape(-1).astype(np.int32),
            "slot_mapping": np.arange(self.n * self.length, dtype=np.int32),
        }


def sampled_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """−log-probability (R,) of the targets (R,), at least 0, as the sampler reports it."""
    ids = reshape(targets, shape=(-1, 1))
    return scale(reshape(log_probs(logits, ids, targets, n=0), shape=(-1,)), factor=-1.0)

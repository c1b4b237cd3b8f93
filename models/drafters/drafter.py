"""Drafter: a network that drafts for a model from the hidden states between its layers.

Its layers lie behind the model's in the same KV pages, so what happens to a sequence's pages (sharing,
copies, offload, moves) happens to the drafter's cache, too. Every step of the model writes it
(`follow`); the keys and values of draft tokens are overwritten by the next step. The embedding and
the LM head are the model's where the file has none. Facts are llama.cpp's (`src/models/`,
`common/speculative.cpp`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from logitless.graph.execution.session import Session
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.slicing import concat
from logitless.graph.tensor import Tensor
from logitless.models.architectures.mtp import Hidden
from logitless.models.architectures.rope import Rotary, define_rotary
from logitless.models.batch import AttentionParams, Batch, Cached, KeysValues, PagedMemory
from logitless.models.drafters.drafter_file import DrafterFile
from logitless.models.model import Model
from logitless.models.weights.weights import Weights, define_weight

PREFIX = "draft."  # of the names of a session's variables


class Drafter(ABC):
    """A network that drafts from a model's hidden states."""

    def follow(
        self, model: Model, batch: Batch, memory: PagedMemory, hidden: Hidden, x: Tensor, layer_inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Nodes that keep the drafter in step with the tokens of a step of the model, whose last hidden
        states are x (T, n_embd): here they keep x."""
        return [hidden.store(x)]

    @abstractmethod
    def guess(
        self, model: Model, batch: Batch, memory: PagedMemory, hidden: Hidden, out: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Draft step: logits (R, n) of the `out` rows, or of all, and nodes that only run. `batch.seen` has what
        each row attends to."""


@dataclass(frozen=True)
class FileDrafter(Drafter):
    """A drafter's file and its variables on a session."""

    file: DrafterFile
    weights: Weights
    rotary: Rotary

    @classmethod
    def define(cls, session: Session, file: DrafterFile, n_ctx: int) -> FileDrafter:
        """Define the weights on a session; bytes are read at first use."""
        tensors = {
            name: define_weight(session, file.gguf, name, part, PREFIX + name) for name, part in file.parts.items()
        }
        return cls(file, Weights(tensors), define_rotary(session, file.gguf, file.hparams, n_ctx, PREFIX))

    def memory_of(self, batch: Batch, memory: PagedMemory) -> DrafterMemory:
        """The KV caches of the drafter's layers during one batch."""
        return DrafterMemory(Cached(memory, batch), self.file.target.n_layer)

    def features(self, layer_inputs: Sequence[Tensor]) -> Tensor:
        """The model's hidden states (T, n · n_embd) that the drafter reads, side by side."""
        chosen = [layer_inputs[layer] for layer in self.file.target_layers]
        return chosen[0] if len(chosen) == 1 else concat(*chosen)

    def embedding(self, model: Model, tokens: Tensor) -> Tensor:
        """Embeddings (T, n_embd) of tokens (T,): the file's, or the model's."""
        own = "token_embd" in self.weights
        return (self.weights if own else model.weights).embedding(tokens)

    def head(self, model: Model, x: Tensor, out: Tensor | None) -> Tensor:
        """Logits (R, n) of the `out` rows, or of all, of hidden states x (T, n_embd): by the file's LM head, or
        the model's."""
        x = self.weights.norm("output_norm", x if out is None else get_rows(x, out), self.file.hparams)
        own = "output" in self.weights
        return model.scale_logits(self.weights.linear("output", x)) if own else model.head(x, out)


@dataclass(frozen=True)
class DrafterMemory:
    """The paged memory as a drafter's layers see it, which lie behind the model's."""

    cached: Cached
    first: int  # the model's number of layers

    def indexes(self, layer: int) -> bool:
        return False

    def attend(self, layer: int, q: Tensor, kv: KeysValues, params: AttentionParams) -> Tensor:
        return self.cached.attend(self.first + layer, q, kv, params)

"""EAGLE-3 (Li et al., 2025): one decoder layer drafts from the inputs of three of the model's layers.

These are combined to g by one matrix. The layer's input at position p is the embedding of token p + 1,
beside g of token p, which its cache keeps at p. In a draft its output stands for the g of the next
token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.slicing import concat
from logitless.graph.tensor import Tensor
from logitless.models.architectures.attention import AttentionInputs, keys_values, self_attention
from logitless.models.architectures.decoder import residual_stream
from logitless.models.architectures.mtp import Hidden
from logitless.models.batch import Batch, Cached, PagedMemory
from logitless.models.drafters.drafter import FileDrafter
from logitless.models.model import Model


@dataclass(frozen=True)
class Eagle3(FileDrafter):
    def follow(
        self, model: Model, batch: Batch, memory: PagedMemory, hidden: Hidden, x: Tensor, layer_inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        features = self.features(layer_inputs)
        if self.file.norm_before_fc:
            features = rms_norm(features, self.weights["enc.output_norm"], eps=self.file.hparams.eps)
        written = replace(hidden, rows=hidden.store(self.weights.linear("fc", features)))
        inputs, _ = self._inputs(model, batch, written.load())
        assert hidden.cells is not None
        before = Cached(memory, replace(batch, slot_mapping=hidden.cells))
        return before.store(self.file.target.n_layer, keys_values(inputs, self.file.hparams, 0))

    def guess(
        self, model: Model, batch: Batch, memory: PagedMemory, hidden: Hidden, out: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        h = self.file.hparams
        inputs, x = self._inputs(model, batch, hidden.load())
        mixed = self_attention(inputs, keys_values(inputs, h, 0), h, self.memory_of(batch, memory), 0)
        x = residual_stream(inputs.b, h, 0, x, inputs.x, mixed)
        return self.head(model, x, out), [hidden.store(x)]

    def _inputs(self, model: Model, batch: Batch, g: Tensor) -> tuple[AttentionInputs, Tensor]:
        """The layer's inputs, and its residual stream (T, n_embd), of tokens and g of those before."""
        b, h = self.weights.block(0), self.file.hparams
        normed = b.norm("attn_norm_2", g, h)
        both = concat(b.norm("attn_norm", self.embedding(model, batch.tokens), h), normed)
        # a token is one position behind its cell: only differences of positions count
        inputs = AttentionInputs(b, both, self.rotary.angles(batch.pos)[0])
        return inputs, normed if self.file.norm_before_residual else g

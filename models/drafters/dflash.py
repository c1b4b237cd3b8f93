"""DFlash: a few decoder layers draft a block of tokens at once, by one step of block diffusion.

Their cache has keys and values of the model's tokens, from its hidden states: one matrix combines the
inputs of some of its layers. A block is the last token and masks in the place of those that follow;
each of its rows sees the cache and the whole block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from logitless.graph.ops.norm import rms_norm
from logitless.graph.tensor import Tensor
from logitless.models.architectures.attention import AttentionInputs, keys_values, self_attention
from logitless.models.architectures.decoder import residual_stream
from logitless.models.architectures.mtp import Hidden
from logitless.models.batch import Batch, Cached, PagedMemory
from logitless.models.drafters.drafter import FileDrafter
from logitless.models.model import Model


@dataclass(frozen=True)
class DFlash(FileDrafter):
    def follow(
        self, model: Model, batch: Batch, memory: PagedMemory, hidden: Hidden, x: Tensor, layer_inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        h, w, cached = self.file.hparams, self.weights, Cached(memory, batch)
        g = rms_norm(w.linear("fc", self.features(layer_inputs)), w["enc.output_norm"], eps=h.eps)
        angles, _ = self.rotary.angles(batch.pos)
        written = []
        for layer in range(h.n_layer):
            kv = keys_values(AttentionInputs(w.block(layer), g, angles), h, layer)
            written += cached.store(self.file.target.n_layer + layer, kv)
        return written

    def guess(
        self, model: Model, batch: Batch, memory: PagedMemory, hidden: Hidden, out: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        h, caches = self.file.hparams, self.memory_of(batch, memory)
        x, (angles, _) = self.embedding(model, batch.tokens), self.rotary.angles(batch.pos)
        for layer in range(h.n_layer):
            b = self.weights.block(layer)
            y = b.norm("attn_norm", x, h)
            inputs = AttentionInputs(b, y, angles)
            mixed = self_attention(inputs, keys_values(inputs, h, layer), h, caches, layer)
            x = residual_stream(b, h, layer, x, y, mixed)
        return self.head(model, x, out), []

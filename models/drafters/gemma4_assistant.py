"""Assistant of Gemma 4: a few layers without keys and values, which attend to the model's caches.

Its input is the model's embedding of a token beside the last hidden state of the one before. Its output,
projected to the model's width, stands for the hidden state of the next token. All tokens of a draft
have the position of the first, for whose cache the model has not been run yet."""

from __future__ import annotations

from dataclasses import dataclass

from logitless.graph.ops.elementwise import mul, scaled
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.slicing import concat
from logitless.graph.tensor import Tensor
from logitless.models.architectures.attention import AttentionInputs, self_attention
from logitless.models.architectures.decoder import residual_stream
from logitless.models.architectures.mtp import Hidden
from logitless.models.batch import Batch, KeysValues, PagedMemory
from logitless.models.drafters.drafter import FileDrafter
from logitless.models.model import Model


@dataclass(frozen=True)
class Gemma4Assistant(FileDrafter):
    def guess(
        self, model: Model, batch: Batch, memory: PagedMemory, hidden: Hidden, out: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        h, w, caches = self.file.hparams, self.weights, self.memory_of(batch, memory)
        embedded = scaled(model.weights.embedding(batch.tokens), self.file.target.embedding_scale)
        x = w.linear("nextn.pre_projection", concat(embedded, hidden.load()))
        angles = self.rotary.angles(batch.pos)
        for layer in range(h.n_layer):
            b = w.block(layer)
            y = b.norm("attn_norm", x, h)
            queries = AttentionInputs(b, y, angles[h.is_local(layer)])
            mixed = self_attention(queries, KeysValues(y, y), h, caches, layer)  # keys and values are the model's
            x = residual_stream(b, h, layer, x, y, mixed)
            x = mul(x, b["layer_output_scale"]) if "layer_output_scale" in b else x
        x = w.norm("output_norm", x, h)
        logits = w.linear("token_embd", x if out is None else get_rows(x, out))
        return logits, [hidden.store(w.linear("nextn.post_projection", x))]

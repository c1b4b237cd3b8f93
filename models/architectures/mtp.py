"""Multi-token prediction (MTP; DeepSeek-AI, 2024: V3, 2.2): a block after the last layer drafts a token.

Its input is a token's embedding and the last hidden state of the token before. It has the parts of
a layer, and a KV cache of its own in the model's pages. Its output goes to the LM head, the model's
or its own, and is the hidden state for the next draft token. Tensor names are GGUF's
(`blk.N.nextn.*`); the order of norms is llama.cpp's (`graph_mtp` in `src/models/`).

Every step writes the block's keys and values from the model's own hidden states (MTP prefill), so
drafting can begin after any token. The keys and values of draft tokens are overwritten by the next
step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from logitless.graph.execution.session import Session
from logitless.graph.ops.attention.paged_attention import PAGE, load_v, store_v
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.norm import centred, rms_norm
from logitless.graph.ops.shape import reshape
from logitless.graph.ops.slicing import concat, take_columns
from logitless.graph.tensor import Tensor, feed
from logitless.models.architectures.attention import AttentionInputs, index_keys
from logitless.models.architectures.decoder import Streams, attention_of, residual_stream, streams_of
from logitless.models.architectures.mla import keep_rows
from logitless.models.batch import Batch, Cached, KeysValues, PagedMemory, rope_positions
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams
from logitless.models.model import Model
from logitless.models.weights.weights import Weights


def can_guess(gguf: GGUFFile, h: Hparams) -> bool:
    """True if the file has an MTP block of an architecture with a supported one."""
    return h.architecture.mtp.enabled and h.n_mtp > 0 and f"blk.{h.n_layer}.nextn.eh_proj.weight" in gguf.tensors


@dataclass(frozen=True)
class Hidden:
    """Ring buffer of last hidden states on the device: a step reads the rows of the tokens before
    its own, and writes its own."""

    rows: Tensor  # (n / 16, 1, 16, width) f32: written and read as values of a cache are
    before: Tensor  # (T,) i32: of each token, the row of the one before it
    to: Tensor  # (T,) i32: and where its own goes
    cells: Tensor | None = None  # (T,) i32: cell of the token before each (EAGLE-3), or the spare one

    @classmethod
    def define(cls, session: Session, width: int, n: int) -> Tensor:
        """The buffer: n rows of `width` numbers, rounded up to 16."""
        return session.define("hidden", (-(-n // PAGE), 1, PAGE, width), "f32")

    @classmethod
    def feeds(cls, rows: Tensor, n_tokens: int) -> Hidden:
        return cls(rows, *(feed(f"hidden.{name}", (n_tokens,), "i32") for name in ("before", "to", "cells")))

    def load(self) -> Tensor:
        """The rows (T, width) of the tokens before."""
        return reshape(load_v(self.rows, self.before), shape=(self.before.shape[0], self.rows.shape[-1]))

    def store(self, x: Tensor) -> Tensor:
        """The buffer after x (T, width) is written."""
        return store_v(self.rows, reshape(x, shape=(x.shape[0], 1, x.shape[1])), self.to)


def follow(model: Model, batch: Batch, memory: PagedMemory, hidden: Hidden, x: Tensor) -> list[Tensor]:
    """MTP prefill: nodes that write the block's KV cache for a step's tokens with last hidden
    states x (T, hidden_width), normed or not as the architecture has it."""
    h, cached = model.hparams, Cached(memory, batch)
    written = replace(hidden, rows=hidden.store(x))
    *_, inputs = _inputs_of(model, batch, written.load())
    kv = _keys_values(inputs, h, cached)
    if not h.compression:
        cached.store(h.n_layer, kv)
    return cached.writes(h.n_layer)


def guess(model: Model, batch: Batch, memory: PagedMemory, hidden: Hidden) -> tuple[Tensor, Tensor]:
    """MTP draft step: logits (T, n_vocab) of the next tokens, one of each sequence, and the
    hidden-state buffer after the write."""
    h, layer, cached = model.hparams, model.hparams.n_layer, Cached(memory, batch)
    y, streams, inputs = _inputs_of(model, batch, hidden.load())
    b, (_, attention) = inputs.b, attention_of(h)
    kv = _keys_values(inputs, h, cached)
    inputs = inputs._replace(query_scale=model.rotary.query_scale(batch.pos))
    mixed = attention(inputs, kv, h, cached, layer)
    if streams is None:
        x = state = residual_stream(b, h, layer, y, inputs.x, mixed)
    else:
        streams.join_layer(b, layer, mixed)
        state = concat(*streams.streams)
        x = streams.input_of(b if h.hyper_rank else model.weights, "output", layer)
    normed, head = _normed(model, b, x), "nextn.shared_head_head"
    logits = model.head(normed) if head not in b else model.scale_logits(b.linear(head, normed))
    return logits, hidden.store(state if h.architecture.mtp.as_layer else normed)


def _inputs_of(model: Model, batch: Batch, before: Tensor) -> tuple[Tensor, Streams | None, AttentionInputs]:
    """Block input (T, n_embd), the residual's streams if there are several, and attention inputs, of the tokens
    and the hidden states before (T, hidden_width)."""
    h, b = model.hparams, model.mtp
    assert b is not None
    own = b.get("nextn.embed_tokens")
    x = model.weights.embedding(batch.tokens) if own is None else get_rows(own, batch.tokens)
    x, size = b.norm("nextn.enorm", x, h), h.n_embd
    parts = [before] if h.hidden_width == size else [take_columns(before, i * size, size) for i in range(h.n_hyper)]
    names = [f"nextn.hnorm.{i}" if h.hyper_rank else "nextn.hnorm" for i in range(len(parts))]
    states = (b.norm(name, part, h) for name, part in zip(names, parts, strict=True))
    rows = [b.linear("nextn.eh_proj", concat(x, state)) for state in states]
    streams = streams_of(h, model.rotary, rows) if len(rows) > 1 else None
    y = rows[0] if streams is None else streams.input_of(b, "attn", h.n_layer)
    angles = model.rotary.angles(rope_positions(batch))[h.is_local(h.n_layer)]
    return y, streams, AttentionInputs(b, b.norm("attn_norm", y, h), angles)


def _keys_values(inputs: AttentionInputs, h: Hparams, cached: Cached) -> KeysValues:
    """Keys and values of the block; a compressed cache has them then."""
    keys_of, _ = attention_of(h)
    kv = keys_of(inputs, h, h.n_layer)._replace(index_k=index_keys(inputs, h, h.n_layer, cached))
    keep_rows(inputs, kv.k, h, cached, h.n_layer)
    return kv


def _normed(model: Model, b: Weights, x: Tensor) -> Tensor:
    name, h = "nextn.shared_head_norm", model.hparams
    if h.architecture.mtp.layer_norm:
        return rms_norm(centred(x), b[name], eps=h.mtp_eps)
    return b.norm(name, x, h) if name in b else model.weights.norm("output_norm", x, h)

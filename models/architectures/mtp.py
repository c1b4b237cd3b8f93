"""Multi-token prediction (DeepSeek-AI, 2024: V3, 2.2): a block behind a model's layers that guesses one token more.

Of a token it is given the embedding, and what the last layer said of the token before; it has a layer's parts, and keys
and values of its own, in the pages of the model's. What it says of the token goes to the model's head, or its own, and
is what it is given of that token when it goes on guessing. Names are GGUF's (`blk.N.nextn.*`), and what is normalised
where is llama.cpp's (`graph_mtp` in `src/models/`).

Its keys and values are made of the model's own hidden rows in every step, so that a guess can begin after any token.
What a guess writes is in cells that the next step writes again.
"""

from __future__ import annotations

from dataclasses import dataclass

from logitless.graph.execution.session import Session
from logitless.graph.ops.attention.paged_attention import PAGE, load_v, store_v
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.norm import centred, rms_norm
from logitless.graph.ops.shape import reshape
from logitless.graph.tensor import Tensor, feed
from logitless.models.architectures.attention import AttentionInputs
from logitless.models.architectures.decoder import added, attending
from logitless.models.architectures.mla import joined
from logitless.models.batch import Batch, Cached, PagedMemory
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams
from logitless.models.model import Model
from logitless.models.weights.weights import Weights


def can_guess(gguf: GGUFFile, h: Hparams) -> bool:
    """Whether a file has such a block, of an architecture whose block is known."""
    return h.architecture.mtp.enabled and h.n_nextn > 0 and f"blk.{h.n_layer}.nextn.eh_proj.weight" in gguf.tensors


@dataclass(frozen=True)
class Hidden:
    """Rows of the device, in which a step leaves what the last layer said of its tokens, and finds what was said of
    those before them."""

    rows: Tensor  # (n / 16, 1, 16, n_embd) f32: written and read as values of a cache are
    before: Tensor  # (T,) i32: of each token, the row of the one before it
    to: Tensor  # (T,) i32: and where its own goes

    @classmethod
    def define(cls, session: Session, h: Hparams, n: int) -> Tensor:
        """The rows: n and what fills the last sixteen up."""
        return session.define("hidden", (-(-n // PAGE), 1, PAGE, h.n_embd), "f32")

    @classmethod
    def feeds(cls, rows: Tensor, n_tokens: int) -> Hidden:
        return cls(rows, feed("hidden.before", (n_tokens,), "i32"), feed("hidden.to", (n_tokens,), "i32"))

    def kept(self, x: Tensor) -> Tensor:
        """The rows after x (T, n_embd) went there."""
        return store_v(self.rows, reshape(x, shape=(x.shape[0], 1, x.shape[1])), self.to)


def follow(model: Model, batch: Batch, memory: PagedMemory, hidden: Hidden, x: Tensor) -> list[Tensor]:
    """All that has to run for what the block keeps of a step's tokens, of which x (T, n_embd) is what the last layer
    said."""
    rows = hidden.kept(x)
    _, side = _begun(model, batch, load_v(rows, hidden.before))
    keys_of, _ = attending(model.hparams)
    return Cached(memory, batch).store(model.hparams.n_layer, *keys_of(side, model.hparams, model.hparams.n_layer))


def guess(model: Model, batch: Batch, memory: PagedMemory, hidden: Hidden) -> tuple[Tensor, Tensor]:
    """Logits (T, n_vocab) of the tokens after these, one of each sequence, and the rows, where what was said of these
    is now."""
    h, layer = model.hparams, model.hparams.n_layer
    y, side = _begun(model, batch, load_v(hidden.rows, hidden.before))
    b = side.b
    keys_of, attention = attending(h)
    seen = keys_of(side, h, layer)
    side = side._replace(query_scale=model.rotary.query_scale(batch.pos))
    x = added(b, h, layer, y, side.x, attention(side, seen, h, Cached(memory, batch), layer))
    x = _normed(model, b, x)
    head = "nextn.shared_head_head"
    logits = model.head(x) if head not in b else model.scale_logits(b.linear(head, x))
    return logits, hidden.kept(x)


def _begun(model: Model, batch: Batch, before: Tensor) -> tuple[Tensor, AttentionInputs]:
    """What the block begins with, (T, n_embd), and that as attention is given it; before (T, 1, n_embd): what was said
    of the tokens before."""
    h, b = model.hparams, model.nextn
    assert b is not None
    own = b.get("nextn.embed_tokens")
    x = model.weights.embedding(batch.tokens) if own is None else get_rows(own, batch.tokens)
    before = b.norm("nextn.hnorm", reshape(before, shape=x.shape), h)
    y = b.linear("nextn.eh_proj", joined(b.norm("nextn.enorm", x, h), before))
    far, _ = model.rotary.angles(batch.pos)
    return y, AttentionInputs(b, b.norm("attn_norm", y, h), far)


def _normed(model: Model, b: Weights, x: Tensor) -> Tensor:
    name, h = "nextn.shared_head_norm", model.hparams
    if h.architecture.mtp.layer_norm:
        return rms_norm(centred(x), b[name], eps=h.nextn_eps)
    return b.norm(name, x, h) if name in b else model.weights.norm("output_norm", x, h)

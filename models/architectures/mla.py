"""Multi-head latent attention (DeepSeek-AI, 2024): of a token one short row is kept, and keys and values of all heads
are products with it.

Nobody makes these: a query is multiplied by its head's part of the keys' matrix instead, so that it meets the rows
themselves, and their weighted sum by its head's part of the values'. Then there is one head of keys, a row with what
rotary embedding turns before it, and values are the same rows.
"""

from __future__ import annotations

from logitless.graph.ops.elementwise import broadcast_to
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.moe import expert_linear, expert_order, expert_rows, top_experts
from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.rope import rope
from logitless.graph.ops.shape import reshape, slice_rows
from logitless.graph.ops.slicing import set_block, take_columns
from logitless.graph.tensor import Tensor, const
from logitless.models.architectures.attention import AttentionInputs, KeysValues
from logitless.models.batch import AttentionParams, Memory
from logitless.models.hparams.hparams import Hparams
from logitless.models.hparams.mla import MLAParams


def mla_keys(seen: AttentionInputs, h: Hparams, layer: int) -> KeysValues:
    """What is kept of a token: its keys, which are its values, too."""
    row = rms_norm(seen.b.linear("attn_kv_a", seen.x), seen.b["attn_kv_a_norm"], eps=h.eps)
    k = reshape(joined(seen.b.linear("attn_k_turned", seen.x), row), shape=(-1, 1, h.head_dim))
    return rope(k, seen.angles, interleaved=h.interleaved), None


def mla_attention(asking: AttentionInputs, seen: KeysValues, h: Hparams, memory: Memory, layer: int) -> Tensor:
    """(T, n_embd) for the rows that ask."""
    assert h.mla is not None
    heads = Heads(asking, h.mla, h.n_head)
    q = rope(heads.queries(h.eps), asking.angles, interleaved=h.interleaved)
    rows = memory.attend(layer, asking.scaled_query(q), *seen, AttentionParams(h.attention_scale))  # (T, n_head, width)
    return asking.b.linear("attn_output", heads.values(rows))


class Heads:
    """What heads make of T rows that ask. Their weights lie one after the other, as those of experts do."""

    def __init__(self, side: AttentionInputs, mla: MLAParams, n_head: int) -> None:
        self._side, self._mla, self._n = side, mla, n_head
        rows = side.x.shape[0]
        nothing = broadcast_to(const(0.0), shape=(rows, n_head))
        self._order = expert_order(top_experts(nothing, n=n_head), n=n_head)  # of equal ones the first: 0, 1, 2, …

    def queries(self, eps: float) -> Tensor:
        """(T, n_head, width)."""
        b, x, mla = self._side.b, self._side.x, self._mla
        if mla.q_rank:
            q = b.linear("attn_q_b", rms_norm(b.linear("attn_q_a", x), b["attn_q_a_norm"], eps=eps))
        else:
            q = b.linear("attn_q", x)
        q = reshape(q, shape=(-1, mla.n_nope + mla.n_rope))  # (T · n_head, …)
        plain, turned = take_columns(q, 0, mla.n_nope), take_columns(q, mla.n_nope, mla.n_rope)
        met = expert_linear(self._placed(plain), b["attn_k_b"], self._order, n=self._n)
        return reshape(joined(turned, self._back(met)), shape=(-1, self._n, mla.width))

    def values(self, rows: Tensor) -> Tensor:
        """(T, n_head · n_value) of weighted sums of rows (T, n_head, width)."""
        b, mla = self._side.b, self._mla
        sums = self._placed(take_columns(reshape(rows, shape=(-1, mla.width)), mla.n_rope, mla.rank))
        made = expert_linear(sums, b["attn_v_b"], self._order, n=self._n)
        return reshape(self._back(made), shape=(-1, self._n * mla.n_value))

    def _placed(self, x: Tensor) -> Tensor:
        """(T · n_head, K), head by head instead of token by token."""
        return expert_rows(x, self._order)

    def _back(self, y: Tensor) -> Tensor:
        places = reshape(slice_rows(self._order, start=1, stop=2), shape=(y.shape[0],))
        return get_rows(y, places)


def joined(a: Tensor, b: Tensor) -> Tensor:
    """(R, M + N) of a (R, M) and b (R, N)."""
    rows, n = a.shape
    both = broadcast_to(const(0.0), shape=(rows, n + b.shape[1]))
    return set_block(set_block(both, a, start=(0, 0)), b, start=(0, n))

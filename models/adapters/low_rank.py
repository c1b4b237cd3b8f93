"""LoRA in the graph: low-rank terms of matrices, embedding and norms, with scales per row or for all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from logitless.graph.ops.elementwise import add, gate, mul, scaled
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.linear import linear, matmul
from logitless.graph.ops.moe import expert_linear, expert_matmul, expert_rows
from logitless.graph.ops.norm import centred, rms_norm
from logitless.graph.tensor import Tensor, const

EMBEDDING = "token_embd.weight"
EXPERTS = re.compile(r"blk\.\d+\.ffn_(gate|up|down)_exps\.weight")  # a matrix for each expert
NORMS = re.compile(r"(blk\.\d+\.(attn|ffn)|output)_norm\.weight")  # vectors that may have a pair


@dataclass(frozen=True)
class LowRank:
    """LoRA pairs A (R, n_in), B (n_out, R) by weight name.

    The embedding's A is (n_vocab, R). A norm's vector is a matrix of one row: its B is (1, R).
    `row_scales` (T, R): row t's products with A are multiplied by row_scales[t] before B, which
    selects its adapters and their scales. Without it each pair's factor scales all rows alike.
    `deltas`: of DoRA, d − 1 for the factor d of each output of W (n_out,); with `row_scales` a
    column for each adapter (n_out, R)."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    row_scales: Tensor | None = None
    factors: Mapping[str, float] = field(default_factory=dict)
    deltas: Mapping[str, Tensor] = field(default_factory=dict)

    def rescaled(self, name: str, y: Tensor) -> Tensor:
        """y = x · Wᵀ, each output multiplied by DoRA's factor where an adapter has some."""
        if name not in self.deltas:
            return y
        delta = self.deltas[name]
        return add(y, mul(y, delta if self.row_scales is None else linear(self.row_scales, delta)))

    def added(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """y = x · Wᵀ plus the adapters of W. A tied output matrix has none, as in llama.cpp."""
        if name not in self.pairs or name == EMBEDDING:
            return y
        a, b = self.pairs[name]
        return add(y, self._product(name, linear(x, a), b))

    def added_of_experts(self, name: str, x: Tensor, y: Tensor, order: Tensor, n: int) -> Tensor:
        """`added` of rows x (R, K) in the order of their experts (graph/ops/moe.py): each has a pair of
        its own, A (n · R, K) and B transposed (n · R, N): products of columns are summed in order."""
        if name not in self.pairs:
            return y
        a, b = self.pairs[name]
        h = expert_linear(x, a, order, n=n)
        if self.row_scales is None:
            b = scaled(b, self.factors.get(name, 1.0))
        else:
            h = gate(h, expert_rows(self.row_scales, order))
        return add(y, expert_matmul(h, b, order, n=n))

    def embedded(self, tokens: Tensor, x: Tensor) -> Tensor:
        if EMBEDDING not in self.pairs:
            return x
        a, b = self.pairs[EMBEDDING]
        return add(x, self._product(EMBEDDING, get_rows(a, tokens), b))

    def normed(self, name: str, x: Tensor, y: Tensor, eps: float, *, layer_norm: bool) -> Tensor:
        """y, x normalised with a weight, plus the adapters of that weight."""
        if name not in self.pairs:
            return y
        x = rms_norm(centred(x) if layer_norm else x, const(1.0), eps=eps)
        return self.scaled_by(name, x, y)

    def scaled_by(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """y, normalised rows x times a weight, plus the adapters of that weight."""
        if name not in self.pairs:
            return y
        a, b = self.pairs[name]
        if self.row_scales is None:
            factor = self.factors.get(name, 1.0)
            weight = matmul(scaled(b, factor), a)  # (1, n)
        else:
            weight = matmul(mul(self.row_scales, b), a)  # (T, n)
        return add(y, mul(x, weight))

    def of_rows(self, ids: Tensor) -> LowRank:
        return self if self.row_scales is None else replace(self, row_scales=get_rows(self.row_scales, ids))

    def _product(self, name: str, h: Tensor, b: Tensor) -> Tensor:
        """h (T, R), products with A, times B. A factor is B's, as of stacked adapters."""
        if self.row_scales is not None:
            return linear(gate(h, self.row_scales), b)
        return linear(h, scaled(b, self.factors.get(name, 1.0)))

"""Biases of attention scores by the distance of query and key: ALiBi (Press et al., 2022)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from logitless.graph.execution.session import Session
from logitless.graph.tensor import Tensor
from logitless.models.hparams.hparams import Hparams

F32 = npt.NDArray[np.float32]


def define_bias(session: Session, h: Hparams, n_ctx: int) -> tuple[Tensor, ...]:
    """Constants of the session, none without ALiBi: slopes (H,) and positions (n_ctx, 1) of a causal model;
    else a table (H, 2·n − 1) for `full_attention`."""
    if not h.alibi:
        return ()

    def define(name: str, values: F32) -> Tensor:
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        return session.define(f"attention.{name}", values.shape, "f32", lambda: raw, constant=True)

    slopes = alibi_slopes(h.n_head, h.alibi)
    if h.causal:
        return define("slopes", slopes), define("positions", np.arange(n_ctx, dtype=np.float32)[:, None])
    n = n_ctx * 5 // 4 + 1  # batches are longer than their texts by up to a quarter
    return (define("bias", -slopes[:, None] * np.abs(np.arange(1 - n, n, dtype=np.float32))),)


def alibi_slopes(n_head: int, max_bias: float) -> F32:
    """Slopes of the heads: powers of 2^(−max_bias / n), n the power of two up to n_head; heads beyond n
    lie between them."""
    n = 1 << n_head.bit_length() - 1
    head = np.arange(n_head)
    exponents = np.where(head < n, head + 1, head - n + 0.5)
    return np.exp2(-max_bias / n * exponents).astype(np.float32)

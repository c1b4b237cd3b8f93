"""Biases of attention scores by the distance of query and key: ALiBi (Press et al., 2022), T5 (Raffel et al., 2020)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from logitless.graph.dtype import dequantize
from logitless.graph.execution.session import Session
from logitless.graph.ops.attention.paged_attention import PAGE
from logitless.graph.tensor import Tensor
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams

F32 = npt.NDArray[np.float32]
MAX_DISTANCE = 128  # T5's, behind which all distances have one bucket


def define_bias(session: Session, gguf: GGUFFile, h: Hparams, n_ctx: int, prefix: str = "") -> tuple[Tensor, ...]:
    """Constants of the session, with `prefix` in front of their names; none without biases. The last is a table
    of heads one after the other, not a matrix, which GPUs would pack: (H · cells) of a causal model for
    `biased_attention`, behind ALiBi's slopes (H,) and positions (n_ctx, 1); else (H · (2·n − 1)) for
    `full_attention`."""
    if not (h.alibi or h.n_buckets):
        return ()

    def define(name: str, values: F32) -> Tensor:
        return session.constant(f"{prefix}attention.{name}", values)

    if h.causal:
        distance = np.arange(1 - -(-n_ctx // PAGE) * PAGE, 1)
    else:  # batches are longer than their texts by up to a quarter
        distance = np.arange(-(n_ctx * 5 // 4), n_ctx * 5 // 4 + 1)
    if h.n_buckets:
        name = f"{h.architecture.prefix}blk.0.attn_rel_b.weight"
        learned = dequantize(gguf.bytes_of(name).reshape(h.n_buckets, -1), gguf.tensors[name].dtype)
        if not np.isfinite(learned).all():
            raise ModelFileError(gguf.path, f"tensor '{name}' has a number that is NaN or infinite")
        return (define("bias", learned[buckets(distance, h.n_buckets, causal=h.causal)].T.reshape(-1)),)
    slopes = alibi_slopes(h.n_head, h.alibi)
    table = define("bias", (-slopes[:, None] * np.abs(distance).astype(np.float32)).reshape(-1))
    if h.causal:
        return define("slopes", slopes), define("positions", np.arange(n_ctx, dtype=np.float32)[:, None]), table
    return (table,)


def alibi_slopes(n_head: int, max_bias: float) -> F32:
    """Slopes of the heads: powers of 2^(−max_bias / n), n the power of two up to n_head; heads beyond n
    lie between them."""
    n = 1 << n_head.bit_length() - 1
    head = np.arange(n_head)
    exponents = np.where(head < n, head + 1, head - n + 0.5)
    return np.exp2(-max_bias / n * exponents).astype(np.float32)


def buckets(distance: npt.NDArray[np.int64], n: int, *, causal: bool = False) -> npt.NDArray[np.int64]:
    """T5's bucket, of n, for each distance from query to key: half of them, or with `causal` all, for keys in front,
    of which half have one distance each, and the rest logarithmically more."""
    half, far = n if causal else n // 2, np.abs(distance)
    exact = half // 2
    log = np.log((np.maximum(far, 1) / exact).astype(np.float32)) * np.float32(half - exact)
    large = exact + np.floor(log / np.log(MAX_DISTANCE / exact)).astype(np.int64)
    return np.where(distance > 0, half, 0) + np.where(far < exact, far, np.minimum(large, half - 1))

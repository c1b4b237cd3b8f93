"""Lowering of the sampling ops."""

from __future__ import annotations

from logitless.backends.cpu.lowering.registry import At, lower
from logitless.backends.cpu.threads.pool import Task
from logitless.graph.ops.sampling.samplers import LAYOUT
from logitless.graph.tensor import Tensor


def scratch_nbytes(n_vocab: int) -> int:
    """Bytes of scratch of kernels/sampling/sample.py: block maxima, five tables, a histogram."""
    size = -(-n_vocab // 64) * 64
    return 512 + (size // 16 + 64) + size * (4 + 4 + 8 + 8 + 8) + 32768


@lower("sample")
def _(t: Tensor, at: At) -> list[Task]:
    logits, state, params, chain, *_ = t.src[:10]
    rows, n_vocab = logits.shape
    sizes = (n_vocab, rows, params.shape[1], chain.shape[1], state.shape[1], t.attrs.get("n_probs", 0), state.shape[0])
    masks = [at(s) for s in t.src[10:]] or [0, 0]
    args = (*(at(s) for s in t.src[:10]), at(t), *sizes, *masks)
    return [Task(f"sample:{LAYOUT}", args, rows, scratch=scratch_nbytes(n_vocab))]


@lower("log_probs")
def _(t: Tensor, at: At) -> list[Task]:
    logits, ids, targets = t.src
    rows, n_vocab = logits.shape
    args = (at(logits), at(ids), at(targets), at(t), n_vocab, ids.shape[1], t.attrs["n"])
    return [Task(f"log_probs:{LAYOUT}", args, rows, scratch=scratch_nbytes(n_vocab))]

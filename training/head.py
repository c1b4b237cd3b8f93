"""Chunked cross-entropy of the LM head: logits, losses and gradients of some rows at a time.

All logits at once would be the largest tensor of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from logitless.graph.autodiff import backward
from logitless.graph.gradient_checkpointing import choose, layers_of, recompute
from logitless.graph.ops.elementwise import add, mul, sum_to
from logitless.graph.ops.pointwise import argmax
from logitless.graph.ops.shape import after, slice_rows
from logitless.graph.ops.training.loss import cross_entropy
from logitless.graph.tensor import Tensor, feed
from logitless.models.batch import Memory, Rows
from logitless.models.model import Model

Loss = Callable[[Tensor, Tensor], Tensor]
LOGITS_NBYTES = 24 << 20  # at most, at a time


def logit_chunks(model: Model, n_rows: int) -> list[tuple[int, int]]:
    """Row ranges of equal size for chunked cross-entropy; one range, where rows have their own LoRA scales."""
    low_rank = model.weights.low_rank
    whole = low_rank is not None and low_rank.row_scales is not None
    n = 1 if whole else -(-n_rows * model.hparams.n_vocab * 4 // LOGITS_NBYTES)
    step = -(-n_rows // min(n, n_rows))
    return [(a, min(n_rows, a + step)) for a in range(0, n_rows, step)]


def evaluation(model: Model, inputs: tuple[Rows, Memory], loss: Loss = cross_entropy) -> list[Tensor]:
    """Losses and argmax tokens, (rows,) each, chunk by chunk. Inputs `targets` (rows,) i32.

    `inputs`: the rows, and the memory that they attend to. `loss`: (logits (R, V), targets (R,)) →
    (R,)."""
    rows = inputs[0].tokens.shape[0]
    x, targets = model.hidden(*inputs), feed("targets", (rows,), "i32")
    outputs = []
    for start, stop in logit_chunks(model, rows):
        logits = model.head(slice_rows(x, start=start, stop=stop))
        outputs += [loss(logits, slice_rows(targets, start=start, stop=stop)), argmax(logits)]
    return outputs


def gradients(
    model: Model,
    inputs: tuple[Rows, Memory],
    params: Sequence[Tensor],
    *,
    segment: int | None = 0,
    loss: Loss = cross_entropy,
) -> tuple[dict[Tensor, Tensor], list[Tensor]]:
    """Gradients of Σ weight · loss, and the outputs of `evaluation`. Inputs `targets` and `weight`,
    (rows,).

    `segment`: layers between gradient checkpoints; 0: chosen by formula; None: no checkpointing."""
    rows = inputs[0].tokens.shape[0]
    x, targets, weight = model.hidden(*inputs), feed("targets", (rows,), "i32"), feed("weight", (rows,))
    outputs: list[Tensor] = []
    total: dict[Tensor, Tensor] = {}
    slopes: dict[Tensor, Tensor] = {}  # gradients of each chunk's hidden states
    largest = 0
    for start, stop in logit_chunks(model, rows):
        part = slice_rows(x, start=start, stop=stop)
        own = after(part, *slopes.values(), *outputs[-2:]) if outputs else part
        logits = model.head(own)
        losses = loss(logits, slice_rows(targets, start=start, stop=stop))
        outputs += [losses, argmax(logits)]
        total_loss = sum_to(mul(losses, slice_rows(weight, start=start, stop=stop)), shape=())
        grads = backward(total_loss, [own, *params], stop_at=[own])
        slope = grads.pop(own)
        for p, g in grads.items():
            total[p] = add(total[p], g) if p in total else g
        slopes[part] = after(slope, *total.values()) if total else slope  # frees these logits before the next chunk
        largest = logits.nbytes
    for p, g in backward(slopes, params).items():
        total[p] = add(total[p], g) if p in total else g
    if segment is not None:
        total = recompute(x, total, choose(x, total, layers_of(x), segment, head_nbytes=largest).checkpoints)
    return {p: total[p] for p in params if p in total}, outputs

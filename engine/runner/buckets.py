"""Batch-size buckets: the shape of the plan that a step runs, and the shapes worth planning ahead.

Making a plan takes tens of milliseconds, in which every sequence waits. So sizes are rounded up to
few buckets, as with CUDA-graph sizes."""

from __future__ import annotations

from typing import NamedTuple

from logitless.engine.batch import LEAST_MIXED, UBatch, bucket, mixed_batch_size, power_of_two

# tokens of a mixed batch up to which it has one of the scheduler's sizes (mixed_batch_size)
MOST_MIXED = 128
# decoding sequences up to which plans are made ahead; half as many in mixed batches
USUAL_STREAMS = 8


class StepShape(NamedTuple):  # a step makes one; it is looked up by its hash
    """Key of a plan: everything that changes the graph's structure."""

    n_tokens: int
    n_out: int  # sampled positions; 0: prefill only, no logits
    whole: bool = False  # every token is a sampled position, in order
    n_list: int = 16  # entries of the sparse lists (biases, penalties)
    n_top: int = 0
    n_probs: int = 0
    lora: int = 0  # generation of the adapter bank; 0: no row has an adapter
    n_masks: int = 0  # rows with a token bitmask
    weights: int = 0  # id of a full finetune (models/adapters/full_finetunes.py); 0: the base model
    mtp: bool = False  # run the MTP head instead of the model (models/architectures/mtp.py)
    media: bool = False  # rows of images among the tokens
    logits: bool = False  # the logits are fetched, too


def draft_shape(n: int, n_block: int = 1) -> StepShape:
    """Shape of a draft step of n sequences with `n_block` rows each, of which the first is not sampled if
    there are more."""
    if n_block == 1:
        return StepShape(n, n, whole=True, mtp=True)
    return StepShape(bucket(n * n_block), bucket(n * (n_block - 1)), mtp=True)


def shape_of(batch: UBatch, lora: int = 0) -> StepShape:
    """Shape of the plan for a batch.

    `lora`: generation of the adapter bank, 0 if the batch needs none."""
    n_list = n_masks = 0
    for row in batch.rows:
        if row is not None:
            n_list += len(row.ids)
            n_masks += row.mask is not None
    n_tokens, n_out = _size(batch)
    return StepShape(
        n_tokens,
        n_out,
        n_out == n_tokens and len(batch.out) == len(batch.tokens),
        power_of_two(n_list, 16),
        1 + power_of_two(batch.n_top - 1, 1) if batch.n_top > 1 else batch.n_top,
        power_of_two(batch.n_probs, 1) if batch.n_probs else 0,
        lora,
        power_of_two(n_masks, 1) if n_masks else 0,
        batch.weights,
        batch.mtp,
        bool(batch.media_rows),
        batch.logits,
    )


def _size(batch: UBatch) -> tuple[int, int]:
    """Rounded (tokens, sampled positions) of a batch.

    A mixed batch has room for a sampled position of every sequence, so that the last chunk of a
    prompt runs the same plan as the chunks before it."""
    n, n_out = len(batch.tokens), len(batch.out)
    if not batch.n_streams or n == n_out or n > MOST_MIXED:  # prefill only, or decode only
        return bucket(n), bucket(n_out)
    n = mixed_batch_size(n)
    return n, min(n, max(_rows(batch.n_streams + 1), bucket(n_out)))


def _rows(n: int) -> int:
    return power_of_two(n, 2) if n <= 2 * USUAL_STREAMS else bucket(n)


def usual(
    n_slots: int, n_ubatch: int, most: int = USUAL_STREAMS, n_draft_tokens: int = 0, n_block: int = 1
) -> list[StepShape]:
    """Warm-up set: shapes that most servers need, likelier ones first.

    These are decode batches of up to `most` sequences, mixed batches and prefill batches.
    `n_draft_tokens`: draft tokens of each sequence at most; above 0, draft and verification batches
    are included; `n_block`: see draft_shape."""
    n_streams = min(n_slots, most)
    mixed = [n for n in range(LEAST_MIXED, 1 + min(n_ubatch, MOST_MIXED)) if mixed_batch_size(n) == n]
    rows = sorted({_rows(k + 1) for k in range(1, min(n_slots, 1 + most // 2))})
    alone = sorted({bucket(n) for n in range(2, n_ubatch + 1)})
    streams = [StepShape(n, n, whole=True) for n in sorted({bucket(n) for n in range(1, n_streams + 1)})]
    n_verified = min(n_ubatch, n_streams * (1 + n_draft_tokens))
    return [
        *streams,
        *dict.fromkeys(draft_shape(shape.n_tokens, n_block) for shape in streams if n_draft_tokens),
        *(StepShape(n, n, whole=True) for n in sorted({bucket(n) for n in range(n_streams + 1, n_verified + 1)})),
        *(StepShape(n, min(n, r)) for r in rows for n in mixed),
        *(StepShape(n, 1) for n in alone),
    ]

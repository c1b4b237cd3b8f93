"""Which plan a step needs: few enough that a server soon has all that its requests will ask for.

Making one takes tens of milliseconds, in which every stream waits. So what a step needs is rounded up to sizes that
the next steps will need again.
"""

from __future__ import annotations

from typing import NamedTuple

from logitless.engine.batch import LEAST_BESIDE, UBatch, bucket, power_of_two, size_beside

MOST_BESIDE = 128  # tokens of a step with streams and prompts up to which it has one of the scheduler's sizes
USUAL_STREAMS = 8  # whose steps alone are planned ahead, and half of them beside prompts


class Shape(NamedTuple):  # a step makes one; it is looked up by its hash
    """What a plan depends on: everything that is structure and not a value."""

    n_tokens: int
    n_out: int  # 0: what the tokens leave in the cache is all that is wanted
    whole: bool = False  # rows are all the tokens, in order
    n_list: int = 16  # entries of the sparse lists (biases, penalties)
    n_top: int = 0
    n_probs: int = 0
    lora: int = 0  # the generation of the adapters' stack; 0: no row has an adapter
    n_masks: int = 0  # rows of the grammars' masks
    weights: int = 0  # whose: see logitless.models.adapters.full_finetunes
    guesses: bool = False  # of the block that guesses (models/architectures/mtp.py)


GUESS = Shape(1, 1, whole=True, guesses=True)


def shape_of(batch: UBatch, lora: int = 0) -> Shape:
    """`lora`: the generation of the adapters' stack, if the batch needs it."""
    n_list = n_masks = 0
    for row in batch.rows:
        if row is not None:
            n_list += len(row.ids)
            n_masks += row.mask is not None
    n_tokens, n_out = _size(batch)
    return Shape(
        n_tokens,
        n_out,
        n_out == n_tokens and len(batch.out) == len(batch.tokens),
        power_of_two(n_list, 16),
        1 + power_of_two(batch.n_top - 1, 1) if batch.n_top > 1 else batch.n_top,
        power_of_two(batch.n_probs, 1) if batch.n_probs else 0,
        lora,
        power_of_two(n_masks, 1) if n_masks else 0,
        batch.weights,
        batch.guesses,
    )


def _size(batch: UBatch) -> tuple[int, int]:
    """Tokens and rows. Beside streams a prompt's last step is as large as those before, and each has a row for all."""
    n, n_out = len(batch.tokens), len(batch.out)
    if not batch.n_streams or n == n_out or n > MOST_BESIDE:  # without streams, or with these and drafts alone
        return bucket(n), bucket(n_out)
    n = size_beside(n)
    return n, min(n, max(_rows(batch.n_streams + 1), bucket(n_out)))


def _rows(n: int) -> int:
    return power_of_two(n, 2) if n <= 2 * USUAL_STREAMS else bucket(n)


def usual(n_slots: int, n_ubatch: int, most: int = USUAL_STREAMS, n_guesses: int = 0) -> list[Shape]:
    """What most servers will need, first what is likelier: up to `most` streams, these with prompts, prompts alone.
    `n_guesses`: tokens that are guessed for each stream at most; with steps that guess, and that verify it."""
    n_streams = min(n_slots, most)
    beside = [n for n in range(LEAST_BESIDE, 1 + min(n_ubatch, MOST_BESIDE)) if size_beside(n) == n]
    rows = sorted({_rows(k + 1) for k in range(1, min(n_slots, 1 + most // 2))})
    alone = sorted({bucket(n) for n in range(2, n_ubatch + 1)})
    streams = [Shape(n, n, whole=True) for n in sorted({bucket(n) for n in range(1, n_streams + 1)})]
    n_verified = min(n_ubatch, n_streams * (1 + n_guesses))
    return [
        *streams,
        *(shape._replace(guesses=True) for shape in streams if n_guesses),
        *(Shape(n, n, whole=True) for n in sorted({bucket(n) for n in range(n_streams + 1, n_verified + 1)})),
        *(Shape(n, min(n, r)) for r in rows for n in beside),
        *(Shape(n, 1) for n in alone),
    ]

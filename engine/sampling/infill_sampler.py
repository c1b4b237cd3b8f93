"""llama.cpp's sampler `infill`, for text between two others: it ends rather than goes on where the model is undecided.

It compares the texts of tokens, which no device knows. So a device runs the samplers before it and tells what they
left; it and those after it run here, by their definition (graph/ops/sampling/samplers.py). Facts: llama.cpp,
src/llama-sampling.cpp (2026).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from logitless.graph.ops.sampling.samplers import Candidates

N_CANDIDATES = 128  # the likeliest that a device tells; what is less likely has no say
LEAST = 0.2  # probability of a token that is to stay


class Texts(Protocol):
    """What it needs of a tokenizer (logitless.models.tokenizer.Tokenizer is one)."""

    eot_id: int | None
    eos_id: int | None
    eog_ids: frozenset[int]

    def piece(self, id: int, *, special: bool = True) -> bytes: ...


def candidates(ids: Iterable[int], p: npt.NDArray[np.float32]) -> Candidates:
    """What a device tells of a row: ids (-1: no more), likeliest first, and their probabilities, above 0."""
    known = np.fromiter(ids, np.int64)
    known = known[known >= 0]
    return Candidates(known, np.log(p[: len(known)]), True, p[: len(known)])


def infill(c: Candidates, n_left: int, texts: Texts) -> None:
    """Leave of the candidates what the sampler leaves, with their logits; `n_left`: how many there were in all.

    Ends win where they have more than a third of an average candidate's share. Else a token that begins as another does
    counts with the likelier of both; what then is unlikely goes, and if that is all, the text ends.
    """
    ids, p = c.ids.tolist(), c.softmax().tolist()
    ends = [id in texts.eog_ids for id in ids]
    p_ends = sum(share for share, end in zip(p, ends, strict=True) if end)
    if 3 * p_ends * n_left > sum(p) - p_ends:
        c.take(np.array(ends), is_sorted=True)
        return
    _merge(p, [texts.piece(id, special=False) for id in ids])
    kept = [i for i, share in enumerate(p) if ends[i] or share >= LEAST]
    n_texts = sum(not ends[i] for i in kept)
    if n_texts:
        least = sum(p[i] for i in kept) / (n_texts + 1)
        c.take([i for i in kept if ends[i] or p[i] >= least], is_sorted=True)
        return
    end = texts.eot_id if texts.eot_id is not None else texts.eos_id
    c.take([0], is_sorted=True)
    c.ids = np.array([c.ids[0] if end is None else end])


def _merge(p: list[float], pieces: list[bytes]) -> None:
    """Of two tokens of which one's text begins the other's, the likelier one gets the other's probability, in order."""
    gone: set[int] = set()
    for i, piece in enumerate(pieces):
        for j, other in enumerate(pieces):
            if i in gone:
                break
            if i != j and j not in gone and piece and other.startswith(piece):
                heir, source = (j, i) if p[j] > p[i] else (i, j)
                p[heir] += p[source]
                p[source] = 0.0
                gone.add(source)

"""Infill sampler: llama.cpp's `infill` for fill-in-the-middle, ends an undecided text.

It compares the texts of tokens, which the device does not have. So the device runs the samplers
before it and returns their candidates. This sampler and those after it run on the host, by their
definition (graph/ops/sampling/samplers.py). Facts: llama.cpp, src/llama-sampling.cpp (2026)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from logitless.graph.ops.sampling.samplers import Candidates
from logitless.models.tokenizer import Tokenizer

N_CANDIDATES = 128  # likeliest candidates that the device returns; others are ignored
LEAST = 0.2  # probability below which a token is dropped


def candidates(ids: Iterable[int], p: npt.NDArray[np.float32]) -> Candidates:
    """Candidates of a row from the device: ids, likeliest first (-1: no more), and probabilities `p` > 0."""
    candidate_ids = np.fromiter(ids, np.int64)
    candidate_ids = candidate_ids[candidate_ids >= 0]
    return Candidates(candidate_ids, np.log(p[: len(candidate_ids)]), True, p[: len(candidate_ids)])


def infill(c: Candidates, n_left: int, texts: Tokenizer) -> None:
    """Apply the infill sampler to the candidates in place. `n_left`: candidates before truncation.

    End tokens win if they have more than a third of an average candidate's share. Otherwise a token
    whose text begins another token's text is merged into the likelier of both, unlikely tokens are
    dropped, and if none is left the text ends."""
    ids, p = c.ids.tolist(), c.softmax().tolist()
    ends = [id in texts.eog_ids for id in ids]
    p_ends = sum(share for share, end in zip(p, ends, strict=True) if end)
    if 3 * p_ends * n_left > sum(p) - p_ends:
        c.take(np.array(ends), is_sorted=True)
        return
    _merge(p, [texts.piece(id, special=False) for id in ids])
    survivors = [i for i, share in enumerate(p) if ends[i] or share >= LEAST]
    n_texts = sum(not ends[i] for i in survivors)
    if n_texts:
        least = sum(p[i] for i in survivors) / (n_texts + 1)
        c.take([i for i in survivors if ends[i] or p[i] >= least], is_sorted=True)
        return
    end = texts.eot_id if texts.eot_id is not None else texts.eos_id
    c.take([0], is_sorted=True)
    c.ids = np.array([c.ids[0] if end is None else end])


def _merge(p: list[float], pieces: list[bytes]) -> None:
    """Merge tokens whose text is a prefix of another's: the likelier one gets the sum of probabilities."""
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

"""NEFTune (Jain et al., 2023): uniform noise on the token embeddings of training steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from logitless.training.data.packing import Sample


@dataclass(frozen=True)
class Neftune:
    """Noise within ±alpha / √(L · n_embd) of a sequence of L tokens; `alpha` 0: none.

    It follows from the seed, the optimizer step and the window's number in that step, so a resumed
    run has the same."""

    alpha: float = 0.0
    seed: int = 0

    def of(self, samples: Sequence[Sample], n: int, first: int, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
        """Noise (rows, n_embd) of step n's windows from number `first` on; padding windows have none."""
        noise = np.zeros(shape, np.float32)
        at = 0
        for i, sample in enumerate(samples):
            rng = np.random.default_rng([self.seed, 5, n, first + i])
            bounds = [*sample.starts, len(sample.tokens)]
            lengths = np.repeat(np.diff(bounds), np.diff(bounds)).astype(np.float32)
            unit = 2 * rng.random((len(sample.tokens), shape[1]), np.float32) - 1
            rows = slice(at, at + len(sample.tokens))
            noise[rows] = unit * (np.float32(self.alpha) / np.sqrt(lengths * shape[1]))[:, None]
            at += len(sample.tokens)
        return noise

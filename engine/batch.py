"""One step of the device: the arrays that go in and what comes back. The scheduler fills it, the engine runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from logitless.engine.sampling.sampler import Row
from logitless.models.adapters.stacked_lora import Mix

PAGE = 16  # cells of a page
LEAST_BESIDE = 8  # tokens of a step with streams and prompts: products are fastest by eight rows
APART = (64, 16)  # tokens of a step that others may interrupt: the more the faster, and the longer its longest part
I32 = npt.NDArray[np.int32]


@dataclass(slots=True)
class UBatch:
    """`tokens[i]` is evaluated at `pos[i]` of the sequence in `slot[i]`, and its K and V go to `cells[i]`.

    Rows of the logits are wanted for the tokens `out[j]` (indices into the batch); `rows[j]` says how to sample there,
    or None where only a prompt token's log-probability is wanted (`targets[j]` ≥ 0, the token that follows it).
    """

    tokens: list[int] = field(default_factory=list)
    pos: list[int] = field(default_factory=list)
    slot: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)  # page × PAGE + position mod PAGE
    out: list[int] = field(default_factory=list)
    rows: list[Row | None] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)  # -1: the sampled token itself
    copies: list[tuple[int, int]] = field(default_factory=list)  # pages (from, to), done before anything is written
    tables: dict[int, list[int]] = field(default_factory=dict)  # slot → its whole page table, where it changed
    mixes: dict[int, Mix] = field(default_factory=dict)  # slot → its adapters, where it has any
    weights: int = 0  # of all its tokens (logitless.models.adapters.full_finetunes)
    n_top: int = 0  # log-probabilities wanted per row: 0 none, else 1 + top n
    n_probs: int = 0  # post-sampling probabilities wanted per row
    n_streams: int = 0  # sequences that pay a single token
    begin: list[int] = field(default_factory=list)  # of models whose layers keep states: graph/ops/linear_attention.py
    end: list[int] = field(default_factory=list)
    near: list[int] = field(default_factory=list)  # where layers with a window have other pages: cells in these,
    near_copies: list[tuple[int, int]] = field(default_factory=list)  # pages,
    near_tables: dict[int, list[int]] = field(default_factory=dict)  # and tables
    hidden_before: list[int] = field(
        default_factory=list
    )  # of models that guess (models/architectures/mtp.py): rows of what was
    hidden_to: list[int] = field(default_factory=list)  # said of the tokens before, and of these
    guesses: bool = False  # not the model runs, but the block that guesses


@dataclass(frozen=True, slots=True)
class StepResult:
    """`ids[j]`: the word that the sample op returned for row j (see
    logitless.engine.sampling.sampler.RowSampler.accept).

    `logprobs[j]`: value at the target, then n_top−1 values; `top_ids[j]`: their ids. `probs[j]`: post-sampling
    (candidates, probability of the chosen token, ids, probabilities). Arrays are None when nobody asked. `unsampled`:
    rows whose mask did not come in time, or not at all, with the reason if it never will.
    """

    ids: npt.NDArray[np.uint32]
    logprobs: npt.NDArray[np.float32] | None = None
    top_ids: I32 | None = None
    probs: tuple[I32, npt.NDArray[np.float32], I32, npt.NDArray[np.float32]] | None = None
    bytes_read: int = 0  # bytes that came back from the device
    bytes_written: int = 0  # bytes that went there
    unsampled: Mapping[int, str] = field(default_factory=dict)


class StepFailed(Exception):
    """The device could not run this step; nothing of it counts."""


class DeviceFailed(StepFailed):
    """A device was lost with all that was in its memory. The next step will run on another."""


def bucket(n: int) -> int:
    """The size that a plan is made for: 1…8 as they are, then four sizes an octave (10, 12, 14, 16, 20, 24, …)."""
    if n <= 8:
        return n
    step = 1 << ((n - 1).bit_length() - 3)
    return -(-n // step) * step


def size_beside(n: int) -> int:
    """The size that a step with streams and prompts has: 8, 16, 24, 32, 48, 64, 96, … (12 rows take as long as 16)."""
    power = power_of_two(n, LEAST_BESIDE)
    return power * 3 // 4 if power >= 32 and n <= power * 3 // 4 else power


def size_below(size: int) -> int:
    """The next smaller one."""
    power = power_of_two(size)
    return power // 2 if size != power or size <= 16 else power * 3 // 4


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and `least`."""
    return max(least, 1 << (n - 1).bit_length() if n > 1 else 1)

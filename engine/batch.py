"""Batch of one step: input arrays from the scheduler to the model runner, and the step's result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from logitless.engine.sampling.sampler import Row
from logitless.graph.ops.attention.paged_attention import PAGE
from logitless.models.adapters.stacked_lora import Mix

BLOCK_SIZE = PAGE  # tokens of a KV block
LEAST_MIXED = 8  # tokens of a mixed batch, at least: matrix products are fastest by eight rows
# tokens of a preemptible prefill chunk: larger ones are faster, but have longer parts
APART = (64, 16)
I32 = npt.NDArray[np.int32]


def token_slots(table: Sequence[int], positions: Iterable[int]) -> list[int]:
    """Token slots of a sequence's positions, by its block table."""
    return [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in positions]


class UBatch(Struct):
    """Tokens of one device run: `tokens[i]` at position `pos[i]` of the sequence in `slot[i]`.

    Its key and value go to token slot `slot_mapping[i]`. `out` are the sampled positions (indices
    into the batch). `rows[j]` says how to sample at `out[j]`; it is None where only the
    log-probability of a prompt token is needed (`targets[j]` ≥ 0, the token that follows)."""

    tokens: list[int] = field(default_factory=list)
    pos: list[int] = field(default_factory=list)
    slot: list[int] = field(default_factory=list)
    # slot mapping: block × BLOCK_SIZE + position mod BLOCK_SIZE
    slot_mapping: list[int] = field(default_factory=list)
    out: list[int] = field(default_factory=list)
    rows: list[Row | None] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)  # -1: the sampled token itself
    # block copies (from, to), done first
    copies: list[tuple[int, int]] = field(default_factory=list)
    # slot → whole block table, if changed
    tables: dict[int, list[int]] = field(default_factory=dict)
    mixes: dict[int, Mix] = field(default_factory=dict)  # slot → its LoRA adapters, if it has any
    # full finetune of all tokens (models/adapters/full_finetunes.py); 0: base model
    weights: int = 0
    n_top: int = 0  # log-probabilities per row: 0 none, else 1 + top n
    n_probs: int = 0  # post-sampling probabilities per row
    logits: bool = False  # all logits of each row come back, for samplers on the host
    n_streams: int = 0  # decoding sequences without draft tokens
    # Recurrent models (graph/ops/linear_attention.py): state rows that a token reads and writes.
    begin: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    # Sliding-window KV group, if separate: slot mapping, block copies, block tables.
    window_slot_mapping: list[int] = field(default_factory=list)
    window_copies: list[tuple[int, int]] = field(default_factory=list)
    window_tables: dict[int, list[int]] = field(default_factory=dict)
    # MTP (models/architectures/mtp.py): hidden-state rows of the token before, and of the token
    # itself.
    hidden_before: list[int] = field(default_factory=list)
    hidden_to: list[int] = field(default_factory=list)
    hidden_cells: list[int] = field(default_factory=list)  # cell of the token before (EAGLE-3); -1: none
    mtp: bool = False  # run the MTP head, or the drafter, instead of the model
    # Images (models/batch.py, MediaRows), if a sequence with some takes part.
    media_rows: list[int] = field(default_factory=list)  # rows of the pool; 0: a token of text
    seen: list[int] = field(default_factory=list)  # last position that a token sees; drafters have it too
    # Of a model with an encoder: prompts that it reads (slot, tokens, slot mapping), and of each token of its
    # decoder the length of the prompt.
    sources: list[tuple[int, list[int], list[int]]] = field(default_factory=list)
    n_source: list[int] = field(default_factory=list)
    rope_positions: list[npt.NDArray[np.int32]] = field(default_factory=list)  # (4, n) of each sequence, M-RoPE


class StepResult(Struct, frozen=True):
    """Result of one device run.

    `ids[j]`: packed token id and flags of row j (RowSampler.accept unpacks it). `logprobs[j]`:
    value of the target, then of the n_top − 1 likeliest tokens, whose ids are in `top_ids[j]`.
    `logits[j]`: of all tokens (n_vocab,).
    `probs[j]`: post-sampling (candidates, probability of the chosen token, ids, probabilities).
    Arrays are None if not asked for. `unsampled`: rows whose token bitmask was pending (""), or is
    impossible (the reason)."""

    ids: npt.NDArray[np.uint32]
    logprobs: npt.NDArray[np.float32] | None = None
    top_ids: I32 | None = None
    probs: tuple[I32, npt.NDArray[np.float32], I32, npt.NDArray[np.float32]] | None = None
    bytes_read: int = 0  # bytes that came back from the device
    bytes_written: int = 0  # bytes that went there
    unsampled: Mapping[int, str] = field(default_factory=dict)
    logits: npt.NDArray[np.float32] | None = None


class StepFailed(Exception):
    """The device could not run this step. The step has no effect."""


class DeviceFailed(StepFailed):
    """A device was lost, with the content of its memory. The next step runs on another one."""


def bucket(n: int) -> int:
    """Batch-size bucket: 1…8 as they are, then four sizes an octave (10, 12, 14, 16, 20, 24, …)."""
    if n <= 8:
        return n
    step = 1 << ((n - 1).bit_length() - 3)
    return -(-n // step) * step


def mixed_batch_size(n: int) -> int:
    """Bucket of a mixed batch: 8, 16, 24, 32, 48, 64, 96, … (12 rows take as long as 16)."""
    power = power_of_two(n, LEAST_MIXED)
    return power * 3 // 4 if power >= 32 and n <= power * 3 // 4 else power


def size_below(size: int) -> int:
    """Next smaller bucket of a mixed batch."""
    power = power_of_two(size)
    return power // 2 if size != power or size <= 16 else power * 3 // 4


def power_of_two(n: int, least: int = 1) -> int:
    """Smallest power of two that is at least n and at least `least`."""
    return max(least, 1 << (n - 1).bit_length() if n > 1 else 1)

"""Batch builder: the arrays of one batch (token ids, positions, slot mapping) from a step's plan."""

from __future__ import annotations

import numpy as np

from logitless.engine.batch import BLOCK_SIZE, StepFailed, UBatch, token_slots
from logitless.engine.media.media_encoder import MediaEncoder
from logitless.engine.runner.hidden_rows import HiddenRows
from logitless.engine.sequence import Sequence

Plan = list[tuple[Sequence, int]]  # tokens that each sequence computes in this step


def bucket_floor(n: int) -> int:
    """The largest bucket size (engine/batch.py) that n tokens fill without padding."""
    if n <= 8:
        return max(1, n)
    unit = 1 << (n.bit_length() - 3)
    return n // unit * unit


def split(plan: Plan, limit: int) -> tuple[Plan, Plan]:
    """(part of a plan for one batch, rest): at most `limit` tokens, all by the same weights."""
    weights = plan[0][0].choice.weights
    others = [part for part in plan if part[0].choice.weights != weights]
    same = [part for part in plan if part[0].choice.weights == weights] if others else plan
    if sum([n for _, n in same]) <= limit:
        return same, others
    group: Plan = []
    for i, (seq, n) in enumerate(same):
        if limit == 0:
            return group, same[i:] + others
        part = n if n <= limit else seq.chunk(limit)
        group.append((seq, part))  # the rest of the prompt comes in the next step
        limit -= min(part, limit)
    return group, others


def build_batch(group: Plan, hidden: HiddenRows | None = None, encoder: MediaEncoder | None = None) -> UBatch:
    """The batch of the next n tokens of each sequence, drafts included. Their KV blocks are allocated already."""
    batch = UBatch(weights=group[0][0].choice.weights)
    tokens, pos, slots, slot_mapping = batch.tokens, batch.pos, batch.slot, batch.slot_mapping
    for seq, n in group:
        assert seq.slot is not None
        start = seq.n_computed
        kv, table = seq.kv, seq.kv.blocks
        id = seq.slot.id
        if seq.choice.mix:
            batch.mixes[id] = seq.choice.mix
        window_table = kv.window_blocks
        if not kv.uploaded:
            batch.tables[id] = table  # a pending copy comes with it
            if window_table:
                batch.window_tables[id] = window_table
            if kv.copy is not None:
                batch.copies.append(kv.copy)
            if kv.window_copy is not None:
                batch.window_copies.append(kv.window_copy)
        draft = draft_part(seq, n)
        if start < (n_source := seq.request.n_source):
            batch.sources.append((id, seq.tokens[:n_source], token_slots(table, range(n_source))))
            start, n = n_source, n - n_source
        if n_source:
            batch.n_source += [n_source] * n
        if n == 1:
            batch.n_streams += 1
            tokens.append(seq.tokens[start])
            pos.append(start)
            slots.append(id)
            slot_mapping.append(table[start // BLOCK_SIZE] * BLOCK_SIZE + start % BLOCK_SIZE)
        else:
            tokens += seq.tokens[start : start + n]
            tokens += draft
            pos += range(start, start + n)
            slots += [id] * n
            slot_mapping += token_slots(table, range(start, start + n))
        if window_table:
            batch.window_slot_mapping += token_slots(window_table, range(start, start + n))
        if kv.state_writes:
            batch.begin += [kv.state_row, *[-1] * (n - 1)]
            batch.end += [kv.state_writes.get(p, -1) for p in range(start + 1, start + n + 1)]
        if hidden is not None:
            before, to = hidden.place(seq, n)
            batch.hidden_before += before
            batch.hidden_to += to
            if hidden.behind:
                batch.hidden_cells += hidden.cells(seq, before)
        if seq.request.prompt_logprobs is not None:
            _ask_for_prompt(batch, seq, n)
        if start + n >= len(seq.tokens) and seq.samples:
            _ask_for_tokens(batch, seq, draft)
    if encoder is not None and any(_needs_media(seq, n) for seq, n in group):
        for seq, n in group:
            _add_media(batch, encoder, seq, n)
    return batch


def _needs_media(seq: Sequence, n: int) -> bool:
    """True if the sequence's next n tokens have rows of images or sounds, or M-RoPE positions behind some."""
    media = seq.request.media
    return media is not None and (media.mrope or bool(media.within(seq.n_computed, seq.n_computed + n)))


def _add_media(batch: UBatch, encoder: MediaEncoder, seq: Sequence, n: int) -> None:
    start, media = seq.n_computed, seq.request.media
    if media is None:
        batch.media_rows += [0] * n
        batch.seen += range(start, start + n)
        batch.rope_positions.append(np.tile(np.arange(start, start + n, dtype=np.int32), (4, 1)))
        return
    rows = [0] * n
    for span in media.within(start, start + n):
        first = encoder.first_row(span.tile)
        if first is None:
            raise StepFailed("an image's rows are gone")
        for p in range(max(start, span.start), min(start + n, span.end)):
            rows[p - start] = first + p - span.start
    batch.media_rows += rows
    batch.seen += media.last_seen(start, n)
    batch.rope_positions.append(media.positions(start, n))


def prompt_rows(seq: Sequence, n: int) -> range:
    """Positions among the next n whose logits give the prompt's log-probabilities."""
    if seq.request.prompt_logprobs is None:
        return range(0)
    return range(max(seq.n_computed, len(seq.prompt_probs) - 1), min(seq.n_computed + n, seq.n_prompt - 1))


def _ask_for_prompt(batch: UBatch, seq: Sequence, n: int) -> None:
    # row of position 0, which may lie before the batch
    first = len(batch.tokens) - n - seq.n_computed
    for p in prompt_rows(seq, n):
        batch.out.append(first + p)
        batch.rows.append(None)
        batch.targets.append(seq.tokens[p + 1])
    batch.n_top = max(batch.n_top, 1 + (seq.request.prompt_logprobs or 0))


def draft_part(seq: Sequence, n: int) -> list[int]:
    """Draft tokens among the sequence's next n."""
    n_drafted = n - seq.n_uncomputed
    return seq.drafts.tokens[:n_drafted] if n_drafted > 0 and seq.drafts is not None else []


def _ask_for_tokens(batch: UBatch, seq: Sequence, draft: list[int]) -> None:
    """Sample after the last known token, and after each draft token."""
    last = len(batch.tokens) - 1
    if draft:
        batch.out += range(last - len(draft), last + 1)
        batch.rows += seq.sampler.draft_feeds(draft)
        batch.targets += [-1] * (1 + len(draft))
    else:
        batch.out.append(last)
        batch.rows.append(seq.sampler.feeds())
        batch.targets.append(-1)
    batch.n_probs = max(batch.n_probs, seq.sampler.n_candidates)
    batch.logits = batch.logits or seq.sampler.on_host
    if seq.n_probs:
        if seq.post_sampling_probs:
            batch.n_probs = max(batch.n_probs, seq.n_probs)
        else:
            batch.n_top = max(batch.n_top, 1 + max(seq.n_probs, seq.sampler.n_candidates))

"""Cache reuse: move the KV entries of token chunks that a new prompt repeats at other positions.

The semantics are llama-server's `--cache-reuse N`. After the common prefix, every chunk of at least
N old tokens that continues the prompt is moved: values are copied, keys are rotated (RoPE) to their
new positions. A client that drops the oldest part of a long prompt computes only the new tokens.

Moved KV entries depend on the text that preceded them when they were computed, so the result
differs slightly from a full prefill. The prefix cache therefore stores them under a separate key
(INEXACT). Only requests that ask for reuse match them; all others keep the exact bits.

Behind images with M-RoPE a token's position is not its place in the sequence, so nothing is moved there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import takewhile

from logitless.engine.batch import BLOCK_SIZE, token_slots
from logitless.engine.kv_cache.context_shift import Moves
from logitless.engine.kv_cache.manager import KVCacheManager
from logitless.engine.kv_cache.prefix_cache import common_prefix
from logitless.engine.sequence import Sequence, Slot
from logitless.models.media.prompt_media import FIRST_ID

log = logging.getLogger("logitless.scheduler")


def chunks(old: list[int], new: list[int], old_at: int, new_at: int, n_least: int) -> Iterator[tuple[int, int]]:
    """Yield (index in `old`, length) of chunks that continue `new` from `new_at` on."""
    while new_at < len(new):
        try:
            old_at = old.index(new[new_at], old_at)
        except ValueError:
            return
        if old[old_at : old_at + n_least] == new[new_at : new_at + n_least]:
            n = common_prefix(old[old_at:], new[new_at:])
            if n >= n_least:
                yield old_at, n
                old_at += n
                new_at += n
                continue
        old_at += 1


def reuse_chunks(
    cache: KVCacheManager, move_cells: Callable[[Moves], None], seq: Sequence, slot: Slot, limit: int, *, mrope: bool
) -> int:
    """Reuse chunks of the slot's last sequence for the next tokens of `seq`, at most `limit` of
    them.

    Returns the number of tokens that need no prefill any more.
    """
    old, new = slot.cached, seq.tokens
    if mrope:
        old, new = _before_media(old), _before_media(new)
    # other adapters, or not to be shared
    if (slot.choice, slot.salt) != (seq.choice, seq.request.cache_salt):
        return 0
    start = common_prefix(old, new)
    pieces = list(chunks(old, new, start, seq.n_computed, seq.request.n_cache_reuse))
    if not pieces:
        return 0
    match = cache.prefixes.match(old, len(old), root=seq.kv.root, inexact=True)
    source = [node.block for node in match.path] + ([match.block] if match.n_more else [])
    n_cached = len(match.path) * BLOCK_SIZE + match.n_more
    for block in source:
        cache.prefixes.acquire(block)  # the copies must not evict their source
    try:
        return _move(cache, move_cells, seq, source, n_cached, pieces, limit)
    finally:
        for block in reversed(source):
            cache.prefixes.release(block)


def _before_media(tokens: list[int]) -> list[int]:
    """The text before the first image or sound."""
    return list(takewhile(lambda id: id > FIRST_ID, tokens))


def _move(
    cache: KVCacheManager,
    move_cells: Callable[[Moves], None],
    seq: Sequence,
    source: list[int],
    n_cached: int,
    pieces: list[tuple[int, int]],
    limit: int,
) -> int:
    start = end = seq.n_computed
    places: list[int] = []  # positions in the old sequence of the tokens from `start` on
    for at, n in pieces:
        n_usable = min(n, n_cached - at, limit - end)
        places += range(at, at + max(0, n_usable))
        end = start + len(places)
        if n_usable < n:  # the rest is evicted or beyond the limit: later chunks cannot follow
            break
    places = places[: cache.allocate_slots(seq, len(places))]
    if not places:
        return 0
    moves: Moves = []
    if seq.kv.copy is not None:  # the pending block copy would overwrite the moves: do it here
        first, to = seq.kv.copy
        moves += [(first * BLOCK_SIZE + i, to * BLOCK_SIZE + i, 0) for i in range(start % BLOCK_SIZE)]
    targets = range(start, start + len(places))
    turns = [to - at for at, to in zip(places, targets, strict=True)]
    moves += zip(token_slots(source, places), token_slots(seq.kv.blocks, targets), turns, strict=True)
    try:
        move_cells(moves)
    except Exception as error:  # fall back to prefill
        log.warning("cache reuse failed: %s", " ".join(str(error).split()) or type(error).__name__)
        return 0
    cache.copies_done(seq)
    seq.kv.shifted, seq.kv.uploaded = True, False
    return len(places)

"""The first part of a step: seats for who waits, and first pages for who has a seat, in order of rank."""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from logitless.engine.batch import PAGE
from logitless.engine.kv_cache.block_pool import n_pages_for
from logitless.engine.kv_cache.cache_reuse import reuse_chunks
from logitless.engine.kv_cache.context_shift import unpark
from logitless.engine.kv_cache.prefix_cache import common_prefix
from logitless.engine.requests import Event, Progress
from logitless.engine.scheduler.postprocess import failure
from logitless.engine.sequence import Sequence, Slot

if TYPE_CHECKING:
    from logitless.engine.scheduler.scheduler import Scheduler

Events = list[tuple[Sequence, Event]]


def admit(scheduler: Scheduler, events: Events) -> None:
    """Seats for queued sequences, and pages for those that have none."""
    queue, running = scheduler.queue, scheduler.running
    while len(queue) and (free := _free_slots(scheduler)):
        seq = queue.take(running, {-1, *free})
        if seq is None:
            break
        _seat(scheduler, seq, _choose_slot(scheduler, seq, free), events)
    earlier = False  # does an earlier one have pages?
    for seq in list(running):
        waits = seq.started or (earlier and _follows(scheduler, seq))
        if not waits and not _start(scheduler, seq, earlier, events):
            return
        earlier = True


def _free_slots(scheduler: Scheduler) -> dict[int, Slot]:
    return {slot.id: slot for slot in scheduler.slots if not slot.is_processing and not scheduler.claims.hold(slot)}


def _choose_slot(scheduler: Scheduler, seq: Sequence, free: dict[int, Slot]) -> Slot:
    """A free seat: the one asked for, else that of the most similar prompt, else the one not used for longest."""
    if seq.request.id_slot >= 0:
        return free[seq.request.id_slot]
    common, _, similar = max((common_prefix(seq.tokens, slot.cached), -slot.last_used, id) for id, slot in free.items())
    if common > scheduler.slot_prompt_similarity * seq.n_prompt > 0:
        return free[similar]
    return min(free.values(), key=lambda slot: slot.last_used)


def _seat(scheduler: Scheduler, seq: Sequence, slot: Slot, events: Events) -> None:
    try:
        seq.sampler = scheduler.make_sampler(seq.request.sampling, slot.n_ctx)
        seq.sampler.begin(seq.request.prompt)
        seq.drafts = scheduler.speculator.begin(seq)
    except Exception as error:  # whatever is wrong with one request ends that request
        seq.done = True
        events.append((seq, failure(error)))
        return
    seq.slot = slot
    slot.sequence = seq
    scheduler.touch(slot)
    insort(scheduler.running, seq, key=lambda seq: seq.rank)


def _follows(scheduler: Scheduler, seq: Sequence) -> bool:
    """Whether an earlier one is computing what this one could share: then it waits for that, and does not compute it
    too. So the results of one prompt, and prompts that begin alike, cost their common part once."""
    assert seq.slot is not None
    limit = _known_limit(seq, seq.slot)
    for other in scheduler.running:
        if other is seq:
            return False
        if (
            other.started
            and other.owed > 1
            and other.kv.root is seq.kv.root
            and (seq.takes_inexact or not other.kv.shifted)
        ):
            common = min(limit, common_prefix(seq.tokens, other.tokens))
            if common - other.n_computed >= PAGE:
                if scheduler.cache.beside is not None:
                    other.kv.mark(common, other.n_computed)
                return True
    return False


def _start(scheduler: Scheduler, seq: Sequence, older: bool, events: Events) -> bool:
    """Give a sequence its first pages, if all of its tokens have room beside the older ones' pages."""
    slot, cache = seq.slot, scheduler.cache
    assert slot is not None
    if older and seq.refused_at == scheduler.n_released:
        return False
    started = [other for other in scheduler.running if other.started]
    if seq.kv.swapped:
        return _unpark(scheduler, seq, started)
    tails = [tail for other in started if (tail := other.kv.tail(other.tokens, other.n_computed)) is not None]
    seq.n_computed = cache.attach(seq, slot, _known_limit(seq, slot), tails)
    if older and cache.n_available < sum(_missing(other) for other in (*started, seq)):
        cache.release(seq, slot)
        seq.n_computed = 0
        seq.refused_at = scheduler.n_released
        return False
    seq.started = True
    seq.paced = seq.owed > scheduler.n_ubatch or any(other.settled for other in started)
    scheduler.interleaver.starts(seq)
    if seq.resumed:
        scheduler.stats.recomputed_tokens += max(0, seq.n_lost - seq.n_computed)
        return True
    if seq.takes_inexact and (n := reuse_chunks(cache, scheduler.engine.move_cells, seq, slot, _limit(seq))):
        seq.n_computed += n
        cache.seal(seq, slot)
    seq.t_start = seq.t_first = seq.t_last = scheduler.clock()
    seq.n_cached = seq.n_computed
    scheduler.stats.prompt_tokens_cached += seq.n_cached
    if seq.request.return_progress:
        events.append((seq, Progress(seq.n_prompt, seq.n_cached, seq.n_cached, 0.0, slot.id)))
    return True


def _unpark(scheduler: Scheduler, seq: Sequence, started: list[Sequence]) -> bool:
    """Start a sequence again whose cells nobody could compute again, from its own copy of its pages."""
    assert seq.slot is not None
    if started and scheduler.cache.n_available < len(seq.kv.swapped) + sum(map(_missing, started)):
        seq.refused_at = scheduler.n_released
        return False
    try:
        seq.n_computed = unpark(scheduler.cache, seq, seq.slot)
    except (MemoryError, OSError) as error:
        scheduler.lose(seq, error)
        return True
    seq.started = True
    return True


def _limit(seq: Sequence) -> int:
    """How many leading tokens need not be computed: never all, for the last one's logits are needed."""
    limit = len(seq.tokens) - 1
    if seq.request.prompt_logprobs is not None:
        limit = min(limit, len(seq.prompt_probs) - 1)  # the logits of later ones are needed too
    return limit


def _known_limit(seq: Sequence, slot: Slot) -> int:
    """How many leading tokens may come from the cache as they are there."""
    limit = _limit(seq)
    if seq.resumed:
        return limit
    if not seq.request.cache_prompt:
        return 0
    if seq.request.id_slot >= 0:
        return min(limit, common_prefix(seq.tokens, slot.cached))
    return limit


def _missing(seq: Sequence) -> int:
    """The pages that it needs to get to its next token."""
    return n_pages_for(len(seq.tokens)) - len(seq.kv.blocks)

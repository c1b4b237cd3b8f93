"""Admission: gives slots to waiting requests, and first KV blocks to sequences that have a slot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from logitless.engine.batch import BLOCK_SIZE
from logitless.engine.errors import GaveWay
from logitless.engine.kv_cache.block_pool import n_blocks_for
from logitless.engine.kv_cache.cache_reuse import reuse_chunks
from logitless.engine.kv_cache.context_shift import swap_in
from logitless.engine.kv_cache.manager import KVCacheManager
from logitless.engine.kv_cache.prefix_cache import common_prefix
from logitless.engine.requests import Event, Failed, Progress
from logitless.engine.scheduler.postprocess import failure
from logitless.engine.scheduler.runner import Runner
from logitless.engine.scheduler.running_set import RunningSet
from logitless.engine.scheduler.slot_claims import Claims
from logitless.engine.scheduler.waiting_queue import WaitingQueue
from logitless.engine.sequence import Sequence, Slot
from logitless.engine.stats import SchedulerStats

Events = list[tuple[Sequence, Event]]


@dataclass(frozen=True, slots=True)
class Admission:
    """The first part of a step. Requests are admitted in order of rank."""

    queue: WaitingQueue
    running: RunningSet
    claims: Claims  # slots kept free for slot actions
    kv: KVCacheManager
    runner: Runner
    stats: SchedulerStats
    clock: Callable[[], float]
    prepare: Callable[[Sequence, Slot], None]  # makes the sampler and the drafters of a sequence
    on_start: Callable[[Sequence], None]  # called when a sequence gets its first blocks
    slot_prompt_similarity: float
    continuous: bool  # requests join those that run
    n_ubatch: int

    def admit(self, events: Events) -> None:
        """Give slots to queued requests, then blocks to sequences that have none. Sequences that wait for
        their clients give up what others need."""
        for returning in self.running.take_returning():
            self.queue.push(returning)
        if len(self.queue):
            self._seat_queued(events)
        is_first = True
        for seq in list(self.running.seqs):
            if seq.is_held and not seq.started:
                continue
            waits = seq.started or (not is_first and self._shares_prefill(seq)) or self._loads(seq)
            while not waits and not self._start(seq, is_first, events):
                if not self.running.preempt_held():
                    return
            is_first = False

    def _seat_queued(self, events: Events) -> None:
        """Give slots to queued requests."""
        self._park_held()
        if self.queue.n_urgent:
            self._make_way(events)
        while self._joins() and len(self.queue) and (free := self._free_slots()):
            seq = self.queue.take(self.running.seqs, {-1, *free})
            if seq is None:
                break
            self._seat(seq, self._choose_slot(seq, free), events)

    def _joins(self) -> bool:
        """True if a request may get a slot now: without continuous batching before those of its batch have
        generated, and after they have ended. Training does not hold up users."""
        if self.continuous:
            return True
        return not any(seq.n_generated for seq in self.running.seqs if not (seq.is_held or seq.request.gives_way))

    def _park_held(self) -> None:
        """Have sequences that wait for their clients give up the slots that others wait for."""
        paused = [seq for seq in reversed(self.running.seqs) if seq.is_held]
        if not paused:
            return
        waiting = [seq.request.id_slot for seq in self.queue]
        n_missing = len(waiting) - len(self._free_slots())
        for seq in paused:
            assert seq.slot is not None
            if n_missing > 0 or seq.slot.id in waiting:
                n_missing -= 1
                self.running.park(seq)

    def _make_way(self, events: Events) -> None:
        """End requests that give way where others wait for their slots: training's first, then those with
        the fewest tokens."""
        leaving = [seq for seq in reversed(self.running.seqs) if seq.request.gives_way]
        if not leaving:
            return
        waiting = [seq.request.id_slot for seq in self.queue if not seq.request.gives_way]
        n_missing = len(waiting) - len(self._free_slots())
        for seq in sorted(leaving, key=lambda seq: (not seq.request.background, seq.n_generated)):
            assert seq.slot is not None
            if n_missing <= 0 and seq.slot.id not in waiting:
                continue
            n_missing -= 1
            self.running.leave(seq)
            events.append((seq, Failed(GaveWay.code, GaveWay.type, "another request has taken the slot")))

    def _free_slots(self) -> dict[int, Slot]:
        slots = self.running.slots
        return {slot.id: slot for slot in slots if not slot.is_processing and not self.claims.hold(slot)}

    def _choose_slot(self, seq: Sequence, free: dict[int, Slot]) -> Slot:
        """The slot that the request names, else the one of the most similar prompt, else the least recently used."""
        if seq.request.id_slot >= 0:
            return free[seq.request.id_slot]
        similarity = ((_n_common(seq, slot), -slot.last_used, id) for id, slot in free.items())
        n_common, _, similar = max(similarity)
        if n_common > self.slot_prompt_similarity * seq.n_prompt > 0:
            return free[similar]
        return min(free.values(), key=lambda slot: slot.last_used)

    def _seat(self, seq: Sequence, slot: Slot, events: Events) -> None:
        try:
            if not seq.resumed:  # else it has its sampler
                self.prepare(seq, slot)
        except Exception as error:  # any error of one request ends that request alone
            seq.done = True
            events.append((seq, failure(error)))
            return
        self.running.add(seq, slot)

    def _shares_prefill(self, seq: Sequence) -> bool:
        """True if an earlier sequence is computing a prefix that this one can share: it waits for
        that.

        So the common part of prompts that begin alike, and of several results of one prompt, is
        computed once."""
        assert seq.slot is not None
        limit = _known_limit(seq, seq.slot)
        for other in self.running.seqs:
            if other is seq:
                return False
            same_bits = other.kv.root is seq.kv.root and (seq.takes_inexact or not other.kv.shifted)
            if other.started and not other.is_held and other.n_uncomputed > 1 and same_bits:
                n_common = min(limit, common_prefix(seq.tokens, other.tokens))
                if n_common - other.n_computed >= BLOCK_SIZE:
                    if self.kv.auxiliary is not None:
                        other.kv.mark(n_common, other.n_computed)
                    return True
        return False

    def _loads(self, seq: Sequence) -> bool:
        """True if more of the sequence's prefix comes from the disk, a piece between two steps of others."""
        if seq.kv.swapped or seq.refused_at == self.running.n_released:
            return False
        assert seq.slot is not None
        others = any(other.started for other in self.running.seqs)
        return others and self.kv.load_from_disk(seq, seq.slot, _known_limit(seq, seq.slot))

    def _start(self, seq: Sequence, is_first: bool, events: Events) -> bool:
        """Give a sequence its first blocks if all of its tokens have room beside the earlier ones' blocks."""
        slot, kv = seq.slot, self.kv
        assert slot is not None
        if not is_first and seq.refused_at == self.running.n_released:
            return False
        started = [other for other in self.running.seqs if other.started]
        if seq.kv.swapped:
            return self._swap_in(seq, slot, started)
        tails = [tail for other in started if (tail := other.kv.tail(other.tokens, other.n_computed)) is not None]
        seq.n_computed = kv.match_prefix(seq, slot, _known_limit(seq, slot), tails)
        if seq.n_computed < seq.request.n_source:  # an encoder reads the prompt again
            kv.free(seq, slot)
            seq.n_computed = 0
        if not is_first and kv.n_available < sum(_n_missing(other) for other in (*started, seq)):
            kv.free(seq, slot)
            seq.n_computed, seq.refused_at = 0, self.running.n_released
            return False
        seq.started = True
        seq.throttled = seq.n_uncomputed > self.n_ubatch or any(other.past_warmup for other in started)
        self.on_start(seq)
        if seq.resumed:
            self.stats.recomputed_tokens += max(0, seq.n_lost - seq.n_computed)
            return True
        if seq.takes_inexact:
            runner = self.runner
            if n := reuse_chunks(kv, runner.move_cells, seq, slot, _limit(seq), mrope=runner.mrope):
                seq.n_computed += n
                kv.cache_full_blocks(seq, slot)
        seq.t_start = seq.t_first = seq.t_last = self.clock()
        seq.n_cached = seq.n_computed
        self.stats.prompt_tokens_cached += seq.n_cached
        if seq.request.return_progress:
            events.append((seq, Progress(seq.n_prompt, seq.n_cached, seq.n_cached, 0.0, slot.id)))
        return True

    def _swap_in(self, seq: Sequence, slot: Slot, started: list[Sequence]) -> bool:
        """Start a preempted sequence whose cells cannot be recomputed, from the host copy of its blocks."""
        if started and self.kv.n_available < len(seq.kv.swapped) + sum(map(_n_missing, started)):
            seq.refused_at = self.running.n_released
            return False
        try:
            seq.n_computed = swap_in(self.kv, seq, slot)
        except (MemoryError, OSError) as error:
            self.running.lose(seq, error)
            return True
        seq.started = True
        return True


def _limit(seq: Sequence) -> int:
    """Leading tokens that need not be computed: never all, for the last one's logits are needed."""
    limit = len(seq.tokens) - 1
    if seq.request.prompt_logprobs is not None:
        limit = min(limit, len(seq.prompt_probs) - 1)  # the logits of later ones are needed too
    return limit


def _known_limit(seq: Sequence, slot: Slot) -> int:
    """Leading tokens that may come from the prefix cache."""
    limit = _limit(seq)
    if seq.resumed:
        return limit
    if not seq.request.cache_prompt:
        return 0
    if seq.request.id_slot >= 0:
        return min(limit, _n_common(seq, slot))
    return limit


def _n_common(seq: Sequence, slot: Slot) -> int:
    """Leading tokens that are the slot's last ones, too, if their cache may be shared."""
    return common_prefix(seq.tokens, slot.cached) if slot.salt == seq.request.cache_salt else 0


def _n_missing(seq: Sequence) -> int:
    """Blocks that the sequence needs to get to its next token."""
    return n_blocks_for(len(seq.tokens)) - len(seq.kv.blocks)

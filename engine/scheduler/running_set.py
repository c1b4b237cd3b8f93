"""Running set: sequences that have a slot, by rank; preempts the lowest when KV blocks run out.

A sequence with a smaller rank goes first for every scarce resource. A later one may be preempted: it loses
nothing that cannot be computed again to the same bits."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as Listed

from logitless.engine.kv_cache.block_pool import n_blocks_for
from logitless.engine.kv_cache.context_shift import swap_out
from logitless.engine.kv_cache.manager import KVCacheManager
from logitless.engine.requests import Event
from logitless.engine.scheduler.batch_builder import Plan
from logitless.engine.scheduler.postprocess import failure
from logitless.engine.scheduler.waiting_queue import WaitingQueue
from logitless.engine.sequence import Sequence, Slot
from logitless.engine.stats import SchedulerStats


class RunningSet:
    """Sequences with a slot."""

    def __init__(self, kv: KVCacheManager, slots: Listed[Slot], queue: WaitingQueue, stats: SchedulerStats) -> None:
        self.seqs: list[Sequence] = []  # by rank
        self.parked: list[Sequence] = []  # sequences that gave up their slots until their clients read
        self.slots = slots
        self.n_background = 0  # sequences of training among them
        self.n_batch = 0  # sequences of batches among them
        self.step = 0  # number of the current step
        self.n_released = 0  # times that a sequence gave up its blocks
        # called before the blocks go
        self.on_release: Callable[[Sequence], None] = lambda seq: None
        # called before the slot goes
        self.on_park: Callable[[Sequence], None] = lambda seq: None
        self._kv = kv
        self._queue = queue
        self._stats = stats
        self._lost: list[tuple[Sequence, Event]] = []
        self._n_used = 0

    def add(self, seq: Sequence, slot: Slot) -> None:
        """Give a sequence its slot."""
        seq.slot, slot.sequence = slot, seq
        self.touch(slot)
        self.n_background += seq.request.background
        self.n_batch += seq.request.is_batch
        insort(self.seqs, seq, key=lambda seq: seq.rank)

    def of_step(self, *, background: bool) -> list[Sequence]:
        """The sequences that a step of users, or one of training, may compute."""
        if not self.n_background:
            return [] if background else self.seqs
        return [seq for seq in self.seqs if seq.request.background == background]

    def touch(self, slot: Slot) -> None:
        """Mark the slot as the one used last."""
        self._n_used += 1
        slot.last_used = self._n_used

    def last(self) -> Sequence:
        """The started sequence that is preempted first: one that waits for its client, if there is one."""
        return self._last_held() or next(seq for seq in reversed(self.seqs) if seq.started)

    def _last_held(self) -> Sequence | None:
        return next((seq for seq in reversed(self.seqs) if seq.started and seq.is_held), None)

    def preempt_held(self) -> bool:
        """Take the blocks of a sequence that waits for its client; False: none has any."""
        seq = self._last_held()
        if seq is not None:
            self.preempt(seq)
        return seq is not None

    def park(self, seq: Sequence) -> None:
        """Preempt a sequence that waits for its client, and take its slot, too."""
        try:
            self.on_park(seq)
        except (MemoryError, OSError) as error:
            self.lose(seq, error)
            return
        if seq.started:
            self.preempt(seq)
        if seq.done:  # it could not be swapped out
            return
        slot = seq.slot
        assert slot is not None
        self._remove(seq, slot)
        slot.sequence, seq.slot = None, None
        self.parked.append(seq)

    def take_returning(self) -> list[Sequence]:
        """The parked sequences whose clients read again; they want a slot."""
        if not self.parked:
            return []
        returning = [seq for seq in self.parked if not seq.is_held]
        self.parked = [seq for seq in self.parked if seq.is_held]
        return returning

    def reserve(self, plan: Plan) -> Plan:
        """Allocate KV blocks for (sequence, tokens), in order of rank; a sequence that finds none waits."""
        granted: dict[Sequence, int] = {}
        for seq, n in sorted(plan, key=lambda part: part[0].rank):
            if not seq.started:  # preempted by an earlier one just now
                continue
            missing = n_blocks_for(seq.n_computed + n) - len(seq.kv.blocks)
            while self._kv.n_available < missing and (last := self.last()) is not seq:
                self.preempt(last)
            granted[seq] = self._kv.allocate_slots(seq, n)
        return [(seq, granted[seq]) for seq, _ in plan if granted.get(seq)]

    def preempt(self, seq: Sequence) -> None:
        """Take a sequence's blocks. It keeps its slot and its sampler's state, and starts again later."""
        assert seq.slot is not None
        if not seq.kv.recomputable:
            try:
                swap_out(self._kv, seq)
            except (MemoryError, OSError) as error:
                self.lose(seq, error)
                return
        seq.n_lost = max(seq.n_lost, seq.n_computed)
        seq.resumed = True
        self._release(seq, seq.slot, pause=True)
        self._stats.preemptions += 1

    def lose(self, seq: Sequence, error: Exception) -> None:
        """End a sequence whose KV cells are lost; `take_lost` has its last event."""
        self.leave(seq)
        self._lost.append((seq, failure(error)))

    def take_lost(self) -> list[tuple[Sequence, Event]]:
        """Last events of the sequences lost since the last call."""
        events, self._lost = self._lost, []
        return events

    def leave(self, seq: Sequence) -> None:
        """End a sequence: it gives up its slot and its blocks."""
        slot = seq.slot
        if slot is None:
            self.parked.remove(seq)
            seq.done = True
            return
        if seq.started:
            seq.n_lost = max(seq.n_lost, seq.n_computed)
            self._release(seq, slot)
        seq.done = True
        if seq.n_generated:
            self._queue.left(seq.t_last - seq.t_start)
        self._remove(seq, slot)

    def _remove(self, seq: Sequence, slot: Slot) -> None:
        self.seqs.remove(seq)
        self.n_background -= seq.request.background
        self.n_batch -= seq.request.is_batch
        self.touch(slot)

    def _release(self, seq: Sequence, slot: Slot, *, pause: bool = False) -> None:
        self.on_release(seq)
        kv = seq.kv
        n_valid = seq.n_computed if kv.copy is None and not kv.n_dropped else kv.n_committed
        slot.cached, slot.choice, slot.salt = seq.tokens[:n_valid], seq.choice, seq.request.cache_salt
        (self._kv.preempt if pause else self._kv.free)(seq, slot)
        self.n_released += 1
        seq.started, seq.n_computed = False, 0

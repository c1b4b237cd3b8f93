"""Step planner: picks how many tokens of each running sequence the next batch computes."""

from __future__ import annotations

from collections.abc import Callable

from logitless.engine.batch import BLOCK_SIZE, bucket, mixed_batch_size
from logitless.engine.kv_cache.manager import KVCacheManager
from logitless.engine.scheduler.batch_builder import Plan, bucket_floor
from logitless.engine.scheduler.running_set import RunningSet
from logitless.engine.scheduler.step_budget import BatchRows, PrefillBudget, shares
from logitless.engine.sequence import Sequence
from logitless.engine.speculation.speculator import Speculator


class StepPlanner:
    """Decode tokens first, then prompts within the prefill budget, then rows of batches, then drafts in
    the room that is left."""

    def __init__(
        self,
        kv: KVCacheManager,
        running: RunningSet,
        budget: PrefillBudget,
        speculator: Callable[[], Speculator],
        n_ubatch: int,
    ) -> None:
        """`n_ubatch`: tokens of a batch at most. `speculator`: the drafters of the moment."""
        self._kv = kv
        self._running = running
        self._budget = budget
        self._speculator = speculator
        self._n_ubatch = n_ubatch
        self._batch_rows = BatchRows()
        self._size = 0  # rows of the last plan, rounded; 0: its duration says nothing about rows

    def plan(self, interleaved: Callable[[Sequence], bool], *, in_flight: bool, background: bool = False) -> Plan:
        """(sequence, tokens) of the next batch. A sequence whose grammar mask is pending delays no
        other.

        `interleaved`: the sequence's prompt is computed between steps; `in_flight`: such a prompt
        is being computed; `background`: the batch is of training, else of users."""
        plan, prompts, late = self._ready(interleaved, background)
        if not plan and not prompts and not in_flight:
            plan = late
        batches: list[Sequence] = []  # sequences of batches, for the room beside the streams
        if self._running.n_batch and any(seq.is_decoding for seq, _ in plan):
            batches = [seq for seq in (*(seq for seq, _ in plan), *prompts) if seq.request.is_batch]
            plan = [part for part in plan if not part[0].request.is_batch]
            prompts = [seq for seq in prompts if not seq.request.is_batch]
        self._size = 0 if prompts or background else bucket(len(plan))
        n_most = max(1, self._n_ubatch - bool(prompts))
        if len(plan) > n_most:
            # prompts, the longest-waiting first
            plan = sorted(plan, key=lambda part: part[0].served)[:n_most]
            for seq, _ in plan:
                seq.served = self._running.step
        n_streams = len(plan)
        if prompts:
            plan += self._prefill(plan, prompts)
        if batches:
            plan += self._beside(n_streams, batches)
        if any(len(seq.kv.blocks) * BLOCK_SIZE < seq.n_computed + n for seq, n in plan):
            plan = self._running.reserve(plan)
        return self._with_drafts(plan, beside=bool(batches))

    def _ready(self, interleaved: Callable[[Sequence], bool], background: bool) -> tuple[Plan, list[Sequence], Plan]:
        """(decoding sequences, prompts, sequences whose grammar mask is pending)."""
        plan: Plan = []
        late: Plan = []
        prompts: list[Sequence] = []
        for seq in self._running.of_step(background=background):
            if seq.started:
                n = seq.n_schedulable
                if not n:
                    pass  # its context is full, and finds no room to shift
                elif n > 1 and interleaved(seq):
                    pass
                elif seq.late and not seq.sampler.ready:
                    # with states it has all tokens of the step without the mask to compute
                    late.append((seq, 1))
                elif n > 1:
                    prompts.append(seq)
                else:
                    plan.append((seq, 1))
        return plan, prompts, late

    def _prefill(self, decoding: Plan, prompts: list[Sequence]) -> Plan:
        """Tokens of prompts beside the decoding sequences: chunked prefill."""
        full, n_decoding = bucket_floor(self._n_ubatch), len(decoding)
        total = full
        if any(seq.is_decoding for seq, _ in decoding):
            total = min(self._n_ubatch, self._budget.tokens(n_decoding))
        together = sum([seq.n_schedulable for seq in prompts if not seq.throttled])
        rest = max(total, min(full, n_decoding + together), n_decoding + 1) - n_decoding
        parts: list[int] = []
        for is_batch in (False, True):  # batches get the rest, and come last in `prompts`
            debts = [seq.n_schedulable for seq in prompts if seq.request.is_batch == is_batch]
            parts += shares(debts, rest - sum(parts))
        return [(seq, seq.chunk(n)) for seq, n in zip(prompts, parts, strict=True) if n]

    def _beside(self, n_streams: int, batches: list[Sequence]) -> Plan:
        """Tokens of batches in a step with so many streams, the longest-waiting first."""
        batches = sorted(batches, key=lambda seq: (seq.served, seq.n_computed))
        mixed = batches[0].n_schedulable > 1
        waiting = batches if mixed else [seq for seq in batches if seq.n_schedulable == 1]
        n_waiting = min(sum([seq.n_schedulable for seq in waiting]), self._n_ubatch - n_streams)
        busy = any(seq.started and seq.n_uncomputed > 1 and not seq.request.is_batch for seq in self._running.seqs)
        room = self._batch_rows.rows(n_streams, n_waiting, mixed=mixed, busy=busy) if n_waiting > 0 else 0
        plan: Plan = []
        for seq in waiting:
            if room <= 0:
                break
            plan.append((seq, seq.chunk(min(seq.n_schedulable, room))))
            seq.served = self._running.step
            room -= plan[-1][1]
        n_tokens = n_streams + sum([n for _, n in plan])
        self._size = 0 if busy else mixed_batch_size(n_tokens) if plan and mixed else bucket(n_tokens)
        return plan

    def observe(self, seconds: float) -> None:
        """Note the duration of the last plan's step. No interleaved prefill ran since the step before it."""
        if self._size:
            self._batch_rows.observe(self._size, seconds)

    def _with_drafts(self, plan: Plan, *, beside: bool) -> Plan:
        """The plan with draft tokens for sequences that compute all of theirs.

        Drafts take KV blocks from no sequence, and like prompts delay the others only within the
        budget. `beside`: rows of batches are beside streams, and have none."""
        proposals: list[tuple[Sequence, int]] = []
        room = min(self._n_ubatch, len(plan) + self._budget.most) - sum([n for _, n in plan])
        if self._kv.states is not None:
            room = min(room, self._kv.states.n_spare)
        for seq, n in plan:
            # The masks of a late one's draft would be late again; drafters do not know of discarded
            # tokens.
            drafts = seq.drafts is not None and not (beside and seq.request.is_batch)
            if drafts and not seq.late and not seq.kv.n_dropped:
                n_left = seq.slot.n_ctx - len(seq.tokens) if seq.slot is not None else 0
                if seq.n_remain >= 0:
                    n_left = min(n_left, seq.n_remain)
                proposals.append((seq, min(room, n_left - 1) if n == seq.n_uncomputed else 0))
        if not proposals:
            return plan
        self._speculator().propose(proposals, len(plan), room, self._kv.allocate_draft)
        return [(seq, n if seq.drafts is None else n + len(seq.drafts.tokens)) for seq, n in plan]

"""Step planner: picks how many tokens of each running sequence the next batch computes."""

from __future__ import annotations

from collections.abc import Callable

from logitless.engine.batch import BLOCK_SIZE
from logitless.engine.kv_cache.manager import KVCacheManager
from logitless.engine.scheduler.batch_builder import Plan, bucket_floor
from logitless.engine.scheduler.prefill_budget import PrefillBudget, shares
from logitless.engine.scheduler.running_set import RunningSet
from logitless.engine.sequence import Sequence
from logitless.engine.speculation.speculator import Speculator


class StepPlanner:
    """Decode tokens first, then prompts within the prefill budget, then drafts in the room that is
    left."""

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

    def plan(self, interleaved: Callable[[Sequence], bool], *, in_flight: bool, background: bool = False) -> Plan:
        """(sequence, tokens) of the next batch. A sequence whose grammar mask is pending delays no
        other.

        `interleaved`: the sequence's prompt is computed between steps; `in_flight`: such a prompt
        is being computed; `background`: the batch is of training, else of users.
        """
        plan, prompts, late = self._ready(interleaved, background)
        if not plan and not prompts and not in_flight:
            plan = late
        n_most = max(1, self._n_ubatch - bool(prompts))
        if len(plan) > n_most:
            # prompts, the longest-waiting first
            plan = sorted(plan, key=lambda part: part[0].served)[:n_most]
            for seq, _ in plan:
                seq.served = self._running.step
        if prompts:
            plan += self._prefill(plan, prompts)
        if any(len(seq.kv.blocks) * BLOCK_SIZE < seq.n_computed + n for seq, n in plan):
            plan = self._running.reserve(plan)
        return self._with_drafts(plan)

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
        left = max(total, min(full, n_decoding + together), n_decoding + 1) - n_decoding
        given = shares([seq.n_schedulable for seq in prompts], left)
        return [(seq, seq.chunk(n)) for seq, n in zip(prompts, given, strict=True) if n]

    def _with_drafts(self, plan: Plan) -> Plan:
        """The plan with draft tokens for sequences that compute all of theirs.

        Drafts take KV blocks from no sequence, and like prompts delay the others only within the
        budget.
        """
        wanted: list[tuple[Sequence, int]] = []
        room = min(self._n_ubatch, len(plan) + self._budget.most) - sum([n for _, n in plan])
        if self._kv.states is not None:
            room = min(room, self._kv.states.n_spare)
        for seq, n in plan:
            # The masks of a late one's draft would be late again; drafters do not know of discarded
            # tokens.
            if seq.drafts is not None and not seq.late and not seq.kv.n_dropped:
                n_left = seq.slot.n_ctx - len(seq.tokens) if seq.slot is not None else 0
                if seq.n_remain >= 0:
                    n_left = min(n_left, seq.n_remain)
                wanted.append((seq, min(room, n_left - 1) if n == seq.n_uncomputed else 0))
        if not wanted:
            return plan
        self._speculator().propose(wanted, len(plan), room, self._kv.allocate_slots)
        return [(seq, n if seq.drafts is None else n + len(seq.drafts.tokens)) for seq, n in plan]

"""Who runs when: admit → fill → step → commit, without threads, clocks of its own, or devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from logitless.engine.batch import PAGE, DeviceFailed, StepResult, UBatch
from logitless.engine.errors import ExceedsContext, InvalidRequest, NotSupported
from logitless.engine.kv_cache.block_pool import n_pages_for, pool_size
from logitless.engine.kv_cache.context_shift import Moves, Shift, is_full, kept_and_discarded, park
from logitless.engine.kv_cache.host_cache import HostCache, Store
from logitless.engine.kv_cache.manager import KvCache
from logitless.engine.kv_cache.sliding_window import NearStore
from logitless.engine.kv_cache.slot_files import CacheKind
from logitless.engine.requests import CompletionRequest, Event, Failed, Lora
from logitless.engine.runner.hidden_rows import HiddenRows
from logitless.engine.sampling.reasoning_budget import Thoughts
from logitless.engine.sampling.sampler import RowSampler, SamplingParams
from logitless.engine.sampling.stop_filter import Decoder
from logitless.engine.scheduler.admission import admit
from logitless.engine.scheduler.batch_builder import Plan, bucket_floor, fill, split
from logitless.engine.scheduler.interleaved_prefill import Interleaver
from logitless.engine.scheduler.postprocess import Committer, Stop, failure, finished
from logitless.engine.scheduler.prefill_budget import Pace, shares
from logitless.engine.scheduler.slot_claims import Claims
from logitless.engine.scheduler.waiting_queue import WaitingRoom
from logitless.engine.sequence import Sampler, Sequence, Slot
from logitless.engine.speculation.speculator import Speculator
from logitless.engine.stats import SchedulerStats
from logitless.models.adapters.adapter_bank import BASE, Choice
from logitless.models.tokenizer import StreamDecoder, Tokenizer

Events = list[tuple[Sequence, Event]]


class Engine(Protocol):
    """What the scheduler needs of a device."""

    @property
    def far(self) -> Store: ...

    @property
    def near(self) -> NearStore | None:
        """Of layers with a window, where these have pages of their own."""

    @property
    def cache_kind(self) -> CacheKind: ...

    @property
    def rerouted(self) -> Mapping[str, str]:
        """Ops that a device computes wrongly, and so another does: why."""

    def step(self, batch: UBatch, /) -> StepResult:
        """Run one batch; raises StepFailed."""

    @property
    def part_sizes(self) -> Mapping[int, float]:
        """Tokens that a run in parts may have, the most first, with seconds of its longest part; {}: there is none."""

    def run_in_parts(self, batch: UBatch, /) -> Iterator[float]:
        """Run one batch of which only what it leaves in the cache is wanted; steps may come between the parts. Tells
        after each how many seconds the next will take, 0 where that is not known."""

    @property
    def states(self) -> Store | None:
        """Rows of such, where layers keep them."""

    @property
    def hidden(self) -> HiddenRows | None:
        """Where it keeps what was said of tokens, if it guesses."""

    @property
    def moves_cells(self) -> bool:
        """Whether it can."""

    def move_cells(self, moves: Moves, /) -> None:
        """Between two steps: (from cell, to cell, positions further on), in order."""


class Scheduler:
    """Shares one device and one KV cache among requests.

    Sequences are ordered by priority, then by age. Whatever is scarce (pages, a device that fails), the first one goes
    on; a later one may have to wait, but it loses nothing that cannot be computed again to the same bits.
    """

    def __init__(
        self,
        engine: Engine,
        vocab: Tokenizer,
        *,
        n_slots: int,
        n_ctx: int,
        n_ubatch: int = 512,
        n_batch: int = 2048,
        unified: bool = True,
        n_ctx_slot: int = 0,
        slot_prompt_similarity: float = 0.1,
        prompt_chunk: int = 128,
        cache_ram: int | None = 0,
        cache_idle_slots: bool = True,
        context_shift: bool = False,
        queue_requests: int = -1,
        queue_tokens: int = -1,
        clock: Callable[[], float] = time.perf_counter,
        make_sampler: Callable[[SamplingParams, int], Sampler] | None = None,
        speculator: Speculator | None = None,
        resolve_lora: Callable[[Lora | None], Choice] = lambda _: BASE,
    ) -> None:
        """`n_ctx` counts the cells of all slots; one may use `n_ctx_slot` of them at most (0: all of its part).
        `prompt_chunk`: the most prompt tokens of a step while streams run. `cache_ram`: bytes of host memory for pages
        that the device has no room for; None: no limit. `queue_*`: what may wait for a seat; -1: no limit."""
        self.engine = engine
        self.vocab = vocab
        self.n_ubatch = min(n_ubatch, n_batch)
        self.pace = Pace(max(1, prompt_chunk))
        self.slot_prompt_similarity = slot_prompt_similarity
        self.clock = clock
        self.make_sampler = make_sampler or (lambda params, n_ctx: RowSampler(params, vocab, n_ctx))
        self.speculator = speculator or Speculator()
        self.resolve_lora = resolve_lora
        self.stats = SchedulerStats()
        host = HostCache(cache_ram) if cache_ram != 0 else None
        part = n_ctx if unified else n_ctx // n_slots
        n_pages = pool_size(n_ctx, n_slots, unified=unified)
        self.cache = KvCache(n_pages, engine.far, host, cache_idle_slots, n_slots, engine.states, engine.near)
        self.slots = [Slot(i, min(part, n_ctx_slot or part)) for i in range(n_slots)]
        self._committer = Committer(self.cache, vocab.eog_ids, self.stats, shifts=context_shift)
        self.context_shift = context_shift
        self._broken: Events = []  # of sequences whose cells were lost in this step
        self.claims = Claims(self.slots)
        self.queue = WaitingRoom(queue_requests, queue_tokens)  # without a seat
        self.running: list[Sequence] = []  # with a seat, by rank
        self._n_submitted = 0
        self._n_seated = 0
        self.n_released = 0  # times that a sequence gave up pages
        self.n_steps = 0
        self.interleaver = Interleaver(self)
        self._limit = self.n_ubatch  # tokens of a batch; smaller for a while after the device failed
        self.count()

    @property
    def idle(self) -> bool:
        return not (self.running or self.queue)

    @property
    def choices(self) -> set[Choice]:
        """Weights and adapters that sequences have, running and waiting."""
        return {seq.choice for seq in (*self.running, *self.queue)}

    def submit(self, request: CompletionRequest, client: str = "") -> Sequence:
        """Queue a client's request. Raises the RequestError for one that can never be served, or not now."""
        n_prompt = len(request.prompt)
        if n_prompt == 0:
            raise InvalidRequest("prompt: must not be empty")
        if not -1 <= request.id_slot < len(self.slots):
            raise InvalidRequest(f"id_slot: must be -1 or below {len(self.slots)}, not {request.id_slot}")
        n_ctx = self.slots[request.id_slot].n_ctx  # the same for all
        if n_prompt >= n_ctx:
            raise ExceedsContext(
                f"request ({n_prompt} tokens) exceeds the available context size ({n_ctx} tokens), try increasing it",
                n_prompt_tokens=n_prompt,
                n_ctx=n_ctx,
            )
        if request.sampling.conflict:
            raise InvalidRequest(f"samplers: {request.sampling.conflict}")
        if request.n_cache_reuse and not self.engine.moves_cells:
            windows = "; with sliding windows it takes --swa-full" if self.engine.near is not None else ""
            raise NotSupported(f"n_cache_reuse: this device cannot move cells of the cache{windows}")
        self.queue.check(request, client, len(self.slots) - len(self.running), len(self.slots))
        pieces = StreamDecoder(self.vocab, special=request.special, preserved=request.preserved)
        decoder = Decoder(pieces, request.stop, request.n_indent)
        choice = self.resolve_lora(request.lora)
        seq = Sequence(self._n_submitted, request, decoder, self.cache.prefixes.root_of(choice), choice, client)
        if request.reasoning is not None:
            seq.thoughts = Thoughts(request.reasoning, self.vocab.piece)
        self._n_submitted += 1
        self.queue.push(seq)
        self.count()
        return seq

    def cancel(self, seq: Sequence) -> None:
        """End a sequence without an event. Its slot and its pages are free at once."""
        if seq.done:
            return
        if seq.slot is None:
            self.queue.remove(seq)
            seq.done = True
        else:
            self._leave(seq)
            self.claims.settle()
        self.count()

    def touch(self, slot: Slot) -> None:
        """The slot has just been used."""
        self._n_seated += 1
        slot.last_used = self._n_seated

    def step(self) -> Events:
        """Admit, then run one batch and hand out what came of it. [] when idle."""
        if self.idle:
            return []
        events: Events = []
        self.n_steps += 1
        admit(self, events)
        if self.context_shift:
            shift_full(self)
        between = self.interleaver.turn(events)
        started = self.clock()
        plan: Plan = []
        try:
            plan = self._plan()
        except DeviceFailed as error:  # while a draft was made
            self.device_failed(error, events)
        streams = all(seq.owed == 1 for seq, _ in plan)
        while plan:  # once, unless the device fails: then the same work in smaller batches
            group, plan = split(plan, self._limit)
            began = self.clock()
            try:
                if self.cache.beside is not None:
                    self.cache.beside.prepare(group)
                batch = fill(group, self.engine.hidden)
                result = self.engine.step(batch)
            except DeviceFailed as error:
                self.device_failed(error, events)
                break
            except Exception as error:  # the device's, or that of one request's sampler: halving finds whose
                plan = self._step_failed(group, plan, error, events)
                continue
            now = self.clock()
            n_prompt = sum([n for seq, n in group if seq.owed > 1])
            self.pace.observe(n_prompt, len(batch.tokens), now - began, between=between)
            self.commit(group, result, now, events)
            self._limit = min(self.n_ubatch, 2 * self._limit)
        self.speculator.observe(self.clock() - started, counts=streams)
        events += self._broken
        self._broken = []
        self.claims.settle()
        self.count()
        return events

    def commit(self, group: Plan, result: StepResult, now: float, events: Events) -> None:
        """Hand out what came of a device run; who is done leaves."""
        for seq, end in self._committer.commit(group, result, now, events):
            events.append((seq, finished(seq, end) if isinstance(end, Stop) else end))
            self._leave(seq)

    def prepare_ahead(self, wanted: Callable[[], bool]) -> None:
        """Have at hand what steps will need, until somebody waits (`wanted`)."""
        self.cache.prepare_ahead(wanted)

    def lose(self, seq: Sequence, error: Exception) -> None:
        """Its cells are lost."""
        self._leave(seq)
        self._broken.append((seq, failure(error)))

    # -- fill

    def _plan(self) -> Plan:
        """One-token debts first, then prompts. Who waits for a mask holds up nobody else."""
        plan: Plan = []
        late: Plan = []
        prompts: list[Sequence] = []
        for seq in self.running:
            if seq.started:
                debt = self.debt(seq)
                if not debt:
                    pass  # its context is full, and finds no room to shift
                elif debt > 1 and self.interleaver.takes(seq):
                    pass
                elif seq.late and not seq.sampler.ready:
                    late.append((seq, 1))  # with states it owes all that the step without the mask was to pay
                elif debt > 1:
                    prompts.append(seq)
                else:
                    plan.append((seq, 1))
        if not plan and not prompts and self.interleaver.seq is None:
            plan = late
        n_most = max(1, self.n_ubatch - bool(prompts))
        if len(plan) > n_most:
            plan = sorted(plan, key=lambda part: part[0].served)[:n_most]  # those whose turn is longest ago
            for seq, _ in plan:
                seq.served = self.n_steps
        if prompts:
            full = bucket_floor(self.n_ubatch)
            total = min(self.n_ubatch, self.pace.tokens(len(plan))) if any(seq.flows for seq, _ in plan) else full
            together = sum([self.debt(seq) for seq in prompts if not seq.paced])
            left = max(total, min(full, len(plan) + together), len(plan) + 1) - len(plan)
            given = shares([self.debt(seq) for seq in prompts], left)
            plan += [(seq, n) for seq, n in zip(prompts, given, strict=True) if n]
        if any(len(seq.kv.blocks) * PAGE < seq.n_computed + n for seq, n in plan):
            plan = self.reserve(plan)
        return self._with_drafts(plan)

    def debt(self, seq: Sequence) -> int:
        """The tokens that it may pay now; those that would fill its context wait for the shift."""
        n_end = min(len(seq.tokens), seq.slot.n_ctx - 1) if self.context_shift and seq.slot else len(seq.tokens)
        return n_end - seq.n_computed

    def _with_drafts(self, plan: Plan) -> Plan:
        """The plan with drafts for those who pay all that they owe, as far as the batch and free pages have room.

        Drafts are guesses: they take pages from nobody, and like prompts they may hold up a stream only so much.
        """
        wanted: list[tuple[Sequence, int]] = []
        room = min(self.n_ubatch, len(plan) + self.pace.most) - sum([n for _, n in plan])
        if self.cache.states is not None:
            room = min(room, self.cache.states.n_spare)
        for seq, n in plan:
            # A late one's masks for a draft would be late again; drafters do not know of forgotten tokens.
            if seq.drafts is not None and not seq.late and not seq.kv.n_dropped:
                n_left = seq.slot.n_ctx - len(seq.tokens) if seq.slot is not None else 0
                if seq.n_remain >= 0:
                    n_left = min(n_left, seq.n_remain)
                wanted.append((seq, min(room, n_left - 1) if n == seq.owed else 0))
        if not wanted:
            return plan
        self.speculator.propose(wanted, len(plan), room, self.cache.grow)
        return [(seq, n if seq.drafts is None else n + len(seq.drafts.tokens)) for seq, n in plan]

    def reserve(self, plan: Plan) -> Plan:
        """Find pages for what is planned, in order of rank; what finds none waits."""
        granted: dict[Sequence, int] = {}
        for seq, n in sorted(plan, key=lambda part: part[0].rank):
            if not seq.started:  # preempted by an earlier one just now
                continue
            missing = n_pages_for(seq.n_computed + n) - len(seq.kv.blocks)
            while self.cache.n_available < missing and (last := self.last()) is not seq:
                self.preempt(last)
            granted[seq] = self.cache.grow(seq, n)
        return [(seq, granted[seq]) for seq, _ in plan if granted.get(seq)]

    def last(self) -> Sequence:
        return next(seq for seq in reversed(self.running) if seq.started)

    def preempt(self, seq: Sequence) -> None:
        """Take a sequence's pages. It keeps its seat, where its sampler may have state, and starts again later."""
        assert seq.slot is not None
        if not seq.kv.recomputable:
            try:
                park(self.cache, seq)
            except (MemoryError, OSError) as error:
                self.lose(seq, error)
                return
        seq.n_lost = max(seq.n_lost, seq.n_computed)
        seq.resumed = True
        self._release(seq, seq.slot, pause=True)
        self.stats.preemptions += 1

    # -- step

    def _step_failed(self, group: Plan, rest: Plan, error: Exception, events: Events) -> Plan:
        """Halve the batch, in order of rank. One that fails alone, with a single token, has failed."""
        self.stats.n_failed_steps += 1
        if self.cache.beside is not None:
            self.cache.beside.undo(group)
        if any(n > seq.owed for seq, n in group):
            return [(seq, min(n, seq.owed)) for seq, n in group] + rest  # without drafts first
        n_tokens = sum(n for _, n in group)
        if n_tokens == 1:
            seq = group[0][0]
            self._leave(seq)
            events.append((seq, failure(error)))
            return rest
        self._limit = n_tokens // 2
        return sorted(group + rest, key=lambda part: part[0].rank)

    def device_failed(self, error: DeviceFailed, events: Events) -> None:
        """What ran has failed, and what was cached is gone; who waits will be served by another device."""
        self.stats.n_failed_steps += 1
        self.stats.devices_lost += 1
        for seq in list(self.running):
            self._leave(seq)
            events.append((seq, Failed(500, "server_error", f"the device was lost: {error}")))
        self.cache.prefixes.clear()
        if self.cache.host is not None:
            self.cache.host.clear()
        for slot in self.slots:
            slot.cached = []

    # -- leave

    def _leave(self, seq: Sequence) -> None:
        """Give up the seat and the pages."""
        slot = seq.slot
        assert slot is not None
        if seq.started:
            seq.n_lost = max(seq.n_lost, seq.n_computed)
            self._release(seq, slot)
        seq.done = True
        if seq.n_generated:
            self.queue.left(seq.t_last - seq.t_start)
        self.running.remove(seq)
        self.touch(slot)

    def _release(self, seq: Sequence, slot: Slot, *, pause: bool = False) -> None:
        """Give up the pages; `pause`: until there is room again."""
        self.interleaver.forget(seq)
        n_valid = seq.n_computed if seq.kv.copy is None and not seq.kv.n_dropped else seq.kv.n_committed
        slot.cached, slot.choice = seq.tokens[:n_valid], seq.choice
        (self.cache.pause if pause else self.cache.release)(seq, slot)
        self.n_released += 1
        seq.started, seq.n_computed = False, 0

    def count(self) -> None:
        """Bring the gauges up to date."""
        stats, prefixes = self.stats, self.cache.prefixes
        stats.ops_rerouted = len(self.engine.rerouted)
        stats.requests_processing = len(self.running)
        stats.requests_deferred = len(self.queue)
        stats.kv_pages_free = len(prefixes.pages.free)
        stats.kv_pages_used = prefixes.pages.n_used
        stats.kv_pages_cached = len(prefixes.idle)
        if self.cache.host is not None:
            stats.host_bytes = self.cache.host.nbytes
            stats.host_pages_saved = self.cache.host.n_saved
            stats.host_pages_restored = self.cache.host.n_restored


def shift_full(scheduler: Scheduler) -> None:
    """Make room in the contexts that are full, in order of rank; who finds none waits until an earlier one leaves."""
    cache = scheduler.cache
    for seq in list(scheduler.running):
        if not (seq.started and is_full(seq)):
            continue
        shift = Shift(cache, seq, *kept_and_discarded(seq, add_bos=scheduler.vocab.add_bos))
        while cache.n_available < shift.n_missing:
            if shift.forget_others():
                continue
            last = scheduler.last()
            if last is seq:
                break
            scheduler.preempt(last)
        if cache.n_available < shift.n_missing:
            continue
        try:
            moves = shift.apply()
            seq.discard(shift.n_keep, shift.n_discard)
            scheduler.engine.move_cells(moves)
        except Exception as error:  # some of its cells have moved, others have not
            scheduler.lose(seq, error)

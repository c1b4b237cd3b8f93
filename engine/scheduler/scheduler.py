"""Scheduler (continuous batching): picks the tokens of each step, runs them as one batch, hands out the results.

A step admits requests, plans the batch, runs it and processes its output. The scheduler has no
threads, no clock of its own and no devices."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from logitless.engine.batch import DeviceFailed, StepResult
from logitless.engine.errors import InvalidRequest, exceeds_context
from logitless.engine.kv_cache.block_pool import pool_size
from logitless.engine.kv_cache.context_shift import ContextShift, is_full, kept_and_discarded
from logitless.engine.kv_cache.host_cache import HostCache
from logitless.engine.kv_cache.manager import KVCacheManager
from logitless.engine.kv_disk.disk_cache import DiskCache
from logitless.engine.requests import CompletionRequest, Event, Failed, Lora
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.sampling.reasoning_budget import ReasoningBudget
from logitless.engine.sampling.sampler import RowSampler
from logitless.engine.sampling.stop_filter import StopFilter
from logitless.engine.scheduler.admission import Admission
from logitless.engine.scheduler.batch_builder import Plan, build_batch, split
from logitless.engine.scheduler.interleaved_prefill import InterleavedPrefill
from logitless.engine.scheduler.media_encoding import MediaEncoding
from logitless.engine.scheduler.postprocess import OutputProcessor, Stop, failure, finished
from logitless.engine.scheduler.runner import Runner
from logitless.engine.scheduler.running_set import RunningSet
from logitless.engine.scheduler.slot_claims import Claims
from logitless.engine.scheduler.step_budget import PrefillBudget
from logitless.engine.scheduler.step_planner import StepPlanner
from logitless.engine.scheduler.waiting_queue import WaitingQueue
from logitless.engine.sequence import Sampler, Sequence, Slot
from logitless.engine.speculation.speculator import Speculator
from logitless.engine.stats import SchedulerStats
from logitless.models.adapters.stacked_lora import BASE, AdapterChoice
from logitless.models.media.prompt_media import PromptMedia, Tile
from logitless.models.tokenizer import StreamDecoder, Tokenizer

Events = list[tuple[Sequence, Event]]


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Sizes and policies of a scheduler."""

    n_slots: int  # sequences that run at once
    n_ctx: int  # KV cells of all slots
    n_ubatch: int = 512  # tokens of a device batch
    n_batch: int = 2048  # tokens of a step
    unified: bool = True  # slots share the cells; else each has n_ctx / n_slots
    n_ctx_slot: int = 0  # cells that one slot may use; 0: all of its part
    # share of a prompt that must match for a slot to be preferred
    slot_prompt_similarity: float = 0.1
    prompt_chunk: int = 128  # prompt tokens of a step beside decoding sequences, at most
    # bytes of host memory for KV blocks that the device has no room for; None: no limit
    cache_ram: int | None = 0
    disk: DiskCache | None = None  # for blocks that leave host memory
    cache_idle_slots: bool = True  # host memory keeps cached prefixes, too
    context_shift: bool = False
    continuous: bool = True  # requests join those that run; else they wait until those have ended
    queue_requests: int = -1  # requests that may wait for a slot; -1: no limit
    queue_tokens: int = -1  # prompt tokens that may wait; -1: no limit


class Scheduler:
    """Shares one device and one KV cache among requests.

    Sequences are ordered by priority, then by age. Whatever is scarce (KV blocks, a device that
    fails), the first one goes on. A later one may have to wait, but it loses nothing that cannot be
    computed again to the same bits."""

    def __init__(
        self,
        runner: Runner,
        vocab: Tokenizer,
        config: SchedulerConfig,
        *,
        clock: Callable[[], float] = time.perf_counter,
        make_sampler: Callable[[SamplingParams, int], Sampler] | None = None,
        speculator: Speculator | None = None,
        resolve_lora: Callable[[Lora | None], AdapterChoice] = lambda _: BASE,
    ) -> None:
        """`clock`: seconds. `make_sampler`: (parameters, context size) → sampler of one sequence."""
        self.engine = runner
        self.vocab = vocab
        self.config = config
        self.clock = clock
        self.make_sampler = make_sampler or (lambda params, n_ctx: RowSampler(params, vocab, n_ctx))
        self.speculator = speculator or Speculator()
        self.resolve_lora = resolve_lora
        self.n_ubatch = min(config.n_ubatch, config.n_batch)
        self.stats = SchedulerStats()
        self.cache = _kv_cache(runner, config)
        self.slots = _slots(config)
        self.claims = Claims(self.slots)
        self.queue = WaitingQueue(config.queue_requests, config.queue_tokens)
        self.prefill_budget = PrefillBudget(max(1, config.prompt_chunk))
        self._running = RunningSet(self.cache, self.slots, self.queue, self.stats)
        self.interleaved = InterleavedPrefill(
            runner, self.cache, self.prefill_budget, self._running, self.stats, clock, self._process
        )
        self._running.on_release = self.interleaved.forget
        self._running.on_park = self._move_sampler
        self._admission = Admission(
            self.queue,
            self._running,
            self.claims,
            self.cache,
            runner,
            self.stats,
            clock,
            self._prepare,
            self.interleaved.starts,
            config.slot_prompt_similarity,
            config.continuous,
            self.n_ubatch,
        )
        self._planner = StepPlanner(
            self.cache, self._running, self.prefill_budget, lambda: self.speculator, self.n_ubatch
        )
        self._media = MediaEncoding(runner, self.prefill_budget, self._running, clock, self.n_ubatch)
        self._output = OutputProcessor(self.cache, vocab.eog_ids, self.stats, shifts=config.context_shift)
        self._late: Events = []  # events between two steps
        self._of_background: Events = []  # events of training's sequences, not asked for yet
        self._n_submitted = 0
        # tokens of a batch; smaller for a while after the device failed
        self._limit = self.n_ubatch
        self.count()

    @property
    def running(self) -> list[Sequence]:
        """Sequences with a slot, by rank."""
        return self._running.seqs

    @property
    def idle(self) -> bool:
        return not (self.running or self.queue or self._running.parked or self._late)

    @property
    def choices(self) -> set[AdapterChoice]:
        """Weights and adapters of the sequences that run and wait."""
        return {seq.choice for seq in (*self.running, *self._running.parked, *self.queue)}

    def submit(self, request: CompletionRequest, client: str = "", choice: AdapterChoice | None = None) -> Sequence:
        """Queue a client's request. `choice`: its weights; None: those of its `lora`. Raises the
        RequestError for one that can never be served, or not now."""
        n_prompt = len(request.prompt)
        if n_prompt == 0:
            raise InvalidRequest("prompt: must not be empty")
        if not -1 <= request.id_slot < len(self.slots):
            raise InvalidRequest(f"id_slot: must be -1 or below {len(self.slots)}, not {request.id_slot}")
        n_ctx = self.slots[request.id_slot].n_ctx  # the same for all
        if n_prompt >= n_ctx:
            raise exceeds_context(n_prompt, n_ctx)
        if request.media is not None:
            self._check_media(request, request.media)
        if self.engine.start_token >= 0:
            if request.prompt_logprobs is not None:
                raise InvalidRequest("an encoder reads the prompt: its tokens have no log-probabilities")
            if request.n_cache_reuse:
                raise InvalidRequest("n_cache_reuse: an encoder reads the prompt, and the cache has it as a whole")
            request = request.behind_encoder(self.engine.start_token)
        if request.sampling.conflict:
            raise InvalidRequest(f"samplers: {request.sampling.conflict}")
        if request.n_cache_reuse and not self.engine.moves_cells:
            windows = "; with sliding windows it takes --swa-full" if self.engine.window_kv is not None else ""
            raise InvalidRequest(f"n_cache_reuse: this device cannot move cells of the cache{windows}")
        n_busy = sum(not (seq.is_held or seq.request.gives_way) for seq in self.running)
        self.queue.check(request, client, len(self.slots) - n_busy, len(self.slots))
        pieces = StreamDecoder(self.vocab, special=request.special, preserved=request.preserved)
        stops = (*request.stop, request.turn_end) if request.turn_end else request.stop
        stop_filter = StopFilter(
            pieces, stops, request.n_indent, keep_stop=request.stop_text, min_tokens=request.sampling.min_tokens
        )
        choice = self.resolve_lora(request.lora) if choice is None else choice
        root = self.cache.prefixes.root_of(choice, request.cache_salt, transient=request.background)
        seq = Sequence(self._n_submitted, request, stop_filter, root, choice, client)
        if request.reasoning is not None:
            seq.reasoning = ReasoningBudget(request.reasoning, self.vocab.piece)
        self._n_submitted += 1
        self.queue.push(seq)
        self.count()
        return seq

    def _check_media(self, request: CompletionRequest, media: PromptMedia) -> None:
        """Raise the RequestError for images and sounds that can never be computed."""
        encoder = self._media.encoder()
        if request.prompt_logprobs is not None:
            raise InvalidRequest("log-probabilities of a prompt with images or sounds are not supported")
        for tile in (span.tile for span in media.spans):
            most, kind, limit = encoder.n_rows, "a sound" if tile.is_audio else "an image", ""
            if not media.causal and not tile.is_audio:  # a step has all of its rows
                most, limit = min(most, self.n_ubatch), f"; --ubatch-size is {self.n_ubatch}"
            if tile.n_rows > most:
                raise InvalidRequest(f"{kind} has {tile.n_rows} tokens, at most {most} are possible{limit}")

    def cancel(self, seq: Sequence) -> None:
        """End a sequence without an event. Its slot and its blocks are free at once."""
        if seq.done:
            return
        if seq.slot is None and seq not in self._running.parked:
            self.queue.remove(seq)
            seq.done = True
        else:
            self._running.leave(seq)
            self.claims.settle()
        self.count()

    def touch(self, slot: Slot) -> None:
        """Mark the slot as the one used last."""
        self._running.touch(slot)

    def step(self) -> Events:
        """Admit, plan, run one batch and process its output: (sequence, event) in order; [] when idle."""
        return self._without_background(self._step())

    def step_background(self) -> Events:
        """The same of training's sequences, with their events since the last call."""
        self._late = self._without_background(self._step(background=True))
        events, self._of_background = self._of_background, []
        return events

    def _without_background(self, events: Events) -> Events:
        """The events of users; those of training's sequences are kept for `step_background`."""
        if not any(seq.request.background for seq, _ in events):
            return events
        self._of_background += [(seq, event) for seq, event in events if seq.request.background]
        return [(seq, event) for seq, event in events if not seq.request.background]

    def _step(self, *, background: bool = False) -> Events:
        if self.idle:
            return []
        events, self._late = self._late, []
        self._running.step += 1
        self._admission.admit(events)
        if self.config.context_shift:
            self._shift_contexts()
        interleaved, started, plan = False, 0.0, []
        try:
            if not background:
                interleaved = self._media.turn(events) | self.interleaved.turn(events)
            started = self.clock()
            in_flight = self.interleaved.seq is not None
            plan = self._planner.plan(self.interleaved.takes, in_flight=in_flight, background=background)
        except DeviceFailed as error:  # while a prompt's part was computed, or a draft was made
            self._device_failed(error, events)
        decodes_only = all(seq.n_uncomputed == 1 for seq, _ in plan)
        while plan:  # once, unless the device fails: then the same work in smaller batches
            plan = self._run(plan, events, interleaved=interleaved)
        if not background:
            self.speculator.observe(self.clock() - started, counts=decodes_only)
            if not interleaved:
                self._planner.observe(self.clock() - started)
        events += self._running.take_lost()
        self.claims.settle()
        self.count()
        return events

    def encode(self, tiles: list[Tile]) -> bool:
        """Encode images of an embedding (see MediaEncoding.encode). StepFailed, DeviceFailed: the device cannot."""
        try:
            return self._media.encode(tiles)
        except DeviceFailed as error:
            self._device_failed(error, self._late)
            raise

    def prepare_ahead(self, is_wanted: Callable[[], bool]) -> None:
        """Prepare plans and memory of later steps, until a request waits (`wanted`)."""
        self.cache.prepare_ahead(is_wanted)

    def _prepare(self, seq: Sequence, slot: Slot) -> None:
        """Make the sampler and the drafters of a sequence that gets a slot."""
        seq.sampler = self.make_sampler(seq.request.sampling, slot.n_ctx)
        seq.sampler.begin(seq.request.text_ids[seq.request.n_source :])
        if seq.request.media is None and not seq.request.background:
            seq.drafts = self.speculator.begin(seq)

    def _move_sampler(self, seq: Sequence) -> None:
        """Take what the device remembers of a sequence's sampler: it will have another slot."""
        if seq.sampler.stateful and not seq.sampler.on_host and seq.slot is not None:
            seq.sampler.move(self.engine.sampler_state(seq.slot.id))

    def _run(self, plan: Plan, events: Events, *, interleaved: bool) -> Plan:
        """Run as much of a plan as fits one batch; returns the rest, or the same work in smaller batches."""
        group, rest = split(plan, self._limit)
        began = self.clock()
        try:
            if self.cache.auxiliary is not None:
                self.cache.auxiliary.prepare(group)
            batch = build_batch(group, self.engine.hidden, self.engine.media)
            result = self.engine.step(batch)
        except DeviceFailed as error:
            self._device_failed(error, events)
            return []
        except Exception as error:
            # the device's, or that of one request's sampler: halving finds whose
            return self._step_failed(group, rest, error, events)
        now = self.clock()
        n_prompt = sum([n for seq, n in group if seq.n_uncomputed > 1])
        of_batch = n_prompt and any(seq.n_uncomputed > 1 and seq.request.is_batch for seq, _ in group)
        if not (of_batch or group[0][0].request.background):
            self.prefill_budget.observe(n_prompt, sum([n for _, n in group]), now - began, between=interleaved)
        self._process(group, result, now, events)
        self._limit = min(self.n_ubatch, 2 * self._limit)
        return rest

    def _process(self, group: Plan, result: StepResult, now: float, events: Events) -> None:
        """Hand out the output of a batch; sequences that are done leave."""
        for seq, end in self._output.process(group, result, now, events):
            events.append((seq, finished(seq, end) if isinstance(end, Stop) else end))
            self._running.leave(seq)

    def _step_failed(self, group: Plan, rest: Plan, error: Exception, events: Events) -> Plan:
        """Halve the batch, in order of rank. A sequence that fails alone, with a single token, has failed."""
        self.stats.n_failed_steps += 1
        if self.cache.auxiliary is not None:
            self.cache.auxiliary.undo(group)
        if any(n > seq.n_uncomputed for seq, n in group):
            # without drafts first
            return [(seq, min(n, seq.n_uncomputed)) for seq, n in group] + rest
        n_tokens = sum(n for _, n in group)
        seq, n = group[0]
        if len(group) == 1 and n <= seq.chunk(1):  # a token, or what is computed whole
            self._running.leave(seq)
            events.append((seq, failure(error)))
            return rest
        self._limit = n_tokens // 2
        return sorted(group + rest, key=lambda part: part[0].rank)

    def _device_failed(self, error: DeviceFailed, events: Events) -> None:
        """End all sequences that have begun; the cache is lost. The others are served by another device."""
        self.stats.n_failed_steps += 1
        self.stats.devices_lost += 1
        for seq in (seq for seq in list(self.queue) if seq.resumed):
            self.queue.remove(seq)
            self._running.parked.append(seq)
        for seq in (*self.running, *self._running.parked):
            self._running.leave(seq)
            events.append((seq, Failed(500, "server_error", f"the device was lost: {error}")))
        self.forget_cache()

    def forget_cache(self) -> None:
        """Forget the content of all KV blocks, which a device has lost. No sequence runs."""
        self.cache.clear()
        for slot in self.slots:
            slot.cached = []

    def _shift_contexts(self) -> None:
        """Make room in full contexts, in order of rank; a sequence that finds none waits for an earlier one's end."""
        cache = self.cache
        for seq in list(self.running):
            if not (seq.started and is_full(seq)):
                continue
            shift = ContextShift(cache, seq, *kept_and_discarded(seq, add_bos=self.vocab.add_bos))
            while cache.n_available < shift.n_missing:
                if shift.forget_others():
                    continue
                last = self._running.last()
                if last is seq:
                    break
                self._running.preempt(last)
            if cache.n_available < shift.n_missing:
                continue
            try:
                moves = shift.apply()
                seq.discard(shift.n_keep, shift.n_discard)
                self.engine.move_cells(moves)
            except Exception as error:  # some of its cells have moved, others have not
                self._running.lose(seq, error)

    def count(self) -> None:
        """Bring the gauges up to date."""
        stats, prefixes = self.stats, self.cache.prefixes
        stats.ops_rerouted, stats.experts = len(self.engine.rerouted), self.engine.expert_memory.use
        stats.requests_processing = len(self.running)
        stats.requests_deferred = len(self.queue)
        stats.kv_pages_free = len(prefixes.pool.free)
        stats.kv_pages_used = prefixes.pool.n_used
        stats.kv_pages_cached = len(prefixes.idle)
        if self.cache.host is not None:
            stats.host_bytes = self.cache.host.nbytes
            stats.host_pages_saved = self.cache.host.n_saved
            stats.host_pages_restored = self.cache.host.n_restored
            if (disk := self.cache.host.disk) is not None:
                stats.disk_bytes, stats.disk_pages_saved = disk.nbytes, disk.n_saved
                stats.disk_pages_restored, stats.disk_bytes_read = disk.n_restored, disk.nbytes_read


def _kv_cache(runner: Runner, config: SchedulerConfig) -> KVCacheManager:
    has_host = config.cache_ram != 0 or config.disk is not None
    host = HostCache(config.cache_ram, config.disk) if has_host else None
    n_blocks = pool_size(config.n_ctx, config.n_slots, unified=config.unified)
    return KVCacheManager(
        n_blocks, runner.full_kv, host, config.cache_idle_slots, config.n_slots, runner.states, runner.window_kv
    )


def _slots(config: SchedulerConfig) -> list[Slot]:
    part = config.n_ctx if config.unified else config.n_ctx // config.n_slots
    n_ctx = min(part, config.n_ctx_slot or part)
    return [Slot(i, n_ctx, shifts=config.context_shift) for i in range(config.n_slots)]

"""Random operations on a scheduler with tiny pools: each request gets its result of a run alone."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from logitless.engine.batch import BLOCK_SIZE, UBatch
from logitless.engine.errors import Unavailable
from logitless.engine.kv_cache.slot_actions import erase, fork, install, snapshot
from logitless.engine.kv_disk.disk_cache import DiskCache
from logitless.engine.requests import CompletionRequest, Failed
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.sequence import Sequence
from logitless.engine.speculation.settings import NGRAM_KINDS, SpeculationParams
from tests.helpers.mtp_fakes import GuessingEngine, let_guess
from tests.helpers.scheduler_checks import check_cells, check_pages
from tests.helpers.scheduler_fakes import N_VOCAB, POISON, Bench, FakeEngine, oracle

STEMS = [[1 + (7 * i + stem) % (N_VOCAB - 1) for i in range(70)] for stem in range(3)]
STOPS = ["", "\n", "ab", "é", "fgh", "a b", "bc\n  x"]


@st.composite
def speculations(draw: st.DrawFn) -> tuple[SpeculationParams, int, int]:
    """Drafters, and of the client's draft (0: none) how many tokens are right and what comes in place of the next."""
    kinds = tuple(draw(st.lists(st.sampled_from([*NGRAM_KINDS, "draft-mtp"]), max_size=2, unique=True)))
    params = SpeculationParams(kinds, n_max=draw(st.sampled_from([None, 1, 7])), n_min=draw(st.sampled_from([0, 0, 2])))
    return params, draw(st.sampled_from([0, 0, 1, 3, 30])), draw(st.sampled_from([0, 1, N_VOCAB - 1, POISON]))


def progress(seq: Sequence) -> tuple[int, int]:
    return seq.n_computed + seq.kv.n_dropped, seq.n_generated


class Life(RuleBasedStateMachine):
    @initialize(
        n_slots=st.integers(1, 5),
        n_ctx=st.integers(20, 150),
        n_ubatch=st.sampled_from([1, 2, 3, 7, 16, 33, 512]),
        prompt_chunk=st.sampled_from([1, 5, 16, 128]),
        unified=st.booleans(),
        shift=st.booleans(),
        host=st.tuples(st.sampled_from([0, 256 * 3, 256 * 20, None]), st.booleans(), st.booleans()),
        checkpoints=st.sampled_from([None, None, 0, 1, 4]),
        window=st.sampled_from([0, 0, 1, 2, 16, 17, 18, 40]),
        wrong=st.sampled_from([None, None, 0, 3]),
        parts=st.sampled_from([None, 0.0, 1.0]),
    )
    def begin(
        self,
        n_slots: int,
        n_ctx: int,
        n_ubatch: int,
        prompt_chunk: int,
        unified: bool,
        shift: bool,
        host: tuple[int | None, bool, bool],
        checkpoints: int | None,
        window: int,
        wrong: int | None,
        parts: float | None,
    ) -> None:
        """`checkpoints`: of a model whose layers keep states, or some of whose layers see a `window`: such forget no
        tokens. `wrong`: it has a block that guesses, wrongly every so many-th time. `parts`: prompts have steps of
        their own, whose parts take so many seconds."""
        self.folder = tempfile.TemporaryDirectory()
        self.disk = DiskCache(Path(self.folder.name), 1 << 20, lambda _: b"s" * 16) if host[1] and host[2] else None
        if self.disk is not None:
            self.disk.settle(30.0)
        has_states = checkpoints is not None and not window
        self.forgets = checkpoints is None
        self.shift = shift = shift and self.forgets
        if not unified:
            n_ctx = max(n_ctx, 20 * n_slots)
        self.bench = Bench(
            n_slots=n_slots,
            n_ctx=n_ctx,
            n_ubatch=n_ubatch,
            prompt_chunk=prompt_chunk,
            unified=unified,
            context_shift=shift,
            cache_ram=host[0],
            cache_idle_slots=host[1],
            disk=self.disk,
            n_states=1 + n_slots * (2 + (checkpoints or 0)) if has_states else 0,
            window=(window, checkpoints or 0) if not self.forgets and window else None,
            engine=FakeEngine if wrong is None else GuessingEngine,
        )
        if wrong is not None:
            let_guess(self.bench, wrong)
        if parts is not None and wrong is None and not has_states:
            self.bench.engine.part_sizes = {n: parts for n in (23, 6) if n <= n_ubatch}
            self.bench.engine.part_seconds = parts
        self.bench.engine.moves_cells = self.forgets
        self.n_ctx = self.bench.scheduler.slots[0].n_ctx
        self.cancelled: set[Sequence] = set()
        self.too_large = 1 << 30
        self.saved: Any = None
        self.bench.engine.fails = self.fails

    def fails(self, batch: UBatch) -> bool:
        return POISON in batch.tokens or len(batch.tokens) > self.too_large

    @precondition(lambda self: len(self.bench.answers) < 14)
    @rule(
        stem=st.integers(0, 2),
        n_stem=st.one_of(st.integers(0, 70), st.sampled_from([15, 16, 17, 31, 32, 33, 63, 70])),
        rest=st.lists(st.integers(1, N_VOCAB - 1), max_size=20),
        n_predict=st.one_of(st.integers(-1, 40), st.just(-1)),
        stop=st.lists(st.sampled_from(STOPS), max_size=2),
        pin=st.one_of(st.just(-1), st.integers(-1, 4)),
        flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
        poison=st.sampled_from([False] * 9 + [True]),
        twice=st.booleans(),
        speculation=speculations(),
        whose=st.tuples(st.sampled_from(["", "a", "b"]), st.sampled_from([0, 0, 0, -1, 2])),
        keep=st.tuples(st.integers(-1, 80), st.integers(0, 90)),
        cut=st.tuples(st.sampled_from([0, 0, 0, 3, 20]), st.sampled_from([0, 0, 1, 8])),
    )
    def submit(
        self,
        stem: int,
        n_stem: int,
        rest: list[int],
        n_predict: int,
        stop: list[str],
        pin: int,
        flags: tuple[bool, bool, bool],
        poison: bool,
        twice: bool,
        speculation: tuple[SpeculationParams, int, int],
        whose: tuple[str, int],
        keep: tuple[int, int],
        cut: tuple[int, int],
    ) -> None:
        head = STEMS[stem][:n_stem]
        del head[7 : 7 + cut[0]]
        prompt = (head + rest + [POISON] * poison)[-(self.n_ctx - 1) :] or [1]
        ignore_eos, cache_prompt, return_progress = flags
        if self.shift:  # then nothing else ends a request
            n_predict = 60 if n_predict < 0 else 3 * n_predict
        params, n_right, wrong = speculation
        if n_right:  # the client knows what comes, but for one token
            answer = oracle(CompletionRequest(tuple(prompt), n_predict=n_predict, ignore_eos=ignore_eos), self.n_ctx)
            draft = [*answer[0][:n_right], wrong, *answer[0][n_right + 1 :]]
            params = replace(params, draft=tuple(draft))
        for _ in range(1 + twice):
            self.bench.submit(
                prompt,
                whose[0],
                priority=whose[1],
                n_keep=keep[0],
                n_discard=keep[1],
                n_cache_reuse=cut[1] if self.forgets else 0,
                n_predict=n_predict,
                stop=tuple(text for text in stop if text),
                id_slot=pin if pin < len(self.bench.scheduler.slots) else -1,
                ignore_eos=ignore_eos,
                cache_prompt=cache_prompt,
                return_progress=return_progress,
                prompt_logprobs=2 if n_stem % 5 == 0 else None,
                speculation=params,
                sampling=SamplingParams(n_probs=len(rest) % 3),
            )

    @rule(n=st.integers(1, 12))
    def step(self, n: int) -> None:
        for _ in range(n):
            self.one_step()

    def one_step(self) -> None:
        scheduler = self.bench.scheduler
        streams = [  # those that need no page; others may have to wait for an older one's
            (seq, seq.n_generated)
            for seq in scheduler.running
            if seq.started
            and not seq.is_held
            and seq.n_uncomputed == 1
            and seq.n_computed < len(seq.kv.blocks) * BLOCK_SIZE
            if len(seq.tokens) < self.n_ctx  # a full one may have to wait for room to shift
        ]
        n_preempted, n_failed = scheduler.stats.preemptions, scheduler.stats.n_failed_steps
        oldest = next((seq for seq in scheduler.running if not seq.is_held), None)
        waiting = (*scheduler.queue, *scheduler._running.parked)
        if oldest is not None and any(seq.rank < oldest.rank for seq in waiting if not seq.is_held):
            oldest = None  # an older one may get the slot that it waits for, and run first
        before = progress(oldest) if oldest else (0, 0)
        interleaver = scheduler.interleaved
        scheduler.prefill_budget.crowded = True
        apart = interleaver.seq is not None
        self.bench.step()
        apart = apart or interleaver.seq is not None  # then a prompt's turn may take several steps
        fits = len(scheduler.slots) < scheduler.n_ubatch
        if fits and scheduler.stats.preemptions == n_preempted:
            for seq, n in streams:
                assert seq.done or seq.n_generated > n, "a stream stood still"
        if oldest is not None and fits and not apart and scheduler.stats.n_failed_steps == n_failed:
            assert oldest.done or progress(oldest) > before, "the oldest stood still"

    @rule(n=st.sampled_from([1, 2, 5, 1 << 30]))
    def device_shrinks(self, n: int) -> None:
        self.too_large = n

    @precondition(lambda self: self.bench.answers)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(list(self.bench.answers)[-6:]))
        if not seq.done:
            self.cancelled.add(seq)
        self.bench.scheduler.cancel(seq)
        self.bench.scheduler.cancel(seq)
        assert seq.done
        assert not seq.kv.blocks

    @precondition(lambda self: self.bench.answers)
    @rule(data=st.data(), is_held=st.booleans())
    def hold(self, data: st.DataObject, is_held: bool) -> None:
        data.draw(st.sampled_from(list(self.bench.answers)[-6:])).hold(is_held=is_held)

    @rule(n=st.integers(0, 9))
    def prepare_ahead(self, n: int) -> None:
        looks = iter(range(n))
        self.bench.scheduler.prepare_ahead(lambda: next(looks, None) is None)

    @rule(id=st.integers(0, 4))
    def erase(self, id: int) -> None:
        slots = self.bench.scheduler.slots
        if id < len(slots) and not slots[id].is_processing:
            erase(self.bench.scheduler, id)
            assert erase(self.bench.scheduler, id) == 0

    @precondition(lambda self: self.bench.answers)
    @rule(id=st.integers(0, 4))
    def save(self, id: int) -> None:
        slots = self.bench.scheduler.slots
        if id < len(slots) and not slots[id].is_processing:
            state = snapshot(self.bench.scheduler, id)
            assert state.tokens == slots[id].cached[: len(state.tokens)]
            self.saved = state

    @precondition(lambda self: self.saved is not None)
    @rule(id=st.integers(0, 4))
    def restore(self, id: int) -> None:
        slots = self.bench.scheduler.slots
        if id >= len(slots) or slots[id].is_processing:
            return
        before = list(slots[id].cached)
        try:
            install(self.bench.scheduler, id, self.saved)
            assert slots[id].cached == self.saved.tokens
            assert snapshot(self.bench.scheduler, id).tokens == self.saved.tokens
        except Unavailable:
            assert slots[id].cached == before
            assert any(slot.is_processing for slot in slots)
        check_pages(self.bench.scheduler)
        check_cells(self.bench.scheduler, self.bench.engine)

    @rule(id=st.integers(0, 4), to=st.integers(0, 4))
    def fork(self, id: int, to: int) -> None:
        slots = self.bench.scheduler.slots
        if max(id, to) < len(slots) and not slots[id].is_processing and not slots[to].is_processing:
            n = fork(self.bench.scheduler, id, to)
            assert n == len(slots[id].cached)

    @invariant()
    def cells_suffice(self) -> None:
        for seq in self.bench.scheduler.running:
            assert len(seq.kv.blocks) * BLOCK_SIZE < self.n_ctx + BLOCK_SIZE

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        n_most = 20_000
        for is_held in (True, False):  # whose client does not read delays no other
            while not all(seq.done or (is_held and seq.is_held) for seq in self.bench.answers):
                self.one_step()
                n_most -= 1
                assert n_most, "does not end"
            for seq in self.bench.answers:
                seq.hold(is_held=False)
        assert self.bench.scheduler.idle
        for seq, answer in self.bench.answers.items():
            if seq in self.cancelled:
                continue
            if POISON in seq.request.prompt:
                assert isinstance(answer.events[-1], Failed)
                assert answer.events[-1].code == 500
                continue
            if seq.kv.shifted:  # others never see its cells: they are compared
                assert seq.request.n_cache_reuse
            else:
                assert answer.outcome() == oracle(seq.request, self.n_ctx, shift=self.shift)
            end = answer.finished
            if seq.request.sampling.n_probs:
                assert [token.prob and token.prob.value for token in answer.tokens] == [-float(id) for id in answer.ids]
            assert end.n_predicted == len(answer.ids)
            if not end.truncated or not self.shift:
                assert end.n_in_cache == end.n_prompt + max(0, end.n_predicted - 1)
            assert end.n_in_cache < self.n_ctx
            assert end.n_cached < end.n_prompt
            if seq.request.prompt_logprobs is not None:
                known = [prob and (prob.id, prob.value, len(prob.top)) for prob in end.prompt_probs]
                assert known == [None, *((token, -token, 2) for token in seq.request.prompt[1:])]
        pool = self.bench.scheduler.cache.pool
        for slot in self.bench.scheduler.slots:
            erase(self.bench.scheduler, slot.id)
        assert pool.n_used == 0, "a block leaked"
        assert not self.bench.scheduler.cache.host or not len(self.bench.scheduler.cache.host)
        if self.disk is not None:
            self.disk.close(30.0)
        self.folder.cleanup()


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=50, stateful_step_count=30, suppress_health_check=list(HealthCheck))

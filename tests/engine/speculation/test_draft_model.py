"""Draft model book-keeping, on two fake devices of which one drafts for the other."""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from logitless.engine.batch import StepFailed, StepResult, UBatch
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.sampling.sampler import RowSampler
from logitless.engine.speculation.draft_model import N_ROWS, ModelDrafter
from logitless.engine.speculation.settings import SpeculationParams
from logitless.engine.speculation.speculator import Speculator
from logitless.graph.ops.sampling import samplers as s
from tests.helpers.scheduler_fakes import EOG, N_VOCAB, SPECULATION, Bench, FakeEngine, FakeStates, plain

MODEL = SpeculationParams(("draft-simple",), n_max=4)


class DraftEngine(FakeEngine):
    """The target's twin, but for every `wrong`-th guess; it checks its cells and says how sure it is."""

    wrong = 0
    broken = False

    def step(self, batch: UBatch) -> StepResult:
        if self.broken:
            raise StepFailed("out of memory")
        result = super().step(batch)
        assert all(hasattr(row, "draws") for row in batch.rows)
        if self.wrong:
            for j in range(len(result.ids)):
                if zlib.crc32(bytes([j]), batch.pos[batch.out[j]]) % self.wrong == 0:
                    result.ids[j] = 1 + result.ids[j] % (N_VOCAB - 1)
        if batch.n_probs:
            sure = np.array([0.9 if batch.pos[i] % 3 else 0.1 for i in batch.out], np.float32)
            ids = np.zeros((len(batch.out), 1), np.int32)
            return StepResult(result.ids, probs=(np.ones(len(batch.out), np.int32), sure, ids, ids.astype(np.float32)))
        return result


class Twins(Bench):
    """A scheduler whose speculator has the draft engine, with pages of its own."""

    has_states = False

    def __init__(self, n_blocks: int = 64, n_vocab: int = N_VOCAB, n_slots: int = 4, **options: Any) -> None:
        super().__init__(n_slots=n_slots, **options)
        self.draft = DraftEngine(n_blocks, FakeStates(1 + n_slots * N_ROWS) if self.has_states else None)
        self.drafter = ModelDrafter(
            self.draft, n_blocks=n_blocks, n_vocab=n_vocab, n_ubatch=32, eog_ids=[EOG], has_states=self.has_states
        )
        self.scheduler.speculator = Speculator(SPECULATION, {"draft-simple": self.drafter})
        make = self.scheduler.make_sampler

        def with_rows(params: SamplingParams, n_ctx: int) -> Any:
            sampler = make(params, n_ctx)
            rows = RowSampler(SamplingParams(seed=1, logit_bias=((3, 1.0), (N_VOCAB - 1, 1.0))), NO_VOCAB, 64)
            sampler.feeds_after = rows.feeds_after
            return sampler

        self.scheduler.make_sampler = with_rows


NO_VOCAB: Any = SimpleNamespace(suppressed_ids=())


@pytest.fixture(autouse=True, params=[False, True], ids=["pages", "states"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the draft model keeps of a sequence."""
    monkeypatch.setattr(Twins, "has_states", request.param)


@pytest.mark.parametrize("wrong", [0, 2, 5])
def test_a_draft_model_guesses_for_several_at_once(wrong: int) -> None:
    bench = Twins()
    bench.draft.wrong = wrong
    prompts = [(1, 2, 3), (5, 6), tuple([7, 8] * 20), (4,)]
    seqs = [bench.submit(p, n_predict=40, ignore_eos=True, speculation=MODEL) for p in prompts]
    bench.drain()
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert bench.answers[seq].ids == plain(prompt, 40)
    stats = bench.scheduler.stats
    assert (stats.draft_tokens_accepted == stats.draft_tokens) == (wrong == 0)
    assert stats.draft_tokens_accepted > 20
    assert max(len(batch.out) for batch in bench.draft.batches) == 4  # one row for each
    if not wrong:
        assert len(bench.engine.batches) < 4 + 40 / 4
        assert all(len(batch.rows) == len(batch.out) for batch in bench.draft.batches)


def test_it_keeps_what_sequences_in_a_slot_have_in_common() -> None:
    bench = Twins(n_slots=1)
    prompt = (3, 4, 5) * 8
    bench.run(prompt, n_predict=4, ignore_eos=True, speculation=MODEL)
    n = len(bench.draft.batches)
    bench.run((*prompt, 9, 9), n_predict=4, ignore_eos=True, speculation=MODEL)
    assert bench.draft.batches[n].pos[0] == len(prompt)
    n = len(bench.draft.batches)
    bench.run((*prompt[:20], 9, 9), n_predict=4, ignore_eos=True, speculation=MODEL)
    assert bench.draft.batches[n].pos[0] == (len(prompt) - 8 if bench.has_states else 20)  # where there is a state


def test_a_chat_goes_on_from_the_last_answer() -> None:
    bench = Twins(n_slots=1)
    answer = bench.run((3, 4, 5) * 8, n_predict=9, ignore_eos=True, speculation=MODEL).ids
    n = len(bench.draft.batches)
    bench.run(((3, 4, 5) * 8 + tuple(answer) + (9, 9)), n_predict=4, ignore_eos=True, speculation=MODEL)
    assert bench.draft.batches[n].pos[0] >= 24 + 9 - 5


def test_a_long_prompt_is_computed_piecemeal() -> None:
    bench = Twins(n_ubatch=512)
    prompt = tuple(1 + i % 9 for i in range(100))
    answer = bench.run(prompt, n_predict=30, ignore_eos=True, speculation=MODEL)
    assert answer.ids == plain(prompt, 30)
    assert max(len(batch.tokens) for batch in bench.draft.batches) == 32
    assert answer.finished.timings.draft_n_accepted > 10


def test_too_few_pages_mean_fewer_drafts_and_nothing_worse() -> None:
    bench = Twins(n_blocks=3, n_slots=4)
    seqs = [bench.submit((i, i + 1, 2), n_predict=50, ignore_eos=True, speculation=MODEL) for i in (1, 2, 3, 4)]
    bench.drain()
    for seq in seqs:
        assert bench.answers[seq].ids == plain(seq.request.prompt, 50)
    used = [page for cache in bench.drafter._caches.values() for page in cache.table]
    assert sorted(used + bench.drafter._free) == [0, 1, 2]
    again = bench.run((1, 1, 1), n_predict=9, ignore_eos=True, speculation=MODEL)
    assert again.finished.timings.draft_n > 0  # idle slots give their pages up


def test_tokens_beyond_its_vocabulary_are_not_fed_to_it() -> None:
    bench = Twins(n_vocab=9)
    for prompt in ((10, 2), (2, 3)):
        answer = bench.run(prompt, n_predict=30, ignore_eos=True, speculation=MODEL)
        assert answer.ids == plain(prompt, 30)
    assert all(token < 9 for batch in bench.draft.batches for token in batch.tokens)
    assert all(id < 9 for batch in bench.draft.batches for row in batch.rows if row for id in row.ids)


def test_an_unsure_draft_is_short() -> None:
    params = SpeculationParams(("draft-simple",), n_max=9, p_min=0.5)
    bench = Twins()
    answer = bench.run((1, 2, 3), n_predict=30, ignore_eos=True, speculation=params)
    assert answer.ids == plain((1, 2, 3), 30)
    assert 0 < answer.finished.timings.draft_n < 25
    assert max(len(batch.out) for batch in bench.engine.batches) == 3  # every third position is unsure


def test_a_broken_draft_model_leaves_the_target_alone() -> None:
    bench = Twins()
    bench.draft.broken = True
    answer = bench.run((1, 2, 3), n_predict=20, ignore_eos=True, speculation=MODEL)
    assert answer.ids == plain((1, 2, 3), 20)
    assert answer.finished.timings.draft_n == 0
    bench.draft.broken = False
    assert bench.run((1, 2, 3), n_predict=20, ignore_eos=True, speculation=MODEL).finished.timings.draft_n > 0


def test_its_random_numbers_are_those_that_the_target_will_use() -> None:
    """A drafted token that used no uniform leaves it to the next one, on both sides."""
    bench = Twins()
    seen: list[tuple[int, ...]] = []
    step = bench.draft.step

    def spy(batch: UBatch) -> StepResult:
        result = step(batch)
        seen.extend(row.draws for row in batch.rows if row is not None)
        flagged = result.ids | np.where(np.arange(len(result.ids)) == 0, s.NO_DIST, 0).astype(np.uint32)
        return StepResult(flagged if len(seen) == 2 else result.ids)

    bench.draft.step = spy  # type: ignore[method-assign]
    bench.run((5, 6), n_predict=5, ignore_eos=True, speculation=MODEL)
    assert EOG not in plain((5, 6), 5)
    expected = RowSampler(SamplingParams(seed=1), NO_VOCAB, 64).draft_feeds([1, 1, 1])
    assert [draws[:2] for draws in seen[:4]] == [expected[i].draws[:2] for i in (0, 1, 1, 2)]

"""Grammar masks: lazy grammars, drafts, late workers, and the scheduler's waiting."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from logitless.engine.batch import StepResult, UBatch
from logitless.engine.requests import Failed
from logitless.engine.runner.step_inputs import SamplingFeeds, room_of, sampling_feeds
from logitless.engine.sampling.grammar_mask import GrammarConstraint, TokenBitmask, TokenBitmasks
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.sampling.sampler import RowSampler
from logitless.engine.speculation.settings import SpeculationParams
from logitless.models.grammar import GrammarError
from logitless.models.grammar.triggers import Pattern
from tests.helpers.grammars import TOKENS, compile_grammar, tokenizer
from tests.helpers.scheduler_fakes import Bench, FakeEngine, FakeSampler, oracle

PROMPT = [1, 5, 3, 7]


def text_of(mask: TokenBitmask | None) -> set[str] | None:
    bits = None if mask is None else mask.wait(60)
    if bits is None:
        return None
    flags = np.unpackbits(bits.view(np.uint8), bitorder="little")
    return {TOKENS[i] for i in np.flatnonzero(flags[: len(TOKENS)])}


def ids(text: str) -> list[int]:
    return [TOKENS.index(char) for char in text]


def lazy(source: str, **triggers: Any) -> TokenBitmasks:
    return TokenBitmasks(GrammarConstraint(compile_grammar(source), lazy=True, **triggers))


def follow(masks: TokenBitmasks, tokens: list[int]) -> set[str] | None:
    for id in tokens:
        masks.rows()
        assert masks.accept(id)
    return text_of(masks.rows()[0])


@pytest.mark.parametrize(
    ("triggers", "tokens", "expected"),
    [
        ({"words": (b"ab",)}, ids("xya"), None),
        ({"words": (b"ab",)}, ids("xyab"), {"y", "<0x79>", "c", "<0x63>"}),  # the grammar has seen "ab"
        ({"words": (b"ab",)}, [*ids("x"), TOKENS.index("abc")], {"</s>"}),  # the end of a token is the grammar's too
        ({"words": (b"ab",)}, [*ids("xa"), TOKENS.index("ba")], None),  # fails: "aba" is none of its texts
        ({"patterns": (Pattern("y(ab)"),)}, ids("ab"), None),
        ({"patterns": (Pattern("y(ab)"),)}, ids("abyab"), {"y", "<0x79>", "c", "<0x63>"}),
        ({"patterns": (Pattern("(z)?ab"),)}, ids("ab"), {"y", "<0x79>", "c", "<0x63>"}),
        ({"tokens": frozenset({TOKENS.index("ab")})}, [*ids("ab"), TOKENS.index("ab")], {"y", "<0x79>", "c", "<0x63>"}),
    ],
)
def test_a_trigger_begins_the_grammar(triggers: dict[str, Any], tokens: list[int], expected: set[str] | None) -> None:
    masks = lazy('root ::= "ab" ("c" | "y" "x")', **triggers)
    if tokens[-1] == TOKENS.index("ba"):
        with pytest.raises(ValueError, match="does not allow the text of its trigger"):
            follow(masks, tokens)
        return
    assert follow(masks, tokens) == expected
    assert masks.awaiting == (expected is None)


WORDS = st.lists(st.sampled_from(ids("abcxy")), max_size=6)


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from(ids("abcxy")), max_size=6),
    st.lists(st.sampled_from(ids("abcxy")), max_size=6),
    st.booleans(),
)
def test_drafts_get_the_masks_that_single_steps_get(before: list[int], draft: list[int], is_lazy: bool) -> None:
    source = "root ::= x*\nx ::= [ab]+ [xy]"
    grammar = compile_grammar(source)

    def start() -> TokenBitmasks:
        words = {"lazy": True, "words": (b"a",)} if is_lazy else {}
        masks = TokenBitmasks(GrammarConstraint(grammar, **words))
        for id in before:
            text_of(masks.rows()[0])
            if not masks.accept(id):
                break
        return masks

    together, apart = start(), start()
    rows = together.rows(draft)
    assert len(rows) == 1 + len(draft)
    for row, id in zip(rows, [*draft, None], strict=True):
        single = text_of(apart.rows()[0])
        assert text_of(row) == single
        if id is None or (single is not None and TOKENS[id] not in single):
            break
        assert apart.accept(id)
        assert together.accept(id)
    assert text_of(together.rows()[0]) == text_of(apart.rows()[0])  # the draft has left nothing behind


@pytest.mark.parametrize("draft", ["", "xy", "ab"])
def test_a_trigger_that_the_grammar_does_not_allow_ends_it_with_any_draft(draft: str) -> None:
    masks = lazy('root ::= "x"', words=(b"ab",))
    follow(masks, ids("ya"))
    assert masks.accept(ids("b")[0])
    for _ in range(2):
        with pytest.raises(GrammarError, match="does not allow the text of its trigger"):
            text_of(masks.rows(ids(draft))[0])


def test_a_drafted_trigger_that_is_not_allowed_ends_nothing_unless_it_comes() -> None:
    masks = lazy('root ::= "x"', words=(b"ab",))
    rows = masks.rows(ids("yab"))
    assert [text_of(row) for row in rows[:3]] == [None] * 3
    with pytest.raises(GrammarError, match="does not allow the text of its trigger"):
        text_of(rows[3])
    assert follow(masks, ids("ya")) is None


@pytest.mark.parametrize("draft", ["", "x"])
def test_a_forced_token_that_is_not_allowed_ends_it_with_any_draft(draft: str) -> None:
    masks = TokenBitmasks(GrammarConstraint(compile_grammar('root ::= "x" "x" "x"')))
    masks.force(ids("y")[0])
    for _ in range(2):
        with pytest.raises(GrammarError, match="a token came that the grammar does not allow"):
            text_of(masks.rows(ids(draft))[0])


def test_draws_lie_where_the_op_looks_for_them() -> None:
    """Constrained or not, with drafts or not: a sequence's unused draws are in order from its first row on."""
    vocab = tokenizer()
    bound = SamplingParams(seed=3, grammar=GrammarConstraint(compile_grammar("root ::= .*")))
    words = RowSampler(SamplingParams(seed=3), vocab, 64)._dist
    assert words is not None
    want = np.array(words.peek(16), np.uint32).reshape(8, 2)
    for params in (bound, SamplingParams(seed=3)):
        sampler = RowSampler(params, vocab, 64)
        for masked in (False, True):
            rows = [None, *sampler.draft_feeds([5, 6]), None]
            room = room_of(sampling_feeds(6, 16, int(masked), 32))
            SamplingFeeds(room).write(rows, [4, 4, 4, 4, 4])
            first, n = (2, 6 if params is bound else 3) if masked else (1, 3)
            assert room["sample.draws"][first : first + n, :2].tolist() == want[:n].tolist()
            assert len(room["sample.draws"]) == (12 if masked else 6)


@pytest.mark.parametrize("grammar", [None, "root ::= .*"])
def test_sampler_without_pending_mask_is_ready(grammar: str | None) -> None:
    constraint = GrammarConstraint(compile_grammar(grammar)) if grammar else None
    sampler = RowSampler(SamplingParams(seed=3, grammar=constraint), tokenizer(), 64)
    if sampler._masks is not None:
        sampler._masks._job.result(20)
    assert sampler.ready


class LateEngine(FakeEngine):
    """Rows for which `late` says so are not sampled."""

    late: Callable[[int], str | None] = staticmethod(lambda n: None)

    def _step(self, batch: UBatch) -> StepResult:
        result = super()._step(batch)
        unsampled = {}
        for row, sampler in enumerate(batch.rows):
            why = None if sampler is None else sampler.why(row)  # type: ignore[attr-defined]
            if why is not None:
                unsampled[row] = why
                result.ids[row] = 0xFFFFFFFF
        return replace(result, unsampled=unsampled)


class LateSampler(FakeSampler):
    """Its mask is late every third time, and then for `delay` looks of the scheduler."""

    delay = 2

    def __init__(self, params: SamplingParams, n_ctx: int) -> None:
        super().__init__(params, n_ctx)
        self.n_asked = self.waits = 0
        self.is_late = params.seed == 1
        self.fails = params.seed == 2

    @property
    def ready(self) -> bool:  # type: ignore[override]
        self.waits -= 1
        return self.waits < 0

    def why(self, row: int) -> str | None:
        self.n_asked += 1
        if self.fails and self.n_asked == 4:
            return "too complex"
        if self.is_late and self.n_asked % 3 == 0:
            self.waits = self.delay
            return ""
        return None


def late_bench(**options: Any) -> Bench:
    bench = Bench(**options)
    bench.scheduler.make_sampler = LateSampler
    bench.engine.__class__ = LateEngine
    return bench


def test_late_masks_change_nothing_and_hold_up_nobody() -> None:
    plain, bench = Bench(), late_bench()
    expected = plain.run(PROMPT, n_predict=20, ignore_eos=True).ids
    slow = bench.submit(PROMPT, n_predict=20, ignore_eos=True, sampling=SamplingParams(seed=1))
    other = bench.submit([*PROMPT, 2], n_predict=20, ignore_eos=True)
    bench.step(20)
    assert len(bench.answers[other].tokens) == 20  # a token every step
    assert 5 < len(bench.answers[slow].tokens) < 20
    bench.drain()
    assert bench.answers[slow].ids == expected
    assert bench.answers[slow].finished.n_prompt == len(PROMPT)
    assert bench.scheduler.stats.prompt_tokens == 2 * len(PROMPT) + 1


def test_sequence_without_sampling_has_no_late_row() -> None:
    bench = late_bench()
    slow = bench.submit(PROMPT, n_predict=20, ignore_eos=True, sampling=SamplingParams(seed=1))
    other = bench.submit([*PROMPT, 2], n_predict=20, ignore_eos=True)
    warm = []
    for salt in range(6):
        warm.append(bench.submit([*PROMPT, 4 + salt], n_predict=0, priority=-1))  # before them in every run
        bench.step()
    bench.drain()
    for seq in (slow, other, *warm):
        assert bench.answers[seq].outcome() == oracle(seq.request, 1024)


@pytest.mark.parametrize("n_ubatch", [3, 512])
def test_late_masks_with_drafts_and_small_batches(n_ubatch: int) -> None:
    expected = Bench().run(PROMPT, n_predict=40, ignore_eos=True).ids
    bench = late_bench(n_ubatch=n_ubatch)
    draft = (*expected[:10], 1, *expected[11:])
    answers = [
        bench.submit(
            PROMPT,
            n_predict=40,
            ignore_eos=True,
            sampling=SamplingParams(seed=1, n_probs=1),
            speculation=SpeculationParams(draft=draft if i else ()),
            prompt_logprobs=1,
        )
        for i in range(3)
    ]
    bench.drain()
    for seq in answers:
        assert bench.answers[seq].ids == expected
        assert len(bench.answers[seq].finished.prompt_probs) == len(PROMPT)


def test_a_grammar_that_cannot_go_on_ends_its_request_only() -> None:
    bench = late_bench()
    bad = bench.submit(PROMPT, n_predict=20, ignore_eos=True, sampling=SamplingParams(seed=2))
    good = bench.submit(PROMPT, n_predict=20, ignore_eos=True)
    bench.drain()
    assert len(bench.answers[good].tokens) == 20
    assert bench.answers[bad].events[-1] == Failed(400, "invalid_request_error", "the grammar: too complex")
    assert len(bench.answers[bad].tokens) == 3


def test_a_grammar_that_takes_a_second_of_a_processor_for_a_token_ends_its_request(monkeypatch: pytest.MonkeyPatch):
    """Time of other threads does not count, and a draft has a second for each of its tokens."""
    seconds = iter([0.0, 0.9, 10.0, 13.9, 20.0, 21.1])
    monkeypatch.setattr("logitless.engine.sampling.grammar_mask.time.thread_time", lambda: next(seconds))
    masks = TokenBitmasks(GrammarConstraint(compile_grammar('root ::= "abcabc"')))
    assert text_of(masks.rows()[0]) is not None
    assert text_of(masks.rows(ids("abc"))[0]) is not None
    for _ in range(2):  # there are no masks any more
        masks.force(ids("a")[0])
        with pytest.raises(GrammarError, match="takes more than 1 s of a processor for one token"):
            masks.rows()[0].wait(60)  # type: ignore[union-attr]
        seconds = itertools.repeat(0.0)


class EndedSampler(FakeSampler):
    """Its grammar's text is complete at the fourth token, for which no end token is left."""

    def accept(self, word: int) -> int:
        if len(self.history) == len(PROMPT) + 3:
            self.problem, self.ended = "no token is left", True
        return super().accept(word)


def test_complete_text_without_an_end_token_ends_the_answer() -> None:
    bench = Bench()
    expected = bench.run(PROMPT, n_predict=9, ignore_eos=True).ids[:3]
    bench.scheduler.make_sampler = lambda params, n_ctx, *_: EndedSampler(params, n_ctx)
    answer = bench.run(PROMPT, n_predict=9, ignore_eos=True)
    assert (answer.ids, answer.finished.stop_type) == (expected, "eos")

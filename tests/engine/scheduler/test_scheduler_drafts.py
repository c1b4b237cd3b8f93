"""Drafts in the scheduler, on a checking device: fewer steps, otherwise equal results."""

from __future__ import annotations

import pytest

from logitless.engine.batch import BLOCK_SIZE, UBatch
from logitless.engine.requests import CompletionRequest
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.speculation.settings import NGRAM_KINDS, SpeculationParams
from tests.helpers.scheduler_fakes import EOG, N_VOCAB, POISON, Bench, oracle

PROMPT = (3, 1, 4, 1, 5)


def answer_to(n: int, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    return oracle(CompletionRequest(prompt, n_predict=n, ignore_eos=True), 1024)[0]


def client(draft: list[int], n_max: int | None = None) -> SpeculationParams:
    return SpeculationParams(draft=tuple(draft), n_max=n_max)


def test_a_right_draft_is_verified_with_the_prompt_in_one_step() -> None:
    bench = Bench()
    answer = bench.run(PROMPT, n_predict=41, ignore_eos=True, speculation=client(answer_to(40)))
    assert answer.ids == answer_to(41)
    assert [len(batch.tokens) for batch in bench.engine.batches] == [45]
    assert bench.engine.batches[0].out == list(range(4, 45))
    end = answer.finished
    assert (end.n_in_cache, end.n_predicted, end.prediction) == (45, 41, (40, 0))
    assert (end.timings.draft_n, end.timings.draft_n_accepted) == (40, 40)
    assert (bench.scheduler.stats.draft_tokens, bench.scheduler.stats.draft_tokens_accepted) == (40, 40)


@pytest.mark.parametrize("n_right", [0, 1, 10, 11, 12, 26, 27, 28])  # 5 + 11 is a page
def test_a_wrong_token_ends_what_is_accepted(n_right: int) -> None:
    bench = Bench()
    right = answer_to(60)
    wrong = 1 + right[n_right] % (N_VOCAB - 1)
    draft = [*right[:n_right], wrong, *right[n_right + 1 : 40]]
    seq = bench.submit(PROMPT, n_predict=60, ignore_eos=True, speculation=client(draft))
    bench.step()
    assert seq.tokens == [*PROMPT, *right[: n_right + 1]]
    assert seq.n_computed == len(PROMPT) + n_right
    assert len(seq.kv.blocks) == -(-len(seq.tokens) // BLOCK_SIZE)
    bench.drain()
    assert bench.answers[seq].ids == right
    accepted, rejected = bench.answers[seq].finished.prediction
    assert accepted >= n_right
    assert rejected >= 40 - n_right


def test_drafts_stop_at_every_kind_of_end() -> None:
    kinds = set()
    for salt in range(80):
        prompt = (1 + salt % 7, 1 + salt % 11)
        wishes = {"n_predict": (-1, 30)[salt % 2], "stop": ("fgh", "é") * (salt % 3 == 0)}
        draft = answer_to(50, prompt)
        answer = Bench(n_ctx=48).run(prompt, **wishes, speculation=client(draft))
        assert answer.outcome() == oracle(CompletionRequest(prompt, **wishes), 48)
        end = answer.finished
        kinds.add((end.stop_type, end.truncated))
        assert end.n_in_cache == end.n_prompt + end.n_predicted - 1
    assert kinds == {("eos", False), ("word", False), ("limit", False), ("limit", True)}


@pytest.mark.parametrize("kind", NGRAM_KINDS)
def test_every_kind_gives_the_same_text_in_fewer_steps(kind: str) -> None:
    bench = Bench(n_ctx=2048)
    n_batches = 0
    for salt in range(6):
        prompt = (*PROMPT, salt, 1, 2)
        expected = answer_to(120, prompt)
        text = (*prompt, *expected)  # a prompt that says it all before: the past is worth asking
        plain = CompletionRequest((*text, *prompt), n_predict=60, ignore_eos=True)
        answer = bench.run(plain.prompt, n_predict=60, ignore_eos=True, speculation=SpeculationParams((kind,)))
        assert answer.outcome() == oracle(plain, 2048)
        n_batches = len(bench.engine.batches)
    assert n_batches < 6 * 60
    assert bench.scheduler.stats.draft_tokens >= bench.scheduler.stats.draft_tokens_accepted > 0
    assert bench.scheduler.stats.tokens_predicted == 360


def test_log_probabilities_are_those_without_drafts() -> None:
    for post in (False, True):
        sampling = SamplingParams(n_probs=3, post_sampling_probs=post)
        right = answer_to(30)
        draft = [*right[:9], EOG, *right[10:]]
        plain = Bench().run(PROMPT, n_predict=30, ignore_eos=True, sampling=sampling)
        drafted = Bench().run(PROMPT, n_predict=30, ignore_eos=True, sampling=sampling, speculation=client(draft))
        assert [token.prob for token in drafted.tokens] == [token.prob for token in plain.tokens]
        assert drafted.finished.timings.draft_n > 0


def test_prompt_probabilities_and_drafts_share_a_step() -> None:
    bench = Bench()
    right = answer_to(20)
    answer = bench.run(PROMPT, n_predict=21, ignore_eos=True, prompt_logprobs=2, speculation=client(right))
    assert answer.ids == answer_to(21)
    assert len(bench.engine.batches) == 1
    assert [prob and prob.id for prob in answer.finished.prompt_probs] == [None, *PROMPT[1:]]


def test_drafts_take_pages_from_nobody() -> None:
    bench = Bench(n_slots=2, n_ctx=4 * BLOCK_SIZE, unified=True)
    first = bench.submit([1] * (BLOCK_SIZE + 2), n_predict=3 * BLOCK_SIZE - 6, ignore_eos=True)
    bench.step()
    right = answer_to(40, (2,) * 20)
    second = bench.submit([2] * 20, n_predict=11, ignore_eos=True, speculation=client(right))
    bench.drain()
    assert bench.scheduler.stats.preemptions == 0
    assert bench.answers[first].ids == answer_to(3 * BLOCK_SIZE - 6, (1,) * (BLOCK_SIZE + 2))
    assert bench.answers[second].ids == right[:11]


def test_a_step_that_fails_is_tried_without_drafts() -> None:
    bench = Bench()
    right = answer_to(20)
    seq = bench.submit(PROMPT, n_predict=20, ignore_eos=True, speculation=client([*right[:3], POISON, *right[3:]], 5))
    bench.drain()
    assert bench.answers[seq].ids == right
    assert bench.scheduler.stats.n_failed_steps >= 1


def test_streams_share_the_room_for_drafts() -> None:
    bench = Bench(n_slots=3, n_ubatch=64, prompt_chunk=20)
    prompts = [(1, 2), (2, 3), (3, 4)]
    for prompt in prompts:
        n_draft = 4 if prompt == (1, 2) else 60
        bench.submit(prompt, n_predict=60, ignore_eos=True, speculation=client(answer_to(n_draft, prompt)))
    bench.step(2)
    assert len(bench.engine.batches[0].tokens) == 6 + 17  # the prompts' own 6, and 20 + 3 streams in all
    bench.drain()
    assert [a.ids for a in bench.answers.values()] == [answer_to(60, prompt) for prompt in prompts]


def test_a_device_with_memory_of_rows_gets_no_drafts() -> None:
    bench = Bench()
    make = bench.scheduler.make_sampler

    def stateful(params: SamplingParams, n_ctx: int):  # type: ignore[no-untyped-def]
        sampler = make(params, n_ctx)
        sampler.stateful = True
        return sampler

    bench.scheduler.make_sampler = stateful
    answer = bench.run(PROMPT, n_predict=9, ignore_eos=True, speculation=client(answer_to(9)))
    assert answer.ids == answer_to(9)
    assert answer.finished.timings.draft_n == 0
    assert len(bench.engine.batches) == 9


def test_verifying_ends_with_the_first_difference() -> None:
    right = answer_to(12)
    for n_right in (0, 5, 11):
        draft = [*right[:n_right], *([EOG] * (n_right < 11)), *right[n_right + 1 : 11]]
        answer = Bench().run(PROMPT, n_predict=12, ignore_eos=True, verify=True, speculation=client(draft))
        assert answer.ids == right[: n_right + 1]
        assert answer.finished.stop_type == "limit"


def test_minimum_and_maximum_lengths() -> None:
    right = answer_to(30)
    bench = Bench()
    bench.run(PROMPT, n_predict=30, ignore_eos=True, speculation=client(right, n_max=4))
    assert max(len(batch.out) for batch in bench.engine.batches) == 5
    bench = Bench()
    params = SpeculationParams(draft=tuple(right[:4]), n_min=5)
    bench.run(PROMPT, n_predict=30, ignore_eos=True, speculation=params)
    assert bench.scheduler.stats.draft_tokens == 0
    bench.run(PROMPT, n_predict=30, ignore_eos=True, speculation=client(right, n_max=0))
    assert bench.scheduler.stats.draft_tokens == 0


def test_drafts_wait_while_a_prompt_is_not_through() -> None:
    bench = Bench(n_ubatch=8)
    seen: list[UBatch] = bench.engine.batches
    prompt = PROMPT * 4
    answer = bench.run(prompt, n_predict=9, ignore_eos=True, speculation=client(answer_to(9, prompt)))
    assert answer.ids == answer_to(9, prompt)
    assert all(len(batch.tokens) <= 8 for batch in seen)
    assert [len(batch.out) for batch in seen[:2]] == [0, 0]

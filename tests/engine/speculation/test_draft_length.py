"""Adaptive draft length, on simulated machines with a known optimum."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from logitless.engine.speculation.draft_length import AcceptanceRate, AdaptiveDraftLength

Cost = Callable[[int, int], float]  # of a step of so many sequences, with drafts of so many tokens: seconds


def reads(n_sequences: int, length: int) -> float:
    """One stream: rows cost little, each guess a tenth of a step."""
    return 1.0 + 0.1 * length + 0.02 * n_sequences * (1 + length)


def computes(n_sequences: int, length: int) -> float:
    """Rows are what costs."""
    return 0.1 + 0.2 * length + n_sequences * (1 + length)


def live(
    draft_length: AdaptiveDraftLength, cost: Cost, chance: float, n_steps: int, n_sequences: int = 1, seed: int = 0
) -> Counter[int]:
    """How often drafts had which length, each of whose guesses comes true with this chance."""
    rng, chosen = random.Random(seed), Counter[int]()
    texts = [AcceptanceRate(draft_length.acceptance) for _ in range(n_sequences)]
    for _ in range(n_steps):
        length = draft_length.choose(texts, 0, 0, 4)
        for text in texts:
            right = next((i for i in range(length) if rng.random() > chance), length)
            if length:
                text.record_outcome(length, right)
        draft_length.observe(cost(n_sequences, length), counts=True)
        chosen[length] += 1
    return chosen


def best(cost: Cost, chance: float, n_sequences: int) -> int:
    """By what is expected."""

    def rate(length: int) -> float:
        return n_sequences * sum(chance**i for i in range(length + 1)) / cost(n_sequences, length)

    return max(range(5), key=rate)


@pytest.mark.parametrize("n_sequences", [1, 3])
@pytest.mark.parametrize(("cost", "chance"), [(reads, 0.95), (reads, 0.02), (computes, 0.5), (computes, 0.8)])
def test_most_drafts_are_as_long_as_pays(cost: Cost, chance: float, n_sequences: int) -> None:
    right = best(cost, chance, n_sequences)
    assert right == (4 if chance == 0.95 else 0)
    chosen = live(AdaptiveDraftLength(), cost, chance, 600, n_sequences)
    assert chosen[right] > 500
    assert all(chosen[length] >= 4 for length in range(5))  # each was tried


def test_another_text_is_noticed() -> None:
    """Soon, although drafts were not worth it."""
    draft_length = AdaptiveDraftLength()
    assert live(draft_length, reads, 0.95, 400)[4] > 350
    assert live(draft_length, reads, 0.02, 300, seed=2)[0] > 200
    live(draft_length, reads, 0.02, 2000, seed=1)
    assert live(draft_length, reads, 0.95, 300, seed=4)[4] > 200


def test_so_many_sequences_are_judged_by_themselves() -> None:
    draft_length = AdaptiveDraftLength()
    for i in range(20):
        live(draft_length, reads, 0.95, 40, 1, seed=i)
        live(draft_length, computes, 0.5, 40, 8, seed=i)
    assert live(draft_length, reads, 0.95, 100, 1)[4] > 80
    assert live(draft_length, computes, 0.5, 100, 8)[0] > 80


def test_pauses_and_first_steps_say_nothing_of_a_length() -> None:
    """Its first step made a plan, and every tenth one was interrupted for twenty times as long."""
    draft_length, n = AdaptiveDraftLength(), Counter[int]()

    def cost(n_sequences: int, length: int) -> float:
        n[length] += 1
        pause = 50.0 if n[length] == 1 else 20.0 if n[length] % 10 == 5 else 0.0
        return pause + reads(n_sequences, length)

    assert live(draft_length, cost, 0.95, 600)[4] > 500


def test_first_step_of_a_length_is_not_in_its_median() -> None:
    """Four steps of a length: one that makes a plan, one that the machine interrupts, two as usual."""
    draft_length, text = AdaptiveDraftLength(), AcceptanceRate()
    for seconds in ((100.0, 9.0, 1.0, 1.0), (1.0,) * 4):
        for step in seconds:
            length = draft_length.choose([text], 0, 0, 1)
            draft_length.observe(step, counts=True)
        assert length == (1 if seconds[0] == 100.0 else 0)
    assert draft_length.choose([text], 0, 0, 1) == 1


def test_steps_that_say_nothing_change_nothing() -> None:
    draft_length = AdaptiveDraftLength()
    for _ in range(50):
        assert draft_length.choose([AcceptanceRate()], 0, 0, 4) == 4  # nothing is known yet
        draft_length.observe(1.0, counts=False)
    draft_length.observe(1.0, counts=True)  # no drafts were chosen for it
    assert draft_length.choose([AcceptanceRate()], 0, 0, 4) == 4
    assert draft_length.choose([AcceptanceRate()], 0, 0, 0) == 0


def test_no_length_that_is_not_wanted_is_tried() -> None:
    """`speculative.n_min`; and none that would take too long to know."""
    draft_length, acceptance, chosen = AdaptiveDraftLength(), [AcceptanceRate()], set[int]()
    for _ in range(600):
        length = draft_length.choose(acceptance, 0, 3, 100)
        chosen.add(length)
        if length:
            acceptance[0].record_outcome(length, length)
        draft_length.observe(reads(1, length), counts=True)
    assert chosen == {0, 3, 4, 5, 6, 7, 8}
    assert draft_length.choose(acceptance, 0, 3, 2) == 0


def test_sequences_without_drafts_count() -> None:
    """One draft of a step with fifteen streams that get a token each: what it costs, it costs all."""

    def times(n_others: int) -> int:
        draft_length, acceptance, n = AdaptiveDraftLength(), [AcceptanceRate()], 0
        for _ in range(400):
            length = draft_length.choose(acceptance, n_others, 0, 3)
            if length:
                acceptance[0].record_outcome(length, length)
            n += length > 0
            draft_length.observe(1 + 0.1 * length, counts=True)
        return n

    assert times(0) > 350  # a token more for a tenth
    assert times(15) < 80


def test_places_in_a_draft_have_chances_of_their_own() -> None:
    acceptance = AcceptanceRate()
    for _ in range(200):
        acceptance.record_outcome(3, 1)  # the second is always wrong, and the third never tried
    assert acceptance.of(0) > 0.95
    assert acceptance.of(1) < 0.05
    assert acceptance.of(2) == 0.7
    assert acceptance.tokens(2) == pytest.approx([1, 2, 2], abs=0.1)
    other = AcceptanceRate(acceptance)
    assert other.of(1) == acceptance.of(1)
    for _ in range(30):
        other.record_outcome(2, 2)
    assert other.of(1) > 0.8
    assert acceptance.of(1) > 0.3  # it is told, too

"""N-gram and client drafters against direct searches of the history."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from logitless.engine.speculation.client_draft import ClientDrafter
from logitless.engine.speculation.draft_state import Drafts, Pace, TokenDrafter
from logitless.engine.speculation.ngram import (
    CacheDrafter,
    Map4Drafter,
    MapDrafter,
    ModDrafter,
    ModTable,
    SimpleDrafter,
)
from logitless.engine.speculation.settings import NgramSizes, SpeculationParams

texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def last_occurrence(tokens: list[int], n: int) -> int | None:
    """Where the latest earlier copy of the last n tokens ends."""
    ends = [end for end in range(n, len(tokens)) if tokens[end - n : end] == tokens[-n:]]
    return ends[-1] if ends and len(tokens) >= n else None


def follow(tokens: list[int], at: int, n: int) -> list[int]:
    whole = list(tokens)
    for i in range(n):
        whole.append(whole[at + i])
    return whole[len(tokens) :]


def grown(drafter: TokenDrafter, tokens: list[int], n_most: int, step: int) -> list[int]:
    """The draft after the whole text, asked for on the way every few tokens."""
    for end in range(1, len(tokens), step):
        drafter.propose(tokens[:end], n_most)
    return drafter.propose(tokens, n_most)


@settings(max_examples=60)
@given(texts, st.integers(1, 3), st.integers(1, 9), st.integers(1, 4))
def test_ngram_simple_and_map_k_copy_what_followed_last_time(tokens: list[int], n: int, m: int, step: int) -> None:
    at = last_occurrence(tokens, n)
    expected = [] if at is None else follow(tokens, at, m)
    assert grown(SimpleDrafter(NgramSizes(n, m), None), tokens, 99, step) == expected
    assert grown(MapDrafter(NgramSizes(n, m), None), tokens, 99, step) == expected
    assert (
        grown(SimpleDrafter(NgramSizes(n, 99), 2), tokens, 99, step) == expected[:2] + follow(tokens, at, 2)[m:]
        if (at is not None)
        else not expected
    )


def test_min_hits_count_earlier_occurrences() -> None:
    sizes = NgramSizes(n=2, m=3, min_hits=2)
    for kind in (SimpleDrafter, MapDrafter):
        assert kind(sizes, None).propose([1, 2, 7, 1, 2], 9) == []
        assert kind(sizes, None).propose([1, 2, 7, 1, 2, 8, 1, 2], 9) == [8, 1, 2]


def test_a_key_of_map_k_remembers_how_far_it_was_right() -> None:
    drafter = MapDrafter(NgramSizes(n=2, m=4), None)
    tokens = [1, 2, 3, 4, 5, 6, 1, 2]
    assert drafter.propose(tokens, 9) == [3, 4, 5, 6]
    drafter.record_outcome(4, 1)
    tokens += [3, 9, 1, 2]
    assert drafter.propose(tokens, 9) == [3, 9]
    drafter.record_outcome(2, 2)
    assert drafter.propose(tokens, 9) == [3, 9, 1, 2]


def test_map_k4v_drafts_a_continuation_that_leads_clearly() -> None:
    once = [1, 2, 5, 5]
    other = [1, 2, 6, 6]
    sizes = NgramSizes(n=2, m=2)
    assert Map4Drafter(sizes, None).propose([*once, 1, 2], 9) == [5, 5]
    assert Map4Drafter(sizes, None).propose([*once, *other, 1, 2], 9) == []
    assert Map4Drafter(sizes, None).propose([*once * 3, *other, 1, 2], 9) == [5, 5]
    assert Map4Drafter(sizes, None).propose([*once * 2, *other, 1, 2], 9) == []
    assert Map4Drafter(sizes, None).propose([1, 2, 5], 9) == []
    drafter = Map4Drafter(sizes, None)
    drafter.propose([*once, 1, 2], 9)
    drafter.record_outcome(2, 0)
    assert drafter.propose([*once, 1, 2], 9) == [5]


@settings(max_examples=60)
@given(texts, st.integers(1, 3), st.integers(1, 4))
def test_ngram_mod_knows_the_latest_successor_of_each_ngram(tokens: list[int], n: int, step: int) -> None:
    successors = {tuple(tokens[i : i + n]): tokens[i + n] for i in range(len(tokens) - n)}
    whole = list(tokens)
    while len(whole) < len(tokens) + 7 and len(tokens) >= n and tuple(whole[-n:]) in successors:
        whole.append(successors[tuple(whole[-n:])])
    assert grown(ModDrafter(TABLES[n].emptied(), 1, 7), tokens, 99, step) == whole[len(tokens) :]


class Table(ModTable):
    def emptied(self) -> Table:
        self._next = self._next[:0]
        return self


class SmallTable(Table):
    """The same in a dictionary: 4 million entries for each example would be slow."""

    def __init__(self, n_match: int) -> None:
        super().__init__(n_match)
        self.entries: dict[int, int] = {}

    def emptied(self) -> SmallTable:
        self.entries = {}
        return self

    def get(self, h: int) -> int:
        return self.entries.get(h, -1)

    def put(self, h: int, token: int) -> None:
        self.entries[h] = token


TABLES = {n: SmallTable(n) for n in (1, 2, 3)}


def test_ngram_mod_is_shared_and_holds_back_short_drafts() -> None:
    table = ModTable(3)
    assert ModDrafter(table, 1, 9).propose([1, 2, 3, 4, 5, 6], 99) == []
    assert table.n_used == 3
    assert ModDrafter(table, 1, 9).propose([7, 7, 1, 2, 3], 99) == [4, 5, 6]
    assert ModDrafter(table, 4, 9).propose([7, 7, 1, 2, 3], 99) == []
    assert ModDrafter(table, 4, 9).propose([7, 7, 1, 2, 3], 2) == [4, 5]
    assert ModDrafter(table, 48, 2).propose([7, 7, 1, 2, 3], 99) == [4, 5]
    h = table.hash_of([1, 2, 3])
    assert table.roll(h, 1, 4) == table.hash_of([2, 3, 4])
    table.n_used = 1 << 21  # too full: everything is forgotten
    table.put(h, 9)
    assert (table.n_used, table.get(h), table.get(table.hash_of([2, 3, 4]))) == (1, 9, -1)


def test_ngram_cache_asks_the_longest_key_that_is_sure() -> None:
    assert CacheDrafter(4).propose([5, 6], 9) == []
    assert CacheDrafter(4).propose([1, 2, 3, 4, 1, 2, 3], 9) == [4, 1, 2, 3]
    assert CacheDrafter(4).propose([1, 2, 3, 4, 1, 2, 3], 2) == [4, 1]
    # 9 was followed by 1 and 2 equally often; after 8 9 it was always 2
    assert CacheDrafter(1).propose([7, 9, 1, 8, 9, 2, 7, 9, 1, 8, 9, 2, 8, 9], 9) == [2]
    assert CacheDrafter(1).propose([1, 3, 1, 4, 1], 9) == []  # one each: not sure


def accept(drafter: ClientDrafter, tokens: list[int], answer: list[int]) -> list[int]:
    """Run a whole answer through the drafter; the lengths of what was accepted each time."""
    accepted = []
    n_prompt = len(tokens)
    tokens = list(tokens)
    while len(tokens) - n_prompt < len(answer):
        draft = drafter.propose(tokens, 99)
        rest = answer[len(tokens) - n_prompt :]
        n = 0
        while n < min(len(draft), len(rest)) and draft[n] == rest[n]:
            n += 1
        if draft:
            drafter.record_outcome(len(draft), n)
        accepted.append(n)
        tokens += rest[: n + 1]
    return accepted


def test_a_right_prediction_takes_one_step() -> None:
    answer = list(range(100, 150))
    assert accept(ClientDrafter(answer, 3, 64), [1, 2, 3], [*answer, 7]) == [50]


def test_a_prediction_goes_on_after_a_difference() -> None:
    draft = list(range(100, 160))
    changed = [*draft[:10], 7, 8, 9, *draft[10:30], *draft[35:]]  # three more, then five fewer
    accepted = accept(ClientDrafter(draft, 2, 64), [1, 2], changed)
    assert sum(accepted) > 40
    assert len(accepted) < 16
    assert accept(ClientDrafter(draft, 2, 64), [1, 2], list(range(300, 340))) == [0] * 40


def test_a_useless_prediction_costs_less_and_less() -> None:
    draft = (1, 2, 3, 4) * 30
    drafts = Drafts(SpeculationParams(draft=draft), ClientDrafter(draft, 0, 64), [])
    lengths = []
    tokens: list[int] = []
    for _ in range(24):
        lengths.append(len(drafts.propose(tokens, 99)))
        if lengths[-1]:
            drafts.record_outcome(lengths[-1], 0)
        tokens += [9, 1, 2]
    assert lengths == [64, 32, 16, 8, 4, 2, 1, 0, 1, *[0] * 3, 1, *[0] * 7, 1, 0, 0, 0]
    assert drafts.n_drafted == 130


def test_the_pace_of_guesses() -> None:
    """What comes true doubles, what half comes true stays; a rest ends with the next success."""
    pace = Pace(8)
    lengths = []
    for n_accepted in (8, 16, 16, 15, 5, 4, 3, 0, 0):
        lengths.append(pace.next())
        pace.record_outcome(lengths[-1], min(n_accepted, lengths[-1]))
    assert lengths == [8, 16, 32, 32, 16, 8, 8, 4, 2]
    steps = []
    for n_accepted in (0, 0, 1, 0, 0):
        while not (n := pace.next()):
            steps.append(0)
        steps.append(n)
        pace.record_outcome(n, min(n, n_accepted))
    assert steps == [1, 0, 1, 0, 0, 0, 1, 2, 1]
    assert Pace(8, least=12).next() == 12


def test_repeated_places_prefer_the_longest_key_then_what_lies_ahead() -> None:
    draft = [1, 2, 10, 3, 1, 2, 11, 4, 1, 2, 12]
    drafter = ClientDrafter(draft, 0, 9)
    assert drafter.propose([1, 2, 10, 3, 1, 2, 99, 1, 2], 1) == [11]  # lost there: the nearest, as if 99 1 2 came in
    assert drafter.propose([1, 2, 10, 3, 1, 2, 99, 1, 2, 98, 4, 1, 2], 1) == [12]
    assert ClientDrafter(draft, 0, 9).propose([99, 3, 1, 2], 1) == [11]
    assert ClientDrafter(draft, 0, 9).propose([99, 98], 1) == []

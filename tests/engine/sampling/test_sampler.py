"""Sampler of a sequence: random generators, penalties, DRY, sampler chains, step inputs."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitless.engine.sampling import penalties as repetition
from logitless.engine.sampling.params import DEFAULT_SAMPLERS, FLOAT_MAX, SamplingParams, chain_from_names
from logitless.engine.sampling.penalties import Breakers, Dry, Penalties, find_breakers, suffix_lengths
from logitless.engine.sampling.sampler import (
    Generator,
    RowSampler,
    chain_codes,
    choose_seed,
    split_log_probs,
    split_probs,
)
from logitless.graph.ops.sampling import samplers as s


class Words:
    """A vocabulary of given pieces; encodes greedily, longest piece first."""

    suppressed_ids: tuple[int, ...] = ()

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    @property
    def n_vocab(self) -> int:
        return len(self.pieces)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> bytes:
        return "".join(self.pieces[id] for id in ids).encode()

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        ids = []
        while text:
            best = max((p for p in self.pieces if p and text.startswith(p)), key=len)
            ids.append(self.pieces.index(best))
            text = text[len(best) :]
        return ids


VOCAB = Words(*"abcdefgh", "\n", ":")


# --- generators


def test_generator_is_mt19937() -> None:
    generator = Generator(5489)
    assert generator.peek(1) == [3499211612]
    generator.advance(9999)
    assert generator.peek(1) == [4123659995]  # the C++ standard's check of std::mt19937


@given(st.integers(0, 2**32 - 1), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 700)), max_size=8))
def test_generator_gives_words_in_order_whatever_is_looked_at(seed: int, steps: list[tuple[int, int]]) -> None:
    expected = np.random.RandomState(seed).randint(0, 2**32, 8000, np.uint32).tolist()
    generator, at = Generator(seed), 0
    for advance, skip in steps:
        assert generator.peek(3, skip) == expected[at + skip : at + skip + 3]
        assert generator.peek(2) == expected[at : at + 2]
        generator.advance(advance)
        at += advance


def test_seeds() -> None:
    assert choose_seed(7) == 7
    assert choose_seed(-1) != 0xFFFFFFFF
    assert len({choose_seed(0xFFFFFFFF) for _ in range(5)}) > 1
    sampler = RowSampler(SamplingParams(seed=-1), VOCAB, 64)
    assert 0 <= sampler.seed < 0xFFFFFFFF


# --- penalties


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(0, 20))
def test_penalties_count_the_last_n(tokens: list[int], n: int) -> None:
    penalties = Penalties(n)
    for i, token in enumerate(tokens):
        penalties.push(token)
        window = tokens[: i + 1][-n:] if n else []
        assert penalties.counts == dict(collections.Counter(window))


# --- DRY


def brute_force(tokens: list[int], window: int, allowed: int, base: float, multiplier: float) -> dict[int, float]:
    """By the definition, without breakers: the longest repetition that each token would extend."""
    recent = tokens[-window:]
    longest: dict[int, int] = {}
    for end in range(1, len(recent)):
        length = 0
        while length < end and recent[end - 1 - length] == recent[-1 - length]:
            length += 1
        if length >= allowed and len(recent) > allowed:
            longest[recent[end]] = max(longest.get(recent[end], 0), length)
    return {token: multiplier * base ** (length - allowed) for token, length in longest.items()}


NO_BREAKERS = Breakers({}, np.zeros(8, bool))


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(0, 40), st.integers(1, 30), st.integers(0, 3))
def test_dry_is_its_definition(tokens: list[int], given_at_once: int, window: int, allowed: int) -> None:
    dry = Dry(0.5, 1.5, allowed, window, NO_BREAKERS)
    dry.begin(tokens[:given_at_once])
    for token in tokens[given_at_once:]:
        dry.push(token)
    assert dry.penalties() == pytest.approx(brute_force(tokens, window, allowed, 1.5, 0.5), rel=1e-6)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=30))
def test_suffix_lengths(tokens: list[int]) -> None:
    expected = []
    for j in range(len(tokens) - 1):
        n = 0
        while n <= j and tokens[j - n] == tokens[-1 - n]:
            n += 1
        expected.append(n)
    assert suffix_lengths(tokens) == expected


def test_dry_over_a_long_history_forgets_what_is_before_the_window() -> None:
    r = np.random.default_rng(0)
    tokens = r.integers(0, 3, 1500).tolist()
    dry = Dry(0.8, 1.75, 2, 100, NO_BREAKERS)
    for token in tokens:
        dry.push(token)
    assert len(dry.tokens) <= 512
    assert dry.penalties() == pytest.approx(brute_force(tokens, 100, 2, 1.75, 0.8), rel=1e-6)


def test_breakers_overlap_token_boundaries() -> None:
    result = find_breakers(Words("a", "b", "c", "xa", "ab", "bcd", "abc", "d"), ("abc",))
    assert result.tails == {0: [(1, 2)], 3: [(1, 2)], 4: [(2,)], 6: [()]}
    assert result.is_single(6)
    assert not result.is_single(4)
    assert np.flatnonzero(result.is_head).tolist() == [0, 3, 4, 6]


def test_a_breaker_limits_the_repetition() -> None:
    a, b, c, colon = 0, 1, 2, 9
    breakers = find_breakers(VOCAB, (":",))
    dry = Dry(1.0, 2.0, 1, 100, breakers)
    dry.begin([a, b, colon, c, a, b, colon, c])
    assert dry.penalties() == {a: 1.0}  # only `c` counts, though four tokens repeat
    dry.push(a)
    assert dry.penalties() == {b: 2.0}
    dry.push(b)
    assert dry.penalties() == {}  # the colon would be next, and it is a breaker itself


def test_huge_repetitions_do_not_overflow() -> None:
    dry = Dry(1.0, 1.75, 2, 4096, NO_BREAKERS)
    dry.begin([1] * 1000)
    assert np.isfinite(np.float32(dry.penalties()[1]))


@pytest.mark.parametrize("multiplier", [1e38, -1e38])
def test_a_penalty_beyond_f32_is_its_largest_number(multiplier: float) -> None:
    dry = Dry(multiplier, 1.75, 2, 4096, NO_BREAKERS)
    dry.begin([1] * 1000)
    assert dry.penalties() == {1: math.copysign(FLOAT_MAX, multiplier)}


def test_breaker_tails() -> None:
    vocab = Words("a", "b", "c", "xab")
    result = find_breakers(vocab, ("abc",))
    assert result.tails == {0: [(1, 2)], 3: [(2,)]}
    dry = Dry(1.0, 2.0, 1, 100, result)
    dry.begin([1, 0, 1, 2, 1])  # `abc` ends one token ago
    assert dry.penalties() == {0: 1.0, 2: 1.0}
    dry.push(0)
    assert dry._limit(dry.tokens[: dry.n]) == 2


# --- chains


def test_names_letters_and_aliases() -> None:
    assert chain_from_names("edskypmxt") == (DEFAULT_SAMPLERS, [])
    assert chain_from_names("kpi") == (("top_k", "top_p", "infill"), [])
    known = chain_from_names(["top-k", "nucleus", "Temp", "ADAPTIVE-p"])
    assert known == (("top_k", "top_p", "temperature", "adaptive_p"), [])
    assert chain_from_names("kzp") == (("top_k", "top_p"), ["z"])
    assert chain_from_names(["tfs_z", "top_k", ""]) == (("top_k",), ["tfs_z", ""])
    with pytest.raises(ValueError, match="at most"):
        chain_from_names("k" * 40)


def test_sampler_without_effect_is_left_out() -> None:
    assert chain_codes(SamplingParams()) == [s.TOP_K, s.TOP_P, s.MIN_P, s.TEMPERATURE, s.DIST]
    off = SamplingParams(top_k=0, top_p=1, min_p=0, temperature=1)
    assert chain_codes(off) == [s.DIST]
    assert chain_codes(SamplingParams(mirostat=2)) == [s.TEMPERATURE, s.MIROSTAT_2]
    assert chain_codes(SamplingParams(samplers=("top_k", "adaptive_p"))) == [s.TOP_K, s.ADAPTIVE]


def test_no_temperature_is_greedy_where_that_is_the_same() -> None:
    assert chain_codes(SamplingParams(temperature=0)) == [s.GREEDY]
    assert chain_codes(SamplingParams(temperature=0, repeat_penalty=1.1)) == [s.PENALTIES, s.GREEDY]
    late = SamplingParams(temperature=0, repeat_penalty=1.1, samplers=("top_k", "penalties", "top_p", "temperature"))
    assert chain_codes(late) == [s.TOP_K, s.PENALTIES, s.GREEDY]
    assert chain_codes(SamplingParams(temperature=0, typical_p=0.5))[-1] == s.DIST
    assert chain_codes(SamplingParams(temperature=0, dynatemp_range=0.5))[-1] == s.DIST
    assert chain_codes(SamplingParams(temperature=0, samplers=("top_k",))) == [s.TOP_K, s.DIST]


# --- a sequence's rows


def test_draws_are_given_back() -> None:
    words = np.random.RandomState(3).randint(0, 2**32, 20, np.uint32).tolist()
    sampler = RowSampler(SamplingParams(seed=3, xtc_probability=0.5), VOCAB, 64)
    sampler.begin([1, 2])
    assert sampler.feeds().draws == (words[0], words[1], words[0], 0)
    assert sampler.accept(5 | s.NO_DIST) == 5
    assert sampler.feeds().draws == (words[0], words[1], words[1], 0)
    assert sampler.accept(np.uint32(6 | s.NO_XTC)) == 6
    assert sampler.feeds().draws == (words[2], words[3], words[1], 0)


def test_the_state_is_set_until_a_token_is_accepted() -> None:
    sampler = RowSampler(SamplingParams(mirostat=2, mirostat_tau=3), VOCAB, 64)
    assert sampler.stateful
    assert sampler.feeds().params[s.RESET] == 6
    assert sampler.feeds().params[s.RESET] == 6
    sampler.accept(1)
    assert np.isnan(sampler.feeds().params[s.RESET])
    adaptive = RowSampler(SamplingParams(samplers=("adaptive_p",), adaptive_target=0.5), VOCAB, 64)
    assert adaptive.feeds().params[s.RESET :] == pytest.approx([5, 10], rel=1e-5)


def test_entries_of_every_kind() -> None:
    params = SamplingParams(
        logit_bias=((3, -np.inf),), repeat_penalty=1.2, repeat_last_n=2, dry_multiplier=1.0, dry_allowed_length=1
    )
    sampler = RowSampler(params, VOCAB, 64)
    sampler.begin([0, 1, 0, 2, 0])
    row = sampler.feeds()
    entries = set(zip(row.kinds, row.ids, row.values, strict=True))
    assert entries == {(0, 3, -np.inf), (1, 2, 1), (1, 0, 1), (2, 1, 1.0), (2, 2, 1.0)}


def test_drafts_get_the_rows_of_separate_steps() -> None:
    params = SamplingParams(seed=9, repeat_penalty=1.2, dry_multiplier=0.8, dry_allowed_length=1)
    together, apart = RowSampler(params, VOCAB, 64), RowSampler(params, VOCAB, 64)
    prompt, draft = [0, 1, 2, 0, 1], [2, 0, 1]
    together.begin(prompt)
    apart.begin(prompt)
    for row, token in zip(together.draft_feeds(draft), [*draft, None], strict=True):
        single = apart.feeds()
        assert (row.draws, list(row.kinds), list(row.ids), list(row.values)) == (
            single.draws,
            list(single.kinds),
            list(single.ids),
            list(single.values),
        )
        if token is not None:
            apart.accept(token)
    assert together.feeds().draws == RowSampler(params, VOCAB, 64).feeds().draws  # nothing was used


def test_results_are_split() -> None:
    out = np.zeros((2, 3 + 2 * 4), np.int32)
    out[1, 1] = 9
    out[1, 2:3] = np.float32(0.5).view(np.int32)
    out[1, 3:7] = 5, 6, 7, -1
    out[1, 7:] = np.array([0.5, 0.25, 0.1, 0], np.float32).view(np.int32)
    count, chosen, ids, values = split_probs(out, 4)
    assert (count[1], chosen[1], ids[1].tolist()) == (9, 0.5, [5, 6, 7, -1])
    assert all(a > b for a, b in pairwise(values[1].tolist()))
    value, top, values = split_log_probs(np.array([[-1.0, 8.0, 9.0, -0.5, -2.0]], np.float32), 2)
    assert (value.tolist(), top.tolist(), values.tolist()) == ([-1.0], [[8, 9]], [[-0.5, -2.0]])


def test_vocabulary_is_read_once() -> None:
    assert find_breakers(VOCAB, ("\n",)) is find_breakers(VOCAB, ("\n",))
    assert repetition._texts(VOCAB)[8] == b"\n"

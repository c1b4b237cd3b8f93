"""Infill sampler: small cases of llama.cpp's rules worked by hand, and in a sampler chain."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitless.engine.sampling.infill_sampler import candidates, infill
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.sampling.sampler import RowSampler
from logitless.graph.ops.sampling import samplers as s

PIECES = ["", "", "a", "ab", "abc", "b", "c", "d"]
END, EOT = 0, 1


def texts(eot: int | None = EOT, eos: int | None = END) -> Any:
    return SimpleNamespace(
        eot_id=eot,
        eos_id=eos,
        eog_ids=frozenset({END, EOT}),
        suppressed_ids=(),
        n_vocab=len(PIECES),
        piece=lambda id, special=True: PIECES[id].encode(),
    )


def left(shares: dict[int, float], n_left: int = 0, **ids: int | None) -> list[int]:
    """Ids that stay of candidates with these probabilities."""
    c = candidates(list(shares), np.array(list(shares.values()), np.float32))
    infill(c, n_left or len(shares), texts(**ids))
    return [int(id) for id in c.ids]


def test_ends_win_where_they_have_more_than_a_third_of_an_average_share() -> None:
    assert left({2: 0.85, 5: 0.10, END: 0.05}) == [2, END]  # 3 · 0.05 · 3 = 0.45 is less than 0.95
    assert left({2: 0.80, 5: 0.08, END: 0.07, EOT: 0.05}) == [END, EOT]  # 3 · 0.12 · 4 = 1.44 is more than 0.88
    assert left({2: 0.85, 5: 0.10, END: 0.05}, n_left=7) == [END]  # those that are not told count, too: 1.05


def test_tokens_with_common_prefix_count_together() -> None:
    """ab 0.35, a 0.15 and abc 0.1 are 0.6; so c with 0.3 is under a half of what is left (0.9), which is 0.45."""
    assert left({3: 0.35, 6: 0.30, 2: 0.15, 4: 0.10, 7: 0.10}) == [3]
    assert left({3: 0.30, 6: 0.30, 5: 0.25, 7: 0.15}) == [3, 6, 5]  # each has more than a quarter of their 0.85


def test_unlikely_tokens_go_unless_all_are_alike() -> None:
    assert left({5: 0.19, 6: 0.19, 7: 0.19}) == [5, 6, 7]  # shares of what is told: a third each, more than a quarter
    assert left(dict.fromkeys(range(2, 8), 0.1)) == [2]  # a, ab and abc are 3/6 together; b, c and d have 1/6


def test_where_nothing_is_likely_the_text_ends() -> None:
    """With the end of a turn, or of a text where turns have none."""
    wide = SimpleNamespace(
        eot_id=None, eos_id=3, eog_ids=frozenset({3}), suppressed_ids=(), piece=lambda id, special=True: b"%d." % id
    )
    for eot, eos, expected in ((2, 3, 2), (None, 3, 3), (None, None, 10)):
        wide.eot_id, wide.eos_id = eot, eos
        c = candidates([10, 11, 12, 13, 14, 15], np.full(6, 1 / 6, np.float32))
        infill(c, 6, wide)
        assert c.ids.tolist() == [expected]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.integers(0, 50))
def test_something_is_always_left(shares: list[int], unseen: int) -> None:
    """In the order that it came in, and with its own logits."""
    p = np.array(sorted(shares, reverse=True), np.float32) / np.float32(sum(shares))
    c = candidates(list(range(len(p))), p)
    logits = dict(zip(c.ids.tolist(), c.logits.tolist(), strict=True))
    infill(c, len(p) + unseen, texts())
    assert len(c) >= 1
    if c.ids.tolist() != [EOT]:
        assert [logits[id] for id in c.ids.tolist()] == c.logits.tolist() == sorted(c.logits.tolist(), reverse=True)


def sampler(*names: str, **settings: Any) -> RowSampler:
    return RowSampler(SamplingParams(samplers=names, seed=7, **settings), texts(), 64)


def test_the_device_runs_what_comes_before_and_this_what_comes_after() -> None:
    """As with llama.vim, whose chain is top_k, top_p and infill."""
    own = sampler("top_k", "top_p", "infill", top_k=5, top_p=0.9)
    assert [code for code in own.feeds().chain.tolist() if code] == [s.TOP_K, s.TOP_P, s.DIST]
    assert own.n_candidates == 5
    p = np.array([0.35, 0.30, 0.15, 0.10, 0.10, 0, 0, 0], np.float32)
    assert own.choose(6, 5, [3, 6, 2, 4, 7, -1, -1, -1], p) == 3  # although the device's own choice was 6
    assert own.left == ([3], [1.0], 1.0)
    assert own.rng_used == (2, 0)
    assert own.choose(6, 0, [-1] * 8, np.zeros(8, np.float32)) == 6  # nothing is possible
    cold = sampler("infill", "temperature", temperature=0.0)
    assert {cold.choose(5, 3, [5, 3, 6], np.array([0.34, 0.33, 0.33], np.float32)) for _ in range(20)} == {5}


def test_choices_follow_the_probabilities_that_are_left() -> None:
    """Draws are those that the device would have had: the same seed chooses the same, also when it goes on later."""
    p, ids, n = np.array([0.5, 0.3, 0.2], np.float32), [3, 6, 7], 2000
    own = sampler("infill", "top_k", top_k=2)
    chosen = [own.choose(3, 3, ids, p) for _ in range(n)]
    assert set(chosen) == {3, 6}
    assert abs(chosen.count(3) / n - 0.5 / 0.8) < 0.04
    resumed = RowSampler(SamplingParams(samplers=("infill", "top_k"), top_k=2, seed=7, rng_used=(200, 0)), texts(), 64)
    assert [resumed.choose(3, 3, ids, p) for _ in range(50)] == chosen[100:150]


@pytest.mark.parametrize(
    ("names", "settings"),
    [(("infill", "adaptive_p"), {}), (("infill", "infill"), {}), (("infill",), {"grammar": SimpleNamespace()})],
)
def test_conflicting_samplers_are_refused(names: tuple[str, ...], settings: dict[str, Any]) -> None:
    assert "infill" in SamplingParams(samplers=names, **settings).conflict
    assert not SamplingParams(samplers=names, mirostat=2, **settings).conflict  # which has no chain

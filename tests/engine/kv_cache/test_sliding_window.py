"""Sliding-window KV group: blocks that stay, and prefix reuse from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from logitless.engine.kv_cache.block_pool import blocks_in_window, window_pool_size
from logitless.engine.kv_cache.slot_actions import install, snapshot
from logitless.engine.kv_cache.slot_files import load, save
from logitless.engine.speculation.settings import SpeculationParams
from tests.helpers.scheduler_fakes import Bench, asked, prompt

WINDOW = 40


def bench(n_kept: int = 2, n_slots: int = 2, n_ubatch: int = 32, **options: Any) -> Bench:
    return Bench(n_slots=n_slots, window=(WINDOW, n_kept), n_ubatch=n_ubatch, **options)


def test_a_long_context_has_few_pages_of_windows() -> None:
    b = bench(n_kept=0, n_slots=1)
    assert b.engine.window_kv is not None
    assert (
        b.engine.window_kv.n == 10
    )  # 4 are seen after any token, 2 are written and 2 by a step left, 2 when one is begun
    assert asked(b, prompt(500), n_predict=50) == 0


@pytest.mark.parametrize(
    ("n", "window", "blocks"),
    [
        (0, 9, []),
        (1, 9, [0]),
        (16, 1, []),
        (17, 1, [1]),
        (16, 2, [0]),
        (40, 9, [2]),
        (39, 9, [1, 2]),
        (64, 40, [1, 2, 3]),
    ],
)
def test_blocks_in_window_are_those_of_next_token(n: int, window: int, blocks: list[int]) -> None:
    assert list(blocks_in_window(n, window)) == blocks


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 18, 100, 1024])
def test_no_window_has_more_pages_than_a_pool_counts_with(window: int) -> None:
    most = max(len(blocks_in_window(n, window)) for n in range(3000))
    assert window_pool_size(window, 1, 512, 1) - window_pool_size(window, 1, 512, 0) >= most


def test_a_chat_goes_on_from_its_last_token() -> None:
    b = bench()
    answer = b.run(prompt(170), n_predict=5, ignore_eos=True).ids
    assert asked(b, [*prompt(170), *answer, 3, 4]) == 170 + 4


@pytest.mark.parametrize(("n", "known"), [(170, 160), (184, 176), (24, 16)])
def test_another_end_of_a_prompt_goes_on_from_a_page_before_it(n: int, known: int) -> None:
    b = bench(n_slots=1)
    asked(b, prompt(n), n_predict=300)
    assert asked(b, [*prompt(n - 8), 3, 2, 1, 5]) == known


def test_where_prompts_part_is_known_to_the_third() -> None:
    b = bench()
    asked(b, prompt(500))
    assert [asked(b, [*prompt(90), i, 2, 1, *prompt(70)]) for i in (3, 4, 5)] == [0, 80, 80]


def test_common_prefix_that_arrives_together_is_computed_once() -> None:
    b = bench(n_ubatch=16)
    both = [b.submit([*prompt(170), i, 2, 1], n_predict=2, ignore_eos=True) for i in (3, 4)]
    b.drain()
    assert [b.answers[seq].finished.n_cached for seq in both] == [0, 160]


def test_a_long_prompt_leaves_other_chats_alone() -> None:
    """What it passes gives way before the ends of others do."""
    b = bench(n_kept=1)
    answer = b.run(prompt(100), n_predict=5, ignore_eos=True).ids
    asked(b, [9, *prompt(600)])
    assert asked(b, [*prompt(100), *answer, 3]) == 104


def test_host_memory_has_what_gave_way() -> None:
    tokens = [[i, *prompt(100)] for i in range(1, 8)]
    for cache_ram, known in (0, 0), (None, 96):
        b = bench(n_kept=0, cache_ram=cache_ram)
        for each in tokens:
            asked(b, each)
        assert asked(b, [*tokens[0], 3]) == known


def test_the_device_has_no_room_for_a_prefix_that_host_memory_has() -> None:
    b = bench(n_kept=0, n_slots=1, n_ctx=256, cache_ram=None)
    for i in (1, 2):
        asked(b, [i, *prompt(200)])
    assert asked(b, [1, *prompt(200), 4]) == 192


def test_slots_are_saved_and_restored(tmp_path: Any) -> None:
    b = bench()
    answer = b.run(prompt(170), n_predict=5, ignore_eos=True, id_slot=0).ids
    state = snapshot(b.scheduler, 0)
    assert (len(state.tokens), len(state.blocks), len(state.auxiliary)) == (174, 11, 3)
    kind = b.engine.cache_kind
    save(tmp_path, "a", kind, state)
    again, _ = load(tmp_path, "a", kind, 1000)
    assert again.tokens == state.tokens
    for result, expected in zip([*again.blocks, *again.auxiliary], [*state.blocks, *state.auxiliary], strict=True):
        np.testing.assert_array_equal(result, expected)
    other = bench()
    install(other.scheduler, 1, again)
    other.step()
    assert asked(other, [*prompt(170), *answer, 3, 4]) == 174


def test_a_snapshot_ends_where_one_can_go_on() -> None:
    b = bench(n_kept=0, n_slots=1, n_ubatch=16)
    asked(b, prompt(170), n_predict=5)
    windows = b.scheduler.cache.windows
    assert windows is not None
    for node in list(windows._reusable)[-1:]:  # as if others had needed it
        windows.forget(node)
    state = snapshot(b.scheduler, 0)
    assert len(state.tokens) < 170
    assert len(state.auxiliary) == len(blocks_in_window(len(state.tokens), WINDOW))


def test_drafts_that_are_wrong_leave_nothing_behind() -> None:
    b = bench(n_slots=1, n_ubatch=64)
    tokens = prompt(100)
    right = b.run(tokens, n_predict=60, ignore_eos=True).ids
    draft = (*right[:20], right[20] + 1, *right[21:50])
    assert asked(b, [7, *tokens], n_predict=60, speculation=SpeculationParams((), draft=draft)) == 0


def test_a_step_that_fails_is_run_again() -> None:
    b = bench(n_ubatch=64)
    fails = iter([False, True, True, False, True])
    b.engine.fails = lambda batch: len(batch.tokens) > 1 and next(fails, False)
    assert asked(b, prompt(300), n_predict=10) == 0
    assert b.scheduler.stats.n_failed_steps == 3

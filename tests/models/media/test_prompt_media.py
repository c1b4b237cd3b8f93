"""Places of images in a prompt: ids, chunks, M-RoPE positions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from logitless.models.media.prompt_media import FIRST_ID, PromptMedia, Tile, place


def tile(rows: int, columns: int, seed: int = 0) -> Tile:
    pixels = np.random.default_rng(seed).integers(0, 256, (4 * rows, 4 * columns, 3)).astype(np.uint8)
    return Tile(pixels, rows * columns, (rows, columns))


def test_ids_are_negative_and_tell_images_apart() -> None:
    first, again, other = tile(3, 4), tile(3, 4), tile(3, 4, seed=1)
    assert first.ids == again.ids
    assert len(set(first.ids)) == 12
    assert not set(first.ids) & set(other.ids)
    assert all(-(2**31) <= id <= FIRST_ID for id in first.ids)
    ids, spans = place([[1, 2], first, [3], other])
    assert [id for id in ids if id >= 0] == [1, 2, 3]
    assert [(span.start, span.end) for span in spans] == [(2, 14), (15, 27)]


def test_rows_of_a_bidirectional_tile_stay_together() -> None:
    _, spans = place([[1] * 5, tile(2, 4), [1] * 5])
    causal, whole = PromptMedia(spans), PromptMedia(spans, causal=False)
    for start, n, expected in ((0, 5, 5), (0, 6, 5), (0, 13, 13), (0, 15, 15), (5, 1, 8), (5, 9, 9), (7, 2, 6)):
        assert causal.chunk(start, n) == n
        assert whole.chunk(start, n) == expected
    assert causal.last_seen(4, 4) == [4, 5, 6, 7]
    assert whole.last_seen(3, 12) == [3, 4, *[12] * 8, 13, 14]


def test_mrope_positions_go_on_behind_the_larger_side() -> None:
    _, spans = place([[1] * 3, tile(2, 4), [1] * 2, tile(3, 1, seed=1), [1]])
    images = PromptMedia(spans, mrope=True)
    expected = [(p, p, p, p) for p in range(3)]
    expected += [(3, 3 + y, 3 + x, 3) for y in range(2) for x in range(4)]
    expected += [(p, p, p, p) for p in (7, 8)]
    expected += [(9, 9 + y, 9, 9) for y in range(3)]
    expected += [(p, p, p, p) for p in (12, 13, 14)]  # generated tokens go on
    assert images.positions(0, 19).T.tolist() == [list(p) for p in expected]
    for start in range(19):  # of any part of it
        assert images.positions(start, 19 - start).T.tolist() == [list(p) for p in expected[start:]]


def test_framed_rows_have_their_places_in_lines_and_the_number_of_their_image() -> None:
    framed = [replace(tile(*grid), n_rows=grid[0] * (grid[1] + 1) + 2) for grid in ((2, 2), (1, 1))]
    _, spans = place([[1], framed[0], [1], framed[1], [1]])
    images = PromptMedia(spans, mrope=True, framed=True)
    expected = [(p, p, p, p) for p in range(15)]
    expected[2:8] = [(2 + 3 * y + x, x, y, 0) for y in range(2) for x in range(3)]
    expected[11:13] = [(11 + x, x, 0, 1) for x in range(2)]
    for start in range(15):  # of any part of it
        assert images.positions(start, 15 - start).T.tolist() == [list(p) for p in expected[start:]]


def test_sound_is_causal_and_has_positions_of_text() -> None:
    """Behind an image, too, which saves some; among bidirectional images."""
    sound = Tile(np.zeros((6, 4), np.float32), 3, None)
    assert sound.is_audio
    assert sound.key != Tile(np.zeros((6, 4), np.float32), 3, (3, 1)).key
    _, spans = place([[1], tile(2, 2), sound, [1]])
    images = PromptMedia(spans, causal=False, mrope=True)
    assert images.chunk(0, 7) == 7
    assert images.chunk(0, 3) == 1
    assert images.last_seen(0, 9) == [0, 4, 4, 4, 4, 5, 6, 7, 8]
    assert images.positions(5, 4).tolist() == [[3, 4, 5, 6]] * 4

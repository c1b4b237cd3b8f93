"""Image encoding between decode steps, on a fake encoder with given costs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from logitless.engine.batch import DeviceFailed, StepFailed
from logitless.engine.requests import BATCH_PRIORITY, Failed
from logitless.models.media.prompt_media import PromptMedia, Tile, place
from tests.engine.scheduler.test_interleaved_prefill import STEP, Slow

PART, N_PARTS = 0.2, 20


def tile(seed: int) -> Tile:
    """Seeds from 100 have another size."""
    width = 8 if seed < 100 else 16
    pixels = np.random.default_rng(seed).integers(0, 256, (8, width, 3)).astype(np.uint8)
    return Tile(pixels, 4, (2, 2))


class Encoder:
    """A vision encoder that takes N_PARTS parts for any number of tiles."""

    n_rows = 64

    def __init__(self, bench: Slow) -> None:
        self.bench, self.kept, self.runs = bench, dict[bytes, int](), list[int]()
        self.fails: Exception | None = None

    def first_row(self, tile: Tile) -> int | None:
        return self.kept.get(tile.key)

    def place(self, tile: Tile, pinned: Collection[bytes]) -> bool:
        return True

    def batch_size(self, tile: Tile) -> int:
        return 2

    def encode(self, tiles: Sequence[Tile]) -> Iterator[float]:
        for _ in range(N_PARTS):
            yield PART
            self.bench.time += PART
            if self.fails is not None:
                raise self.fails
        self.runs.append(len(tiles))
        self.kept |= {tile.key: 1 + 4 * len(self.kept) for tile in tiles}


@pytest.fixture
def bench() -> Slow:
    made = Slow()
    made.engine.media = Encoder(made)  # type: ignore[assignment]
    return made


def asked(bench: Slow, *seeds: int) -> Any:
    ids, spans = place([[1, 2], *(tile(seed) for seed in seeds), [3]])
    return bench.submit(ids, media=PromptMedia(spans), n_predict=3, ignore_eos=True)


def test_streams_go_on_between_the_parts(bench: Slow) -> None:
    bench.streams(2)
    flowing = list(bench.scheduler.running)
    before = [seq.n_generated for seq in flowing]
    seq = asked(bench, 1)
    while not seq.n_generated:
        bench.step()
    gained = [stream.n_generated - n for stream, n in zip(flowing, before, strict=True)]
    assert min(gained) >= 3  # while an image took four steps' time
    waiting = [took for took in bench.took if took < 2 * STEP]
    assert max(waiting) <= 2 * STEP + PART
    assert bench.engine.media.runs == [1]  # type: ignore[union-attr]


def test_tiles_of_a_batch_take_less_of_their_time(bench: Slow) -> None:
    bench.streams(2)
    ids, spans = place([[1, 2], tile(1), [3]])
    line = bench.submit(ids, media=PromptMedia(spans), n_predict=3, ignore_eos=True, priority=BATCH_PRIORITY)
    while not bench.engine.media.runs:  # type: ignore[union-attr]
        bench.step()
    assert max(bench.took[:-1]) <= STEP + PART + 0.05
    bench.drain()
    assert line.n_generated == 3


def test_tiles_of_several_requests_are_one_batch_and_are_kept(bench: Slow) -> None:
    first, second = asked(bench, 1), asked(bench, 2)
    third = asked(bench, 1)
    bench.drain()
    assert bench.engine.media.runs == [2]  # type: ignore[union-attr]
    assert [seq.n_generated for seq in (first, second, third)] == [3, 3, 3]


def test_tiles_of_one_size_are_a_batch_whatever_lies_between(bench: Slow) -> None:
    seqs = [asked(bench, 1), asked(bench, 101), asked(bench, 2)]
    bench.drain()
    assert bench.engine.media.runs == [2, 1]  # type: ignore[union-attr]
    assert [seq.n_generated for seq in seqs] == [3, 3, 3]


def test_an_image_that_is_being_encoded_is_not_encoded_again(bench: Slow) -> None:
    bench.streams(1)
    first = asked(bench, 1)
    bench.step(2)
    second = asked(bench, 1)
    while not (first.n_generated and second.n_generated):
        assert bench.engine.media.runs in ([], [1])  # type: ignore[union-attr]
        bench.step()


def test_tiles_of_an_embedding_leave_streams_their_time(bench: Slow) -> None:
    bench.streams(1)
    (stream,) = bench.scheduler.running
    n_asked, before, began = 0, stream.n_generated, bench.time
    while not bench.scheduler.encode([tile(1)]):
        n_asked += 1
        at = bench.time
        assert not bench.scheduler.encode([tile(1)])  # one turn between two steps
        assert bench.time == at
        bench.step()
    assert n_asked == stream.n_generated - before >= 2
    assert bench.time - began >= N_PARTS * PART
    bench.drain()
    at = bench.time
    assert bench.scheduler.encode([tile(2)])  # nobody waits: all of it at once
    assert bench.time - at == pytest.approx(N_PARTS * PART, abs=0.1)


@pytest.mark.parametrize("error", [StepFailed("no luck"), DeviceFailed("gone")])
def test_a_failing_embedding_ends_with_the_device_only_others(bench: Slow, error: StepFailed) -> None:
    bench.streams(1)
    (stream,) = bench.scheduler.running
    encoder: Any = bench.engine.media
    encoder.fails = error
    with pytest.raises(type(error)):
        bench.scheduler.encode([tile(1)])
    bench.step()
    assert isinstance(bench.answers[stream].events[-1], Failed) == isinstance(error, DeviceFailed)
    encoder.fails = None
    bench.drain()
    assert bench.scheduler.encode([tile(1)])


@pytest.mark.parametrize("error", [StepFailed("no luck"), DeviceFailed("gone")])
def test_a_failure_ends_its_own_requests(bench: Slow, error: Exception) -> None:
    encoder: Any = bench.engine.media
    encoder.fails = error
    seq = asked(bench, 1)
    bench.step(2)
    assert seq.done
    assert isinstance(bench.answers[seq].events[-1], Failed)
    encoder.fails = None
    again = asked(bench, 1)
    bench.drain()
    assert again.n_generated == 3

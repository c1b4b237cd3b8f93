"""Step inputs: a batch as the input buffers of its plan."""

from __future__ import annotations

import random

import numpy as np
import pytest

from logitless.engine.batch import UBatch
from logitless.engine.runner.step_inputs import INPUTS, SAMPLING, SamplingFeeds, StepFeeds, room_of, sampling_feeds
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.sampling.sampler import RowSampler
from logitless.graph.ops.sampling import samplers as s
from logitless.graph.tensor import feed
from tests.engine.sampling.test_sampler import VOCAB


def test_rows_become_feeds() -> None:
    room = room_of(sampling_feeds(4, 32))
    feeds = SamplingFeeds(room)
    plain = RowSampler(SamplingParams(seed=1), VOCAB, 64).feeds()
    biased = RowSampler(SamplingParams(seed=1, logit_bias=tuple((i, 1.0) for i in range(20))), VOCAB, 64).feeds()
    feeds.write([plain, None, biased], [4, 5, 6])
    assert room["sample.list_ptr"].tolist() == [0, 0, 0, 20, 20]
    assert room["sample.slot"].tolist() == [4, -1, 6, -1]  # rows without a sampler are no sequence's
    assert room["sample.chain"][:, 0].tolist() == [s.TOP_K, 0, s.TOP_K, 0]
    assert room["sample.list_id"][:20].tolist() == list(range(20))
    assert room["sample.draws"][[0, 2]].tolist() == [list(plain.draws), list(biased.draws)]


def test_feeds_of_a_step_know_nothing_of_the_step_before() -> None:
    """What rows have in common is written once; any rows after any others are what they are in fresh arrays."""
    samplers = [
        RowSampler(SamplingParams(seed=i, temperature=t, logit_bias=bias), VOCAB, 64)
        for i, (t, bias) in enumerate([(0.0, ()), (0.5, ((3, 1.0),)), (1.0, ()), (0.7, ((4, -1.0), (5, 2.0)))])
    ]
    kept = room_of(sampling_feeds(4, 16))
    feeds = SamplingFeeds(kept)
    order = random.Random(5)
    for _ in range(200):
        slots = [order.randrange(5) for _ in range(order.randrange(5))]
        rows = [samplers[slot].feeds() if slot < 4 else None for slot in slots]
        feeds.write(rows, slots)
        fresh = room_of(sampling_feeds(4, 16))
        SamplingFeeds(fresh).write(rows, slots)
        n_ids = kept["sample.list_ptr"][-1]
        for name in ("list_ptr", "slot"):
            assert kept[f"sample.{name}"].tolist() == fresh[f"sample.{name}"].tolist()
        for name in ("list_kind", "list_id", "list_value"):
            assert kept[f"sample.{name}"][:n_ids].tolist() == fresh[f"sample.{name}"][:n_ids].tolist()
        for r in range(4):
            assert kept["sample.chain"][r, 0] == fresh["sample.chain"][r, 0]
            if r < len(rows) and rows[r] is not None:
                for name in ("params", "chain"):
                    assert kept[f"sample.{name}"][r].tobytes() == fresh[f"sample.{name}"][r].tobytes()
        for slot in set(slots) - {4}:  # its draws lie together from its first row on
            first = slots.index(slot)
            assert kept["sample.draws"][first].tolist() == list(samplers[slot].feeds().draws)


def test_tokens_that_fill_a_step_up_are_nobodys() -> None:
    """Also where the step before was full."""
    row = RowSampler(SamplingParams(seed=1), VOCAB, 64).feeds()
    names = ("tokens", "pos", "slot", "slot_mapping")
    outs = ("out", "out.pos", "out.slot")
    tokens, rows = (feed(name, (4,), "i32") for name in names), (feed(name, (2,), "i32") for name in outs)
    room = room_of([*tokens, *rows, *sampling_feeds(2, 16)])
    feeds = StepFeeds(room, 9, 160)
    feeds.write(UBatch([5, 6, 7, 8], [1, 2, 3, 4], [0, 0, 1, 1], [17, 18, 35, 36], [1, 3], [row, row]))
    assert [room[name].tolist() for name in (*names, *outs)] == [
        *([5, 6, 7, 8], [1, 2, 3, 4], [0, 0, 1, 1], [17, 18, 35, 36]),
        *([1, 3], [2, 4], [0, 1]),
    ]
    assert room["sample.slot"].tolist() == [0, 1]
    feeds.write(UBatch([3], [5], [1], [37], [0], [row]))
    assert [room[name].tolist() for name in (*names, *outs)] == [
        *([3, 0, 0, 0], [5, 0, 0, 0], [1, 9, 9, 9], [37, 160, 160, 160]),
        *([0, 0], [5, 0], [1, 9]),
    ]
    assert room["sample.slot"].tolist() == [1, -1]
    assert room["sample.chain"][1, 0] == s.END
    assert feeds.nbytes == sum(array.nbytes for array in room.values())


def test_a_plan_that_only_writes_the_cache_gets_its_positions_and_cells() -> None:
    """A prefill of a one-layer model has no attention, and so no `slot`."""
    room = room_of(feed(name, (4,), "i32") for name in ("tokens", "pos", "slot_mapping"))
    for array in room.values():
        array.fill(-1)
    feeds = StepFeeds(room, 9, 160)
    feeds.write(UBatch([5, 6, 7], [1, 2, 3], [0, 0, 1], [17, 18, 35]))
    assert room["pos"].tolist() == [1, 2, 3, 0]
    assert room["slot_mapping"].tolist() == [17, 18, 35, 160]


def test_each_array_is_filled_whichever_others_there_are() -> None:
    shapes = {"source": (3, 4), "seen": (2, 4), "out_seen": (2, 4), "positions": (4, 4), "out_positions": (4, 4)}
    for name in sorted(INPUTS - {"lora_scales"} - {f"sample.{name}" for name in SAMPLING}):
        shape = shapes.get(name.rpartition(".")[2], (4,))
        inputs = [feed("tokens", (4,), "i32"), *([] if name == "tokens" else [feed(name, shape, "i32")])]
        room = room_of([*inputs, *sampling_feeds(4, 16)])
        for array in room.values():
            array.fill(113)
        row = RowSampler(SamplingParams(seed=1), VOCAB, 64).feeds()
        batch = UBatch([5, 6], [1, 2], [0, 1], [17, 18], [0, 1], [row, row], [-1, -1])
        batch.begin, batch.end, batch.window_slot_mapping, batch.hidden_before, batch.hidden_to = (
            [3, 4] for _ in range(5)
        )
        batch.hidden_cells, batch.n_source = [3, -1], [1, 2]
        batch.media_rows, batch.seen, batch.rope_positions = [0, 5], [1, 2], [np.ones((4, 2), np.int32)]
        StepFeeds(room, 9, 160, 33, 7).write(batch)
        assert 113 not in room[name], name


def test_an_input_that_no_step_fills_is_an_error_before_the_step() -> None:
    room = room_of([feed("tokens", (4,), "i32"), feed("unheard", (4,), "i32")])
    with pytest.raises(ValueError, match="no step fills the inputs unheard"):
        StepFeeds(room, 9, 160)

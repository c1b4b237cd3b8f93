"""Step inputs: writes a batch to the input buffers of its plan.

A small model's step is short, and Python objects that were last used a step ago have left the CPU
caches. So this code touches little: it allocates nothing for a step and writes a request's constant
sampling parameters once for each plan."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.engine.batch import UBatch
from logitless.engine.sampling.params import MAX_CHAIN
from logitless.engine.sampling.sampler import Row
from logitless.graph.dtype import DTYPES
from logitless.graph.ops.sampling import samplers as s
from logitless.graph.tensor import Tensor, feed
from logitless.models.grammar import GrammarError

Array = npt.NDArray[Any]
MASK_PATIENCE = 0.01  # seconds that a step waits for pending token bitmasks when all else is done
NOT_SAMPLED = -2  # in mask_row
SAMPLING = ("params", "chain", "draws", "list_ptr", "list_kind", "list_id", "list_value", "slot")
INPUTS = frozenset(  # inputs that `StepFeeds` fills, and `lora_scales`
    {"tokens", "pos", "slot", "slot_mapping", "window_slot_mapping", "begin", "end", "out", "out.pos", "out.slot"}
    | {"targets", "lora_scales"}
    | {f"media.{name}" for name in ("ids", "is_text", "seen", "out_seen", "positions", "out_positions")}
    | {"hidden.before", "hidden.to", "hidden.cells", "seen", "source", *(f"sample.{name}" for name in SAMPLING)}
)


def sampling_feeds(n_rows: int, n_list: int, n_masks: int = 0, n_vocab: int = 0) -> list[Tensor]:
    """Inputs of the op `sample` after logits and state.

    `n_rows`: sampled positions. `n_list`: entries of the sparse lists of all rows together."""
    n_draws = 2 * n_rows if n_masks else n_rows
    shapes: list[tuple[str, tuple[int, ...], str]] = [
        ("params", (n_rows, s.N_PARAMS), "f32"),
        ("chain", (n_rows, MAX_CHAIN), "i32"),
        ("draws", (n_draws, 4), "u32"),
        ("list_ptr", (n_rows + 1,), "i32"),
        ("list_kind", (n_list,), "i32"),
        ("list_id", (n_list,), "i32"),
        ("list_value", (n_list,), "f32"),
        ("slot", (n_rows,), "i32"),
    ]
    feeds = [feed(f"sample.{name}", shape, dtype) for name, shape, dtype in shapes]
    if n_masks:
        feeds.append(feed("sample.mask", (n_masks, -(-n_vocab // 32)), "u32", deferred=True))
        feeds.append(feed("sample.mask_row", (n_rows,), "i32", deferred=True))
    return feeds


def token_masks(batch: UBatch, n_masks: int, n_rows: int, n_vocab: int, unsampled: dict[int, str]) -> dict[str, Array]:
    """Token bitmasks, a deferred input. Rows whose mask is still pending are not sampled."""
    masks, mask_row = np.zeros((n_masks, -(-n_vocab // 32)), np.uint32), np.full(n_rows, -1, np.int32)
    deadline, n = time.monotonic() + MASK_PATIENCE, 0
    for i, row in enumerate(batch.rows):
        if row is None or row.mask is None:
            continue
        try:
            bits = row.mask.wait(deadline - time.monotonic())
        except TimeoutError:
            mask_row[i], unsampled[i] = NOT_SAMPLED, ""
        except GrammarError as error:
            mask_row[i], unsampled[i] = NOT_SAMPLED, str(error)
        else:
            if bits is not None:
                masks[n, : len(bits)] = bits
                mask_row[i], n = n, n + 1
    return {"sample.mask": masks, "sample.mask_row": mask_row}


def room_of(nodes: Iterable[Tensor]) -> dict[str, Array]:
    """New arrays for the inputs among `nodes`, without deferred ones."""
    feeds = (t for t in nodes if t.op == "feed" and not t.attrs.get("deferred"))
    return {t.name: np.zeros(t.shape, DTYPES[t.dtype].numpy) for t in feeds}


class StepFeeds:
    """Writes batches to the input arrays of one plan: `room`, by name.

    Raises ValueError if the plan has an input that no step fills. Padding tokens belong to
    `spare_slot` and write to the token slots `spare` and `window_spare` (sliding-window
    KV group) and to the row `spare_hidden` (hidden_rows.py).

    Each array is written if the plan has it, whichever others it has: a plan holds only the inputs
    that its graph reads."""

    def __init__(
        self,
        room: Mapping[str, Array],
        spare_slot: int,
        spare: int,
        window_spare: int = 0,
        spare_hidden: int = 0,
    ) -> None:
        unfilled = room.keys() - INPUTS
        if unfilled:
            raise ValueError(f"no step fills the inputs {', '.join(sorted(unfilled))}")
        self.nbytes = sum(array.nbytes for array in room.values())
        self._tokens, self._out = room["tokens"], room.get("out")
        self._pos, self._slot, self._slot_mapping = room.get("pos"), room.get("slot"), room.get("slot_mapping")
        self._out_pos, self._out_slot = room.get("out.pos"), room.get("out.slot")
        self._window_slot_mapping, self._window_spare = room.get("window_slot_mapping"), window_spare
        self._begin, self._end = room.get("begin"), room.get("end")
        self._before, self._to = room.get("hidden.before"), room.get("hidden.to")
        self._spare_hidden = spare_hidden
        self._cells, self._seen, self._source = room.get("hidden.cells"), room.get("seen"), room.get("source")
        self._targets, self.row_scales = room.get("targets"), room.get("lora_scales")
        self._spare_slot, self._spare = spare_slot, spare
        self._media = MediaFeeds(room) if any(name.startswith("media.") for name in room) else None
        self._sampling = SamplingFeeds(room) if "sample.params" in room else None

    def write(self, batch: UBatch) -> None:
        """Write every input but `lora_scales`."""
        slot, out = batch.slot, batch.out
        n, n_out = len(slot), len(out)
        self._tokens[:n] = batch.tokens
        if self._media is not None:
            np.maximum(self._tokens, 0, out=self._tokens)  # ids of image rows are negative
            self._media.write(batch)
        if n < len(self._tokens):
            self._tokens[n:] = 0
        if self._pos is not None:
            self._pos[:n], self._pos[n:] = batch.pos, 0
        if self._slot is not None:
            self._slot[:n], self._slot[n:] = slot, self._spare_slot
        if self._slot_mapping is not None:
            self._slot_mapping[:n], self._slot_mapping[n:] = batch.slot_mapping, self._spare
        if self._window_slot_mapping is not None:
            self._window_slot_mapping[:n], self._window_slot_mapping[n:] = batch.window_slot_mapping, self._window_spare
        if self._begin is not None:  # padding reads the zero state
            self._begin[:n], self._begin[n:] = batch.begin, 0
        if self._end is not None:  # padding writes none
            self._end[:n], self._end[n:] = batch.end, -1
        if self._before is not None:
            self._before[:n], self._before[n:] = batch.hidden_before, self._spare_hidden
        if self._to is not None:
            self._to[:n], self._to[n:] = batch.hidden_to, self._spare_hidden
        if self._cells is not None:
            self._cells[:n], self._cells[n:] = batch.hidden_cells, self._spare
            self._cells[self._cells < 0] = self._spare
        if self._seen is not None:
            self._seen[:, :n], self._seen[:, n:] = (batch.seen, batch.pos), 0
        if self._source is not None:
            self._source[:, :n], self._source[:, n:] = (batch.pos, batch.n_source, batch.n_source), 0
            self._source[2, :n] -= 1
        if self._sampling is None:  # prefill only
            return
        slots = [slot[i] for i in out]
        if self._out is not None:
            self._out[:n_out], self._out[n_out:] = out, 0
        if self._out_pos is not None:
            self._out_pos[:n_out], self._out_pos[n_out:] = [batch.pos[i] for i in out], 0
        if self._out_slot is not None:
            self._out_slot[:n_out], self._out_slot[n_out:] = slots, self._spare_slot
        if self._targets is not None:
            self._targets[:n_out], self._targets[n_out:] = batch.targets, 0
        self._sampling.write(batch.rows, slots)


class MediaFeeds:
    """Writes the image inputs of one plan."""

    def __init__(self, room: Mapping[str, Array]) -> None:
        self._rows, self._is_text = room.get("media.ids"), room.get("media.is_text")
        self._seen, self._out_seen = room.get("media.seen"), room.get("media.out_seen")
        self._positions, self._out_positions = room.get("media.positions"), room.get("media.out_positions")

    def write(self, batch: UBatch) -> None:
        n, n_out = len(batch.media_rows), len(batch.out)
        if self._rows is not None:
            self._rows[:n], self._rows[n:] = batch.media_rows, 0
        if self._is_text is not None:
            self._is_text[:n], self._is_text[n:] = [row == 0 for row in batch.media_rows], 1
        seen = np.array([batch.seen, batch.pos], np.int32)
        places = np.concatenate(batch.rope_positions, 1) if batch.rope_positions else np.zeros((4, 0), np.int32)
        if self._seen is not None:
            self._seen[:, :n], self._seen[:, n:] = seen, 0
        if self._out_seen is not None:
            self._out_seen[:, :n_out], self._out_seen[:, n_out:] = seen[:, batch.out], 0
        if self._positions is not None:
            self._positions[:, :n], self._positions[:, n:] = places, 0
        if self._out_positions is not None:
            self._out_positions[:, :n_out], self._out_positions[:, n_out:] = places[:, batch.out], 0


class SamplingFeeds:
    """Writes the sampling inputs of one plan, except for the token bitmasks, which are deferred.

    With a token bitmask, a row has two draws."""

    def __init__(self, room: Mapping[str, Array]) -> None:
        """`room`: an array for each of `sampling_feeds`, by name."""
        self._params, self._chain = room["sample.params"], room["sample.chain"]
        self._draws, self._ptr = room["sample.draws"].reshape(-1), room["sample.list_ptr"]
        self._kinds, self._ids = room["sample.list_kind"], room["sample.list_id"]
        self._values, self._slot = room["sample.list_value"], room["sample.slot"]
        n_rows = len(self._slot)
        self._row_draws = len(self._draws) // max(1, n_rows)
        # params and chain of each row
        self._written: list[tuple[Array, Array] | None] = [None] * n_rows

    def write(self, rows: Sequence[Row | None], slots: Sequence[int]) -> None:
        """Write the rows of a batch. Rows that are None, and padding rows, sample nothing."""
        whose: list[int] = []
        ptr: list[int] = []
        draws: list[int] = []
        kinds: list[int] = []
        ids: list[int] = []
        values: list[float] = []
        before = -1
        for r, row in enumerate(rows):
            ptr.append(len(ids))
            if row is None:
                before = -1  # this row has no draws, so the next row of the sequence starts its own
                whose.append(before)
                self._nothing(r, r + 1)
                continue
            if slots[r] != before:  # the draws of a sequence's rows are contiguous from here
                before, start = slots[r], self._row_draws * r
                draws[start:] = [0] * (start - len(draws))
            whose.append(before)
            draws += row.draws
            if row.ids:
                kinds += row.kinds
                ids += row.ids
                values += row.values
            written = self._written[r]
            if written is None or written[0] is not row.params or written[1] is not row.chain:
                self._written[r] = None  # in case an assignment raises
                self._params[r], self._chain[r] = row.params, row.chain
                self._written[r] = row.params, row.chain
        n, total = len(rows), len(ids)
        self._slot[:n] = whose
        self._ptr[:n] = ptr
        self._ptr[n:] = total
        if draws:
            del draws[len(self._draws) :]
            self._draws[: len(draws)] = draws
        if ids:
            self._kinds[:total], self._ids[:total], self._values[:total] = kinds, ids, values
        if n < len(self._slot):
            self._slot[n:] = -1
            self._nothing(n, len(self._slot))

    def _nothing(self, first: int, stop: int) -> None:
        """Make rows sample nothing."""
        self._chain[first:stop] = s.END  # all of it: a code that is left would choose a larger variant of kernels
        self._written[first:stop] = [None] * (stop - first)

"""Media of a prompt: tiles of pixels or sound, their places among the tokens, and M-RoPE positions.

Each row of a tile is a token of the prompt whose id is negative and made from the hash of its
values. So prefix cache, host memory and slot files distinguish media like texts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]
FIRST_ID = -2  # ids of media rows are at most this; −1 has other meanings


@dataclass(frozen=True, eq=False)
class Tile:
    """One input of an encoder: pixels (height, width, 3) u8 or a spectrogram (frames, bins) f32, and
    its rows in the prompt."""

    values: Values
    n_rows: int  # in the prompt
    grid: tuple[int, int] | None  # lines and columns of an image's rows, for M-RoPE; None: it is sound

    @property
    def is_audio(self) -> bool:
        return self.grid is None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of an image, frames and bins of sound. Tiles of one are a batch."""
        height, width = self.values.shape[:2]
        return height, width

    @cached_property
    def key(self) -> bytes:
        """Hash of values and sizes. Equal keys have equal rows."""
        digest = blake2b(digest_size=16)
        digest.update(repr((self.values.shape, self.grid)).encode())
        digest.update(self.values.tobytes())
        return digest.digest()

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """A negative token id for each row: 31 bits of the hash of key and row."""
        raw = b"".join(
            blake2b(i.to_bytes(4, "little"), key=self.key, digest_size=4).digest() for i in range(self.n_rows)
        )
        hashed = np.frombuffer(raw, "<u4") % np.uint32(2**31 - 2)
        return tuple((FIRST_ID - hashed.astype(np.int64)).tolist())


@dataclass(frozen=True, eq=False)
class Span:
    """A tile in a prompt: its rows are tokens `start` to `end`."""

    start: int
    tile: Tile

    @property
    def end(self) -> int:
        return self.start + self.tile.n_rows


@dataclass(frozen=True, eq=False)
class PromptMedia:
    """The tiles of one prompt, in order."""

    spans: tuple[Span, ...]
    causal: bool = True  # a row of an image sees only earlier rows, as of sound; else all rows of its tile
    mrope: bool = False
    framed: bool = False  # a row begins each tile, one ends each of its lines, and one ends it (HunyuanVL)

    @cached_property
    def _starts(self) -> list[int]:
        return [span.start for span in self.spans]

    def at(self, position: int) -> Span | None:
        """The tile that has a row at this position."""
        i = bisect_right(self._starts, position) - 1
        return self.spans[i] if i >= 0 and position < self.spans[i].end else None

    def within(self, start: int, stop: int) -> list[Span]:
        """Tiles with a row at one of the positions start … stop − 1."""
        return [span for span in self.spans if span.start < stop and span.end > start]

    def chunk(self, start: int, n: int) -> int:
        """Tokens of a prefill chunk of about n tokens from `start`. It cuts no bidirectional tile."""
        span = None if self.causal else self.at(start + n - 1)
        if span is None or span.tile.is_audio or span.end == start + n:
            return n
        return span.start - start if span.start > start else span.end - start

    def last_seen(self, start: int, n: int) -> list[int]:
        """Last position that each of n tokens from `start` attends to."""
        last = list(range(start, start + n))
        if not self.causal:
            for span in self.within(start, start + n):
                if span.tile.is_audio:
                    continue
                for p in range(max(start, span.start), min(start + n, span.end)):
                    last[p - start] = span.end - 1
        return last

    def positions(self, start: int, n: int) -> npt.NDArray[np.int32]:
        """M-RoPE positions (4, n) of n tokens from `start`, in time, height, width and images.

        An image has one position in time, and the text after it goes on behind its larger side
        (Qwen2-VL). Rows of sound have positions of text. Framed rows have their own positions in
        time, their line, their column, and the number of earlier images; their first and last row
        have positions of text (HunyuanVL)."""
        places = np.tile(np.arange(start, start + n), (4, 1))
        n_saved = 0  # rows of the images so far, less the positions that they take
        for number, span in enumerate(self.spans):
            if span.tile.grid is None:
                continue
            rows, columns = span.tile.grid
            inside = np.arange(max(start, span.start + self.framed), min(start + n, span.end - self.framed))
            if self.framed:
                line, place = np.divmod(inside - span.start - 1, columns + 1)
                # the second component is the place in the line here
                places[1:, inside - start] = np.stack([place, line, np.full_like(inside, number)])
                continue
            first = span.start - n_saved
            if len(inside):
                i = inside - span.start
                time, y, x = np.full_like(i, first), i // columns, i % columns
                places[:, inside - start] = np.stack([time, first + y, first + x, time])
            n_saved += span.tile.n_rows - max(rows, columns)
            after = np.arange(max(start, span.end), start + n)
            if len(after):
                places[:, after - start] = after - n_saved
        return places.astype(np.int32)


def place(pieces: Sequence[Sequence[int] | Tile]) -> tuple[tuple[int, ...], tuple[Span, ...]]:
    """(token ids of a prompt, its tiles) from texts' ids and tiles in order."""
    ids: list[int] = []
    spans: list[Span] = []
    for piece in pieces:
        if isinstance(piece, Tile):
            spans.append(Span(len(ids), piece))
            ids += piece.ids
        else:
            ids += piece
    return tuple(ids), tuple(spans)

"""Images of a run: tiles in a temporary file, and the rows that the vision encoder makes of them.

A frozen encoder makes the rows of each tile once, before the first step; rows are inputs of steps.
Only tiles and rows of one device run are in memory."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from logitless.graph.execution.preemptible_plan import PreemptiblePlan
from logitless.graph.execution.session import Session
from logitless.graph.tensor import Tensor, feed
from logitless.models.batch import MediaRows, Sequences
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams
from logitless.models.media.encoders import Encoders
from logitless.models.media.media_input import MediaInput
from logitless.models.media.params import params_for
from logitless.models.media.prompt_media import Tile
from logitless.models.tokenizer import Tokenizer

Array = npt.NDArray[Any]
I32 = npt.NDArray[np.int32]
SERVED_UBATCH = 512  # tokens of a server's step, by default: bidirectional images of any size get no more


@dataclass(frozen=True)
class TokenMedia:
    """Images among the n tokens of an example."""

    rows: I32  # (n,): a token's row of the run's images; 0: it is text
    spans: tuple[tuple[int, int], ...]  # first token of each tile, and the one after its last
    positions: I32 | None = None  # (4, n): M-RoPE's
    last: I32 | None = None  # (n,): last token that each sees, where images are bidirectional

    def cut(self, n: int) -> TokenMedia:
        """The images of the first n tokens."""
        positions, last = (None if a is None else a[..., :n] for a in (self.positions, self.last))
        spans = tuple(span for span in self.spans if span[1] <= n)
        return replace(self, rows=self.rows[:n], spans=spans, positions=positions, last=last)

    def end(self, n_tokens: int) -> int:
        """Tokens of the longest beginning whose tokens without the last fit into a window of
        `n_tokens` and divide no image."""
        end = min(len(self.rows), n_tokens + 1)
        for start, stop in reversed(self.spans):
            if start < end <= stop:
                end = start
        return end


PlacedMedia = tuple[int, TokenMedia]  # first token of a sequence in its window, and its images


class _StoredTile(NamedTuple):
    """A tile: its kind and size, the place of its values in their file, and its rows."""

    is_audio: bool
    height: int
    width: int
    at: int
    nbytes: int
    first: int
    n_rows: int


class RunMedia:
    """The images of one run, equal ones once. Row 0 is that of text."""

    def __init__(
        self,
        input: MediaInput,
        n_embd: int,
        define: Callable[[Session], Encoders],
        *,
        shared: bool = False,
        folder: str | Path | None = None,
    ) -> None:
        """`define`: the encoder on a session; `shared`: it is there for others, too, else its weights
        are deleted when all is encoded. `folder`: of the temporary files; None: the system's."""
        self.input = input
        self._n_embd, self._define, self._shared = n_embd, define, shared
        self._values, self._rows = self._file(folder), self._file(folder)
        self._tiles: dict[bytes, _StoredTile] = {}
        self._n_rows = 1
        self._n_values = 0  # bytes

    def _file(self, folder: str | Path | None) -> IO[bytes]:
        """A temporary file, for as long as this object lives."""
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        weakref.finalize(self, file.close)
        return file

    @property
    def n_tiles(self) -> int:
        return len(self._tiles)

    @property
    def _depth(self) -> int:
        """Vectors of a row: of the embedding, and of each deepstack layer."""
        return 1 + len(self.input.params.deepstack)

    def add(self, tile: Tile) -> int:
        """The first row of a tile, which is kept if it is new. OSError: the disk is full."""
        stored = self._tiles.get(tile.key)
        if stored is None:
            at, nbytes = self._n_values, tile.values.nbytes
            self._values.seek(at)
            self._values.write(tile.values.tobytes())
            self._tiles[tile.key] = stored = _StoredTile(
                tile.is_audio, *tile.size, at, nbytes, self._n_rows, tile.n_rows
            )
            self._n_values += nbytes
            self._n_rows += tile.n_rows
        return stored.first

    # -- encoding

    def encode(self, session: Session, arena: str = "") -> Iterator[float | int]:
        """Encode all tiles: yields before each part of a device run its seconds (a float, 0: unknown),
        and after each tile the number of those that are done."""
        encoders = self._define(session)
        kind, plan = (False, 0, 0), None
        for done, stored in enumerate(sorted(self._tiles.values()), 1):
            if plan is None or kind != stored[:3]:
                kind = stored[:3]
                plan = session.plan(partial(_graph, encoders, *kind), arena)
            encoder, size = encoders.of(stored.is_audio), stored[1:3]
            self._values.seek(stored.at)
            values = np.frombuffer(self._values.read(stored.nbytes), np.float32 if stored.is_audio else np.uint8)
            values = values.reshape(size if stored.is_audio else (*size, 3))
            *places, kinds = encoder.row_places(*size)
            feeds = {**encoder.feeds([values]), "media.kinds": kinds.astype(np.int32)}
            if isinstance(plan, PreemptiblePlan):
                yield from plan.parts(feeds)
                outputs = plan.results()
            else:
                outputs = plan.run(feeds)
            rows = np.zeros((stored.n_rows, self._depth, self._n_embd), np.float32)
            depth = 1 if stored.is_audio else self._depth
            rows[places[0], :depth] = np.stack(outputs[:depth], 1)
            if len(kinds):
                rows[places[1], 0] = outputs[-1]
            self._rows.seek(stored.first * rows[0].nbytes)
            self._rows.write(rows.tobytes())
            yield done
        if not self._shared:
            session.delete([name for _, encoder in encoders for name in encoder.states])

    def largest(self, session: Session) -> list[Tensor]:
        """Graph of the largest tile."""
        stored = max(self._tiles.values(), key=lambda stored: stored.height * stored.width)
        return _graph(self._define(session), stored.is_audio, stored.height, stored.width)

    # -- training steps

    def added(self, rows: Sequences) -> Sequences:
        """Inputs of sequences with images among their tokens."""
        n = rows.tokens.shape[0]
        pools = [feed(f"media.rows.{i}", (n, self._n_embd)) for i in range(self._depth)]
        media = MediaRows.inputs(pools, mrope=self.input.mrope)
        bounds = None if self.input.params.causal else feed("media.bounds", (2, n), "i32")
        return replace(rows, media=media, bounds=bounds)

    def feeds(self, windows: Sequence[Sequence[PlacedMedia]], pos: Array, start: Array) -> dict[str, Array]:
        """Values of the inputs of `added`. pos and start (windows, T): as of `Sequences`."""
        rows, places = np.zeros_like(pos), np.tile(pos, (4, 1, 1))
        last = np.tile(np.arange(pos.shape[1], dtype=np.int32), (len(pos), 1))
        for i, placed in enumerate(windows):
            for at, media in placed:
                n = len(media.rows)
                rows[i, at : at + n] = media.rows
                if media.positions is not None:
                    places[:, i, at : at + n] = media.positions
                if media.last is not None:
                    last[i, at : at + n] = at + np.minimum(media.last, n - 1)
        values = self._read(rows.reshape(-1))
        feeds: dict[str, Array] = {f"media.rows.{i}": values[i] for i in range(self._depth)}
        feeds["media.is_text"] = (rows.reshape(-1) == 0).astype(np.float32)
        feeds["media.positions"] = places.reshape(4, -1)
        feeds["media.bounds"] = np.stack([start.reshape(-1), last.reshape(-1)])
        return feeds

    def _read(self, numbers: Array) -> Array:
        """Rows by number, (vectors of a row, T, n_embd); zero for text."""
        values = np.zeros((self._depth, len(numbers), self._n_embd), np.float32)
        nbytes = 4 * self._depth * self._n_embd
        ends = np.flatnonzero((np.diff(numbers) != 1) | (numbers[:-1] == 0)) + 1
        for where in np.split(np.arange(len(numbers)), ends):
            if len(where) and numbers[where[0]]:
                self._rows.seek(int(numbers[where[0]]) * nbytes)
                block = np.frombuffer(self._rows.read(len(where) * nbytes), np.float32)
                values[:, where] = block.reshape(len(where), self._depth, self._n_embd).swapaxes(0, 1)
        return values


def _graph(encoders: Encoders, is_audio: bool, height: int, width: int) -> list[Tensor]:
    """Rows of one tile: those of patches, then those beside them."""
    encoder = encoders.of(is_audio)
    rows = encoder.rows(1, height, width)
    if n := len(encoder.row_places(height, width)[1]):
        rows.append(encoders.extra_rows(feed("media.kinds", (n,), "i32")))
    return rows


def projector_media(
    text: GGUFFile,
    h: Hparams,
    tokenizer: Tokenizer,
    projector: str | Path,
    *,
    tokens: tuple[int, int] = (0, 0),
    folder: str | Path | None = None,
) -> RunMedia:
    """Images by a projector file of their own for a text model. `tokens`: least and most of an image
    of any size, 0: the projector's; `folder`: see RunMedia. ModelFileError or OSError says what is
    wrong with the file."""
    gguf = GGUFFile.open(projector)
    params = params_for(text, h, gguf, tokens, SERVED_UBATCH)
    input = MediaInput(params, tokenizer, mrope=bool(h.mrope))
    return RunMedia(input, h.n_embd, lambda session: Encoders.define(session, gguf, params, h.n_embd), folder=folder)

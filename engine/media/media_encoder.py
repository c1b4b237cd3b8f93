"""Media encoder: runs the encoders of images and sounds on the session, and keeps rows on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from logitless.graph.execution.preemptible_plan import PreemptiblePlan
from logitless.graph.execution.session import Session
from logitless.graph.ops.attention.paged_attention import PAGE, store_v
from logitless.graph.ops.elementwise import scale
from logitless.graph.ops.shape import reshape
from logitless.graph.tensor import Tensor, feed
from logitless.models.gguf.file import GGUFFile
from logitless.models.media.prompt_media import Tile

if TYPE_CHECKING:
    from logitless.models.media.params import MediaParams

ARENA = "media"  # name of the plans' memory arena
MOST_INPUTS = 8192  # patches and frames of a batch of tiles
LEAST_ROWS = 1024  # minimum of the rows of the pool


def check_numbers(projector: GGUFFile, p: MediaParams, n_embd: int) -> None:
    """ModelFileError: a weight of the projector is no number."""
    from logitless.models.media.encoders import Encoders

    Encoders.check_numbers(projector, p, n_embd)


class MediaEncoder:
    """Encodes tiles to rows of a pool on the device; the least recently used tiles go first.

    Row 0 of the pool is zero: tokens of text read it."""

    def __init__(self, session: Session, gguf: GGUFFile, p: MediaParams, n_embd: int, n_rows: int) -> None:
        """`n_rows`: rows that the pool keeps."""
        from logitless.models.media.encoders import Encoders  # here: most models have no projector

        self.params = p
        self._session = session
        self.encoders = Encoders.define(session, gguf, p, n_embd)
        self.n_rows = max(n_rows, LEAST_ROWS)
        n_pages = -(-(1 + self.n_rows) // PAGE)
        names = ["media_rows", *(f"media_rows.deepstack.{i}" for i in range(len(p.deepstack)))]
        self.pools = [session.define(name, (n_pages, 1, PAGE, n_embd)) for name in names]
        self._places: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # by key: (first row, rows), LRU order
        self._reserved: dict[bytes, tuple[int, int]] = {}  # of tiles in work
        self.n_encoded = 0  # tiles
        self.unprepared = list(self.encoders)  # encoders without a plan of their usual size

    def first_row(self, tile: Tile) -> int | None:
        """The pool's first row of a tile; None: the pool does not have it."""
        place = self._places.get(tile.key)
        if place is None:
            return None
        self._places.move_to_end(tile.key)
        return place[0]

    def place(self, tile: Tile, pinned: Collection[bytes] = ()) -> bool:
        """Reserve rows of the pool for a tile; False: there are none. `pinned`: keys of tiles that must stay."""
        first = self._make_room(tile.n_rows, pinned)
        if first is not None:
            self._reserved[tile.key] = first, tile.n_rows
        return first is not None

    def encode(self, tiles: Sequence[Tile]) -> Iterator[float]:
        """Encode tiles of one size, for which `place` has reserved rows. Yields before each part its
        expected seconds, 0 if unknown. The rows are valid when the generator ends."""
        try:
            yield from self._run([(tile, self._reserved[tile.key][0]) for tile in tiles])
            self._places |= {tile.key: self._reserved[tile.key] for tile in tiles}
            self.n_encoded += len(tiles)
        finally:
            for tile in tiles:
                self._reserved.pop(tile.key, None)

    def _run(self, placed: Sequence[tuple[Tile, int]]) -> Iterator[float]:
        tiles = [tile for tile, _ in placed]
        size, is_audio = tiles[0].size, tiles[0].is_audio
        plan = self._plan(is_audio, len(tiles), *size)
        encoder = self.encoders.of(is_audio)
        feeds = encoder.feeds([tile.values for tile in tiles])
        firsts = np.array([first for _, first in placed])[:, None]
        *places, kinds = encoder.row_places(*size)
        for name, of_tile in zip(("to", "extra"), places, strict=True):
            feeds[f"media.{name}"] = (firsts + of_tile).reshape(-1).astype(np.int32)
        feeds["media.kinds"] = np.tile(kinds.astype(np.int32), len(tiles))
        yield from plan.parts(feeds)

    def _plan(self, is_audio: bool, n_tiles: int, height: int, width: int) -> PreemptiblePlan:
        key = ("media", is_audio, n_tiles, height, width)
        plan = self._session.cached_plan(key, partial(self._build, *key[1:]), ARENA)
        assert isinstance(plan, PreemptiblePlan)
        return plan

    def prepare_ahead(self, request_waits: Callable[[], bool]) -> bool:
        """Compile plans for one tile of the usual size, until a request waits. False: all are compiled."""
        while self.unprepared:
            is_audio, encoder = self.unprepared[-1]
            plan = self._plan(is_audio, 1, *encoder.usual_size)
            while not request_waits():
                if not plan.compile_ahead():
                    self.unprepared.pop()
                    break
            else:
                return True
        return False

    def batch_size(self, tile: Tile) -> int:
        """Maximum of tiles of this size in one run."""
        return max(1, MOST_INPUTS // max(1, self.encoders.of(tile.is_audio).n_inputs(*tile.size)))

    @property
    def largest(self) -> list[Callable[[], list[Tensor]]]:
        """Graphs of one tile of the usual largest size, for each encoder."""
        return [partial(self._build, kind, 1, *encoder.usual_size) for kind, encoder in self.encoders]

    def _build(self, is_audio: bool, n_tiles: int, height: int, width: int) -> list[Tensor]:
        """Nodes that write the rows of tiles to the pools, and the rows beside those of patches."""
        encoder = self.encoders.of(is_audio)
        n_extra = n_tiles * len(encoder.row_places(height, width)[1])
        rows = encoder.rows(n_tiles, height, width)
        rows += [scale(rows[0], factor=0.0)] * (len(self.pools) - len(rows))  # sounds add nothing after layers
        to = feed("media.to", rows[0].shape[:1], "i32")
        pools = [_stored(pool, of_pool, to) for pool, of_pool in zip(self.pools, rows, strict=True)]
        if n_extra:
            to, kinds = (feed(f"media.{name}", (n_extra,), "i32") for name in ("extra", "kinds"))
            pools[0] = _stored(pools[0], self.encoders.extra_rows(kinds), to)
        return pools

    def _make_room(self, n: int, pinned: Collection[bytes]) -> int | None:
        """First of n neighbouring free rows, evicting the least recently used tiles; None: all others are pinned."""
        while True:
            start = 1
            for first, n_rows in sorted([*self._places.values(), *self._reserved.values(), (1 + self.n_rows, 0)]):
                if first - start >= n:
                    return start
                start = first + n_rows
            oldest = next((key for key in self._places if key not in pinned), None)
            if oldest is None:
                return None
            del self._places[oldest]

    def clear(self) -> None:
        """Forget all rows: the device's memory is gone."""
        self._places.clear()


def _stored(pool: Tensor, rows: Tensor, to: Tensor) -> Tensor:
    """The pool with rows (n, n_embd) written to places `to`."""
    n, width = rows.shape
    return store_v(pool, reshape(rows, shape=(n, 1, width)), to)

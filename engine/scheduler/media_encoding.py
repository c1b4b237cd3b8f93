"""Media encoding: runs the encoders of images and sounds for new prompts between decode steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator

from logitless.engine.batch import DeviceFailed, StepFailed
from logitless.engine.errors import InvalidRequest
from logitless.engine.media.media_encoder import MediaEncoder
from logitless.engine.requests import Event
from logitless.engine.scheduler.postprocess import failure
from logitless.engine.scheduler.runner import Runner
from logitless.engine.scheduler.running_set import RunningSet
from logitless.engine.scheduler.step_budget import SLOWDOWN, PrefillBudget
from logitless.engine.sequence import Sequence
from logitless.models.media.prompt_media import Tile

log = logging.getLogger("logitless.scheduler")
Events = list[tuple[Sequence, Event]]
TileWork = tuple[Sequence | None, Tile]  # a tile, and its sequence


class MediaEncoding:
    """Runs at most one batch of tiles; a prompt is computed up to its first tile that is missing."""

    def __init__(
        self, runner: Runner, budget: PrefillBudget, running: RunningSet, clock: Callable[[], float], n_ubatch: int
    ) -> None:
        self._runner = runner
        self._budget = budget
        self._running = running
        self._clock = clock
        self._n_ubatch = n_ubatch
        self._parts: Iterator[float] | None = None
        self._worked = -1  # step before which tiles of no sequence were encoded
        self._seqs: list[Sequence] = []  # that need the tiles in work

    def encoder(self) -> MediaEncoder:
        """The model's encoder. InvalidRequest: it has none."""
        encoder = self._runner.media
        if encoder is None:
            raise InvalidRequest("this model reads no images and sounds: it was started without --mmproj")
        return encoder

    def turn(self, events: Events) -> bool:
        """Encode while streams may wait, then bound each prompt to the tiles that are there; False
        if there was nothing to do."""
        encoder = self._runner.media
        prompts = [seq for seq in self._running.seqs if seq.request.media is not None and seq.started]
        if encoder is None or not (prompts or self._parts):
            return False
        ran = False
        share = SLOWDOWN - 1 if all(seq.request.is_batch for seq in prompts) else 1.0
        try:
            ran = self._work(encoder, lambda: [(seq, tile) for seq in prompts for tile in self._needed(seq)], share)
        except DeviceFailed:
            self._seqs, self._parts = [], None
            raise
        except StepFailed as error:
            self._failed(error, events)
        for seq in prompts:
            seq.n_encoded = self._reach(encoder, seq)
        return ran

    def encode(self, tiles: list[Tile]) -> bool:
        """Encode tiles that no sequence has, as long as streams may wait, once between two steps of
        theirs; True: all are there. InvalidRequest: they have no room together."""
        encoder = self.encoder()
        n_rows = sum({tile.key: tile.n_rows for tile in tiles}.values())
        if n_rows > encoder.n_rows:
            raise InvalidRequest(f"the images and sounds have {n_rows} tokens, at most {encoder.n_rows} are possible")
        if self._worked != self._running.step or not self._streams:
            self._worked = self._running.step
            try:
                self._work(encoder, lambda: [(None, tile) for tile in tiles])
            except StepFailed as error:
                of_prompts = bool(self._seqs)
                self._seqs, self._parts = [], None
                if isinstance(error, DeviceFailed) or not of_prompts:  # prompts try again, and fail themselves
                    raise
        return all(encoder.first_row(tile) is not None for tile in tiles)

    @property
    def _streams(self) -> list[Sequence]:
        """Sequences whose clients wait for tokens, if one of them has seen the time between two."""
        streams = [seq for seq in self._running.seqs if seq.started and seq.n_schedulable == 1]
        return streams if any(seq.is_decoding for seq in streams) else []

    def _work(self, encoder: MediaEncoder, tile_work: Callable[[], list[TileWork]], share: float = 1.0) -> bool:
        """Run parts for a share of the time that streams may wait, one at least; False if there were none."""
        ran, until = False, math.inf
        if streams := self._streams:
            until = self._clock() + share * self._budget.room(len(streams))
        needed = 0.0
        while not ran or self._clock() + needed <= until:
            if self._parts is None and not self._begin(encoder, tile_work()):
                break
            assert self._parts is not None
            ran = True
            if (seconds := next(self._parts, None)) is None:
                self._parts, needed = None, 0.0
            else:
                needed = seconds
        return ran

    def _begin(self, encoder: MediaEncoder, tile_work: list[TileWork]) -> bool:
        """Begin the first missing tile by rank and position, with others of its size. A tile takes no
        room from one that comes before it."""
        tiles: dict[bytes, Tile] = {}
        seqs: list[Sequence] = []
        pinned: set[bytes] = set()
        for seq, tile in tile_work:
            if encoder.first_row(tile) is None and tile.key not in tiles:
                first = next(iter(tiles.values()), tile)
                if (tile.is_audio, tile.size) != (first.is_audio, first.size):
                    continue  # its turn comes
                if len(tiles) == encoder.batch_size(first) or not encoder.place(tile, pinned):
                    break
                tiles[tile.key] = tile
                seqs += [seq] if seq is not None else []
            pinned.add(tile.key)
        if not tiles:
            return False
        self._seqs = seqs
        self._parts = self._runner.encode_media(list(tiles.values()))
        return True

    def _needed(self, seq: Sequence) -> list[Tile]:
        """Tiles with rows in the sequence's next chunk."""
        media = seq.request.media
        assert media is not None
        stop = min(len(seq.tokens), seq.n_computed + self._n_ubatch)
        return [span.tile for span in media.within(seq.n_computed, stop)]

    def _reach(self, encoder: MediaEncoder, seq: Sequence) -> int:
        """Tokens of the sequence that can be computed: up to its first tile that is missing."""
        media = seq.request.media
        assert media is not None
        spans = media.within(seq.n_computed, len(seq.tokens))
        return next((span.start for span in spans if encoder.first_row(span.tile) is None), len(seq.tokens) + 1)

    def _failed(self, error: Exception, events: Events) -> None:
        log.warning("the encoder of media failed: %s: %s", type(error).__name__, error)
        seqs, self._seqs, self._parts = self._seqs, [], None
        for seq in seqs:
            if not seq.done and seq.slot is not None:
                self._running.leave(seq)
                events.append((seq, failure(error)))

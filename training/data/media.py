"""Images and sounds of rows: data URIs, files and uploads → tokens, rows of the run, positions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from logitless.models.audio.decode import audio_format, decode_audio
from logitless.models.audio.wav import AudioError
from logitless.models.media.prompt_media import Span, Tile
from logitless.models.vision.images import FileError, ImageError, data_of, path_of, read_below, read_file
from logitless.training.data.dataset_rows import RowMedium
from logitless.training.data.run_media import RunMedia, TokenMedia
from logitless.training.data.sources import HUB
from logitless.training.errors import TrainingError

Pieces = list[list[int] | Tile]
NO_PROJECTOR = "an image or a sound needs a projector that reads it (--mmproj)"
MAX_MEDIA = 64  # of one row
_SCHEME = re.compile(r"[A-Za-z][\w+.-]+:", re.ASCII)


def folder_of(data: object) -> Path | None:
    """The folder of a file of rows, below which they may name files; None: the data are no file."""
    return Path(data).parent if isinstance(data, str | Path) and not str(data).startswith(HUB) else None


class MediaReader:
    """Reads the images and sounds of rows for one run."""

    def __init__(
        self,
        open_media: Callable[[], RunMedia],
        *,
        folder: str | Path | None = None,
        uploaded: Callable[[str], Path] | None = None,
    ) -> None:
        """`open_media`: called for the first image; TrainingError says why the model reads none.
        `folder`: below it rows may name files. `uploaded`: the file of an id; FileError: there is none."""
        self._open, self._folder, self._uploaded = open_media, folder, uploaded
        self.media: RunMedia | None = None  # None: no row has had an image
        self._recent: dict[RowMedium, Pieces] = {}  # of the last row

    def check(self, medium: RowMedium) -> None:
        """TrainingError: the image cannot be read. An uploaded one is read when a run begins."""
        if not medium.is_id:
            self._pieces(medium)
        elif self.media is None:
            self._open_for(medium)

    def read(self, media: Sequence[RowMedium]) -> list[Pieces]:
        """Token ids and tiles of a row's images. TrainingError names the part of one that cannot be read."""
        if len(media) > MAX_MEDIA:
            raise TrainingError(f"{media[MAX_MEDIA].where}: a row has at most {MAX_MEDIA} images and sounds")
        recent, self._recent = self._recent, {}
        for medium in media:
            self._recent[medium] = recent.get(medium) or self._pieces(medium)
        return [self._recent[medium] for medium in media]

    def _pieces(self, medium: RowMedium) -> Pieces:
        input = self._open_for(medium).input
        kind = "sound" if medium.is_sound else "image"
        try:
            data = self._data(medium)
            if audio_format(data) is None:
                return input.image(data)
            kind = "sound"
            if not input.reads_audio:
                raise AudioError("needs a projector that reads it, which this is not")
            return input.audio(decode_audio(data))
        except (FileError, ImageError, AudioError) as error:
            raise TrainingError(f"{medium.where}: the {kind} {error}") from None

    def _open_for(self, medium: RowMedium) -> RunMedia:
        if self.media is None:
            try:
                self.media = self._open()
            except TrainingError as error:
                raise TrainingError(f"{medium.where}: {error}") from None
        return self.media

    def _data(self, medium: RowMedium) -> bytes:
        if medium.is_id:
            if self._uploaded is None:
                raise FileError("is an uploaded file, which only a server's jobs have")
            return read_file(self._uploaded(medium.source))
        if (data := data_of(medium.source)) is not None:
            return data
        path = medium.source
        if (address := _SCHEME.match(path)) is not None:
            if address[0].lower() != "file:":
                raise FileError("is at an address, and none is fetched")
            path = path_of(path[address.end() :])
        if self._folder is None:
            raise FileError("must be a data URI or an uploaded file")
        return read_below(self._folder, path, f"file below {self._folder}")

    def placed(self, spans: Sequence[Span], n: int) -> TokenMedia:
        """The tiles of an example of n tokens; the run keeps them."""
        assert self.media is not None
        rows = np.zeros(n, np.int32)
        for span in spans:
            first = self.media.add(span.tile)
            rows[span.start : span.end] = np.arange(first, first + span.tile.n_rows)
        of_prompt = self.media.input.placed(spans)
        return TokenMedia(
            rows,
            tuple((span.start, span.end) for span in spans),
            of_prompt.positions(0, n) if of_prompt.mrope else None,
            None if of_prompt.causal else np.array(of_prompt.last_seen(0, n), np.int32),
        )

"""Encoders of media: those of one projector file on the session of its text model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from logitless.graph.execution.session import Session
from logitless.graph.tensor import Tensor
from logitless.models.audio.conformer import ConformerEncoder
from logitless.models.audio.encoder import AudioEncoder
from logitless.models.gguf.file import GGUFFile
from logitless.models.media.params import MediaParams
from logitless.models.vision.encoder import VisionEncoder

Array = npt.NDArray[Any]


class Encoder(Protocol):
    """Tiles of one size → rows of the text model. A size is the first two sides of a tile's array."""

    @property
    def states(self) -> list[str]: ...  # names of its constants
    @property
    def usual_size(self) -> tuple[int, int]: ...
    def n_inputs(self, height: int, width: int, /) -> int: ...  # rows that attend to each other
    def feeds(self, tiles: Sequence[Array], /) -> dict[str, Array]: ...
    def rows(self, n_tiles: int, height: int, width: int, /) -> list[Tensor]: ...
    def row_places(self, height: int, width: int, /) -> tuple[Array, Array, Array]: ...


@dataclass(frozen=True)
class Encoders:
    """The encoders of images and of sounds, of which there is one at least."""

    vision: VisionEncoder | None
    audio: AudioEncoder | ConformerEncoder | None

    @classmethod
    def define(cls, session: Session, gguf: GGUFFile, p: MediaParams, n_embd_text: int) -> Encoders:
        """Define weights and constants. ModelFileError names the tensor at fault."""
        vision = None if p.vision is None else VisionEncoder.define(session, gguf, p.vision, n_embd_text)
        if p.audio is None:
            return cls(vision, None)
        kind = ConformerEncoder if p.audio.projector.conformer else AudioEncoder
        return cls(vision, kind.define(session, gguf, p.audio, n_embd_text))

    def __iter__(self) -> Iterator[tuple[bool, Encoder]]:
        """(True for that of sounds, encoder)."""
        if self.vision is not None:
            yield False, self.vision
        if self.audio is not None:
            yield True, self.audio

    def of(self, is_audio: bool) -> Encoder:
        return dict(self)[is_audio]

    def extra_rows(self, kinds: Tensor) -> Tensor:
        """Rows (n, n_embd_text) of images beside those of patches, by kind (n,) i32."""
        assert self.vision is not None  # sounds have none
        return self.vision.extra_rows(kinds)

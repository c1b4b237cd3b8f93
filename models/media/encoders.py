"""Encoders of images and sounds: those of one projector file, on the session of the text model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from logitless.graph.execution.session import Session
from logitless.graph.tensor import Tensor
from logitless.models.audio.conformer import ConformerEncoder
from logitless.models.audio.encoder import AudioEncoder, WhisperEncoder
from logitless.models.audio.params import AudioEncoderKind
from logitless.models.audio.span_encoder import SpanEncoder
from logitless.models.audio.speech_encoder import SpeechEncoder
from logitless.models.gguf.file import GGUFFile
from logitless.models.media.params import MediaParams
from logitless.models.media.projector_encoder import ProjectorEncoder
from logitless.models.media.projector_weights import Declaration
from logitless.models.vision.encoder import VisionEncoder
from logitless.models.vision.params import VisionParams
from logitless.models.vision.towers.ocr import OCREncoder

Encoder = ProjectorEncoder[Any]


@dataclass(frozen=True)
class Encoders:
    """The encoder of images and the encoder of sounds; a projector file has at least one of them."""

    vision: VisionEncoder | None
    audio: Encoder | None

    @classmethod
    def define(cls, session: Session, gguf: GGUFFile, p: MediaParams, n_embd_text: int) -> Encoders:
        """Define weights and constants. ModelFileError names the tensor at fault."""
        vision = None if p.vision is None else _of_images(p.vision).define(session, gguf, p.vision, n_embd_text)
        if p.audio is None:
            return cls(vision, None)
        return cls(vision, _AUDIO[p.audio.projector.encoder].define(session, gguf, p.audio, n_embd_text))

    @staticmethod
    def check(gguf: GGUFFile, p: MediaParams, n_embd_text: int) -> None:
        """Check that `define` finds its tensors. ModelFileError names the tensor at fault."""
        for tensors in _declared(gguf, p, n_embd_text):
            tensors.check()

    @staticmethod
    def check_numbers(gguf: GGUFFile, p: MediaParams, n_embd_text: int) -> None:
        """Read all weights and check that they are finite. ModelFileError names the tensor at fault."""
        for tensors in _declared(gguf, p, n_embd_text):
            tensors.check_numbers()

    def __iter__(self) -> Iterator[tuple[bool, Encoder]]:
        """(is_audio, encoder) of each encoder."""
        if self.vision is not None:
            yield False, self.vision
        if self.audio is not None:
            yield True, self.audio

    def of(self, is_audio: bool) -> Encoder:
        """The encoder of sounds or of images. KeyError: the projector file has none."""
        return dict(self)[is_audio]

    def extra_rows(self, kinds: Tensor) -> Tensor:
        """Rows (n, n_embd_text) that images have beside their patches, such as line ends, by kind (n,) i32."""
        assert self.vision is not None  # sounds have none
        return self.vision.extra_rows(kinds)


_AUDIO: dict[AudioEncoderKind, type[AudioEncoder]] = {
    AudioEncoderKind.WHISPER: WhisperEncoder,
    AudioEncoderKind.CONFORMER: ConformerEncoder,
    AudioEncoderKind.SPEECH: SpeechEncoder,
    AudioEncoderKind.SPANS: SpanEncoder,
}


def _of_images(p: VisionParams) -> type[VisionEncoder]:
    return OCREncoder if p.sam else VisionEncoder


def _declared(gguf: GGUFFile, p: MediaParams, n_embd_text: int) -> Iterator[Declaration]:
    """The tensors of each encoder."""
    if p.vision is not None:
        yield _of_images(p.vision).declaration(gguf, p.vision, n_embd_text)
    if p.audio is not None:
        yield _AUDIO[p.audio.projector.encoder].declaration(gguf, p.audio, n_embd_text)

"""Parameters of the encoders of a projector file: of images, of sounds, or of both."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from logitless.models.audio.params import AudioParams, read_audio_params
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams
from logitless.models.hparams.keys import Keys
from logitless.models.vision.params import VisionParams, read_params

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MediaParams:
    """Parameters of the encoders of one projector file; at least one of the two is there."""

    vision: VisionParams | None
    audio: AudioParams | None = None

    @property
    def kind(self) -> str:
        """The projectors' types."""
        return " and ".join(dict.fromkeys(p.kind for p in (self.vision, self.audio) if p is not None))

    @property
    def causal(self) -> bool:
        """True if rows of images see only earlier rows. Rows of sounds always do."""
        return self.vision is None or self.vision.causal

    @property
    def deepstack(self) -> tuple[int, ...]:
        return () if self.vision is None else self.vision.deepstack

    @property
    def framed(self) -> bool:
        return self.vision is not None and self.vision.projector.framed


def params_for(
    text: GGUFFile, h: Hparams, projector: GGUFFile, tokens: tuple[int, int] = (0, 0), n_ubatch: int = 0
) -> MediaParams:
    """Read the parameters of a projector for a text model. ModelFileError: they do not go together."""
    if not h.causal:
        raise ModelFileError(text.path, f"a model of architecture {h.arch} reads no images here")
    # the Gemmas with per-layer embeddings are trained with causal images
    return read_media_params(projector, tokens, causal=bool(h.n_embd_per_layer), n_ubatch=n_ubatch)


def read_media_params(
    gguf: GGUFFile, tokens: tuple[int, int] = (0, 0), *, causal: bool = False, n_ubatch: int = 0
) -> MediaParams:
    """Read the parameters of a projector file's encoders. ModelFileError names the key at fault.

    The arguments are the same as of `read_params`. An audio encoder of an unknown type is left out,
    with a warning, if the file has an encoder of images."""
    audio = None
    keys = Keys(gguf.metadata, "clip", str(gguf.path))
    has_audio = keys.flag("has_audio_encoder", False)
    if not keys.flag("has_vision_encoder", not has_audio):
        return MediaParams(None, read_audio_params(gguf))
    vision = read_params(gguf, tokens, causal=causal, n_ubatch=n_ubatch)
    if has_audio:
        try:
            audio = read_audio_params(gguf)
        except ModelFileError as error:
            log.warning("sounds are not read: %s", error)
    return MediaParams(vision, audio)

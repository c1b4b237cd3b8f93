"""Fake media input without a model: an image becomes a word with its size, a sound one with its length."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from logitless.models.audio.waveform import Waveform
from logitless.models.media.prompt_media import PromptMedia
from logitless.models.vision.images import decode_image
from tests.helpers.http_fakes import BOS, FakeTokenizer


class FakeMedia:
    """Writes {40x24} where an image of that size is, {0.25s} where a sound of that length is."""

    params = SimpleNamespace(projector=SimpleNamespace(causal=True))

    def __init__(self, *, images: bool = True, audio: bool = False) -> None:
        self.reads_images, self.reads_audio = images, audio
        self.n_decoded = 0
        self.waveforms: list[Waveform] = []

    def image(self, data: bytes) -> list[list[int]]:
        image = decode_image(data)
        self.n_decoded += 1
        return [self._ids(f"{{{image.width}x{image.height}}}")]

    def audio(self, waveform: Waveform) -> list[list[int]]:
        self.waveforms.append(waveform)
        return [self._ids(f"{{{waveform.seconds:g}s}}")]

    def prompt(
        self, texts: Sequence[str], pieces: Sequence[list[list[int]]], *, add_special: bool = True
    ) -> tuple[tuple[int, ...], PromptMedia]:
        ids = [BOS] if add_special else []
        for i, text in enumerate(texts):
            ids += self._ids(text)
            ids += [id for piece in (pieces[i] if i < len(pieces) else []) for id in piece]
        return tuple(ids), PromptMedia(())

    def _ids(self, text: str) -> list[int]:
        return FakeTokenizer().encode(text, add_special=False)


def shown(server: Any) -> str:
    """The text of the last request's prompt."""
    text: str = server.scheduler.tokenizer.pieces(server.scheduler.requests[-1].prompt).decode()
    return text

"""Fake vision input without a model: an image becomes a word with its size."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from logitless.models.media.prompt_media import PromptMedia
from logitless.models.vision.images import decode_image
from tests.helpers.http_fakes import FakeTokenizer


class FakeVision:
    """Writes {40x24} where an image of that size is."""

    params = SimpleNamespace(projector=SimpleNamespace(causal=True))

    def __init__(self) -> None:
        self.n_decoded = 0

    def image(self, data: bytes) -> list[list[int]]:
        image = decode_image(data)
        self.n_decoded += 1
        return [self._ids(f"{{{image.width}x{image.height}}}")]

    def prompt(
        self, texts: Sequence[str], images: Sequence[list[list[int]]], *, add_special: bool = True
    ) -> tuple[tuple[int, ...], PromptMedia]:
        ids: list[int] = []
        for i, text in enumerate(texts):
            ids += self._ids(text)
            ids += [id for piece in (images[i] if i < len(images) else []) for id in piece]
        return tuple(ids), PromptMedia(())

    def _ids(self, text: str) -> list[int]:
        return FakeTokenizer().encode(text, add_special=False)


def shown(server: Any) -> str:
    """The text of the last request's prompt."""
    text: str = server.scheduler.tokenizer.pieces(server.scheduler.requests[-1].prompt).decode()
    return text

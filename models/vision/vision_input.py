"""Vision input: texts and images of a prompt → token ids and tiles."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from logitless.models.tokenizer import Tokenizer
from logitless.models.vision.images import decode_image
from logitless.models.vision.params import VisionParams
from logitless.models.vision.preprocess import pieces_of
from logitless.models.vision.prompt_images import PromptImages, Tile, place


class VisionInput:
    """Reads prompts with images for one model. Keeps no state: any thread may call it."""

    def __init__(self, params: VisionParams, tokenizer: Tokenizer, *, mrope: bool) -> None:
        self.params = params
        self._tokenizer = tokenizer
        self._mrope = mrope

    def image(self, data: bytes) -> list[list[int] | Tile]:
        """Tokens and tiles of an image file. ImageError: it cannot be used."""
        p = self.params
        pieces: list[list[int] | Tile] = []
        for piece in pieces_of(decode_image(data), p):
            if isinstance(piece, str):
                pieces.append(self._ids(piece))
            else:
                height, width, _ = piece.shape
                pieces.append(Tile(piece, p.n_rows(height, width), p.grid(height, width)))
        return pieces

    def prompt(
        self, texts: Sequence[str], images: Sequence[list[list[int] | Tile]], *, add_special: bool = True
    ) -> tuple[tuple[int, ...], PromptImages]:
        """(token ids, tiles) of texts with an image between each two. `add_special`: with BOS and EOS
        where the vocabulary has them.

        As in llama.cpp each text is tokenized by itself.
        """
        words = self._tokenizer
        pieces: list[Sequence[int] | Tile] = []
        if add_special and words.add_bos and words.bos_id is not None:
            pieces.append([words.bos_id])
        for i, text in enumerate(texts):
            pieces.append(words.encode(text, add_special=False, parse_special=True) if text else [])
            pieces += images[i] if i < len(images) else []
        if add_special and words.add_eos and words.eos_id is not None:
            pieces.append([words.eos_id])
        ids, spans = place(pieces)
        p = self.params
        return ids, PromptImages(spans, p.causal, self._mrope, p.projector.framed)

    @cached_property
    def _newline(self) -> int | None:
        """The first token whose text is a newline, without the blank that some tokenizers add."""
        words = self._tokenizer
        return next((id for id in range(words.n_vocab) if words.piece(id) == b"\n"), None)

    def _ids(self, text: str) -> list[int]:
        if text == "\n" and self._newline is not None:
            return [self._newline]
        return self._tokenizer.encode(text, add_special=False, parse_special=True)

"""Vision input: texts and images of a prompt → token ids and tiles."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from threading import Lock

from logitless.models.audio.waveform import Waveform
from logitless.models.media.prompt_media import PromptMedia, Span, Tile, place
from logitless.models.tokenizer import Tokenizer
from logitless.models.vision.images import decode_image
from logitless.models.vision.params import VisionParams
from logitless.models.vision.preprocess import pieces_of

KEPT_NBYTES = 64 << 20  # pixels of images that were read last


class MediaInput:
    """Reads prompts with images for one model. Any thread may call it.

    The images that were read last are kept by the hashes of their files: each request of a
    conversation has all of its images again.
    """

    def __init__(self, params: VisionParams, tokenizer: Tokenizer, *, mrope: bool) -> None:
        self.params = params
        self._tokenizer = tokenizer
        self.mrope = mrope
        self._kept: OrderedDict[bytes, list[list[int] | Tile]] = OrderedDict()  # least recently used first
        self._lock = Lock()

    @property
    def reads_images(self) -> bool:
        return True

    @property
    def reads_audio(self) -> bool:
        return False

    def audio(self, waveform: Waveform) -> list[list[int] | Tile]:
        """Tokens and pieces of a sound, where the model `reads_audio`."""
        raise NotImplementedError

    def image(self, data: bytes) -> list[list[int] | Tile]:
        """Tokens and tiles of an image file. ImageError: it cannot be used."""
        name = blake2b(data, digest_size=16).digest()
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
        pieces = self._read(data)
        with self._lock:
            self._kept[name] = pieces
            while sum(map(_nbytes, self._kept.values())) > KEPT_NBYTES:
                self._kept.popitem(last=False)
        return pieces

    def _read(self, data: bytes) -> list[list[int] | Tile]:
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
    ) -> tuple[tuple[int, ...], PromptMedia]:
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
        return ids, self.images(spans)

    def images(self, spans: Sequence[Span]) -> PromptMedia:
        """The tiles of a prompt with their rows' positions."""
        p = self.params
        return PromptMedia(tuple(spans), p.causal, self.mrope, p.projector.framed)

    @cached_property
    def _newline(self) -> int | None:
        """The first token whose text is a newline, without the blank that some tokenizers add."""
        words = self._tokenizer
        return next((id for id in range(words.n_vocab) if words.piece(id) == b"\n"), None)

    def _ids(self, text: str) -> list[int]:
        if text == "\n" and self._newline is not None:
            return [self._newline]
        return self._tokenizer.encode(text, add_special=False, parse_special=True)


def _nbytes(pieces: Sequence[list[int] | Tile]) -> int:
    return sum(piece.pixels.nbytes for piece in pieces if isinstance(piece, Tile))

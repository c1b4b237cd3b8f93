"""Media input: texts, images and sounds of a prompt → token ids and tiles."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from hashlib import blake2b
from threading import Lock
from typing import Generic, TypeVar

from logitless.models.audio.spectrogram import chunks_of
from logitless.models.audio.waveform import Waveform
from logitless.models.media.params import MediaParams
from logitless.models.media.prompt_media import PromptMedia, Span, Tile, place
from logitless.models.tokenizer import Tokenizer
from logitless.models.vision.images import ImageError, decode_image
from logitless.models.vision.preprocess import pieces_of

CACHE_NBYTES = 64 << 20  # of decoded media
Pieces = list[list[int] | Tile]
T = TypeVar("T")


class MediaCache(Generic[T]):
    """LRU cache of decoded media by digest, CACHE_NBYTES at most. Any thread may call it.

    Each request of a conversation has all of its media again, so they are decoded once."""

    def __init__(self, nbytes: Callable[[T], int]) -> None:
        """`nbytes`: bytes of an entry."""
        self._nbytes = nbytes
        self._entries: OrderedDict[bytes, T] = OrderedDict()  # least recently used first
        self._lock = Lock()

    def get(self, digest: bytes, decode: Callable[[], T]) -> T:
        """The entry of a digest; `decode` makes a new one, and its errors are the caller's."""
        with self._lock:
            if digest in self._entries:
                self._entries.move_to_end(digest)
                return self._entries[digest]
        entry = decode()
        with self._lock:
            self._entries[digest] = entry
            while sum(map(self._nbytes, self._entries.values())) > CACHE_NBYTES:
                self._entries.popitem(last=False)
        return entry


class MediaInput:
    """Turns prompts with images and sounds into token ids and tiles, for one model. Any thread may call it."""

    def __init__(self, params: MediaParams, tokenizer: Tokenizer, *, mrope: bool) -> None:
        self.params = params
        self._tokenizer = tokenizer
        self.mrope = mrope
        self._cache: MediaCache[Pieces] = MediaCache(_nbytes)

    @property
    def reads_images(self) -> bool:
        return self.params.vision is not None

    @property
    def reads_audio(self) -> bool:
        return self.params.audio is not None

    def image(self, data: bytes) -> Pieces:
        """Tokens and tiles of an image file. ImageError: it cannot be used."""
        return self._cache.get(digest_of(data), partial(self._image, data))

    def audio(self, waveform: Waveform) -> Pieces:
        """Tokens and tiles of a sound."""
        return self._cache.get(waveform.digest, partial(self._audio, waveform))

    def _image(self, data: bytes) -> Pieces:
        p = self.params.vision
        if p is None:
            raise ImageError("needs a model that reads images, which this is not")
        pieces: Pieces = []
        for piece in pieces_of(decode_image(data), p):
            if isinstance(piece, str):  # llama.cpp looks up the token that ends a line of tiles
                is_line_end = piece == "\n" != p.projector.end
                pieces.append([self._newline] if is_line_end and self._newline is not None else self._ids(piece))
            else:
                height, width, _ = piece.shape
                pieces.append(Tile(piece, p.n_rows(height, width), p.grid(height, width)))
        return pieces

    def _audio(self, waveform: Waveform) -> Pieces:
        p = self.params.audio
        assert p is not None  # the caller asks reads_audio
        texts = [[self._ids(text)] if text else [] for text in (p.projector.begin, p.projector.end)]
        return [*texts[0], *(Tile(chunk, p.n_rows(len(chunk)), None) for chunk in chunks_of(waveform, p)), *texts[1]]

    def prompt(
        self, texts: Sequence[str], media: Sequence[Pieces], *, add_special: bool = True
    ) -> tuple[tuple[int, ...], PromptMedia]:
        """(token ids, tiles) of texts with an image or a sound between each two.

        `add_special`: add BOS and EOS where the vocabulary has them. As in llama.cpp, each text is
        tokenized by itself."""
        tokenizer = self._tokenizer
        pieces: list[Sequence[int] | Tile] = []
        if add_special and tokenizer.add_bos and tokenizer.bos_id is not None:
            pieces.append([tokenizer.bos_id])
        for i, text in enumerate(texts):
            pieces.append(tokenizer.encode(text, add_special=False, parse_special=True) if text else [])
            pieces += media[i] if i < len(media) else []
        if add_special and tokenizer.add_eos and tokenizer.eos_id is not None:
            pieces.append([tokenizer.eos_id])
        ids, spans = place(pieces)
        return ids, self.placed(spans)

    def placed(self, spans: Sequence[Span]) -> PromptMedia:
        """The tiles of a prompt with their rows' positions."""
        causal = self.params.causal or all(span.tile.is_audio for span in spans)
        return PromptMedia(tuple(spans), causal, self.mrope, self.params.framed)

    @cached_property
    def _newline(self) -> int | None:
        """The first token whose text is a newline, without the blank that some tokenizers add."""
        tokenizer = self._tokenizer
        return next((id for id in range(tokenizer.n_vocab) if tokenizer.piece(id) == b"\n"), None)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False, parse_special=True)


def digest_of(data: bytes) -> bytes:
    """Hash of a media file, 16 bytes."""
    return blake2b(data, digest_size=16).digest()


def _nbytes(pieces: Pieces) -> int:
    return sum(piece.values.nbytes for piece in pieces if isinstance(piece, Tile))

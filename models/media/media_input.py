"""Media input: texts, images and sounds of a prompt → token ids and tiles."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from hashlib import blake2b
from threading import Lock

from logitless.models.audio.spectrogram import chunks_of
from logitless.models.audio.waveform import Waveform
from logitless.models.media.params import MediaParams
from logitless.models.media.prompt_media import PromptMedia, Span, Tile, place
from logitless.models.tokenizer import Tokenizer
from logitless.models.vision.images import ImageError, decode_image
from logitless.models.vision.preprocess import pieces_of

KEPT_NBYTES = 64 << 20  # of tiles of media that were read last
Pieces = list[list[int] | Tile]


class MediaInput:
    """Reads prompts with images and sounds for one model. Any thread may call it.

    The media that were read last are kept by the hashes of their files: each request of a
    conversation has all of them again.
    """

    def __init__(self, params: MediaParams, tokenizer: Tokenizer, *, mrope: bool) -> None:
        self.params = params
        self._tokenizer = tokenizer
        self.mrope = mrope
        self._kept: OrderedDict[bytes, Pieces] = OrderedDict()  # least recently used first
        self._lock = Lock()

    @property
    def reads_images(self) -> bool:
        return self.params.vision is not None

    @property
    def reads_audio(self) -> bool:
        return self.params.audio is not None

    def image(self, data: bytes) -> Pieces:
        """Tokens and tiles of an image file. ImageError: it cannot be used."""
        return self._known(blake2b(data, digest_size=16).digest(), partial(self._image, data))

    def audio(self, waveform: Waveform) -> Pieces:
        """Tokens and tiles of a sound."""
        return self._known(waveform.digest, partial(self._audio, waveform))

    def _known(self, name: bytes, read: Callable[[], Pieces]) -> Pieces:
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
        pieces = read()
        with self._lock:
            self._kept[name] = pieces
            while sum(map(_nbytes, self._kept.values())) > KEPT_NBYTES:
                self._kept.popitem(last=False)
        return pieces

    def _image(self, data: bytes) -> Pieces:
        p = self.params.vision
        if p is None:
            raise ImageError("needs a model that reads images, which this is not")
        pieces: Pieces = []
        for piece in pieces_of(decode_image(data), p):
            if isinstance(piece, str):
                pieces.append(self._ids(piece))
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
        """(token ids, tiles) of texts with an image or a sound between each two. `add_special`: with BOS and EOS
        where the vocabulary has them.

        As in llama.cpp each text is tokenized by itself.
        """
        words = self._tokenizer
        pieces: list[Sequence[int] | Tile] = []
        if add_special and words.add_bos and words.bos_id is not None:
            pieces.append([words.bos_id])
        for i, text in enumerate(texts):
            pieces.append(words.encode(text, add_special=False, parse_special=True) if text else [])
            pieces += media[i] if i < len(media) else []
        if add_special and words.add_eos and words.eos_id is not None:
            pieces.append([words.eos_id])
        ids, spans = place(pieces)
        return ids, self.placed(spans)

    def placed(self, spans: Sequence[Span]) -> PromptMedia:
        """The tiles of a prompt with their rows' positions."""
        causal = self.params.causal or all(span.tile.is_audio for span in spans)
        return PromptMedia(tuple(spans), causal, self.mrope, self.params.framed)

    @cached_property
    def _newline(self) -> int | None:
        """The first token whose text is a newline, without the blank that some tokenizers add."""
        words = self._tokenizer
        return next((id for id in range(words.n_vocab) if words.piece(id) == b"\n"), None)

    def _ids(self, text: str) -> list[int]:
        if text == "\n" and self._newline is not None:
            return [self._newline]
        return self._tokenizer.encode(text, add_special=False, parse_special=True)


def _nbytes(pieces: Pieces) -> int:
    return sum(piece.values.nbytes for piece in pieces if isinstance(piece, Tile))

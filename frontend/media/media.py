"""Media of requests: message parts and `multimodal_data` → images and sounds, markers in the text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, Final, NamedTuple

from logitless.frontend.fields import as_object, as_text, bad_request
from logitless.frontend.media.sources import MediaSources, Unfetched
from logitless.frontend.workers import check
from logitless.models.audio.decode import MAX_SECONDS, audio_format, decode_audio
from logitless.models.audio.wav import AudioError
from logitless.models.audio.waveform import Waveform
from logitless.models.media.media_input import MediaCache, MediaInput, digest_of
from logitless.models.media.prompt_media import PromptMedia
from logitless.models.vision.images import FileError, ImageError, data_of, from_base64

IMAGE: Final = "image"
AUDIO: Final = "audio"
FILE: Final = "file"  # an image or audio; its bytes decide
KINDS: Mapping[str, str] = {  # by the types of parts
    **dict.fromkeys(("image_url", "input_image", "image"), IMAGE),
    **dict.fromkeys(("input_audio", "audio_url"), AUDIO),
    **dict.fromkeys(("file", "input_file"), FILE),
}
OTHERS: Sequence[str] = ("video_url", "input_video", "document", "audio")
MAX_MEDIA = 64  # of one request
_ADDRESS = re.compile(r"(?!data:)[A-Za-z][\w+.-]*:", re.ASCII)
_NEEDS = {
    IMAGE: "images need a model that reads them",
    AUDIO: "audio needs a model that reads it",
    FILE: "files need a model that reads them",
}


class Medium(NamedTuple):
    """A file of a request: the field that has it, its bytes, and its kind."""

    name: str
    data: bytes
    kind: str


class Media:
    """Reader of the media in requests to one model. Without encoders it refuses them."""

    def __init__(
        self,
        input: MediaInput | None,
        max_bytes: int = 64 << 20,
        sources: MediaSources | None = None,
        marker: str = "",
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        """`max_bytes`, `max_seconds`: of the media and of the sounds of one request together;
        `sources`: allowed sources, None: none; `marker`: what stands for a medium in a text, "": a
        random one."""
        self.input = input
        self.max_bytes = max_bytes
        self.max_seconds = max_seconds
        self.sources = sources or MediaSources()
        self.marker = marker or f"<__media_{secrets.token_hex(8)}__>"  # which no client can guess
        self._waveforms: MediaCache[Waveform] = MediaCache(lambda waveform: waveform.samples.nbytes)

    def of(self, sources: MediaSources) -> Media:
        """Reader for a request that may name these sources; it shares the cache."""
        other = copy(self)
        other.sources = sources
        return other

    def part(self, name: str, part: Mapping[str, Any], media: list[Medium]) -> str:
        """The marker of a part of a message; its file is appended to `media` with its field."""
        kind = KINDS.get(part["type"])
        if kind is None:
            bad_request(name, f"{part['type']} needs a model that reads it, which this is not")
        where, value = _address(name, part)
        if where.endswith("file_id"):
            self._put(where, value, kind, lambda name, id, kind: self.sources.uploaded(name, id), media)
        else:
            self._put(where, value, kind, self._bytes, media)
        return self.marker

    def add(self, name: str, value: object, media: list[Medium]) -> None:
        """Put the image or the sound in the field `name` to `media`: a data URI, base64, or an address."""
        self._put(name, value, FILE, self._bytes, media)

    def file(self, name: str, data: bytes, media: list[Medium]) -> str:
        """The marker of a sound that came as the field `name` of a form; it goes to `media`."""
        self._put(name, "", AUDIO, lambda name, value, kind: data, media)
        return self.marker

    def seconds(self, data: bytes) -> float:
        """Length of a sound file in seconds. AudioError: it cannot be decoded."""
        return self._waveform(data).seconds

    def _waveform(self, data: bytes) -> Waveform:
        return self._waveforms.get(digest_of(data), lambda: decode_audio(data, self.max_seconds, check))

    def _put(
        self, name: str, value: object, kind: str, read: Callable[[str, str, str], bytes], media: list[Medium]
    ) -> None:
        self._need(name, kind)
        value = as_text(name, value)
        if len(media) >= MAX_MEDIA:
            bad_request(name, f"a request has at most {MAX_MEDIA} images and sounds")
        data = read(name, value, kind)
        if sum(len(other.data) for other in media) + len(data) > self.max_bytes:
            bad_request(name, f"the media of a request have at most {self.max_bytes} bytes together")
        media.append(Medium(name, data, kind))

    def _need(self, name: str, kind: str) -> None:
        """Check that the model reads media of this kind. InvalidRequest: it does not."""
        if self.input is None:
            bad_request(name, f"{_NEEDS[kind]}: this server was started without --mmproj")
        if kind == IMAGE and not self.input.reads_images:
            bad_request(name, f"{_NEEDS[kind]}: the projector of --mmproj reads audio only")
        if kind == AUDIO and not self.input.reads_audio:
            bad_request(name, f"{_NEEDS[kind]}: the projector of --mmproj reads images only")

    def _bytes(self, name: str, value: str, kind: str) -> bytes:
        return self.sources.address(name, value, kind) if _ADDRESS.match(value) else _decoded(name, value)

    def complete(self) -> None:
        """Unfetched: a file is at an address that has not been fetched."""
        if self.sources.missing:
            raise Unfetched(self.sources)

    def prompt(
        self, name: str, text: str, media: list[Medium], *, add_special: bool = True
    ) -> tuple[tuple[int, ...], PromptMedia]:
        """(token ids, media) of a text with a marker for each of its media. `add_special`: see MediaInput.prompt."""
        assert self.input is not None
        self.complete()
        texts = text.split(self.marker)
        if len(texts) != len(media) + 1:
            bad_request(name, f"has {len(media)} images or sounds and {len(texts) - 1} places for them")
        pieces, seconds = [], 0.0
        for where, data, kind in media:
            if kind == FILE:
                kind = IMAGE if audio_format(data) is None else AUDIO
                self._need(where, kind)
            try:
                if kind == IMAGE:
                    pieces.append(self.input.image(data))
                    continue
                waveform = self._waveform(data)
            except (ImageError, AudioError) as error:
                bad_request(where, f"the {kind} {error}")
            seconds += waveform.seconds
            if seconds > self.max_seconds:
                bad_request(where, f"the sounds of a request have at most {self.max_seconds:g} seconds together")
            pieces.append(self.input.audio(waveform))
        return self.input.prompt(texts, pieces, add_special=add_special)


def is_audio(text: str) -> bool:
    """True if base64 begins a file of sound."""
    try:
        return audio_format(from_base64(text[:16])) is not None
    except FileError:
        return False


def _decoded(name: str, value: str) -> bytes:
    """The bytes of a data URI or of base64."""
    try:
        data = data_of(value)
        return from_base64(value) if data is None else data
    except FileError as error:
        bad_request(name, str(error))


def _address(name: str, part: Mapping[str, Any]) -> tuple[str, object]:
    """(field, value) where a part has its file, in any of the dialects; the field of an uploaded
    file ends with `file_id`."""
    kind = part["type"]
    if kind == "image":  # Anthropic's
        source = as_object(f"{name}.source", part.get("source"))
        field = {"base64": "data", "url": "url", "file": "file_id"}.get(str(source.get("type")))
        if field is None:
            bad_request(f"{name}.source.type", "must be base64, url or file")
        return f"{name}.source.{field}", source.get(field)
    if kind == "file":  # of a chat
        return _one_of(f"{name}.file", as_object(f"{name}.file", part.get("file")), "file_data", "file_id")
    if kind == "input_file":
        return _one_of(name, part, "file_data", "file_id", "file_url")
    if kind == "input_audio":
        return f"{name}.input_audio.data", as_object(f"{name}.input_audio", part.get("input_audio")).get("data")
    field = "audio_url" if kind == "audio_url" else "image_url"
    value = part.get(field)
    if isinstance(value, dict):
        return f"{name}.{field}.url", value.get("url")
    if value is None and part.get("file_id") is not None:
        return f"{name}.file_id", part["file_id"]
    return f"{name}.{field}", value


def _one_of(name: str, values: Mapping[str, Any], default: str, *others: str) -> tuple[str, object]:
    """(field, value) of the first of the other fields that is there, else of the default."""
    field = next((other for other in others if values.get(other) is not None), default)
    return f"{name}.{field}", values.get(field)

"""Images of requests: message parts and `multimodal_data` → image files, markers in the text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

from logitless.models.media.media_input import MediaInput
from logitless.models.media.prompt_media import PromptMedia
from logitless.models.vision.images import FileError, ImageError, data_of, from_base64
from logitless.server.protocol.fields import article, bad_request
from logitless.server.protocol.media.sources import Sources, Unfetched

IMAGE_PARTS = ("image_url", "input_image", "image", "file")
OTHER_PARTS = ("input_audio", "video_url", "input_video", "document", "audio")
MAX_IMAGES = 64  # of one request
_ADDRESS = re.compile(r"(?!data:)[A-Za-z][\w+.-]*:", re.ASCII)


class Media:
    """Reads the images of one model's requests; without encoders it refuses them."""

    def __init__(self, input: MediaInput | None, max_bytes: int = 64 << 20, sources: Sources | None = None) -> None:
        """`max_bytes`: of the images of one request together; `sources`: allowed sources, None: none."""
        self.input = input
        self.max_bytes = max_bytes
        self.sources = sources or Sources()
        self.marker = f"<__media_{secrets.token_hex(8)}__>"  # no client can guess it

    def of(self, sources: Sources) -> Media:
        """The same for a request that may name these sources."""
        other = copy(self)
        other.sources = sources
        return other

    def part(self, name: str, part: Mapping[str, Any], found: list[tuple[str, bytes]]) -> str:
        """The marker of a part of a message; its image goes to `found` with its name."""
        kind = part["type"]
        if kind not in IMAGE_PARTS:
            bad_request(name, f"{kind} needs a model that reads it, which this is not")
        where, value = _address(name, kind, part)
        if where.endswith("file_id"):
            self._put(where, value, self.sources.uploaded, found)
        else:
            self.add(where, value, found)
        return self.marker

    def add(self, name: str, value: object, found: list[tuple[str, bytes]]) -> None:
        """Put the image in the field `name` to `found`: a data URI, base64, or an address."""
        self._put(name, value, self._bytes, found)

    def _put(self, name: str, value: object, read: Callable[[str, str], bytes], found: list[tuple[str, bytes]]) -> None:
        if self.input is None:
            bad_request(name, "images need a model that reads them: this server was started without --mmproj")
        if not isinstance(value, str):
            bad_request(name, f"expected a string, got {article(value)}")
        if len(found) >= MAX_IMAGES:
            bad_request(name, f"a request has at most {MAX_IMAGES} images")
        data = read(name, value)
        if sum(len(other) for _, other in found) + len(data) > self.max_bytes:
            bad_request(name, f"the images of a request have at most {self.max_bytes} bytes together")
        found.append((name, data))

    def _bytes(self, name: str, value: str) -> bytes:
        return self.sources.address(name, value) if _ADDRESS.match(value) else _decoded(name, value)

    def complete(self) -> None:
        """Unfetched: an image is at an address that has not been fetched."""
        if self.sources.missing:
            raise Unfetched(self.sources)

    def prompt(
        self, name: str, text: str, found: list[tuple[str, bytes]], *, add_special: bool = True
    ) -> tuple[tuple[int, ...], PromptMedia]:
        """(token ids, tiles) of a text with a marker for each image. `add_special`: see MediaInput.prompt."""
        assert self.input is not None
        self.complete()
        texts = text.split(self.marker)
        if len(texts) != len(found) + 1:
            bad_request(name, f"has {len(found)} images and {len(texts) - 1} places for them")
        images = []
        for where, data in found:
            try:
                images.append(self.input.image(data))
            except ImageError as error:
                bad_request(where, f"the image {error}")
        return self.input.prompt(texts, images, add_special=add_special)


def _address(name: str, kind: str, part: Mapping[str, Any]) -> tuple[str, object]:
    """(field, value) where a part has its image, in any of the dialects; the field of an uploaded
    file ends with `file_id`."""
    if kind == "image":  # Anthropic's
        source = part.get("source")
        if not isinstance(source, dict):
            bad_request(f"{name}.source", f"expected an object, got {article(source)}")
        field = {"base64": "data", "url": "url", "file": "file_id"}.get(str(source.get("type")))
        if field is None:
            bad_request(f"{name}.source.type", "must be base64, url or file")
        return f"{name}.source.{field}", source.get(field)
    if kind == "file":  # of a chat
        file = part.get("file")
        if not isinstance(file, dict):
            bad_request(f"{name}.file", f"expected an object, got {article(file)}")
        field = "file_data" if file.get("file_id") is None else "file_id"
        return f"{name}.file.{field}", file.get(field)
    value = part.get("image_url")
    if isinstance(value, dict):
        return f"{name}.image_url.url", value.get("url")
    if value is None and part.get("file_id") is not None:
        return f"{name}.file_id", part["file_id"]
    return f"{name}.image_url", value


def _decoded(name: str, value: str) -> bytes:
    """The bytes of a data URI or of base64."""
    try:
        data = data_of(value)
        return from_base64(value) if data is None else data
    except FileError as error:
        bad_request(name, str(error))

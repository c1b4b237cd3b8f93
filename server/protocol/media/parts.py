"""Parts of messages that carry media: their types, and the fields of their files in all dialects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from logitless.server.protocol.fields import article, bad_request

IMAGE: Final = "image"
AUDIO: Final = "audio"
FILE: Final = "file"  # an image or audio, as its bytes tell
KINDS: Mapping[str, str] = {  # by the types of parts
    **dict.fromkeys(("image_url", "input_image", "image"), IMAGE),
    **dict.fromkeys(("input_audio", "audio_url"), AUDIO),
    **dict.fromkeys(("file", "input_file"), FILE),
}
OTHERS: Sequence[str] = ("video_url", "input_video", "document", "audio")


class Medium(NamedTuple):
    """A file of a request: the field that has it, its bytes, and its kind."""

    name: str
    data: bytes
    kind: str


def address(name: str, part: Mapping[str, Any]) -> tuple[str, object]:
    """(field, value) where a part has its file, in any of the dialects; the field of an uploaded
    file ends with `file_id`."""
    kind = part["type"]
    if kind == "image":  # Anthropic's
        source = _object(f"{name}.source", part.get("source"))
        field = {"base64": "data", "url": "url", "file": "file_id"}.get(str(source.get("type")))
        if field is None:
            bad_request(f"{name}.source.type", "must be base64, url or file")
        return f"{name}.source.{field}", source.get(field)
    if kind == "file":  # of a chat
        return _one_of(f"{name}.file", _object(f"{name}.file", part.get("file")), "file_data", "file_id")
    if kind == "input_file":
        return _one_of(name, part, "file_data", "file_id", "file_url")
    if kind == "input_audio":
        return f"{name}.input_audio.data", _object(f"{name}.input_audio", part.get("input_audio")).get("data")
    field = "audio_url" if kind == "audio_url" else "image_url"
    value = part.get(field)
    if isinstance(value, dict):
        return f"{name}.{field}.url", value.get("url")
    if value is None and part.get("file_id") is not None:
        return f"{name}.file_id", part["file_id"]
    return f"{name}.{field}", value


def _object(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        bad_request(name, f"expected an object, got {article(value)}")
    return value


def _one_of(name: str, values: Mapping[str, Any], default: str, *others: str) -> tuple[str, object]:
    """(field, value) of the first of the other fields that is there, else of the default."""
    field = next((other for other in others if values.get(other) is not None), default)
    return f"{name}.{field}", values.get(field)

"""The `messages` of a chat request, checked: every content a text, every tool call with a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from logitless.server.protocol.fields import Fields, article, refuse, unsupported

_MEDIA = ("image_url", "input_image", "image", "input_audio", "video_url", "input_video", "file", "document")
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def parse_messages(fields: Fields) -> list[dict[str, Any]]:
    """The conversation as templates expect it."""
    given = fields.array("messages")
    if not given:
        refuse("messages", "must be a non-empty array")
    messages = []
    for i, message in enumerate(given):
        if not isinstance(message, dict):
            refuse(f"messages[{i}]", f"expected an object, got {article(message)}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            refuse(f"messages[{i}].role", f"expected a string, got {article(role)}")
        calls = message.get("tool_calls")
        if calls is not None:
            calls = _calls(f"messages[{i}].tool_calls", calls)
        thought = message.get("reasoning_content")
        if thought is not None and not isinstance(thought, str):
            refuse(f"messages[{i}].reasoning_content", f"expected a string, got {article(thought)}")
        if "content" not in message and not calls and not thought:
            refuse(f"messages[{i}].content", "is required")
        content = content_text(message, i, "\n")
        cleaned = {**message, "content": "" if content is None and not calls else content}
        if calls is not None:
            cleaned["tool_calls"] = calls
        messages.append(cleaned)
    return messages


def content_text(message: Mapping[str, Any], i: int, separator: str) -> str | None:
    """A message's text: a string, or typed parts joined by `separator`."""
    content = message.get("content")
    name = f"messages[{i}].content"
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse(name, f"expected a string or an array of parts, got {article(content)}")
    texts: list[str] = []
    for k, part in enumerate(content):
        if not isinstance(part, dict):
            refuse(f"{name}[{k}]", f"expected an object, got {article(part)}")
        kind = part.get("type")
        if kind in _MEDIA:
            unsupported(f"{name}[{k}]", f"{kind} needs a model with media, which this is not")
        if not isinstance(kind, str) or kind not in _TEXTS:
            refuse(f"{name}[{k}].type", "must be text")
        text = part.get(_TEXTS[kind])
        if not isinstance(text, str):
            refuse(f"{name}[{k}].text", f"expected a string, got {article(text)}")
        texts.append(text)
    return separator.join(texts)


def _calls(name: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        refuse(name, f"expected an array, got {article(calls)}")
    for k, call in enumerate(calls):
        if not isinstance(call, dict):
            refuse(f"{name}[{k}]", f"expected an object, got {article(call)}")
        function = call.get("function")
        if not isinstance(function, dict):
            refuse(f"{name}[{k}].function", f"expected an object, got {article(function)}")
        if not isinstance(function.get("name"), str):
            refuse(f"{name}[{k}].function.name", f"expected a string, got {article(function.get('name'))}")
        arguments = function.get("arguments", "{}")
        if not isinstance(arguments, str | dict):
            refuse(f"{name}[{k}].function.arguments", f"expected a string, got {article(arguments)}")
    return calls

"""Translation of another API's request to the equivalent chat request."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from logitless.engine.errors import RequestError
from logitless.frontend.dialects.hosted_tools import is_hosted
from logitless.frontend.fields import as_object, as_text, bad_request

log = logging.getLogger("logitless.http")

T = TypeVar("T")
_FIELD = re.compile(r"field '([^']*)'")


@dataclass(frozen=True, slots=True)
class Translated:
    """`names`: where a field of the chat request, and what is in it, stood in the client's."""

    chat: dict[str, Any]
    names: dict[str, str]

    def read(self, parse: Callable[[Mapping[str, Any]], T]) -> T:
        """`parse` of the chat request; errors name the client's own fields."""
        try:
            return parse(self.chat)
        except RequestError as error:
            match = _FIELD.match(error.message)
            if match is not None:
                error.message = f"field '{self._name_of(match[1])}'{error.message[match.end() :]}"
            raise

    def _name_of(self, name: str) -> str:
        for ours in sorted(self.names, key=len, reverse=True):
            if name == ours or name.startswith((f"{ours}.", f"{ours}[")):
                return self.names[ours] + name[len(ours) :]
        return name


_OPENING, _COLON, _NEXT = re.compile(r"\s*\{\s*"), re.compile(r"\s*:\s*"), re.compile(r"\s*(,|\}|\Z)\s*")


def whole_members(text: str) -> dict[str, Any]:
    """The members of a JSON object whose text may be cut short anywhere; a cut one is left out."""
    members: dict[str, Any] = {}
    match = _OPENING.match(text)
    while match is not None:
        try:
            key, at = _JSON.raw_decode(text, match.end())
            colon = _COLON.match(text, at)
            if colon is None or not isinstance(key, str):
                break
            value, at = _JSON.raw_decode(text, colon.end())
        except (ValueError, RecursionError):
            break
        match = _NEXT.match(text, at)
        if match is None or (not match[1] and type(value) in (int, float)):  # more digits may have been to come
            break
        members[key] = value
        if match[1] != ",":
            break
    return members


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(text)
    return value


def _no_number(name: str) -> float:
    raise ValueError(name)


_JSON = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)  # what a reply can hold


def tools_of(value: Iterable[tuple[str, object]], *own: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The tools of a request with their places. They are of a type of `own`, of none, which means the
    first, or hosted ones, which the chat request skips."""
    result: list[tuple[str, Mapping[str, Any]]] = []
    for place, tool in value:
        tool = as_object(place, tool)
        kind = own[0] if tool.get("type") is None else as_text(f"{place}.type", tool["type"])
        if kind not in own and not is_hosted(tool):
            known = " or ".join(map(repr, own))
            bad_request(f"{place}.type", f"{kind[:32]!r} defines no function here: that has the type {known}")
        result.append((place, tool))
    return result

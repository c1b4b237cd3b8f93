"""A request of another API as the chat request that asks for the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from server.errors import RequestError

T = TypeVar("T")
_FIELD = re.compile(r"field '([^']*)'")


@dataclass(frozen=True, slots=True)
class Translated:
    """`names`: where a field of the chat request, and what is in it, stood in the client's."""

    chat: dict[str, Any]
    names: dict[str, str]

    def read(self, parse: Callable[[Mapping[str, Any]], T]) -> T:
        """`parse` of the chat request; what it refuses is named as the client has it."""
        try:
            return parse(self.chat)
        except RequestError as error:
            found = _FIELD.match(error.message)
            if found is not None:
                error.message = f"field '{self._given(found[1])}'{error.message[found.end() :]}"
            raise

    def _given(self, name: str) -> str:
        for ours in sorted(self.names, key=len, reverse=True):
            if name == ours or name.startswith((f"{ours}.", f"{ours}[")):
                return self.names[ours] + name[len(ours) :]
        return name

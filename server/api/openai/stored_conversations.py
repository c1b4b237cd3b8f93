"""Stored conversations (`conversation` of a response): in memory, the oldest are dropped first."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from logitless.frontend.fields import bad_request
from logitless.server.api.openai.stored_responses import NOTHING, BoundedStore, Earlier, Item

MAX_BYTES = 64 << 20  # of all of them, as JSON
MAX_CONVERSATIONS = 4096
_HEAD = 256  # bytes of a conversation without items


@dataclass(slots=True)
class StoredConversation:
    """One conversation: its items by id, in order."""

    id: str
    created_at: int
    metadata: Mapping[str, str]
    items: dict[str, Item] = field(default_factory=dict)
    nbytes: int = _HEAD


class StoredConversations(BoundedStore[StoredConversation]):
    """Conversations of a server."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(max_bytes, MAX_CONVERSATIONS)

    def create(self, key: str, metadata: Mapping[str, str], items: Iterable[Item]) -> StoredConversation:
        """A new conversation that begins with these items."""
        built = StoredConversation("conv_" + secrets.token_urlsafe(24), int(time.time()), {})
        with self._lock:
            self._all[key, built.id] = built
            self._nbytes += built.nbytes
            self._name(built, metadata)
            self._add(built, items)
        return built

    def name(self, key: str, id: str, metadata: Mapping[str, str]) -> StoredConversation | None:
        """Replace the metadata; None: there is no such conversation."""
        with self._lock:
            if (result := self._find(key, id)) is not None:
                self._name(result, metadata)
            return result

    def add(self, key: str, id: str, items: Iterable[Item]) -> list[Item] | None:
        """Append items, which have ids of their own then; None: there is no such conversation."""
        with self._lock:
            result = self._find(key, id)
            return None if result is None else self._add(result, items)

    def items(self, key: str, id: str) -> list[Item] | None:
        """All items, the oldest first; None: there is no such conversation."""
        with self._lock:
            result = self._find(key, id)
            return None if result is None else [*result.items.values()]

    def remove(self, key: str, id: str, item: str) -> StoredConversation | None:
        """Drop an item; None: there is no such item or conversation."""
        with self._lock:
            result = self._find(key, id)
            gone = None if result is None else result.items.pop(item, None)
            if result is None or gone is None:
                return None
            self._resize(result, -_size(gone))
            return result

    def before(self, key: str, id: str) -> Earlier:
        """The items of the conversation that a request names, or 400."""
        if not id:
            return NOTHING
        with self._lock:
            result = self._find(key, id)
            if result is None:
                bad_request("conversation", f"there is no conversation {id[:64]!r}: it was deleted, or is forgotten")
            return Earlier(tuple(result.items.values()), result.nbytes)

    def _name(self, result: StoredConversation, metadata: Mapping[str, str]) -> None:
        self._resize(result, _size(dict(metadata)) - _size(dict(result.metadata)))
        result.metadata = metadata

    def _add(self, result: StoredConversation, items: Iterable[Item]) -> list[Item]:
        added = []
        for item in items:
            entry = {"status": "completed", **item}
            if entry["id"] in result.items:
                kind, _, _ = str(entry["id"]).partition("_")
                entry["id"] = f"{kind[:16]}_{secrets.token_urlsafe(24)}"
            result.items[entry["id"]] = entry
            added.append(entry)
        self._resize(result, sum(map(_size, added)))
        return added

    def _resize(self, result: StoredConversation, nbytes: int) -> None:
        result.nbytes += nbytes
        self._grow(nbytes)


def _size(item: Item) -> int:
    return len(json.dumps(item))

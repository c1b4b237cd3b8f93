"""Stored conversations (`conversation` of a response): in memory, the oldest are dropped first."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from logitless.frontend.fields import bad_request
from logitless.server.api.openai.stored_responses import NOTHING, Earlier, Item, Store

MAX_BYTES = 64 << 20  # of all of them, as JSON
MAX_CONVERSATIONS = 4096
_HEAD = 256  # bytes of a conversation without items


@dataclass(slots=True)
class Conversation:
    """One conversation: its items by id, in order."""

    id: str
    created_at: int
    metadata: Mapping[str, str]
    items: dict[str, Item] = field(default_factory=dict)
    nbytes: int = _HEAD


class StoredConversations(Store[Conversation]):
    """Conversations of a server."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(max_bytes, MAX_CONVERSATIONS)

    def create(self, key: str, metadata: Mapping[str, str], items: Iterable[Item]) -> Conversation:
        """A new conversation that begins with these items."""
        made = Conversation("conv_" + secrets.token_urlsafe(24), int(time.time()), {})
        with self._lock:
            self._all[key, made.id] = made
            self._nbytes += made.nbytes
            self._name(made, metadata)
            self._add(made, items)
        return made

    def name(self, key: str, id: str, metadata: Mapping[str, str]) -> Conversation | None:
        """Replace the metadata; None: there is no such conversation."""
        with self._lock:
            if (found := self._find(key, id)) is not None:
                self._name(found, metadata)
            return found

    def add(self, key: str, id: str, items: Iterable[Item]) -> list[Item] | None:
        """Append items, which have ids of their own then; None: there is no such conversation."""
        with self._lock:
            found = self._find(key, id)
            return None if found is None else self._add(found, items)

    def items(self, key: str, id: str) -> list[Item] | None:
        """All items, the oldest first; None: there is no such conversation."""
        with self._lock:
            found = self._find(key, id)
            return None if found is None else [*found.items.values()]

    def remove(self, key: str, id: str, item: str) -> Conversation | None:
        """Drop an item; None: there is no such item or conversation."""
        with self._lock:
            found = self._find(key, id)
            gone = None if found is None else found.items.pop(item, None)
            if found is None or gone is None:
                return None
            self._resize(found, -_size(gone))
            return found

    def before(self, key: str, id: str) -> Earlier:
        """The items of the conversation that a request names, or 400."""
        if not id:
            return NOTHING
        with self._lock:
            found = self._find(key, id)
            if found is None:
                bad_request("conversation", f"there is no conversation {id[:64]!r}: it was deleted, or is forgotten")
            return Earlier(tuple(found.items.values()), found.nbytes)

    def _name(self, found: Conversation, metadata: Mapping[str, str]) -> None:
        self._resize(found, _size(dict(metadata)) - _size(dict(found.metadata)))
        found.metadata = metadata

    def _add(self, found: Conversation, items: Iterable[Item]) -> list[Item]:
        added = []
        for item in items:
            shown = {"status": "completed", **item}
            if shown["id"] in found.items:
                kind, _, _ = str(shown["id"]).partition("_")
                shown["id"] = f"{kind[:16]}_{secrets.token_urlsafe(24)}"
            found.items[shown["id"]] = shown
            added.append(shown)
        self._resize(found, sum(map(_size, added)))
        return added

    def _resize(self, found: Conversation, nbytes: int) -> None:
        found.nbytes += nbytes
        self._grow(nbytes)


def _size(item: Item) -> int:
    return len(json.dumps(item))

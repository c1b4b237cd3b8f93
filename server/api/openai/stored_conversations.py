"""Stored conversations (`conversation` of a response): in memory, the oldest are dropped first."""

from __future__ import annotations

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from threading import Lock

from logitless.server.api.openai.stored_responses import NOTHING, Earlier, Item
from logitless.server.protocol.fields import bad_request

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


class StoredConversations:
    """All of a server; the least recently used go first. A key sees its own only."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._all: OrderedDict[tuple[str, str], Conversation] = OrderedDict()
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._lock = Lock()  # large requests are parsed, and large replies written, beside the event loop

    def create(self, key: str, metadata: Mapping[str, str], items: Iterable[Item]) -> Conversation:
        """A new conversation that begins with these items."""
        made = Conversation("conv_" + secrets.token_urlsafe(24), int(time.time()), {})
        with self._lock:
            self._all[key, made.id] = made
            self._nbytes += made.nbytes
            self._name(made, metadata)
            self._add(made, items)
        return made

    def find(self, key: str, id: str) -> Conversation | None:
        """The conversation with this id."""
        with self._lock:
            return self._find(key, id)

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
            self._grow(found, -_size(gone))
            return found

    def forget(self, key: str, id: str) -> bool:
        """Drop it; False: there is none."""
        with self._lock:
            found = self._all.pop((key, id), None)
            self._nbytes -= 0 if found is None else found.nbytes
            return found is not None

    def before(self, key: str, id: str) -> Earlier:
        """The items of the conversation that a request names, or 400."""
        if not id:
            return NOTHING
        with self._lock:
            found = self._find(key, id)
            if found is None:
                bad_request("conversation", f"there is no conversation {id[:64]!r}: it was deleted, or is forgotten")
            return Earlier(tuple(found.items.values()), found.nbytes)

    def _find(self, key: str, id: str) -> Conversation | None:
        found = self._all.get((key, id))
        if found is not None:
            self._all.move_to_end((key, id))
        return found

    def _name(self, found: Conversation, metadata: Mapping[str, str]) -> None:
        self._grow(found, _size(dict(metadata)) - _size(dict(found.metadata)))
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
        self._grow(found, sum(map(_size, added)))
        return added

    def _grow(self, found: Conversation, nbytes: int) -> None:
        found.nbytes += nbytes
        self._nbytes += nbytes
        while self._all and (self._nbytes > self._max_bytes or len(self._all) > MAX_CONVERSATIONS):
            self._nbytes -= self._all.popitem(last=False)[1].nbytes


def _size(item: Item) -> int:
    return len(json.dumps(item))

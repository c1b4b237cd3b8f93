"""Stored responses and conversations: in memory, the oldest are dropped first."""

from __future__ import annotations

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from logitless.frontend.fields import as_text, bad_request

MAX_BYTES = 64 << 20  # of all responses, and of all conversations, as JSON
MAX_RESPONSES, MAX_CONVERSATIONS = 4096, 4096
_HEAD = 256  # bytes of a conversation without items
UNFINISHED = frozenset(("queued", "in_progress"))  # statuses of responses in the background
Item = dict[str, Any]


class Earlier(NamedTuple):
    """Items that a request goes on from, and their size as JSON, in bytes."""

    items: tuple[Item, ...]
    nbytes: int


NOTHING = Earlier((), 0)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response, what was said for it, and the whole conversation up to its end, which it keeps alive."""

    response: Mapping[str, Any]
    input: Sequence[Item]
    conversation: tuple[Item, ...]
    nbytes: int


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=_Sized)


class BoundedStore(Generic[T]):
    """Entries of a server by API key and id, in memory; the least recently used are dropped first. A
    key sees its own only."""

    def __init__(self, max_bytes: int, max_entries: int, *, least: int = 0) -> None:
        """`least`: entries that stay, however large they are."""
        self._all: OrderedDict[tuple[str, str], T] = OrderedDict()
        self._max_bytes, self._max_entries, self._least = max_bytes, max_entries, least
        self._nbytes = 0
        self._lock = Lock()  # large requests are parsed, and large replies written, beside the event loop

    def find(self, key: str, id: str) -> T | None:
        """The entry with this id."""
        with self._lock:
            return self._find(key, id)

    def forget(self, key: str, id: str) -> bool:
        """Drop an entry; False: there is none."""
        with self._lock:
            result = self._all.pop((key, id), None)
            self._nbytes -= 0 if result is None else result.nbytes
            return result is not None

    def _find(self, key: str, id: str) -> T | None:
        result = self._all.get((key, id))
        if result is not None:
            self._all.move_to_end((key, id))
        return result

    def _grow(self, nbytes: int) -> None:
        """Count the bytes of an entry, and drop others for which there is no room."""
        self._nbytes += nbytes
        while len(self._all) > self._least and (self._nbytes > self._max_bytes or len(self._all) > self._max_entries):
            self._nbytes -= self._all.popitem(last=False)[1].nbytes


class StoredResponses(BoundedStore[StoredResponse]):
    """Responses of a server. The latest one stays, however large it is."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(max_bytes, MAX_RESPONSES, least=1)

    def keep(self, key: str, response: Mapping[str, Any], value: object, earlier: Earlier) -> None:
        """Remember a response to the request's `input`, after what came earlier in the conversation."""
        items = as_items(value)
        nbytes = earlier.nbytes + len(json.dumps(response)) + len(json.dumps(items))
        conversation = (*earlier.items, *items, *response["output"])
        with self._lock:
            self._put((key, response["id"]), StoredResponse(response, items, conversation, nbytes))

    def update(self, key: str, response: Mapping[str, Any]) -> None:
        """Replace a response that goes on in the background by its next state, unless it is forgotten."""
        with self._lock:
            old = self._all.pop((key, response["id"]), None)
            if old is None:
                return
            self._nbytes -= old.nbytes
            items = old.conversation[: len(old.conversation) - len(old.response["output"])]
            nbytes = old.nbytes + len(json.dumps(response)) - len(json.dumps(old.response))
            self._put((key, response["id"]), StoredResponse(response, old.input, (*items, *response["output"]), nbytes))

    def _put(self, place: tuple[str, str], entries: StoredResponse) -> None:
        self._all[place] = entries
        self._grow(entries.nbytes)

    def item(self, key: str, id: str) -> Item | None:
        """The item with this id, of the input or the output of a response; the latest first."""
        with self._lock:
            entries = [entries for (owner, _), entries in reversed(self._all.items()) if owner == key]
        items = (item for one in entries for item in (*one.response["output"], *one.input))
        return next((item for item in items if item.get("id") == id), None)

    def resolved(self, key: str, value: object) -> object:
        """A request's `input` with the items that its references name, or 400."""
        if not isinstance(value, list):
            return value
        return [self._referred(key, i, item) for i, item in enumerate(value)]

    def _referred(self, key: str, i: int, item: object) -> object:
        if not isinstance(item, dict) or (item.get("type") != "item_reference" and item.keys() != {"id"}):
            return item
        id = as_text(f"input[{i}].id", item.get("id"))
        result = self.item(key, id)
        if result is None:
            bad_request(f"input[{i}].id", f"there is no item {id[:64]!r}: it was not stored, or is forgotten")
        return result

    def before(self, key: str, id: str) -> Earlier:
        """The conversation that `previous_response_id` names, or 400."""
        result = self.find(key, id) if id else None
        if id and result is None:
            bad_request("previous_response_id", f"there is no response {id[:64]!r}: it was not stored, or is forgotten")
        if result is not None and result.response.get("status") in UNFINISHED:
            bad_request("previous_response_id", f"the response {id[:64]!r} goes on; wait for its end")
        return NOTHING if result is None else Earlier(result.conversation, result.nbytes)


def as_items(value: object) -> list[Item]:
    """A request's `input` as items with ids."""
    return [_item(item) for item in (value if isinstance(value, list) else [_text_item(value)])]


def _text_item(text: object) -> Item:
    return {"type": "message", "role": "user", "content": text}


def _item(item: Item) -> Item:
    """An input item as OpenAI shows it: with an id, its text as parts, others with a status."""
    kind = item.get("type", "message")
    id = f"{'msg' if kind == 'message' else 'item'}_{secrets.token_urlsafe(24)}"
    entry = {"id": id, **item, "type": kind}
    if kind != "message":
        entry["status"] = item.get("status") or "completed"
    if kind == "message" and isinstance(item.get("content"), str):
        is_said = item.get("role") == "assistant"
        part = {"type": "output_text", "annotations": []} if is_said else {"type": "input_text"}
        entry["content"] = [{**part, "text": item["content"]}]
    return entry


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

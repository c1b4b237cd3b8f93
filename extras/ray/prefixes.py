"""Prefix index of a fleet: which replica has computed which beginnings of prompts.

A prompt is cut into blocks of bytes; each block's hash covers all blocks before it, so that equal
hashes are equal prefixes. The index follows what was routed, not what the KV caches hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from heapq import nsmallest
from itertools import takewhile
from math import inf
from typing import Any, TypeVar

BLOCK = 128  # bytes of text: about two KV blocks
MAX_BLOCKS = 1 << 10  # of one prompt; the rest of a longer one is not told apart
MAX_ENTRIES = 1 << 20  # hashes that an index remembers, the least recently used go first
PLACE = 4  # blocks that take as long as to wait behind a request
UNSEEN = 32  # blocks of a session that its prompt may not show
MOST = 16  # replicas to try for a request; Serve asks again if none takes it
_BEGINNING = ("tools", "system", "instructions")  # fields that templates put before the messages


@dataclass(frozen=True)
class PrefixRoute:
    """Routing key of a request: hashes of its prompt, block by block, and its conversation's name."""

    blocks: tuple[bytes, ...] = ()
    session: str = ""


def route_of(body: Mapping[str, Any], headers: Mapping[str, str]) -> PrefixRoute:
    """The route of a request by the members of its body, and its headers."""
    return PrefixRoute(_blocks(body), _session(body, headers))


def _blocks(body: Mapping[str, Any]) -> tuple[bytes, ...]:
    blocks: list[bytes] = []
    state, rest = blake2b(repr((body.get("model"), body.get("lora"))).encode(), digest_size=8), b""
    for piece in _pieces(body):
        rest += piece
        while len(rest) >= BLOCK and len(blocks) < MAX_BLOCKS:
            state.update(rest[:BLOCK])
            blocks.append(state.digest())
            rest = rest[BLOCK:]
        if len(blocks) == MAX_BLOCKS:
            break
    return tuple(blocks)


def _session(body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    for value in (
        *(headers.get(name) for name in ("X-Conversation-Id", "X-Session-Id")),
        *(body.get(name) for name in ("prompt_cache_key", "session_id", "previous_response_id")),
    ):
        if isinstance(value, str) and value:
            return value[:256]
    return ""


def _pieces(body: Mapping[str, Any]) -> Iterator[bytes]:
    """The prompt's bytes in the order in which a model reads them."""
    for name in _BEGINNING:
        if body.get(name):
            yield _bytes(body[name])
    for name in ("messages", "input", "prompt", "content", "query", "documents", "input_prefix", "input_suffix"):
        value = body.get(name)
        if isinstance(value, list):
            yield from map(_bytes, value)
        elif value:
            yield _bytes(value)


def _bytes(value: Any) -> bytes:
    """A value's bytes. A large text, such as an image, counts by its hash."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, Mapping):
        parts = (b"\0" + str(k).encode("utf-8", "replace") + b"\0" + _member(v) for k, v in value.items())
        return b"".join(parts)
    if isinstance(value, list):
        return b"\1".join(map(_member, value))
    return repr(value).encode()


def _member(value: Any) -> bytes:
    if isinstance(value, str) and value.startswith("data:"):
        return blake2b(value.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return _bytes(value)


R = TypeVar("R", bound=Hashable)


class PrefixIndex:
    """Replicas by the prefixes that were routed to them, and by the sessions that they serve."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._homes: OrderedDict[bytes | str, dict[Hashable, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def add(self, route: PrefixRoute, replica: Hashable) -> None:
        """Note that a replica computes this prompt."""
        keys: list[bytes | str] = [*route.blocks, *([route.session] if route.session else [])]
        for key in keys:
            homes = self._homes.setdefault(key, {})
            homes.pop(replica, None)
            homes[replica] = None  # the last one is the newest
            self._homes.move_to_end(key)
        while len(self._homes) > self._max_entries:
            self._homes.popitem(last=False)

    def keep(self, replicas: Iterable[Hashable]) -> None:
        """Forget all replicas but these."""
        alive = set(replicas)
        for key in list(self._homes):
            homes = self._homes[key]
            for replica in [each for each in homes if each not in alive]:
                del homes[replica]
            if not homes:
                del self._homes[key]

    def matched(self, route: PrefixRoute) -> Iterator[tuple[int, Iterable[Any]]]:
        """Beginnings of the prompt that replicas have, the longest one first: its blocks, and the
        replicas, which may come again.

        A session's last replica is before all others: its KV cache may hold what the text does not
        show, such as a stored response."""
        if route.session and (homes := self._homes.get(route.session)):
            yield max(len(route.blocks), UNSEEN), (next(reversed(homes)),)
        levels = list(takewhile(bool, map(self._homes.get, route.blocks)))
        n_seen = 0
        for n in range(len(levels), 0, -1):
            homes = levels[n - 1]
            assert homes is not None
            if len(homes) > n_seen:  # the replicas of a longer beginning have the shorter one, too
                yield n, homes
            n_seen = len(homes)

    def ranked(self, loads: Mapping[R, float], route: PrefixRoute, *, slack: float, most: int = MOST) -> list[R]:
        """The best replicas, at most `most`, in the order in which to try them. `loads`: requests at
        each replica.

        The best one has the fewest blocks to compute, where a request that is there already counts
        as `PLACE` of them. A prefix does not count at a replica whose queue is longer than the
        shortest one by more than `slack`."""
        limit, costs, n_blocks = min(loads.values(), default=0) + slack, dict[R, float](), len(route.blocks)
        for n, homes in self.matched(route):
            alike = (r for r in homes if r not in costs and loads.get(r, inf) <= limit)
            for replica in nsmallest(most, alike, key=loads.__getitem__):
                costs[replica] = n_blocks - n + PLACE * loads[replica]
        rest = (replica for replica in loads if replica not in costs)
        for replica in nsmallest(most, rest, key=loads.__getitem__):
            costs[replica] = n_blocks + PLACE * loads[replica]
        return nsmallest(most, costs, key=costs.__getitem__)

"""The adapters that a server knows: by id and by name, with the scales that requests get which do not say."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from models.adapter_bank import AdapterBank, Mix
from models.lora import Adapter
from server.errors import InvalidRequest, ServerFault
from server.requests import Lora

MAX_RESIDENT = 16  # adapters on the device beside those of running requests
Source = Callable[[], Adapter]


@dataclass
class Entry:
    """An adapter. Its numbers are read when a request first wants them, and stay on the device while there is room."""

    id: int
    name: str  # "" for one that has no name of a model
    path: str
    source: Source
    scale: float = 0.0
    metadata: dict[str, str] = field(default_factory=dict)
    handle: int = 0
    last_used: int = 0


class Adapters:
    """`find` and `entries` may be read by any thread; everything else belongs to the engine's."""

    def __init__(self, bank: AdapterBank | None, in_use: Callable[[], Iterable[Mix]] = tuple) -> None:
        self._bank = bank
        self.in_use = in_use  # mixtures of running and waiting requests
        self.entries: list[Entry] = []
        self._by_name: dict[str, Entry] = {}
        self._clock = 0

    def add(
        self,
        path: str | Path,
        source: Source,
        *,
        name: str = "",
        scale: float = 0.0,
        metadata: dict[str, str] | None = None,
    ) -> int:
        """Make an adapter known; its id. A name that is known already gets the new numbers, in requests that come."""
        known = self._by_name.get(name) if name else None
        if known is not None:
            known.path, known.source, known.handle = str(path), source, 0
            return known.id
        entry = Entry(len(self.entries), name, str(path), source, scale, metadata or {})
        self.entries.append(entry)
        if name:
            self._by_name[name] = entry
        return entry.id

    def find(self, name: str) -> int | None:
        """The id of a model's name, such as ft:…"""
        entry = self._by_name.get(name)
        return None if entry is None else entry.id

    def set_scales(self, scales: dict[int, float]) -> None:
        """What requests get that name no adapters; adapters that are not listed get none."""
        for entry in self.entries:
            entry.scale = scales.get(entry.id, 0.0)

    def resolve(self, lora: Lora | None) -> Mix:
        """The mixture that a request asks for, on the device. InvalidRequest for an id that is not known."""
        wanted = dict(lora) if lora is not None else {entry.id: entry.scale for entry in self.entries}
        for id in wanted:
            if not 0 <= id < len(self.entries):
                raise InvalidRequest(f"field 'lora': there is no adapter {id}")
        chosen = [(self.entries[id], scale) for id, scale in sorted(wanted.items()) if scale]
        self._clock += 1
        mix: list[tuple[int, float]] = []
        for entry, scale in chosen:
            entry.last_used = self._clock
            mix.append((self._handle(entry, mix), scale))
        return tuple(mix)

    def _handle(self, entry: Entry, besides: Iterable[tuple[int, float]]) -> int:
        assert self._bank is not None
        if entry.handle not in self._bank:
            try:
                adapter = entry.source()
                self._make_room({handle for handle, _ in besides})
                entry.handle = self._bank.put(adapter)
            except (OSError, ValueError) as error:
                raise ServerFault(f"the adapter {entry.name or entry.path} cannot be used: {error}") from None
        return entry.handle

    def _make_room(self, wanted: set[int]) -> None:
        """Only adapters that something needs, and of the others those that were used last."""
        assert self._bank is not None
        wanted |= {handle for mix in self.in_use() for handle, _ in mix}
        idle = [e for e in self.entries if e.handle in self._bank and e.handle not in wanted]
        idle.sort(key=lambda e: -e.last_used)
        self._bank.keep(wanted | {e.handle for e in idle[: MAX_RESIDENT - 1]})

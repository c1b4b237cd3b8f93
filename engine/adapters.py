"""Adapter registry: LoRA adapters and full finetunes by id and name, with their default scales."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from logitless.engine.errors import InvalidRequest, ServerFault
from logitless.engine.kv_cache.slot_files import AdapterNames
from logitless.engine.requests import Lora
from logitless.models.adapters.full_finetunes import FullFinetunes, digest_of
from logitless.models.adapters.lora import Adapter
from logitless.models.adapters.stacked_lora import BASE, AdapterChoice, StackedLora

MAX_RESIDENT = 16  # adapters on the device beside those of running requests
MAX_WEIGHTS = 2  # whole models likewise
Source = Callable[[], Adapter]


class _Torn(Exception):
    """The adapter bank is fragmented: it would grow although enough columns are free."""


@dataclass
class AdapterEntry:
    """Registered adapter, or full finetune if `source` is None.

    Its weights are loaded for the first request that uses them, and stay on the device while there
    is room."""

    id: int
    name: str  # model name; "": none
    path: str
    source: Source | None
    scale: float = 0.0
    metadata: dict[str, str] = field(default_factory=dict)
    handle: int = 0
    digest: str = ""  # digest of its weights, once they have been read
    last_used: int = 0
    listed: bool = True  # among the models, by its name
    removed: bool = False  # its id stays

    @property
    def whole(self) -> bool:
        return self.source is None


class Adapters:
    """Adapters and full finetunes.

    Any thread may call `find` and `remove` and read `entries`; the rest is the engine thread's."""

    def __init__(
        self,
        bank: StackedLora,
        weight_sets: FullFinetunes,
        in_use: Callable[[], Iterable[AdapterChoice]] = tuple,
        remembered: Callable[[], Iterable[AdapterChoice]] = tuple,
    ) -> None:
        self._bank, self._weight_sets = bank, weight_sets
        self.in_use = in_use  # choices of running and waiting requests
        self.remembered = remembered  # choices that the slots' cached tokens were computed with
        self.entries: list[AdapterEntry] = []
        self._by_name: dict[str, AdapterEntry] = {}
        self._clock = 0

    def add(
        self,
        path: str | Path,
        source: Source | None,
        *,
        name: str = "",
        scale: float = 0.0,
        metadata: dict[str, str] | None = None,
        listed: bool = True,
    ) -> int:
        """Register an adapter, or (without a source) the full finetune in a file; returns its id.

        A name that exists already gets the new weights, for later requests."""
        existing = self._by_name.get(name) if name else None
        if existing is not None:
            existing.path, existing.source, existing.handle = str(path), source, 0
            existing.digest = ""
            return existing.id
        entry = AdapterEntry(len(self.entries), name, str(path), source, scale, metadata or {}, listed=listed)
        self.entries.append(entry)
        if name:
            self._by_name[name] = entry
        return entry.id

    def add_once(self, path: str, source: Source) -> None:
        """Register an adapter without a name, unless one of this path is there."""
        if all(entry.path != path or entry.whole for entry in self.entries):
            self.add(path, source)

    def find(self, name: str) -> int | None:
        """Id of a model name such as ft:…, or None."""
        entry = self._by_name.get(name)
        return None if entry is None else entry.id

    def remove(self, name: str) -> None:
        """Forget a model name. Running requests keep its weights until they end."""
        entry = self._by_name.pop(name, None)
        if entry is not None:
            entry.removed = True

    def set_scales(self, scales: dict[int, float]) -> None:
        """Set the default scales, for requests that name no adapters; unlisted adapters get 0."""
        for entry in self.entries:
            entry.scale = scales.get(entry.id, 0.0)

    def resolve(self, lora: Lora | None) -> AdapterChoice:
        """Load the adapters of a request to the device. Raises InvalidRequest for an unknown id."""
        selection = dict(lora) if lora is not None else {e.id: e.scale for e in self.entries if not e.removed}
        for id in selection:
            if not 0 <= id < len(self.entries) or self.entries[id].removed:
                raise InvalidRequest(f"field 'lora': there is no adapter {id}")
        chosen = [(self.entries[id], scale) for id, scale in sorted(selection.items()) if scale]
        self._clock += 1
        try:
            return self._placed(chosen)
        except _Torn:  # evict unused adapters and place these from the first column on
            for entry, _ in chosen:
                entry.handle = entry.handle if entry.whole else 0  # running requests keep theirs
            self._make_room(self._bank, BASE, 1)
            return self._placed(chosen, grows=True)

    def _placed(self, chosen: list[tuple[AdapterEntry, float]], *, grows: bool = False) -> AdapterChoice:
        choice = BASE
        for entry, scale in chosen:
            entry.last_used = self._clock
            handle = self._handle(entry, choice, grows=grows)
            if entry.whole:
                choice = choice._replace(weights=handle)
            else:
                choice = choice._replace(mix=(*choice.mix, (handle, scale)))
        return choice

    def names(self, choice: AdapterChoice) -> AdapterNames:
        """Digests and scales of a choice, by which another process finds it."""
        weights = ((self._weight_sets.digest(choice.weights), 1.0),) if choice.weights else ()
        return (*weights, *self._bank.digests(choice.mix))

    def label(self, choice: AdapterChoice) -> str:
        """Name of a choice for people: "name", or "name:0.5+other" with scales."""
        names = {(e.whole, e.handle): e.name or Path(e.path).stem for e in self.entries if e.handle}
        parts = [names.get((True, choice.weights), "?")] if choice.weights else []
        for handle, scale in choice.mix:
            parts.append(names.get((False, handle), "?") + (f":{scale:g}" if scale != 1 else ""))
        return "+".join(parts)

    def choice_of(self, names: AdapterNames) -> AdapterChoice:
        """Load the adapters with these digests.

        Raises InvalidRequest if they give other bits here."""
        scales: dict[int, float] = {}
        for digest, scale in names:
            others = (entry for entry in self.entries if entry.id not in scales and not entry.removed)
            alike = (entry for entry in others if self._digest(entry) == digest)
            entry = next(alike, None)
            if entry is None:
                raise InvalidRequest(f"the state was computed with a finetune that is not loaded here ({digest[:40]})")
            scales[entry.id] = scale
        choice = self.resolve(tuple(scales.items()))
        if self.names(choice) != names:  # sums in another order round differently
            raise InvalidRequest("the state was computed with several adapters that were loaded in another order")
        return choice

    def _digest(self, entry: AdapterEntry) -> str:
        if not entry.digest:
            try:
                entry.digest = entry.source().digest if entry.source is not None else digest_of(entry.path)
            except (OSError, ValueError):  # a request for this adapter reports the error
                return ""
        return entry.digest

    def _handle(self, entry: AdapterEntry, besides: AdapterChoice, *, grows: bool) -> int:
        """Load an adapter, in columns after the adapters in `besides`, and return its handle.

        Products are summed in column order. An adapter in front of `besides` is loaded once more
        behind them; otherwise the bits would depend on which one was used first."""

        def fits(handle: int) -> bool:
            return handle in self._weight_sets if entry.whole else self._bank.follows(handle, besides.mix)

        if not fits(entry.handle):
            twin = next((e for e in self.entries if e.path == entry.path and fits(e.handle)), entry)
            entry.handle = twin.handle
        if not fits(entry.handle):
            try:
                if entry.source is None:
                    self._make_room(self._weight_sets, besides, MAX_WEIGHTS)
                    entry.handle = self._weight_sets.put(entry.path)
                else:
                    adapter = entry.source()
                    self._make_room(self._bank, besides, MAX_RESIDENT)
                    if not grows and self._bank.is_fragmented(adapter.rank, besides.mix):
                        raise _Torn
                    entry.handle = self._bank.put(adapter, besides.mix)
            except (MemoryError, OSError, ValueError) as error:
                said = str(error) or "out of memory"
                raise ServerFault(f"the model {entry.name or entry.path} cannot be used: {said}") from None
        return entry.handle

    def _make_room(self, store: StackedLora | FullFinetunes, besides: AdapterChoice, limit: int) -> None:
        """Evict all adapters but those in use and the most recently used others."""

        def handles(choices: Iterable[AdapterChoice]) -> set[int]:
            if store is self._weight_sets:
                return {choice.weights for choice in choices}
            return {handle for choice in choices for handle, _ in choice.mix}

        selection = handles([besides, *self.in_use()])
        idle = [e for e in self.entries if e.whole == (store is self._weight_sets) and e.handle in store]
        idle = sorted((e for e in idle if e.handle not in selection), key=lambda e: -e.last_used)
        store.keep(selection | {e.handle for e in idle[: limit - 1]}, handles(self.remembered()))

"""Fleet: picks the models that run, starts one on request, ends others to make room.

At most `limit` models run at once. A request for a model that does not run waits. Models get places
in the order of their first request, and take them from the least recently used model, which first
finishes its running requests. So no request is lost, and no model keeps its place by a stream of
requests."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath
from typing import Any, Generic, Protocol, TypeVar

from logitless.engine.errors import BadGateway, InvalidRequest, NotFound, Unavailable
from logitless.frontend.config import file_names
from logitless.router.ollama.store import CreatedModel

log = logging.getLogger("logitless.router")
UNLOADED, LOADING, LOADED, UNLOADING = "unloaded", "loading", "loaded", "unloading"
PRESET, FOLDER, CACHE = "preset", "models_dir", "cache"  # where a model comes from
_FOLDERS = re.compile(r"(?<![\w:/.])/(?:[^\s/:]+/)+")  # in front of a file's name
CRASHED = "the model's server ended unexpectedly"


class Child(Protocol):
    """A server of one model."""

    async def ended(self) -> int:
        """Wait for the child's end; returns its exit code."""

    async def stop(self, seconds: float) -> None:
        """End the child, by force after `seconds`."""


C = TypeVar("C", bound=Child)


class StartFailed(Exception):
    """A child ended before it was ready: the last line of its log, and its exit code."""

    def __init__(self, reason: str, exit_code: int | None = None) -> None:
        super().__init__(" ".join(reason.split()))
        self.exit_code = exit_code


@dataclass(frozen=True)
class Entry:
    """A model of the catalog. `args`: command line of its server."""

    name: str
    args: tuple[str, ...]
    path: str = ""  # the model file, if known
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    source: str = PRESET
    preset: str = ""  # settings, as a section of an INI file
    images: bool = False  # it reads images, as far as is known before it is loaded
    audio: bool = False  # it reads sounds, likewise
    created: CreatedModel | None = None  # of a model that a client of Ollama's API made
    hidden: bool = False  # not listed, but found by its name
    load_on_startup: bool = False
    stop_seconds: float = 10.0  # for running requests to finish when the model is unloaded

    @property
    def is_removable(self) -> bool:
        """True for a downloaded model, and for a created one that no preset names."""
        return self.source == CACHE or (self.source == FOLDER and self.created is not None)

    @property
    def has_own_file(self) -> bool:
        """True if the file has a name of its own. Files of created models all have the same name."""
        return bool(self.path) and self.created is None


@dataclass(eq=False)
class FleetModel(Generic[C]):
    """State of one entry."""

    entry: Entry
    state: str = UNLOADED
    child: C | None = None
    active: int = 0  # running requests
    n_waiting: int = 0  # requests that wait for the model
    used: int = 0  # clock of the last request
    error: str = ""  # reason of the last failure
    exit_code: int | None = None
    n_failures: int = 0
    leaving: bool = False  # unload as soon as no request runs
    requested: bool = False  # load although no request waits (POST /models/load)
    abandoned: bool = False  # its loading is cancelled: nobody waits for it, and others wait for its place
    task: asyncio.Task[None] | None = field(default=None, repr=False)


def without_folders(reason: str, path: str) -> str:
    """A reason for users: files by their names alone. `path`: the model's, "" if it has none."""
    if path:
        reason = reason.replace(path, PurePath(path).name)
    return _FOLDERS.sub("", reason)


class Fleet(Generic[C]):
    """All models of a router."""

    def __init__(self, entries: Iterable[Entry], start: Callable[[Entry], Awaitable[C]], limit: int) -> None:
        """`start` returns a child that is ready, or raises StartFailed. `limit` 0: any number."""
        self.models: dict[str, FleetModel[C]] = {entry.name: FleetModel(entry) for entry in entries}
        self._start = start
        self._limit = limit
        self._queue: list[FleetModel[C]] = []  # models that wait for a place
        self._running: list[FleetModel[C]] = []  # models with a place; `update` may have dropped their names
        self._rests: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._clock = 0
        self._closed = False
        self.n_updates = 0

    def get(self, name: str) -> FleetModel[C] | None:
        """The model that has this name or alias, or whose file has it and no other's. Ollama's tag `latest` may
        stand behind each of them."""
        result = self._get(name)
        return self._get(name.removesuffix(":latest")) if result is None else result

    def _get(self, name: str) -> FleetModel[C] | None:
        if (model := self.models.get(name)) is not None:
            return model
        named = [m for m in self.models.values() if name in m.entry.aliases]
        of_file = [m for m in self.models.values() if m.entry.has_own_file and name in file_names(m.entry.path)]
        return named[0] if named else of_file[0] if len(of_file) == 1 else None

    def find(self, name: str) -> FleetModel[C]:
        """The model that has this name or alias. NotFound: there is none."""
        model = self.get(name)
        if model is None:
            raise NotFound(f"model {name[:200]!r} not found")
        return model

    @asynccontextmanager
    async def lease(
        self,
        name: str,
        *,
        autoload: bool = True,
        uses: bool = True,
        rest: Callable[[C], Coroutine[Any, Any, None]] | None = None,
    ) -> AsyncIterator[C]:
        """The model's child, which stays loaded within the block and until the coroutine `rest` ends.

        BadGateway: it cannot be started. With `uses` False, a mere look, the model's place in the
        order of use does not change."""
        model = self.find(name)
        failures = model.n_failures
        model.n_waiting += 1
        try:
            while model.state != LOADED or (model.leaving and uses):
                if self._closed:
                    raise Unavailable("the server is shutting down")
                if model.n_failures > failures:
                    raise BadGateway(f"model {name!r} could not be loaded: {model.error}")
                if self.get(name) is not model:
                    raise NotFound(f"model {name!r} not found")
                if model.state == UNLOADED and model not in self._queue:
                    if not autoload:
                        raise InvalidRequest(f"model {name!r} is not loaded")
                    self._queue.append(model)
                    self._tell()
                    continue
                await self._changed.wait()
            model.active += 1
        finally:
            model.n_waiting -= 1
            self._tell()
        if uses:
            self._touch(model)
        child = model.child
        assert child is not None
        try:
            yield child
        finally:
            if rest is None:
                self._release(model, uses=uses)
            else:
                task = asyncio.create_task(rest(child))
                self._rests.add(task)
                task.add_done_callback(self._rests.discard)
                task.add_done_callback(lambda _: self._release(model, uses=uses))

    def _release(self, model: FleetModel[C], *, uses: bool) -> None:
        model.active -= 1
        if uses:
            self._touch(model)
        self._tell()

    @property
    def closed(self) -> bool:
        """True if `close` was called: no more children are started."""
        return self._closed

    async def changed(self) -> None:
        """Wait for a change of any model."""
        await self._changed.wait()

    def tell(self) -> None:
        """Wake the waiters of `changed`."""
        self._tell()

    def load(self, name: str) -> None:
        """Request a load; returns at once. InvalidRequest: the model is loaded or loading."""
        model = self.find(name)
        if model.state in (LOADED, LOADING) or model.requested:
            raise InvalidRequest(f"model {name!r} is already {model.state if model.state != UNLOADED else LOADING}")
        model.requested = True
        if model.state == UNLOADED and model not in self._queue:
            self._queue.append(model)
        self._tell()

    def unload(self, name: str) -> None:
        """Unload the model with its running requests; returns at once. InvalidRequest: it does not run."""
        model = self.find(name)
        if model.state == UNLOADED and model not in self._queue:
            raise InvalidRequest(f"model {name!r} is not loaded")
        model.requested = False
        if model.state == LOADING and model.task is not None:
            model.task.cancel()
        elif model.state == LOADED:
            self._end(model)
        elif model in self._queue:
            self._queue.remove(model)
            self._failed(model, "it was unloaded before it had a place", None)

    def update(self, entries: Iterable[Entry]) -> None:
        """Replace the entries. Models whose entry changed or is gone are unloaded."""
        new = {entry.name: entry for entry in entries}
        for name, model in list(self.models.items()):
            if new.get(name) != model.entry:
                if model.state in (LOADING, LOADED):
                    self.unload(name)
                del self.models[name]
        for name, entry in new.items():
            if name not in self.models:
                self.models[name] = FleetModel(entry)
        self.n_updates += 1
        self._tell()

    async def remove(self, name: str) -> None:
        """Drop a model, and wait until it has ended."""
        model = self.find(name)
        if model.state != UNLOADED or model in self._queue:
            self.unload(name)
        del self.models[model.entry.name]
        self._tell()
        while model.state != UNLOADED:
            await self._changed.wait()

    async def close(self) -> None:
        """End all children."""
        self._closed = True
        self._queue.clear()
        self._tell()
        tasks = list(self._rests)
        for task in tasks:
            task.cancel()
        for model in list(self._running):
            if model.state == LOADED:
                self._end(model)
            elif model.state == LOADING and model.task is not None:
                model.task.cancel()
            if model.task is not None:
                tasks.append(model.task)
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- places

    def _tell(self) -> None:
        """Assign free places and wake the waiters of `changed`."""
        self._give_places()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _touch(self, model: FleetModel[C]) -> None:
        self._clock += 1
        model.used = self._clock

    def _give_places(self) -> None:
        self._queue = [m for m in self._queue if m.state == UNLOADED and (m.n_waiting or m.requested)]
        running = self._running
        while self._queue and (not self._limit or len(running) < self._limit):
            model = self._queue.pop(0)
            model.state = LOADING
            self._touch(model)
            model.task = asyncio.create_task(self._load(model))
            model.task.add_done_callback(partial(self._cancelled, model))
            running.append(model)
        n_missing = len(self._queue) - sum(m.state == UNLOADING or m.abandoned for m in running)
        for model in running:
            if n_missing > 0 and model.state == LOADING and not (model.n_waiting or model.requested or model.abandoned):
                assert model.task is not None
                model.abandoned, n_missing = True, n_missing - 1
                model.task.cancel()
        may_go = [m for m in running if m.state == LOADED and not m.n_waiting]
        may_go += [m for m in running if m.state == LOADED and m.n_waiting and m.leaving]
        # Idle models first; then models chosen before, else none would ever finish.
        may_go.sort(key=lambda m: (m.active > 0, not m.leaving, m.used))
        for model in running:
            model.leaving = model in may_go[: max(0, n_missing)]
        for model in list(running):
            if model.leaving and not model.active:
                self._end(model)

    async def _load(self, model: FleetModel[C]) -> None:
        log.info("%s: loading", model.entry.name)
        try:
            model.child = await self._start(model.entry)
        except Exception as error:
            self._failed(model, str(error) or type(error).__name__, getattr(error, "exit_code", None))
        else:
            model.state, model.error, model.exit_code = LOADED, "", None
            model.requested = model.abandoned = False
            self._touch(model)
            log.info("%s: loaded", model.entry.name)
            model.task = asyncio.create_task(self._watch(model, model.child))
            self._tell()

    def _cancelled(self, model: FleetModel[C], loading: asyncio.Task[None]) -> None:
        """Separate from `_load`: a task that is cancelled before it begins never runs its own code."""
        if loading.cancelled() and model.abandoned:
            self._free(model)
        elif loading.cancelled():
            self._failed(model, "it was unloaded while it was loading", None)

    async def _watch(self, model: FleetModel[C], child: C) -> None:
        code = await child.ended()
        if model.child is child and model.state == LOADED:
            self._failed(model, CRASHED, code)

    def _failed(self, model: FleetModel[C], reason: str, code: int | None) -> None:
        log.warning("%s: %s%s", model.entry.name, reason, "" if code is None else f" (exit code {code})")
        model.n_failures += 1
        self._free(model, without_folders(reason, model.entry.path), code)

    def _free(self, model: FleetModel[C], error: str = "", code: int | None = None) -> None:
        """The model has no place any more."""
        model.state, model.child, model.error, model.exit_code = UNLOADED, None, error, code
        model.leaving = model.requested = model.abandoned = False
        if model in self._running:
            self._running.remove(model)
        self._tell()

    def _end(self, model: FleetModel[C]) -> None:
        if model.task is not None:
            model.task.cancel()  # ends `_watch`
        model.state, model.leaving = UNLOADING, False
        model.task = asyncio.create_task(self._unload(model))

    async def _unload(self, model: FleetModel[C]) -> None:
        assert model.child is not None
        await model.child.stop(model.entry.stop_seconds)
        log.info("%s: unloaded", model.entry.name)
        again = model.requested and self.models.get(model.entry.name) is model and not self._closed
        self._free(model)
        if again:
            self.load(model.entry.name)

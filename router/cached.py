"""Models of the router that have files of its own: downloading one, and deleting a downloaded or created one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from logitless.engine.errors import InvalidRequest
from logitless.frontend.workers import to_thread
from logitless.router.catalog import CatalogError
from logitless.router.downloads import Download, Downloads, Report
from logitless.router.fleet import Fleet
from logitless.router.ollama.store import ModelStore
from logitless.router.process import ServerProcess


@dataclass(frozen=True)
class Cache:
    """Access to the download cache. `name_of` maps a repository or address to a model's name
    (ValueError: it is neither)."""

    name_of: Callable[[str], str]
    fetch: Callable[[str, Report], Awaitable[None]]
    remove: Callable[[str], None]  # by name
    forget_parts: Callable[[str], None]  # by repository or address


class CachedModels:
    """`read_again` updates the fleet from the catalog (CatalogError); `created`: the store of created models."""

    def __init__(
        self,
        fleet: Fleet[ServerProcess],
        cache: Cache,
        read_again: Callable[[], Awaitable[None]],
        created: ModelStore | None = None,
    ) -> None:
        self._fleet, self._cache, self._read_again, self._created = fleet, cache, read_again, created
        self.downloads = Downloads(cache.fetch, read_again, fleet.tell)
        self._removing: dict[str, asyncio.Task[None]] = {}

    async def download(self, source: str) -> Download:
        """Begin to download a model from the hub or an address. InvalidRequest: it does not exist, or is here."""
        try:
            name = self._cache.name_of(source)
        except ValueError as error:
            raise InvalidRequest(f"field 'model': {error}") from None
        if self._fleet.get(name) is not None or name in self._removing:
            raise InvalidRequest(f"model {name!r} already exists")
        return await self.downloads.begin(name, source)

    async def remove(self, name: str) -> None:
        """Delete a model with its files, or cancel its download. NotFound, InvalidRequest: it is neither a
        downloaded nor a created one."""
        if name not in self.downloads.running:
            entry = self._fleet.find(name).entry
            if not entry.is_removable:
                raise InvalidRequest(
                    f"model {name!r} was neither downloaded by its name nor created, so it cannot be removed"
                )
            name = entry.name
        if name not in self._removing:
            task = self._removing[name] = asyncio.create_task(self._remove(name))
            task.add_done_callback(lambda _: self._removing.pop(name))
        await asyncio.shield(self._removing[name])  # goes on when the client leaves

    async def _remove(self, name: str) -> None:
        if name in self.downloads.running:
            cancelled = await self.downloads.cancel(name)
            await to_thread(partial(self._cache.forget_parts, cancelled.source))
            await self._look()
            if name not in self._fleet.models:  # else another client has deleted it
                return
        manifest = self._fleet.find(name).entry.created
        await self._fleet.remove(name)
        if manifest is not None and self._created is not None:
            await self._created.remove(manifest)
        else:
            await to_thread(partial(self._cache.remove, name))
        await self._look()

    async def _look(self) -> None:
        with suppress(CatalogError):  # the fleet stays as it is
            await self._read_again()

"""Model listings of the router: items of /models and their changes as events, in llama-server's shapes."""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from typing import Any

from aiohttp import web

from logitless.frontend.answers.models import Modality, ModelEntry, ModelMeta, ModelStatus
from logitless.frontend.replies.encoding import sse
from logitless.router.downloads import Download, Downloads
from logitless.router.fleet import CACHE, LOADED, LOADING, UNLOADED, UNLOADING, Fleet, FleetModel
from logitless.router.process import ServerProcess
from logitless.server.api.info import architecture

_STARTED = int(time.time())


Known = MutableMapping[ServerProcess, tuple[ModelMeta, Modality]]  # of a child's model


def model_item(model: FleetModel[ServerProcess], known: Known, *, whole: bool) -> ModelEntry:
    """Item of /models: llama-server's, and the reason of a failure. `whole`: with the flags, the
    preset and the path, which are not for users."""
    entry = model.entry
    status = ModelStatus(value=_state(model), args=[], preset="")
    if whole:
        status.args, status.preset = list(entry.args), entry.preset
    if model.state == UNLOADED and model.error:
        status.failed, status.exit_code, status.error = True, model.exit_code, model.error
    reads = architecture(images=entry.images, audio=entry.audio)
    item = _item(entry.name, entry.source, status, reads, can_remove=entry.is_removable)
    item.aliases, item.tags = list(entry.aliases), list(entry.tags)
    if whole:
        item.path = entry.path
    if model.child is not None and model.child in known:
        item.meta, item.architecture = known[model.child]
    return item


def download_item(download: Download) -> ModelEntry:
    """Item of /models of a model that is being downloaded."""
    status = ModelStatus(value="downloading", args=[])
    item = _item(download.name, CACHE, status, architecture(images=False), can_remove=True)
    item.progress = download.progress["progress"]
    return item


def _item(name: str, source: str, status: ModelStatus, reads: Modality, *, can_remove: bool) -> ModelEntry:
    return ModelEntry(
        id=name,
        aliases=[],
        tags=[],
        created=_STARTED,
        path="",
        status=status,
        architecture=reads,
        source=source,
        can_remove=can_remove,
    )


def _state(model: FleetModel[ServerProcess]) -> str:
    return LOADED if model.state == UNLOADING else model.state


async def events(request: web.Request, fleet: Fleet[ServerProcess], downloads: Downloads) -> web.StreamResponse:
    """Stream of server-sent events {"model", "event", "data"}.

    Events: `model_status` where a model begins to load and `status_change` for its other states, as
    llama-server sends them; `model_remove`, `models_reload` (of model "*"), `download_progress`,
    `download_finished`, `download_failed`."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    if request.method == "HEAD":
        return response
    before, n_updates, n_events = _states(fleet), fleet.n_updates, downloads.n_events
    try:
        while not fleet.closed:
            await fleet.changed()
            now = _states(fleet)
            new_events, n_events = list(downloads.since(n_events)), downloads.n_events
            for event in new_events:
                await _send(response, event)
            if fleet.n_updates != n_updates:
                n_updates = fleet.n_updates
                await _send(response, {"model": "*", "event": "models_reload"})
            for name in before.keys() - now.keys():
                await _send(response, {"model": name, "event": "model_remove"})
            for name, data in now.items():
                if before.get(name) != data:
                    kind = "model_status" if data["status"] == LOADING else "status_change"
                    await _send(response, {"model": name, "event": kind, "data": data})
            before = now
        await response.write_eof()
    except ConnectionError:
        pass
    return response


def _states(fleet: Fleet[ServerProcess]) -> dict[str, dict[str, Any]]:
    return {
        name: {"status": _state(model)} | ({"exit_code": model.exit_code or 0} if model.state == UNLOADED else {})
        for name, model in fleet.models.items()
    }


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(sse(event))

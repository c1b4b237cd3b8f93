"""Model listings of the router: items of /models and their changes as events, in llama-server's shapes."""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from typing import Any

from aiohttp import web

from logitless.router.downloads import Download, Downloads
from logitless.router.fleet import CACHE, LOADED, UNLOADED, UNLOADING, Fleet, Model
from logitless.router.process import ServerProcess
from logitless.server.api.context import encode_json

_STARTED = int(time.time())


Told = MutableMapping[ServerProcess, dict[str, Any]]  # by child: what it tells as `meta` of its model


def shown(model: Model[ServerProcess], told: Told) -> dict[str, Any]:
    """One item of /models; beside llama-server's `failed` why."""
    entry = model.entry
    status: dict[str, Any] = {"value": _state(model), "args": list(entry.args), "preset": entry.preset}
    if model.state == UNLOADED and model.error:
        status |= {"failed": True, "exit_code": model.exit_code, "error": model.error}
    more: dict[str, Any] = {"aliases": list(entry.aliases), "tags": list(entry.tags), "path": entry.path}
    if model.child is not None and model.child in told:
        more["meta"] = told[model.child]
    return _item(entry.name, entry.source, status) | more


def on_its_way(download: Download) -> dict[str, Any]:
    """The item of a model that is being downloaded."""
    return _item(download.name, CACHE, {"value": "downloading", "args": []}) | download.progress


def _item(name: str, source: str, status: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": name,
        "aliases": [],
        "tags": [],
        "object": "model",
        "created": _STARTED,
        "owned_by": "logitless",
        "path": "",
        "status": status,
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "source": source,
        "can_remove": source == CACHE,
    }


def _state(model: Model[ServerProcess]) -> str:
    return LOADED if model.state == UNLOADING else model.state


async def events(request: web.Request, fleet: Fleet[ServerProcess], downloads: Downloads) -> web.StreamResponse:
    """Server-sent events from now on: {"model", "event", "data"}, where the event is `status_change`, `model_remove`,
    `models_reload` (of model "*"), `download_progress`, `download_finished` or `download_failed`."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    known, n_updates, n_events = _states(fleet), fleet.n_updates, downloads.n_events
    try:
        while not fleet.closed:
            await fleet.changed()
            now = _states(fleet)
            heard, n_events = list(downloads.since(n_events)), downloads.n_events
            for event in heard:
                await _tell(response, event)
            if fleet.n_updates != n_updates:
                n_updates = fleet.n_updates
                await _tell(response, {"model": "*", "event": "models_reload"})
            for name in known.keys() - now.keys():
                await _tell(response, {"model": name, "event": "model_remove"})
            for name, data in now.items():
                if known.get(name) != data:
                    await _tell(response, {"model": name, "event": "status_change", "data": data})
            known = now
        await response.write_eof()
    except ConnectionError:
        pass
    return response


def _states(fleet: Fleet[ServerProcess]) -> dict[str, dict[str, Any]]:
    return {
        name: {"status": _state(model)} | ({"exit_code": model.exit_code or 0} if model.state == UNLOADED else {})
        for name, model in fleet.models.items()
    }


async def _tell(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(f"data: {encode_json(event)}\n\n".encode())

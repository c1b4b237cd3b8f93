"""The fine-tuning part of the server, or why there is none."""

from __future__ import annotations

from aiohttp import web

from server.errors import NotSupported
from server.http.context import CONTEXT
from server.tuning import Tuning


def tuning_of(request: web.Request) -> Tuning:
    tuning = request.app[CONTEXT].served.tuning
    if tuning is None:
        raise NotSupported("files and fine-tuning need a folder: start the server with --data-dir DIR")
    return tuning

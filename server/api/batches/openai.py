"""OpenAI's batches: create, list, retrieve, cancel."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from aiohttp import web

from logitless.engine.errors import InvalidRequest, NotFound
from logitless.engine.records.store import Row
from logitless.frontend.fields import bad_request, read
from logitless.server.api.batches.batch import (
    MAX_BYTES,
    MESSAGES,
    BatchBody,
    new_batch,
    openai_object,
    window,
)
from logitless.server.api.batches.runner import BATCHES
from logitless.server.api.context import CONTEXT, json_response
from logitless.server.api.openai.files import BATCH, listed, visible_row, visible_rows
from logitless.server.api.openai.tuning_context import on_disk
from logitless.server.clients import CLIENT


async def create(request: web.Request) -> web.Response:
    """POST /v1/batches."""
    runner, client = request.app[BATCHES], request[CLIENT]
    store = runner.store
    body = await request.app[CONTEXT].parsed(request, partial(read, BatchBody))
    seconds = window(body.completion_window)
    file = store.get("files", body.input_file_id)
    if file is None or not client.may_see(file):
        bad_request("input_file_id", f"there is no file {body.input_file_id[:100]!r}")
    if file["purpose"] != BATCH:
        bad_request("input_file_id", f"the purpose of the file is {file['purpose']!r}, not {BATCH!r}")
    if file["bytes"] > MAX_BYTES:
        bad_request("input_file_id", f"the file has more than {MAX_BYTES} bytes")
    row = new_batch(store, client, runner.name, body.endpoint, body.input_file_id)
    row |= {"completion_window": body.completion_window, "expires_at": row["created_at"] + seconds}
    row["metadata"] = dict(body.metadata)
    await begin(request, row)
    return json_response(openai_object(store, row))


async def begin(request: web.Request, row: Row) -> None:
    """Store a new batch, and begin it."""
    runner = request.app[BATCHES]
    await on_disk("the batch cannot be kept", partial(runner.store.put, "batches", row))
    runner.begin(row)


async def batches(request: web.Request) -> web.Response:
    """GET /v1/batches."""
    store = request.app[BATCHES].store
    page: Any = listed(request, [row for row in visible_rows(request, "batches") if row["endpoint"] != MESSAGES])
    page.data = [openai_object(store, row) for row in page.data]
    return json_response(page)


async def batch(request: web.Request) -> web.Response:
    """GET /v1/batches/{id}."""
    return json_response(openai_object(request.app[BATCHES].store, one(request)))


async def cancel(request: web.Request) -> web.Response:
    """POST /v1/batches/{id}/cancel."""
    return json_response(openai_object(request.app[BATCHES].store, await cancelled(request, one(request))))


def one(request: web.Request, *, messages: bool = False) -> Row:
    """The batch that the path names, of OpenAI's or of Anthropic's API. NotFound: the key has none of this id."""
    _ = request.app[BATCHES].store
    row = visible_row(request, "batches", "No such batch")
    if (row["endpoint"] == MESSAGES) != messages:
        raise NotFound(f"No such batch: {row['id']}")
    return row


async def cancelled(request: web.Request, row: Row) -> Row:
    """Begin to cancel a batch. InvalidRequest: it has ended."""
    runner = request.app[BATCHES]

    def change(old: Row) -> Row | None:
        if old["status"] == "cancelling":
            return old
        allowed = old["status"] in ("validating", "in_progress")
        return {**old, "status": "cancelling", "cancelling_at": int(time.time())} if allowed else None

    changed = await on_disk("the batch cannot be changed", partial(runner.store.change, "batches", row["id"], change))
    if changed is None:
        raise InvalidRequest(f"the batch {row['id']} is {row['status']}")
    runner.stop(row["id"])
    return changed

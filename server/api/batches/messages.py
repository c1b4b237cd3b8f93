"""Anthropic's message batches: create, list, retrieve, cancel, results, delete."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from aiohttp import web

from logitless.engine.errors import InvalidRequest, NotFound
from logitless.engine.records.store import Row
from logitless.frontend.answers.batches import DeletedBatch, MessageBatch, MessageBatchPage
from logitless.frontend.fields import bad_request, read
from logitless.server.api.batches.batch import MESSAGES, MessageBatchBody, message_object, new_batch
from logitless.server.api.batches.openai import begin, cancelled, one
from logitless.server.api.batches.runner import BATCHES
from logitless.server.api.context import CONTEXT, json_response
from logitless.server.api.openai.files import BATCH, OPEN, visible_rows
from logitless.server.api.openai.tuning_context import on_disk
from logitless.server.clients import CLIENT
from logitless.server.observing.record import FileAnswer

_MOST = 1000  # batches of a page


async def create(request: web.Request) -> web.Response:
    """POST /v1/messages/batches."""
    runner, client = request.app[BATCHES], request[CLIENT]
    store = runner.store
    text = await request.app[CONTEXT].parsed(request, _lines)
    file = await on_disk(
        "the batch cannot be kept", partial(store.add_file, text, "message_batch.jsonl", BATCH, client.owner)
    )
    row = new_batch(store, client, runner.name, MESSAGES, file["id"])
    await begin(request, row)
    return json_response(_as_batch(request, row))


def _lines(body: dict[str, Any]) -> bytes:
    """The requests as lines of an input file."""
    requests = read(MessageBatchBody, body).requests
    ids: set[str] = set()
    for i, each in enumerate(requests):
        if not 0 < len(each.custom_id) <= 64 or each.custom_id in ids:
            bad_request(f"requests[{i}].custom_id", "must be 1 to 64 characters that no other request has")
        if each.params.get("stream"):
            bad_request(f"requests[{i}].params.stream", "answers of a batch are no streams")
        ids.add(each.custom_id)
    rows = ({"custom_id": each.custom_id, "body": each.params} for each in requests)
    return b"".join(json.dumps(each).encode() + b"\n" for each in rows)


async def batches(request: web.Request) -> web.Response:
    """GET /v1/messages/batches: the newest first; `after_id` and `before_id` are ends of other pages."""
    query = request.query
    rows = [row for row in visible_rows(request, "batches") if row["endpoint"] == MESSAGES]
    text = query.get("limit", "20")
    if not (text.isdecimal() and len(text) < 6 and 1 <= int(text) <= _MOST):
        raise InvalidRequest(f"query 'limit': must be from 1 to {_MOST}, not {text[:20]!r}")
    limit, ids = int(text), [row["id"] for row in rows]
    if query.get("before_id") in ids:
        before = rows[: ids.index(query["before_id"])]
        page, more = before[-limit:], len(before) > limit
    else:
        rest = rows[ids.index(query["after_id"]) + 1 :] if query.get("after_id") in ids else rows
        page, more = rest[:limit], len(rest) > limit
    data = [_as_batch(request, row) for row in page]
    ends = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return json_response(MessageBatchPage(data, more, *ends))


async def batch(request: web.Request) -> web.Response:
    """GET /v1/messages/batches/{id}."""
    return json_response(_as_batch(request, one(request, messages=True)))


async def cancel(request: web.Request) -> web.Response:
    """POST /v1/messages/batches/{id}/cancel."""
    return json_response(_as_batch(request, await cancelled(request, one(request, messages=True))))


async def results(request: web.Request) -> web.StreamResponse:
    """GET /v1/messages/batches/{id}/results: a line of JSON for each request."""
    row = one(request, messages=True)
    if "output_file_id" not in row:
        raise NotFound(f"the batch {row['id']} has no results: it is {row['status']}")
    path = request.app[BATCHES].store.file_path(row["output_file_id"])
    if not path.exists():
        raise NotFound(f"the results of the batch {row['id']} were deleted")
    return FileAnswer(path, "application/x-jsonl")


async def delete(request: web.Request) -> web.Response:
    """DELETE /v1/messages/batches/{id}, once it has ended; with its requests and results."""
    store, row = request.app[BATCHES].store, one(request, messages=True)
    if row["status"] in OPEN:
        raise InvalidRequest(f"the batch {row['id']} has not ended: cancel it before")
    files = [id for id in (row["input_file_id"], row.get("output_file_id")) if id]
    await on_disk("the batch cannot be deleted", partial(store.delete_files, files, row["id"]))
    return json_response(DeletedBatch(row["id"]))


def _as_batch(request: web.Request, row: Row) -> MessageBatch:
    context = request.app[CONTEXT]
    path = f"{context.config.api_prefix.rstrip('/')}{MESSAGES}/batches/{row['id']}/results"
    host = "" if context.config.behind_router else f"{request.scheme}://{request.host}"
    return message_object(request.app[BATCHES].store, row, host + path)

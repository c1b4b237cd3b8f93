"""OpenAI's files: training data, checked line by line at upload, and media of requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Struct

from logitless.engine.errors import InvalidRequest, NotFound, TooLarge, unkept
from logitless.engine.finetuning.status import RUNNING
from logitless.engine.records.store import MEDIA_PURPOSES, Row, page
from logitless.engine.sampling.params import Param
from logitless.frontend.answers.fine_tuning import Deleted, File, Page
from logitless.frontend.workers import check, compute, to_thread
from logitless.models.atomic_write import open_private
from logitless.server.api.context import client_of, json_response
from logitless.server.api.openai.tuning_context import SILENCE, Desk, desk_of, on_disk
from logitless.server.bodies.form import FormPart, FormParts
from logitless.server.bodies.room import STRIDE, in_time
from logitless.server.bodies.unpack import content as unpacked
from logitless.server.clients import CLIENT
from logitless.server.observing.record import FileAnswer
from logitless.training.errors import TrainingError

MAX_BYTES = 512 << 20
MAX_FIELD = 100  # bytes of a field that is no file
PIECE = 1 << 20  # bytes that are written at once
FINE_TUNE, BATCH = "fine-tune", "batch"
PURPOSES = (FINE_TUNE, BATCH, *MEDIA_PURPOSES)
OPEN = frozenset(("validating", "in_progress", "finalizing", "cancelling"))  # statuses of batches
S = TypeVar("S", bound=Struct)


class UploadForm(Struct, frozen=True, kw_only=True):
    """POST /v1/files, a multipart form."""

    purpose: Annotated[str, Param("its use: training data, requests of a batch, or media", choices=PURPOSES)]
    file: Annotated[bytes, Param("the file")]


async def upload(request: web.Request) -> web.Response:
    """POST /v1/files: a multipart form of `purpose` and `file`, which goes to the disk as it comes."""
    desk = desk_of(request)
    if not request.content_type.startswith("multipart/"):
        raise InvalidRequest("the body must be a multipart form with the fields 'file' and 'purpose'")
    with desk.store.incoming() as path:
        try:
            purpose, filename = await _receive(request, path)
        except OSError as error:
            raise unkept("the file cannot be kept", error) from None
        except (HttpProcessingError, web.RequestPayloadError) as error:
            raise InvalidRequest(f"the body is not a multipart form: {' '.join(str(error).split())}") from None
        if purpose not in PURPOSES:
            raise InvalidRequest(f"field 'purpose': must be one of {', '.join(PURPOSES)}")
        if filename is None:
            raise InvalidRequest("field 'file': is required")
        name = filename
        owner = request[CLIENT].owner
        row = await compute(lambda: _keep(desk, path, name, purpose, owner), client_of(request))
        return json_response(as_struct(row, File))


async def _receive(request: web.Request, path: Path) -> tuple[str, str | None]:
    """(purpose, the file's name, None if there is no file); the last one of the form is under `path` then."""
    purpose, filename = "", None
    silence = request.app[SILENCE]
    parts = FormParts(request.headers["Content-Type"], unpacked(request, MAX_BYTES + PIECE))
    while (part := await in_time(parts.next(), silence)) is not None:
        pieces = _pieces(parts, part, MAX_FIELD if part.name == "purpose" else MAX_BYTES, silence)
        if part.name == "purpose":
            purpose = b"".join([piece async for piece in pieces]).decode("utf-8", "replace")
        elif part.name == "file":
            filename = part.filename or "file"
            with open(path, "wb", opener=open_private) as file:
                async for piece in pieces:
                    await to_thread(partial(file.write, piece))
        else:  # a field that means nothing here
            async for _ in pieces:
                pass
    return purpose, filename


async def _pieces(parts: FormParts, part: FormPart, limit: int, silence: float) -> AsyncIterator[bytes]:
    """The part, about a megabyte at a time. A large file may take long, as long as more of it comes.
    TooLarge: no more of it is read then."""
    piece, n = bytearray(), 0
    while chunk := await in_time(_stride(parts), silence):
        piece += chunk
        n += len(chunk)
        if n > limit:
            raise TooLarge(f"field '{str(part.name)[:64]}': is larger than {limit} bytes")
        if len(piece) >= PIECE:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece)


async def _stride(parts: FormParts) -> bytes:
    """The next STRIDE bytes of a part, fewer at its end."""
    data = bytearray()
    while len(data) < STRIDE and (chunk := await parts.piece()):
        data += chunk
    return bytes(data)


def _keep(desk: Desk, path: Path, filename: str, purpose: str, owner: str = "") -> Row:
    try:
        if purpose == FINE_TUNE:
            desk.check(path, filename, check)
        return desk.store.keep_file(path, filename, purpose, owner)
    except TrainingError as error:
        raise InvalidRequest(f"field 'file': {error}") from None
    except OSError as error:
        raise unkept("the file cannot be kept", error) from None


async def files(request: web.Request) -> web.Response:
    """GET /v1/files."""
    rows = visible_rows(request, "files")
    purpose = request.query.get("purpose")
    if request.query.get("order") == "asc":
        rows.reverse()
    return json_response(listed(request, [r for r in rows if purpose in (None, r["purpose"])], File, 10_000))


async def file(request: web.Request) -> web.Response:
    """GET /v1/files/{id}."""
    return json_response(as_struct(visible_row(request, "files", "No such File object"), File))


async def content(request: web.Request) -> web.StreamResponse:
    """GET /v1/files/{id}/content."""
    row = visible_row(request, "files", "No such File object")
    path = desk_of(request).store.file_path(row["id"])
    if not path.exists():
        raise NotFound(f"the file {row['id']} has no content any more")
    return FileAnswer(path, "application/octet-stream")


async def delete(request: web.Request) -> web.Response:
    """DELETE /v1/files/{id}; not one that a job still needs."""
    row = visible_row(request, "files", "No such File object")
    store = desk_of(request).store
    for job in store.all("jobs"):
        in_use = row["id"] in (job["training_file"], job["validation_file"])
        if in_use and (job["status"] in RUNNING or job["status"] == "paused"):
            raise InvalidRequest(f"the file {row['id']} is in use by {job['id']}")
    for batch in store.all("batches"):
        if row["id"] == batch["input_file_id"] and batch["status"] in OPEN:
            raise InvalidRequest(f"the file {row['id']} is in use by {batch['id']}")

    await on_disk("the file cannot be deleted", partial(store.delete_files, [row["id"]]))
    return json_response(Deleted(id=row["id"], object="file"))


def visible_rows(request: web.Request, table: str) -> list[Row]:
    """The rows of files or jobs that the client may see, the newest first."""
    return [row for row in desk_of(request).store.all(table) if request[CLIENT].may_see(row)]


def visible_row(request: web.Request, table: str, missing: str) -> Row:
    """The row that the path names. NotFound, beginning with `missing`: there is none, or it is another key's."""
    id = request.match_info["id"]
    row = desk_of(request).store.get(table, id)
    if row is None or not request[CLIENT].may_see(row):
        raise NotFound(f"{missing}: {id[:100]}")
    return row


def as_struct(row: Row, kind: type[S]) -> S:
    """The fields of a row that an answer of this kind has."""
    return kind(**{name: row.get(name) for name in kind.__struct_fields__})


def listed(request: web.Request, rows: list[Row], kind: type[Struct] | None = None, default: int = 20) -> Page[Any]:
    """A list object: `limit` rows after the one that the query's `after` names."""
    text = request.query.get("limit", str(default))
    if not (text.isdecimal() and len(text) < 6 and 1 <= int(text) <= 10_000):
        raise InvalidRequest(f"query 'limit': must be from 1 to 10000, not {text[:20]!r}")
    chosen, more = page(rows, request.query.get("after"), int(text))
    return Page(
        data=chosen if kind is None else [as_struct(row, kind) for row in chosen],
        has_more=more,
        first_id=chosen[0]["id"] if chosen else None,
        last_id=chosen[-1]["id"] if chosen else None,
    )

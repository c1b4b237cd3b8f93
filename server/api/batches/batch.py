"""Batch rows: creation, states, and the objects of both APIs."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from msgspec import Struct

from logitless.engine.errors import TooManyRequests
from logitless.engine.records.store import Row, Store, new_id
from logitless.engine.sampling.params import Param
from logitless.frontend.answers.batches import Batch, BatchCounts, MessageBatch, MessageBatchCounts
from logitless.frontend.fields import bad_request
from logitless.server.api.openai.files import OPEN
from logitless.server.clients import HttpClient

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MESSAGES: Final = "/v1/messages"
MAX_LINES: Final = 50_000
MAX_BYTES: Final = 200 << 20  # of an input file
MAX_OPEN: Final = 100  # batches of one key that have not ended
MAX_HOURS: Final = 720  # of a completion window
_DAY = 24 * 3600


class BatchBody(Struct, frozen=True, kw_only=True):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Param("the id of an uploaded file with the purpose batch")]
    endpoint: Annotated[str, Param("the path that each line asks", choices=ENDPOINTS)]
    completion_window: Annotated[str, Param("hours until it expires, as 24h; at most 720h")] = "24h"
    metadata: Annotated[Mapping[str, str], Param("texts by name; the batch shows them")] = {}


class MessageRequest(Struct, frozen=True, kw_only=True):
    """A request of a message batch."""

    custom_id: str
    params: dict[str, Any]


class MessageBatchBody(Struct, frozen=True, kw_only=True):
    """POST /v1/messages/batches."""

    requests: Annotated[
        Sequence[MessageRequest], Param("requests: custom_id, and the body of /v1/messages", least=1, most=MAX_LINES)
    ]


def window(text: str) -> int:
    """Seconds of a completion window. InvalidRequest: it is none."""
    hours = re.fullmatch(r"([1-9]\d{0,2})h", text)
    if hours is None or int(hours[1]) > MAX_HOURS:
        bad_request("completion_window", f"must be hours, from 1h to {MAX_HOURS}h, not {text[:20]!r}")
    return int(hours[1]) * 3600


def new_batch(store: Store, client: HttpClient, server: str, endpoint: str, file: str, **fields: Any) -> Row:
    """The row of a new batch of the client. TooManyRequests: it has too many."""
    n_open = sum(row["owner"] == client.owner and row["status"] in OPEN for row in store.all("batches"))
    if n_open >= MAX_OPEN:
        raise TooManyRequests(f"{n_open} batches have not ended, and no more may: wait or cancel one")
    now = int(time.time())
    return {
        "id": new_id("msgbatch" if endpoint == MESSAGES else "batch").replace("-", "_", 1),
        "endpoint": endpoint,
        "server": server,  # name of the model's server that works on it
        "input_file_id": file,
        "status": "validating",
        "created_at": now,
        "expires_at": now + _DAY,
        "total": 0,
        "owner": client.owner,
        "sees_all": client.sees_all,
        "salt": client.salt,
        "runs_tools": client.runs_tools,
        **fields,
    }


def client_of(row: Row) -> HttpClient:
    """The client for whom the batch's requests are: the key that created it, without an admin's rights."""
    runs_tools = row.get("runs_tools", False)
    return HttpClient(
        row["owner"], row["sees_all"], is_admin=False, salt=row["salt"], runs_tools=runs_tools, batch=True
    )


def counts(store: Store, row: Row) -> tuple[int, int]:
    """Requests that were answered, and those that failed."""
    if "counts" in row:
        n_done, n_failed = row["counts"]
        return n_done, n_failed
    return store.count_lines(row["id"])


def openai_object(store: Store, row: Row) -> Batch:
    """OpenAI's batch object."""
    n_done, n_failed = counts(store, row)
    times: dict[str, Any] = {name: row.get(name) for name in Batch.__struct_fields__ if name.endswith("_at")}
    problems = row.get("errors")
    return Batch(
        id=row["id"],
        endpoint=row["endpoint"],
        errors={"object": "list", "data": problems} if problems else None,
        input_file_id=row["input_file_id"],
        completion_window=row["completion_window"],
        status=row["status"],
        output_file_id=row.get("output_file_id"),
        error_file_id=row.get("error_file_id"),
        request_counts=BatchCounts(row["total"], n_done, n_failed),
        metadata=row["metadata"] or None,
        **times,
    )


def message_object(store: Store, row: Row, url: str) -> MessageBatch:
    """Anthropic's message batch; `url`: of its results."""
    n_done, n_failed = counts(store, row)
    rest = row["total"] - n_done - n_failed
    ended = row["status"] not in OPEN
    state: Any = "ended" if ended else "canceling" if row["status"] == "cancelling" else "in_progress"
    remaining = {"cancelled": "canceled", "expired": "expired"}.get(row["status"], "processing")
    result = MessageBatchCounts(succeeded=n_done, errored=n_failed)
    setattr(result, remaining, rest)
    ended_at = row.get("completed_at") or row.get("cancelled_at") or row.get("expired_at") or row.get("failed_at")
    return MessageBatch(
        id=row["id"],
        processing_status=state,
        request_counts=result,
        created_at=_rfc3339(row["created_at"]),
        expires_at=_rfc3339(row["expires_at"]),
        ended_at=_rfc3339(ended_at) if ended else None,
        cancel_initiated_at=_rfc3339(row.get("cancelling_at")),
        results_url=url if ended else None,
    )


def _rfc3339(seconds: int | None) -> Any:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")

"""Lines of a batch: requests in the input file, and their answers as lines of the result."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Raw

from logitless.engine.records.store import Row
from logitless.frontend.replies.encoding import encode_json
from logitless.frontend.workers import check
from logitless.server.api.batches.batch import MAX_LINES, MESSAGES

_MOST_ERRORS = 100  # of a file that are told


@dataclass(frozen=True, slots=True)
class Line:
    """A request of a batch. `number`: from 0, without blank lines."""

    number: int
    custom_id: str
    body: bytes


def read_lines(path: Path, skip: Collection[int] = ()) -> Iterator[Line]:
    """The requests of a file that was checked, without those that are done."""
    for number, raw in _raw_lines(path):
        if number not in skip:
            lines = json.loads(raw)
            yield Line(number, lines["custom_id"], json.dumps(lines["body"], ensure_ascii=False).encode())


def check_lines(path: Path, endpoint: str) -> tuple[int, list[Row]]:
    """(number of requests, errors in OpenAI's shape) of an input file. Checked on a worker thread."""
    errors: list[Row] = []
    known: set[str] = set()
    n = 0
    for number, raw in _raw_lines(path):
        n = number + 1
        if problem := _problem(raw, endpoint, known):
            code, name, message = problem
            errors.append({"code": code, "line": n, "message": f"line {n}: {message}", "param": name or None})
            if len(errors) == _MOST_ERRORS:
                break
        if n % 256 == 0:
            check()
        if n > MAX_LINES:
            message = f"the file has more than {MAX_LINES} requests"
            return n, [{"code": "too_many_requests", "line": None, "message": message, "param": None}]
    if not n:
        errors.append({"code": "empty_file", "line": None, "message": "the file has no request", "param": None})
    return n, errors


def _raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with open(path, "rb") as file:
        yield from enumerate(line for line in file if line.strip())


def _problem(raw: bytes, endpoint: str, known: set[str]) -> tuple[str, str, str] | None:
    """(code, field, message) of a line's first fault."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return "invalid_json_line", "", "is not JSON"
    if not isinstance(line, dict):
        return "invalid_json_line", "", "is no JSON object"
    id = line.get("custom_id")
    if not isinstance(id, str) or not 0 < len(id) <= 512:
        return "missing_required_parameter", "custom_id", "field 'custom_id' must be a text of 1 to 512 characters"
    if id in known:
        return "duplicate_custom_id", "custom_id", f"field 'custom_id': {id!r} is another line's"
    known.add(id)
    if line.get("method", "POST") != "POST":
        return "invalid_method", "method", "field 'method' must be POST"
    if line.get("url", endpoint) != endpoint:
        return "invalid_url", "url", f"field 'url' must be the batch's endpoint, {endpoint}"
    body = line.get("body")
    if not isinstance(body, dict):
        return "missing_required_parameter", "body", "field 'body' must be an object"
    if body.get("stream"):
        return "invalid_body", "body.stream", "field 'body.stream': answers of a batch are no streams"
    return None


def result(endpoint: str, line: Line, status: int, body: bytes, request_id: str) -> tuple[bool, bytes]:
    """(True if it was answered, the line of the result) for a response."""
    answered = status == 200
    if endpoint == MESSAGES:
        outcome: dict[str, Any] = {"type": "succeeded", "message": Raw(body)}
        if not answered:
            outcome = {"type": "errored", "error": Raw(body)}
        return answered, encode_json({"custom_id": line.custom_id, "result": outcome})
    response = {"status_code": status, "request_id": request_id, "body": Raw(body)}
    return answered, encode_json(
        {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": line.custom_id, "response": response, "error": None}
    )


def unanswered(endpoint: str, line: Line, status: str) -> bytes | None:
    """The line of the result for a request that was not begun before its batch expired or was cancelled."""
    if endpoint == MESSAGES:
        kind = "canceled" if status == "cancelled" else "expired"
        return encode_json({"custom_id": line.custom_id, "result": {"type": kind}})
    if status == "cancelled":
        return None
    error = {"code": "batch_expired", "message": "the completion window was over before this request was answered"}
    id = f"batch_req_{secrets.token_hex(12)}"
    return encode_json({"id": id, "custom_id": line.custom_id, "response": None, "error": error})

"""Pages of OpenAI's lists."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from logitless.engine.errors import InvalidRequest
from logitless.engine.finetuning.store import Row, page


def listed(request: web.Request, rows: list[Row], default: int = 20) -> dict[str, Any]:
    """A list object: `limit` rows after the one that the query's `after` names."""
    text = request.query.get("limit", str(default))
    if not (text.isdecimal() and len(text) < 6 and 1 <= int(text) <= 10_000):
        raise InvalidRequest(f"query 'limit': must be from 1 to 10000, not {text[:20]!r}")
    chosen, more = page(rows, request.query.get("after"), int(text))
    return {
        "object": "list",
        "data": chosen,
        "has_more": more,
        "first_id": chosen[0]["id"] if chosen else None,
        "last_id": chosen[-1]["id"] if chosen else None,
    }

"""OpenAI's conversations: /v1/conversations and their items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NoReturn, TypeVar

from aiohttp import web
from msgspec import Struct

from logitless.engine.errors import InvalidRequest, NotFound
from logitless.engine.records.store import page
from logitless.engine.sampling.params import Param
from logitless.frontend.answers import responses as answers
from logitless.frontend.dialects.responses import check_items
from logitless.frontend.fields import bad_request, read
from logitless.server.api.context import CONTEXT, client_key, json_response
from logitless.server.api.openai.stored import Item, StoredConversation, as_items

T = TypeVar("T")
MAX_ITEMS = 20  # of one request, as OpenAI
MAX_PAGE = 100
MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512  # of metadata
_METADATA = Param(f"at most {MAX_PAIRS} texts by name, which the conversation shows")


class ConversationBody(Struct, frozen=True, kw_only=True):
    """POST /v1/conversations."""

    items: Annotated[Sequence[Any], Param("items that it begins with, as in a response's input", most=MAX_ITEMS)] = ()
    metadata: Annotated[Mapping[str, str], _METADATA] = {}
    model: Annotated[str, Param("in a router: the model whose server keeps it; one that is loaded otherwise")] = ""


class MetadataBody(Struct, frozen=True, kw_only=True):
    """POST /v1/conversations/{id}."""

    metadata: Annotated[Mapping[str, str], _METADATA] = {}


class ItemsBody(Struct, frozen=True, kw_only=True):
    """POST /v1/conversations/{id}/items."""

    items: Annotated[Sequence[Any], Param("items, as in a response's input", least=1, most=MAX_ITEMS)]


async def create(request: web.Request) -> web.Response:
    """POST /v1/conversations."""
    context, key = request.app[CONTEXT], owner(request)

    def parse(body: dict[str, Any]) -> StoredConversation:
        value = read(ConversationBody, body)
        check_items(value.items)
        return context.conversations.create(key, _metadata(value.metadata), as_items(list(value.items)))

    return json_response(_as_answer(await context.parsed(request, parse)))


async def conversation(request: web.Request) -> web.Response:
    """GET /v1/conversations/{id}."""
    result = request.app[CONTEXT].conversations.find(owner(request), request.match_info["id"])
    return json_response(_as_answer(_there(request, result)))


async def update(request: web.Request) -> web.Response:
    """POST /v1/conversations/{id}: replace its metadata."""
    context = request.app[CONTEXT]
    metadata = await context.parsed(request, lambda body: _metadata(read(MetadataBody, body).metadata))
    result = context.conversations.name(owner(request), request.match_info["id"], metadata)
    return json_response(_as_answer(_there(request, result)))


async def delete(request: web.Request) -> web.Response:
    """DELETE /v1/conversations/{id}: forget it with its items."""
    id = request.match_info["id"]
    if not request.app[CONTEXT].conversations.forget(owner(request), id):
        _missing(request)
    return json_response(answers.DeletedConversation(id=id))


async def add(request: web.Request) -> web.Response:
    """POST /v1/conversations/{id}/items: append items."""
    context, key, id = request.app[CONTEXT], owner(request), request.match_info["id"]

    def parse(body: dict[str, Any]) -> list[Item]:
        items = list(read(ItemsBody, body).items)
        check_items(items)
        return _there(request, context.conversations.add(key, id, as_items(items)))

    added = await context.parsed(request, parse)
    return json_response(_listed(added, more=False))


async def items(request: web.Request) -> web.Response:
    """GET /v1/conversations/{id}/items: the last first unless `order` is asc."""
    context = request.app[CONTEXT]
    rows = _there(request, context.conversations.items(owner(request), request.match_info["id"]))
    if request.query.get("order") != "asc":
        rows.reverse()
    text = request.query.get("limit", "20")
    if not (text.isascii() and text.isdecimal() and len(text) < 4 and 1 <= int(text) <= MAX_PAGE):
        raise InvalidRequest(f"query 'limit': must be from 1 to {MAX_PAGE}, not {text[:20]!r}")
    chosen, more = page(rows, request.query.get("after"), int(text))
    return json_response(_listed(chosen, more=more))


async def item(request: web.Request) -> web.Response:
    """GET /v1/conversations/{id}/items/{item}."""
    rows = _there(request, request.app[CONTEXT].conversations.items(owner(request), request.match_info["id"]))
    result = next((row for row in rows if row["id"] == request.match_info["item"]), None)
    if result is None:
        _missing(request)
    return json_response(result)


async def remove(request: web.Request) -> web.Response:
    """DELETE /v1/conversations/{id}/items/{item}: the conversation without it."""
    id, name = request.match_info["id"], request.match_info["item"]
    result = request.app[CONTEXT].conversations.remove(owner(request), id, name)
    return json_response(_as_answer(_there(request, result)))


def owner(request: web.Request) -> str:
    """The key whose stored responses and conversations a request may read; "" without keys: all."""
    return client_key(request) if request.app[CONTEXT].keys.exist else ""


def _there(request: web.Request, result: T | None) -> T:
    return result if result is not None else _missing(request)


def _missing(request: web.Request) -> NoReturn:
    id, name = request.match_info["id"], request.match_info.get("item")
    what = f"item {name[:64]!r} in a conversation {id[:64]!r}" if name is not None else f"conversation {id[:64]!r}"
    raise NotFound(f"there is no {what}: it was deleted, or is forgotten")


def _metadata(fields: Mapping[str, str]) -> Mapping[str, str]:
    if len(fields) > MAX_PAIRS:
        bad_request("metadata", f"at most {MAX_PAIRS} pairs are allowed, got {len(fields)}")
    for name, value in fields.items():
        if len(name) > MAX_KEY or len(value) > MAX_VALUE:
            bad_request("metadata", f"names have at most {MAX_KEY} characters, texts at most {MAX_VALUE}")
    return fields


def _as_answer(result: StoredConversation) -> answers.Conversation:
    return answers.Conversation(id=result.id, created_at=result.created_at, metadata=dict(result.metadata))


def _listed(rows: list[Item], *, more: bool) -> answers.ConversationItems:
    first, last = (rows[0]["id"], rows[-1]["id"]) if rows else ("", "")
    return answers.ConversationItems(data=rows, first_id=first, last_id=last, has_more=more)

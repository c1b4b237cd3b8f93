"""GET /slots, and actions on a slot: save to a file, restore, erase, fork."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from aiohttp import web
from msgspec import Struct

from logitless.engine.errors import Forbidden, InvalidRequest, NotFound, NotSupported, Unavailable
from logitless.engine.kv_cache.slot_actions import erase, fork, install, snapshot
from logitless.engine.kv_cache.slot_files import load, owner_of, save
from logitless.engine.sampling.params import INT_MAX, Param
from logitless.engine.sequence import Slot
from logitless.frontend.answers.llamacpp import NextToken, SlotAction, SlotState, SlotTimings
from logitless.frontend.fields import read
from logitless.frontend.replies.reply import generation_settings
from logitless.frontend.workers import to_thread
from logitless.server.api.context import CONTEXT, Context, json_response
from logitless.server.clients import CLIENT

if TYPE_CHECKING:
    from logitless.engine.scheduler.scheduler import Scheduler

T = TypeVar("T")


class SlotFileBody(Struct, frozen=True, kw_only=True):
    """POST /slots/{id}?action=save or restore."""

    filename: Annotated[str, Param("a file of --slot-save-path")]


class ForkBody(Struct, frozen=True, kw_only=True):
    """POST /slots/{id}?action=fork."""

    id_slot_to: Annotated[int, Param("the slot that gets the same tokens", 0, INT_MAX, hard=True)]


async def slots(request: web.Request) -> web.Response:
    """GET /slots."""
    context = request.app[CONTEXT]
    if not context.config.slots:
        raise NotSupported("this server does not show its slots; start it with --slots")
    _ = context.served
    owner = request[CLIENT].slots

    def show(scheduler: Scheduler) -> list[SlotState]:
        return [_slot(slot, context, whole=slot.is_of(owner)) for slot in scheduler.slots]

    entry = await context.service.ask(show, wakes=False)
    if request.query.get("fail_on_no_slot") and all(slot.is_processing for slot in entry):
        raise Unavailable("no slot available")
    return json_response(entry)


async def slot_action(request: web.Request) -> web.Response:
    """POST /slots/{id}?action=save, restore, erase or fork."""
    context = request.app[CONTEXT]
    _ = context.served
    action = request.query.get("action", "")
    if action not in _ACTIONS:
        raise InvalidRequest(f"query 'action': must be one of {', '.join(_ACTIONS)}")
    id = _slot_id(request.match_info["id"], context.config.n_parallel)
    return json_response(await _ACTIONS[action](request, context, id))


async def _save(request: web.Request, context: Context, id: int) -> SlotAction:
    folder, name = await _file(request, context)
    began = time.perf_counter()
    adapters, client = context.served.adapters, request[CLIENT]
    kind, state = await _when_idle(
        context, (id,), lambda s: (s.engine.cache_kind, snapshot(s, id, adapters, client.slots))
    )
    n_written = await to_thread(lambda: save(folder, name, kind, replace(state, owner=client.owner)))
    timings = SlotTimings(save_ms=(time.perf_counter() - began) * 1000)
    return SlotAction(id_slot=id, filename=name, n_saved=len(state.tokens), n_written=n_written, timings=timings)


async def _restore(request: web.Request, context: Context, id: int) -> SlotAction:
    folder, name = await _file(request, context)
    began = time.perf_counter()
    service, salt = context.service, request[CLIENT].salt
    kind, n_ctx = await service.ask(lambda scheduler: (scheduler.engine.cache_kind, scheduler.slots[id].n_ctx))
    state, n_read = await to_thread(lambda: load(folder, name, kind, n_ctx))
    await _when_idle(context, (id,), lambda scheduler: install(scheduler, id, state, context.served.adapters, salt))
    timings = SlotTimings(restore_ms=(time.perf_counter() - began) * 1000)
    return SlotAction(id_slot=id, filename=name, n_restored=len(state.tokens), n_read=n_read, timings=timings)


async def _erase(request: web.Request, context: Context, id: int) -> SlotAction:
    owner = request[CLIENT].slots
    n_erased = await _when_idle(context, (id,), lambda scheduler: erase(scheduler, id, owner))
    return SlotAction(id_slot=id, n_erased=n_erased)


async def _fork(request: web.Request, context: Context, id: int) -> SlotAction:
    most = context.config.n_parallel - 1
    to = await context.parsed(request, lambda body: read(ForkBody, body, id_slot_to=most).id_slot_to)
    owner = request[CLIENT].slots
    n_forked = await _when_idle(context, (id, to), lambda scheduler: fork(scheduler, id, to, owner))
    return SlotAction(id_slot=id, id_slot_to=to, n_forked=n_forked)


async def _when_idle(context: Context, ids: tuple[int, ...], action: Callable[[Scheduler], T]) -> T:
    """Done as soon as these slots run nothing. 503 when that takes longer than a client may make the server wait; one
    that leaves takes its wish along."""
    return await context.service.ask_about(ids, action, context.config.timeout)


_ACTIONS = {"save": _save, "restore": _restore, "erase": _erase, "fork": _fork}


async def _file(request: web.Request, context: Context) -> tuple[Path, str]:
    """The folder of slot files, and the name in the request's body, if it is the client's."""
    if not context.config.slot_save_path:
        raise NotSupported("this server saves no slots; start it with --slot-save-path")
    name = await context.parsed(request, lambda body: read(SlotFileBody, body).filename)
    folder = Path(context.config.slot_save_path)
    owner = await to_thread(partial(owner_of, folder, name))
    if owner is not None and not request[CLIENT].may_see({"owner": owner}):
        if request.query["action"] == "save":
            raise Forbidden(f"field 'filename': slot file '{name}' is another key's")
        raise NotFound(f"there is no slot file '{name}'")
    return folder, name


def _slot_id(text: str, n_slots: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) < n_slots):
        raise InvalidRequest(f"no slot {text[:20]!r}: this server has {n_slots}")
    return int(text)


def _slot(slot: Slot, context: Context, *, whole: bool) -> SlotState:
    """One item of /slots; the last request's parameters are in it if it is `whole` and the slot was used."""
    data = SlotState(
        id=slot.id,
        n_ctx=slot.n_ctx,
        speculative=bool(context.config.speculation.kinds if slot.sequence is None else slot.sequence.drafts),
        is_processing=slot.is_processing,
    )
    if slot.sequence is None or not whole:
        return data
    data.id_task = slot.id_task
    data.n_prompt_tokens = slot.n_prompt_tokens
    data.n_prompt_tokens_processed = slot.n_prompt_tokens_processed
    data.n_prompt_tokens_cache = slot.n_prompt_tokens_cache
    data.params = generation_settings(slot.sequence.request, {})
    data.next_token = [
        NextToken(
            has_next_token=slot.has_next_token,
            has_new_line=slot.has_new_line,
            n_remain=slot.n_remain,
            n_decoded=slot.n_decoded,
        )
    ]
    if context.config.verbose:
        data.prompt = context.served.tokenizer.pieces(slot.sequence.request.text_ids).decode("utf-8", "replace")
    return data

"""Slot actions: save, restore, erase and fork the state of an idle slot (POST /slots).

Everything here runs between two steps. An idle slot remembers the tokens of its last sequence.
Their KV blocks are cached prefixes, on the device or in host memory, and may have been evicted
since. A slot with another owner's content (Slot.is_of) looks empty; None: it is shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logitless.engine.errors import InvalidRequest, ServerFault, Unavailable
from logitless.engine.kv_cache.block_pool import n_blocks_for
from logitless.engine.kv_cache.slot_files import SlotFileState
from logitless.engine.sequence import Slot
from logitless.models.adapters.stacked_lora import BASE, AdapterChoice
from logitless.models.media.prompt_media import FIRST_ID

if TYPE_CHECKING:
    from logitless.engine.adapters import Adapters
    from logitless.engine.scheduler.scheduler import Scheduler


def snapshot(
    scheduler: Scheduler, id: int, adapters: Adapters | None = None, owner: str | None = None
) -> SlotFileState:
    """Copy of a slot's tokens and KV blocks, as far as they are still cached with exact bits."""
    slot = idle_slot(scheduler, id)
    if not slot.is_of(owner):
        return SlotFileState([], [])
    if adapters is None and slot.choice != BASE:
        raise InvalidRequest(f"slot {id} was computed with adapters that have no names")
    names = adapters.names(slot.choice) if adapters is not None else ()
    try:
        tokens, blocks, auxiliary = scheduler.cache.offload.copy_out(slot.cached, slot, slot.choice)
        return SlotFileState(tokens, blocks, names, auxiliary, slot.salt.partition("/")[2])
    except (MemoryError, OSError) as error:
        raise ServerFault(f"slot {id} cannot be saved: {error or type(error).__name__}") from None


def tokens_of(scheduler: Scheduler, id: int, owner: str | None = None) -> tuple[int, ...]:
    """Tokens of the slot's last sequence, including the last one, which is not in the KV cache."""
    slot = idle_slot(scheduler, id)
    if not slot.is_of(owner):
        return ()
    cached = slot.cached
    last = slot.sequence.tokens if slot.sequence is not None else []
    tokens = tuple(last if cached and last[: len(cached)] == cached else cached)
    if any(token < 0 for token in tokens):
        raise InvalidRequest(f"slot {id} has images or sounds: it can be gone on from only with them")
    return tokens


def install(
    scheduler: Scheduler, id: int, state: SlotFileState, adapters: Adapters | None = None, owner: str = ""
) -> None:
    """Restore a saved state to a slot, for this owner. On any error the slot stays as it is."""
    slot = idle_slot(scheduler, id)
    n_tokens = len(state.tokens)
    if n_tokens > slot.n_ctx:
        raise InvalidRequest(f"the state has {n_tokens} tokens, slot {id} has room for {slot.n_ctx}")
    least = FIRST_ID if scheduler.engine.media is not None else -1  # rows of images have ids up to it
    if not all(token <= least < -1 or 0 <= token < scheduler.vocab.n_vocab for token in state.tokens):
        raise InvalidRequest("the state has a token that is not in the vocabulary")
    choice = adapters.choice_of(state.adapters) if adapters is not None else BASE
    if state.adapters and adapters is None:
        raise InvalidRequest("the state was computed with adapters, and this server has none")
    try:
        salt = f"{owner}/{state.salt}" if owner or state.salt else ""
        fits = scheduler.cache.offload.copy_in(state.tokens, state.blocks, state.auxiliary, slot, choice, salt)
    except (MemoryError, OSError) as error:
        raise ServerFault(f"slot {id} cannot be restored: {error or type(error).__name__}") from None
    if not fits:
        n_blocks = n_blocks_for(n_tokens)
        raise Unavailable(f"running requests leave too few KV blocks: the state needs {n_blocks}; try again later")
    _hold(slot, state.tokens, choice, salt)
    scheduler.touch(slot)
    scheduler.count()


def erase(scheduler: Scheduler, id: int, owner: str | None = None) -> int:
    """Drop the cached tokens of a slot; returns how many its last sequence had in the cache."""
    slot = idle_slot(scheduler, id)
    if not slot.is_of(owner):
        return 0
    n_erased = len(slot.cached)
    scheduler.cache.forget(slot)
    slot.cached = []
    scheduler.count()
    return n_erased


def fork(scheduler: Scheduler, id: int, to: int, owner: str | None = None) -> int:
    """Share a slot's cached tokens with another slot; returns the number of tokens."""
    slot, other = idle_slot(scheduler, id), idle_slot(scheduler, to)
    if not slot.is_of(owner):
        return 0
    if slot is not other:
        scheduler.cache.offload.share(slot, other)
        _hold(other, slot.cached, slot.choice, slot.salt)
        scheduler.touch(other)
        scheduler.count()
    return len(other.cached)


def _hold(slot: Slot, tokens: list[int], choice: AdapterChoice, salt: str) -> None:
    """Have a slot remember these tokens, and no sequence that may be of another owner."""
    slot.cached, slot.choice, slot.salt = list(tokens), choice, salt
    if slot.sequence is not None and slot.sequence.request.cache_salt != salt:
        slot.sequence = None


def idle_slot(scheduler: Scheduler, id: int) -> Slot:
    """Slot by id.

    Raises InvalidRequest if it does not exist, Unavailable if a request runs in it.
    """
    if not 0 <= id < len(scheduler.slots):
        raise InvalidRequest(f"id_slot: must be below {len(scheduler.slots)}, not {id}")
    slot = scheduler.slots[id]
    if slot.is_processing:
        raise Unavailable(f"slot {id} is processing a request")
    return slot

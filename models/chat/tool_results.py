"""Tool calls and results of the history: their order, their ids, and forms that templates need."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

Message = dict[str, Any]


def in_call_order(messages: Sequence[Message]) -> list[Message]:
    """The conversation with each run of results in the order of its calls.

    Many templates write no ids, so the model pairs results with calls by their order. A result
    without a call of its id takes a place that no other has."""
    ordered: list[Message] = []
    calls: list[Any] = []
    for role, group in groupby(messages, key=lambda message: message.get("role")):
        run = list(group)
        if role == "assistant":
            calls = [call.get("id") for message in run for call in message.get("tool_calls") or ()]
        elif role == "tool" and len(run) > 1:
            run = _ordered(run, calls)
        ordered += run
    return ordered


def one_by_one(messages: Sequence[Message]) -> list[Message]:
    """The conversation with each call in a message of its own, before its results.

    For templates that refuse several calls in a message, or write only the first (Llama 3, gpt-oss, GigaChat 3)."""
    turns: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls") or ()
        if message.get("role") != "assistant" or len(calls) < 2:
            turns.append(message)
            continue
        results: list[Message] = []
        while at < len(messages) and messages[at].get("role") == "tool":
            results.append(messages[at])
            at += 1
        of_calls: list[list[Message]] = [[] for _ in range(len(calls) + 1)]  # the last: of none
        for result, place in zip(results, _places(results, [call.get("id") for call in calls]), strict=True):
            of_calls[place].append(result)
        for i, call in enumerate(calls):
            first = message if i == 0 else {"role": "assistant", "content": ""}
            turns += [{**first, "tool_calls": [call]}, *of_calls[i]]
        turns += of_calls[-1]
    return turns


def with_ids(messages: Sequence[Message], accepts: Callable[[str], bool], n_letters: int) -> list[Message]:
    """The conversation with ids of calls that the template accepts: other vendors' are hashed to so many letters,
    results without one have that of the call in their place."""

    def accepted(id: object, otherwise: str) -> str:
        id = id if isinstance(id, str) and id else otherwise
        return id if accepts(id) else hashlib.sha256(id.encode("utf-8", "replace")).hexdigest()[:n_letters]

    turns: list[Message] = []
    ids: list[str] = []
    n_calls = place = 0
    for message in messages:
        if calls := message.get("tool_calls"):
            ids = [accepted(call.get("id"), f"call {n_calls + i}") for i, call in enumerate(calls)]
            n_calls, place = n_calls + len(calls), 0
            message = {**message, "tool_calls": [{**call, "id": id} for call, id in zip(calls, ids, strict=True)]}
        elif message.get("role") == "tool":
            id = accepted(message.get("tool_call_id"), ids[place] if place < len(ids) else f"result {place}")
            message, place = {**message, "tool_call_id": id}, place + 1
        turns.append(message)
    return turns


def _ordered(results: list[Message], calls: list[Any]) -> list[Message]:
    keys = _places(results, calls)
    return [results[i] for i in sorted(range(len(results)), key=keys.__getitem__)]


def _places(results: list[Message], calls: list[Any]) -> list[int]:
    """The number of each result's call; that of the calls where there is none."""
    places: dict[str, deque[int]] = defaultdict(deque)
    for i, id in enumerate(calls):
        if isinstance(id, str):
            places[id].append(i)
    chosen: list[int | None] = []
    for result in results:
        id = result.get("tool_call_id")
        of_id = places[id] if isinstance(id, str) else None
        # a second result of the same call stays behind the first
        chosen.append((of_id.popleft() if len(of_id) > 1 else of_id[0]) if of_id else None)
    taken = set(chosen)
    free = iter([i for i in range(len(calls)) if i not in taken])
    return [next(free, len(calls)) if place is None else place for place in chosen]


FIELD = "tool_responses"  # of a calling message: the results of its calls (early Gemma 4)


def within_turns(messages: Sequence[Message]) -> list[Message]:
    """The conversation with the results of calls, and the answer after them, in the calling
    message.

    Text before a call becomes a message of its own, since templates write content after the
    results."""
    turns: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if message.get("role") != "assistant" or not message.get("tool_calls"):
            turns.append(message)
            continue
        turn = {**message, "content": ""}
        if message.get("content"):
            turns.append({"role": "assistant", "content": message["content"]})
        results: list[Message] = []
        by_id = {call["id"]: call for call in reversed(turn["tool_calls"]) if isinstance(call.get("id"), str)}
        while at < len(messages) and messages[at].get("role") == "tool":
            results.append(_response(messages[at], turn["tool_calls"], by_id, len(results)))
            at += 1
        if results:
            turn[FIELD] = results
            answer = messages[at] if at < len(messages) else {}
            if answer.get("role") == "assistant" and answer.get("content") and not answer.get("tool_calls"):
                turn["content"] = answer["content"]
                at += 1
        turns.append(turn)
    return turns


def _response(
    result: Message, calls: Sequence[Mapping[str, Any]], by_id: Mapping[str, Mapping[str, Any]], place: int
) -> Message:
    """A result as the template takes it: JSON as a value, named by the call with its id."""
    id = result.get("tool_call_id")
    call = by_id.get(id) if isinstance(id, str) else None
    if call is None and not result.get("name") and place < len(calls):
        call = calls[place]
    name = (call["function"].get("name") if call else result.get("name")) or id or "unknown"
    content: Any = result.get("content") or ""
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content if isinstance(part.get("text"), str))
    with suppress(ValueError, RecursionError):
        value = json.loads(content)
        content = content if value is None else value
    return {"name": name, "response": content}

"""Tool results within the turn that called the tools, for templates that read them there (early Gemma 4).

Such a template knows no role `tool`: the calling message has `tool_responses`, and the answer after them as content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

Message = dict[str, Any]

FIELD = "tool_responses"


def within_turns(messages: Sequence[Message]) -> list[Message]:
    """The conversation with the results of calls, and the answer after them, in the calling message.

    Text before a call becomes a message of its own, since templates write content after the results.
    """
    told: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if message.get("role") != "assistant" or not message.get("tool_calls"):
            told.append(message)
            continue
        turn = {**message, "content": ""}
        if message.get("content"):
            told.append({"role": "assistant", "content": message["content"]})
        results: list[Message] = []
        while at < len(messages) and messages[at].get("role") == "tool":
            results.append(_response(messages[at], turn["tool_calls"], len(results)))
            at += 1
        if results:
            turn[FIELD] = results
            answer = messages[at] if at < len(messages) else {}
            if answer.get("role") == "assistant" and answer.get("content") and not answer.get("tool_calls"):
                turn["content"] = answer["content"]
                at += 1
        told.append(turn)
    return told


def _response(result: Message, calls: Sequence[Mapping[str, Any]], place: int) -> Message:
    """A result as the template takes it: JSON as a value, named by the call with its id."""
    id = result.get("tool_call_id")
    call = next((call for call in calls if id is not None and call.get("id") == id), None)
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

"""Generic tool calls, for templates without tools: the system message explains them, answers are JSON.

The form of answer is that of llama.cpp's generic handler: {"tool_call": …}, {"tool_calls": […]} or
{"response": "…"}."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from logitless.models.chat.tool_calls.probed.markers import Markers

Message = dict[str, Any]

_MANY = '{"tool_calls": [{"name": <tool>, "arguments": <object>}, …]}'
_ONE = '{"tool_call": {"name": <tool>, "arguments": <object>}}'


def instructed(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, required: bool, parallel: bool
) -> list[Message]:
    """The conversation with a system message that describes the tools."""
    descriptions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    form = f"to call tools: {_MANY if parallel else _ONE}"
    if not required:
        form += '\nto answer the user: {"response": <text>}'
    text = f"You can call these tools:\n{descriptions}\n\nRespond with nothing but JSON of this form,\n{form}"
    first, rest = (messages[0], messages[1:]) if messages[0]["role"] in ("system", "developer") else (None, messages)
    system = {"role": "system", "content": text}
    if first is not None:
        system = {**first, "content": f"{first['content']}\n\n{text}"}
    return [system, *rest]


def as_text(messages: Sequence[Message], markers: Markers | None = None) -> list[Message]:
    """The conversation with calls and results as text, for templates without either; roles stay
    alternating.

    `markers`: those of the list of calls that the model was trained on.
    """
    turns: list[Message] = []
    for message in messages:
        if message.get("tool_calls"):
            turns.append({"role": "assistant", "content": _calls(message, markers)})
        elif message["role"] == "tool":
            result = {"tool_response": {key: message[key] for key in ("name", "tool_call_id") if message.get(key)}}
            result["tool_response"]["content"] = message["content"]
            text = json.dumps(result, ensure_ascii=False)
            if turns and turns[-1].get("tool_results"):
                turns[-1]["content"] += f"\n{text}"
            else:
                turns.append({"role": "user", "content": text, "tool_results": True})
        else:
            turns.append(dict(message))
    for message in turns:
        message.pop("tool_results", None)
    return turns


def _calls(message: Message, markers: Markers | None) -> str:
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"].get("arguments", "{}")
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        shape = {"name": call["function"]["name"], "arguments": arguments}
        calls.append(shape | ({"id": call["id"]} if call.get("id") and markers is None else {}))
    body = {"tool_call": calls[0]} if len(calls) == 1 else {"tool_calls": calls}
    text = json.dumps(body, ensure_ascii=False)
    if markers is not None:
        objects = markers.separator.join(json.dumps(call, ensure_ascii=False) for call in calls)
        text = f"{markers.section}{objects}{markers.section_end}"
    return f"{message['content']}\n{text}" if message.get("content") else text

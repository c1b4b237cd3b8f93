"""Generic tool calls, for templates without tools: the system message explains them, answers are JSON.

The form of answer is that of llama.cpp's generic handler: {"tool_call": …}, {"tool_calls": […]} or
{"response": "…"}. Templates of known formats that show no tools, or do not write calls, get both in
the format's own syntax (`described`, `as_text`)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from logitless.models.chat.tool_calls.families import GENERIC
from logitless.models.chat.tool_calls.parser import CallFormat
from logitless.models.chat.tool_calls.probed.markers import ID, JSON, NUMBER, PYTHON, TAGGED

Message = dict[str, Any]

_MANY = '{"tool_calls": [{"name": <tool>, "arguments": <object>}, …]}'
_ID = re.compile(rf',\s*"\w+":\s*"{ID}"')
_ONE = '{"tool_call": {"name": <tool>, "arguments": <object>}}'


def instructed(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, required: bool, parallel: bool
) -> list[Message]:
    """The conversation with a system message that describes the tools, for answers of generic JSON."""
    form = f"to call tools: {_MANY if parallel else _ONE}"
    if not required:
        form += '\nto answer the user: {"response": <text>}'
    return _with_tools(messages, tools, f"Respond with nothing but JSON of this form,\n{form}")


def described(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], calls: CallFormat) -> list[Message]:
    """The conversation with a system message that describes the tools, for calls in this format (`is_written`)."""
    return _with_tools(messages, tools, f"To call a tool, write\n{_written(calls, [('<name>', '<JSON object>')])}")


def _with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], how: str) -> list[Message]:
    descriptions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = f"You can call these tools:\n{descriptions}\n\n{how}"
    first, rest = (messages[0], messages[1:]) if messages[0]["role"] in ("system", "developer") else (None, messages)
    system = {"role": "system", "content": text}
    if first is not None:
        system = {**first, "content": f"{first['content']}\n\n{text}"}
    return [system, *rest]


def is_written(calls: CallFormat) -> bool:
    """True if `described` and `as_text` know the syntax of the format."""
    return calls.markers is not None and calls.markers.style != TAGGED


def as_text(messages: Sequence[Message], calls: CallFormat = GENERIC, *, results: bool = True) -> list[Message]:
    """The conversation with calls, and `results`, as text, for templates without them; roles stay
    alternating.

    `calls`: the format that the model was trained on."""
    turns: list[Message] = []
    answers: list[str] = []  # results that nothing follows yet
    for message in messages:
        if message["role"] != "tool" or message.get("tool_calls") or not results:
            turns += _answered(answers)
        if message.get("tool_calls"):
            turns.append({"role": "assistant", "content": _calls(message, calls)})
        elif message["role"] == "tool" and results:
            result = {"tool_response": {key: message[key] for key in ("name", "tool_call_id") if message.get(key)}}
            result["tool_response"]["content"] = message["content"]
            answers.append(json.dumps(result, ensure_ascii=False))
        else:
            turns.append(dict(message))
    return turns + _answered(answers)


def _answered(answers: list[str]) -> list[Message]:
    """Turn with these results, which are removed from the list; no turn without results."""
    turn: list[Message] = [{"role": "user", "content": "\n".join(answers)}] if answers else []
    answers.clear()
    return turn


def _calls(message: Message, format: CallFormat) -> str:
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"].get("arguments", "{}")
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        calls.append({"name": call["function"]["name"], "arguments": arguments})
    if is_written(format):
        text = _written(format, [(each["name"], json.dumps(each["arguments"], ensure_ascii=False)) for each in calls])
    else:
        for shape, call in zip(calls, message["tool_calls"], strict=True):
            shape |= {"id": call["id"]} if call.get("id") else {}
        text = json.dumps({"tool_call": calls[0]} if len(calls) == 1 else {"tool_calls": calls}, ensure_ascii=False)
    return f"{message['content']}\n{text}" if message.get("content") else text


def _written(calls: CallFormat, named: Sequence[tuple[str, str]]) -> str:
    """Calls by name and JSON of their arguments, as the model writes them."""
    m, texts = calls.markers, list[str]()
    assert m is not None
    for name, arguments in named:
        call = f"{name}({_python(arguments)})"
        if m.style != PYTHON:
            named_so = json.dumps(name, ensure_ascii=False) if m.style == JSON else name
            call = f"{m.head}{named_so}{m.middle}{arguments}{_ID.sub('', m.tail)}"
        texts.append(f"{m.begin}{call}{m.end}".replace(NUMBER, str(len(texts))))
    return f"{m.section}{m.separator.join(texts)}{m.section_end}"


def _python(arguments: str) -> str:
    """Arguments of a Python call, from their JSON."""
    with suppress(ValueError):
        if isinstance(given := json.loads(arguments), dict):
            return ", ".join(f"{name}={value!r}" for name, value in given.items())
    return arguments

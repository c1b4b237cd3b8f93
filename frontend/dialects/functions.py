"""OpenAI's first form of tools: `functions`, `function_call`, messages of the role function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from logitless.frontend.dialects.translate import Translated
from logitless.frontend.fields import as_array, as_object, as_text, bad_request


def chat_body(body: Mapping[str, Any]) -> Translated:
    """Body of a chat request with `tools` in place of the older `functions`."""
    functions, choice = body.get("functions"), body.get("function_call")
    messages = body.get("messages")
    for name, newer in (("functions", "tools"), ("function_call", "tool_choice")):
        if body.get(name) and body.get(newer):
            bad_request(name, f"cannot be combined with {newer}")
    chat = {name: value for name, value in body.items() if name not in ("functions", "function_call")}
    names = {"tool_choice": "function_call", "tools": "functions"} if functions or choice else {}
    if functions:
        chat["tools"] = [{"type": "function", "function": f} for f in as_array("functions", functions)]
        names |= {f"tools[{i}].function": f"functions[{i}]" for i in range(len(functions))}
        chat["parallel_tool_calls"] = False
    if choice:
        chat["tool_choice"] = choice if isinstance(choice, str) else {"type": "function", "function": choice}
    if isinstance(messages, list):
        chat["messages"] = [_message(i, message) for i, message in enumerate(messages)]
    return Translated(chat, names)


def _message(i: int, message: Any) -> Any:
    """A message with tool calls. Calls have no ids in the first form: the function's name stands for it."""
    if not isinstance(message, dict):
        return message
    called = message.get("function_call")
    rest = {key: value for key, value in message.items() if key != "function_call"}
    if message.get("role") == "function":
        name = as_text(f"messages[{i}].name", message.get("name"))
        return {**rest, "role": "tool", "tool_call_id": name}
    if not called:
        return rest
    called = as_object(f"messages[{i}].function_call", called)
    name = as_text(f"messages[{i}].function_call.name", called.get("name"))
    return {**rest, "tool_calls": [{"id": name, "type": "function", "function": called}]}

"""POST /v1/messages: Anthropic's Messages API → the body of a chat request. Every refusal names the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from logitless.server.protocol.dialects.translate import Translated, tools_of
from logitless.server.protocol.fields import Fields, article, as_text, refuse, unsupported

DEFAULT_MAX_TOKENS = 4096  # llama-server's; Anthropic requires the field
_RENAMED = (
    "messages",
    "system",
    "stop_sequences",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
    "output_format",
)


def chat_body(body: Mapping[str, Any]) -> Translated:
    """The chat request that asks for the same."""
    fields = Fields(body)
    for name in ("n", "n_cmpl"):
        if body.get(name) not in (None, 1):
            refuse(name, "must be 1")
    chat = {name: value for name, value in body.items() if name not in _RENAMED}
    names: dict[str, str] = {}
    if body.get("max_tokens") is None:
        chat["max_tokens"] = DEFAULT_MAX_TOKENS
    system = _text("system", body.get("system"))
    chat["messages"] = [{"role": "system", "content": system}] if system else []
    for i, message in enumerate(fields.array("messages") or ()):
        chat["messages"] += _message(f"messages[{i}]", message)
    if not body.get("messages"):
        refuse("messages", "must be a non-empty array")
    if body.get("stop_sequences") is not None:
        names["stop"] = "stop_sequences"
        chat["stop"] = [as_text("stop_sequences", word) for word in fields.array("stop_sequences") or ()]
    chat["reasoning_format"] = "auto"  # reasoning has blocks of its own
    if body.get("tools") is not None:
        tools = tools_of(((f"tools[{i}]", tool) for i, tool in enumerate(fields.array("tools") or ())), "custom")
        chat["tools"] = [_function(tool) for _, tool in tools]
        for n, (place, _) in enumerate(tools):
            names[f"tools[{n}].function"] = place
            names[f"tools[{n}].function.parameters"] = f"{place}.input_schema"
    _choose(chat, fields.inside("tool_choice"))
    _think(chat, fields.inside("thinking"))
    name, form = "output_format", fields.object("output_format")
    if not form:
        name, form = "output_config.format", fields.inside("output_config").object("format")
    if form:
        if form.get("type") != "json_schema":
            refuse(name, "type must be json_schema")
        names["response_format.json_schema"] = name
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    return Translated(chat, names)


def _choose(chat: dict[str, Any], choice: Fields) -> None:
    given = choice.body
    if not given:
        return
    kind = given.get("type")
    if kind == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": _required("tool_choice", choice, "name")}}
    elif kind in ("auto", "any", "none"):
        chat["tool_choice"] = "required" if kind == "any" else kind
    else:
        refuse("tool_choice", "type must be auto, any, tool or none")
    if given.get("disable_parallel_tool_use") is not None:
        chat["parallel_tool_calls"] = not choice.boolean("disable_parallel_tool_use")


def _think(chat: dict[str, Any], thinking: Fields) -> None:
    kind = thinking.text("type")
    if not kind:
        return
    if kind not in ("enabled", "disabled", "adaptive"):
        refuse("thinking", "type must be enabled, disabled or adaptive")
    kwargs = chat.get("chat_template_kwargs")
    chat["chat_template_kwargs"] = {
        "enable_thinking": kind != "disabled",
        **(kwargs if isinstance(kwargs, dict) else {}),
    }
    budget = thinking.integer("budget_tokens", default=-1, low=-1, hard=True)
    if kind == "enabled" and budget >= 0:
        chat["reasoning_budget_tokens"] = budget


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": function | {k: tool[k] for k in ("description", "strict") if k in tool}}


def _message(name: str, message: object) -> list[dict[str, Any]]:
    """One message as those of a chat: results of tools come before what the user says."""
    if not isinstance(message, dict):
        refuse(name, f"expected an object, got {article(message)}")
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        refuse(f"{name}.role", "must be user or assistant")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        refuse(f"{name}.content", f"expected a string or an array of blocks, got {article(content)}")
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for k, block in enumerate(content):
        where = f"{name}.content[{k}]"
        if not isinstance(block, dict):
            refuse(where, f"expected an object, got {article(block)}")
        kind, part = block.get("type"), Fields(block, f"{where}.")
        if kind == "text":
            texts.append(_required(where, part, "text"))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(part.text("thinking"))
        elif kind == "redacted_thinking":
            continue
        elif kind == "tool_use" and role == "assistant":
            id = _required(where, part, "id")
            function = {
                "name": _required(where, part, "name"),
                "arguments": json.dumps(block.get("input") or {}, ensure_ascii=False),
            }
            calls.append({"id": id, "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            text = _text(f"{where}.content", block.get("content"))
            results.append({"role": "tool", "tool_call_id": _required(where, part, "tool_use_id"), "content": text})
        elif kind in ("image", "document"):
            unsupported(where, f"{kind} needs a model with media, which this is not")
        else:
            refuse(f"{where}.type", f"{str(kind)[:32]!r} is not possible in a message of the {role}")
    said: dict[str, Any] = {"role": role, "content": "\n".join(texts) if texts else None}
    if thoughts:
        said["reasoning_content"] = "\n".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    if results and not texts:
        return results
    said["content"] = said["content"] if calls or texts else ""
    return [*results, said]


def _required(where: str, part: Fields, key: str) -> str:
    value = part.body.get(key)
    if not isinstance(value, str):
        refuse(f"{where}.{key}", f"expected a string, got {article(value)}")
    return value


def _text(name: str, value: object) -> str:
    """A string, or text blocks joined by newlines."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        refuse(name, f"expected a string or an array of blocks, got {article(value)}")
    texts = []
    for k, block in enumerate(value):
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            if isinstance(block, dict) and block.get("type") in ("image", "document"):
                unsupported(f"{name}[{k}]", f"{block['type']} needs a model with media, which this is not")
            refuse(f"{name}[{k}]", "must be a block of type text with a text")
        texts.append(block["text"])
    return "\n".join(texts)

"""Anthropic's Messages API (POST /v1/messages) → the body of a chat request. Refusals name the field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from msgspec import Struct

from logitless.engine.errors import InvalidRequest
from logitless.engine.sampling.params import INT_MAX, Param
from logitless.frontend.answers.anthropic import ModelInfo, ModelList
from logitless.frontend.answers.models import ModelEntry
from logitless.frontend.dialects.hosted_tools import client_tool, is_hosted
from logitless.frontend.dialects.translate import Translated, tools_of
from logitless.frontend.fields import article, as_object, as_text, bad_request, limited, read

_BILLING = "x-anthropic-billing-header:"  # Claude Code's first line of the system message
_VOLATILE = re.compile(r"(\bcch=|\bcc_version=\d+\.\d+\.\d+\.)([0-9a-f]+)")  # checksums of the messages
DEFAULT_MAX_TOKENS = 4096  # llama-server's; Anthropic requires the field


class ToolChoice(Struct, frozen=True, kw_only=True):
    """`tool_choice`."""

    type: str | None = None
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, frozen=True, kw_only=True):
    """`thinking`."""

    type: str | None = None
    budget_tokens: int | None = None


class OutputConfig(Struct, frozen=True, kw_only=True):
    """`output_config`."""

    format: dict[str, Any] | None = None


class MessagesBody(Struct, frozen=True, kw_only=True):
    """POST /v1/messages, beside the fields of a chat request."""

    messages: Annotated[Sequence[Any], Param("the conversation: {role, content} with text or blocks", least=1)]
    system: Annotated[Any, Param("the system message: a text, or text blocks")] = None
    stop_sequences: Annotated[Sequence[str] | None, Param("texts that end the answer")] = None
    tools: Annotated[Sequence[Any] | None, Param("functions: {name, description, input_schema}")] = None
    tool_choice: Annotated[ToolChoice | None, Param("{type}: auto, any, tool (with a name) or none")] = None
    thinking: Annotated[Thinking, Param("{type, budget_tokens}: enabled, disabled or adaptive")] = Thinking()
    output_config: Annotated[OutputConfig, Param("{format}: as output_format")] = OutputConfig()
    output_format: Annotated[dict[str, Any] | None, Param("{type: json_schema, schema}")] = None


def chat_body(body: Mapping[str, Any]) -> Translated:
    """The chat request that asks for the same."""
    params = read(MessagesBody, body)
    for name in ("n", "n_cmpl"):
        if body.get(name) not in (None, 1):
            bad_request(name, "must be 1")
    chat = {name: value for name, value in body.items() if name not in MessagesBody.__struct_fields__}
    names: dict[str, str] = {}
    if body.get("max_tokens") is None:
        chat["max_tokens"] = DEFAULT_MAX_TOKENS
    system = _stable(_text("system", params.system))
    chat["messages"] = [{"role": "system", "content": system}] if system else []
    for i, message in enumerate(params.messages):
        _add_message(chat["messages"], names, f"messages[{i}]", message)
    if params.stop_sequences is not None:
        names["stop"] = "stop_sequences"
        chat["stop"] = list(params.stop_sequences)
    chat["reasoning_format"] = "auto"  # reasoning has blocks of its own
    if params.tools is not None:
        tools = tools_of(((f"tools[{i}]", tool) for i, tool in enumerate(params.tools)), "custom")
        chat["tools"] = [_function(tool) for _, tool in tools]
        for n, (place, _) in enumerate(tools):
            names[f"tools[{n}].function"] = place
            names[f"tools[{n}].function.parameters"] = f"{place}.input_schema"
    if params.tool_choice is not None and body["tool_choice"]:
        _choose(chat, params.tool_choice)
    _think(chat, params.thinking)
    name, form = "output_format", params.output_format
    if not form:
        name, form = "output_config.format", params.output_config.format
    if form:
        if form.get("type") != "json_schema":
            bad_request(name, "type must be json_schema")
        names["response_format.json_schema"] = name
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    return Translated(chat, names)


def _stable(system: str) -> str:
    """The system message without the parts of Claude Code's first line that change with each request:
    they would let no prefix of the prompt be found in the cache. llama-server writes f's over `cch`."""
    if not system.startswith(_BILLING):
        return system
    head, newline, rest = system.partition("\n")
    return _VOLATILE.sub(lambda result: result[1] + "f" * len(result[2]), head) + newline + rest


def _choose(chat: dict[str, Any], choice: ToolChoice) -> None:
    if choice.type == "tool":
        if choice.name is None:
            bad_request("tool_choice.name", "is required")
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice.type in ("auto", "any", "none"):
        chat["tool_choice"] = "required" if choice.type == "any" else choice.type
    else:
        bad_request("tool_choice", "type must be auto, any, tool or none")
    if choice.disable_parallel_tool_use is not None:
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use


def _think(chat: dict[str, Any], thinking: Thinking) -> None:
    kind = thinking.type
    if not kind:
        return
    if kind not in ("enabled", "disabled", "adaptive"):
        bad_request("thinking", "type must be enabled, disabled or adaptive")
    kwargs = chat.get("chat_template_kwargs")
    chat["chat_template_kwargs"] = {
        "enable_thinking": kind != "disabled",
        **(kwargs if isinstance(kwargs, dict) else {}),
    }
    budget = -1 if thinking.budget_tokens is None else thinking.budget_tokens
    limited("thinking.budget_tokens", budget, -1, INT_MAX, True)
    if kind == "enabled" and budget >= 0:
        chat["reasoning_budget_tokens"] = budget


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    if is_hosted(tool):
        function = client_tool(tool)
        return (
            {k: tool.get(k) for k in ("type", "name")}
            if function is None
            else {"type": "function", "function": function}
        )
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": function | {k: tool[k] for k in ("description", "strict") if k in tool}}


def _add_message(messages: list[dict[str, Any]], names: dict[str, str], name: str, message: object) -> None:
    """Add one message as those of a chat: results of tools come before what the user says. `names`
    gets the places of its parts."""
    role, content = (as_object(name, message).get(key) for key in ("role", "content"))
    if role not in ("user", "assistant", "system"):
        bad_request(f"{name}.role", "must be user or assistant")
    if isinstance(content, str):
        messages.append({"role": role, "content": content})
        return
    if not isinstance(content, list):
        bad_request(f"{name}.content", f"expected a string or an array of blocks, got {article(content)}")
    parts: list[tuple[str, dict[str, Any]]] = []  # texts and images, with their places
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    n_results = 0
    for k, block in enumerate(content):
        where = f"{name}.content[{k}]"
        kind = as_object(where, block).get("type")
        if kind == "text":
            parts.append((where, {"type": "text", "text": _required(where, block, "text")}))
        elif kind == "image" and role == "user":
            parts.append((where, block))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(_required(where, block, "thinking") if block.get("thinking") is not None else "")
        elif kind == "redacted_thinking":
            continue
        elif kind == "tool_use" and role == "assistant":
            id = _required(where, block, "id")
            function = {
                "name": _required(where, block, "name"),
                "arguments": json.dumps(block.get("input") or {}, ensure_ascii=False),
            }
            calls.append({"id": id, "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            id, lines = _required(where, block, "tool_use_id"), _tool_results(f"{where}.content", block.get("content"))
            content = _joined(lines, f"messages[{len(messages)}]", names)
            messages.append({"role": "tool", "tool_call_id": id, "content": content})
            n_results += 1
        elif kind in _TEXT_BLOCKS:
            parts.append((where, {"type": "text", "text": _block_text(where, block)}))
        else:
            bad_request(f"{where}.type", f"{str(kind)[:32]!r} is not possible in a message of the {role}")
    content = _joined(parts, f"messages[{len(messages)}]", names) if parts else None
    built: dict[str, Any] = {"role": role, "content": content}
    if thoughts:
        built["reasoning_content"] = "\n".join(thoughts)
    if calls:
        built["tool_calls"] = calls
    if parts or not n_results:
        built["content"] = built["content"] if calls or parts else ""
        messages.append(built)


def _joined(parts: list[tuple[str, dict[str, Any]]], message: str, names: dict[str, str]) -> str | list[dict[str, Any]]:
    """Text parts as one text; with images they stay parts, whose places `names` gets."""
    if all(part["type"] == "text" for _, part in parts):
        return "\n".join(part["text"] for _, part in parts)
    names |= {f"{message}.content[{k}]": where for k, (where, _) in enumerate(parts)}
    return [part for _, part in parts]


def _tool_results(name: str, value: object) -> list[tuple[str, dict[str, Any]]]:
    """Parts of a tool's result: a text, or blocks of text and images, with their places."""
    if not isinstance(value, list):
        return [(name, {"type": "text", "text": _text(name, value)})]
    parts = []
    for k, block in enumerate(value):
        where, is_image = f"{name}[{k}]", isinstance(block, dict) and block.get("type") == "image"
        parts.append((where, block if is_image else {"type": "text", "text": _block_text(where, block)}))
    return parts


def _required(where: str, block: Mapping[str, Any], key: str) -> str:
    return as_text(f"{where}.{key}", block.get(key))


def _text(name: str, value: object) -> str:
    """A string, or text blocks joined by newlines."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        bad_request(name, f"expected a string or an array of blocks, got {article(value)}")
    return "\n".join(_block_text(f"{name}[{k}]", block) for k, block in enumerate(value))


def _block_text(where: str, block: object) -> str:
    if isinstance(block, dict) and block.get("type") in _TEXT_BLOCKS:
        return _document_text(where, block)
    if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
        bad_request(where, "must be a block of type text with a text")
    text: str = block["text"]
    return text


_TEXT_BLOCKS = ("document", "search_result", "tool_reference")  # blocks that may be text


def _document_text(where: str, block: Mapping[str, Any]) -> str:
    """The text of a block of _TEXT_BLOCKS. A tool that is referred to is in the tools: its name says all."""
    kind, source = block["type"], block.get("source")
    if kind == "tool_reference":
        return _required(where, block, "tool_name")
    head = [block[key] for key in ("title", "context") if isinstance(block.get(key), str)]
    if kind == "search_result":
        return "\n".join([*head, _required(where, block, "source"), _text(f"{where}.content", block.get("content"))])
    of = source.get("type") if kind == "document" and isinstance(source, dict) else None
    if of not in ("text", "content"):
        bad_request(where, "document must be a text here; its source is of the type text or content")
    assert isinstance(source, dict)
    text = _required(f"{where}.source", source, "data") if of == "text" else source.get("content")
    return "\n".join([*head, _text(f"{where}.source.content", text)])


def listed(models: Iterable[ModelEntry], query: Mapping[str, str]) -> ModelList:
    """The answer of GET /v1/models: `limit` models after `after_id` or before `before_id`."""
    data = [model_info(model) for model in models]
    limit = query.get("limit", "20")
    if not (limit.isdecimal() and len(limit) < 5 and 1 <= int(limit) <= 1000):
        raise InvalidRequest(f"query 'limit': must be from 1 to 1000, not {limit[:20]!r}")
    places = {model.id: i for i, model in enumerate(data)}
    for name in ("after_id", "before_id"):
        if name in query and query[name] not in places:
            raise InvalidRequest(f"query '{name}': there is no model {query[name][:64]!r}")
    end = places[query["before_id"]] if "before_id" in query else len(data)
    start = places[query["after_id"]] + 1 if "after_id" in query else 0
    n = int(limit)
    page = data[start:end][-n:] if "before_id" in query and "after_id" not in query else data[start:end][:n]
    return ModelList(
        data=page,
        has_more=len(page) < len(data[start:end]),
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
    )


def model_info(model: ModelEntry) -> ModelInfo:
    """A model of OpenAI's list as Anthropic's has it."""
    n_ctx = model.meta.n_ctx_train or None if model.meta else None
    return ModelInfo(
        id=model.id,
        display_name=model.id,
        created_at=datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        max_input_tokens=n_ctx,
        max_tokens=n_ctx,
    )

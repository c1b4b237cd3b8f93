"""OpenAI's Responses API (POST /v1/responses) → the body of a chat request. Refusals name the field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Struct

from logitless.engine.sampling.params import INT_MAX, Param
from logitless.frontend.chat.messages import Chat
from logitless.frontend.dialects.hosted_tools import is_hosted
from logitless.frontend.dialects.translate import Translated, tools_of, whole_members
from logitless.frontend.fields import as_array, as_object, as_text, bad_request, read

_NOT_THERE = "prompt"  # templates of the service


class Reasoning(Struct, frozen=True, kw_only=True):
    """`reasoning`."""

    effort: str | None = None


class TextForm(Struct, frozen=True, kw_only=True):
    """`text`."""

    format: dict[str, Any] | None = None


class ResponsesBody(Struct, frozen=True, kw_only=True):
    """POST /v1/responses, beside the fields of a chat request."""

    input: Annotated[
        Any, Param("a text, or an array of items: messages, calls, their outputs, reasoning", required=True)
    ] = None
    instructions: Annotated[str, Param("a system message before the input")] = ""
    previous_response_id: Annotated[str, Param("a stored response to go on from")] = ""
    conversation: Annotated[Any, Param("a stored conversation to go on with: its id, or {id}")] = None
    background: Annotated[bool, Param("go on without the client; GET /v1/responses/{id} tells the state")] = False
    store: Annotated[bool, Param("keep the response, so that it can be gone on from")] = True
    max_output_tokens: Annotated[int | None, Param("most tokens of the answer", 1, INT_MAX, hard=True)] = None
    reasoning: Annotated[Reasoning, Param("{effort}: as reasoning_effort")] = Reasoning()
    text: Annotated[TextForm, Param("{format}: as response_format")] = TextForm()
    tools: Annotated[
        Sequence[Any] | None,
        Param("{type: function, name, parameters}, {type: custom, name, format}, or {type: mcp, server_label}"),
    ] = None
    tool_choice: Annotated[Any, Param("none, auto, required, or {type: function or custom, name}")] = None
    top_logprobs: Annotated[
        int | None, Param("log-probabilities of the text's tokens, and of so many likely ones", 0, 20, hard=True)
    ] = None
    include: Annotated[
        Sequence[str] | None, Param("message.output_text.logprobs: as top_logprobs; others have no effect")
    ] = None


def chat_body(
    response: ResponsesBody, body: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]] = ()
) -> Translated:
    """The chat request that asks for the same. `earlier`: the items of the conversation that it goes on with."""
    if body.get(_NOT_THERE):
        bad_request(_NOT_THERE, "is not there; previous_response_id is")
    for name in ("n", "n_cmpl"):
        if body.get(name) not in (None, 1):
            bad_request(name, "must be 1")
    chat = {k: v for k, v in body.items() if k not in ResponsesBody.__struct_fields__ and k != _NOT_THERE}
    names = {"messages": "input", "response_format": "text.format", "response_format.json_schema": "text.format"}
    system = {"role": "system", "content": response.instructions}
    chat["messages"] = [system] if response.instructions else []
    if earlier:
        places: dict[str, str] = {}
        _add(chat["messages"], list(earlier), places)
        names |= {name: f"conversation.{place.replace('input', 'items', 1)}" for name, place in places.items()}
    _add(chat["messages"], body.get("input"), names)
    chat["reasoning_format"] = "auto"  # reasoning has items of its own
    if response.max_output_tokens is not None:
        chat["max_tokens"] = response.max_output_tokens
    if response.top_logprobs or "message.output_text.logprobs" in (response.include or ()):
        chat |= {"logprobs": True, "top_logprobs": response.top_logprobs or 0}
    if response.reasoning.effort:
        chat["reasoning_effort"] = response.reasoning.effort
    if response.text.format:
        chat["response_format"] = _format(response.text.format)
    if response.tools is not None:
        tools = tools_of(expanded(response.tools), "function", "custom")
        kinds = [tool.get("type") or "function" for _, tool in tools]
        inner = [{k: v for k, v in tool.items() if k != "type"} for _, tool in tools]
        chat["tools"] = [
            {"type": kind} if is_hosted(tool) else {"type": kind, kind: inner}
            for (_, tool), kind, inner in zip(tools, kinds, inner, strict=True)
        ]
        names |= {f"tools[{n}].{kinds[n]}": place for n, (place, _) in enumerate(tools)}
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        choice = _choice(choice)
    if choice is not None:
        chat["tool_choice"] = choice
    return Translated(chat, names)


def check_items(items: Sequence[Any]) -> None:
    """400 that names the first of a conversation's new items that no input may have."""

    def parse(_: object) -> None:
        messages: list[dict[str, Any]] = []
        places: dict[str, str] = {}
        _add(messages, items, places)
        Translated({"messages": messages}, places).read(lambda chat: read(Chat, chat))

    if items:
        Translated({}, {"input": "items"}).read(parse)


def conversation_id(value: object) -> str:
    """The id that a request's `conversation` names; "": none."""
    if isinstance(value, Mapping):
        return as_text("conversation.id", value.get("id"))
    return "" if value is None else as_text("conversation", value)


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        return {**choice, "tools": [_choice(tool) if isinstance(tool, dict) else tool for tool in choice["tools"]]}
    if is_hosted(choice):
        return dict(choice)
    name = choice.get("name")
    if isinstance(name, str):
        name = full_name(choice.get("namespace"), name)
    kind = choice.get("type")
    return {"type": kind, "custom" if kind == "custom" else "function": {"name": name}}


def _format(form: Mapping[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        return dict(form)
    return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}


def _add(messages: list[dict[str, Any]], value: object, names: dict[str, str]) -> None:
    """The items of `input` as messages; calls and reasoning belong to the assistant's message beside them. `names`
    gets where a message comes from."""
    if isinstance(value, str):
        messages.append({"role": "user", "content": value})
        return
    if not isinstance(value, list) or not value:
        bad_request("input", "must be a string or a non-empty array")
    for i, item in enumerate(value):
        kind = as_text(f"input[{i}].type", as_object(f"input[{i}]", item).get("type", "message"))
        if kind == "message":
            as_text(f"input[{i}].role", item.get("role"))
            _add_message(messages, item)
            names[f"messages[{len(messages) - 1}]"] = f"input[{i}]"
        elif kind in ("function_call", "custom_tool_call"):
            _assistant(messages).setdefault("tool_calls", []).append(_call(f"input[{i}]", item))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            id = as_text(f"input[{i}].call_id", item.get("call_id"))
            messages.append({"role": "tool", "tool_call_id": id, "content": item.get("output")})
            names[f"messages[{len(messages) - 1}].content"] = f"input[{i}].output"
        elif kind == "mcp_call":
            _add_done(f"input[{i}]", messages, item)
        elif kind == "web_search_call":
            _add_search(messages, item)
        elif kind in _UNSEEN:
            continue
        elif kind == "reasoning":
            messages.append({"role": "assistant", "content": None, "reasoning_content": _thought(i, item)})
        else:
            bad_request(f"input[{i}].type", f"{kind[:32]!r} is not known here")


_UNSEEN = frozenset({"mcp_list_tools", "mcp_approval_request", "mcp_approval_response"})  # by the model


def _add_done(where: str, messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """A call of an MCP tool with its result."""
    id, label, name, arguments = (
        as_text(f"{where}.{key}", item.get(key)) for key in ("id", "server_label", "name", "arguments")
    )
    function = {"name": full_name(label, re.sub(r"[^A-Za-z0-9_-]", "_", name)), "arguments": arguments or "{}"}
    call = {"id": id, "type": "function", "function": function}
    _assistant(messages).setdefault("tool_calls", []).append(call)
    output, error = item.get("output"), item.get("error")
    text = output if isinstance(output, str) else json.dumps(error, ensure_ascii=False) if error else ""
    messages.append({"role": "tool", "tool_call_id": id, "content": text})


def _add_search(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """A search with what it found, where the item has that: of this server."""
    action, output = item.get("action"), item.get("output")
    if isinstance(action, dict) and isinstance(output, str):
        arguments = json.dumps({"query": str(action.get("query"))}, ensure_ascii=False)
        id = str(item.get("id"))
        call = {"id": id, "type": "function", "function": {"name": "web_search", "arguments": arguments}}
        _assistant(messages).setdefault("tool_calls", []).append(call)
        messages.append({"role": "tool", "tool_call_id": id, "content": output})


def _call(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    """A call of the assistant as one of a chat."""
    custom = item["type"] == "custom_tool_call"
    kind, key = ("custom", "input") if custom else ("function", "arguments")
    call = {"name": item.get("name"), key: item.get(key) or ("" if custom else "{}")}
    for name, value in (*call.items(), ("call_id", item.get("call_id"))):
        as_text(f"{where}.{name}", value)
    call["name"] = full_name(item.get("namespace"), item["name"])
    if item.get("status") == "incomplete" and not custom:
        call[key] = json.dumps(whole_members(item[key]), ensure_ascii=False)
    return {"id": item["call_id"], "type": kind, kind: call}


def _add_message(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    message = {"role": item.get("role"), "content": item.get("content")}
    last = messages[-1] if messages else {}
    if message["role"] == "assistant" and last.get("reasoning_content") and last.get("content") is None:
        last["content"] = message["content"]
    else:
        messages.append(message)


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that the next call is part of."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _thought(i: int, item: Mapping[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
        bad_request(f"input[{i}].content", "must be an array of parts with a text")
    return "\n".join(part["text"] for part in parts)


_NONE = ("", "functions")  # the latter is Codex's own for functions without one


def full_name(namespace: object, name: str) -> str:
    """Name by which a model calls a function; `namespace`: None where it is in none."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace not in _NONE else name


def expanded(tools: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The tools with their places in the request, those of namespaces one by one and by their full names."""
    for i, tool in enumerate(tools):
        place = f"tools[{i}]"
        if not isinstance(tool, dict) or tool.get("type") != "namespace":
            yield place, tool
            continue
        namespace = as_text(f"{place}.name", tool.get("name"))
        for j, each in enumerate(as_array(f"{place}.tools", tool.get("tools"))):
            named = isinstance(each, dict) and isinstance(each.get("name"), str)
            yield f"{place}.tools[{j}]", each | {"name": full_name(namespace, each["name"])} if named else each


def homes(tools: Sequence[Any]) -> dict[str, tuple[str, str]]:
    """By the full names of a request's functions in namespaces: namespace and name."""
    result = {}
    for tool in tools:
        if tool.get("type") == "namespace":
            for each in tool["tools"]:
                name = each.get("name")
                if isinstance(name, str) and full_name(tool["name"], name) != name:
                    result[full_name(tool["name"], name)] = tool["name"], name
    own = {tool.get("name") for tool in tools}
    return {full: home for full, home in result.items() if full not in own}


def called(name: str, homes: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """Fields of an item that name the function that a model called."""
    namespace, bare = homes.get(name, ("", name))
    return {"name": bare} | ({"namespace": namespace} if namespace else {})

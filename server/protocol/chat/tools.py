"""`tools`, `tool_choice` and the reasoning fields of a chat request → what the answer may consist
of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from logitless.models.chat.template import ChatTemplate
from logitless.models.chat.tool_calls import Style
from logitless.models.tokenizer import Tokenizer
from logitless.server.protocol.chat.messages import Chat
from logitless.server.protocol.fields import bad_request

NO_PARAMETERS = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions that the model may call."""

    tools: tuple[dict[str, Any], ...] = ()  # OpenAI's shape, checked, with what templates read
    functions: tuple[dict[str, Any], ...] = ()  # as given, for the grammar
    choice: str = "none"  # none, auto, required
    parallel: bool = False  # several calls in one answer
    parse: bool = True  # false: calls stay in the text

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)

    @property
    def texts(self) -> frozenset[tuple[str, str]]:
        """(tool, parameter) of the parameters that are strings."""
        return frozenset(
            (tool["function"]["name"], name)
            for tool in self.tools
            for name, schema in _properties(tool["function"]["parameters"]).items()
            if isinstance(schema, dict) and schema.get("type") == "string"
        )


def parse_tools(chat: Chat, body: Mapping[str, Any], template: ChatTemplate) -> Tools:
    """The tools that may be called: none where tool_choice says none, one where it names one."""
    given = body.get("tools") or ()
    tools = tuple(_tool(i, tool) for i, tool in enumerate(given))
    functions = tuple(tool["function"] for tool in given)
    parallel, choice = chat.parallel_tool_calls, chat.tool_choice
    if parallel is None:
        parallel = template.caps.get("supports_parallel_tool_calls", False)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, names = _allowed(choice)
        for name in names:
            if not any(tool["function"]["name"] == name for tool in tools):
                bad_request("tool_choice", f"there is no tool {name[:64]!r} in tools")
        tools = tuple(tool for tool in tools if tool["function"]["name"] in names)
        functions = tuple(function for function in functions if function["name"] in names)
    elif choice == "any":  # Mistral's and Anthropic's word
        choice = "required"
    if isinstance(choice, dict):
        name = _named(choice)
        tools = tuple(tool for tool in tools if tool["function"]["name"] == name)
        functions = tuple(function for function in functions if function["name"] == name)
        if not tools:
            bad_request("tool_choice", f"there is no tool {name[:64]!r} in tools")
        choice, parallel = "required", False
    elif choice not in ("none", "auto", "required"):
        bad_request("tool_choice", "must be none, auto, required or an object that names a function")
    if choice == "required" and not tools:
        bad_request("tool_choice", "required needs tools")
    if not tools or choice == "none":
        return Tools()
    if body.get("grammar"):
        bad_request("grammar", "cannot be combined with tools")
    if body.get("stream") and body.get("logprobs"):
        bad_request("logprobs", "cannot be streamed together with tools")
    return Tools(tools, functions, choice, parallel, chat.parse_tool_calls)


def _tool(i: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool with all that templates read."""
    name, function = f"tools[{i}]", tool["function"]
    if tool.get("type", "function") != "function":
        bad_request(f"{name}.type", f"{str(tool['type'])[:32]!r} is not there: it must be function")
    if not function["name"]:
        bad_request(f"{name}.function.name", "must not be empty")
    parameters = function.get("parameters") or NO_PARAMETERS
    if "properties" not in parameters:
        parameters = {**parameters, "properties": {}}  # templates read it
    filled = {**function, "description": function.get("description") or "", "parameters": parameters}
    return {**tool, "type": "function", "function": filled}


def _properties(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    found = parameters.get("properties")
    return found if isinstance(found, dict) else {}


def _allowed(choice: Mapping[str, Any]) -> tuple[str, set[str]]:
    """(mode, names) of {type: allowed_tools, allowed_tools: {mode, tools}}, or without the inner object."""
    inner = choice.get("allowed_tools", choice)
    mode, tools = (inner.get("mode", "auto"), inner.get("tools")) if isinstance(inner, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        bad_request("tool_choice", "allowed_tools must have a mode, auto or required, and a non-empty array of tools")
    names = set()
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            bad_request("tool_choice", "each of the allowed tools must name a function")
        names.add(name)
    return mode, names


def _named(choice: Mapping[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else choice.get("name")
    if choice.get("type", "function") != "function" or not isinstance(name, str):
        bad_request("tool_choice", "the object must be of type function and name one")
    return name


def parse_style(chat: Chat, template: ChatTemplate, tools: Tools, primer: str) -> Style:
    """The parser's style of the answer. `primer`: the part of the answer that the prompt contains."""
    kind = chat.reasoning_format
    return Style(
        calls=template.calls if tools.parse and (tools.tools or template.calls.around) else None,
        names=tools.names,
        texts=tools.texts,
        reasoning=None if kind == "none" else template.reasoning,
        tags_in_content=kind == "deepseek-legacy",
        parallel=tools.parallel,
        primer=primer,
    )


def preserved_ids(template: ChatTemplate, tools: Tools, tokenizer: Tokenizer) -> frozenset[int]:
    """Special tokens that are syntax of calls or reasoning, and must become text."""
    calls = template.calls.preserved if tools.tools or template.calls.around else ()
    texts = [*(template.reasoning or ()), *calls]
    found = [tokenizer.encode(text, add_special=False, parse_special=True) for text in texts]
    return frozenset(ids[0] for ids in found if len(ids) == 1)

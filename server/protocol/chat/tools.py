"""`tools`, `tool_choice` and the reasoning fields of a chat request → what the answer may consist of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from logitless.models.chat.template import ChatTemplate
from logitless.models.chat.tool_calls import Style
from logitless.models.tokenizer import Tokenizer
from logitless.server.protocol.fields import Fields, article, refuse

REASONING_FORMATS = ("none", "auto", "deepseek", "deepseek-legacy")
MAX_TOOLS = 256
NO_PARAMETERS = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tools:
    """What the model may call."""

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


def parse_tools(fields: Fields, template: ChatTemplate) -> Tools:
    """The tools that may be called: none where tool_choice says none, one where it names one."""
    given = fields.array("tools") or ()
    tools = tuple(_tool(i, tool) for i, tool in enumerate(given))
    functions = tuple(tool["function"] for tool in given)
    if len(tools) > MAX_TOOLS:
        refuse("tools", f"at most {MAX_TOOLS} are allowed, got {len(tools)}")
    parallel = fields.boolean("parallel_tool_calls", template.caps.get("supports_parallel_tool_calls", False))
    parse = fields.boolean("parse_tool_calls", True)
    choice = fields.body.get("tool_choice")
    if choice is None:
        choice = "auto"
    if isinstance(choice, dict):
        name = _named(choice)
        tools = tuple(tool for tool in tools if tool["function"]["name"] == name)
        functions = tuple(function for function in functions if function["name"] == name)
        if not tools:
            refuse("tool_choice", f"there is no tool {name[:64]!r} in tools")
        choice, parallel = "required", False
    elif choice not in ("none", "auto", "required"):
        refuse("tool_choice", "must be none, auto, required or an object that names a function")
    if choice == "required" and not tools:
        refuse("tool_choice", "required needs tools")
    if not tools or choice == "none":
        return Tools()
    if fields.body.get("grammar"):
        refuse("grammar", "cannot be combined with tools")
    if fields.boolean("stream") and fields.boolean("logprobs"):
        refuse("logprobs", "cannot be streamed together with tools")
    return Tools(tools, functions, choice, parallel, parse)


def _tool(i: int, tool: object) -> dict[str, Any]:
    name = f"tools[{i}]"
    if not isinstance(tool, dict):
        refuse(name, f"expected an object, got {article(tool)}")
    if tool.get("type", "function") != "function":
        refuse(f"{name}.type", "must be function")
    function = tool.get("function")
    if not isinstance(function, dict):
        refuse(f"{name}.function", f"expected an object, got {article(function)}")
    if not isinstance(function.get("name"), str) or not function["name"]:
        refuse(f"{name}.function.name", f"expected a string, got {article(function.get('name'))}")
    for key in ("description", "parameters"):
        kind = str if key == "description" else dict
        value = function.get(key)
        if value is not None and not isinstance(value, kind):
            article_of = "a string" if kind is str else "an object"
            refuse(f"{name}.function.{key}", f"expected {article_of}, got {article(value)}")
    parameters = function.get("parameters") or NO_PARAMETERS
    if "properties" not in parameters:
        parameters = {**parameters, "properties": {}}  # templates read it
    filled = {**function, "description": function.get("description") or "", "parameters": parameters}
    return {**tool, "type": "function", "function": filled}


def _properties(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    found = parameters.get("properties")
    return found if isinstance(found, dict) else {}


def _named(choice: Mapping[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else choice.get("name")
    if choice.get("type", "function") != "function" or not isinstance(name, str):
        refuse("tool_choice", "the object must be of type function and name one")
    return name


def parse_style(fields: Fields, template: ChatTemplate, tools: Tools, default_format: str, primer: str) -> Style:
    """How to read the answer. `primer` is the part of it that the prompt contains."""
    kind = reasoning_format(fields, default_format)
    return Style(
        calls=template.calls if tools.parse and (tools.tools or template.calls.around) else None,
        names=tools.names,
        texts=tools.texts,
        reasoning=None if kind == "none" else template.reasoning,
        tags_in_content=kind == "deepseek-legacy",
        parallel=tools.parallel,
        primer=primer,
    )


def reasoning_format(fields: Fields, default: str) -> str:
    """One of REASONING_FORMATS."""
    kind = fields.text("reasoning_format", default)
    if kind not in REASONING_FORMATS:
        refuse("reasoning_format", f"must be one of {', '.join(REASONING_FORMATS)}")
    return kind


def preserved_ids(template: ChatTemplate, tools: Tools, tokenizer: Tokenizer) -> frozenset[int]:
    """Special tokens that are syntax of calls or reasoning, and must become text."""
    calls = template.calls.preserved if tools.tools or template.calls.around else ()
    texts = [*(template.reasoning or ()), *calls]
    found = [tokenizer.encode(text, add_special=False, parse_special=True) for text in texts]
    return frozenset(ids[0] for ids in found if len(ids) == 1)

"""Tools of a chat request: choice, reasoning and format → parts and grammar of an answer."""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from logitless.engine.errors import InvalidRequest
from logitless.engine.sampling.grammar_mask import GrammarConstraint
from logitless.frontend.chat.messages import Chat
from logitless.frontend.dialects.hosted_tools import OWN, is_hosted
from logitless.frontend.fields import as_text, bad_request, warn_once
from logitless.frontend.grammar import Grammars
from logitless.models.chat.template import ChatTemplate
from logitless.models.chat.tool_calls.free_text import INPUT, SYNTAXES, TEXT, grammar_of, json_string, parameters
from logitless.models.chat.tool_calls.grammar import CallGrammar, answer_grammar, call_grammar
from logitless.models.chat.tool_calls.parser import Style
from logitless.models.grammar import GrammarError, json_rule, regex_rule
from logitless.models.grammar.ast import Rules
from logitless.models.grammar.errors import NotEnforceable
from logitless.models.grammar.triggers import Pattern
from logitless.models.tokenizer import Tokenizer

log = logging.getLogger("logitless.http")
NO_PARAMETERS = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class TextSource:
    """Format of a custom tool's text; the syntax is "" where any text will do. `field`: where the grammar stands."""

    syntax: str = ""
    definition: str = ""
    field: str = ""


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions that the model may call. Custom tools are functions with one text as their argument."""

    tools: tuple[dict[str, Any], ...] = ()  # OpenAI's shape, checked, with what templates read
    functions: tuple[dict[str, Any], ...] = ()  # as given, for the grammar
    custom: Mapping[str, TextSource | None] = field(default_factory=dict)  # by the names of custom tools, their formats
    choice: str = "none"  # none, auto, required
    parallel: bool = False  # several calls in one answer
    parse: bool = True  # false: calls stay in the text
    skipped: tuple[str, ...] = ()  # types of the request's tools that a provider's service would run

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

    @property
    def sole(self) -> dict[str, str]:
        """By tool, the parameter that a call's arguments stand for if they are no object: the only one, or the only
        one that is required; else `input`."""
        return {tool["function"]["name"]: _sole(tool["function"]["parameters"]) for tool in self.tools}


def parse_tools(chat: Chat, entries: Sequence[Mapping[str, Any]], template: ChatTemplate) -> Tools:
    """The tools that may be called: none where tool_choice says none, one where it names one."""
    skipped = tuple(tool["type"] for tool in entries if is_hosted(tool))
    if skipped:
        kinds = ", ".join(sorted({repr(kind[:32]) for kind in skipped}))
        log.warning("field 'tools': nobody here runs tools of type %s; they are skipped", kinds)
        _check_runs(chat.tool_choice, entries)
    values = [_function(i, tool) for i, tool in enumerate(entries) if not is_hosted(tool)]
    tools = tuple(_tool(tool) for tool, _ in values)
    functions = tuple(tool["function"] for tool, _ in values)
    custom = {tool["function"]["name"]: source for tool, source in values if source is not None}
    parallel, choice = chat.parallel_tool_calls, chat.tool_choice
    if parallel is None:
        parallel = template.caps.get("supports_parallel_tool_calls", False)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, chosen = _allowed(choice)
        for kind, name in chosen:
            _check_there(kind, name, tools, custom)
        names = {name for _, name in chosen}
        tools = tuple(tool for tool in tools if tool["function"]["name"] in names)
        functions = tuple(function for function in functions if function["name"] in names)
    elif choice == "any":  # Mistral's and Anthropic's word
        choice = "required"
    if isinstance(choice, dict):
        kind, name = _named(choice)
        _check_there(kind, name, tools, custom)
        tools = tuple(tool for tool in tools if tool["function"]["name"] == name)
        functions = tuple(function for function in functions if function["name"] == name)
        choice, parallel = "required", False
    elif choice not in ("none", "auto", "required"):
        bad_request("tool_choice", "must be none, auto, required or an object that names a tool")
    if choice == "required" and not tools:
        bad_request("tool_choice", "required needs tools")
    if not tools or choice == "none":
        return Tools(skipped=skipped)
    return Tools(tools, functions, custom, choice, parallel, chat.parse_tool_calls, skipped)


def _check_runs(choice: object, entries: Sequence[Mapping[str, Any]]) -> None:
    """400 if tool_choice asks for a call of a tool that nobody here runs."""
    own = set[str]().union(*(_words(tool) for tool in entries if not is_hosted(tool)))
    names = set[str]().union(*(_words(tool) for tool in entries if is_hosted(tool))) - own
    chosen = set[str]() if own or choice not in ("required", "any") else names
    if isinstance(choice, dict):
        inner = choice.get("allowed_tools", choice)
        tools = inner.get("tools") if isinstance(inner, dict) and choice.get("type") == "allowed_tools" else [choice]
        choices = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
        if choices and all(names.intersection(_words(tool)) for tool in choices):
            chosen = names.intersection(*map(_words, choices[:1]))
    if chosen:
        name = repr(min(chosen)[:64])
        bad_request("tool_choice", f"nobody here runs {name}: leave it to auto, or name a tool of type function")


def _words(tool: Mapping[str, Any]) -> set[str]:
    """The type and the names in an entry of tools or tool_choice."""
    inner = tool.get(str(tool.get("type")))
    values = (tool.get("type"), tool.get("name"), inner.get("name") if isinstance(inner, dict) else None)
    return {value for value in values if isinstance(value, str)} - {*OWN}


def _function(i: int, tool: Mapping[str, Any]) -> tuple[dict[str, Any], TextSource | None]:
    """The tool as a function, and the format of a custom tool's text."""
    name = f"tools[{i}]"
    kind = tool.get("type") or ("custom" if tool.get("function") is None and tool.get("custom") else "function")
    if kind not in OWN:
        bad_request(f"{name}.type", f"{str(kind)[:32]!r} is not there: it must be function or custom")
    inner = tool.get(kind)
    if inner is None:
        bad_request(f"{name}.{kind}", "is required")
    if not inner["name"]:
        bad_request(f"{name}.{kind}.name", "must not be empty")
    if kind == "function":
        return {**tool}, None
    source = _source(f"{name}.custom.format", inner.get("format") or {})
    text = f"A text that matches this {source.syntax} grammar:\n{source.definition}" if source.syntax else "A text."
    function = {"name": inner["name"], "description": inner.get("description") or "", "parameters": parameters(text)}
    return {"type": "function", "function": function}, source


def _source(name: str, form: Mapping[str, Any]) -> TextSource:
    kind = form.get("type", "text")
    if kind == "text":
        return TextSource()
    if kind != "grammar":
        bad_request(f"{name}.type", f"must be text or grammar, not {str(kind)[:32]!r}")
    name, inner = (f"{name}.grammar", form["grammar"]) if form.get("grammar") is not None else (name, form)
    syntax, definition = (as_text(f"{name}.{key}", inner.get(key)) for key in ("syntax", "definition"))
    if syntax not in SYNTAXES:
        bad_request(f"{name}.syntax", f"must be {' or '.join(SYNTAXES)}, not {syntax[:32]!r}")
    return TextSource(syntax, definition, f"{name}.definition")


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool with all that templates read."""
    function = tool["function"]
    parameters = function.get("parameters") or NO_PARAMETERS
    if "properties" not in parameters:
        parameters = {**parameters, "properties": {}}  # templates read it
    filled = {**function, "description": function.get("description") or "", "parameters": parameters}
    return {**tool, "type": "function", "function": filled}


def _properties(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    result = parameters.get("properties")
    return result if isinstance(result, dict) else {}


def _allowed(choice: Mapping[str, Any]) -> tuple[str, set[tuple[str, str]]]:
    """(mode, (type, name) of each) of {type: allowed_tools, allowed_tools: {mode, tools}}, or without the
    inner object."""
    inner = choice.get("allowed_tools", choice)
    mode, tools = (inner.get("mode", "auto"), inner.get("tools")) if isinstance(inner, dict) else (None, None)
    tools = [tool for tool in tools if not is_hosted(tool)] if isinstance(tools, list) else None
    if mode not in ("auto", "required") or not tools:
        bad_request("tool_choice", "allowed_tools must have a mode, auto or required, and a non-empty array of tools")
    return mode, {_named(tool, "each of the allowed tools must name a function or a custom tool") for tool in tools}


def _named(
    choice: object, problem: str = "the object must be of type function or custom and name one"
) -> tuple[str, str]:
    """(type, name) of the tool that an object names, within it or in an object of its type."""
    if not isinstance(choice, dict):
        bad_request("tool_choice", problem)
    kind = choice.get("type", "function")
    inner = choice.get(kind) if kind in OWN else None
    name = (inner if isinstance(inner, dict) else choice).get("name")
    if kind not in OWN or not isinstance(name, str):
        bad_request("tool_choice", problem)
    return kind, name


def _check_there(kind: str, name: str, tools: Sequence[Mapping[str, Any]], custom: Container[str]) -> None:
    """400 if no tool has this name, or one of the other type."""
    if not any(tool["function"]["name"] == name for tool in tools) or (name in custom) != (kind == "custom"):
        bad_request("tool_choice", f"there is no tool {name[:64]!r} of type {kind} in tools")


def _sole(parameters: Mapping[str, Any]) -> str:
    names, required = list(_properties(parameters)), parameters.get("required")
    if len(names) != 1 and isinstance(required, list):
        names = [name for name in required if name in names]
    return names[0] if len(names) == 1 else INPUT


def parse_style(chat: Chat, template: ChatTemplate, tools: Tools, primer: str, *, raw: bool) -> Style:
    """The parser's style of the answer. `primer`: the part of the answer that the prompt contains; `raw`: all of it
    is its text."""
    kind, parses = "none" if raw else chat.reasoning_format, tools.parse and not raw
    return Style(
        calls=template.calls if parses and (tools.tools or template.calls.frames) else None,
        names=tools.names,
        custom=frozenset(tools.custom),
        texts=tools.texts,
        sole=tools.sole,
        reasoning=None if kind == "none" else template.reasoning,
        tags_in_content=kind == "deepseek-legacy",
        parallel=tools.parallel,
        required=tools.choice == "required",
        primer=primer,
    )


def preserved_ids(template: ChatTemplate, tools: Tools, tokenizer: Tokenizer) -> frozenset[int]:
    """Special tokens that are syntax of calls or reasoning, and must become text."""
    calls = template.calls.preserved if tools.tools or template.calls.frames else ()
    texts = [*(template.reasoning or ()), *calls]
    result = [tokenizer.encode(text, add_special=False, parse_special=True) for text in texts]
    return frozenset(ids[0] for ids in result if len(ids) == 1)


def chat_constraint(
    value: GrammarConstraint | None, tools: Tools, template: ChatTemplate, begun: str, thinks: bool, grammars: Grammars
) -> GrammarConstraint | None:
    """The constraint of an answer. `value`: that of the other fields; `begun`: the part of the answer that the prompt
    has; `thinks`: whether the model may reason first."""
    tags = template.reasoning
    thinking = tags is not None and tags[0] in begun and tags[1] not in begun
    reasoning = tags if thinking or (thinks and tags is not None and tags[1] not in begun) else None
    items = _lark_of(value)
    if not tools.tools:
        if not items or not (reasoning or template.calls.around):
            return value
        built = answer_grammar(template.calls, items, reasoning, thinking)
        return _compiled("response_format", built, grammars)
    if value is not None and not items:
        bad_request("tools", "only JSON, a regular expression or a choice can be combined with tools")
    functions = [{**f, "parameters": f.get("parameters") or NO_PARAMETERS} for f in tools.functions]
    for function in functions:
        source = tools.custom.get(function["name"])
        if source is not None and source.syntax and (text := _free_text(source, grammars)) is not None:
            function[TEXT] = text
    _check_schemas([f if f.get("strict") is True else {} for f in functions], grammars)  # whatever a format enforces
    try:
        built = call_grammar(
            template.calls,
            functions,
            required=tools.choice == "required",
            parallel=tools.parallel,
            reasoning=reasoning,
            thinking=thinking,
            answer=items,
        )
    except GrammarError as error:
        bad_request("tools", str(error))
    try:
        return _compiled("tools", built, grammars)
    except InvalidRequest:
        _check_schemas(functions, grammars)
        raise


def _free_text(source: TextSource, grammars: Grammars) -> Rules | None:
    """The grammar of a custom tool's text; None, with a line in the log, where it cannot be enforced.
    400 where it is wrong."""
    try:
        rules = grammar_of(source.syntax, source.definition)
        grammars.check("\n".join(json_string(rules, "start")))
    except NotEnforceable as error:
        warn_once(log, f"{source.field}: any text is taken, for the grammar is not enforced: {error}")
        return None
    except GrammarError as error:
        bad_request(source.field, str(error))
    return rules


def _lark_of(value: GrammarConstraint | None) -> str:
    """The Lark of a constraint that asks for JSON or text of a regular expression."""
    if value is not None and not value.lazy and value.grammar.kind == "regex":
        return regex_rule(value.grammar.source)
    if value is None or value.lazy or value.grammar.kind not in ("json_schema", "strict_json_schema"):
        return ""
    return json_rule(json.loads(value.grammar.source), strict=value.grammar.kind == "strict_json_schema")


def _compiled(field: str, built: CallGrammar, grammars: Grammars) -> GrammarConstraint:
    grammar = grammars.compile(field, "lark", built.lark)
    words = tuple(word.encode() for word in built.words)
    return GrammarConstraint(
        grammar, lazy=built.lazy, words=words, patterns=tuple(Pattern(text) for text in built.patterns)
    )


def _check_schemas(functions: Sequence[Any], grammars: Grammars) -> None:
    """400 about the tool whose parameters are no schema, or none that can be enforced where it is strict."""
    for i, function in enumerate(functions):
        if "parameters" in function:
            kind = "strict_json_schema" if function.get("strict") is True else "json_schema"
            grammars.compile(f"tools[{i}].function.parameters", kind, json.dumps(function["parameters"]))

"""Structured output of chats: grammars of tool calls and of the response format."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from logitless.engine.errors import InvalidRequest
from logitless.engine.sampling.grammar_mask import GrammarConstraint
from logitless.frontend.chat.tools import NO_PARAMETERS, TextSource, Tools
from logitless.frontend.fields import bad_request, warn_once
from logitless.frontend.grammar import Grammars
from logitless.models.chat.template import ChatTemplate
from logitless.models.chat.tool_calls.free_text import TEXT, grammar_of, json_string
from logitless.models.chat.tool_calls.grammar import CallGrammar, answer_grammar, call_grammar
from logitless.models.grammar import GrammarError, json_rule, regex_rule
from logitless.models.grammar.ast import Rules
from logitless.models.grammar.errors import NotEnforceable
from logitless.models.grammar.triggers import Pattern

log = logging.getLogger("logitless.http")


def chat_constraint(
    value: GrammarConstraint | None, tools: Tools, template: ChatTemplate, begun: str, thinks: bool, grammars: Grammars
) -> GrammarConstraint | None:
    """The constraint of an answer. `value`: that of the other fields; `begun`: the part of the answer that the prompt
    has; `thinks`: whether the model may reason first."""
    tags = template.reasoning
    thinking = tags is not None and tags[0] in begun and tags[1] not in begun
    reasoning = tags if thinking or (thinks and tags is not None and tags[1] not in begun) else None
    if not tools.tools:
        items = _source(value)
        if not items or not (reasoning or template.calls.around):
            return value
        built = answer_grammar(template.calls, items, reasoning, thinking)
        return _compiled("response_format", built, grammars)
    items = _source(value)
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


def _source(value: GrammarConstraint | None) -> str:
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

"""Custom tools: functions whose one argument, `input`, is free text or text of a grammar."""

from __future__ import annotations

import re
from typing import Any

from logitless.models.chat.tool_calls.json_text import StringText, parsed
from logitless.models.grammar.ast import Ref, Rules, Seq, in_json, literal
from logitless.models.grammar.lark import lark_rules
from logitless.models.grammar.lark_source import parse_lark
from logitless.models.grammar.regex import regex_node

INPUT = "input"
TEXT = "free text"
"""Key of a function for the grammar engine: the grammar (`Rules`) of its `input`."""
SYNTAXES = ("lark", "regex")
_HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*(?=")')


def parameters(description: str = "") -> dict[str, Any]:
    """JSON schema of a custom tool's arguments; `description`: of the text."""
    described = {"type": "string"} | ({"description": description} if description else {})
    return {"type": "object", "properties": {INPUT: described}, "required": [INPUT], "additionalProperties": False}


def grammar_of(syntax: str, definition: str) -> Rules:
    """The grammar of a tool's text, in one of SYNTAXES. GrammarError, NotEnforceable: as its syntax has them."""
    if syntax == "lark":
        return parse_lark(definition)
    return Rules({"start": regex_node(definition)}, "start")


def json_string(grammar: Rules, name: str) -> list[str]:
    """Lark rules of a JSON string that holds a text of the grammar; the first is `name`."""
    inner = in_json(grammar)
    root = '"'  # no grammar has a rule of this name
    whole = Seq((literal(root), Ref(inner.root), literal(root)))
    return lark_rules(Rules({**inner.rules, root: whole}, root), name)


class InputText:
    """Reader of the arguments of a call to a custom tool: JSON comes in, the text of its `input` comes out."""

    def __init__(self) -> None:
        self._read = ""  # before the text
        self._text: StringText | None = None

    def feed(self, text: str) -> str:
        """More of the text."""
        if self._text is None:
            self._read += text
            if (head := _HEAD.match(self._read)) is None:
                return ""
            text, self._text = self._read[head.end() :], StringText()
        return self._text.feed(text)

    def finish(self) -> str:
        """The text of arguments that are no object with `input`: all of them, or the JSON string that they are."""
        if self._text is not None:
            return ""
        self._text = StringText()
        value = parsed(self._read)
        return value if isinstance(value, str) else self._read

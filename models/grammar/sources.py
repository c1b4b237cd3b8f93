"""Grammar sources (GBNF, JSON schema, regex, Lark): translated to llguidance's Lark, errors as one line."""

from __future__ import annotations

import json
import re
from typing import Any

from logitless.models.grammar.errors import GrammarError, reason
from logitless.models.grammar.json_schema.prepare import fault, prepared
from logitless.models.tokenizer import Tokenizer

KINDS = ("gbnf", "json_schema", "strict_json_schema", "regex", "lark")

# Between the tokens of JSON: the blanks of llama.cpp's schema grammars, so that a model cannot go on
# with blanks for ever.
_SPACE = r"( |\n{1,2}[ \t]{0,20})?"


def to_lark(kind: str, source: str, tokenizer: Tokenizer) -> str:
    """The Lark source of a grammar, with the rule `start`."""
    if kind == "regex":
        return f"start: TEXT\nTEXT: {regex_rule(source)}\n"
    if kind in ("json_schema", "strict_json_schema"):
        return f"start: {json_rule(_schema(source), strict=kind == 'strict_json_schema')}\n"
    if kind == "gbnf":
        from logitless.models.grammar.gbnf import parse
        from logitless.models.grammar.lark import to_lark

        return to_lark(parse(source, tokenizer))
    return source


def regex_rule(source: str) -> str:
    """Text of a regular expression as a part of a Lark rule."""
    import llguidance

    return f"/{llguidance.regex_to_lark(source)}/"


def quoted(text: str) -> str:
    """A Lark literal of a text."""
    return json.dumps(text)


def in_regex(text: str) -> str:
    """A regular expression, in any dialect, that matches a text."""
    return "".join(
        c if c.isalnum() or c in "_ " else re.escape(c) if ord(c) < 128 and c != "/" else rf"\x{{{ord(c):x}}}"
        for c in text
    )


def json_rule(schema: Any, *, strict: bool = False) -> str:
    """JSON of a schema as a part of a Lark rule.

    Keywords that cannot be enforced are errors if `strict`; else they are dropped, and `oneOf` is
    taken for `anyOf`."""
    schema = prepared(schema, strict=strict)
    if isinstance(schema, dict):
        options = {
            "whitespace_pattern": _SPACE,
            "lenient": not strict,
            "coerce_one_of": not strict,
            "json_allow_general_unicode_escapes": True,
        }
        schema = {**schema, "x-guidance": options}
    return f"%json {json.dumps(schema)}"


def _schema(source: str) -> Any:
    try:
        schema = json.loads(source)
    except RecursionError:
        raise GrammarError("the schema is nested too deeply") from None
    except ValueError as error:
        raise GrammarError(f"the schema is not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise GrammarError("a JSON schema must be an object or a boolean")
    return schema


def explained(kind: str, source: str, error: str) -> GrammarError:
    """The error of llguidance, with the part of a schema at fault."""
    if kind not in ("json_schema", "strict_json_schema"):
        return GrammarError(reason(error))
    path, problem = fault(json.loads(source), strict=kind == "strict_json_schema") or ("", reason(error))
    return GrammarError(f"in the schema at {path or '/'}: {problem}")

"""The fields that constrain the output: `grammar`, `json_schema`, `response_format` and lazy
grammars' triggers.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from threading import Lock
from typing import Any

from logitless.engine.sampling.grammar_mask import GrammarConstraint
from logitless.models.grammar import Grammar, GrammarError
from logitless.models.grammar.triggers import Pattern
from logitless.models.tokenizer import Tokenizer
from logitless.server.protocol.fields import article, as_integer, as_text, bad_request
from logitless.server.protocol.generation import FORMS, Generation

_KINDS = ("token", "word", "pattern", "pattern_full")  # llama.cpp's numbers 0 to 3
_KEPT = 32  # compiled grammars


class Grammars:
    """Compiles grammars for a vocabulary and keeps the last ones. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._kept: OrderedDict[tuple[str, str], Grammar] = OrderedDict()
        self._lock = Lock()

    def compile(self, field: str, kind: str, source: str) -> Grammar:
        """A grammar (logitless.models.grammar.KINDS); 400 about the field where it is wrong."""
        key = kind, source
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        try:
            grammar = Grammar.compile(kind, source, self.tokenizer)
        except GrammarError as error:
            bad_request(field, str(error))
        with self._lock:
            self._kept[key] = grammar
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return grammar


def parse_constraint(asked: Generation, grammars: Grammars) -> GrammarConstraint | None:
    """The request's constraint, if any; there can only be one."""
    form = response_kind(asked.response_format) != "text"
    if bool(asked.grammar) + (asked.json_schema is not None) + form > 1:
        bad_request("grammar", "only one of grammar, json_schema and response_format can be given")
    found, triggers = _grammar(asked, grammars), _triggers(asked, grammars.tokenizer)
    if not asked.grammar_lazy:
        return found
    if not triggers:
        bad_request("grammar_triggers", "a lazy grammar needs at least one")
    return None if found is None else replace(found, lazy=True, **triggers)


def response_kind(form: object) -> str:
    """The kind of text that `response_format` asks for."""
    if not isinstance(form, dict | None):
        bad_request("response_format", f"expected an object, got {article(form)}")
    kind = form.get("type") if form else None
    if kind is None:
        return "text"
    if kind not in FORMS:
        bad_request("response_format", "type must be text, json_object, json_schema, grammar or regex")
    return str(kind)


def preserved_ids(asked: Generation, tokenizer: Tokenizer) -> frozenset[int]:
    """The special tokens of `preserved_tokens`: texts that are one token each, others are left out."""
    ids = set()
    for text in asked.preserved_tokens:
        found = tokenizer.encode(text, add_special=False, parse_special=True)
        if len(found) == 1:
            ids.add(found[0])
    return frozenset(ids)


def _grammar(asked: Generation, grammars: Grammars) -> GrammarConstraint | None:
    if asked.grammar:
        return GrammarConstraint(grammars.compile("grammar", "gbnf", asked.grammar), asked.grammar)
    if asked.json_schema is not None:
        return _schema("json_schema", asked.json_schema, False, grammars)
    form, kind = asked.response_format, response_kind(asked.response_format)
    if kind == "text":
        return None
    if kind == "json_object":
        schema = form.get("schema")
        return _schema("response_format.schema", {} if schema is None else schema, False, grammars)
    if kind == "json_schema":
        inner = form.get("json_schema")
        if isinstance(inner, dict) and "schema" in inner:
            return _schema("response_format.json_schema.schema", inner["schema"], inner.get("strict") is True, grammars)
        if "schema" in form:  # as some clients send it
            return _schema("response_format.schema", form["schema"], False, grammars)
        bad_request("response_format.json_schema.schema", "is required")
    name = "pattern" if kind == "regex" and form.get("pattern") is not None else kind
    source = as_text(f"response_format.{name}", form.get(name))
    compiled = grammars.compile(f"response_format.{name}", "gbnf" if kind == "grammar" else "regex", source)
    return GrammarConstraint(compiled, source if kind == "grammar" else "")


def _schema(name: str, schema: object, strict: bool, grammars: Grammars) -> GrammarConstraint:
    if not isinstance(schema, dict | bool):
        bad_request(name, f"expected an object, got {article(schema)}")
    source = json.dumps(schema if schema != {} else {"type": "object"}, ensure_ascii=False)  # as llama.cpp
    return GrammarConstraint(grammars.compile(name, "strict_json_schema" if strict else "json_schema", source))


def _triggers(asked: Generation, tokenizer: Tokenizer) -> dict[str, Any]:
    """The fields of a Constraint that say when a lazy grammar begins."""
    given = asked.grammar_triggers
    tokens: set[int] = set()
    words: list[bytes] = []
    patterns: list[Pattern] = []
    preserved = preserved_ids(asked, tokenizer)
    for i, trigger in enumerate(given):
        name = f"grammar_triggers[{i}]"
        kind = _kind(name, trigger.get("type"))
        if kind == "token":
            id = as_integer(f"{name}.token", trigger.get("token"))
            if not 0 <= id < tokenizer.n_vocab:
                bad_request(f"{name}.token", f"{str(id)[:20]} is outside the vocabulary of {tokenizer.n_vocab}")
            tokens.add(id)
            continue
        value = as_text(f"{name}.value", trigger.get("value"))
        if not value:
            bad_request(f"{name}.value", "must not be empty")
        if kind == "word":
            ids = tokenizer.encode(value, add_special=False, parse_special=True)
            if len(ids) == 1 and ids[0] in preserved:
                tokens.add(ids[0])
            else:
                words.append(value.encode("utf-8"))
            continue
        try:
            patterns.append(Pattern(f"^(?:{value})$" if kind == "pattern_full" else value))
        except GrammarError as error:
            bad_request(f"{name}.value", str(error))
    if not given:
        return {}
    return {
        "tokens": frozenset(tokens),
        "words": tuple(words),
        "patterns": tuple(patterns),
        "triggers": tuple(dict(trigger) for trigger in given),
    }


def _kind(name: str, value: object) -> str:
    if isinstance(value, str) and value in _KINDS:
        return value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(_KINDS):
        bad_request(f"{name}.type", f"must be one of {', '.join(_KINDS)}, or 0 to {len(_KINDS) - 1}")
    return _KINDS[value]

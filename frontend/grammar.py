"""Structured output fields: `grammar`, `json_schema`, `response_format`, triggers of lazy grammars."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from typing import Any

from logitless.engine.params import FORMS, Generation
from logitless.engine.sampling.grammar_mask import GrammarConstraint
from logitless.frontend.fields import article, as_integer, as_text, bad_request
from logitless.frontend.timing import measured
from logitless.models.grammar import Grammar, GrammarError, in_regex
from logitless.models.grammar.errors import NotEnforceable
from logitless.models.grammar.triggers import Pattern
from logitless.models.tokenizer import Tokenizer

_KINDS = ("token", "word", "pattern", "pattern_full")  # llama.cpp's numbers 0 to 3
_MAX_GRAMMARS = 32  # compiled grammars
_MAX_SOURCE = 1 << 22  # characters of a grammar
_LONGEST_TOKEN = 1 << 10  # characters; a longer text is no single token


class Grammars:
    """Compiles grammars for a vocabulary and keeps the last ones. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._cache: OrderedDict[tuple[str, str], Grammar] = OrderedDict()
        self._lock = Lock()

    def compile(self, field: str, kind: str, source: str) -> Grammar:
        """A grammar (logitless.models.grammar.KINDS); 400 about the field where it is wrong."""
        if len(source) > _MAX_SOURCE:
            bad_request(field, f"has more than {_MAX_SOURCE} characters")
        try:
            return self._compiled(kind, source)
        except GrammarError as error:
            bad_request(field, str(error))

    def check(self, lark: str) -> None:
        """NotEnforceable, if the engine cannot compile a grammar that it was given in its own language."""
        try:
            self._compiled("lark", lark)
        except GrammarError as error:
            raise NotEnforceable(str(error)) from None

    def _compiled(self, kind: str, source: str) -> Grammar:
        key = kind, source
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        with measured("grammar"):
            grammar = Grammar.compile(kind, source, self.tokenizer)
        with self._lock:
            self._cache[key] = grammar
            while len(self._cache) > _MAX_GRAMMARS:
                self._cache.popitem(last=False)
        return grammar


def parse_constraint(params: Generation, grammars: Grammars) -> GrammarConstraint | None:
    """The request's constraint, if any; there can only be one."""
    values = [name for name in _SOURCES if _is_given(params, name)]
    if len(values) > 1:
        bad_request(values[1], f"cannot be combined with {values[0]}")
    result = _SOURCES[values[0]](params, grammars) if values else None
    triggers = _triggers(params, grammars.tokenizer)
    if not params.grammar_lazy:
        return result
    if not triggers:
        bad_request("grammar_triggers", "a lazy grammar needs at least one")
    return None if result is None else replace(result, lazy=True, **triggers)


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


def preserved_ids(params: Generation, tokenizer: Tokenizer) -> frozenset[int]:
    """The special tokens of `preserved_tokens`: texts that are one token each, others are left out."""
    ids = set()
    for text in params.preserved_tokens:
        if len(text) > _LONGEST_TOKEN:
            continue
        result = tokenizer.encode(text, add_special=False, parse_special=True)
        if len(result) == 1:
            ids.add(result[0])
    return frozenset(ids)


def _is_given(params: Generation, name: str) -> bool:
    value = getattr(params, name)
    if name == "response_format":
        return response_kind(value) != "text"
    return bool(value) if name == "structured_outputs" else value is not None and value != ""


def _response_format(params: Generation, grammars: Grammars) -> GrammarConstraint:
    form, kind = params.response_format, response_kind(params.response_format)
    if kind == "json_object":
        schema = form.get("schema", form.get("value"))  # the latter is TGI's
        return _schema("response_format.schema", {} if schema is None else schema, False, grammars)
    if kind == "json_schema":
        inner = form.get("json_schema")
        if isinstance(inner, dict) and "schema" in inner:
            return _schema("response_format.json_schema.schema", inner["schema"], inner.get("strict") is True, grammars)
        if "schema" in form:  # as some clients send it
            return _schema("response_format.schema", form["schema"], False, grammars)
        bad_request("response_format.json_schema.schema", "is required")
    name = next((key for key in ("pattern", "value") if kind == "regex" and form.get(key) is not None), kind)
    return (_text_grammar if kind == "grammar" else _regex)(f"response_format.{name}", form.get(name), grammars)


def _text_grammar(name: str, source: object, grammars: Grammars) -> GrammarConstraint:
    """A grammar in GBNF, or in Lark where it has none of GBNF's `::=`."""
    text = as_text(name, source)
    return GrammarConstraint(grammars.compile(name, "gbnf" if "::=" in text else "lark", text), text)


def _regex(name: str, source: object, grammars: Grammars) -> GrammarConstraint:
    return GrammarConstraint(grammars.compile(name, "regex", as_text(name, source)))


def _choice(name: str, texts: object, grammars: Grammars) -> GrammarConstraint:
    """One of these texts."""
    if not isinstance(texts, list | tuple) or not texts:
        bad_request(name, "must be a non-empty array of texts")
    pattern = "|".join(in_regex(as_text(f"{name}[{i}]", text)) for i, text in enumerate(texts))
    return GrammarConstraint(grammars.compile(name, "regex", pattern))


def _json(name: str, value: object, grammars: Grammars) -> GrammarConstraint:
    """A schema, or its text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            bad_request(name, "expected a JSON schema or its text, which must be JSON")
    return _schema(name, value, False, grammars)


_OUTPUTS: dict[str, Callable[[str, Any, Grammars], GrammarConstraint]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _text_grammar,
    "json_object": lambda name, _, grammars: _schema(name, {}, False, grammars),
}
_OUTPUT_OPTIONS = ("disable_additional_properties",)  # objects with properties are closed here


def _structured_outputs(params: Generation, grammars: Grammars) -> GrammarConstraint:
    """vLLM's object: one of _OUTPUTS."""
    fields = {key: value for key, value in (params.structured_outputs or {}).items() if value not in (None, False)}
    for key in fields:
        if key not in (*_OUTPUTS, *_OUTPUT_OPTIONS):
            bad_request(f"structured_outputs.{key}", f"is not one of {', '.join(_OUTPUTS)}")
    kinds = [key for key in fields if key in _OUTPUTS]
    if len(kinds) != 1:
        bad_request("structured_outputs", f"must have one of {', '.join(_OUTPUTS)}")
    return _OUTPUTS[kinds[0]](f"structured_outputs.{kinds[0]}", fields[kinds[0]], grammars)


_SOURCES: dict[str, Callable[[Generation, Grammars], GrammarConstraint]] = {  # fields, of which one can be given
    "grammar": lambda params, grammars: _gbnf(params.grammar or "", grammars),
    "json_schema": lambda params, grammars: _json("json_schema", params.json_schema, grammars),
    "response_format": _response_format,
    "guided_json": lambda params, grammars: _json("guided_json", params.guided_json, grammars),
    "guided_regex": lambda params, grammars: _regex("guided_regex", params.guided_regex, grammars),
    "guided_choice": lambda params, grammars: _choice("guided_choice", params.guided_choice, grammars),
    "guided_grammar": lambda params, grammars: _text_grammar("guided_grammar", params.guided_grammar, grammars),
    "structured_outputs": _structured_outputs,
}


def _gbnf(source: str, grammars: Grammars) -> GrammarConstraint:
    return GrammarConstraint(grammars.compile("grammar", "gbnf", source), source)


def _schema(name: str, schema: object, strict: bool, grammars: Grammars) -> GrammarConstraint:
    if not isinstance(schema, dict | bool):
        bad_request(name, f"expected an object, got {article(schema)}")
    source = json.dumps(schema if schema != {} else {"type": "object"}, ensure_ascii=False)  # as llama.cpp
    return GrammarConstraint(grammars.compile(name, "strict_json_schema" if strict else "json_schema", source))


def _triggers(params: Generation, tokenizer: Tokenizer) -> dict[str, Any]:
    """The fields of a Constraint that say when a lazy grammar begins."""
    source = params.grammar_triggers
    tokens: set[int] = set()
    words: list[bytes] = []
    patterns: list[Pattern] = []
    preserved = preserved_ids(params, tokenizer)
    for i, trigger in enumerate(source):
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
            ids = tokenizer.encode(value[: _LONGEST_TOKEN + 1], add_special=False, parse_special=True)
            if len(ids) == 1 and ids[0] in preserved:
                tokens.add(ids[0])
            else:
                words.append(value.encode("utf-8"))
            continue
        try:
            patterns.append(Pattern(f"^(?:{value})$" if kind == "pattern_full" else value))
        except GrammarError as error:
            bad_request(f"{name}.value", str(error))
    if not source:
        return {}
    return {
        "tokens": frozenset(tokens),
        "words": tuple(words),
        "patterns": tuple(patterns),
        "triggers": tuple(dict(trigger) for trigger in source),
    }


def _kind(name: str, value: object) -> str:
    if isinstance(value, str) and value in _KINDS:
        return value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(_KINDS):
        bad_request(f"{name}.type", f"must be one of {', '.join(_KINDS)}, or 0 to {len(_KINDS) - 1}")
    return _KINDS[value]

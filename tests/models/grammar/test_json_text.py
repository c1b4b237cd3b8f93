"""JSON text before the grammar engine: escapes are characters, numbers and nesting end, masks agree with texts."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from logitless.models.grammar import Grammar, Matcher, json_rule
from logitless.models.grammar.json_text import MAX_DEPTH, MAX_EMPTY, MAX_PARTS, limits_of
from tests.helpers.grammars import TOKENS, accepts, compile_grammar, tokenizer_of

# pieces as large vocabularies have them: parts of escapes, digits, brackets
PIECES = (
    *("\\", "\\u", "\\u00", "\\/", "</", "<\\/", "/", "u00", "00", "f6", "fd", "\\\\", '\\"', "a\\", '":"'),
    *("000", "0000000000000000", "1.5", "e100", "E+", "[[", "]]", "[{", '","', '",', ", ", "\n\n", "  "),
)
TEXT = {"type": "string"}
KINDS = ("json_schema", "strict_json_schema")


def grammar_of(schema: Any, kind: str = "json_schema") -> Grammar:
    source = schema if isinstance(schema, str) else json.dumps(schema)
    return Grammar.compile(kind, source, tokenizer_of(*PIECES))


def allowed(matcher: Matcher) -> list[int]:
    tokenizer = matcher.tokenizer
    flags = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[: tokenizer.n_vocab]
    return [int(id) for id in np.flatnonzero(flags) if int(id) not in tokenizer.eog_ids]


def spelled(text: str, rng: random.Random) -> str:
    """JSON of a text, each character as it is or by one of its escapes."""
    result = ""
    for c in text:
        short = {'"': '\\"', "\\": "\\\\", "/": "\\/", "\n": "\\n", "\t": "\\t"}.get(c)
        units = c.encode("utf-16-be")
        long = "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
        forms = [form for form in (short, long, long.upper().replace("\\U", "\\u")) if form]
        result += c if c not in '"\\\n\t\x01' and rng.random() < 0.4 else rng.choice(forms)
    return f'"{result}"'


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "schema",
    [
        TEXT,
        {**TEXT, "maxLength": 2},
        {**TEXT, "minLength": 2, "maxLength": 3},
        {**TEXT, "pattern": "^[a-zö]{2,3}$"},
        {**TEXT, "pattern": '^[^"]{0,3}$'},
        {**TEXT, "pattern": r"^[^\\/]*$"},
        {**TEXT, "pattern": "^K[äö/]l?$"},
        {**TEXT, "pattern": "^[\U0001f600-\U0001f64f]+$"},
        {**TEXT, "pattern": "[/]", "maxLength": 3},
        {"type": "object", "patternProperties": {"^[ö/]$": {"type": "null"}}, "additionalProperties": False},
    ],
    ids=str,
)
def test_an_escape_is_the_character_that_it_stands_for(schema: dict[str, Any], kind: str) -> None:
    rng = random.Random(1)
    grammar, validator = grammar_of(schema, kind), Draft202012Validator(schema)
    for _ in range(150):
        text = "".join(rng.choice('aöäzK"\\/\t\x01\U0001f600l日') for _ in range(rng.randint(0, 4)))
        source = spelled(text, rng)
        if schema["type"] == "object":
            source = f"{{{source}:null}}"
        assert accepts(grammar, source) == validator.is_valid(json.loads(source)), source


@pytest.mark.parametrize("schema", [{}, {"type": "object"}, {"enum": ["a/b"]}, {"properties": {"a/b": TEXT}}])
def test_a_slash_may_be_escaped_anywhere(schema: Any) -> None:
    source = '"a\\/b"' if "enum" in schema else '{"a\\/b":"<\\/p>"}'
    assert accepts(grammar_of(schema), source)


@pytest.mark.parametrize("name", ["a", "\\u0061", "\\u0062", "c"])
def test_a_name_counts_however_it_is_written(name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": TEXT}, "additionalProperties": TEXT}
    for value in (1, "t"):
        source = f'{{"{name}": {json.dumps(value)}}}'
        assert accepts(grammar_of(schema), source) == Draft202012Validator(schema).is_valid(json.loads(source)), source
    assert not accepts(grammar_of(schema), '{"b": "", "\\u0062": ""}')


@pytest.mark.parametrize("pattern", [None, "^[^a]*$"])
@pytest.mark.parametrize("text", ['"\\ud83d"', '"\\ud83dx"', '"\\ude42"', '"\\ud83d\\u0042"', '"\\u12"', '"\\x42"'])
def test_invalid_character_stays_forbidden(text: str, pattern: str | None) -> None:
    assert not accepts(grammar_of({**TEXT, **({"pattern": pattern} if pattern else {})}), text)


def test_escapes_outside_of_json_strings_are_text() -> None:
    grammar = grammar_of('start: "<c>" %json {"type": "string", "pattern": "^[a-z]$"} "</c>" /(?s:.*)/', "lark")
    assert accepts(grammar, '<c>"\\u0061"</c>')
    assert not accepts(grammar, '<c>"\\u0041"</c>')
    assert not accepts(grammar, '<c>"a"<\\/c>')
    assert accepts(grammar, '<c>"a"</c>C:\\new\\u12 \\/ "12345678901234567890" 12345678901234567890 \\')
    assert not accepts(compile_grammar('root ::= "a/b"'), "a\\/b")
    assert accepts(compile_grammar("[0-9]+", "regex"), "1" * 40)


SCHEMAS: list[Any] = [
    TEXT,
    {**TEXT, "pattern": "^[a-cö/]{1,4}$"},
    {**TEXT, "format": "time"},
    {"type": "array", "items": {"type": "number"}},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {**TEXT, "pattern": '^[^"]*$'}}},
    {},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_a_mask_allows_the_tokens_that_the_text_may_go_on_with(schema: Any) -> None:
    rng = random.Random(3)
    matcher = grammar_of(schema).matcher()
    pieces = [matcher.tokenizer.piece(id) for id in range(matcher.tokenizer.n_vocab)]
    in_mask_only, n_accepted = [], 0
    for _ in range(60):
        ids = allowed(matcher)
        if not ids:
            break
        for id in range(4, len(pieces)):
            other = matcher.copy()
            accepted = other.accept(id)
            if id in ids and not accepted:
                in_mask_only.append(pieces[id])
            if len(pieces[id]) == 1 and not accepted:
                assert id not in ids
            assert not accepted or allowed(other) or other.can_end, pieces[id]  # no dead end
        escapes = [id for id in ids if pieces[id][:1] == b"\\"]
        assert matcher.accept(rng.choice(escapes if escapes and rng.random() < 0.4 else ids))
        n_accepted += 1
    assert not in_mask_only
    assert n_accepted > 3


@pytest.mark.parametrize("n", range(31, 34))
def test_escapes_are_read_in_a_vocabulary_of_any_size(n: int) -> None:
    rest = -len(TOKENS) % 32
    tokenizer = tokenizer_of(*(f"filler {i}" for i in range(rest + n)))
    grammar = Grammar.compile("json_schema", '{"type": "string", "pattern": "^[aö]{2}$"}', tokenizer)
    assert accepts(grammar, '"\\u00f6a"')
    assert not accepts(grammar, '"\\u00f7a"')


def test_a_rollback_into_an_escape_restores_the_state() -> None:
    matcher = grammar_of({**TEXT, "pattern": "^[aö]{2}$"}).matcher()
    masks = []
    parts = [b'"', b"\\", b"u", b"00", b"f", b"6", b"a", b'"']
    for part in parts:
        masks.append(matcher.mask())
        assert matcher.accept_bytes(part)
    assert matcher.can_end
    copy = matcher.copy()
    for n in range(1, len(parts) + 1):
        matcher.rollback(1)
        assert np.array_equal(matcher.mask(), masks[-n])
    assert copy.can_end


# -- a hostile sampler ends


def hostile(prefer: Callable[[bytes], Any], rng: random.Random) -> Callable[[list[int], list[bytes]], int]:
    """A sampler that takes what it prefers outside of strings, and else closes what is open."""

    def choose(ids: list[int], pieces: list[bytes]) -> int:
        if {b'"', b"x"} <= {pieces[id] for id in ids}:  # within a string
            return next(id for id in ids if pieces[id] == b'"')
        for fits in (prefer, re.compile(rb"[]}]").match, re.compile(rb"[\",:0-9tfn]").match):
            if fit := [id for id in ids if fits(pieces[id])]:
                return rng.choice(fit)
        return rng.choice(ids)

    return choose


HOSTILE = {
    "digits": re.compile(rb"[0-9]+$").match,
    "zeros": re.compile(rb"0+$").match,
    "points": re.compile(rb"[-.eE0-9+]+$").match,
    "blanks": re.compile(rb"\s+").match,
    "brackets": re.compile(rb"[\[{ ]+$").match,
}
NUMBERS: list[Any] = [
    {"type": "integer"},
    {"type": "number"},
    {"type": "integer", "minimum": 0},
    {"type": "number", "exclusiveMinimum": 0},
    {"type": "number", "minimum": -1.5, "maximum": 1e15},
    {"type": "integer", "multipleOf": 7},
    {"type": "number", "multipleOf": 0.25},
    {
        "type": "object",
        "properties": {"age": {"type": "integer"}, "b": {"type": ["number", "null"]}},
        "required": ["b"],
    },
    {"type": "array", "items": {"type": "array", "maxItems": 2}, "maxItems": 3},
    {"type": "object"},
    {},
]


@pytest.mark.parametrize("prefer", list(HOSTILE))
@pytest.mark.parametrize("schema", NUMBERS, ids=str)
def test_a_hostile_sampler_ends(schema: Any, prefer: str) -> None:
    rng = random.Random(5)
    grammars = [grammar_of(schema)]
    if schema.get("type") == "object":
        grammars.append(grammar_of(f'start: "<tool_call>" {json_rule(schema)} "</tool_call>"', "lark"))
    for grammar in grammars:
        matcher, text = grammar.matcher(), b""
        pieces = [matcher.tokenizer.piece(id) for id in range(matcher.tokenizer.n_vocab)]
        choose = hostile(HOSTILE[prefer], rng)
        for _ in range(1000):
            if not (ids := allowed(matcher)):
                break
            if matcher.can_end and not any(HOSTILE[prefer](pieces[id]) for id in ids):
                break
            id = choose(ids, pieces)
            assert matcher.accept(id)
            text += pieces[id]
        else:
            raise AssertionError(f"does not end: {text[:200]!r}")
        assert matcher.can_end, text
        for number in re.findall(rb"-?(\d+)(?:\.(\d+))?(?:[eE][+-]?(\d+))?", re.sub(rb'"[^"]*"', b"", text)):
            assert all(len(part) <= most for part, most in zip(number, (16, 16, 2), strict=True)), text
        assert text.count(b"[") + text.count(b"{") <= MAX_DEPTH + 2


@pytest.mark.parametrize(
    ("schema", "fits", "wrong"),
    [
        ({"type": "integer"}, ["9" * 15, "-" + "9" * 15, "0"], []),
        ({"type": "number"}, ["3.141592653589793", "1e99", "-1.5E-10", "123456789012345.123456789012345"], []),
        ({"type": "integer", "maximum": 2**63 - 1}, ["9" * 18, "-" + "9" * 15], ["1.5"]),
        ({"type": "integer", "minimum": 10**16, "maximum": 10**17}, ["50000000000000000"], ["5"]),
        ({"type": "number", "minimum": 1e-20, "maximum": 1}, ["0.00000000000000000001", "0.5"], ["0"]),
        ({"enum": [12345678901234567890, 0.12345678901234567]}, ["0.12345678901234566"], ["1"]),
        ({"const": 1e-20}, ["0.00000000000000000001"], []),
    ],
    ids=str,
)
def test_a_number_has_the_digits_that_its_schema_asks_for(schema: Any, fits: list[str], wrong: list[str]) -> None:
    grammar = grammar_of(schema)
    for text in fits:
        if "enum" in schema:
            continue
        matcher = grammar.matcher()
        for byte in text.encode():
            assert byte in {matcher.tokenizer.piece(id)[0] for id in allowed(matcher)}, text
            assert matcher.accept_bytes(bytes([byte]))
        assert matcher.can_end
    for text in wrong:
        assert not accepts(grammar, text)


def test_nesting_that_a_schema_requires_is_allowed() -> None:
    schema: Any = {"type": "null"}
    for _ in range(MAX_DEPTH + 20):
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    matcher = grammar_of(schema).matcher()
    for _ in range(MAX_DEPTH + 20):
        assert b"[" in {matcher.tokenizer.piece(id) for id in allowed(matcher)}
        assert matcher.accept_bytes(b"[")


def test_limits_follow_the_schemas_of_a_grammar() -> None:
    assert limits_of('start: "a"') is None
    assert limits_of('start: %json {"type": "integer"}') == (15, 15, 2, False, False, MAX_PARTS)
    assert limits_of('start: %json {"maximum": 1e300, "minimum": -1e17} x: %json {"pattern": "a"}')[:4] == (
        18,
        15,
        3,
        True,
    )
    assert limits_of('start: %json {"const": 0.0000000000000000001}')[1] == 19  # type: ignore[index]


@pytest.mark.parametrize(
    ("schema", "begin", "part", "most"),
    [
        ({"type": "array"}, "[[]", ",[]", MAX_EMPTY),
        ({"type": "array"}, "[{ }", ", { }", MAX_EMPTY),
        ({}, '{"a":[]', ',"":{}', MAX_PARTS),
        ({"type": "array"}, "[null", ",null", MAX_PARTS),
        ({"type": "array", "items": TEXT}, '["', '","', MAX_PARTS),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 5000}, "[1", ",1", 5000),
        ({"type": "array", "items": {"type": "array", "maxItems": 0}, "minItems": 70}, "[[]", ",[]", 70),
    ],
    ids=str,
)
def test_an_array_or_object_ends_unless_its_schema_asks_for_more(schema: Any, begin: str, part: str, most: int) -> None:
    matcher = grammar_of(schema).matcher()
    assert matcher.accept_bytes((begin + part * (most - 2)).encode())

    def next_bytes() -> set[bytes]:
        return {matcher.tokenizer.piece(id) for id in allowed(matcher)}

    comma = part[: part.index(",") + 1].encode()
    assert comma in next_bytes()
    assert matcher.accept_bytes(part.encode())
    assert not {text for text in next_bytes() if comma in text}
    assert next_bytes() & {b"]", b"}", b'"'}

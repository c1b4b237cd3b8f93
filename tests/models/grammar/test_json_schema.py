"""JSON schemas prepared for the grammar engine: closed objects, references, dropped keywords."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from logitless.models.grammar import GrammarError
from logitless.models.grammar.json_schema import prepare
from logitless.models.grammar.json_schema.prepare import compile_error, object_schema, prepared
from tests.helpers.grammars import accepts, compile_grammar

INTEGER = {"type": "integer"}
A, B = {"properties": {"a": INTEGER}}, {"properties": {"b": INTEGER}}
OBJECT_A, OBJECT_B = {"type": "object", **A}, {"type": "object", **B}
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"


def allows(schema: Any, value: Any, strict: bool = False) -> bool:
    kind = "strict_json_schema" if strict else "json_schema"
    return accepts(compile_grammar(json.dumps(schema), kind), json.dumps(value))


LIST = {"type": "array", "items": {"type": "integer"}}
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
IDLE: list[tuple[dict[str, Any], Any, Any]] = [  # schema, what fits, what does not
    ({**LIST, "uniqueItems": False}, [1, 1], ["a"]),
    ({**LIST, "minItems": 0, "contains": {"const": 7}, "minContains": 0}, [1], ["a"]),
    ({**LIST, "minContains": 2}, [1], ["a"]),
    ({**LIST, "unevaluatedItems": True}, [1], ["a"]),
    ({**OBJECT, "propertyNames": {"type": "string"}, "dependentRequired": {}}, {"a": 1}, {"a": "b"}),
    ({**OBJECT, "dependencies": {}, "dependentSchemas": {}, "not": False}, {"a": 1}, {"a": "b"}),
    ({**OBJECT, "unevaluatedProperties": True}, {"b": 1}, {"a": "b"}),
    ({**OBJECT, "if": {"required": ["a"]}}, {"a": 1}, {"b": 1}),
    ({**OBJECT, "if": {"required": ["a"]}, "then": True, "else": {}}, {"a": 1}, {"b": 1}),
    ({**OBJECT, "then": {"required": ["b"]}}, {"a": 1}, {"b": 1}),
    ({"type": "string", "format": ""}, "x", 1),
    ({"type": "object", "properties": {"x": {**LIST, "uniqueItems": False}}}, {"x": [1, 1]}, {"x": [True]}),
]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("schema", "fits", "wrong"), IDLE)
def test_keywords_that_say_nothing(schema: dict[str, Any], fits: Any, wrong: Any, strict: bool) -> None:
    assert allows(schema, fits, strict)
    assert not allows(schema, wrong, strict)


@pytest.mark.parametrize(
    "said",
    [{"uniqueItems": True}, {"uniqueItems": 0}, {"contains": {}}, {"minContains": 0, "maxContains": 1, "contains": {}}],
)
def test_keywords_that_say_something_are_refused_where_it_is_strict(said: dict[str, Any]) -> None:
    with pytest.raises(GrammarError):
        compile_grammar(json.dumps({**LIST, **said}), "strict_json_schema")


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "schema",
    [
        OBJECT_A,
        A,  # an object by its keyword, as in llama.cpp
        {"type": ["object", "null"], **A},
        {"$ref": "#/$defs/T", "$defs": {"T": OBJECT_A}},
        {"allOf": [OBJECT_A]},
        {"anyOf": [OBJECT_A, {"type": "null"}]},
        {**OBJECT_A, "anyOf": [{"required": ["a"]}, {"required": ["a"]}]},
        {**OBJECT_A, "additionalProperties": False},
    ],
    ids=str,
)
def test_an_object_with_properties_is_closed(schema: Any, strict: bool) -> None:
    assert allows(schema, {"a": 1}, strict)
    assert not allows(schema, {"a": 1, "invented": 1}, strict)


@pytest.mark.parametrize("strict", [False, True])
def test_a_required_member_need_not_be_described(strict: bool) -> None:
    schema = {**OBJECT_A, "required": ["a", "b"]}
    assert allows(schema, {"a": 1, "b": ["x"]}, strict)
    assert not allows(schema, {"a": 1}, strict)
    assert not allows(schema, {"a": 1, "b": 2, "c": 3}, strict)


def test_objects_in_arrays_and_members_are_closed() -> None:
    nested = {"type": "object", "properties": {"list": {"type": "array", "items": OBJECT_A}, "one": OBJECT_B}}
    assert allows(nested, {"list": [{"a": 1}], "one": {"b": 2}})
    assert not allows(nested, {"list": [{"a": 1, "c": 1}]})
    assert not allows(nested, {"one": {"b": 2, "c": 1}})
    assert not allows({"type": "object", "properties": {}}, {"c": 1})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**OBJECT_A, "additionalProperties": True},
        {**OBJECT_A, "additionalProperties": INTEGER},
        {**OBJECT_A, "patternProperties": {"^c$": INTEGER}},
        {**OBJECT_A, "unevaluatedProperties": True},
        {**OBJECT_A, "anyOf": [B, {"properties": {"c": INTEGER}}]},
        {"allOf": [OBJECT_A, {**OBJECT_B, "additionalProperties": True}]},
        {"allOf": [OBJECT_A, {"patternProperties": {"^c$": INTEGER}}]},
        {"allOf": [OBJECT_A, {"if": {"required": ["a"]}, "then": B}]},
        {
            "$ref": "#/$defs/T",
            "$defs": {"T": {**OBJECT_A, "$ref": "#/$defs/U"}, "U": {"type": "object", "unevaluatedProperties": True}},
        },
    ],
    ids=str,
)
def test_an_object_stays_open_where_its_schema_opens_it(schema: Any) -> None:
    assert allows(schema, {"a": 1, "c": 1})


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [OBJECT_A, OBJECT_B]},
        {"allOf": [A, B]},
        {"type": "object", "allOf": [A, {"allOf": [B, {"required": ["a"]}]}]},
        {"allOf": [OBJECT_A, {"anyOf": [B, {**B, "required": ["b"]}]}]},
        {**OBJECT_A, "allOf": [B]},
        {**OBJECT_A, "$ref": "#/$defs/T", "$defs": {"T": B}},
        {"$defs": {"T": {**OBJECT_A, "allOf": [{"required": ["a"], **A}]}}, "allOf": [{"$ref": "#/$defs/T"}, B]},
        {"$defs": {"T": {**OBJECT_A, "allOf": [{"$ref": "#/$defs/U"}]}, "U": OBJECT_B}, "$ref": "#/$defs/T"},
        {"$defs": {"T": OBJECT_A}, "allOf": [{"$ref": "#/$defs/T"}, {**B, "required": ["a"]}]},
    ],
    ids=str,
)
def test_parts_that_describe_one_object_close_it_together(schema: Any, strict: bool) -> None:
    for value in ({"a": 1}, {"a": 1, "b": 2}):
        assert allows(schema, value, strict)
    for wrong in ({"a": 1, "c": 1}, {"a": 1, "b": 2, "c": 1}, {"a": "x"}, {"a": 1, "b": "x"}, "text"):
        assert not allows(schema, wrong, strict)
    within = {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": schema.get("$defs", {})}
    assert allows(within, {"x": {"a": 1, "b": 2}})
    assert not allows(within, {"x": {"a": 1, "c": 2}})


def test_an_object_closed_with_others_is_closed_by_itself_too() -> None:
    both = {"allOf": [{"$ref": "#/$defs/T"}, B]}
    schema = {"$defs": {"T": OBJECT_A}, "type": "object", "properties": {"both": both, "one": {"$ref": "#/$defs/T"}}}
    assert allows(schema, {"both": {"a": 1, "b": 2}, "one": {"a": 1}})
    assert not allows(schema, {"both": {"c": 1}})
    assert not allows(schema, {"one": {"a": 1, "c": 2}})


def test_composed_objects_have_the_members_of_all_their_parts() -> None:
    shared = {"$defs": {"Base": OBJECT_A}, "allOf": [{"$ref": "#/$defs/Base"}, {**B, "required": ["b"]}]}
    assert allows(shared, {"a": 1, "b": 2})
    assert not allows(shared, {"a": 1})
    alternatives = {"oneOf": [{**OBJECT_A, "required": ["a"]}, {**OBJECT_B, "required": ["b"]}]}
    assert allows(alternatives, {"b": 1})
    assert not allows(alternatives, {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ({"type": "string", "pattern": EMAIL}, "no address"),
        ({"type": "string", "pattern": DECIMAL}, "no number"),
        ({"type": "string", "pattern": r"^\bfoo\b$"}, "bar"),
        ({"type": "string", "pattern": r"^(a)\1$"}, "b"),
        ({"type": "string", "pattern": "("}, "b"),
        ({"type": "string", "minLength": 10**12}, "b"),
        ({"type": "string", "maxLength": 2**70}, "b"),
        ({"type": "integer", "minimum": -(2**63)}, 1),
        ({"type": "integer", "maximum": 2**64}, 1),
        ({"type": "integer", "minimum": 2**63}, 1),
        ({"type": "number", "exclusiveMaximum": 1e20}, 1.5),
        ({"type": "number", "maximum": 1.7976931348623157e308}, 1.5),
        ({"type": "integer", "multipleOf": 2**70}, 1),
        ({"type": "array", "maxItems": 2**70}, []),
        ({"type": "object", "patternProperties": {"^(?!x)": INTEGER}}, {"y": 1}),
        ({"anyOf": [INTEGER, {"type": "string", "pattern": "^(?=a)"}]}, "b"),
    ],
    ids=str,
)
def test_a_keyword_beyond_the_engine_is_dropped_and_the_rest_enforced(
    part: dict[str, Any], value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    schema = {"type": "object", "properties": {"x": part, "n": {**INTEGER, "maximum": 5}}, "required": ["x", "n"]}
    prepare._prepared.cache_clear()  # it logs once a schema
    with caplog.at_level(logging.WARNING, "logitless.grammar"):
        assert allows(schema, {"x": value, "n": 5})
        assert not allows(schema, {"x": value, "n": 6})
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert lines[0].startswith("JSON schema: /properties/x/")
    assert "\n" not in lines[0]


@pytest.mark.parametrize(
    "part", [{"type": "string", "pattern": EMAIL}, {"type": "number", "minimum": 1e20}, {"$schema": "urn:x", "not": {}}]
)
def test_a_strict_schema_is_refused_at_its_place(part: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"n": INTEGER, "x": part}, "required": ["n", "x"]}
    with pytest.raises(GrammarError, match="in the schema at /properties/x: "):
        compile_grammar(json.dumps(schema), "strict_json_schema")


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("name", "ref"),
    [
        ("My Type", "My Type"),
        ("My Type", "My%20Type"),
        ("Größe<int>", "Größe<int>"),
        ("List[int]", "List[int]"),
        ('a"b\\c^`{|}', 'a"b\\c^`{|}'),
        ("a%20b", "a%20b"),
        ("100%", "100%"),
        ("a/b~c", "a~1b~0c"),
        ("日本", "日本"),
    ],
)
@pytest.mark.parametrize("key", ["$defs", "definitions"])
def test_references_to_any_name_are_followed(key: str, name: str, ref: str, strict: bool) -> None:
    schema = {key: {name: {"type": "boolean"}}, "type": "object", "properties": {"x": {"$ref": f"#/{key}/{ref}"}}}
    assert allows(schema, {"x": True}, strict)
    assert not allows(schema, {"x": 1}, strict)


@pytest.mark.parametrize("schema", ["http://json-schema.org/draft-03/schema#", "https://example.com/mine", "", 7])
def test_an_unknown_dialect_is_ignored(schema: Any) -> None:
    assert allows({"$schema": schema, "$id": "not a uri <>", **OBJECT_A}, {"a": 1}, strict=True)


def test_strict_alternatives_are_exclusive_or_refused() -> None:
    either = {"oneOf": [INTEGER, {"type": "number"}]}
    assert allows(either, 1)  # the engine reads oneOf as anyOf
    with pytest.raises(GrammarError):
        compile_grammar(json.dumps(either), "strict_json_schema")
    assert allows({"oneOf": [INTEGER, {"type": "string"}]}, "a", strict=True)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        None,
        A,
        {"properties": None, **A},
        {"anyOf": [OBJECT_A, {"type": "string"}]},
        {"$ref": "#/$defs/T", "$defs": {"T": OBJECT_A}},
        {"type": ["object", "null"], **A},
    ],
    ids=str,
)
def test_the_arguments_of_a_tool_are_an_object(schema: Any) -> None:
    arguments = object_schema(schema)
    assert allows(arguments, {"a": 1})
    for value in ("text", 1, None, []):
        assert not allows(arguments, value)


@pytest.mark.parametrize("schema", [{"type": "foo"}, {"required": "a"}, {"$ref": "#/nowhere"}, {"properties": 3}])
def test_a_broken_schema_of_a_tool_is_any_object(schema: Any, caplog: pytest.LogCaptureFixture) -> None:
    if schema != {"type": "foo"}:  # the type of arguments is known
        assert compile_error(prepared({"type": "object", **schema}))
    with caplog.at_level(logging.WARNING, "logitless.grammar"):
        arguments = object_schema(schema)
    assert arguments == {"type": "object"}
    assert allows(arguments, {"any": ["thing"]})


def test_a_deep_schema_is_refused() -> None:
    schema: dict[str, Any] = INTEGER
    for _ in range(300):
        schema = {"items": schema}
    with pytest.raises(GrammarError, match="nested too deeply"):
        prepared(schema)


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"type": "array", "uniqueItems": True, "contains": {"const": 3}}, ["/contains", "/uniqueItems"]),
        ({"type": "object", "properties": {"a": {"type": "string", "not": {"const": "x"}}}}, ["/properties/a/not"]),
        ({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, ["/if", "/then"]),
        ({"type": "object", "properties": {"not": {"type": "string"}, "if": {"type": "null"}}}, []),
        ({"type": "array", "uniqueItems": False}, []),
        # enforced as additionalProperties; not beside a composition
        ({"properties": {"a": {"type": "null"}}, "unevaluatedProperties": {"type": "string"}}, []),
        ({"anyOf": [{"required": ["a"]}], "unevaluatedProperties": {"type": "null"}}, ["/unevaluatedProperties"]),
    ],
)
def test_keywords_that_nothing_enforces_are_named_in_one_line(
    schema: dict[str, Any], names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "logitless.grammar"):
        prepared({**schema, "title": f"{names}"})  # of no other test
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == bool(names)
    assert sorted(lines[0].partition("strict: ")[2].split(", ") if lines else []) == names

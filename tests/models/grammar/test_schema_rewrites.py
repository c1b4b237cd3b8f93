"""Keywords that the grammar engine does not know or reads wrongly: answers fit their schema (jsonschema)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from logitless.models.grammar import GrammarError
from logitless.models.grammar.json_schema.rewrites import without_nul
from tests.helpers.grammars import accepts, compile_grammar

INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
X = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}
KINDS = ("json_schema", "strict_json_schema")


def allows(schema: Any, value: Any, kind: str = "json_schema") -> bool:
    return accepts(compile_grammar(json.dumps(schema), kind), json.dumps(value, ensure_ascii=False))


# -- patterns whose classes leave out quotes, backslashes or all but control characters


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "pattern",
    [
        '^[^"]{3}$', r"^[^\\]{3}$", r'^[^"\\]{3}$', r'^C:[^<>:"|?*]{1}$', r"^[\x00-\x1f]{3}$", r"^[\x00-!#-~]{3}$",
        r"^[\u0000-\u0021a-z]{3}$", r"^\p{Cc}{3}$", r'^([^"]|\t){3}$', r"^[^\]\\]{3}$", r"^a[^\\/]b$",
        '^[^"\\x00-\\x1f]{3}$', r"^[a\W]{3}$", r'^[^"[]{3}$', r"^[\b\t]{3}$", r"^[\[a-z]{3}$",
        r"^[\S\s]{3}$", "^...$", r'^(?:[^"])(?:[^"])(?:[^"])$',
    ],
)  # fmt: skip
def test_a_class_of_a_pattern_lets_only_its_characters_through(pattern: str, kind: str) -> None:
    grammar = compile_grammar(json.dumps({"type": "string", "pattern": pattern}), kind)
    # Python has no property classes; \p{Cc} is \x00-\x1f and \x7f-\x9f
    validator = Draft202012Validator({"pattern": pattern.replace(r"\p{Cc}", r"[\x00-\x1f\x7f-\x9f]")})
    for text in (
        'a"b',
        "a\\b",
        '""',
        '"""',
        "\\\\\\",
        "abc",
        "a\tb",
        "\n\n\n",
        "C:a",
        "C:\\",
        'C:"',
        "a/b",
        "a]b",
        "äöü",
    ):
        if (text == "\n\n\n" and pattern == "^...$") or (text == "äöü" and r"\W" in pattern):
            continue  # Python and JavaScript differ
        assert accepts(grammar, json.dumps(text, ensure_ascii=False)) == validator.is_valid(text), text


def test_a_key_of_a_pattern_lets_only_its_characters_through() -> None:
    schema = {"type": "object", "patternProperties": {'^[^"]+$': INTEGER}, "additionalProperties": False}
    assert allows(schema, {"a\\b": 1})
    assert not allows(schema, {'a"b': 1})


@pytest.mark.parametrize("pattern", ["^a+$", r"^\d{3}-[a-z]$", r"^\[x\]$", r"^\\$"])
def test_a_pattern_without_such_classes_stays_as_it_is(pattern: str) -> None:
    assert without_nul(pattern) == pattern


# -- closed objects


CLOSED: list[tuple[dict[str, Any], list[Any], list[Any]]] = [  # schema, what fits, what does not
    ({**X, "unevaluatedProperties": False}, [{"x": True}], [{"x": True, "y": 1}, {}]),
    ({"type": "object", "unevaluatedProperties": False}, [{}], [{"y": 1}]),
    (
        {"allOf": [X, {"properties": {"b": INTEGER}}], "unevaluatedProperties": False},
        [{"x": True}, {"x": True, "b": 1}],
        [{"x": True, "y": 1}],
    ),
    (
        {"$defs": {"B": X}, "$ref": "#/$defs/B", "properties": {"b": INTEGER}, "unevaluatedProperties": False},
        [{"x": True, "b": 1}],
        [{"x": True, "y": 1}, {"x": True, "b": "t"}],
    ),
    ({"$defs": {"B": X}, "$ref": "#/$defs/B", "unevaluatedProperties": False}, [{"x": True}], [{"x": True, "y": 1}]),
    (
        {**X, "anyOf": [{"properties": {"b": INTEGER}, "required": ["b"]}, {"properties": {"c": TEXT}}],
         "unevaluatedProperties": False},
        [{"x": True, "b": 1}, {"x": True, "c": "t"}, {"x": True}],
        [{"x": True, "y": 1}, {"x": True, "c": 1}, {"b": 1}],
    ),
    (
        {"allOf": [X, {"anyOf": [{"properties": {"b": TEXT}, "required": ["b"]}, {"properties": {"c": TEXT}}]}],
         "unevaluatedProperties": False},
        [{"x": True, "b": "t"}, {"x": True, "c": "t"}, {"x": True}],
        [{"x": True, "b": 1}, {"x": True, "c": 1}, {"x": True, "y": 1}, {"b": "t"}],
    ),
    (
        {"type": "object", "anyOf": [{"properties": {"c": TEXT}}, {"required": ["c"]}], "unevaluatedProperties": False},
        [{"c": "t"}, {}],
        [{"c": 1}],
    ),
    (
        {**X, "patternProperties": {"^p": INTEGER}, "unevaluatedProperties": False},
        [{"x": True, "p1": 1}],
        [{"x": True, "y": 1}, {"x": True, "p1": "t"}],
    ),
    ({**X, "unevaluatedProperties": INTEGER}, [{"x": True, "y": 1}], [{"x": True, "y": "t"}]),
    ({**X, "unevaluatedProperties": True}, [{"x": True, "y": 1}], [{"y": 1}]),
    ({"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False}, [[1], []], [[1, 1]]),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("schema", "fits", "wrong"), CLOSED)
def test_unevaluated_members_are_none_where_the_schema_says_so(
    schema: dict[str, Any], fits: list[Any], wrong: list[Any], kind: str
) -> None:
    nested = {"type": "object", "properties": {"n": schema}, "required": ["n"], "$defs": schema.get("$defs", {})}
    for value, expected in [*((v, True) for v in fits), *((v, False) for v in wrong)]:
        assert Draft202012Validator(schema).is_valid(value) == expected, value
        assert allows(schema, value, kind) == expected, value
        assert allows(nested, {"n": value}, kind) == expected, value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "place", ["/components/schemas/B", "/$defs/a~1b/properties/x", "/x-schemas/0", "/definitions/d/other/B", "/$defs/B"]
)
def test_schemas_that_a_reference_reaches_anywhere_are_prepared(place: str, kind: str) -> None:
    target: Any = {**X, "properties": {"x": {"type": "boolean"}, "again": {"$ref": "#" + place}}}
    keys = [key.replace("~1", "/") for key in place.split("/")[1:]]
    for key in reversed(keys[1:]):
        target = [target] if key == "0" else {key: target}
    schema = {"type": "object", "properties": {"b": {"$ref": "#" + place}}, "required": ["b"], keys[0]: target}
    assert allows(schema, {"b": {"x": True, "again": {"x": False}}}, kind)
    assert not allows(schema, {"b": {"x": True, "y": 1}}, kind)
    assert not allows(schema, {"b": {"x": True, "again": {"x": False, "y": 1}}}, kind)


def test_a_pattern_that_a_reference_reaches_is_dropped_where_it_stands(caplog: pytest.LogCaptureFixture) -> None:
    pattern = {"type": "string", "pattern": "^(?!x)no reference$"}
    schema = {"properties": {"b": {"$ref": "#/components/schemas/B"}}, "components": {"schemas": {"B": pattern}}}
    assert allows(schema, {"b": "any"})
    assert any("JSON schema: /components/schemas/B/pattern is not" in r.getMessage() for r in caplog.records)
    with pytest.raises(GrammarError, match="in the schema at /components/schemas/B: regex"):
        compile_grammar(json.dumps(schema), "strict_json_schema")


# -- types by keywords


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("schema", "fits", "wrong"),
    [
        ({"items": INTEGER}, [[1]], [1, "a", {"a": 1}, None]),
        ({"prefixItems": [INTEGER]}, [[1]], [1, "a", {}]),
        ({"minItems": 1}, [[1], ["a"]], [[], 1, "a", {}]),
        ({"maxItems": 1}, [[]], [[1, 2], 1]),
        ({"pattern": "^a$"}, ["a"], ["b", 1, []]),
        ({"minLength": 2}, ["ab"], ["a", 1]),
        ({"format": "date"}, ["2020-01-01"], ["x", 1]),
        ({"additionalProperties": INTEGER}, [{"a": 1}, {}], [{"a": "b"}, 1, []]),
        ({"additionalProperties": False}, [{}], [{"a": 1}, 1]),
        ({"required": ["a"]}, [{"a": 1}], [{}, 1]),
        ({"minProperties": 1}, [{"a": 1}], [{}, 1]),
        ({"patternProperties": {"^a": INTEGER}}, [{"a": 1}], [{"a": "b"}, 1]),
        ({"properties": {"a": INTEGER}}, [{"a": 1}], [{"a": "b"}, 1]),
        ({"minimum": 3}, [3], [2, "a"]),
        ({"properties": {"a": INTEGER}, "anyOf": [{"required": ["a"]}]}, [{"a": 1}], [{}, 1]),
        ({"anyOf": [{"items": INTEGER}, {"type": "null"}]}, [[1], None], [1, ["a"]]),
        # a type that is said elsewhere stays
        ({"type": ["string", "null"], "anyOf": [{"minLength": 2}, {"maxLength": 9}]}, [None, "ab"], [1]),
        ({"allOf": [{"type": ["array", "string"]}, {"minItems": 1}]}, ["", [1]], [[], 1]),
        ({"minLength": 2, "enum": ["ab", 1]}, ["ab", 1], ["cd"]),
        ({"minLength": 2, "$ref": "#/$defs/T", "$defs": {"T": {"type": ["string", "null"]}}}, ["ab", None], ["a"]),
        ({"items": INTEGER, "pattern": "^a$"}, [[1], "a"], [["a"], "b", 1]),
        ({"additionalProperties": True}, [1, {"a": 1}], []),
        ({"format": "int32"}, [1], []),
        ({}, [1, "a", [], {}, None], []),
    ],
    ids=str,
)
def test_keywords_without_a_type_mean_theirs(schema: Any, fits: list[Any], wrong: list[Any], kind: str) -> None:
    if kind == "strict_json_schema" and schema.get("format") == "int32":
        return  # an unknown format, which is refused
    for value in fits:
        assert allows(schema, value, kind), value
    for value in wrong:
        assert not allows(schema, value, kind), value


# -- numbers, nothing, names, times


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("schema", "fits", "wrong"),
    [
        ({"type": "array", "maxItems": 1.0}, [[1]], [[1, 2]]),
        ({"type": "array", "minItems": 1e0}, [[1]], [[]]),
        ({"type": "string", "minLength": 2.0, "maxLength": 3.0}, ["ab", "abc"], ["a", "abcd"]),
        ({"type": "object", "minProperties": 1.0, "maxProperties": 1.0}, [{"a": 1}], [{}, {"a": 1, "b": 2}]),
        ({"anyOf": [{"type": "array", "items": {"type": "array", "maxItems": 1.0}}]}, [[[1]]], [[[1, 2]]]),
        ({"type": "integer", "minimum": 1.0, "maximum": 2.5}, [1, 2], [0, 3]),
        ({"type": "integer", "minimum": -(2**63) + 1, "maximum": 2**63 - 1}, [5, -5, 10**17], [1.5]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**64}, [5, -5], [1.5]),
        ({"type": "integer", "minimum": 0, "maximum": 18446744073709551615}, [5], [-1]),
        ({"type": "string", "pattern": None, "minLength": None, "enum": None}, ["a"], [1]),
        ({"type": "array", "items": None, "maxItems": None}, [[1]], [1]),
        ({"type": "object", "properties": {"a": None}, "required": None}, [{"a": 1}, {}], [1]),
        ({"type": "string", "format": "time"}, ["23:59:59Z", "00:00:00.5+01:00"], ["23:59:60Z", "24:00:00Z"]),
        (
            {"type": "string", "format": "date-time"},
            ["2020-01-01T23:59:59Z"],
            ["2020-01-01T23:59:60Z", "2020-02-31T00:00:00Z", "2020-01-01T00:00:00." + "1" * 40 + "Z"],
        ),
        ({"type": ["string", "null"], "format": "time"}, [None, "01:02:03Z"], [1, "01:02:60Z"]),
        ({"type": "string", "format": "time", "pattern": "Z$"}, ["01:02:03Z"], ["01:02:03+01:00", "01:02:60Z"]),
    ],
    ids=str,
)
def test_a_keyword_counts_however_it_is_written(schema: Any, fits: list[Any], wrong: list[Any], kind: str) -> None:
    for value in fits:
        assert allows(schema, value, kind), value
    for value in wrong:
        assert not allows(schema, value, kind), value


def test_null_as_a_value_is_a_value() -> None:
    assert allows({"const": None}, None)
    assert allows({"enum": ["a", None]}, None)
    assert not allows({"const": None}, 1)


NAMES: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"enum": ["x", "y"]}, [{"x": 1}, {"x": 1, "y": 2}, {}], [{"z": 1}, {"x": "a"}]),
    ({"type": "string", "enum": ["x"]}, [{"x": 1}], [{"z": 1}]),
    ({"const": "x"}, [{"x": 1}], [{"z": 1}]),
    ({"pattern": "^x"}, [{"x": 1, "xy": 2}], [{"z": 1}, {"x": "a"}]),
    ({"minLength": 2, "maxLength": 3}, [{"ab": 1}], [{"a": 1}, {"abcd": 1}]),
    ({"$ref": "#/$defs/N"}, [{"x": 1}], [{"z": 1}]),
    (False, [{}], [{"x": 1}]),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("names", "fits", "wrong"), NAMES)
def test_names_of_members_follow_their_schema(names: Any, fits: list[Any], wrong: list[Any], kind: str) -> None:
    schema = {"type": "object", "propertyNames": names, "additionalProperties": INTEGER}
    schema["$defs"] = {"N": {"enum": ["x", "y"]}}
    for value, expected in [*((v, True) for v in fits), *((v, False) for v in wrong)]:
        assert Draft202012Validator(schema).is_valid(value) == expected, value
        assert allows(schema, value, kind) == expected, value


def test_members_beside_names_keep_their_schemas() -> None:
    schema = {
        "type": "object", "properties": {"x": {"type": "boolean"}, "q": INTEGER}, "required": ["x"],
        "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": INTEGER,
    }  # fmt: skip
    assert allows(schema, {"x": True, "y": 1})
    for wrong in ({"y": 1}, {"x": 1}, {"x": True, "q": 1}, {"x": True, "z": 1}):
        assert not allows(schema, wrong)


# -- alternatives


A, B = ({"type": "object", "properties": {name: INTEGER}} for name in "ab")
BOTH = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("schema", "fits", "wrong"),
    [
        ({**BOTH, "anyOf": [{"required": ["c"]}, {"required": ["d"]}]}, [{"c": 1}, {"a": 1, "d": 2}], [{}, {"a": 1}]),
        ({**BOTH, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"a": 1, "b": 1}], [{}, {"c": 1}]),
        ({**BOTH, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
        ({"allOf": [A, {"required": ["z"]}]}, [{"a": 1, "z": 1}, {"z": "t"}], [{}, {"a": 1}]),
        (
            {"oneOf": [{**A, "required": ["a"]}, {**B, "required": ["b"]}]},
            [{"a": 1}, {"b": 1}],
            [{}, {"a": 1, "b": 1}],
        ),
        (
            {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
             "$defs": {"A": {**A, "required": ["a"]}, "B": {**B, "required": ["b"]}}},
            [{"a": 1}, {"b": 1}],
            [{}],
        ),
        (
            {"oneOf": [{"properties": {"k": {"const": k}, "v": INTEGER}, "required": ["k"]} for k in "ab"],
             "type": "object"},
            [{"k": "a", "v": 1}, {"k": "b"}],
            [{"k": "c"}, {}],
        ),
    ],
    ids=str,
)  # fmt: skip
def test_alternatives_that_require_members_are_satisfiable(
    schema: Any, fits: list[Any], wrong: list[Any], kind: str
) -> None:
    for value in fits:
        assert Draft202012Validator(schema).is_valid(value)
        assert allows(schema, value, kind), value
    for value in wrong:
        assert not allows(schema, value, kind), value


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [A, {**B, "required": ["b"]}]},
        {"type": "array", "items": {"oneOf": [A, B]}},
        {"oneOf": [{"$ref": "#/x/A"}, {"$ref": "#/x/B"}], "x": {"A": A, "B": {**B, "required": ["b"]}}},
    ],
)
def test_strict_alternatives_whose_answers_fit_two_branches_are_refused(schema: Any) -> None:
    with pytest.raises(GrammarError, match=r"in the schema at /(items)?: oneOf whose alternatives may overlap"):
        compile_grammar(json.dumps(schema), "strict_json_schema")
    compile_grammar(json.dumps(schema), "json_schema")


# -- errors name the part at fault


REF = {"$ref": "#/components/schemas/B"}
BAD = {"type": "any"}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"b": REF, "c": BAD}, "components": {"schemas": {"B": X}}}, "/properties/c: Invalid type: any"),
        ({"properties": {"b": REF}, "components": {"schemas": {"B": BAD}}}, "/components/schemas/B: Invalid type"),
        (
            {"properties": {"b": {"$ref": "#/$defs/T"}}, "$defs": {"T": {"items": BAD}}},
            r"/\$defs/T/items: Invalid type",
        ),
        ({"properties": {"b": {"$ref": "#"}, "c": BAD}}, "/properties/c: Invalid type"),
        ({"properties": {"b": {"$ref": "#/properties/c"}, "c": BAD}}, "/properties/c: Invalid type"),
        ({"properties": {"b": {"$ref": "#/nowhere"}}}, "/properties/b: "),
        ({"items": {"items": {"pattern": "("}, "minItems": 1}, "maxItems": "x"}, "/: "),
        (BAD, "/: Invalid type: any"),
    ],
    ids=str,
)
def test_an_error_names_the_part_at_fault(schema: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=f"^in the schema at {message}") as error:
        compile_grammar(json.dumps(schema), "json_schema")
    if "nowhere" not in json.dumps(schema):
        assert "does not exist" not in str(error.value)


# -- references by identifiers, notes beside references


NODE = {"type": "object", "properties": {"x": INTEGER, "n": {"$ref": "NODE"}}, "required": ["x"]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("schema", "fits", "wrong"),
    [
        ({"items": [{"$id": "NODE", **NODE}]}, [[{"x": 1, "n": {"x": 2}}]], [[{"x": 1, "n": {}}], [{"x": 1, "y": 1}]]),
        (
            {"$defs": {"A": {"$id": "A", **X}, "B": {"$id": "B", "items": {"$ref": "A"}}}, "$ref": "B"},
            [[{"x": True}]],
            [[{"x": 1}], [{"x": True, "y": 1}]],
        ),
        (
            {
                "$id": "https://example.com/root.json",
                "$ref": "part.json",
                "$defs": {
                    "P": {"$id": "part.json", "items": {"$ref": "#/$defs/B"}, "$defs": {"B": INTEGER}},
                    "B": TEXT,
                },
            },
            [[1]],
            [["t"]],
        ),
        (
            {"$id": "https://e.org/r", "items": {"$ref": "https://e.org/r#/x-parts/B"}, "x-parts": {"B": X}},
            [[{"x": True}]],
            [[{"x": True, "y": 1}]],
        ),
        ({"items": {"$ref": "#a"}, "$defs": {"A": {"$anchor": "a", **X}}}, [[{"x": True}]], [[{"x": True, "y": 1}]]),
        ({"items": {"$dynamicRef": "#a"}, "$defs": {"A": {"$dynamicAnchor": "a", **X}}}, [[{"x": True}]], [[{}]]),
    ],
    ids=str,
)
def test_a_reference_reaches_what_an_identifier_or_anchor_names(
    schema: Any, fits: list[Any], wrong: list[Any], kind: str
) -> None:
    schema = {"type": "array", **schema} if "items" in schema else schema
    assert [allows(schema, value, kind) for value in fits] == [True] * len(fits)
    assert [allows(schema, value, kind) for value in wrong] == [False] * len(wrong)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("note", ["deprecated", "nullable", "example", "discriminator", "x-order"])
@pytest.mark.parametrize("form", ["$ref", "allOf"])
def test_a_note_beside_a_reference_to_a_schema_around_it_changes_nothing(note: str, form: str, kind: str) -> None:
    inner = {"$ref": "#/$defs/N", note: True, "type": "object"}
    if form == "allOf":
        inner = {"allOf": [{"$ref": "#/$defs/N"}], note: True}
    node = {"type": "object", "properties": {"n": inner, "x": INTEGER}}
    schema = {**node, "$defs": {"N": node}}
    assert allows(schema, {"n": {"n": {"x": 1}}}, kind)
    assert not allows(schema, {"n": {"n": {"x": "t"}}}, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_an_alternative_of_another_type_may_refer_to_the_schema_around_it(kind: str) -> None:
    node = {**X, "properties": {**X["properties"], "n": {"oneOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}}}
    schema = {"$ref": "#/$defs/N", "$defs": {"N": node}}
    assert allows(schema, {"x": True, "n": {"x": True, "n": None}}, kind)
    assert not allows(schema, {"x": True, "n": 1}, kind)
    overlapping = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    if kind == "strict_json_schema":
        with pytest.raises(GrammarError, match="oneOf"):
            compile_grammar(json.dumps(overlapping), kind)


def test_an_object_that_must_have_more_members_than_it_names_stays_open() -> None:
    schema = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"], "minProperties": 2}
    for kind in KINDS:
        assert allows(schema, {"a": 1, "b": 1}, kind)
        assert not allows(schema, {"a": 1}, kind)
        assert not allows({**schema, "minProperties": 1}, {"a": 1, "b": 1}, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_null_in_an_enumeration_is_a_value_where_the_schema_is_nullable(kind: str) -> None:
    assert allows({**TEXT, "nullable": True, "enum": [None]}, None, kind)
    assert allows({**TEXT, "nullable": True, "enum": ["a", None]}, None, kind)
    assert not allows({**TEXT, "nullable": True, "enum": ["a"]}, None, kind)
    assert not allows({**TEXT, "enum": ["a", None]}, None, kind)

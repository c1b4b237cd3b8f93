"""Gemma 4 tool calls: dictionaries as JSON, whole, cut and broken; grammars that fit their schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest

from logitless.models.chat.tool_calls.deltas import Message
from logitless.models.chat.tool_calls.gemma import GEMMA4, OF_GEMMA4
from logitless.models.chat.tool_calls.gemma_schema import argument_rules, shared_rules
from logitless.models.chat.tool_calls.grammar import call_grammar
from logitless.models.chat.tool_calls.parser import Parser, Style
from logitless.models.grammar import Grammar
from logitless.models.tokenizer import Tokenizer
from tests.helpers.grammars import accepts, text_of
from tests.helpers.tool_call_texts import NAMES, called, content, parse, told
from tests.models.chat.test_tool_call_grammar import parsed

GEMMA = (
    '<|tool_call>call:write{n:-1.5e3,path:<|"|>a "b"\\\n{x}<|"|>,'
    'tree:{deep:[1,{x y:null},[]],<|"|>k:1<|"|>:<|"|><|"|>},yes:true}<tool_call|>'
)
GEMMA_ARGUMENTS = {
    "n": -1500.0,
    "path": 'a "b"\\\n{x}',
    "tree": {"deep": [1, {"x y": None}, []], "k:1": ""},
    "yes": True,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<|tool_call>call:add{a:1,b:<|"|>x<|"|>}<tool_call|>', called(("add", '{"a": 1, "b": "x"}'))),
        ("I add.\n<|tool_call>call:add{}<tool_call|><|tool_call>call:f{a:[]}<tool_call|>",
         called(("add", "{}"), ("f", '{"a": []}'), text="I add.")),
        ("<|tool_call> call:add{ a : 1 , b: True }\n<tool_call|>\n", called(("add", '{"a": 1, "b": true}'))),
        ('<|tool_call>call:f{"x": "a\\n", y: two words}<tool_call|>',
         called(("f", '{"x": "a\\n", "y": "two words"}'))),
        ("<|tool_call>call:f{x:a<b}", called(("f", '{"x": null}'))),
        ('<|tool_call>call:f{x:<|"|>a <| b<|"|>,<|"|>k', called(("f", '{"x": "a <| b"'))),
        ('<|tool_call>call:f{x:<|"|>a<|"', called(("f", '{"x": "a'))),
        ('<|tool_call>call:f{x:<|"|>cut <|', called(("f", '{"x": "cut '))),
        ("<|tool_call>call:f{x:12", called(("f", '{"x": 12'))),
        ("<|tool_call>call:f{x:<|", called(("f", '{"x": '))),
        ("<|tool_call>call:f{x:1", called(("f", '{"x": 1'))),
        ("<|tool_call>call:f{x:1}", called(("f", '{"x": 1}'))),
        ("<|tool_call>call:f{x:1}<tool", called(("f", '{"x": 1}'))),
        ("<|tool_call>call:f{x:1} well", called(("f", '{"x": 1}'), text=" well")),
        ("<|tool_call>call:f{x:}<tool_call|>", called(("f", '{"x": null}'))),
        ("<|tool_call>call:f{x:[1,{y:}}<tool_call|> So.", called(("f", '{"x": [1, {"y": null}]}'), text="So.")),
        ("<|tool_call>f{}<tool_call|>", content("<|tool_call>f{}<tool_call|>")),
        ("<|tool_call>call:{}", content("<|tool_call>call:{}")),
        ("<|tool_call>call:f", content("<|tool_call>call:f")),
        ("<|tool_call> hm", content("<|tool_call> hm")),
    ],
)  # fmt: skip
def test_gemma4(text: str, expected: object) -> None:
    assert told(parse(text, GEMMA4)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel>thought\n<channel|>Hello.<|channel>thought\n<channel|>", content("Hello.")),
        ("Hello.<|channel>thought\n<channel|><channel|>", content("Hello.")),
        ("<|channel><|channel>thought\n<channel|>Hello.", content("Hello.")),
        ("<|channel>thought\nHm.\n<channel|>One.<|channel>thought\nSo.<channel|> Two.", ("One.Two.", "Hm.So.", [])),
        ("Hm.<|channel>thought\n<channel|><|tool_call>call:f{}<tool_call|>", called(("f", "{}"), text="Hm.")),
        ("Hello <|channel>what", content("Hello <|channel>what")),
    ],
)
def test_thoughts_of_gemma4_anywhere(text: str, expected: object) -> None:
    for cut in range(len(text)):
        parser = Parser(Style(GEMMA4, NAMES, ("<|channel>thought\n", "<channel|>")))
        message = Message().add(parser.push(text[:cut])).add(parser.push(text[cut:])).add(parser.finish())
        assert told(message) == expected
    assert parse(text, GEMMA4, None).reasoning == ""


def test_gemma4_while_it_is_written() -> None:
    tags = ("<|channel>thought\n", "<channel|>")
    message = parse(f"<|channel>thought\nHm.\n<channel|>{GEMMA}", GEMMA4, tags)
    (call,) = message.calls
    assert (message.content, message.reasoning, call.name) == ("", "Hm.", "write")
    assert json.loads(call.arguments) == GEMMA_ARGUMENTS
    for cut in range(GEMMA.index("{") + 1, len(GEMMA)):  # what is told never changes, and is there at once
        (begun,) = parse(GEMMA[:cut], GEMMA4).calls
        assert call.arguments.startswith(begun.arguments)
        assert len(begun.arguments) > cut - GEMMA.index("{") - 30
    assert len(parse("<|tool_call>call:f{x:" + "[" * 5000, GEMMA4).calls[0].arguments) < 200


QUOTE = OF_GEMMA4.quote
DEEP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "when": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
        "Tags": {"type": "array", "items": {"enum": ["a", "b c", 3]}, "minItems": 1, "maxItems": 2},
        "tree": {"$ref": "#/$defs/node"},
        "any": {},
        "a:b": {"type": ["boolean", "number"]},
        "both": {"allOf": [{"$ref": "#/$defs/x"}, {"properties": {"y": {"const": {"k": [1]}}}, "required": ["y"]}]},
        "more": {"type": "object", "properties": {"z": {"type": "integer"}}, "additionalProperties": {"type": "null"}},
        "pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
    },
    "required": ["when"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"sub": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "additionalProperties": False,
        },
        "x": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}


def as_json(vocabulary: Tokenizer) -> Grammar:
    """What llguidance makes of the schema, whose properties it wants in their order."""
    properties = {name: DEEP["properties"][name] for name in sorted(DEEP["properties"], key=str.lower)}
    return Grammar.compile("json_schema", json.dumps({**DEEP, "properties": properties}), vocabulary)


@pytest.mark.parametrize(
    ("inner", "fits"),
    [
        ('when:<|"|>now<|"|>', True),
        ("when:null", True),
        ("", False),
        ("Tags:[3]", False),
        ('when:<|"|>for ever<|"|>', False),
        ('Tags:[3,<|"|>b c<|"|>],when:null', True),
        ("Tags:[],when:null", False),
        ("Tags:[3,3,3],when:null", False),
        ("when:null,Tags:[3]", False),  # the template sorts them
        ("tree:{sub:[{sub:[]},{}]},when:null", True),
        ("tree:{sub:[{sub:[1]}]},when:null", False),
        ('any:{x:[1,{y z:<|"|>é<|"|>}]},when:null', False),
        ('any:{x:[1,{y_z:<|"|>é }<<|"|>},true,null,-1e5]},when:null', True),
        ('<|"|>a:b<|"|>:true,when:null', True),
        ('<|"|>a:b<|"|>:1.5,any:1,when:null', True),
        ("both:{x:1,y:{k:[1]}},when:null", True),
        ("both:{x:1},when:null", False),
        ("both:{x:1,y:{k:[2]}},when:null", False),
        ("more:{z:1,other:null,else:null},when:null", True),
        ("more:{other:null},when:null", True),
        ("more:{z:null},when:null", False),
        ("more:{z:1,other:1},when:null", False),
        ('pair:[1,<|"|><|"|>],when:null', True),
        ("pair:[1],when:null", False),
        ('pair:[1,<|"|><|"|>,2],when:null', False),
        ("other:1,when:null", False),
    ],
)
def test_gemma4_dictionaries_that_fit_a_schema(vocabulary: Tokenizer, inner: str, fits: bool) -> None:
    made = call_grammar(GEMMA4, [{"name": "add", "parameters": DEEP}], required=True, parallel=False)
    text = f"<|tool_call>call:add{{{inner}}}<tool_call|>"
    assert accepts(Grammar.compile("lark", made.lark, vocabulary), text) == fits
    if fits:
        (call,) = parsed(GEMMA4, text).calls
        assert accepts(as_json(vocabulary), call.arguments)


def test_gemma4_texts_of_a_schema_fit_it(vocabulary: Tokenizer) -> None:
    short = {name: DEEP["properties"][name] for name in ("when", "Tags", "tree", "a:b", "both", "more")}
    schema = {**DEEP, "properties": short}
    made = call_grammar(GEMMA4, [{"name": "add", "parameters": schema}], required=True, parallel=True)
    grammar, fits = Grammar.compile("lark", made.lark, vocabulary), as_json(vocabulary)
    for seed in range(12):
        message = parsed(GEMMA4, text_of(grammar, seed, 20_000))
        assert (message.content, message.reasoning) == ("", "")
        for call in message.calls:
            assert accepts(fits, call.arguments), call.arguments


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"x": {"$ref": "#/$defs/none"}}},
        {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "object"}]}}, "$ref": "#/$defs/a"},
        {"properties": {"x": 3, "y": {"enum": 3, "type": 3}, "": {"allOf": 3}}},
        {"properties": {"x": {"type": "string", "minLength": 10**8}, "y": {"type": "array", "minItems": 1e300}}},
    ],
)
def test_gemma4_schemas_that_turn_in_circles(vocabulary: Tokenizer, parameters: dict[str, Any]) -> None:
    rules = ["start: f", *shared_rules(QUOTE), *argument_rules(parameters, "f", QUOTE)]
    assert accepts(Grammar.compile("lark", "\n".join(rules), vocabulary), "{}")


def test_gemma4_schemas_that_multiply_are_cut() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(60):
        schema = {"properties": {"x": schema}, "anyOf": [{"required": ["x"]}, {}]}
    assert len(argument_rules(schema, "f", QUOTE)) < 100_000


def test_null_may_be_written_as_the_template_does(vocabulary: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"x": {"type": ["integer", "null"]}, "y": {}}, "required": ["x", "y"]}
    made = call_grammar(GEMMA4, [{"name": "add", "parameters": schema}], required=True, parallel=False)
    grammar = Grammar.compile("lark", made.lark, vocabulary)
    for word, fits in (("None", True), ("null", True), ("nil", False)):
        text = f"<|tool_call>call:add{{x:{word},y:{word}}}<tool_call|>"
        assert accepts(grammar, text) == fits
        if fits:
            assert json.loads(parsed(GEMMA4, text).calls[0].arguments) == {"x": None, "y": None}

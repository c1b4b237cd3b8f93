"""Grammars of tool calls: random texts of one are valid calls, and valid calls match."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from logitless.models.chat.tool_calls.deltas import Message
from logitless.models.chat.tool_calls.families import (
    COMMAND_R,
    COMMAND_R_ACTION,
    DEEPSEEK,
    DEEPSEEK_V31,
    FUNCTIONARY,
    GENERIC,
    HERMES,
    KIMI_K3,
    LLAMA3,
    LLAMA4,
    MISTRAL,
    MISTRAL_NAMED,
    NEMOTRON,
    QWEN3_CODER,
    REASONING_OF,
)
from logitless.models.chat.tool_calls.free_text import TEXT, grammar_of, parameters
from logitless.models.chat.tool_calls.gemma import GEMMA4
from logitless.models.chat.tool_calls.grammar import answer_grammar, call_grammar
from logitless.models.chat.tool_calls.harmony import GPT_OSS, MUSE
from logitless.models.chat.tool_calls.parser import CallFormat, Parser, Style
from logitless.models.chat.tool_calls.probed.markers import JSON, PYTHON, TAGGED, Markers
from logitless.models.chat.tool_calls.probed.reader import call_format
from logitless.models.grammar import Grammar
from logitless.models.grammar.lark import lark_rules
from logitless.models.tokenizer import Tokenizer
from tests.helpers.grammars import accepts, text_of

THINK = ("<think>", "</think>")
ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/digit"}, "unit": {"enum": ["C", "F"]}},
        "required": ["a", "unit"],
        "additionalProperties": False,
        "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
    },
}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
FAMILIES = [
    HERMES, LLAMA3, LLAMA4, MISTRAL, MISTRAL_NAMED, GENERIC, GPT_OSS, DEEPSEEK, DEEPSEEK_V31, COMMAND_R,
    COMMAND_R_ACTION, QWEN3_CODER, NEMOTRON, GEMMA4, KIMI_K3, MUSE, FUNCTIONARY,
]  # fmt: skip
WRITTEN = {
    HERMES.name: '<tool_call>\n{"name": "add", "arguments": {"a": 1, "unit": "C"}}\n</tool_call>',
    LLAMA3.name: '{"name": "add", "parameters": {"a": 1, "unit": "C"}}',
    LLAMA4.name: '{"name": "add", "parameters": {"a": 1, "unit": "C"}}',
    MISTRAL.name: '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "unit": "C"}, "id": "abcdefghi"}]',
    MISTRAL_NAMED.name: '[TOOL_CALLS]add[ARGS]{"a": 1, "unit": "C"}',
    GPT_OSS.name: '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "unit": "C"}',
    DEEPSEEK.name: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "unit": "C"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    DEEPSEEK_V31.name: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
    '{"a": 1, "unit": "C"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    COMMAND_R_ACTION.name: 'Action: ```json\n[\n    {\n        "tool_name": "add",\n        "parameters": '
    '{"a": 1, "unit": "C"}\n    }\n]```',
    COMMAND_R.name: '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "add", "parameters": '
    '{"a": 1, "unit": "C"}}\n]<|END_ACTION|>',
    NEMOTRON.name: '<TOOLCALL>[{"name": "add", "arguments": {"a": 1, "unit": "C"}}]</TOOLCALL>',
    QWEN3_CODER.name: "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=unit>\n"
    '"C"\n</parameter>\n</function>\n</tool_call>',
    GEMMA4.name: '<|tool_call>call:add{a:1,unit:<|"|>C<|"|>}<tool_call|>',
    KIMI_K3.name: '<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|><|open|>argument key="a" type="number"'
    '<|sep|>1<|close|>argument<|sep|><|open|>argument key="unit" type="string"<|sep|>"C"<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>",
    MUSE.name: ' to=add<|message|><atem:function_calls>\n<atem:invoke name="add">\n<atem:parameter name="a">1'
    '</atem:parameter>\n<atem:parameter name="unit">"C"</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
    FUNCTIONARY.name: 'add\n{"a": 1, "unit": "C"}',
    GENERIC.name: '{"tool_call": {"name": "add", "arguments": {"a": 1, "unit": "C"}}}',
}


def parsed(calls: CallFormat, text: str, **style: Any) -> Message:
    parser = Parser(Style(calls, frozenset({"add", "now"}), **style))
    return Message().add(parser.push(text)).add(parser.finish())


@pytest.mark.parametrize("calls", FAMILIES, ids=lambda f: f.name)
@pytest.mark.parametrize("parallel", [False, True])
def test_every_text_is_calls_that_fit(vocabulary: Tokenizer, calls: CallFormat, parallel: bool) -> None:
    grammar = Grammar.compile(
        "lark", call_grammar(calls, [ADD, NOW], required=True, parallel=parallel).lark, vocabulary
    )
    names = set()
    for seed in range(12):
        message = parsed(calls, text_of(grammar, seed))
        assert (message.content, message.reasoning) == ("", "")
        assert len(message.calls) == 1 or parallel
        for call in message.calls:
            names.add(call.name)
            arguments = json.loads(call.arguments)
            if call.name == "now":
                assert arguments == {}
            else:
                assert set(arguments) == {"a", "unit"}
                assert arguments["a"] in range(10)
                assert arguments["unit"] in ("C", "F")
    assert names == {"add", "now"}


@pytest.mark.parametrize("calls", FAMILIES, ids=lambda f: f.name)
def test_numbers_of_a_forced_call_end_whatever_the_sampler(vocabulary: Tokenizer, calls: CallFormat) -> None:
    properties = {"a_unit": {"enum": ["C", "F"]}, "b": {"type": "integer"}, "c": {"type": "number"}}
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    functions = [{"name": "add", "parameters": parameters}]
    made = call_grammar(calls, functions, required=True, parallel=False)
    grammar = Grammar.compile("lark", made.lark, vocabulary)
    pieces = [vocabulary.piece(id) for id in range(vocabulary.n_vocab)]
    choose, matcher, text = random.Random(4), grammar.matcher(), b""
    while not matcher.can_end:
        ids = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")).tolist()
        digits = [id for id in ids if pieces[id].isdigit()]
        id = choose.choice(digits or ids)
        assert matcher.accept(id)
        text += pieces[id]
        assert len(text) < 1500, text
    (call,) = parsed(calls, text.decode()).calls
    arguments = json.loads(call.arguments)
    assert len(str(abs(arguments["b"]))) <= 18
    assert abs(arguments["c"]) < 1e119


REFERRING = {
    "type": "object",
    "properties": {
        "a": {"$ref": "#/properties/b"}, "b": {"type": "integer"}, "c": {"$ref": "#/components/schemas/C"},
        "d": {"type": "array", "items": {"$ref": "#/components/schemas/C"}},
    },
    "required": ["a", "c"],
    "components": {"schemas": {"C": {"properties": {"x": {"$ref": "#/$defs/X"}}}}},
    "$defs": {"X": {"enum": [1, 2]}},
}  # fmt: skip


@pytest.mark.parametrize("calls", FAMILIES, ids=lambda f: f.name)
def test_references_of_parameters_lead_anywhere(vocabulary: Tokenizer, calls: CallFormat) -> None:
    functions = [{"name": "add", "parameters": REFERRING}]
    made = call_grammar(calls, functions, required=True, parallel=False)
    Grammar.compile("lark", made.lark, vocabulary)
    if calls is QWEN3_CODER:
        text = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=c>\n%s\n</parameter>\n"
        grammar = Grammar.compile("lark", made.lark, vocabulary)
        for value, fits in (('{"x": 1}', True), ('{"x": 3}', False), ('{"x": 1, "y": 1}', False), ("1", False)):
            assert accepts(grammar, text % value + "</function>\n</tool_call>") == fits


@pytest.mark.parametrize("calls", FAMILIES, ids=lambda f: f.name)
def test_calls_as_models_write_them(vocabulary: Tokenizer, calls: CallFormat) -> None:
    for required in (True, False):
        made = call_grammar(calls, [ADD, NOW], required=required, parallel=False)
        grammar = Grammar.compile("lark", made.lark, vocabulary)
        text = WRITTEN[calls.name]
        assert accepts(grammar, text)
        assert parsed(calls, text).calls[0].arguments == '{"a": 1, "unit": "C"}'
        assert not accepts(grammar, text.replace('"C"', '"K"').replace(">C<", ">K<"))
        assert not accepts(grammar, text.replace("add", "sub"))
        assert made.lazy == (not required and calls is not GENERIC)
        assert bool(made.words or made.patterns) == made.lazy
    said = '{"response": "Hi \\"you\\""}'
    assert accepts(grammar, said) == (calls is GENERIC)


SUM = """start: number (("+" | "-") number)* LF?
number: /[0-9]+/ | "(" "\\"" "é" "\\\\" ")"
%import common.LF
"""
NESTED = 'start: "(" start ")" | "[\\n\\"x\\"]"'
PROBED = [
    call_format(Markers(TAGGED, "<call>", ">\n", "</call>", key_begin="<k>", key_end="</k><v>", value_end="</v>")),
    call_format(Markers(PYTHON, "[", "(", "]")),
    call_format(Markers(JSON, "", ', "arguments": ', "", "<calls>[", "]", ", ", '{"name": ', "}")),
]


@pytest.mark.parametrize("calls", [*FAMILIES, *PROBED], ids=lambda f: f.name)
@pytest.mark.parametrize("source", [SUM, NESTED])
def test_texts_of_custom_tools_match_their_grammar(vocabulary: Tokenizer, calls: CallFormat, source: str) -> None:
    """In every family, written by chance: with recursion and without."""
    text = grammar_of("lark", source)
    tool = {"name": "add", "parameters": parameters(), TEXT: text}
    made = call_grammar(calls, [tool, NOW], required=True, parallel=False)
    grammar = Grammar.compile("lark", made.lark, vocabulary)
    fits = Grammar.compile("lark", "\n".join(lark_rules(text)), vocabulary)
    style = {"custom": frozenset({"add"}), "texts": frozenset({("add", "input")})}
    n_custom = 0
    for seed in range(8):
        (call,) = parsed(calls, text_of(grammar, seed), **style).calls
        assert call.custom == (call.name == "add")
        n_custom += call.custom
        assert json.loads(call.arguments) == {} if call.name == "now" else accepts(fits, call.arguments), call
    assert n_custom


def test_mistral_may_write_the_id_of_a_call(vocabulary: Tokenizer) -> None:
    """Small 3.2's template does, Devstral's does not; the id is the one that results name."""
    text = '[TOOL_CALLS]add[CALL_ID]ab3DE67h9[ARGS]{"a": 1, "unit": "C"}'
    made = call_grammar(MISTRAL_NAMED, [ADD], required=True, parallel=True)
    grammar = Grammar.compile("lark", made.lark, vocabulary)
    for written, fits in (
        (text, True), (text + text, True), (text.replace("[CALL_ID]ab3DE67h9", ""), True),
        (text.replace("h9", ""), False), (text.replace("3D", "_-"), False), (text.replace("[ARGS]", ""), False),
    ):  # fmt: skip
        matcher = grammar.matcher()
        assert (matcher.accept_bytes(written.encode()) and matcher.can_end) == fits, written
    parser = Parser(Style(MISTRAL_NAMED, frozenset({"add"})))
    message = Message().add(parser.push(text * 2 + text.replace("ab3DE67h9", "short"))).add(parser.finish())
    ids = [call.id for call in message.calls]
    assert ids[0] == "ab3DE67h9"
    assert len(set(ids)) == 3
    assert all(len(id) == 9 and id.isalnum() for id in ids)  # the template refuses others


def test_reasoning_may_come_before_a_required_call(vocabulary: Tokenizer) -> None:
    text = f"<think>\nadd? </thin <tool_call> <\n</think>\n\n{WRITTEN[HERMES.name]}"
    for thinking, given in ((False, text), (True, text.removeprefix("<think>")), (False, WRITTEN[HERMES.name])):
        made = call_grammar(HERMES, [ADD], required=True, parallel=False, reasoning=THINK, thinking=thinking)
        grammar = Grammar.compile("lark", made.lark, vocabulary)
        assert accepts(grammar, given)
        assert not accepts(grammar, f"Hm. {given}") or thinking
    message = parsed(HERMES, text, reasoning=THINK)
    assert message.reasoning == "add? </thin <tool_call> <"
    assert len(message.calls) == 1


def test_reasoning_that_a_call_would_end_has_none_before_a_required_call(vocabulary: Tokenizer) -> None:
    made = call_grammar(QWEN3_CODER, [ADD], required=True, parallel=False, reasoning=THINK, thinking=True)
    grammar = Grammar.compile("lark", made.lark, vocabulary)
    call = WRITTEN[QWEN3_CODER.name]
    assert accepts(grammar, f"add? </thin <tool_ <\n</think>\n\n{call}")
    assert not accepts(grammar, f"add? {call}\n</think>\n\n{call}")


def test_parameters_that_are_texts_are_written_without_quotes(vocabulary: Tokenizer) -> None:
    properties = {"path": {"type": "string"}, "mode": {"type": "string", "enum": ["r", "w"]}, "n": {"type": "integer"}}
    tool = {"name": "f", "parameters": {"type": "object", "properties": properties, "required": ["path", "mode"]}}
    texts = frozenset({("f", "path"), ("f", "mode")})
    made = call_grammar(QWEN3_CODER, [tool], required=True, parallel=False)
    grammar = Grammar.compile("lark", made.lark, vocabulary)
    text = '<tool_call>\n<function=f>\n<parameter=path>\na "b"\n<x>\n</parameter>\n<parameter=mode>\n%s\n</parameter>\n'
    for mode, allowed in (("r", True), ("x", False)):
        assert accepts(grammar, text % mode + "</function>\n</tool_call>") == allowed
    assert not accepts(grammar, "<tool_call>\n<function=f>\n</function>\n</tool_call>")
    number = "<parameter=n>\n%s\n</parameter>\n</function>\n</tool_call>"
    assert accepts(grammar, text % "w" + number % "12")
    assert not accepts(grammar, text % "w" + number % "a")
    (call,) = parsed(QWEN3_CODER, text % "w" + number % "12", texts=texts).calls
    assert json.loads(call.arguments) == {"path": 'a "b"\n<x>', "mode": "w", "n": 12}


@pytest.mark.parametrize("wrong", [3, "x", [1], None])
def test_schemas_that_are_none(vocabulary: Tokenizer, wrong: Any) -> None:
    tool = {"name": "f", "parameters": {"properties": wrong, "required": wrong}}
    made = call_grammar(QWEN3_CODER, [tool], required=True, parallel=False)
    assert accepts(
        Grammar.compile("lark", made.lark, vocabulary), "<tool_call>\n<function=f>\n</function>\n</tool_call>"
    )


def test_an_answer_between_its_marks(vocabulary: Tokenizer) -> None:
    reasoning = ("<|channel|>analysis<|message|>", "<|end|>")
    for calls, tags, text in (
        (GPT_OSS, None, "<|channel|>final<|message|>12"),
        (GPT_OSS, reasoning, "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>12"),
        (COMMAND_R, None, "<|START_RESPONSE|>12<|END_RESPONSE|>"),
        (
            KIMI_K3,
            REASONING_OF[KIMI_K3.name],
            "<|open|>think<|sep|>Hm<|close|>think<|sep|><|open|>response<|sep|>12<|close|>response<|sep|>",
        ),
        (MUSE, REASONING_OF[MUSE.name], " to=self<|message|>Hm<|eom|><|start|>assistant to=user<|message|>12"),
        (FUNCTIONARY, None, "all\n12"),
        (HERMES, THINK, "<think>Hm</think>\n12"),
    ):
        made = answer_grammar(calls, '%json {"type": "integer"}', tags, False)
        grammar = Grammar.compile("lark", made.lark, vocabulary)
        assert accepts(grammar, text)
        assert not accepts(grammar, text.replace("12", "x"))
        style = Style(calls, reasoning=tags)
        parser = Parser(style)
        message = Message().add(parser.push(text)).add(parser.finish())
        assert (message.content, message.reasoning) == ("12", "Hm" if tags else "")


def test_triggers() -> None:
    re2 = pytest.importorskip("re2")
    options = re2.Options()
    options.dot_nl = True

    def begins(calls: CallFormat, text: str, **how: Any) -> int:
        made = call_grammar(calls, [ADD], required=False, parallel=True, **how)
        result = [text.find(word) for word in made.words]
        result += [match.start(1) for p in made.patterns if (match := re2.compile(p, options).search(text))]
        return min((place for place in result if place >= 0), default=-1)

    assert begins(HERMES, "I will. <tool_call>") == 8
    assert begins(MISTRAL, "[TOOL_CALLS]") == 0
    assert begins(LLAMA3, ' {"name": "add"') == 1
    assert begins(GPT_OSS, "<|channel|>commentary to=functions.add") == 0
    assert begins(GPT_OSS, "<|channel|>commentary<|message|>Hm") == -1
    assert begins(DEEPSEEK, "Hm. <｜tool▁calls▁begin｜>") == 4
    assert begins(COMMAND_R, "<|START_ACTION|>") == 0
    assert begins(GEMMA4, "Hm. <|tool_call>call:") == 4
    assert begins(QWEN3_CODER, "<tool_call>") == -1
    assert begins(QWEN3_CODER, "<tool_call>\n<function=") == 0
    assert begins(KIMI_K3, "Hm<|open|>response<|sep|>x<|open|>tools<|sep|>") == 26
    assert begins(MUSE, " to=self<|message|>Hm<|eom|><|start|>assistant to=add<|message|>") == 46
    assert begins(FUNCTIONARY, "add\n{") == 0
    assert begins(FUNCTIONARY, "all\nadd\n>>>add\n") == 11
    assert begins(LLAMA3, '<|python_tag|>{"name": "add"') == 14
    assert begins(LLAMA4, '<|python_start|>{"name": "add"') == 16
    assert begins(LLAMA3, '{"name": "Bob"') == begins(LLAMA3, 'So {"name": "add"') == -1
    for text, place in (
        ("<think> <tool_call>", -1),
        ("<think> <tool_call> </think> x <tool_call>", 31),
        ("\n<tool_call>", 1),
        ("ab <tool_call>", 3),
    ):
        assert begins(HERMES, text, reasoning=THINK) == place
    assert begins(HERMES, "hm <tool_call> </think><tool_call>", reasoning=THINK, thinking=True) == 23
    assert begins(QWEN3_CODER, "hm <tool_call>\n<function=", reasoning=THINK, thinking=True) == 3

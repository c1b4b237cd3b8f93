"""What a grammar of tool calls lets through: random texts of it are calls that fit, and calls that fit pass."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import tokenizer as tokenizers
from models.gguf_file import GGUFFile
from models.grammar import Grammar
from models.tokenizer import Tokenizer
from models.tool_calls import GENERIC, HERMES, LLAMA3, MISTRAL, CallFormat, Message, Parser, Style
from models.tool_calls.families import MISTRAL_NAMED
from models.tool_calls.grammar import call_grammar

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
FAMILIES = [HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, GENERIC]
WRITTEN = {
    HERMES.name: '<tool_call>\n{"name": "add", "arguments": {"a": 1, "unit": "C"}}\n</tool_call>',
    LLAMA3.name: '{"name": "add", "parameters": {"a": 1, "unit": "C"}}',
    MISTRAL.name: '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "unit": "C"}, "id": "abcdefghi"}]',
    MISTRAL_NAMED.name: '[TOOL_CALLS]add[ARGS]{"a": 1, "unit": "C"}',
    GENERIC.name: '{"tool_call": {"name": "add", "arguments": {"a": 1, "unit": "C"}}}',
}


@pytest.fixture(scope="module")
def vocabulary(shared_data: Path) -> Tokenizer:
    with GGUFFile.open(shared_data / "models" / "stories260K.gguf") as gguf:
        return tokenizers.from_metadata(gguf.metadata)


def written(grammar: Grammar, seed: int, most: int = 4000) -> str:
    """A random text of a grammar, which ends as soon as it may."""
    choose, matcher, text = random.Random(seed), grammar.matcher(), b""
    for _ in range(most):
        if matcher.can_end:
            return text.decode()
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
        id = choose.choice(np.flatnonzero(bits).tolist())
        assert matcher.accept(id)
        text += grammar.tokenizer.piece(id)
    raise AssertionError(f"no end: {text!r}")


def allows(grammar: Grammar, text: str) -> bool:
    matcher = grammar.matcher()
    return matcher.accept_bytes(text.encode()) and matcher.can_end


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
        message = parsed(calls, written(grammar, seed))
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
def test_calls_as_models_write_them(vocabulary: Tokenizer, calls: CallFormat) -> None:
    for required in (True, False):
        made = call_grammar(calls, [ADD, NOW], required=required, parallel=False)
        grammar = Grammar.compile("lark", made.lark, vocabulary)
        text = WRITTEN[calls.name]
        assert allows(grammar, text)
        assert parsed(calls, text).calls[0].arguments == '{"a": 1, "unit": "C"}'
        assert not allows(grammar, text.replace('"C"', '"K"'))
        assert not allows(grammar, text.replace("add", "sub"))
        assert made.lazy == (not required and calls is not GENERIC)
        assert bool(made.words or made.patterns) == made.lazy
    said = '{"response": "Hi \\"you\\""}'
    assert allows(grammar, said) == (calls is GENERIC)


def test_reasoning_may_come_before_a_required_call(vocabulary: Tokenizer) -> None:
    text = f"<think>\nadd? </thin <tool_call> <\n</think>\n\n{WRITTEN[HERMES.name]}"
    for thinking, given in ((False, text), (True, text.removeprefix("<think>")), (False, WRITTEN[HERMES.name])):
        made = call_grammar(HERMES, [ADD], required=True, parallel=False, reasoning=THINK, thinking=thinking)
        grammar = Grammar.compile("lark", made.lark, vocabulary)
        assert allows(grammar, given)
        assert not allows(grammar, f"Hm. {given}") or thinking
    message = parsed(HERMES, text, reasoning=THINK)
    assert message.reasoning == "add? </thin <tool_call> <"
    assert len(message.calls) == 1


def test_triggers() -> None:
    re2 = pytest.importorskip("re2")
    options = re2.Options()
    options.dot_nl = True

    def begins(calls: CallFormat, text: str, **how: Any) -> int:
        made = call_grammar(calls, [ADD], required=False, parallel=True, **how)
        found = [text.find(word) for word in made.words]
        found += [match.start(1) for p in made.patterns if (match := re2.compile(p, options).search(text))]
        return min((place for place in found if place >= 0), default=-1)

    assert begins(HERMES, "I will. <tool_call>") == 8
    assert begins(MISTRAL, "[TOOL_CALLS]") == 0
    assert begins(LLAMA3, ' {"name": "add"') == 1
    assert begins(LLAMA3, '<|python_tag|>{"name": "add"') == 14
    assert begins(LLAMA3, '{"name": "Bob"') == begins(LLAMA3, 'So {"name": "add"') == -1
    for text, place in (
        ("<think> <tool_call>", -1),
        ("<think> <tool_call> </think> x <tool_call>", 31),
        ("\n<tool_call>", 1),
        ("ab <tool_call>", 3),
    ):
        assert begins(HERMES, text, reasoning=THINK) == place
    assert begins(HERMES, "hm <tool_call> </think><tool_call>", reasoning=THINK, thinking=True) == 23

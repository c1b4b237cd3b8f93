"""Grammars of tool calls: a family's syntax, with arguments that match the tools' schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from logitless.models.chat.tool_calls.families import COMMAND_R_ACTION, FUNCTIONARY, GENERIC, LLAMA3, LLAMA4
from logitless.models.chat.tool_calls.free_text import INPUT, TEXT, json_string
from logitless.models.chat.tool_calls.gemma import FUNCTION_GEMMA, GEMMA4, OF_FUNCTION_GEMMA, OF_GEMMA4, Marks
from logitless.models.chat.tool_calls.gemma_schema import argument_rules, shared_rules
from logitless.models.chat.tool_calls.harmony import ATEM, GPT_OSS, MUSE
from logitless.models.chat.tool_calls.parser import CallFormat
from logitless.models.chat.tool_calls.probed.grammar import rules_of_calls, syntax_rule
from logitless.models.chat.tool_calls.probed.markers import ID, JSON, TAGGED, Markers
from logitless.models.grammar import in_regex, json_rule, quoted
from logitless.models.grammar.json_schema.prepare import object_schema
from logitless.models.grammar.lark import lark_rules

Function = Mapping[str, Any]
_ONE = Markers(JSON, "", ', "arguments": ', "", '{"tool_call": ', "}", "", '{"name": ', "}")
_MANY = replace(_ONE, section='{"tool_calls": [', section_end="]}", separator=", ")
_TO_FUNCTION = "<|channel|>commentary to=functions."
_BLANK = r"W: /( |\n[ \t]{0,8})/"


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """A Lark grammar. Lazy: it begins with the first of these words in the text, or with the group of a pattern."""

    lark: str
    lazy: bool = False
    words: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()


def call_grammar(
    calls: CallFormat,
    functions: Sequence[Function],
    *,
    required: bool,
    parallel: bool,
    reasoning: tuple[str, str] | None = None,
    thinking: bool = False,
    answer: str = "",
) -> CallGrammar:
    """The grammar of answers that call these functions (OpenAI's `function` objects; custom
    tools have the grammar of their text as TEXT).

    Unless a call is `required`, the grammar begins where a call begins. `reasoning`: tags of
    reasoning that may come first; `thinking`: the prompt has opened it. `answer`: Lark of an answer
    without calls."""
    rules = [_BLANK]
    for i, function in enumerate(functions):
        strict, text = function.get("strict") is True, function.get(TEXT)
        if text is None:
            schema = object_schema(function.get("parameters"), strict=strict)
            rules.append(f"args_{i}: {json_rule(schema, strict=strict)}")
        else:
            rules += [f'args_{i}: "{{" W? {quoted(json.dumps(INPUT) + ":")} W? string_{i} W? "}}"']
            rules += json_string(text, f"string_{i}")
    if (by_hand := _BODIES.get(calls.name)) is not None:
        rules += by_hand(functions, parallel, required or bool(answer))
    else:
        assert calls.markers is not None
        rules += rules_of_calls(calls.markers, functions, parallel, calls.restart, calls.id_letters)
    if answer and not required:
        rules += _answer(answer, calls)
    elif not required and calls is not GENERIC:
        return CallGrammar("\n".join([*rules, "start: calls"]), True, *_triggers(calls, functions, reasoning, thinking))
    starts = ["calls", "answer"] if answer and not required else ["calls"]
    return CallGrammar("\n".join([*rules, *_start(starts, reasoning, thinking, calls.ends_reasoning)]))


def answer_grammar(calls: CallFormat, answer: str, reasoning: tuple[str, str] | None, thinking: bool) -> CallGrammar:
    """The grammar of an answer without calls, after optional reasoning."""
    starts = _start(["answer"], reasoning, thinking, calls.ends_reasoning)
    return CallGrammar("\n".join([*_answer(answer, calls), *starts]))


def _answer(answer: str, calls: CallFormat) -> list[str]:
    before, after = (f" {quoted(text)} " if text else "" for text in calls.around or ("", ""))
    again = f"{quoted(calls.restart)}?" if calls.restart else ""
    return [f"answer: {again}{before}said_{after}", f"said_: {answer}"] if calls.around else [f"answer: {answer}"]


def _start(
    rules: list[str], reasoning: tuple[str, str] | None, thinking: bool, ends: tuple[str, ...] = ()
) -> list[str]:
    """One of these rules, after reasoning. Blanks may come after reasoning, and before calls.

    `ends`: texts that would end the reasoning as well, which it cannot have here."""
    if reasoning is None:
        return [f"start: {' | '.join(rules)}"]
    opening, closing = reasoning
    blanks, thought = "/[ \\n]{0,4}/", "rest" if thinking else f"{quoted(opening)} rest"
    starts = [f"{thought} {blanks} {rule}" for rule in rules]
    if not thinking:
        starts += [f"{blanks} {rule}" if rule == "calls" else rule for rule in rules]
    without = "".join(f" & ~/(?s:.*){in_regex(end)}(?s:.*)/" for end in ends)
    return [f"rest[lazy]: /(?s:.*){in_regex(closing)}/{without}", f"start: {' | '.join(starts)}"]


def _generic(functions: Sequence[Function], parallel: bool, required: bool) -> list[str]:
    rules = rules_of_calls(_MANY if parallel else _ONE, functions, parallel)
    if required:
        return rules
    response = f'said: "{{" W? "\\"response\\":" W? {json_rule({"type": "string"})} W? "}}"'
    return [
        *(rule.replace("calls:", "calls: said |", 1) if rule.startswith("calls:") else rule for rule in rules),
        response,
    ]


def _gpt_oss(functions: Sequence[Function], parallel: bool, required: bool) -> list[str]:
    of_tools = [
        f"{quoted(_TO_FUNCTION + f['name'] + ' ')} ({quoted('<|constrain|>')})? {quoted('json<|message|>')} args_{i}"
        for i, f in enumerate(functions)
    ]
    return [f"calls: {quoted('<|start|>assistant')}? ({' | '.join(of_tools)})"]


def _muse(functions: Sequence[Function], parallel: bool, required: bool) -> list[str]:
    rules = rules_of_calls(ATEM, functions, False)[:-2]
    first, last, again = syntax_rule(ATEM.section + ATEM.begin), syntax_rule(ATEM.section_end), quoted(MUSE.restart)
    of_tools = [f"{quoted(_addressed(f))} {first} call_{i} {last}" for i, f in enumerate(functions)]
    more = f" ({quoted('<|eom|>')} {again} call)*" if parallel else ""
    return [*rules, f"calls: {again}? call{more}", f"call: {' | '.join(of_tools)}"]


def _addressed(function: Function) -> str:
    return f" to={function['name']}<|message|>"


def _gemma(marks: Marks, functions: Sequence[Function], parallel: bool, required: bool) -> list[str]:
    rules, of_tools, quote = [*shared_rules(marks.quote)], list[str](), marks.quote
    for i, function in enumerate(functions):
        if (text := function.get(TEXT)) is None:
            rules += argument_rules(object_schema(function.get("parameters")), f"given_{i}", quote)
        else:
            rules.append(f"given_{i}: {quoted('{' + INPUT + ':' + quote)} text_{i} {quoted('}')}")
            rules += lark_rules(text, f"text_{i}", end=quote)
        of_tools.append(f"{quoted(f'{marks.begin}call:' + function['name'])} given_{i} {quoted(marks.end)}")
    return [*rules, f"calls: call{'+' if parallel else ''}", f"call: {' | '.join(of_tools)}"]


_BODIES: Mapping[str, Callable[[Sequence[Function], bool, bool], list[str]]] = {
    GPT_OSS.name: _gpt_oss,
    MUSE.name: _muse,
    GEMMA4.name: partial(_gemma, OF_GEMMA4),
    FUNCTION_GEMMA.name: partial(_gemma, OF_FUNCTION_GEMMA),
    GENERIC.name: _generic,
}


_WORDS = {GPT_OSS.name: _TO_FUNCTION, COMMAND_R_ACTION.name: COMMAND_R_ACTION.triggers[0]}


def _triggers(
    calls: CallFormat, functions: Sequence[Function], reasoning: tuple[str, str] | None, thinking: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Words and patterns that begin a call outside of reasoning."""
    names, m = "|".join(in_regex(f["name"]) for f in functions), calls.markers
    if calls is MUSE:
        return tuple(map(_addressed, functions)), ()
    if calls is FUNCTIONARY:
        return (), (rf"^\s*((?:{names})\n)", rf">>>((?:{names})\n)")
    if calls in (LLAMA3, LLAMA4):
        tags = "|".join(map(in_regex, calls.preserved))
        return (), (rf'^\s*(?:{tags})*(\{{ ?"name": ?"(?:{names})")',)
    word = _WORDS.get(calls.name) or (m.trigger if m is not None else calls.triggers[0])
    if m is not None and m.style == TAGGED and not m.section and ID not in m.begin:
        word = m.begin.rstrip()
    if not word:
        return (), (rf"^\s*({in_regex(calls.opening[0])})",)
    if reasoning is None or calls.ends_reasoning:
        return (word,), ()
    opening, closing = (in_regex(tag) for tag in reasoning)
    begin = f"({in_regex(word)})"
    if thinking:
        return (), (f"{closing}.*?{begin}",)
    return (), (rf"^\s*{begin}", rf"^\s*[^<\[\s].*?{begin}", rf"^\s*{opening}.*?{closing}.*?{begin}")

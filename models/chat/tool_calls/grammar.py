"""Grammars of tool calls: a family's syntax, with arguments that match the tools' schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from logitless.models.chat.tool_calls.families import GENERIC, HERMES, LLAMA3, LLAMA4, MISTRAL, MISTRAL_NAMED, NEMOTRON
from logitless.models.chat.tool_calls.framed import (
    ATEM,
    COMMAND_R,
    COMMAND_R_ACTION,
    DEEPSEEK,
    DEEPSEEK_V31,
    FUNCTIONARY,
    GPT_OSS,
    MUSE,
)
from logitless.models.chat.tool_calls.free_text import INPUT, TEXT, json_string
from logitless.models.chat.tool_calls.gemma import FUNCTION_GEMMA, GEMMA4, OF_FUNCTION_GEMMA, OF_GEMMA4, Marks
from logitless.models.chat.tool_calls.gemma_schema import argument_rules, shared_rules
from logitless.models.chat.tool_calls.parser import CallFormat
from logitless.models.chat.tool_calls.probed.grammar import rules_of_calls, syntax_rule, tagged_rules
from logitless.models.chat.tool_calls.probed.python_schema import any_rules
from logitless.models.chat.tool_calls.tagged import QWEN3_CODER
from logitless.models.grammar import in_regex, json_rule, quoted
from logitless.models.grammar.json_schema import object_schema, parameters_of
from logitless.models.grammar.lark import lark_rules

Function = Mapping[str, Any]
_PARAMETER_END = "\n</parameter>\n"
_BLANK = r"W: /( |\n[ \t]{0,8})/"


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """A Lark grammar. Lazy: it begins with the first of these words in the text, or with the group
    of a pattern."""

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
    without calls.
    """
    rules = [_BLANK, f"obj: {' | '.join(f'obj_{i}' for i in range(len(functions)))}"]
    key = "parameters" if calls in (LLAMA3, LLAMA4, COMMAND_R_ACTION) or calls.name == COMMAND_R.name else "arguments"
    for i, function in enumerate(functions):
        strict, text = function.get("strict") is True, function.get(TEXT)
        schema = object_schema(function.get("parameters"), strict=strict)
        if text is None:
            rules.append(f"args_{i}: {json_rule(schema, strict=strict)}")
        else:
            rules += [f'args_{i}: "{{" W? {quoted(json.dumps(INPUT) + ":")} W? string_{i} W? "}}"']
            rules += json_string(text, f"string_{i}")
        named = quoted(json.dumps(function["name"], ensure_ascii=False))
        tail = ' W? "," W? "\\"id\\":" W? /"[a-zA-Z0-9]{9}"/' if calls is MISTRAL else ""
        name = '"\\"name\\":"'
        if calls.name == COMMAND_R.name:
            name = '"\\"tool_call_id\\":" W? /"[0-9]{1,3}"/ "," W? "\\"tool_name\\":"'
        elif calls is COMMAND_R_ACTION:
            name = '"\\"tool_name\\":"'
        head = f'"{{" W? {name} W? {named} "," W? {quoted(json.dumps(key) + ":")}'
        rules.append(f'obj_{i}: {head} W? args_{i}{tail} W? "}}"')
    if calls.markers is not None:
        body, word = rules_of_calls(calls.markers, functions, parallel, calls.restart)
    else:
        body, word = _BODIES[calls.name](functions, parallel, required or bool(answer))
    rules += body
    if answer and not required:
        rules += _answer(answer, calls)
    elif not required and calls is not GENERIC:
        return CallGrammar(
            "\n".join([*rules, "start: calls"]), True, *_triggers(calls, functions, word, reasoning, thinking)
        )
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


def _hermes(functions: Sequence[Function], parallel: bool, required: bool) -> tuple[list[str], str]:
    more = " (W? call)*" if parallel else ""
    return [f"calls: call{more}", 'call: "<tool_call>" W? obj W? "</tool_call>"'], "<tool_call>"


def _llama3(functions: Sequence[Function], parallel: bool, required: bool) -> tuple[list[str], str]:
    return ['calls: obj (W? ";" W? obj)*' if parallel else "calls: obj"], ""


def _mistral(functions: Sequence[Function], parallel: bool, required: bool) -> tuple[list[str], str]:
    more = ' (W? "," W? obj)*' if parallel else ""
    return [f'calls: "[TOOL_CALLS]" W? "[" W? obj{more} W? "]"'], "[TOOL_CALLS]"


def _nemotron(functions: Sequence[Function], parallel: bool, required: bool) -> tuple[list[str], str]:
    more = ' (W? "," W? obj)*' if parallel else ""
    return [f'calls: "<TOOLCALL>" W? "[" W? obj{more} W? "]" W? "</TOOLCALL>"'], "<TOOLCALL>"


def _mistral_named(functions: Sequence[Function], parallel: bool, required: bool) -> tuple[list[str], str]:
    id = f"({quoted('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)?"  # Mistral Small 3.2 writes one
    of_tools = [
        f"{quoted('[TOOL_CALLS]' + f['name'])} {id} {quoted('[ARGS]')} args_{i}" for i, f in enumerate(functions)
    ]
    return [f"calls: call{'+' if parallel else ''}", f"call: {' | '.join(of_tools)}"], "[TOOL_CALLS]"


def _generic(functions: Sequence[Function], parallel: bool, required: bool) -> tuple[list[str], str]:
    one = '"{" W? "\\"tool_call\\":" W? obj W? "}"'
    many = '"{" W? "\\"tool_calls\\":" W? "[" W? obj (W? "," W? obj)* W? "]" W? "}"'
    response = f'"{{" W? "\\"response\\":" W? {json_rule({"type": "string"})} W? "}}"'
    return [
        "calls: " + " | ".join([many if parallel else one, *([] if required else ["said"])]),
        f"said: {response}",
    ], ""


def _gpt_oss(functions: Sequence[Function], parallel: bool, required: bool) -> tuple[list[str], str]:
    begin = "<|channel|>commentary to=functions."
    of_tools = [
        f"{quoted(begin + f['name'] + ' ')} ({quoted('<|constrain|>')})? {quoted('json<|message|>')} args_{i}"
        for i, f in enumerate(functions)
    ]
    return [f"calls: {quoted('<|start|>assistant')}? ({' | '.join(of_tools)})"], begin


def _muse(functions: Sequence[Function], parallel: bool, required: bool) -> tuple[list[str], str]:
    rules = rules_of_calls(ATEM, functions, False)[0][:-2]
    first, last, again = syntax_rule(ATEM.section + ATEM.begin), syntax_rule(ATEM.section_end), quoted(MUSE.restart)
    of_tools = [f"{quoted(_addressed(f))} {first} call_{i} {last}" for i, f in enumerate(functions)]
    more = f" ({quoted('<|eom|>')} {again} call)*" if parallel else ""
    return [*rules, f"calls: {again}? call{more}", f"call: {' | '.join(of_tools)}"], "to="


def _addressed(function: Function) -> str:
    return f" to={function['name']}<|message|>"


def _functionary(functions: Sequence[Function], parallel: bool, required: bool) -> tuple[list[str], str]:
    of_tools = [f"{quoted(f['name'] + chr(10))} args_{i}" for i, f in enumerate(functions)]
    more = ' (">>>" call)*' if parallel else ""
    return [f"calls: call{more}", f"call: {' | '.join(of_tools)}"], ">>>"


def _deepseek(functions: Sequence[Function], parallel: bool, required: bool) -> tuple[list[str], str]:
    begin, end = quoted("<｜tool▁call▁begin｜>"), quoted("<｜tool▁call▁end｜>")
    of_tools = [
        f"{begin} {quoted('function<｜tool▁sep｜>' + f['name'] + chr(10) + '```json' + chr(10))} args_{i} "
        f"{quoted(chr(10) + '```')} {end}"
        for i, f in enumerate(functions)
    ]
    return _deepseek_calls(of_tools, parallel)


def _deepseek_v31(functions: Sequence[Function], parallel: bool, required: bool) -> tuple[list[str], str]:
    begin, end = quoted("<｜tool▁call▁begin｜>"), quoted("<｜tool▁call▁end｜>")
    return _deepseek_calls(
        [f"{begin} {quoted(f['name'] + '<｜tool▁sep｜>')} args_{i} {end}" for i, f in enumerate(functions)], parallel
    )


def _deepseek_calls(of_tools: Sequence[str], parallel: bool) -> tuple[list[str], str]:
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    more = " (W? call)*" if parallel else ""
    return [f"calls: {quoted(begin)} call{more} {quoted(end)}", f"call: {' | '.join(of_tools)}"], begin


def _command_r(functions: Sequence[Function], parallel: bool, required: bool) -> tuple[list[str], str]:
    begin, end = "<|START_ACTION|>", "<|END_ACTION|>"
    more = ' (W? "," W? obj)*' if parallel else ""
    return [f'calls: {quoted(begin)} W? "[" W? obj{more} W? "]" W? {quoted(end)}'], begin


def _command_r_action(functions: Sequence[Function], parallel: bool, required: bool) -> tuple[list[str], str]:
    more = ' (W? "," W? obj)*' if parallel else ""
    return [f'calls: "Action:" W? "```json" W? "[" W? obj{more} W? "]" W? "```"'], "Action:"


def _qwen3_coder(functions: Sequence[Function], parallel: bool, required: bool) -> tuple[list[str], str]:
    rules = [
        f"calls: call{' (W? call)*' if parallel else ''}",
        f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}",
        "text[lazy]: /(?s:.*)\\n<\\/parameter>\\n/",
        *any_rules(),
    ]
    for i, function in enumerate(functions):
        schema, properties, names_required = parameters_of(function)
        parts = [f'"<tool_call>\\n" {quoted("<function=" + function["name"] + ">" + chr(10))}']
        for k, (name, inner) in enumerate(properties.items()):
            rules += tagged_rules(function, f"value_{i}_{k}", inner, schema, _PARAMETER_END)
            parameter = f"{quoted('<parameter=' + name + '>' + chr(10))} value_{i}_{k}"
            parts.append(parameter if name in names_required else f"({parameter})?")
        rules.append(f'call_{i}: {" ".join(parts)} "</function>\\n</tool_call>"')
    return rules, "<tool_call>\n<function="


def _gemma(marks: Marks, functions: Sequence[Function], parallel: bool, required: bool) -> tuple[list[str], str]:
    rules, of_tools, quote = [*shared_rules(marks.quote)], list[str](), marks.quote
    for i, function in enumerate(functions):
        if (text := function.get(TEXT)) is None:
            rules += argument_rules(object_schema(function.get("parameters")), f"given_{i}", quote)
        else:
            rules.append(f"given_{i}: {quoted('{' + INPUT + ':' + quote)} text_{i} {quoted('}')}")
            rules += lark_rules(text, f"text_{i}", end=quote)
        of_tools.append(f"{quoted(f'{marks.begin}call:' + function['name'])} given_{i} {quoted(marks.end)}")
    return [*rules, f"calls: call{'+' if parallel else ''}", f"call: {' | '.join(of_tools)}"], marks.begin


_BODIES: Mapping[str, Callable[[Sequence[Function], bool, bool], tuple[list[str], str]]] = {
    GPT_OSS.name: _gpt_oss,
    MUSE.name: _muse,
    FUNCTIONARY.name: _functionary,
    DEEPSEEK.name: _deepseek,
    DEEPSEEK_V31.name: _deepseek_v31,
    COMMAND_R.name: _command_r,
    COMMAND_R_ACTION.name: _command_r_action,
    QWEN3_CODER.name: _qwen3_coder,
    GEMMA4.name: partial(_gemma, OF_GEMMA4),
    FUNCTION_GEMMA.name: partial(_gemma, OF_FUNCTION_GEMMA),
    HERMES.name: _hermes,
    LLAMA3.name: _llama3,
    LLAMA4.name: _llama3,
    MISTRAL.name: _mistral,
    MISTRAL_NAMED.name: _mistral_named,
    NEMOTRON.name: _nemotron,
    GENERIC.name: _generic,
}


def _triggers(
    calls: CallFormat, functions: Sequence[Function], word: str, reasoning: tuple[str, str] | None, thinking: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Words and patterns that begin a call outside of reasoning."""
    if calls.markers is not None and not word:
        return (), (rf"^\s*({in_regex(calls.opening[0])})",)
    if calls in (LLAMA3, LLAMA4):
        names, tags = "|".join(in_regex(f["name"]) for f in functions), "|".join(map(in_regex, calls.preserved))
        return (), (rf'^\s*(?:{tags})*(\{{ ?"name": ?"(?:{names})")',)
    if calls is MUSE:
        return tuple(map(_addressed, functions)), ()
    if calls is FUNCTIONARY:
        names = "|".join(in_regex(f["name"]) for f in functions)
        return (), (rf"^\s*((?:{names})\n)", rf">>>((?:{names})\n)")
    if reasoning is None or calls.ends_reasoning:
        return (word,), ()
    opening, closing = (in_regex(tag) for tag in reasoning)
    begin = f"({in_regex(word)})"
    if thinking:
        return (), (f"{closing}.*?{begin}",)
    return (), (rf"^\s*{begin}", rf"^\s*[^<\[\s].*?{begin}", rf"^\s*{opening}.*?{closing}.*?{begin}")

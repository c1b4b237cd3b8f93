"""Framed and tagged answers of model families → messages."""

from __future__ import annotations

import json

import pytest

from logitless.models.chat.tool_calls.deltas import Message
from logitless.models.chat.tool_calls.families import (
    COMMAND_R,
    COMMAND_R_ACTION,
    DEEPSEEK,
    DEEPSEEK_V31,
    FUNCTIONARY,
    HERMES,
    KIMI_K3,
    QWEN3_CODER,
    REASONING_OF,
    family_of,
    reasoning_tags,
)
from logitless.models.chat.tool_calls.harmony import GPT_OSS, MUSE
from logitless.models.chat.tool_calls.parser import CallFormat, Parser, Style
from tests.helpers.tool_call_texts import ADD, ANALYSIS, NAMES, THINK, TO_ADD, called, content, deepseek, parse, told


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final<|message|>Two.<|return|>", content("Two.")),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|> Two.",
         (" Two.", "Hm.", [])),
        ("<|channel|>analysis<|message|>Hm", ("", "Hm", [])),
        (f'<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{TO_ADD}{{"a": 1}}<|call|>',
         ("", "Hm.", [("add", '{"a": 1}')])),
        ('<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}',
         called(("add", '{"a": 1}'))),
        (' to=functions.add<|channel|>commentary <|constrain|>json<|message|>{"a": 1}', called(("add", '{"a": 1}'))),
        (' to=functions.add<|channel|>analysis<|message|>{"a": 1}', called(("add", '{"a": 1}'))),
        ("to=functions.add is a name", content("to=functions.add is a name")),
        (f'{TO_ADD}{{"a": "cut', called(("add", '{"a": "cut'))),
        (f"<|channel|>commentary<|message|>I will add.<|end|><|start|>assistant{TO_ADD}{{}}",
         called(("add", "{}"), text="I will add.")),
        ("<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B<|end|>"
         "<|start|>assistant<|channel|>final<|message|>C", ("C", "AB", [])),
        ("<|channel|>commentary to=browser.search<|message|>x", content("")),
        ('<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=python<|channel|>commentary code<|message|>'
         'print("<|")<|call|>', ("", "Hm.", [])),
        ("<|channel|>commentary to=assistant<|message|>x<|end|><|start|>assistant<|channel|>final<|message|>Two.",
         content("Two.")),
        ("<|channel|>commentary to=assistant<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
         "<|message|>Two.", ("Two.", "Hm.", [])),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|channel|>final<|message|>Two.",
         ("Two.", "Hm.", [])),
        (" to=functions.add<|channel|>commentary<|channel|>commentary json<|message|>{}", called(("add", "{}"))),
        ("<|channel|>final<|message|>a <|b| c<|return|>", content("a <|b| c")),
        ("<|channel|>what", content("<|channel|>what")),
        ("Plain.", content("Plain.")),
    ],
)  # fmt: skip
def test_gpt_oss(text: str, expected: object) -> None:
    assert told(parse(text, GPT_OSS, ANALYSIS)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (deepseek(ADD), called(ADD)),
        (f"Sure.\n{deepseek(ADD, ('f', '{}'))}\n", called(ADD, ("f", "{}"), text="Sure.")),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>"
         "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
         called(("add", '{"a": 1}'), ("f", "{}"))),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{}", called(("function", "{}"))),
        (deepseek(("f", '{"x": "cut')).partition("cut")[0], called(("f", '{"x": "'))),
        ("<｜tool▁calls▁begin｜> none", content("<｜tool▁calls▁begin｜> none")),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\nno block",
         content("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\nno block")),
    ],
)  # fmt: skip
def test_deepseek(text: str, expected: object) -> None:
    for calls in (DEEPSEEK, DEEPSEEK_V31):
        assert told(parse(text, calls)) == expected
    message = parse(f"Hm.\n</think>\n\n{deepseek(ADD)}", DEEPSEEK, THINK, primer="<think>\n")
    assert told(message) == ("", "Hm.", [ADD])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}}\n]<|END_ACTION|>',
         called(("f", '{"x": 1}'))),
        ('<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {}}, '
         '{"tool_call_id": "1", "tool_name": "g", "parameters": {"y": []}}]<|END_ACTION|>',
         called(("f", "{}"), ("g", '{"y": []}'))),
        ("<|START_RESPONSE|>Two.<|END_RESPONSE|>", content("Two.")),
        ("<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Two.", ("Two.", "Hm.", [])),
        ("<|START_ACTION|>what", content("<|START_ACTION|>what")),
        ('<|START_ACTION|>[{"tool_name": "f", "parameters": {"x": "cu', called(("f", '{"x": "cu'))),
    ],
)  # fmt: skip
def test_command_r(text: str, expected: object) -> None:
    assert told(parse(text, COMMAND_R, ("<|START_THINKING|>", "<|END_THINKING|>"))) == expected


CODER = """<tool_call>
<function=write>
<parameter=path>
a "b".py
</parameter>
<parameter=text>
if x < 3:
    print("</p>")

</parameter>
<parameter=n>
[1, 2]
</parameter>
<parameter=deep>
True
</parameter>
</function>
</tool_call>"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('Action: ```json\n[\n    {\n        "tool_name": "add",\n        "parameters": {"a": 1}\n    }\n]```',
         called(("add", '{"a": 1}'))),
        ('Plan: add.\nAction:```json\n[{"tool_name": "add", "parameters": {}}, {"tool_name": "get_weather"}]\n```\n',
         called(("add", "{}"), ("get_weather", "{}"), text="Plan: add.")),
        ('Action: [{"tool_name": "add", "parameters": {"a": "cut', called(("add", '{"a": "cut'))),
        ('Action: ```json\n[{"tool_name": "directly-answer", "parameters": {}}]```',
         content('Action: ```json\n[{"tool_name": "directly-answer", "parameters": {}}]```')),
        ("Action: run away! Reaction: none", content("Action: run away! Reaction: none")),
        ("Action", content("Action")),
    ],
)  # fmt: skip
def test_command_r_action(text: str, expected: object) -> None:
    assert told(parse(text, COMMAND_R_ACTION)) == expected


def test_qwen3_coder_cut_short() -> None:
    """Wherever an answer ends, no piece of a tag is told as text, and what is told of the call never changes."""
    text = "<tool_call>\n<function=add>\n<parameter=a>\nsome <b>\n</parameter>\n<parameter=n>\n12\n</parameter>\n"
    text += "</function>\n</tool_call>"
    whole = '{"a": "some <b>", "n": 12}'
    for cut in range(text.index("add>") + 4, len(text)):
        (call,) = parse(f"Hi\n{text[:cut]}", QWEN3_CODER).calls
        assert told(parse(f"Hi\n{text[:cut]}", QWEN3_CODER)) == called(("add", call.arguments), text="Hi")
        assert whole.startswith(call.arguments)


def test_qwen3_coder() -> None:
    texts = frozenset({("write", "path"), ("write", "text")})
    message = parse(f"I write.\n{CODER}\n{CODER}", QWEN3_CODER, texts=texts)
    assert message.content == "I write."
    for call in message.calls:
        assert call.name == "write"
        result = {"path": 'a "b".py', "text": 'if x < 3:\n    print("</p>")\n', "n": [1, 2], "deep": True}
        assert json.loads(call.arguments) == result
    assert len(message.calls) == 2
    for cut in range(len(CODER)):  # what is told never changes, and is there while it is written
        (call,) = parse(CODER[:cut], QWEN3_CODER, texts=texts).calls or [message.calls[0]]
        assert message.calls[0].arguments.startswith(call.arguments)
    assert told(parse("<function=f>\n</function>", QWEN3_CODER)) == called(("f", "{}"))
    untyped = "<tool_call>\n<function=f>\n<parameter=x>\nNaN it is\n</parameter>\n</function>\n</tool_call>"
    assert told(parse(untyped, QWEN3_CODER)) == called(("f", '{"x": "NaN it is"}'))
    for none in ("<tool_call>\nno", "<function=\n>", "<tool_call> <function=f"):
        assert told(parse(none, QWEN3_CODER)) == content(none)


def test_a_call_ends_reasoning_that_is_not_closed() -> None:
    call = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    for primer, opening in (("<think>\n", ""), ("", "<think>\n")):
        message = parse(f"{opening}I add.\n{call}", QWEN3_CODER, THINK, primer=primer)
        assert told(message) == ("", "I add.", [("add", '{"a": 1}')])
    assert told(parse(f"<think>I <tool_cal {call}", None, THINK)) == ("", f"I <tool_cal {call}", [])
    fake = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'  # other families think of calls, too
    assert told(parse(f"<think>Not {fake}.</think>Two.", HERMES, THINK)) == ("Two.", f"Not {fake}.", [])


K3_CALL = (
    '<|open|>call tool="add" index="%d"<|sep|><|open|>argument key="a" type="number"<|sep|>%d<|close|>argument<|sep|>'
    "<|close|>call<|sep|>"
)
K3_TOOLS = f"<|open|>tools<|sep|>{K3_CALL % (1, 1)}{K3_CALL % (2, 5)}<|close|>tools<|sep|>"
ATEM = (
    '<atem:function_calls>\n<atem:invoke name="add">\n<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>\n'
    "</atem:function_calls>"
)
TWICE = [("add", '{"a": 1}'), ("add", '{"a": 5}')]


@pytest.mark.parametrize(
    ("calls", "text", "expected"),
    [
        (KIMI_K3, "<|open|>response<|sep|>Two.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>",
         content("Two.")),
        (KIMI_K3, "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>Two.<|close|>response<|sep|>"
         "<|close|>message<|sep|>", ("Two.", "Hm.", [])),
        (KIMI_K3, f"<|open|>think<|sep|>Hm.<|open|>response<|sep|>So.<|close|>response<|sep|>{K3_TOOLS}"
         "<|close|>message<|sep|>", ("So.", "Hm.", TWICE)),
        (KIMI_K3, "<|open|>think<|sep|>I was still", ("", "I was still", [])),
        (KIMI_K3, "Use the response tag, then <open>.", content("Use the response tag, then <open>.")),
        (MUSE, " to=user<|message|>Two.<|eot|>", content("Two.")),
        (MUSE, f" to=self<|message|>Call {ATEM}?<|eom|><|start|>assistant to=user<|message|>As {ATEM}<|eot|>",
         (f"As {ATEM}", f"Call {ATEM}?", [])),
        (MUSE, f" to=self<|message|>Hm.<|eom|><|start|>assistant to=add<|message|>{ATEM}<|eom|><|start|>assistant"
         f" to=add<|message|>{ATEM.replace('>1<', '>5<')}<|eot|>", ("", "Hm.", TWICE)),
        (MUSE, f" to=user<|message|>So.<|eom|><|start|>assistant to=add<|message|>{ATEM}<|eot|>",
         ("So.", "", TWICE[:1])),
        (MUSE, " to=add<|message|>what", content(" to=add<|message|>what")),
        (MUSE, "<|message|>Two.", content("Two.")),
        (FUNCTIONARY, "all\nTwo.\nall\n", content("Two.\nall\n")),
        (FUNCTIONARY, 'all\nadd\n{"a": 1}', content('add\n{"a": 1}')),
        (FUNCTIONARY, 'add\n{"a": 1}>>>add\n{"a": 5}', ("", "", TWICE)),
        (FUNCTIONARY, 'all\nSo.>>>add\n{"a": 1}', ("So.", "", TWICE[:1])),
        (FUNCTIONARY, "all\na >>> b, >>>add\nnothing", content("a >>> b, >>>add\nnothing")),
        (FUNCTIONARY, "add\nis a name", content("add\nis a name")),
    ],
)  # fmt: skip
def test_answers_of_kimi_k3_muse_and_functionary(calls: CallFormat, text: str, expected: object) -> None:
    style = Style(calls, NAMES, REASONING_OF[calls.name])
    for cut in range(len(text)):
        parser = Parser(style)
        message = Message().add(parser.push(text[:cut])).add(parser.push(text[cut:])).add(parser.finish())
        assert told(message) == expected


def test_families_that_name_sections_or_recipients() -> None:
    for calls, source in (
        (KIMI_K3, "{{ '<|open|>' + tag + '<|sep|>' }}{{ '<|close|>' + tag + '<|sep|>' }}"),
        (MUSE, "<|start|>assistant to={{ f.name }}<|message|>{{ '<atem:function_calls>' }}"),
        (FUNCTIONARY, "in this format:\n>>>${recipient}\n${content}\n{{ '>>>all\n' + m.content }}"),
    ):
        assert family_of(source) is calls
        assert reasoning_tags(source) == REASONING_OF[calls.name]

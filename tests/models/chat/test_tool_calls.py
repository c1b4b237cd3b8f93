"""Tool calls of model families: formats, broken and cut answers, streamed in any pieces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.models.chat.tool_calls.deltas import Message
from logitless.models.chat.tool_calls.families import (
    COMMAND_R,
    COMMAND_R_ACTION,
    DEEPSEEK,
    DEEPSEEK_V31,
    GENERIC,
    HERMES,
    LLAMA3,
    LLAMA4,
    MISTRAL,
    NEMOTRON,
    QWEN3_CODER,
    family_of,
    reasoning_tags,
)
from logitless.models.chat.tool_calls.gemma import GEMMA4
from logitless.models.chat.tool_calls.harmony import GPT_OSS
from logitless.models.chat.tool_calls.json_text import completion
from logitless.models.chat.tool_calls.parser import CallFormat, Parser, Style
from tests.helpers.tool_call_texts import (
    ADD,
    ANALYSIS,
    CALL,
    NAMES,
    THINK,
    TO_ADD,
    called,
    content,
    deepseek,
    parse,
    told,
)

QUIET = settings(max_examples=150)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", called(ADD)),
        (f"<tool_call>{CALL}</tool_call>", called(ADD)),
        (f"Let me see.\n\n<tool_call>\n{CALL}\n</tool_call>\n", called(ADD, text="Let me see.")),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", called(ADD, ADD)),
        (f"<tool_call>{CALL}", called(ADD)),
        (f"<tool_call>{CALL}\n</tool", called(ADD)),
        (f"<tool_call>{CALL} well", called(ADD, text=" well")),
        (f"<tool_call>\n{CALL}\n{CALL}\n</tool_call> Done.", called(ADD, ADD, text=" Done.")),
        (f"<tool_call>{CALL}, {CALL}</tool_call>", called(ADD, ADD)),
        (f"<tool_call>{CALL}, well", called(ADD, text=", well")),
        (f'<tool_call>{CALL} {{"a": 1}} is it', called(ADD, text=' {"a": 1} is it')),
        ('<tool_call>{"name": "f", "arguments": {"x": 1, ', called(("f", '{"x": 1'))),
        ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', called(("f", '{"x": 1}'))),
        ('<tool_call>{"name": "f"}</tool_call>', called(("f", "{}"))),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', called(("f", "{}"))),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', called(("f", '{"x": 1}'))),
        ('<tool_call>{"name": "f", "arguments": "hm"}</tool_call>', called(("f", '"hm"'))),
        ('<tool_call>{"name": "f", "arguments": [1, 2]}</tool_call>', called(("f", "[1, 2]"))),
        ('<tool_call>{"name": "f", "arguments": 12}</tool_call>', called(("f", "12"))),
        ('<tool_call>{"id": 7, "name": "f", "arguments": {}, "x": [1]}</tool_call>', called(("f", "{}"))),
        (f'<tool_call>{{"type": "function", "function": {CALL}}}</tool_call>', called(ADD)),
        ('<tool_call>{"name": "f", "arguments": {"x": "cut sho', called(("f", '{"x": "cut sho'))),
        ('<tool_call>{"name": "f", "arguments": {"x": oops}}</tool_call>',
         called(("f", '{"x": "oops"}'))),
        ('<tool_call>{"name": "f", "arguments": {}; well', called(("f", "{}"))),
        ("nothing of the kind <tool_call", content("nothing of the kind")),
        ("a <t", content("a <t")),
        ("a <tool_call> for you", content("a <tool_call> for you")),
        (f"<tool_call>{CALL}</tool_call><tool_call>{{\"na", called(ADD)),
        ('<tool_call>{"name": "ad', content("")),
        ("<tool_call>hm</tool_call>", content("<tool_call>hm</tool_call>")),
        ("a <tool_call>\n{}\n</tool_call> b\n", content("a <tool_call>\n{}\n</tool_call> b\n")),
        ('<tool_call>{"name": 3}', content('<tool_call>{"name": 3}')),
        (f"<tool_call><tool_call>{CALL}</tool_call>", called(ADD, text="<tool_call>")),
        ('<tool_call>{"name": "f\\ud800", "arguments": {}}</tool_call>', called(("f?", "{}"))),
        (" two  words ", content(" two  words ")),
    ],
)  # fmt: skip
def test_hermes(text: str, expected: object) -> None:
    assert told(parse(text)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "add", "parameters": {"a": 1}}', called(("add", '{"a": 1}'))),
        ('\n<|python_tag|>{"name": "add", "parameters": {"a": 1}}', called(("add", '{"a": 1}'))),
        ('{"type": "function", "name": "add", "parameters": {}}', called(("add", "{}"))),
        ('{"name": "add", "parameters": {}}; {"name": "get_weather", "parameters": {"x": 1}}',
         called(("add", "{}"), ("get_weather", '{"x": 1}'))),
        ('{"name": "add", "parameters": {}}; done', called(("add", "{}"), text="; done")),
        ('{"name": "Bob", "age": 3}', content('{"name": "Bob", "age": 3}')),
        ('So: {"name": "add", "parameters": {}}', content('So: {"name": "add", "parameters": {}}')),
        ("<|python_tag|>print(1)", content("<|python_tag|>print(1)")),
    ],
)  # fmt: skip
def test_llama3(text: str, expected: object) -> None:
    assert told(parse(text, LLAMA3)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "add", "parameters": {"a": 1}}', called(("add", '{"a": 1}'))),
        ('<|python_start|>{"name": "add", "parameters": {"a": 1}}<|python_end|>', called(("add", '{"a": 1}'))),
        ('<|python_start|>{"name": "add", "parameters": {"a": 1}}', called(("add", '{"a": 1}'))),
        ('<|python_start|><|python_end|>{"name": "add", "parameters": {"a": 1}}', called(("add", '{"a": 1}'))),
        ('<|python_start|>{"name": "add", "parameters": {}}; {"name": "get_weather", "parameters": {}}<|python_end|>',
         called(("add", "{}"), ("get_weather", "{}"))),
        ("<|python_start|>print(1)<|python_end|>", content("<|python_start|>print(1)<|python_end|>")),
        ("<|python_start|><|python_end|>Well.", content("<|python_start|><|python_end|>Well.")),
        ('{"name": "Bob", "age": 3}', content('{"name": "Bob", "age": 3}')),
    ],
)  # fmt: skip
def test_llama4(text: str, expected: object) -> None:
    assert told(parse(text, LLAMA4)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<TOOLCALL>[{"name": "f", "arguments": {"x": 1}}]</TOOLCALL>', called(("f", '{"x": 1}'))),
        ('Well.\n<TOOLCALL> [\n{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}\n]\n</TOOLCALL>',
         called(("f", "{}"), ("g", "{}"), text="Well.")),
        ('<TOOLCALL>[{"name": "f", "arguments": {"x"', called(("f", '{"x"'))),
        ('<TOOLCALL>[{"name": "f", "arguments": {}}', called(("f", "{}"))),
        ('<TOOLCALL>[{"name": "f", "arguments": {}}, ]</TOOLCALL> Done.', called(("f", "{}"), text=" Done.")),
        ('<TOOLCALL>[{"name": "f", "arguments": {}}, oh', called(("f", "{}"), text=", oh")),
        ("<TOOLCALL> what?", content("<TOOLCALL> what?")),
        ("<TOOLCALL>[]</TOOLCALL>", content("<TOOLCALL>[]</TOOLCALL>")),
        ("<TOOL", content("")),
        ("<", content("<")),
        ("x <TO", content("x <TO")),
    ],
)  # fmt: skip
def test_nemotron(text: str, expected: object) -> None:
    assert told(parse(text, NEMOTRON)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}, "id": "abcdefghi"}]', called(("f", '{"x": 1}'))),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]',
         called(("f", "{}"), ("g", "{}"))),
        ('Well. [TOOL_CALLS][{"name": "f", "arguments": {}}]', called(("f", "{}"), text="Well.")),
        ('[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[CALL_ID]123[ARGS]{}', called(("f", '{"x": 1}'), ("g", "{}"))),
        ('[TOOL_CALLS]f{"x": 1}', called(("f", '{"x": 1}'))),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}},]', called(("f", "{}"))),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}}, oh', called(("f", "{}"), text=", oh")),
        ("[TOOL_CALLS] what?", content("[TOOL_CALLS] what?")),
        ("[TOOL", content("")),
        ("[TOOL_CALLS]ge", content("")),
        ("[TOOL_CALLS]nothing", content("[TOOL_CALLS]nothing")),
    ],
)  # fmt: skip
def test_mistral(text: str, expected: object) -> None:
    message = parse(text, MISTRAL)
    assert told(message) == expected
    assert all(len(call.id) == 9 and call.id.isalnum() for call in message.calls)  # its template refuses others


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f'{{"tool_call": {CALL}}}', called(ADD)),
        (f'{{"tool_calls": [{CALL}, {CALL}]}}', called(ADD, ADD)),
        ('{"response": "a \\"b\\" \\ud83d\\ude00\\n\\u00e9\\ud83dx"}', content('a "b" 😀\né?x')),
        ('{ "response" : "cut', content("cut")),
        ('{"response": 1}', content('{"response": 1}')),
        ('{"tool_call": {"name": "unknown", "arguments": {}}}',
         content('{"tool_call": {"name": "unknown", "arguments": {}}}')),
        ('{"x": "y"}', content('{"x": "y"}')),
        ('{"response": "a"} b', content("a b")),
        ("Plain words.", content("Plain words.")),
    ],
)  # fmt: skip
def test_generic(text: str, expected: object) -> None:
    assert told(parse(text, GENERIC)) == expected


def test_reasoning_that_was_left_out() -> None:
    assert told(parse("</think>\n\nTwo.", None, THINK)) == content("Two.")
    gemma = ("<|channel>thought\n", "<channel|>")
    assert told(parse("<|channel>thought<channel|>Two.", None, gemma)) == content("Two.")
    assert told(parse("</thin", None, THINK)) == content("</thin")


def test_reasoning() -> None:
    def told_of(text: str, **kw: object) -> tuple[str, str]:
        message = parse(text, None, THINK, **kw)
        return message.content, message.reasoning

    assert told_of("<think>\nHm.\n Two.\n</think>\n\nFour.\n") == ("Four.\n", "Hm.\n Two.")
    assert told_of("\n<think>Hm") == ("", "Hm")
    assert told_of("<think>Hm </thi") == ("", "Hm </thi")
    assert told_of("Say <think>no</think>") == ("Say <think>no</think>", "")
    assert told_of("Hm.</think>Four.", primer="<think>\n") == ("Four.", "Hm.")
    assert told_of("<think>\nHm.\n</think>\nFour.", tags_in_content=True) == ("<think>\nHm.\n</think>\nFour.", "Hm.")
    assert parse("<think>Hm</think>", None).content == "<think>Hm</think>"
    message = parse(f"<think>\nadd?\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>", HERMES, THINK)
    assert told(message) == ("", "add?", [ADD])


def test_one_call_only() -> None:
    text = f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>"
    assert told(parse(text, parallel=False)) == called(ADD)
    assert told(parse(f"{text}\nSo.", parallel=False)) == called(ADD, text="\nSo.")


def test_a_call_that_is_required_never_becomes_text() -> None:
    text = f"<think>Hm.</think>\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>"
    for end in range(len(text)):
        message = parse(text[:end], HERMES, THINK, required=True)
        assert message.content == "", text[:end]
        assert (message.reasoning or "Hm.").startswith("Hm.") or end < len("<think>Hm.</think>")


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (LLAMA3, '{"city": "Par'),  # an answer in JSON
        (LLAMA3, '{"name": "Bo'),
        (LLAMA3, '{"na'),
        (HERMES, "Is 3 <"),
        (HERMES, "Is 3 <t"),
        (HERMES, "The tag <tool_call> is"),
        (MISTRAL, "See [1]"),
        (COMMAND_R_ACTION, "An Act"),
        (GPT_OSS, "<|channel|>what is"),
        (DEEPSEEK, "<｜tool▁call▁begin｜>is its marker"),
    ],
)
def test_text_that_the_end_cuts_is_kept(calls: CallFormat, text: str) -> None:
    assert told(parse(text, calls)) == content(text)


CUTS = [
    (HERMES, f"<tool_call>{CALL}</tool_call>"),
    (NEMOTRON, f"<TOOLCALL>[{CALL}]</TOOLCALL>"),
    (MISTRAL, f"[TOOL_CALLS][{CALL}]"),
    (GEMMA4, "<|tool_call>call:add{a:1}<tool_call|>"),
    (DEEPSEEK, deepseek(ADD)),
    (QWEN3_CODER, "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>"),
    (LLAMA3, '{"name": "add", "parameters": {"a": 1}}'),
]


@pytest.mark.parametrize(("calls", "text"), CUTS)
def test_a_limit_within_a_marker_leaves_no_piece_of_it(calls: CallFormat, text: str) -> None:
    """The end of the model's own answer keeps such a piece: nothing more would have come."""
    tags = ("<think>", "</think>")
    for before in ("", "<think>Hm.</think>") if calls.opening else ("", "I look. ", "<think>Hm.</think>Well. "):
        for end in range(len(text)):
            parser = Parser(Style(calls, NAMES, tags))
            message = Message().add(parser.push(before + text[:end])).add(parser.finish(is_cut=True))
            assert message.content.strip() == before.removeprefix("<think>Hm.</think>").strip(), text[:end]
    assert parse("5 <", calls).content == "5 <"
    parser = Parser(Style(calls, NAMES))
    assert Message().add(parser.push("I saw a")).add(parser.finish(is_cut=True)).content == "I saw a"


def test_a_limit_within_a_tag_of_reasoning_leaves_no_piece_of_it() -> None:
    text = "<think>Hm.</think>Yes"
    for end in range(len(text)):
        for calls in (HERMES, None):
            parser = Parser(Style(calls, NAMES, ("<think>", "</think>")))
            message = Message().add(parser.push(text[:end])).add(parser.finish(is_cut=True))
            assert "Yes".startswith(message.content)
            assert "Hm.".startswith(message.reasoning)
    assert parse("Is a <", None, ("<think>", "</think>")).content == "Is a <"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "add", "arguments": {"s": "a\n\tb\r"}}', ("add", '{"s": "a\\n\\tb\\r"}')),
        ('{"name": "add", "arguments": {\n"s": "a\\n"}}', ("add", '{\n"s": "a\\n"}')),
        ('{"name": "add", "arguments": {}}}', ("add", "{}")),
        ('{"name": "add", "arguments": {}}}]} ', ("add", "{}")),
    ],
)
def test_calls_with_raw_line_breaks_or_brackets_too_many_are_whole(text: str, expected: tuple[str, str]) -> None:
    assert told(parse(f"<tool_call>{text}</tool_call>Done")) == called(expected, text="Done")


def test_brackets_behind_a_call_that_is_not_closed_are_text() -> None:
    assert told(parse(f"<tool_call>{CALL} ] is a bracket")) == called(ADD, text=" ] is a bracket")


def test_an_id_before_the_name_in_json_is_the_calls() -> None:
    for id, is_own in (("a1b2c3d4e", True), ("call_1", False)):
        (call,) = parse(f'[TOOL_CALLS][{{"id": "{id}", "name": "add", "arguments": {{}}}}]', MISTRAL).calls
        assert (call.id == id) == is_own
    (call,) = parse('<tool_call>{"id": 7, "name": "add", "arguments": {}}</tool_call>').calls
    assert call.id.startswith("call_")


def test_a_name_that_the_end_cuts_is_no_text() -> None:
    for calls, text in (
        (LLAMA3, '{"name": "ad'),
        (LLAMA3, '{"name": '),
        (GENERIC, '{"tool_calls": [{"na'),
        (GENERIC, '{"resp'),
        (GPT_OSS, "<|channel|>commentary to=functions.ad"),
        (GPT_OSS, "<|channel|>comm"),
        (DEEPSEEK, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>ad"),
        (DEEPSEEK_V31, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>ad"),
        (COMMAND_R_ACTION, 'Action: ```json\n[{"tool_na'),
        (GEMMA4, "<|tool_call>call:ad"),
        (QWEN3_CODER, "<tool_call>\n<function=ad"),
        (MISTRAL, "[TOOL_CALLS]add[CA"),
    ):
        assert told(parse(text, calls)) == content(""), text
        assert told(parse(f"Look. {text}", calls)) == content("Look.") or calls in (LLAMA3, GENERIC), text


def test_beginning_in_prompt_is_not_repeated() -> None:
    assert parse(" world", HERMES, primer="Hello ").content == " world"
    assert told(parse(f"{CALL}</tool_call>", primer="Hi <tool_call>")) == called(ADD)


PIECES = [
    "<TOOLCALL>", "</TOOLCALL>",
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", CALL, "{", "}",
    "[", "]", '"', ":", ",", '{"name": "add", "parameters": {"x": "\\u12', '"response"', '"tool_calls": [', "\\",
    "\\ud83d", " ", "\n", "é", "1", ";", "name", "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant",
    TO_ADD, deepseek(ADD), "<｜tool▁call▁end｜>", "<|START_ACTION|>[", "<function=f>", "<parameter=x>",
    "\n</parameter>", "Action:", "```json\n[", "```", '{"tool_name": "add", "parameters": {',
    "<|tool_call>call:add{", '<|"|>', "<tool_call|>", "x:", "true", "}<tool_call|>",
]  # fmt: skip


@QUIET
@given(
    st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join),
    st.lists(st.integers(0, 120), max_size=12),
    st.sampled_from(
        [
            HERMES,
            LLAMA3,
            MISTRAL,
            GENERIC,
            GPT_OSS,
            DEEPSEEK,
            COMMAND_R,
            COMMAND_R_ACTION,
            QWEN3_CODER,
            NEMOTRON,
            GEMMA4,
            None,
        ]
    ),
    st.booleans(),
    st.booleans(),
)
def test_any_cutting_gives_the_same_message(
    text: str, cuts: list[int], calls: CallFormat | None, legacy: bool, parallel: bool
) -> None:
    style = Style(calls, NAMES, THINK, legacy, parallel)
    whole = Parser(style)
    expected = told(Message().add(whole.push(text)).add(whole.finish()))
    parser, message, at = Parser(style), Message(), 0
    for cut in sorted(cuts):
        message.add(parser.push(text[at:cut]))
        at = max(at, cut)
    message.add(parser.push(text[at:])).add(parser.finish())
    assert told(message) == expected
    written = expected[0] + expected[1] + "".join(name + arguments for name, arguments in expected[2])
    if calls is None and not legacy:  # only the tags and the blanks around them go
        assert "".join(written.split()) == "".join(_untagged(text).split())


def _untagged(text: str) -> str:
    if not text.lstrip(" \t\r\n").startswith("<think>"):
        return text
    inner, _, rest = text.partition("<think>")[2].partition("</think>")
    return rest + inner


@QUIET
@given(st.text(max_size=60))
def test_text_without_calls_is_left_alone(text: str) -> None:
    for calls in (HERMES, MISTRAL, NEMOTRON, GPT_OSS, DEEPSEEK, COMMAND_R, QWEN3_CODER, GEMMA4, None):
        if calls is None or not calls.around or not any(trigger in text for trigger in calls.triggers):
            assert parse(text, calls).content == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@QUIET
@given(st.dictionaries(st.text(), JSON, max_size=4), st.sampled_from([None, 2]), st.booleans())
def test_arguments_are_what_the_model_wrote(arguments: object, indent: int | None, ascii: bool) -> None:
    written = json.dumps(arguments, indent=indent, ensure_ascii=ascii)
    message = parse(f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>')
    assert told(message) == called(("f", written))


@QUIET
@given(JSON, st.integers(0, 60))
def test_completion_makes_the_beginning_of_a_value_whole(value: object, at: int) -> None:
    text = json.dumps({"a": value})
    begun = text[: max(1, at % (len(text) + 1))]
    whole = json.loads(begun + completion(begun))
    assert isinstance(whole, dict)
    assert completion(text) == ""


def test_nesting_has_a_limit() -> None:
    text = '<tool_call>{"name": "f", "arguments": ' + "[" * 5000
    message = parse(text)
    assert told(message) == called(("f", "[" * 256 + "]" * 256))


def test_families_by_what_their_templates_write() -> None:
    for calls, source in (
        (GPT_OSS, "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"),
        (DEEPSEEK, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ t.type }}<｜tool▁sep｜>{{ n }}\\n```json\\n <think>"),
        (DEEPSEEK_V31, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ n }}<｜tool▁sep｜>{{ a }}"),
        (COMMAND_R, "<|START_ACTION|>[{{ c }}]<|END_ACTION|>"),
        (COMMAND_R_ACTION, 'Write "Action:" followed by a list of actions, each with its "tool_name"'),
        (GEMMA4, "{{ '<|tool_call>call:' + name + '{' }}{{ '}<tool_call|>' }}"),
        (LLAMA4, "{{ '<|header_start|>ipython<|header_end|>' }}"),
        (NEMOTRON, "<TOOLCALL>[{{ calls }}]</TOOLCALL><SPECIAL_11>Assistant <think>"),
        (QWEN3_CODER, "<tool_call>\\n<function={{ n }}>\\n<parameter={{ k }}>"),
    ):
        assert family_of(source) is calls
    assert reasoning_tags("<|start|>assistant<|channel|>final<|message|>") == ANALYSIS
    assert reasoning_tags("<|assistant|>{{ m }}<|end|>") is None
    tags = reasoning_tags("{{ '<|channel>thought\\n' + m.reasoning + '\\n<channel|>' }}")  # Gemma 4
    assert tags == ("<|channel>thought\n", "<channel|>")
    message = parse("<|channel>thought\nTwo and two.\n<channel|>Four.", None, tags)
    assert (message.content, message.reasoning) == ("Four.", "Two and two.")


@pytest.mark.parametrize(
    ("name", "family", "tags"),
    [
        ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", HERMES, None),
        ("Qwen-Qwen3-0.6B", HERMES, THINK),
        ("meta-llama-Llama-3.2-3B-Instruct", LLAMA3, None),
        ("mistralai-Mistral-Nemo-Instruct-2407", MISTRAL, None),
        ("google-gemma-2-2b-it", GENERIC, None),
        ("microsoft-Phi-3.5-mini-instruct", GENERIC, None),
    ],
)
def test_families_of_real_templates(shared_data: Path, name: str, family: CallFormat, tags: object) -> None:
    source = (shared_data / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    assert family_of(source) is family
    assert reasoning_tags(source) == tags

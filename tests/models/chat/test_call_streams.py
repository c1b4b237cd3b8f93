"""Calls of every format, with random names, arguments and cuts: read back, alike in any pieces, never as text."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.models.chat.template import ChatTemplate
from logitless.models.chat.tool_calls import families
from logitless.models.chat.tool_calls.deltas import Message
from logitless.models.chat.tool_calls.parser import CallFormat, Parser, Style
from logitless.models.chat.tool_calls.probed.markers import ID, JSON, KEY, NUMBER, PYTHON, TAGGED, TYPE, Markers
from tests.helpers import call_templates

PROBED = ["APERTUS", "WRAPPED", "KIMI", "GLM_46", "MINIMAX", "MINIMAX_M3", "PYTHON", "DSML", "SOLAR", "ID_TAGS"]
FAMILIES = [value for value in vars(families).values() if isinstance(value, CallFormat)]
FORMATS = FAMILIES + [ChatTemplate(getattr(call_templates, n), bos_token="", eos_token="").calls for n in PROBED]
TOOLS = frozenset({"add", "get_weather", "now"})
TEXTS = frozenset((name, key) for name in TOOLS for key in ("zone", "to_do"))
Call = tuple[str, dict[str, Any]]

LEAVES = st.none() | st.booleans() | st.integers(-(10**9), 10**9)
VALUES = LEAVES | st.recursive(
    st.lists(LEAVES | st.text(st.characters(codec="utf-8"), max_size=9), max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("abc_", min_size=1), inner, max_size=2),
    max_leaves=4,
)
PRINTED = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=6)


@st.composite
def answers(draw: st.DrawFn) -> tuple[CallFormat, str, list[Call], str]:
    """(format, text before the calls, calls, the answer); strings may have the format's own syntax."""
    calls = draw(st.sampled_from(FORMATS))
    syntax = [text for text in (*calls.triggers, *calls.ends, *calls.preserved) if not re.search(r"[\x00-\x03]", text)]
    text, values = st.tuples(PRINTED, st.sampled_from(["", *syntax]), PRINTED).map("".join), VALUES
    if (m := calls.markers) is None and calls.name not in ("Generic", "GPT-OSS"):  # nothing escapes Gemma's mark
        quote = calls.preserved[2]
        text, values = text.filter(lambda s: quote not in s), values.filter(lambda v: quote not in json.dumps(v))
    elif m is not None and m.style == TAGGED:  # nor what ends a tag
        end = m.value_end.strip().partition(KEY)[0]
        text = text.map(str.strip).filter(lambda s: end not in s and not s.endswith(end[0]))
    one = st.fixed_dictionaries({}, optional={"zone": text, "n": values, "to_do": text, "x": values})
    several = draw(st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), one), min_size=1, max_size=2))
    before = "" if calls.opening or calls.restart else draw(st.sampled_from(["", "I look.\n", "5 < 6 [x] {y}"]))
    return calls, before, several, before + written(calls, several)


def written(calls: CallFormat, several: list[Call]) -> str:
    """Calls as a model writes them."""
    m = calls.markers
    if calls.name == "GPT-OSS":
        head, body = "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"
        return "<|start|>assistant".join(f"{head}{name}{body}{json.dumps(given)}<|call|>" for name, given in several)
    if calls.name == "Generic":
        return json.dumps({"tool_calls": [{"name": name, "arguments": arguments} for name, arguments in several]})
    if m is None:
        begin, end, quote = calls.preserved[:3]
        return "".join(f"{begin}call:{name}{gemma(arguments, quote)}{end}" for name, arguments in several)
    if calls.name == "Muse Glimmer":
        texts = [f" to={name}<|message|>{m.section}{call(m, name, given)}{m.section_end}" for name, given in several]
        return "<|eom|><|start|>assistant".join(texts) + "<|eot|>"
    texts = [call(m, *each).replace(NUMBER, str(i)).replace(ID, f"abcdefgh{i}") for i, each in enumerate(several)]
    return f"{m.section}{m.separator.join(texts)}{m.section_end}"


def call(m: Markers, name: str, arguments: dict[str, Any]) -> str:
    if m.style == PYTHON:
        return f"{m.begin}{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())}){m.end}"
    text = "" if m.style == TAGGED else json.dumps(arguments)
    for key, value in arguments.items() if m.style == TAGGED else ():
        kind = m.types[0] if isinstance(value, str) else m.types[1] or "object"
        one = value if isinstance(value, str) else json.dumps(value)
        text += f"{m.key_begin}{key}{m.key_end.replace(TYPE, kind)}{one}{m.value_end.replace(KEY, key)}{m.gap}"
    return f"{m.begin}{m.head}{json.dumps(name) if m.style == JSON else name}{m.middle}{text}{m.tail}{m.end}"


def gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(inner, quote)}" for key, inner in value.items()) + "}"
    return f"[{','.join(gemma(inner, quote) for inner in value)}]" if isinstance(value, list) else json.dumps(value)


def read(calls: CallFormat, *pieces: str, **end: bool) -> Message:
    parser, message = Parser(Style(calls, TOOLS, texts=TEXTS)), Message()
    for piece in pieces:
        message.add(parser.push(piece))
    return message.add(parser.finish(**end))


def parts(message: Message) -> list[Any]:
    return [message.content, message.reasoning, *((call.name, call.arguments) for call in message.calls)]


@settings(max_examples=60, deadline=None)
@given(answers(), st.lists(st.integers(0, 400), max_size=4), st.integers(0, 400))
def test_calls_of_any_format_are_read_back_in_any_pieces(
    answer: tuple[CallFormat, str, list[Call], str], cuts: list[int], end: int
) -> None:
    calls, before, several, text = answer
    whole = read(calls, text, by_model=True)
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == several
    assert whole.content.strip() == before.strip()
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    assert parts(read(calls, *pieces, by_model=True)) == parts(whole)
    begun = text[: min(end, len(text))]
    shown = read(calls, begun, is_cut=True).content.strip()
    assert before.strip().startswith(shown) or "Action:".startswith(shown)  # a word, which no special token begins
    ended = read(calls, begun, by_model=True)
    assert all(isinstance(json.loads(call.arguments), dict) for call in ended.calls)


CODER = "<tool_call>\n<function=add>\n<parameter=zone>\nabc"
ADDED = ("add", {"zone": "abc"})
NOW = ("now", {"zone": "Z"})
GEMMA_NOW = '<|tool_call>call:now{zone:<|"|>Z<|"|>}<tool_call|>'
LFM = "<|tool_call_start|>[add(zone='abc"


@pytest.mark.parametrize(
    ("calls", "text", "several", "content"),
    [
        (families.QWEN3_CODER, f"{CODER}\n</function>\n</tool_call>", [ADDED], ""),
        (families.QWEN3_CODER, f"{CODER}\n</tool_call>\nDone.", [ADDED], "Done."),
        (families.QWEN3_CODER, f"{CODER}\n</func", [ADDED], ""),
        (families.QWEN3_CODER, f"{CODER}\n<parameter=n>\n2\n</parameter>\n</function>",
         [("add", {"zone": "abc", "n": 2})], ""),
        (families.QWEN3_CODER, f"{CODER}\n</function>\n</tool_call>\n{CODER.replace('add', 'now')}\n</parameter>",
         [ADDED, ("now", {"zone": "abc"})], ""),
        (families.QWEN3_CODER, f"{CODER}\n</function> ends, </parameter> too\n</parameter>\n</function>\n</tool_call>",
         [("add", {"zone": "abc\n</function> ends, </parameter> too"})], ""),
        (families.GEMMA4, '<|tool_call>call:add{zone:<|"|>abc}<tool_call|>', [ADDED], ""),
        (families.GEMMA4, f'<|tool_call>call:add{{zone:<|"|>abc}}<tool_call|>{GEMMA_NOW}', [ADDED, NOW], ""),
        (families.GEMMA4, '<|tool_call>call:add{t:{zone:<|"|>abc}}<tool_call|> So.', [("add", {"t": ADDED[1]})], "So."),
        (families.GEMMA4, '<|tool_call>call:add{zone:<|"|>}<tool_call|><|"|>}<tool_call|>',
         [("add", {"zone": "}<tool_call|>"})], ""),
        *[(families.LFM2, f"{LFM}{end}<|tool_call_end|>", [ADDED], "") for end in ("')]", "')", "'", "", "]", ")")],
        (families.LFM2, f"{LFM}')]<|tool_call_end|><|tool_call_end|>", [ADDED], ""),
        (families.LFM2, f"{LFM[:-14]}{LFM[-13:]}')<|tool_call_end|>", [ADDED], ""),
        (families.LFM2, f"{LFM}<|tool_call_end|>')]<|tool_call_end|>", [("add", {"zone": "abc<|tool_call_end|>"})], ""),
        (families.HERMES, '<tool_call>{"name": "add", "arguments": {"zone": "abc}}</tool_call>', [ADDED], ""),
        (families.HERMES, '<tool_call>{"name": "add", "arguments": {"zone": "abc"</tool_call>', [ADDED], ""),
        (families.HERMES, '<tool_call>{"name": "add", "arguments": {"zone": "</tool_call>"}}</tool_call>',
         [("add", {"zone": "</tool_call>"})], ""),
        (families.LLAMA3, '{"name": "add", "parameters": {"zone": "abc}}', [ADDED], ""),
    ],
)  # fmt: skip
def test_a_call_without_its_closing_marks_has_none_in_its_arguments(
    calls: CallFormat, text: str, several: list[Call], content: str
) -> None:
    for pieces in ([text], list(text)):
        message = read(calls, *pieces, by_model=True)
        assert [(call.name, json.loads(call.arguments)) for call in message.calls] == several
        assert message.content.strip() == content


BODIES = [
    (families.GPT_OSS, "<|channel|>commentary to=functions.now <|constrain|>json<|message|>%s<|call|>"),
    (families.MISTRAL, "[TOOL_CALLS]now[ARGS]%s"),
    (families.MISTRAL_NAMED, "[TOOL_CALLS]now[ARGS]%s"),
    (families.DEEPSEEK_V31, "<｜tool▁call▁begin｜>now<｜tool▁sep｜>%s<｜tool▁call▁end｜>"),
    (families.DEEPSEEK, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n%s\n```<｜tool▁call▁end｜>"),
]


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("", {}), ("null", {}), ("hello", {"zone": "hello"}), ("a=1", {"zone": "a=1"}), ("12", {"zone": 12}),
        ('"UTC"', {"zone": "UTC"}), ('["a", 1]', {"zone": ["a", 1]}), ('"{\\"zone\\": 1}"', {"zone": 1}),
        ('```json\n{"zone": 1}\n```', {"zone": 1}), ('{"zone": 1', {"zone": 1}),
    ],
)  # fmt: skip
def test_arguments_that_are_no_object_stand_for_the_only_parameter(body: str, arguments: dict[str, Any]) -> None:
    for calls, text in BODIES:
        for pieces in ([text % body], list(text % body)):
            parser, message = Parser(Style(calls, TOOLS, sole={"now": "zone"})), Message()
            for piece in pieces:
                message.add(parser.push(piece))
            message.add(parser.finish(by_model=True))
            assert [(call.name, json.loads(call.arguments)) for call in message.calls] == [("now", arguments)], calls
            assert message.content == ""
    assert read(families.DEEPSEEK_V31, "<｜tool▁call▁begin｜>name<｜tool▁sep｜>arguments").calls == []


@pytest.mark.parametrize(
    ("shape", "n"), [("[%s, %s]", 2), ("```json\n%s\n```", 1), ("\n```\n[%s, %s]\n```\n", 2), ("[%s", 1), ("%s\n%s", 2)]
)
def test_calls_in_an_array_or_a_block_of_code_are_calls(shape: str, n: int) -> None:
    inner = shape.replace("%s", '{"name": "now", "arguments": {"zone": "Z"}}')
    for calls, begin, end in (
        (families.HERMES, "<tool_call>", "</tool_call>"),
        (families.NEMOTRON, "<TOOLCALL>", "</TOOLCALL>"),
        (families.MISTRAL, "[TOOL_CALLS]", ""),
    ):
        message = read(calls, f"Look. {begin}{inner}{end}\nDone.")
        assert [(call.name, json.loads(call.arguments)) for call in message.calls] == [NOW] * n
        assert message.content.split() == ["Look.", "Done."]
        assert read(calls, f"```json\n{inner}\n```").calls == []  # in an answer


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("01", "01"), ("0x1F", 31), ("+1", 1), (".5", 0.5), ("-.5", -0.5), ("1.", 1.0), ("1.e2", 100.0), ("0o17", 15),
        ("1_000", 1000), ("1__0", "1__0"), ("1,000", "1,000"), ("NaN", None), ("Infinity", None), ("-Infinity", None),
        ("2024-01-02", "2024-01-02"), ("1.2.3", "1.2.3"), ("12px", "12px"), ("--1", "--1"), ("-", "-"), ("12", 12),
        ("-1.5e3", -1500.0), ("9007199254740993", 9007199254740993),
    ],
)  # fmt: skip
def test_a_number_is_read_as_the_whole_of_it(written: str, meant: Any) -> None:
    for calls, text in (
        (families.HERMES, '<tool_call>{"name": "now", "arguments": {"x": %s}}</tool_call>'),
        (families.MISTRAL, "[TOOL_CALLS]now[ARGS]{'x': %s}"),
        (families.GEMMA4, "<|tool_call>call:now{x:%s}<tool_call|>"),
        (families.LFM2, "<|tool_call_start|>[now(x=%s)]<|tool_call_end|>"),
    ):
        (call,) = read(calls, *(text % written)).calls
        value = json.loads(call.arguments)["x"]
        assert (value, type(value)) == (meant, type(meant)), calls.name


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (families.QWEN3_CODER, "Use <function=NAME> and <parameter=x> tags, closed by </parameter></function>."),
        (families.HERMES, "Write `<tool_call>` and JSON:\n```\n<tool_call>\n{...}\n</tool_call>\n```"),
        (families.MISTRAL_NAMED, "Write [TOOL_CALLS]name[ARGS]arguments to call."),
        (families.LFM2, "<|tool_call_start|> opens a list such as [add(zone=1)]."),
        (families.GEMMA4, "<|tool_call>call:NAME begins one, call:add{n:1} does not."),
        (families.COMMAND_R_ACTION, "Action: be bold.\n```py\nx = 1\n```"),
    ],
)
def test_words_about_the_syntax_stay_text(calls: CallFormat, text: str) -> None:
    message = read(calls, *text, by_model=True)
    assert (message.content, message.calls) == (text, [])


@pytest.mark.parametrize("repeated", ["}", "\n", "})\n ", "</tool_call>"])
def test_a_text_of_nothing_but_brackets_is_read_in_linear_time(repeated: str) -> None:
    for calls, before, after in (
        (families.HERMES, '<tool_call>{"name": "add", "arguments": {"zone": "', '"}}</tool_call>'),
        (families.QWEN3_CODER, f"{CODER[:-3]}", "\n</parameter>\n</function>\n</tool_call>"),
    ):
        steps = []
        for n in (300, 1200):
            parser = Parser(Style(calls, TOOLS, texts=TEXTS))
            count = 0

            def counted(step: Any = parser.next) -> Any:
                nonlocal count
                count += 1
                return step()

            parser.next = counted  # type: ignore[method-assign]
            parser.push(before + repeated * (n // len(repeated)) + after)
            steps.append(count)
        assert steps[1] < 6 * steps[0]

"""Calls of every format, with random names, arguments and cuts: read back, alike in any pieces, never as text."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.models.chat.template import ChatTemplate
from logitless.models.chat.tool_calls import CallFormat, Message, Parser, Style, families
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


def told(message: Message) -> list[Any]:
    return [message.content, message.reasoning, *((call.name, call.arguments) for call in message.calls)]


@settings(max_examples=120, deadline=None)
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
    assert told(read(calls, *pieces, by_model=True)) == told(whole)
    begun = text[: min(end, len(text))]
    shown = read(calls, begun, is_cut=True).content.strip()
    assert before.strip().startswith(shown) or "Action:".startswith(shown)  # a word, which no special token begins
    ended = read(calls, begun, by_model=True)
    assert all(isinstance(json.loads(call.arguments), dict) for call in ended.calls)

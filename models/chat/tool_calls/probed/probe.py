"""Probe of a template's tool calls: renders calls with unlikely names, reads the markers around them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from logitless.models.chat.tool_calls.call_object import ARGUMENTS
from logitless.models.chat.tool_calls.deltas import Message
from logitless.models.chat.tool_calls.parser import CallFormat, Parser, Style
from logitless.models.chat.tool_calls.probed.markers import (
    ID,
    JSON,
    KEY,
    NAMED,
    NAMESPACE,
    NUMBER,
    PYTHON,
    TAGGED,
    TYPE,
    Markers,
)
from logitless.models.chat.tool_calls.probed.reader import call_format
from logitless.models.chat.tool_calls.probed.tagged import CDATA, CDATA_END

_END_OF_TURN = re.compile(r"\s*<\|eo[mt]_id\|>\s*$")
"""Llama's end of a turn, whose token with calls is another one."""

_OPEN_TAG = re.compile(rf"(?:{NAMESPACE})?<[^<>]*$|{NAMESPACE}$")
"""A tag that the end of a text cuts short."""

_DECODER = json.JSONDecoder(strict=False)  # placeholders are control characters

Turns = list[dict[str, Any]]
Render = Callable[[Turns, list[dict[str, Any]]], str]
"""Renders messages and tools; "" if the template refuses them."""

WithReasoning = Callable[[dict[str, Any], str], dict[str, Any]]
"""Puts reasoning into a message, where the template reads it."""

_NAMES = ("zurvam", "kelpod")
_ARGUMENTS: dict[str, Any] = {"jubof": "vyqat", "wexid": 40917}
_MARKUP = "<vyqat>"
_TEXTS = frozenset((name, "jubof") for name in _NAMES)
_ANSWER, _THOUGHT = "\u03bequomvi\u03be", "\u03bdrafbek\u03bd"
_IDS = ("call00001", "call00002")
_KIMI_IDS = tuple(f"functions.{name}:{i}" for i, name in enumerate(_NAMES))
_PYTHON_CALL = re.compile(r"""(zurvam|kelpod)\(jubof=(["']?)vyqatr?\2(?:, ?)?wexid=(["']?)40917r?\3\)""")
"""A call as Python writes one, or nearly so: templates leave out quotes, quote all values or write `r` for repr."""
_USER = {"role": "user", "content": "hemtos"}
_PROPERTIES = {"jubof": {"type": "string", "description": "a"}, "wexid": {"type": "integer", "description": "b"}}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": list(_PROPERTIES)}
_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": _PARAMETERS}} for name in _NAMES
]


class Probe:
    """Probe of one template, by its renderings."""

    def __init__(self, render: Render, reasoning: tuple[str, str] | None = None) -> None:
        """`reasoning`: the known tags, if any. The template may also write them without reasoning."""
        self._render, self._thinks = render, reasoning
        self._plain = self._turn({"role": "assistant", "content": _ANSWER}).rstrip()
        self._ids: tuple[str, ...] = _IDS
        body = self._difference(1)
        if _NAMES[0] not in body and _IDS[0] in body:
            self._ids = _KIMI_IDS  # the id is written in the place of the name

    def call_format(self, default: CallFormat) -> CallFormat:
        """The format of a template's calls: the known one unless the rendering contradicts it."""
        one, two = self._body(1), self._body(2)
        if not one:
            return default
        if not default.instructs and _reads(default, one, 1):
            return self._framed(default)
        markers = _markers(_without_ids(one), _without_ids(two))
        if markers is None:
            return default
        probed = call_format(replace(markers, around=self._around(), cdata=self._writes_cdata()))
        begins = probed.triggers + probed.opening
        if not all(begins) or ID in begins:  # the prompt ends in the begin of a call; nothing tells one from text
            return default
        return probed if _reads(probed, one, 1) and (not two or _reads(probed, two, 2)) else default

    def _framed(self, default: CallFormat) -> CallFormat:
        """A known format whose answers have tags around them, with the tags of this template."""
        around = self._around()
        if default.around is None or around is None or around == default.around:
            return default
        new = tuple(tag for tag in around if tag)
        parts: dict[str, Any] = {
            part: tuple(tag for tag in getattr(default, part) if tag not in default.around) + new
            for part in ("triggers", "syntax", "preserved")
        }
        return replace(default, around=around, **parts)

    def restart(self, with_reasoning: WithReasoning, closing: str) -> str:
        """The text that begins a message of its own between reasoning and the answer, before the tag around
        that; "": there is none."""
        around = self._around()
        after = self._turn(with_reasoning({"role": "assistant", "content": _ANSWER}, _THOUGHT)).partition(_THOUGHT)[2]
        between, answer, _ = after.partition(_ANSWER)
        if not answer or around is None or not between.startswith(closing) or not between.endswith(around[0]):
            return ""
        return between[len(closing) : len(between) - len(around[0])].strip()

    def reasoning_tags(self, with_reasoning: WithReasoning) -> tuple[str, str] | None:
        """Tags that the template writes around reasoning."""
        text = self._turn(with_reasoning({"role": "assistant", "content": _ANSWER}, _THOUGHT))
        before, thought, after = text.partition(_THOUGHT)
        if not thought or not self._plain:
            return None
        n_shared = _boundary(_shared(before, self._plain))
        after, answer, _ = after.partition(_ANSWER)
        opening, closing = re.search(r"<[^<>]+>$", before.strip()), re.match(r"\s*(</?[^<>]+>)", after)
        if not (answer and opening and closing):
            return None
        is_pair = closing[1] == f"</{opening[0][1:]}"  # then an answer without reasoning may have it, too
        return (opening[0], closing[1]) if is_pair or before[n_shared:].strip() else None

    def _turn(self, message: dict[str, Any]) -> str:
        return self._render([_USER, message], _TOOLS)

    def _writes_cdata(self) -> bool:
        return f"{CDATA}{_MARKUP}{CDATA_END}" in self._calling(1, {"jubof": _MARKUP})

    def _calling(self, n: int, arguments: dict[str, Any] = _ARGUMENTS) -> str:
        calls = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, id in zip(_NAMES[:n], self._ids, strict=False)
        ]
        return self._turn({"role": "assistant", "content": "", "tool_calls": calls}).rstrip()

    def _body(self, n: int) -> str:
        """The calls of a rendering; "" if it does not have them all."""
        body = _PYTHON_CALL.sub(_as_python, self._difference(n))
        return body if _NAMES[n - 1] in body else ""

    def _difference(self, n: int) -> str:
        """The part of a rendering with calls that one with text lacks."""
        calling = self._calling(n)
        if not self._plain or not calling:
            return ""
        begin, end = _difference(calling, self._plain)
        return self._without_reasoning(_END_OF_TURN.sub("", calling[begin : len(calling) - end]).strip())

    def _without_reasoning(self, text: str) -> str:
        """The text without tags of reasoning at its beginning that have none between them."""
        opening, closing = self._thinks or ("", "")
        rest = text.removeprefix(opening.strip()).lstrip()
        return rest.removeprefix(closing).lstrip() if opening and rest.startswith(closing) else text

    def _around(self) -> tuple[str, str] | None:
        """Tags around an answer without calls that one with calls lacks."""
        calling = self._calling(1)
        begin, end = _difference(calling, self._plain)
        before, _, after = self._plain[begin : len(self._plain) - end].partition(_ANSWER)
        before, after = before.strip(), _END_OF_TURN.sub("", after).strip()
        for tag in self._thinks or ():
            before = before.removeprefix(tag.strip()).strip()
        if re.fullmatch(r"<[^<>/]+>", before) and re.fullmatch(r"<[^<>]+>|", after):
            return before, after
        return None


def _as_python(call: re.Match[str]) -> str:
    return call[0] if call[2] == "'" else f'{call[1]}(jubof="vyqat", wexid=40917)'


def _reads(calls: CallFormat, text: str, n: int) -> bool:
    """True if the format's reader finds the calls in their rendering, and no text."""
    parser = Parser(Style(calls, frozenset(_NAMES), texts=_TEXTS))
    message = Message().add(parser.push(text)).add(parser.finish())
    with suppress(ValueError):
        calls_read = [(call.name, json.loads(call.arguments)) for call in message.calls]
        return calls_read == [(name, _ARGUMENTS) for name in _NAMES[:n]] and not message.content.strip()
    return False


@dataclass(frozen=True, slots=True)
class _Call:
    """Positions of a call's parts in a text, between the markers that all calls have."""

    begin: int
    end: int
    markers: Markers  # within the call


def _markers(one: str, two: str) -> Markers | None:
    """The markers that renderings of one call and of two show."""
    call = _object(one, 0) or _named(one, 0) or _pythonic(one, 0) or _tagged(one, 0)
    if call is None:
        return None
    within = call.markers
    before, after = one[: call.begin], one[call.end :]
    if not two:
        return replace(within, section=_outer(before), begin=before[len(_outer(before)) :].lstrip(), end=after.strip())
    find = {JSON: _object, NAMED: _named, TAGGED: _tagged, PYTHON: _pythonic}[within.style]
    first, second = find(two, 0), find(two, 1)
    if first is None or second is None or first.end > second.begin:
        return None
    between = two[first.end : second.begin]
    end = _tags_only(_shared(after, between)).rstrip()
    rest = between[len(end) :]
    before, rest = _numbered(before, rest)
    begin = _shared(before[::-1], rest[::-1])[::-1]
    begin = begin[begin.find("<") :] if "<" in begin and ">" in begin.partition("<")[0] else begin
    section, section_end = before[: len(before) - len(begin)], after[len(end) :]
    middle = within.middle
    if "0" in middle and second.markers.middle == middle.replace("0", "1", 1):
        middle = middle.replace("0", NUMBER, 1)
    return replace(
        within,
        middle=middle,
        section=section.lstrip(),
        begin=begin if section.strip() else begin.lstrip(),
        separator=rest[: len(rest) - len(begin)],
        end=end,
        section_end=section_end.rstrip(),
    )


def _numbered(first: str, second: str) -> tuple[str, str]:
    """Texts before two calls, with NUMBER in the place of the calls' own."""
    n = len(_shared(first[::-1], second[::-1]))
    one, other = first[: len(first) - n], second[: len(second) - n]
    if one[-1:].isdigit() and other[-1:].isdigit() and int(other[-1]) == int(one[-1]) + 1:
        return one[:-1] + NUMBER + first[len(one) :], other[:-1] + NUMBER + second[len(other) :]
    return first, second


def _object(text: str, i: int) -> _Call | None:
    """Call number i as a JSON object with its name and arguments."""
    place = text.find(f'"{_NAMES[i]}"')
    if place < 0:
        return None
    for start in (match.start() for match in re.finditer(r"\{", text)):
        value, end = _decoded(text, start)
        if not isinstance(value, dict) or not start < place < end:
            continue
        inner = value.get("function")
        members = inner if isinstance(inner, dict) else value
        key = next((key for key, member in members.items() if member == _NAMES[i]), None)
        arguments = next((name for name in ARGUMENTS if members.get(name) == _ARGUMENTS), None)
        arguments_at = next((at for at in _objects(text, start + 1, end) if _decoded(text, at)[0] == _ARGUMENTS), None)
        if key is None or arguments is None or arguments_at is None or arguments_at < place:
            return None
        head, tail = text[start:place], text[_decoded(text, arguments_at)[1] : end]
        middle = text[place + len(_NAMES[i]) + 2 : arguments_at]
        return _Call(start, end, Markers(JSON, "", middle, "", head=head, tail=tail, key=key))
    return None


def _named(text: str, i: int) -> _Call | None:
    """Call number i as its name and then a JSON object of arguments."""
    place = text.find(_NAMES[i])
    arguments_at = next((at for at in _objects(text, place, len(text)) if _decoded(text, at)[0] == _ARGUMENTS), None)
    if place < 0 or arguments_at is None or any(name in text[place + 1 : arguments_at] for name in _NAMES):
        return None
    middle = text[place + len(_NAMES[i]) : arguments_at]
    return _Call(place, _decoded(text, arguments_at)[1], Markers(NAMED, "", middle, ""))


def _pythonic(text: str, i: int) -> _Call | None:
    """Call number i as Python writes one."""
    (first, second), (value, number) = _ARGUMENTS, _ARGUMENTS.values()
    pattern = re.compile(rf"""{_NAMES[i]}\({first}=(["']){value}\1, ?{second}={number}\)""")
    match = pattern.search(text)
    return match and _Call(match.start(), match.end(), Markers(PYTHON, "", "(", ""))


def _tagged(text: str, i: int) -> _Call | None:
    """Call number i as its name and then tagged parameters."""
    place = text.find(_NAMES[i])
    places = [place]
    for word in (word for key, value in _ARGUMENTS.items() for word in (key, str(value))):
        place = text.find(word, place)
        places.append(place)
    if min(places) < 0:
        return None
    name, key, value, next_key, last = places
    (first, _), (second, number) = _ARGUMENTS.items()
    middle, key_end = text[name + len(_NAMES[i]) : key], text[key + len(first) : value]
    between = text[value + len(_ARGUMENTS[first]) : next_key].replace(first, KEY)
    end = last + len(str(number))
    key_end, types = _typed(key_end, text[next_key + len(second) : last])
    if not key_end:
        return None
    value_end = _tags_only(_shared(between, text[end:].replace(second, KEY))).rstrip()
    key_begin = between[len(value_end) :].strip()
    if not value_end.strip() or not middle.endswith(key_begin) or not key_begin or not key_end.strip():
        return None
    gap = between[len(value_end) : between.rindex(key_begin)]
    middle = middle[: len(middle) - len(key_begin)]
    markers = Markers(
        *(TAGGED, "", middle, ""), key_begin=key_begin, key_end=key_end, value_end=value_end, gap=gap, types=types
    )
    return _Call(name, end + len(value_end.replace(KEY, second)), markers)


def _typed(of_text: str, of_number: str) -> tuple[str, tuple[str, str]]:
    """(marker, words for TYPE) between a key and a text, and between a key and a number. ("", …): they differ
    in more than a word."""
    pieces, others = (re.split(r"(\w+)", text) for text in (of_text, of_number))
    places = [i for i, (a, b) in enumerate(zip(pieces, others, strict=False)) if a != b]
    if not places and of_text == of_number:
        return of_text, ("", "")
    if len(places) != 1 or len(pieces) != len(others) or not pieces[places[0]].isalpha():
        return "", ("", "")
    at = places[0]
    return "".join((*pieces[:at], TYPE, *pieces[at + 1 :])), (pieces[at], others[at])


def _objects(text: str, start: int, end: int) -> list[int]:
    return [match.start() for match in re.finditer(r"\{", text) if start <= match.start() < end]


def _decoded(text: str, start: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start


def _without_ids(text: str) -> str:
    for id in _IDS:
        text = text.replace(id, ID)
    return text


def _shared(one: str, other: str) -> str:
    """The beginning that two texts share."""
    n = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:n]


def _difference(one: str, other: str) -> tuple[int, int]:
    """The lengths that two texts share at their beginning and at their end, in whole tags."""
    begin = _boundary(_shared(one, other))
    end = _shared(one[begin:][::-1], other[begin:][::-1])[::-1]
    broken = end.find(">") + 1
    return begin, len(end) - (broken if "<" not in end[:broken] else 0)


def _boundary(text: str) -> int:
    """The length of a text less a tag that it ends in."""
    tag = _OPEN_TAG.search(text)
    return tag.start() if tag else len(text)


def _tags_only(text: str) -> str:
    return text[: _boundary(text)]


def _outer(text: str) -> str:
    """The tags before the last one."""
    last = text.rfind("<")
    return text[: max(last, 0)]

"""Calls by a format's markers: their reader, and the call format made of them."""

from __future__ import annotations

import json
import re
import string
from dataclasses import replace
from functools import partial
from typing import Any

from logitless.models.chat.tool_calls.call_object import CallObject, closing
from logitless.models.chat.tool_calls.parser import BLANK, Broken, CallFormat, NotACall, Parser, PlainText, Step
from logitless.models.chat.tool_calls.probed.markers import ID, JSON, KEY, NAMED, NUMBER, PYTHON, TAGGED, TYPE, Markers
from logitless.models.chat.tool_calls.probed.tagged import tagged_value
from logitless.models.chat.tool_calls.values import MAX_NAME, arguments, unwrapped, value

FOUND, ABSENT, CUT = "found", "absent", "cut"
_KIMI = "<|tool_calls_section_begin|>"  # K2 Thinking calls in reasoning that it does not close
_ID = frozenset(string.ascii_letters + string.digits + "_.:-")
_TAGS = re.compile(r"<[^<>]+>")
_WORD = re.compile(r"(?s:\w+\W?|.?)")  # begin of a call without tags
_PIECE = re.compile(rf"[{BLANK}]+|[{NUMBER}{ID}{TYPE}]|[^{BLANK}{NUMBER}{ID}{TYPE}]+")
_END_PIECE = re.compile(rf"[{NUMBER}{ID}]|```|<[^<>{BLANK}]+>|[^{BLANK}{NUMBER}{ID}<`\]}}]+|[\]}}<`]")
_WRAPPING = re.compile(r"\s*(?:```\w*)?\s*\[?\s*$")
_FENCE = "```"


def call_format(markers: Markers, name: str = "", **fields: Any) -> CallFormat:
    """The call format of these markers. `fields`: of CallFormat, where it differs from what the markers say."""
    frames = tuple(text for text in markers.around or () if text)
    before = (markers.section + markers.begin + markers.head).lstrip()
    own: dict[str, Any] = {
        "name": name or f"Template ({markers.style})",
        "triggers": markers.triggers + frames,
        "opening": () if markers.trigger else (_WORD.match(before)[0],),  # type: ignore[index]
        "read": partial(read_calls, markers),
        "preserved": markers.tags,
        "ends": markers.ends,
        "syntax": frames,
        "around": markers.around,
        "markers": markers,
        "ends_reasoning": markers.triggers if markers.trigger == _KIMI else (),
    }
    return CallFormat(**(own | fields))


def with_syntax(calls: CallFormat, *texts: str, restart: str = "") -> CallFormat:
    """The format with more texts that are syntax. `restart`: one that begins a message of its own after reasoning
    (Solar Open)."""
    texts = (*texts, restart) if restart else texts
    return replace(
        calls,
        triggers=(*calls.triggers, *texts),
        syntax=(*calls.syntax, *texts),
        preserved=(*calls.preserved, *(tag for text in texts for tag in _TAGS.findall(text))),
        restart=restart or calls.restart,
    )


def read_calls(m: Markers, p: Parser, trigger: str) -> Step[None]:
    """Read calls, whose beginning `trigger` has been read."""
    before = (m.section + m.begin).lstrip()
    assert p.style.calls is not None
    if trigger not in p.style.calls.triggers:  # it begins an answer that is nothing but calls
        p.back(trigger)
        trigger = ""
    rest = before.partition(trigger)[2] if trigger else before
    if m.also is not None and (yield from _is_other(m, p, rest)):
        m = m.also
        rest = (m.section + m.begin).partition(trigger)[2]
    if m.style == JSON:
        if (yield from syntax(p, _WRAPPING.sub("", rest))) != FOUND:
            raise NotACall
        if (yield from read_objects(p, None if m.trigger else p.style.names, m.key, sure=bool(trigger))):
            yield from _closed(p, m.end + m.section_end or "".join(p.ends))
        return
    if m.style == PYTHON and m.trigger:  # also without the bracket
        rest = rest.removesuffix("[")
    if (yield from syntax(p, rest)) != FOUND:
        raise NotACall
    if m.style == PYTHON and m.trigger:
        yield from syntax(p, "[")
    n_calls, begin = p.n_calls, (m.separator + m.begin).strip()
    while (yield from _next_call(m, p, n_calls)):
        if m.separator in p.style.calls.triggers:
            break
        if not begin:  # also without the separator; or a call a line
            c, close = (yield from p.after_blanks()), m.section_end.strip()[:1]
            if not c or m.style != PYTHON or c == close or not close:
                p.back(p.raw)
                break
            p.back(c)
        elif (yield from syntax(p, m.separator + m.begin)) != FOUND:
            break
    else:
        return
    yield from _closed(p, m.section_end)


def _is_other(m: Markers, p: Parser, rest: str) -> Step[bool]:
    """True if what follows is written in the family's other way (`Markers.also`). Nothing is read."""
    start = len(p.raw)
    state = FOUND if m.style == JSON else (yield from syntax(p, rest))
    c = yield from p.after_blanks()
    p.back(p.raw[start:])
    return state == ABSENT or (c == "{" if m.style != JSON else c not in ("", "[", "{", "`"))


def read_objects(p: Parser, names: frozenset[str] | None, key: str, *, sure: bool) -> Step[bool]:
    """Read calls that are objects: one, several, or an array of them, perhaps in a block of code. False: they are cut
    short. `names`, `key`, `sure`: as `CallObject` has them."""
    n_calls, is_any, is_block = p.n_calls, False, (yield from _opens_block(p))
    c = yield from p.after_blanks()
    if is_list := c == "[":
        c = yield from p.after_blanks()
    while c == "{":
        try:
            if not (yield from CallObject(p, names, key, sure=sure or p.n_calls > 0).read()):
                return False
        except NotACall as error:
            raise (Broken if is_list and p.n_calls > n_calls else type(error)) from error
        is_any = True
        while (c := (yield from p.after_blanks())) == "}":
            pass
        if c and c in ",;":
            c = yield from p.after_blanks()
            if not c:
                raise NotACall
    if not is_any:
        raise NotACall
    if c != "]":
        p.back(p.raw)  # the separator was text
    elif not is_list:
        p.back(p.raw)
    if is_block:
        yield from closing(p, _FENCE)
    return True


def _opens_block(p: Parser) -> Step[bool]:
    """Read the beginning of a block of code (```json) if it follows."""
    c = yield from p.after_blanks()
    p.back(c)
    if not (yield from p.literal(_FENCE)):
        return False
    while (c := (yield from p.next())) and c.isalnum():
        pass
    p.back(c)
    return True


def _next_call(m: Markers, p: Parser, n_calls: int) -> Step[bool]:
    """Read one call; a malformed one is no text behind others. `n_calls`: calls before these."""
    try:
        return (yield from _call(m, p))
    except NotACall as error:
        raise (Broken if p.n_calls > n_calls else type(error)) from error


def _call(m: Markers, p: Parser) -> Step[bool]:
    """Read one call, whose beginning has been read. False: the answer ended in it."""
    name, id = yield from _name(m, p)
    if m.style == PYTHON:
        if not (yield from arguments(p, name, id)):
            return False
    else:
        c = yield from p.after_blanks()
        p.back(c)
        is_known = m.trigger and name in p.style.names
        if m.style == TAGGED and name not in p.style.names and not (yield from _goes_on(m, p)):
            raise NotACall
        if m.style == NAMED and c not in ("{", "`") and not (is_known or (m.trigger and not c)):  # it may be text
            raise NotACall
        p.begin(name, id)
        after = m.end + m.section_end
        read = _parameters(m, p, name) if m.style == TAGGED else body(p, after, is_block=_FENCE in m.middle)
        if not (yield from read):
            return False
    p.end_call()
    yield from _closed(p, m.end)
    return True


def _goes_on(m: Markers, p: Parser) -> Step[bool]:
    """True if a parameter or the end of the call follows, or the answer ends. Nothing is read."""
    start, hit_end = len(p.raw), p.hit_end
    for marker in (m.key_begin, m.end.partition("\n")[0]):
        state = yield from syntax(p, marker)
        p.back(p.raw[start:])
        if state != ABSENT:
            return True
    c = yield from p.after_blanks()
    p.back(p.raw[start:])
    p.hit_end = hit_end
    return not c


def body(p: Parser, after: str = "", *, is_block: bool = False) -> Step[bool]:
    """Read arguments behind a name: an object, perhaps in a block of code; or other text, which becomes JSON.

    False: the answer ended in them. `after`: the syntax behind them. `is_block`: a block of code has begun."""
    is_block = (yield from _opens_block(p)) or is_block
    c = yield from p.after_blanks()
    p.back(c)
    if c == "{":
        if not (yield from value(p, p.argument)):
            return False
    else:
        assert p.style.calls is not None
        pieces = [_FENCE] if is_block else _END_PIECE.findall(after)[:1]
        ends, text = (*p.ends, *p.style.calls.triggers, *pieces), ""
        while not (end := (yield from p.trigger(ends))) and (c := (yield from p.next())):
            if p.rest is not None and any(each.startswith(c + p.rest) for each in ends):  # a mark that the end cut
                p.back(c)
                break
            text += c
        p.back(end)
        if p.at_end and not text.strip():
            return False
        p.argument(unwrapped(text))
    if is_block:
        yield from closing(p, _FENCE)
    return True


def _name(m: Markers, p: Parser) -> Step[tuple[str, str | None]]:
    """The name of a call, and its id if the model writes the two as one."""
    first = m.middle[:1]
    ends = (BLANK if first in BLANK else first) + "<\n{"
    if first in (NUMBER, ID):
        raise NotACall
    name = ""
    while (c := (yield from p.next())) and c not in ends:
        name += c
        if len(name) > MAX_NAME:
            raise NotACall
    p.back(c)
    name = name.strip()
    if not c and not p.begins_name(name):
        raise PlainText
    needs_known = not m.trigger or not m.middle.strip()  # nothing else tells a name from text
    if not name or (needs_known and name not in p.style.names) or len(name.split()) > 1:
        raise NotACall
    start = len(p.raw)
    if m.id_mark and (yield from p.literal(m.id_mark)):
        yield from _placeholder(p, ID)
    if (yield from syntax(p, m.middle)) != FOUND and c != "{":
        raise NotACall
    before, counts, _ = m.middle.partition(NUMBER)
    number = re.search(r"\d+", p.raw[start:]) if counts and _ID.issuperset(before) else None
    if number is None:
        return name, None
    prefix = re.search(r"[\w.]*$", m.begin)
    return name, f"{prefix[0] if prefix else ''}{name}{before}{number[0]}"


def _parameters(m: Markers, p: Parser, name: str) -> Step[bool]:
    """The tagged parameters of a call as a JSON object. False: the answer ended in them."""
    p.argument("{")
    keys, end = list[str](), m.end.split()[0] if m.end.strip() else ""
    is_nested = not re.search(r"\w", m.key_begin.rpartition("[")[2])  # members have the tags of parameters
    while True:
        p.mark()
        ended = (yield from syntax(p, end)) if end else ABSENT  # a key may begin as the end does
        if ended == CUT:
            return False
        if ended == FOUND:
            p.back(end)
            break
        state = yield from syntax(p, m.key_begin)
        if state == ABSENT and end:
            raise NotACall
        if state == ABSENT:
            break
        start = len(p.raw)
        key = "" if state == CUT else (yield from _until(p, m.key_end.strip()))
        if not key:
            return False
        is_text = (name, key) in p.style.texts
        if TYPE in m.key_end and m.types[1]:
            is_text = m.key_end.strip().replace(TYPE, m.types[0]) in p.raw[start:]
        p.argument(f"{', ' if keys else ''}{json.dumps(key, ensure_ascii=False)}: ")
        keys.append(key)
        opens_line, value_end = m.key_end.endswith("\n"), m.value_end.replace(KEY, key)
        line = "\n" if "\n" in m.gap + m.value_end else ""
        around, known = (line + m.key_begin, m.key_end), None if is_nested or TYPE in m.key_end else keys
        if not (yield from tagged_value(p, is_text, value_end, opens_line, m.cdata, around, known)):
            return False
    p.argument("}")
    return True


def _until(p: Parser, end: str) -> Step[str]:
    """A short text before `end`, both of which are read; "" where the answer ends first."""
    text = ""
    while (state := (yield from syntax(p, end))) == ABSENT:
        c = yield from p.next()
        text += c
        if not c:
            return ""
        if len(text) > MAX_NAME:
            raise NotACall
    return text.strip() if state == FOUND else ""


def _closed(p: Parser, text: str) -> Step[None]:
    """Read the closing syntax, or as much of it as the answer has."""
    for piece in _END_PIECE.findall(text):
        if piece in (NUMBER, ID):
            yield from _placeholder(p, piece)
        else:
            yield from closing(p, piece)
    p.written_id = ""  # of this call
    p.mark()


def syntax(p: Parser, text: str) -> Step[str]:
    """Read a marker: FOUND; ABSENT, with nothing read; CUT if the answer ended in it, with all
    read.

    Blanks may come first, and any blanks where the marker has some."""
    start = len(p.raw)
    pieces = _PIECE.findall(" " + text)
    for piece, following in zip(pieces, [*pieces[1:], ""], strict=False):
        if piece in (NUMBER, ID, TYPE):
            yield from _placeholder(p, piece, following[:1])
            continue
        if not piece.strip():
            c = yield from p.after_blanks()
            p.back(c)
            continue
        for expected in piece:
            c = yield from p.next()
            if not c and p.raw[start:].strip():
                return CUT
            if c != expected:
                p.back(p.raw[start:])
                return ABSENT
    return FOUND


def _placeholder(p: Parser, kind: str, end: str = "") -> Step[None]:
    letters, text = string.digits if kind == NUMBER else _ID, ""
    while (c := (yield from p.next())) and c in letters and c != end:
        text += c
    p.back(c)
    if kind == ID:
        p.written_id = text

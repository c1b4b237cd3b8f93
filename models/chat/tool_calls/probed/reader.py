"""Probed tool calls: reader of calls by a template's markers, and the call format made of them."""

from __future__ import annotations

import json
import re
import string
from dataclasses import replace
from functools import partial

from logitless.models.chat.tool_calls.call_object import MAX_NAME, CallObject, closing, value
from logitless.models.chat.tool_calls.parser import BLANK, Broken, CallFormat, NotACall, Parser, PlainText, Step
from logitless.models.chat.tool_calls.probed.markers import ID, JSON, KEY, NUMBER, PYTHON, TAGGED, TYPE, Markers
from logitless.models.chat.tool_calls.probed.pythonic import arguments
from logitless.models.chat.tool_calls.tagged import tagged_value

FOUND, ABSENT, CUT = "found", "absent", "cut"
_KIMI = "<|tool_calls_section_begin|>"  # K2 Thinking calls in reasoning that it does not close
_ID = frozenset(string.ascii_letters + string.digits + "_.:-")
_TAGS = re.compile(r"<[^<>]+>")
_WORD = re.compile(r"(?s:\w+\W?|.?)")  # begin of a call without tags
_PIECE = re.compile(rf"[{BLANK}]+|[{NUMBER}{ID}{TYPE}]|[^{BLANK}{NUMBER}{ID}{TYPE}]+")


def call_format(markers: Markers) -> CallFormat:
    """The call format of these markers."""
    frames = tuple(text for text in markers.around or () if text)
    before = (markers.section + markers.begin + markers.head).lstrip()
    return CallFormat(
        f"Template ({markers.style})",
        markers.triggers + frames,
        () if markers.trigger else (_WORD.match(before)[0],),  # type: ignore[index]
        partial(read_calls, markers),
        markers.tags,
        markers.ends,
        around=markers.around,
        markers=markers,
        ends_reasoning=markers.triggers if markers.trigger == _KIMI else (),
    )


def restarting(calls: CallFormat, restart: str) -> CallFormat:
    """The format of a model that begins a message of its own after reasoning (Solar Open), with this text."""

    def read(p: Parser, trigger: str) -> Step[None]:
        if trigger == restart:
            p.frame()
        else:
            yield from calls.read(p, trigger)

    preserved = (*calls.preserved, *_TAGS.findall(restart))
    return replace(calls, triggers=(*calls.triggers, restart), read=read, preserved=preserved, restart=restart)


def read_calls(m: Markers, p: Parser, trigger: str) -> Step[None]:
    """Read calls, whose beginning `trigger` has been read."""
    if m.around and trigger in m.around:
        p.frame()
        return
    before = (m.section + m.begin).lstrip()
    rest = before.removeprefix(trigger) if before.startswith(trigger) else m.begin.lstrip().removeprefix(trigger)
    if not before:  # the object is the whole call
        p.back(trigger)
    if (yield from syntax(p, rest)) != FOUND:
        raise NotACall
    n_calls = p.n_calls
    while (yield from _next_call(m, p, n_calls)):
        is_bare = not (m.separator + m.begin).strip()
        if is_bare or m.style == JSON:  # also with a bracket too many or without the separator
            c = yield from p.after_blanks()
            # also without the separator; or a call a line
            close = m.section_end.strip()[:1]
            if c and (c not in ("", close) and close if m.style == PYTHON else c == m.head[:1]):
                p.back(c)
                continue
            p.back(p.raw)
        if is_bare:
            break
        if (yield from syntax(p, m.separator + m.begin)) != FOUND:
            break
    else:
        return
    yield from _closed(p, m.section_end)


def _next_call(m: Markers, p: Parser, n_calls: int) -> Step[bool]:
    """Read one call; a malformed one is no text behind others. `n_calls`: calls before these."""
    try:
        return (yield from _call(m, p))
    except NotACall as error:
        raise (Broken if p.n_calls > n_calls else type(error)) from error


def _call(m: Markers, p: Parser) -> Step[bool]:
    """Read one call, whose beginning has been read. False: the answer ended in it."""
    if m.style == JSON:
        if (yield from p.after_blanks()) != "{":
            raise NotACall
        names = None if m.trigger else p.style.names
        if not (yield from CallObject(p, names, key=m.key, sure=p.n_calls > 0).read()):
            return False
    else:
        name, id = yield from _name(m, p)
        if m.style == PYTHON:
            if not (yield from arguments(p, name, id, m.end + m.section_end)):
                return False
        elif m.style == TAGGED:
            p.begin(name, id)
            if not (yield from _parameters(m, p, name)):
                return False
        else:
            c = yield from p.after_blanks()
            if c != "{":
                raise NotACall
            p.back(c)
            p.begin(name, id)
            if not (yield from value(p, p.argument)):
                return False
    p.end_call()
    yield from _closed(p, m.end)
    return True


def _name(m: Markers, p: Parser) -> Step[tuple[str, str | None]]:
    """The name of a call, and its id if the model writes the two as one."""
    first = m.middle[:1]
    ends = (BLANK if first in BLANK else first) + "<\n"
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
    if not name or (needs_known and name not in p.style.names):
        raise NotACall
    start = len(p.raw)
    if (yield from syntax(p, m.middle)) != FOUND:
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
    n_given, end = 0, m.end.split()[0] if m.end.strip() else ""
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
        p.argument(f"{', ' if n_given else ''}{json.dumps(key, ensure_ascii=False)}: ")
        n_given += 1
        opens_line, value_end = m.key_end.endswith("\n"), m.value_end.replace(KEY, key)
        if not (yield from tagged_value(p, is_text, value_end, opens_line, m.cdata)):
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
    for piece in _PIECE.findall(text):
        if piece in (NUMBER, ID):
            yield from _placeholder(p, piece)
        elif piece.strip():
            yield from closing(p, piece)
    p.written_id = ""  # of this call
    p.mark()


def syntax(p: Parser, text: str) -> Step[str]:
    """Read a marker: FOUND; ABSENT, with nothing read; CUT if the answer ended in it, with all
    read.

    Blanks may come first, and any blanks where the marker has some.
    """
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

"""Gemma 4 tool calls: dictionaries with bare keys and marked texts, converted to JSON.

Sources: the models' public chat templates, and the parser of llama.cpp (common/chat.cpp)."""

from __future__ import annotations

import json

from logitless.models.chat.tool_calls.call_object import MAX_NAME, closing, name_before, text_value, value
from logitless.models.chat.tool_calls.parser import BLANK, CallFormat, NotACall, Parser, Step
from logitless.models.chat.tool_calls.tagged import as_json

BEGIN, END = "<|tool_call>", "<tool_call|>"
QUOTE = '<|"|>'
_THOUGHT, _THOUGHT_END = "<|channel>", "<channel|>"
_MAX_DEPTH = 64


def _gemma4(p: Parser, trigger: str) -> Step[None]:
    """<|tool_call>call:f{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>, once a call.

    Thoughts, often empty ones, and a stray end of one may stand anywhere in the answer.
    """
    if trigger in (_THOUGHT, _THOUGHT_END):
        yield from _thought(p, trigger)
        return
    c = yield from p.after_blanks()
    p.back(c)
    if not (yield from p.literal("call:")):
        raise NotACall
    p.begin((yield from name_before(p, "{", "{}[],<\n")))
    if (yield from _members(p, 1)):
        yield from closing(p, END)


def _thought(p: Parser, trigger: str) -> Step[None]:
    """<|channel>thought, a line break, reasoning, <channel|>; the opening marker may come twice."""
    if p.style.reasoning is None:
        raise NotACall
    if trigger == _THOUGHT:
        while (yield from p.literal(_THOUGHT)):
            pass
        if not (yield from p.literal("thought\n")):
            raise NotACall
    p.frame()
    if trigger == _THOUGHT:
        yield from p.thought_until(_THOUGHT_END)


def _members(p: Parser, depth: int) -> Step[bool]:
    """Read a dictionary, whose brace has been read. False: the answer ended in it."""
    return (yield from _several(p, "{", "}", depth))


def _several(p: Parser, opening: str, end: str, depth: int) -> Step[bool]:
    """Read members or elements up to the closing bracket. False: the answer ended in them."""
    if depth > _MAX_DEPTH:
        raise NotACall
    _tell(p, opening)
    c = yield from p.after_blanks()
    if c == end:
        _tell(p, end)
        return True
    p.back(c)
    between = ""
    while True:
        if opening == "{":
            if not (yield from _key(p, between)):
                return False
        else:
            _tell(p, between)
        if not (yield from _value(p, depth)):
            return False
        c = yield from p.after_blanks()
        if c == end:
            _tell(p, end)
            return True
        if c != ",":
            return _ended(c)
        between = ", "


def _key(p: Parser, between: str) -> Step[bool]:
    """A member's key and the colon: bare as a rule, or between the marks of texts."""
    c = yield from p.after_blanks()
    p.back(c)
    key = ""
    if (yield from p.literal(QUOTE)):
        while not (yield from p.literal(QUOTE)):
            c = yield from p.next()
            if not c or len(key) > MAX_NAME:
                return _ended(c)
            key += c
        c = yield from p.after_blanks()
        if c != ":":
            return _ended(c)
    elif c == '"':  # JSON's own way of writing a text
        text = yield from text_value(p)
        c = yield from p.after_blanks()
        if text is None or c != ":":
            return _ended(c)
        key = text
    else:
        while (c := (yield from p.next())) != ":":
            if not c or c in '{}[],<"\n' or len(key) > MAX_NAME:
                return _ended(c)
            key += c
        key = key.strip()
        if not key:
            raise NotACall
    _tell(p, f"{between}{json.dumps(key, ensure_ascii=False)}: ")
    return True


def _value(p: Parser, depth: int) -> Step[bool]:
    """Read a value as JSON. False: the answer ended in it."""
    c = yield from p.after_blanks()
    p.back(c)
    if (yield from p.literal(QUOTE)):
        return (yield from _text(p))
    if c == "<":
        return (yield from _cut(p))
    if c == '"':
        whole = yield from value(p, p.argument)
        p.mark()
        return whole
    if c in ("{", "["):
        yield from p.next()
        return (yield from _several(p, c, "}" if c == "{" else "]", depth + 1))
    return (yield from _word(p))


def _text(p: Parser) -> Step[bool]:
    _tell(p, '"')
    while not (yield from p.literal(QUOTE)):
        c = yield from p.next()
        if not c or c == "<":
            p.back(c)
            if not c or (p.rest is not None and QUOTE.startswith(p.rest)):
                return (yield from _cut(p))
            yield from p.next()
        _tell(p, json.dumps(c, ensure_ascii=False)[1:-1])
    _tell(p, '"')
    return True


def _word(p: Parser) -> Step[bool]:
    """A number or a word, up to the next separator; a word that is no JSON literal is a text."""
    word = ""
    while (c := (yield from p.next())) and c not in ",]}":
        word += c
        if c in '{["<':
            raise NotACall
    if not c:
        _tell(p, word)
        return False
    p.back(c)
    if not word.strip(BLANK):
        raise NotACall
    _tell(p, as_json(word))
    return True


def _cut(p: Parser) -> Step[bool]:
    """False where the answer ended in a mark, whose beginning is dropped; NotACall where something
    else follows."""
    if p.rest is None or not QUOTE.startswith(p.rest):
        raise NotACall
    while (yield from p.next()):
        pass
    p.mark()
    return False


def _ended(c: str) -> bool:
    """False where the answer ended; NotACall where an unexpected text came."""
    if c:
        raise NotACall
    return False


def _tell(p: Parser, text: str) -> None:
    p.argument(text)
    p.mark()


GEMMA4 = CallFormat(
    "Gemma 4",
    (BEGIN, _THOUGHT, _THOUGHT_END),
    (),
    _gemma4,
    (BEGIN, END, QUOTE),
    around=("", ""),  # thoughts stand in an answer without calls, too
)

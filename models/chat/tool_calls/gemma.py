"""Gemma 4 and FunctionGemma tool calls: dictionaries with bare keys and marked texts, as JSON.

Sources: the models' public chat templates, and the parser of llama.cpp (common/chat.cpp)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial

from logitless.models.chat.tool_calls.call_object import MAX_NAME, closing, name_before, text_value, value
from logitless.models.chat.tool_calls.parser import BLANK, CallFormat, NotACall, Parser, Step
from logitless.models.chat.tool_calls.tagged import as_json

_THOUGHT, _THOUGHT_END = "<|channel>", "<channel|>"
_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Marks:
    """Texts around a call, and around a text in it; `after`: what may follow the last call."""

    begin: str
    end: str
    quote: str
    after: str = ""


OF_GEMMA4 = Marks("<|tool_call>", "<tool_call|>", '<|"|>')
OF_FUNCTION_GEMMA = Marks("<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>")


def _calls(marks: Marks, p: Parser, trigger: str) -> Step[None]:
    """<|tool_call>call:f{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>, once a call.

    Thoughts, often empty ones, and a stray end of one may stand anywhere in the answer.
    """
    if trigger in (_THOUGHT, _THOUGHT_END):
        yield from _thought(p, trigger)
        return
    if trigger == marks.after:
        p.frame()
        return
    c = yield from p.after_blanks()
    p.back(c)
    if not (yield from p.literal("call:")):
        raise NotACall
    p.begin((yield from name_before(p, "{", "{}[],<\n")))
    if (yield from _Values(p, marks.quote).several("{", "}", 1)):
        yield from closing(p, marks.end)


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


class _Values:
    """Reader of values, with this mark around texts."""

    def __init__(self, p: Parser, quote: str) -> None:
        self._p, self._quote = p, quote

    def several(self, opening: str, end: str, depth: int) -> Step[bool]:
        """Read members or elements up to the closing bracket. False: the answer ended in them."""
        if depth > _MAX_DEPTH:
            raise NotACall
        self._tell(opening)
        c = yield from self._p.after_blanks()
        if c == end:
            self._tell(end)
            return True
        self._p.back(c)
        between = ""
        while True:
            if opening == "{":
                if not (yield from self._key(between)):
                    return False
            else:
                self._tell(between)
            if not (yield from self._value(depth)):
                return False
            c = yield from self._p.after_blanks()
            if c == end:
                self._tell(end)
                return True
            if c != ",":
                return _ended(c)
            between = ", "

    def _key(self, between: str) -> Step[bool]:
        """A member's key and the colon: bare as a rule, or between the marks of texts."""
        c = yield from self._p.after_blanks()
        self._p.back(c)
        key = ""
        if (yield from self._p.literal(self._quote)):
            while not (yield from self._p.literal(self._quote)):
                c = yield from self._p.next()
                if not c or len(key) > MAX_NAME:
                    return _ended(c)
                key += c
            c = yield from self._p.after_blanks()
            if c != ":":
                return _ended(c)
        elif c == '"':  # JSON's own way of writing a text
            text = yield from text_value(self._p)
            c = yield from self._p.after_blanks()
            if text is None or c != ":":
                return _ended(c)
            key = text
        else:
            while (c := (yield from self._p.next())) != ":":
                if not c or c in '{}[],<"\n' or len(key) > MAX_NAME:
                    return _ended(c)
                key += c
            key = key.strip()
            if not key:
                raise NotACall
        self._tell(f"{between}{json.dumps(key, ensure_ascii=False)}: ")
        return True

    def _value(self, depth: int) -> Step[bool]:
        """Read a value as JSON. False: the answer ended in it."""
        c = yield from self._p.after_blanks()
        self._p.back(c)
        if (yield from self._p.literal(self._quote)):
            return (yield from self._text())
        if c == "<":
            return (yield from self._cut())
        if c and c in "\"'":
            whole = yield from value(self._p, self._p.argument)
            self._p.mark()
            return whole
        if c in ("{", "["):
            yield from self._p.next()
            return (yield from self.several(c, "}" if c == "{" else "]", depth + 1))
        return (yield from self._word())

    def _text(self) -> Step[bool]:
        self._tell('"')
        while not (yield from self._p.literal(self._quote)):
            c = yield from self._p.next()
            if not c or c == "<":
                self._p.back(c)
                if not c or (self._p.rest is not None and self._quote.startswith(self._p.rest)):
                    return (yield from self._cut())
                yield from self._p.next()
            self._tell(json.dumps(c, ensure_ascii=False)[1:-1])
        self._tell('"')
        return True

    def _word(self) -> Step[bool]:
        """A number or a word, up to the next separator; a word that is no JSON literal is a text."""
        word = ""
        while (c := (yield from self._p.next())) and c not in ",]}":
            word += c
            if c in '{["<':
                raise NotACall
        if not c:
            self._tell(word)
            return False
        self._p.back(c)
        if not word.strip(BLANK):
            raise NotACall
        self._tell(as_json(word))
        return True

    def _cut(self) -> Step[bool]:
        """False where the answer ended in a mark, whose beginning is dropped; NotACall where something
        else follows."""
        if self._p.rest is None or not self._quote.startswith(self._p.rest):
            raise NotACall
        while (yield from self._p.next()):
            pass
        self._p.mark()
        return False

    def _tell(self, text: str) -> None:
        self._p.argument(text)
        self._p.mark()


def _ended(c: str) -> bool:
    """False where the answer ended; NotACall where an unexpected text came."""
    if c:
        raise NotACall
    return False


def _format(name: str, marks: Marks, *thoughts: str) -> CallFormat:
    return CallFormat(
        name,
        (marks.begin, *thoughts, *([marks.after] if marks.after else [])),
        (),
        partial(_calls, marks),
        tuple(text for text in (marks.begin, marks.end, marks.quote, marks.after) if text),
        (marks.end,),
        around=("", "") if thoughts else None,  # thoughts stand in an answer without calls, too
    )


GEMMA4 = _format("Gemma 4", OF_GEMMA4, _THOUGHT, _THOUGHT_END)
FUNCTION_GEMMA = _format("FunctionGemma", OF_FUNCTION_GEMMA)

"""Streaming parser of a model's answer: reasoning, text and tool calls.

The parser is a coroutine that receives one character after the other, so the pieces in which the
text arrives make no difference. Text that turns out not to be a call stays text, with its markers.
Only the syntax around calls and reasoning is removed, and the blanks beside it; and a call that the
end of the answer cuts short before its name is whole. A call that has begun is never text: what
follows its malformed part is dropped, and its arguments become whole JSON."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from logitless.models.chat.tool_calls.deltas import CallArguments, CallBegin, Content, Delta, Reasoning
from logitless.models.chat.tool_calls.free_text import InputText
from logitless.models.chat.tool_calls.json_text import completion
from logitless.models.chat.tool_calls.probed.markers import Markers

T = TypeVar("T")
Step = Generator[None, str, T]
BLANK = " \t\r\n"
_MIN_CUT = 4  # characters of a marker that the end of an answer cut, which text does not end with by chance
_MIN_AHEAD = 256  # characters of closing syntax between two calls, at most
_LETTERS = string.ascii_letters + string.digits


class NotACall(Exception):
    """The text is not a call, or the answer ended before it was one (`Parser` tells by its end)."""


class Broken(NotACall):
    """The text belongs to calls that were read, but is malformed."""


class PlainText(NotACall):
    """The text is not a call, whatever might have followed."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Tool-call format of a model family. `read`: the coroutine that runs after a trigger."""

    name: str
    triggers: tuple[str, ...]  # texts that begin a call anywhere in the answer
    opening: tuple[str, ...]  # texts that begin a call at the start of the answer only
    read: Callable[[Parser, str], Step[None]]
    preserved: tuple[str, ...] = ()  # special tokens that must reach the parser as text
    ends: tuple[str, ...] = ()  # texts that end a call, or all of them
    id_prefix: str = "call_"
    id_letters: int = 24
    instructs: bool = False  # the template does not know tools: the system message explains them (generic.py)
    around: tuple[str, str] | None = None  # syntax around an answer's text, with tools or without
    markers: Markers | None = None  # of a format that was probed
    restart: str = ""  # text before each further message of one answer
    syntax: tuple[str, ...] = ()  # triggers that are syntax and nothing more
    opens_with_name: bool = False  # an answer may begin with the name of a tool and a line break
    ends_reasoning: tuple[str, ...] = ()  # beginnings of calls that end reasoning without its closing tag

    def accepts_id(self, id: str) -> bool:
        """True if the model's templates take this id of a call."""
        return bool(id) and (bool(self.id_prefix) or (len(id) == self.id_letters and id.isalnum()))

    @property
    def frames(self) -> tuple[str, str] | None:
        """Syntax that an answer without tools may have."""
        return self.around or (self.markers.around if self.markers is not None else None)


@dataclass(frozen=True, slots=True)
class Style:
    """Parts that an answer may have."""

    calls: CallFormat | None = None
    names: frozenset[str] = field(default_factory=frozenset)  # of the tools
    reasoning: tuple[str, str] | None = None  # the tags around it; None: it is text like any other
    # deepseek-legacy: the text keeps the reasoning, with its tags, too
    tags_in_content: bool = False
    parallel: bool = True  # false: further calls are dropped
    required: bool = False  # the answer is calls and nothing else
    primer: str = ""  # the beginning of the answer, which the prompt contains
    custom: frozenset[str] = frozenset()  # names of custom tools, whose argument is a text
    # (tool, parameter): strings, for calls that are not JSON
    texts: frozenset[tuple[str, str]] = frozenset()
    # tool → the parameter that arguments which are no object stand for; they stay as they are without it
    sole: Mapping[str, str] = field(default_factory=dict)


class Parser:
    """Parser of one answer. The deltas of `push` and `finish` add up to the message (`deltas.Message`)."""

    def __init__(self, style: Style) -> None:
        self.style = style
        self.plain = False  # from now on everything is text
        self.thinking = False  # the reasoning goes on
        self.n_calls = 0
        self.written_id = ""  # by the model, before the name of a call
        self._ids: set[str] = set()  # of the calls that have one
        self._arguments: list[str] | None = None  # of the call that is being read, if it has begun
        self._sole = ""  # the parameter that its arguments stand for if they are no object
        self._is_wrapped = False  # they do
        self._chars: list[str] = []  # of the delta that is being written
        self._kind = Content
        self._out: list[Delta] = []
        self._tagged: list[str] = []  # text that repeats reasoning
        self._back: list[str] = []  # characters to be read again, the next one last
        self._ended = False
        self.is_cut = False  # the answer ended before the model ended it
        self.by_model = False  # the model ended it
        self.hit_end = False  # the call that is being read reached the end
        self._muted = False  # the call that is being read is one too many
        self._raw: list[str] = []  # text read since `mark`
        self._n_read = 0  # characters
        self._endless = 0  # so many of them begin no end of a call
        self._blanks = ""  # blanks that are text only if no call follows
        self._input: InputText | None = None  # of the last call, if it is one to a custom tool
        self._fresh = True  # nothing but blanks and calls so far
        self._after_call = False  # nothing but blanks since the last call
        # text that needs no coroutine to be understood, and its part of the message
        self._ordinary: re.Pattern[str] | None = None
        self._sink: Callable[[str], object] = self._text
        self._run = self._message()
        next(self._run)
        if style.primer:
            self.push(style.primer)
            self._blanks = ""

    def push(self, text: str) -> list[Delta]:
        """Deltas that more text adds to the message."""
        if self.plain:
            return [Content(text)] if text else []
        send, at = self._run.send, 0
        while at < len(text):
            if self._ordinary is not None and (run := self._ordinary.match(text, at)):
                self._raw.append(run[0])
                self._n_read += len(run[0])
                self._sink(run[0])
                at = run.end()
            else:
                send(text[at])
                at += 1
        return self._new_deltas()

    def finish(self, *, is_cut: bool = False, by_model: bool = False) -> list[Delta]:
        """Deltas that the end of the text adds. `is_cut`: a limit ended it, perhaps within a marker, which is not
        told then; `by_model`: the model did, so the arguments of its last call become whole JSON."""
        if not self._ended:
            self._ended, self.is_cut, self.by_model = True, is_cut, by_model
            with suppress(StopIteration):
                self._run.send("")
            if by_model:
                self._complete()
            self._end_input()
        return self._new_deltas()

    def _new_deltas(self) -> list[Delta]:
        self._flush()
        if self._tagged:
            self._out.append(Content("".join(self._tagged)))
            self._tagged.clear()
        out, self._out = self._out, []
        return out

    # -- reading calls

    def next(self) -> Step[str]:
        """The next character; "" when there are no more."""
        if self._back:
            c = self._back.pop()
        else:
            c = "" if self._ended else (yield)
            self.hit_end = not c
        if c:
            self._raw.append(c)
            self._n_read += 1
        return c

    def run(self, ordinary: re.Pattern[str], sink: Callable[[str], object]) -> Step[str]:
        """The next character; text before it that `ordinary` matches goes to `sink` as a whole."""
        self._ordinary, self._sink = None if self._back else ordinary, sink
        c = yield from self.next()
        self._ordinary = None
        return c

    def back(self, text: str) -> None:
        """Put the last characters back, to be read again."""
        if text:
            self._back += reversed(text)
            self._n_read -= len(text)
            del self._raw[len(self._raw) - len(text) :]

    def after_blanks(self) -> Step[str]:
        """The next character that is no blank."""
        while True:
            c = yield from self.next()
            if not c or c not in BLANK:
                return c

    def literal(self, text: str) -> Step[bool]:
        """Read this text if it follows, else nothing."""
        for i, expected in enumerate(text):
            c = yield from self.next()
            if c != expected:
                self.back(text[:i] + c)
                return False
        return True

    def mark(self) -> None:
        """Begin text that is given back if it is not a call."""
        self._raw.clear()

    @property
    def end_begins(self) -> str:
        """Characters that may begin the end of a call: its closing syntax, or brackets before that."""
        return "}])" + "".join(end[0] for end in self.ends)

    @property
    def ends(self) -> tuple[str, ...]:
        """Texts that end a call, or all of them."""
        return self.style.calls.ends if self.style.calls is not None else ()

    def call_ends(self, c: str, closed: re.Pattern[str], before: str = f"{BLANK}}}])") -> Step[str]:
        """State of a text in a call at a character `c`, which was read, where the call's closing syntax may begin,
        perhaps behind characters of `before`.

        "": it does not begin here. "cut": the answer ends in it. "closed": it is part of the text, whose end `closed`
        finds behind it. "open": the text does not end before the answer or the next call does, so the call ends here.
        """
        if self._n_read <= self._endless:
            return ""
        hit_end, read, start = self.hit_end, "", self._n_read
        self.back(c)
        end = yield from self.trigger(self.ends)
        while not end and (c := (yield from self.next())) and c in before:
            read += c
        if not end:
            self.back(c)
            end = yield from self.trigger(self.ends)
        is_piece = self.rest is not None and len(self.rest) > 1 and any(e.startswith(self.rest) for e in self.ends)
        is_last = self.by_model and self.at_end and read.strip()  # brackets that the model ends with
        state, ahead = "open" if end or is_last else "cut" if is_piece else "", ""
        while end and (c := (yield from self.next())):
            ahead += c
            if closed.search(ahead, max(0, len(ahead) - 2 * _MIN_AHEAD)):
                state = "closed"
                break
            if self._begins_call(ahead):
                break
        else:
            if end and (closed.search(f"{ahead}}}") or (self.is_cut and self._without_ends(ahead))):
                state = "closed"
        self.back(read + end + ahead)
        yield from self.next()
        self.hit_end = hit_end
        self._endless = start + len(read) - 1 if not state else 0
        return state

    def _without_ends(self, text: str) -> str:
        """Text less closing syntax, brackets and blanks at its beginning."""
        return re.sub(rf"(?:[{BLANK}}}\]),;]|{'|'.join(map(re.escape, self.ends))})*", "", text, count=1)

    def _begins_call(self, ahead: str) -> bool:
        """True if a call begins with what follows the closing syntax of the last one."""
        assert self.style.calls is not None
        return len(ahead) < _MIN_AHEAD and self._without_ends(ahead).startswith(self.style.calls.triggers)

    @property
    def raw(self) -> str:
        """Text read since the last mark."""
        return "".join(self._raw)

    @property
    def rest(self) -> str | None:
        """Unread characters after the end of the text; None before it."""
        return "".join(reversed(self._back)) if self._ended else None

    @property
    def at_end(self) -> bool:
        """True if the text has ended and all of it was read."""
        return self.rest == ""

    def begin(self, name: str, id: str | None = None) -> int:
        """Begin a call to `name`, with the id that the model wrote if any; returns its index.

        An id before the name counts if the template accepts it and no other call has it."""
        if self.n_calls and not self.style.parallel:
            self._muted, self._blanks, self._arguments = True, "", None
            return self.n_calls - 1
        self._arguments, self._sole = [], self.style.sole.get(name, "")
        assert self.style.calls is not None
        self._flush()
        self._blanks = ""
        self._end_input()
        index = self.n_calls
        self.n_calls += 1
        self._input = InputText() if name in self.style.custom else None
        calls = self.style.calls
        if id is None and self.written_id not in self._ids and calls.accepts_id(self.written_id):
            id = self.written_id
            self._ids.add(id)
        self.written_id = ""
        self._out.append(CallBegin(index, id or new_id(calls), name, self._input is not None))
        return index

    def argument(self, text: str) -> None:
        """More of the last call's arguments, or of the text in them."""
        if self._muted:
            return
        if self._arguments is not None:
            if self._sole and not self._arguments and text[:1] not in ("", "{"):
                text, self._is_wrapped = f"{{{json.dumps(self._sole, ensure_ascii=False)}: {text}", True
            self._arguments.append(text)
        self._emit(CallArguments, text if self._input is None else self._input.feed(text))

    def end_call(self) -> None:
        """Begin text that is given back if it is not a call: the last one is whole."""
        if self._is_wrapped:
            self._is_wrapped = False
            self.argument("}")
        self._arguments = None
        self.mark()

    def _drop_rest(self, calls: CallFormat) -> Step[None]:
        """Read the rest of a malformed call: up to the next call, or to the end of this one."""
        self._complete()
        while not (trigger := (yield from self.trigger(calls.triggers))):
            if (yield from self.trigger(calls.ends)):
                while True:
                    c = yield from self.after_blanks()
                    self.back(c)
                    if not (yield from self.trigger(calls.ends)):
                        break
                break
            if not (yield from self.next()):
                break
        self.back(trigger)
        self.frame()
        self._after_call = True

    def _complete(self) -> None:
        """Make the last call's arguments whole JSON."""
        if self._arguments is not None:
            text = "".join(self._arguments)
            self._is_wrapped = False
            self.argument(completion(text) if text else "{}")

    def begins_name(self, text: str) -> bool:
        """True if a tool's name begins with this text."""
        return any(name.startswith(text) for name in self.style.names)

    def _end_input(self) -> None:
        if self._input is not None:
            self._emit(CallArguments, self._input.finish())
            self._flush()
            self._input = None

    def frame(self) -> None:
        """Take the text since the last mark, and the blanks before it, as syntax."""
        self._blanks = ""
        self.end_call()

    def content(self, text: str) -> None:
        """More text, after the blanks that were held back."""
        if self._tagged:
            self._out.append(Content("".join(self._tagged)))
            self._tagged.clear()
        self._emit(Content, self._blanks + text)
        self._blanks = ""

    def _emit(self, kind: type[Delta], text: str) -> None:
        if kind is not self._kind:
            self._flush()
            self._kind = kind  # type: ignore[assignment]
        self._chars.append(text)

    def _flush(self) -> None:
        text = "".join(self._chars)
        self._chars.clear()
        if text:
            kind: type[Delta] = self._kind
            if kind is CallArguments:
                self._out.append(CallArguments(self.n_calls - 1, text, self._input is not None))
            else:
                self._out.append(kind(text))  # type: ignore[call-arg,arg-type]

    # -- the message

    def _message(self) -> Step[None]:
        if self.style.reasoning is not None:
            yield from self._reasoning(*self.style.reasoning)
        if self.style.calls is None:
            while self._back:
                self.content(self._back.pop())
            self.content("")
            self.plain = True
            while not self._ended:
                c = yield
                self.content(c)
            return
        yield from self._answer(self.style.calls)

    def _reasoning(self, opening: str, closing: str) -> Step[None]:
        self.mark()
        c = yield from self.after_blanks()
        self.back(c)
        if not (yield from self.literal(opening.strip())):
            if not (yield from self.literal(closing)):
                rest = self.rest if self.style.required or self.is_cut else ""
                if not rest or not any(tag.startswith(rest) for tag in (opening.strip(), closing.strip())):
                    self.back(self.raw)
                    return
                while (yield from self.next()):  # a tag that the end cut short
                    pass
            c = yield from self.after_blanks()  # nothing was thought
            self.back(c)
            self.frame()
            self._repeat()
            return
        self._repeat()
        c = yield from self.after_blanks()
        self.back(c)
        self._repeat()
        yield from self.thought_until(closing)

    def thought_until(self, closing: str) -> Step[None]:
        """Reasoning, up to and with its closing tag and the blanks after it, or up to another marker that ends it."""
        ends = self.style.calls.ends_reasoning if self.style.calls is not None else ()
        ordinary, self.thinking = _run_without("".join(end[0] for end in (closing, *ends))), True
        while True:
            c = yield from self.run(ordinary, self._thought)
            self.back(c)
            if not c or (yield from self.literal(closing)):
                break
            if end := (yield from self.trigger(ends)):
                self.back(end)
                break
            if self.is_cut and self.rest and closing.startswith(self.rest):
                while c := (yield from self.next()):  # a tag that the end cut short
                    pass
                break
            c = yield from self.next()
            if c in BLANK:
                self._blanks += c
            else:
                self._thought(c)
        self._blanks, self.thinking = "", not c
        self._repeat()
        c = yield from self.after_blanks()
        self.back(c)
        self._repeat()

    def _thought(self, text: str) -> None:
        self._emit(Reasoning, self._blanks + text)
        self._blanks = ""
        self._repeat()

    def _repeat(self) -> None:
        """deepseek-legacy: reasoning read since the last call is text as well."""
        if self.style.tags_in_content:
            self._tagged += self._raw
        self._raw.clear()

    def _answer(self, calls: CallFormat) -> Step[None]:
        names = tuple(f"{name}\n" for name in sorted(self.style.names)) if calls.opens_with_name else ()
        opening = calls.triggers + calls.opening + names
        ordinary = _run_without("".join(text[0] for text in opening + calls.ends))
        while True:
            self.mark()
            c = yield from self.run(ordinary, self._text)
            if not c:
                if not self._after_call:
                    self.content("")
                return
            if c in BLANK:
                self._blanks += c
                continue
            self.back(c)
            trigger = yield from self.trigger(opening if self._fresh else calls.triggers)
            if not trigger and self._after_call and (yield from self.trigger(calls.ends)):  # once too many
                self.frame()
                continue
            if not trigger:
                if self._ended and self._cut_trigger(opening if self._fresh else calls.triggers):
                    return
                self._text((yield from self.next()))
                continue
            if trigger in calls.syntax:
                self.frame()
                self._fresh = self._fresh and self._after_call
                continue
            n_calls, self.hit_end = self.n_calls, False
            try:
                yield from calls.read(self, trigger)
                self._after_call = self.n_calls > n_calls or self._muted
            except NotACall as error:
                is_cut = self.hit_end and not isinstance(error, PlainText)
                if not is_cut and (self._arguments is not None or isinstance(error, Broken)):
                    yield from self._drop_rest(calls)
                elif self._muted or is_cut:
                    while is_cut and (yield from self.next()):  # a piece of a marker
                        pass
                    self._blanks = ""
                    self.mark()  # the arguments may become whole at the end
                    self._after_call = True
                else:
                    read = self.raw
                    last = read[1:][-1:]  # it may begin something
                    self.content(read[: len(read) - len(last)])
                    self.back(last)
                    self._after_call = False
            self._muted = False
            if not self._ended:
                self._arguments = None
            self._fresh = self._fresh and self._after_call

    def _text(self, text: str) -> None:
        self.content(text)
        self.mark()
        self._fresh = self._after_call = False

    def _cut_trigger(self, triggers: tuple[str, ...]) -> bool:
        """True if the rest of the answer is the beginning of a trigger, and a limit cut the answer or the rest is too
        long for a chance."""
        assert self.style.calls is not None
        rest = (self.rest or "").rstrip("\ufffd")  # of a character that is cut
        if not any(rest and trigger.startswith(rest) for trigger in triggers):
            return False
        calls = self.style.calls
        if self.style.required or self._after_call or (self._fresh and (calls.opens_with_name or calls.around)):
            return True
        return (self.is_cut or len(rest) >= (2 if self._fresh else _MIN_CUT)) and not rest[0].isalnum()

    def trigger(self, triggers: tuple[str, ...]) -> Step[str]:
        """Read one of these texts if it follows; "": none does."""
        for trigger in triggers:
            if (yield from self.literal(trigger)):
                return trigger
        return ""


def _run_without(special: str) -> re.Pattern[str]:
    """Matches text up to a special character, less the blanks before that."""
    return re.compile(rf"(?:[{BLANK}]*+[^{BLANK}{re.escape(special)}]++)+")


def new_id(calls: CallFormat) -> str:
    """An id for a call, in the form that this family's templates accept."""
    return calls.id_prefix + "".join(secrets.choice(_LETTERS) for _ in range(calls.id_letters))

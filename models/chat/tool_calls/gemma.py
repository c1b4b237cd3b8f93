"""Gemma 4 and FunctionGemma tool calls: dictionaries with bare keys and marked texts, as JSON.

Sources: the models' public chat templates, and the parser of llama.cpp (common/chat.cpp)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from logitless.models.chat.tool_calls.call_object import closing, name_before
from logitless.models.chat.tool_calls.parser import CallFormat, NotACall, Parser, Step
from logitless.models.chat.tool_calls.values import value

_THOUGHT, _THOUGHT_END = "<|channel>", "<channel|>"


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

    Thoughts, often empty ones, and a stray end of one may stand anywhere in the answer."""
    if trigger in (_THOUGHT, _THOUGHT_END):
        yield from _thought(p, trigger)
        return
    c = yield from p.after_blanks()
    p.back(c)
    if not (yield from p.literal("call:")):
        raise NotACall
    name = yield from name_before(p, "{", "{}[],<\n")
    p.back("{")
    p.begin(name)
    if (yield from value(p, p.argument, marks.quote)):
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


def _format(name: str, marks: Marks, *thoughts: str) -> CallFormat:
    return CallFormat(
        name,
        (marks.begin, *thoughts, *([marks.after] if marks.after else [])),
        (),
        partial(_calls, marks),
        tuple(text for text in (marks.begin, marks.end, marks.quote, marks.after) if text),
        (marks.end,),
        syntax=(marks.after,) if marks.after else (),
        around=("", "") if thoughts else None,  # thoughts stand in an answer without calls, too
    )


GEMMA4 = _format("Gemma 4", OF_GEMMA4, _THOUGHT, _THOUGHT_END)
FUNCTION_GEMMA = _format("FunctionGemma", OF_FUNCTION_GEMMA)

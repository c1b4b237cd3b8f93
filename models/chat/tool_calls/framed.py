"""Framed answers: families with special tokens around parts, or with a recipient before each.

gpt-oss, DeepSeek, Command R; Muse Glimmer, Functionary 3.2.
Facts: OpenAI's description of harmony, the models' own chat templates, and what llama.cpp accepts
(common/chat.cpp, common/parsers)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from logitless.models.chat.tool_calls.call_object import call_list, closing, name_before, value
from logitless.models.chat.tool_calls.parser import CallFormat, NotACall, Parser, PlainText, Step
from logitless.models.chat.tool_calls.probed.markers import TAGGED, Markers
from logitless.models.chat.tool_calls.probed.reader import call_format, read_calls

_MAX_HEAD = 256  # characters before a message's body
_CHANNEL = re.compile(r"(?:^|<\|channel\|>)\s*(analysis|commentary|final)\b")
_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")
_HEAD_PART = re.compile(r"<\|\w*\|?>?|<|[^\s<]+")
_HEAD_WORDS = ("assistant", "analysis", "commentary", "final", "json", "code", "<|")
_STRAY = re.compile(r"^\s*(?:<\|channel\|>)?\s*commentary(?: to=assistant)?\s*(?=<\|channel\|>)")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_BEGIN_ALL, _END_ALL = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

_START, _MESSAGE = "<|start|>assistant", "<|message|>"
_MUSE_ENDS = ("<|eom|>", "<|eot|>")
MUSE_REASONING = (f" to=self{_MESSAGE}", "<|eom|>")
ATEM = Markers(
    TAGGED,
    '<atem:invoke name="',
    '">\n',
    "</atem:invoke>",
    section="<atem:function_calls>\n",
    section_end="\n</atem:function_calls>",
    key_begin='<atem:parameter name="',
    key_end='">',
    value_end="</atem:parameter>",
    gap="\n",
)
"""Calls of Muse Glimmer, each in a message of its own."""


def _until(p: Parser, end: str, is_syntax: Callable[[str], bool]) -> Step[str]:
    """A short text up to and with `end`. `is_syntax`: whether a text that the answer ends in is the beginning
    of one."""
    text = ""
    while not (yield from p.literal(end)):
        c = yield from p.next()
        text += c
        if not c and not is_syntax(text):
            raise PlainText
        if not c or len(text) > _MAX_HEAD:
            raise NotACall
    return text


def _is_head(text: str) -> bool:
    """True if a text may be the beginning of a message's head: tags, known words and a recipient."""
    *words, last = _HEAD_PART.findall(text) or [""]
    whole = (word in _HEAD_WORDS or word.startswith(("<|", "to=")) for word in words)
    return all(whole) and (
        last.startswith(("<|", "to=")) or any(word.startswith(last) for word in (*_HEAD_WORDS, "to="))
    )


def _gpt_oss(p: Parser, trigger: str) -> Step[None]:
    """<|channel|>analysis<|message|>…<|end|>, then <|start|>assistant<|channel|>commentary
    to=functions.f <|constrain|>json<|message|>{…}<|call|>, or
    <|channel|>final<|message|>…<|return|>.

    As in llama.cpp, a commentary that has nothing but a head is skipped, and so is a message to another
    recipient than a function: a call to a tool that the model was never given.
    """
    if trigger in _ENDS:
        p.frame()
        return
    begun = "" if trigger == "<|start|>" else trigger
    head = (yield from _until(p, _MESSAGE, lambda text: _is_head(begun + text))).removeprefix("assistant")
    if trigger != "<|start|>":
        head = trigger + head
    head = _STRAY.sub("", head)
    channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
    if recipient is not None:
        c = yield from p.after_blanks()
        if c != "{":
            raise NotACall
        p.back(c)
        p.begin(recipient[1])
        if (yield from value(p, p.argument)):
            p.frame()
    elif " to=" in head:
        while (yield from p.next()):
            for end in _ENDS:
                if (yield from p.literal(end)):
                    p.frame()
                    return
        p.frame()
    elif channel is None or (channel[1] == "analysis" and not p.style.reasoning):
        raise NotACall
    else:
        p.frame()
        if channel[1] == "analysis":
            yield from p.thought_until("<|end|>")


def _deepseek(p: Parser, trigger: str) -> Step[None]:
    """<｜tool▁call▁begin｜>function<｜tool▁sep｜>f, a block of ```json, <｜tool▁call▁end｜> once a call,
    and around all of them <｜tool▁calls▁begin｜>, <｜tool▁calls▁end｜>; since V3.1 f<｜tool▁sep｜>{…}
    without the block.
    """
    if trigger == _BEGIN_ALL:
        c = yield from p.after_blanks()
        p.back(c)
        if not (yield from p.literal(_BEGIN)):
            raise NotACall
    while True:
        name = (yield from _until(p, _SEP, lambda text: _is_name(p, text.partition("<")[0], "function"))).strip()
        c = yield from p.after_blanks()
        if c != "{":
            p.back(c)
            name = (yield from _until(p, "```json", lambda text: _is_name(p, text.partition("`")[0]))).strip()
            c = yield from p.after_blanks()
        if c != "{" or not name:
            raise NotACall
        p.back(c)
        p.begin(name)
        if not (yield from value(p, p.argument)):
            return
        for end in ("```", _END, _END_ALL):
            yield from closing(p, end)
        p.mark()
        c = yield from p.after_blanks()
        p.back(c)
        if not (yield from p.literal(_BEGIN)):
            return


def _is_name(p: Parser, text: str, *words: str) -> bool:
    """True if a text is the beginning of a tool's name or of one of these words."""
    return p.begins_name(text.strip()) or any(word.startswith(text.strip()) for word in words)


def _command_r(p: Parser, trigger: str) -> Step[None]:
    """<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {…}},
    …]<|END_ACTION|>, and what is said between <|START_RESPONSE|> and <|END_RESPONSE|>.
    """
    if trigger != "<|START_ACTION|>":
        p.frame()
        return
    if (yield from p.after_blanks()) != "[":
        raise NotACall
    if (yield from call_list(p, key="tool_name", closes=False)):
        yield from closing(p, "<|END_ACTION|>")


def _action(p: Parser, trigger: str) -> Step[None]:
    """Action: and a block of ```json with [{"tool_name": "f", "parameters": {…}}, …]."""
    c = yield from p.after_blanks()
    p.back(c)
    if (yield from p.literal("```")):
        yield from p.literal("json")
    if (yield from p.after_blanks()) != "[":
        raise NotACall
    if (yield from call_list(p, p.style.names, "tool_name", closes=False)):
        yield from closing(p, "```")


def _muse(p: Parser, trigger: str) -> Step[None]:
    """to=self<|message|>…<|eom|>, then <|start|>assistant to=f<|message|>, a call in tags and <|eom|>,
    or to=user<|message|>…<|eot|>."""
    if trigger in _MUSE_ENDS:
        p.frame()
        return
    recipient = ""
    if trigger != _MESSAGE:
        to = yield from _until(p, _MESSAGE, lambda text: _is_head(trigger + text))
        recipient = (to if trigger == _START else trigger + to).strip().removeprefix("to=")
    if recipient in ("", "user"):
        p.frame()
    elif recipient == "self":
        if p.style.reasoning is None:
            raise NotACall
        p.frame()
        yield from p.thought_until(MUSE_REASONING[1])
    else:
        yield from read_calls(ATEM, p, "")


def _functionary(p: Parser, trigger: str) -> Step[None]:
    """all, a line break and the text; or a tool's name, a line break and {…}, each after >>>, with which
    the prompt ends."""
    name = (yield from name_before(p, "\n", "{<> ")) if trigger == ">>>" else trigger.strip()
    if name == "all":
        p.frame()
        return
    c = yield from p.after_blanks()
    p.back(c)
    if name not in p.style.names or c != "{":
        raise NotACall
    p.begin(name)
    if (yield from value(p, p.argument)):
        p.end_call()


GPT_OSS = CallFormat(
    "GPT-OSS",
    ("<|channel|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>"),
    ("to=functions.",),  # the prompt ends in <|start|>assistant
    _gpt_oss,
    ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>"),
    around=("<|channel|>final<|message|>", ""),
    restart="<|start|>assistant",
)
DEEPSEEK = CallFormat(
    "DeepSeek R1",
    (_BEGIN_ALL, _BEGIN),
    (),
    _deepseek,
    (_BEGIN_ALL, _BEGIN, _SEP, _END, _END_ALL),
    (_END, _END_ALL),
)
DEEPSEEK_V31 = replace(DEEPSEEK, name="DeepSeek V3.1")
COMMAND_R = CallFormat(
    "Command R7B",
    ("<|START_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    (),
    _command_r,
    ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|END_ACTION|>",),
    around=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
)
COMMAND_R_ACTION = CallFormat("Command R", ("Action:",), (), _action, ends=("```",))
MUSE = replace(
    call_format(ATEM),
    name="Muse Glimmer",
    triggers=(_START, *_MUSE_ENDS),
    opening=("to=", _MESSAGE),  # the prompt ends in <|start|>assistant
    read=_muse,
    preserved=("<|start|>", _MESSAGE, *_MUSE_ENDS, *ATEM.tags),
    around=(f" to=user{_MESSAGE}", ""),
    markers=None,
    restart=_START,
)
FUNCTIONARY = CallFormat(
    "Functionary 3.2", (">>>",), ("all\n",), _functionary, around=("all\n", ""), opens_with_name=True
)

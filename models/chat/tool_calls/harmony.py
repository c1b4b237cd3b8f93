"""Harmony (gpt-oss) and Muse Glimmer: answers of messages, each with a head that names its channel or recipient."""

from __future__ import annotations

import re
from collections.abc import Callable

from logitless.models.chat.tool_calls.parser import CallFormat, NotACall, Parser, PlainText, Step
from logitless.models.chat.tool_calls.probed.markers import TAGGED, Markers
from logitless.models.chat.tool_calls.probed.reader import body, call_format, read_calls

_MAX_HEAD = 256  # characters before a message's body
_CHANNEL = re.compile(r"(?:^|<\|channel\|>)\s*(analysis|commentary|final)\b")
_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")
_HEAD_PART = re.compile(r"<\|\w*\|?>?|<|[^\s<]+")
_HEAD_WORDS = ("assistant", "analysis", "commentary", "final", "json", "code", "<|")
_STRAY = re.compile(r"^\s*(?:<\|channel\|>)?\s*commentary(?: to=assistant)?\s*(?=<\|channel\|>)")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")

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
    recipient than a function: a call to a tool that the model was never given."""
    begun = "" if trigger == "<|start|>" else trigger
    head = (yield from _until(p, _MESSAGE, lambda text: _is_head(begun + text))).removeprefix("assistant")
    if trigger != "<|start|>":
        head = trigger + head
    head = _STRAY.sub("", head)
    channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
    if recipient is not None:
        p.begin(recipient[1])
        if (yield from body(p)):
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


def _muse(p: Parser, trigger: str) -> Step[None]:
    """to=self<|message|>…<|eom|>, then <|start|>assistant to=f<|message|>, a call in tags and <|eom|>,
    or to=user<|message|>…<|eot|>."""
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


GPT_OSS = CallFormat(
    "GPT-OSS",
    ("<|channel|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>"),
    ("to=functions.",),  # the prompt ends in <|start|>assistant
    _gpt_oss,
    ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>"),
    ends=_ENDS,
    syntax=_ENDS,
    around=("<|channel|>final<|message|>", ""),
    restart="<|start|>assistant",
)
MUSE = call_format(
    ATEM,
    "Muse Glimmer",
    triggers=(_START, *_MUSE_ENDS),
    opening=("to=", _MESSAGE),  # the prompt ends in <|start|>assistant
    read=_muse,
    syntax=_MUSE_ENDS,
    preserved=("<|start|>", _MESSAGE, *_MUSE_ENDS, *ATEM.tags),
    around=(f" to=user{_MESSAGE}", ""),
    restart=_START,
)

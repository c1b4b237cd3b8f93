"""Tool-call formats of model families, a short reader for each, and the family of a chat template."""

from __future__ import annotations

from dataclasses import replace

from logitless.models.chat.tool_calls.call_object import CallObject, call_list, closing, text_value, value
from logitless.models.chat.tool_calls.framed import (
    COMMAND_R,
    COMMAND_R_ACTION,
    DEEPSEEK,
    DEEPSEEK_V31,
    FUNCTIONARY,
    GPT_OSS,
    MUSE,
    MUSE_REASONING,
)
from logitless.models.chat.tool_calls.gemma import FUNCTION_GEMMA, GEMMA4, OF_FUNCTION_GEMMA, OF_GEMMA4
from logitless.models.chat.tool_calls.json_scan import BAD, DONE, JsonScan, is_open_escape, unescaped
from logitless.models.chat.tool_calls.parser import CallFormat, NotACall, Parser, PlainText, Step
from logitless.models.chat.tool_calls.probed.markers import JSON, NUMBER, PYTHON, TAGGED, TYPE, Markers
from logitless.models.chat.tool_calls.probed.reader import call_format, read_calls
from logitless.models.chat.tool_calls.tagged import QWEN3_CODER

_PYTHON_START, _PYTHON_END = "<|python_start|>", "<|python_end|>"
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")


def _hermes(p: Parser, trigger: str) -> Step[None]:
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, once a call, or once around several."""
    if (yield from p.after_blanks()) != "{":
        raise NotACall
    while (yield from CallObject(p).read()):
        c = yield from p.after_blanks()
        if c == ",":
            c = yield from p.after_blanks()
        if c != "{":
            p.back(p.raw)
            yield from closing(p, "</tool_call>")
            return


def _llama3(p: Parser, trigger: str) -> Step[None]:
    yield from _objects(p, trigger)


def _objects(p: Parser, trigger: str) -> Step[bool]:
    """{"name": …, "parameters": {…}} as the whole answer, perhaps after <|python_tag|>; several
    with ; in between. False: the last one is cut short."""
    if trigger != "{" and (yield from p.after_blanks()) != "{":
        raise NotACall
    while (yield from CallObject(p, p.style.names, sure=p.n_calls > 0).read()):
        c = yield from p.after_blanks()
        if c in (";", ","):
            c = yield from p.after_blanks()
        if c != "{":
            if not c and p.raw.strip():
                raise NotACall
            p.back(p.raw)  # the separator was text
            return True
    return False


def _llama4(p: Parser, trigger: str) -> Step[None]:
    """As Llama 3's, perhaps between <|python_start|> and <|python_end|>, or behind both."""
    if trigger == _PYTHON_START:
        yield from p.literal(_PYTHON_END)
    if (yield from _objects(p, trigger)):
        yield from closing(p, _PYTHON_END)


def _mistral(p: Parser, trigger: str) -> Step[None]:
    """[TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}, …], and the newer
    [TOOL_CALLS]name[ARGS]{…}."""
    c = yield from p.after_blanks()
    if c == "{":
        yield from CallObject(p).read()
        return
    if c != "[":
        p.back(c)
        yield from _named(p)
        return
    yield from call_list(p)


def _nemotron(p: Parser, trigger: str) -> Step[None]:
    """<TOOLCALL>[{"name": …, "arguments": {…}}, …]</TOOLCALL>."""
    if (yield from p.after_blanks()) != "[":
        raise NotACall
    if (yield from call_list(p)):
        yield from closing(p, "</TOOLCALL>")


def _named(p: Parser) -> Step[None]:
    name = ""
    while True:
        c = yield from p.next()
        if c not in _NAME or not c:
            break
        name += c
    p.back(c)
    if not c and not p.begins_name(name):
        raise PlainText
    if not name:
        raise NotACall
    if (yield from p.literal("[CALL_ID]")):
        while (c := (yield from p.next())) and c in _NAME:
            p.written_id += c
        p.back(c)
    yield from p.literal("[ARGS]")
    c = yield from p.after_blanks()
    if c != "{":
        raise NotACall
    p.back(c)
    p.begin(name)
    if (yield from value(p, p.argument)):
        p.end_call()


def _generic(p: Parser, trigger: str) -> Step[None]:
    """{"tool_call": {…}}, {"tool_calls": [{…}, …]} or {"response": "…"} as the whole answer."""
    key = yield from text_value(p)
    if key not in ("tool_call", "tool_calls", "response") or (yield from p.after_blanks()) != ":":
        raise NotACall
    c = yield from p.after_blanks()
    if key == "response":
        if c != '"':
            raise NotACall
        whole = yield from _response(p)
    elif c == "[" and key == "tool_calls":
        whole = yield from call_list(p, p.style.names)
    elif c == "{":
        whole = yield from CallObject(p, p.style.names, sure=True).read()
    else:
        raise NotACall
    if whole:
        yield from closing(p, "}")


_K3_FRAMES = ('<|open|>message role="assistant"<|sep|>', "<|close|>message<|sep|>", "<|end_of_msg|>")
_K3 = Markers(
    TAGGED,
    '<|open|>call tool="',
    f'" index="{NUMBER}"<|sep|>',
    "<|close|>call<|sep|>",
    section="<|open|>tools<|sep|>",
    section_end="<|close|>tools<|sep|>",
    key_begin='<|open|>argument key="',
    key_end=f'" type="{TYPE}"<|sep|>',
    value_end="<|close|>argument<|sep|>",
    types=("string", ""),
    around=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
)


def _kimi_k3(p: Parser, trigger: str) -> Step[None]:
    """Sections of <|open|>name<|sep|> and <|close|>name<|sep|>: the response, then tools with a call each."""
    if trigger in _K3_FRAMES:
        p.frame()
    else:
        yield from read_calls(_K3, p, trigger)


def _response(p: Parser) -> Step[bool]:
    """Stream the text of a JSON string, whose opening quote has been read."""
    scan, waiting = JsonScan(), ""
    scan.feed('"')
    p.mark()
    while c := (yield from p.next()):
        state = scan.feed(c)
        if state is BAD:
            p.back(c)
            break
        if state is DONE:
            p.content(unescaped(waiting))
            return True
        waiting += c
        if not is_open_escape(waiting):
            p.content(unescaped(waiting))
            waiting = ""
        p.mark()
    p.content(waiting)
    if not p.at_end:
        raise NotACall
    return False


HERMES = CallFormat("Hermes 2 Pro", ("<tool_call>",), (), _hermes, ("<tool_call>", "</tool_call>"), ("</tool_call>",))
LLAMA3 = CallFormat("Llama 3.x", ("<|python_tag|>",), ("{",), _llama3, ("<|python_tag|>",))
# its other templates write Python, which probes find
LLAMA4 = CallFormat("Llama 4", (_PYTHON_START,), ("{",), _llama4, (_PYTHON_START, _PYTHON_END), (_PYTHON_END,))
MISTRAL = CallFormat(
    "Mistral Nemo",
    ("[TOOL_CALLS]",),
    (),
    _mistral,
    ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    id_prefix="",
    id_letters=9,  # the templates refuse others
)
NEMOTRON = CallFormat(
    "Nemotron Nano 2", ("<TOOLCALL>",), (), _nemotron, ("<TOOLCALL>", "</TOOLCALL>"), ("</TOOLCALL>",)
)
MISTRAL_NAMED = replace(MISTRAL, name="Mistral v11")
_GRANITE = Markers(JSON, "", ', "arguments": ', "", "<|tool_call|>[", "]", ", ", '{"name": ', "}")
_GRANITE_THINKS = replace(_GRANITE, around=("<response>", "</response>"))  # after reasoning only
GRANITE = replace(call_format(_GRANITE), name="Granite 3")
GRANITE_THINKS = replace(call_format(_GRANITE_THINKS), name="Granite 3.3", around=None)
LFM2 = replace(
    call_format(Markers(PYTHON, "", "(", "", "<|tool_call_start|>[", "]<|tool_call_end|>", ", ")), name="LFM2"
)
_OF_K3 = call_format(_K3)
KIMI_K3 = replace(
    _OF_K3,
    name="Kimi K3",
    triggers=_OF_K3.triggers + _K3_FRAMES,
    read=_kimi_k3,
    preserved=(*_OF_K3.preserved, "<|end_of_msg|>"),
    ends_reasoning=("<|open|>response<|sep|>", "<|open|>tools<|sep|>"),
)
GENERIC = CallFormat("Generic", (), ("{",), _generic, instructs=True)

REASONING_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought\n", "<channel|>"),  # Gemma 4
    ("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),  # Apriel
)
REASONING_OF = {
    GPT_OSS.name: ("<|channel|>analysis<|message|>", "<|end|>"),
    KIMI_K3.name: ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    MUSE.name: MUSE_REASONING,
    FUNCTIONARY.name: None,
}
"""Reasoning tags of families whose templates need no probe of their formats."""


def family_of(template: str) -> CallFormat:
    """The tool-call format that a template's source shows."""
    if "<|channel|>" in template and "<|message|>" in template:
        return GPT_OSS
    if all(mark in template for mark in ("<|open|>", "<|close|>", "<|sep|>")):
        return KIMI_K3
    if "<atem:function_calls>" in template and "<|message|>" in template:
        return MUSE
    if ">>>all" in template and ">>>${recipient}" in template:
        return FUNCTIONARY
    if "<|START_ACTION|>" in template or "<|START_RESPONSE|>" in template:
        return COMMAND_R
    if "Action:" in template and "tool_name" in template:
        return COMMAND_R_ACTION
    if "<｜tool▁calls▁begin｜>" in template:
        return DEEPSEEK if "```json" in template else DEEPSEEK_V31
    if "<function=" in template and "<parameter=" in template:
        return QWEN3_CODER
    if "[TOOL_CALLS]" in template:
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
    if f"{OF_GEMMA4.begin}call:" in template:
        return GEMMA4
    if OF_FUNCTION_GEMMA.begin in template:
        return FUNCTION_GEMMA
    if "<TOOLCALL>" in template:
        return NEMOTRON
    if "<tool_call>" in template:
        return HERMES
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and "ipython" in template):
        return LLAMA3
    if "<|header_start|>" in template and "ipython" in template:
        return LLAMA4
    # the templates of Granite 3 and LFM2 describe calls or tools, but do not write calls
    if "<|tool_call|>" in template:
        return GRANITE_THINKS if "<response>" in template else GRANITE
    if "<|tool_list_start|>" in template or "List of tools: [" in template:
        return LFM2
    return GENERIC


def reasoning_tags(template: str) -> tuple[str, str] | None:
    """The reasoning tags of models with this template, if they reason."""
    family = family_of(template).name
    if family in REASONING_OF:
        return REASONING_OF[family]
    return next((tags for tags in REASONING_TAGS if _shows(template, tags[0]) or tags[1] in template), None)


def _shows(template: str, text: str) -> bool:
    """True if the template has the text, or Jinja's way to write it."""
    return text in template or text.replace("\n", "\\n") in template

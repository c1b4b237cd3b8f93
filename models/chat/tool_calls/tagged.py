"""Tagged tool calls (Qwen3-Coder): parameters between tags, converted to JSON by their types."""

from __future__ import annotations

import ast
import json
import re
import warnings
from contextlib import suppress
from typing import NoReturn

from logitless.models.chat.tool_calls.call_object import MAX_NAME, closing, name_before
from logitless.models.chat.tool_calls.parser import CallFormat, NotACall, Parser, Step

_END = "\n</parameter>"
CDATA, CDATA_END = "<![CDATA[", "]]>"


def _qwen3_coder(p: Parser, trigger: str) -> Step[None]:
    """<tool_call> <function=f> <parameter=x> value </parameter> … </function> </tool_call>, a line
    each; the outermost tags may be missing.
    """
    if trigger == "<tool_call>":
        c = yield from p.after_blanks()
        p.back(c)
        if not (yield from p.literal("<function=")):
            raise NotACall
    name = yield from name_before(p, ">", "<\n")
    p.begin(name)
    p.argument("{")
    n_given = 0
    while tag := (yield from _tag(p)):
        if tag == "</function>":
            p.argument("}")
            yield from closing(p, "</tool_call>")
            return
        if not tag.startswith("<parameter=") or len(tag) < len("<parameter=>x"):
            raise NotACall
        parameter = tag[len("<parameter=") : -1].strip()
        p.argument(f"{', ' if n_given else ''}{json.dumps(parameter, ensure_ascii=False)}: ")
        n_given += 1
        if not (yield from tagged_value(p, (name, parameter) in p.style.texts, _END, True)):
            return


def _tag(p: Parser) -> Step[str]:
    """The tag that follows; "" where the answer ends before or in it."""
    p.mark()
    c = tag = yield from p.after_blanks()
    if c and c != "<":
        raise NotACall
    while c and c != ">":
        c = yield from p.next()
        tag += c
        if len(tag) > MAX_NAME:
            raise NotACall
    return tag if c else ""


def tagged_value(p: Parser, is_text: bool, end: str, opens_line: bool, cdata: bool = False) -> Step[bool]:
    """A value up to and with `end`, as JSON: a text while it is written, others when they are
    whole.

    False: the answer ended in it. `opens_line`: a line break before the value is syntax. One at the
    start of `end` may be missing. `cdata`: the value may stand in <![CDATA[ … ]]>.
    """
    if opens_line:
        yield from p.literal("\n")
    if cdata and (yield from p.literal(CDATA)):
        end = CDATA_END + end
    elif cdata and p.rest and CDATA.startswith(p.rest):
        return (yield from _cut(p))
    if is_text:
        p.argument('"')
    text, ends = "", (end, end.removeprefix("\n"))
    while not (yield from _ended(p, ends)):
        c = yield from p.next()
        if not c:
            return False
        if p.rest is not None and any(e.startswith(c + p.rest) for e in ends):
            return (yield from _cut(p))
        text += c
        if is_text:
            p.argument(json.dumps(c, ensure_ascii=False)[1:-1])
            p.mark()
    p.argument('"' if is_text else nested_as_json(text, end.strip().partition("</")[0]))
    return True


def nested_as_json(text: str, before: str) -> str:
    """JSON of a value: of an object whose members, or a list whose items, are tags with a text `before` each
    (MiniMax M3), or of a plain one."""
    tags = re.escape(before)
    found = re.findall(rf"{tags}<([^<>/\s]+)>(.*?){tags}</\1>", text, re.DOTALL) if before else []
    if not found:
        return as_json(text)
    parts = [(json.dumps(key, ensure_ascii=False), nested_as_json(inner, before)) for key, inner in found]
    if all(key == '"item"' for key, _ in parts):
        return f"[{', '.join(value for _, value in parts)}]"
    return f"{{{', '.join(f'{key}: {value}' for key, value in parts)}}}"


def _cut(p: Parser) -> Step[bool]:
    """False, after the piece of a tag in which the answer ended."""
    while (yield from p.next()):
        pass
    return False


def _ended(p: Parser, ends: tuple[str, ...]) -> Step[bool]:
    for end in ends:
        if (yield from p.literal(end)):
            return True
    return False


def as_json(text: str) -> str:
    """The text itself where it is JSON, JSON of a list or dictionary that Python writes, else a string of it."""
    text = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())
    try:
        json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        literal = from_python(text) if text.startswith(("[", "{")) else None
        return json.dumps(text, ensure_ascii=False) if literal is None else literal
    return text


def from_python(text: str) -> str | None:
    """JSON of a Python literal; None: it is none."""
    # models write line breaks in strings as they are
    for literal in (text, text.replace("\n", "\\n")):
        with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError), warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of an unknown escape
            return json.dumps(ast.literal_eval(literal), ensure_ascii=False, allow_nan=False)
    return None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


QWEN3_CODER = CallFormat(
    "Qwen3 Coder",
    ("<tool_call>", "<function="),
    (),
    _qwen3_coder,
    ("<tool_call>", "</tool_call>"),
    ("</function>", "</tool_call>"),
    ends_reasoning=("<tool_call>",),  # Qwen 3.5 calls without closing it; llama.cpp reads it as a call
)

"""Values between tags as JSON: texts while they are written, others when they are whole."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from logitless.models.chat.tool_calls.json_text import as_json
from logitless.models.chat.tool_calls.parser import BLANK, Broken, Parser, Step
from logitless.models.chat.tool_calls.values import drop, without

_MAX_BLANKS = 64  # before a key
CDATA, CDATA_END = "<![CDATA[", "]]>"


def tagged_value(
    p: Parser, is_text: bool, end: str, opens_line: bool, cdata: bool, key: tuple[str, str], keys: Sequence[str] | None
) -> Step[bool]:
    """A value up to and with `end`, as JSON. False: the answer ended in it. Broken: the call did, without `end`.

    `opens_line`: a line break before the value is syntax. One at the start of `end` may be missing. `cdata`: the value
    may stand in <![CDATA[ … ]]>. `key`: the texts around a key. `keys`: those that the call has; another one ends the
    value, too. None: members of a value have the same tags."""
    if opens_line:
        yield from p.literal("\n")
    if cdata and (yield from p.literal(CDATA)):
        end = CDATA_END + end
    elif cdata and p.rest and CDATA.startswith(p.rest):
        return (yield from drop(p))
    pieces: list[str] = []

    def take(piece: str) -> None:
        if is_text:
            p.argument(json.dumps(piece, ensure_ascii=False)[1:-1])
            p.mark()
        else:
            pieces.append(piece)

    if is_text:
        p.argument('"')
    ends, closed = (end, end.removeprefix("\n")), re.compile(re.escape(end.strip()))
    run = without("\n" + "".join(text.strip()[0] for text in (end, *p.ends, key[0])))
    begins = p.style.calls.triggers if p.style.calls is not None else ()
    is_whole = is_closed = False
    while True:
        c = yield from p.run(run, take)
        p.back(c)
        if text := (yield from p.trigger(ends)):
            if is_whole := (yield from _is_end(p, end, (key[0].strip(), *p.ends, *begins))):
                break
            take(text)
            continue
        if not c:
            if p.by_model and not is_text:
                p.argument(nested_as_json("".join(pieces), ""))
            return False
        if p.rest is not None and any(each.startswith(p.rest) for each in ends):
            return (yield from drop(p))
        if not is_closed and keys is not None and (yield from _begins_parameter(p, *key, keys)):
            is_whole = True
            break
        yield from p.next()
        if not is_closed and (state := (yield from p.call_ends(c, closed, BLANK))):
            is_closed = state == "closed"
            if state == "cut":
                return (yield from drop(p))
            if not is_closed:
                p.back(c)
                break
        take(c)
    p.argument('"' if is_text else nested_as_json("".join(pieces), end.strip().partition("</")[0]))
    if not is_whole:
        raise Broken
    return True


def _is_end(p: Parser, end: str, follows: tuple[str, ...]) -> Step[bool]:
    """True if the text that was read ends the value: one of `follows` stands behind it, or the same never again."""
    ahead, hit_end = "", p.hit_end
    while (c := (yield from p.next())) and c in BLANK:
        ahead += c
    p.back(c)
    text = yield from p.trigger(follows)
    is_end = bool(text) or (p.rest is not None and any(each.startswith(p.rest) for each in follows))
    ahead += text
    while not is_end and (c := (yield from p.next())):
        ahead += c
        if ahead.endswith(end):
            break
    else:
        is_end = True
    p.back(ahead)
    p.hit_end = hit_end
    return is_end


def _begins_parameter(p: Parser, before: str, after: str, keys: Sequence[str]) -> Step[bool]:
    """True if a key, between these texts, follows that is none of `keys`. Nothing is read."""
    blanks = key = ""
    while (c := (yield from p.next())) and c in BLANK and len(blanks) < _MAX_BLANKS:
        blanks += c
    p.back(c)
    is_begin = ("\n" in blanks or "\n" not in before) and (yield from p.literal(before.strip()))
    read = before.strip() if is_begin else ""
    if is_begin:
        while (c := (yield from p.next())) and c not in f"{BLANK}<>{after[0]}":
            key += c
        p.back(c)
        is_begin = key not in ("", *keys) and (yield from p.literal(after))
        read += key + (after if is_begin else "")
    p.back(blanks + read)
    return is_begin


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

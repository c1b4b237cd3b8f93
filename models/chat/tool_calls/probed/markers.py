"""Markers of a tool-call format: the texts that a template writes around calls, names and arguments."""

from __future__ import annotations

import re
from dataclasses import dataclass

BLANK = " \t\r\n"
NUMBER, ID, KEY, TYPE = "\x00", "\x01", "\x02", "\x03"
"""Placeholders in a marker: the number of the call, its id, the parameter that a closing tag repeats, the
word for the type of the value (DeepSeek V3.2: string="true")."""

JSON, NAMED, TAGGED, PYTHON = "JSON", "named JSON", "tags", "Python"
"""Styles: an object with name and arguments; the name as text, then the arguments; a tag a parameter; f(x=1)."""

NAMESPACE = r"\]<\][^\s<>\[\]]+\[>\["
"""MiniMax M3's token before each tag."""

_TAG = re.compile(rf"{NAMESPACE}|<[^<>\s\x00-\x03]+>|\[/?[A-Z_]+\]")
_END = re.compile(rf"(?:{NAMESPACE})?<[^\n\x00-\x03]*")
_WORD = re.compile(r"｜\w+｜")  # DeepSeek V3.2's token within tags
_FIRST = re.compile(rf"<\|open\|>[^<\x00-\x03]*(?:<\|sep\|>)?|(?:{NAMESPACE})?<[^<>\x00-\x03]+>?|\[[A-Z_]+\]")


@dataclass(frozen=True, slots=True)
class Markers:
    """Texts around calls: section (begin head NAME middle ARGUMENTS tail end, separator…)
    section_end.

    A call of tags has key_begin KEY key_end VALUE value_end once a parameter in place of ARGUMENTS,
    with `gap` after each. `around`: texts around an answer without calls."""

    style: str
    begin: str
    middle: str
    end: str
    section: str = ""
    section_end: str = ""
    separator: str = ""
    head: str = ""  # JSON style only: the object up to the name
    tail: str = ""  # JSON style only: the object after the arguments
    key: str = "name"  # JSON style only: the member that has the name
    key_begin: str = ""
    key_end: str = ""
    value_end: str = ""
    gap: str = ""
    types: tuple[str, str] = ("", "")  # TYPE of a text, and of any other value; "": its type's name
    around: tuple[str, str] | None = None
    id_mark: str = ""  # named JSON only: text before an id, which may come before `middle`
    cdata: bool = False  # texts with a "<" stand in <![CDATA[ … ]]> (MiniCPM 5)
    also: Markers | None = None  # another way in which models of the family write calls

    @property
    def trigger(self) -> str:
        """The tag that begins the first call; "": nothing but JSON does."""
        return _first_tag(self.section + self.begin + self.head)

    @property
    def triggers(self) -> tuple[str, ...]:
        """Tags that begin a call, with its section or without."""
        tags = (self.trigger, _first_tag(self.begin))
        return tuple(dict.fromkeys(tag for tag in tags if tag))

    @property
    def ends(self) -> tuple[str, ...]:
        """Texts of tags that end a call, or all of them; brackets of Python's without tags."""
        if self.style == PYTHON and "<" not in self.end + self.section_end:
            return (f"){self.end}{self.section_end}".strip(),)
        return tuple(end[0].rstrip() for text in (self.end, self.section_end) if (end := _END.search(text)))

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags among the markers, each of which may be a special token."""
        parts = (self.section, self.begin, self.id_mark, self.middle, self.key_begin, self.key_end, self.value_end)
        texts = (*parts, self.end, self.separator, self.section_end, *(self.around or ()))
        whole = (tag for text in texts for tag in _TAG.findall(text))
        return tuple(dict.fromkeys((*whole, *(word for text in texts for word in _WORD.findall(text)))))


def _first_tag(text: str) -> str:
    tag = _FIRST.match(text.lstrip())
    return tag[0].rstrip() if tag else ""

"""Regular expressions as syntax trees: Python's dialect with Rust's named groups and escapes.

Rust's are `(?<name>…)`, `\\x{…}`, `\\u{…}` and `\\z`; Lark grammars use Python's.

A search for a text is not meant: the whole text matches. `\\w` is letters and digits of any script
by their blocks, `\\d` the digits 0 to 9."""

from __future__ import annotations

import re
import re._constants as op  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
import unicodedata
import warnings
from collections.abc import Sequence
from typing import Any

from logitless.models.grammar.ast import LAST, Alt, Chars, Node, Ranges, Repeat, Seq, chars
from logitless.models.grammar.errors import GrammarError, NotEnforceable

MAX_REPEAT = 2000
MAX_DEPTH = 100

_DIGIT: Ranges = ((48, 57),)
_SPACE: Ranges = ((9, 13), (32, 32), (0x85, 0x85), (0xA0, 0xA0), (0x2000, 0x200A), (0x2028, 0x2029), (0x3000, 0x3000))
_WORD: Ranges = (
    (48, 57), (65, 90), (95, 95), (97, 122), (0xAA, 0xAA), (0xB5, 0xB5), (0xBA, 0xBA), (0xC0, 0xD6), (0xD8, 0xF6),
    (0xF8, 0x2C1), (0x300, 0x1FFF), (0x2C00, 0x2DFF), (0x3005, 0x3007), (0x3031, 0xD7FF), (0xF900, 0xFDFF),
    (0xFE70, 0xFEFC), (0xFF10, 0xFF19), (0xFF21, 0xFF3A), (0xFF41, 0xFF5A), (0xFF66, 0xFFDC), (0x10000, 0x1CFFF),
    (0x20000, 0x3FFFF),
)  # fmt: skip
_CATEGORIES = {
    op.CATEGORY_DIGIT: (_DIGIT, False), op.CATEGORY_NOT_DIGIT: (_DIGIT, True),
    op.CATEGORY_SPACE: (_SPACE, False), op.CATEGORY_NOT_SPACE: (_SPACE, True),
    op.CATEGORY_WORD: (_WORD, False), op.CATEGORY_NOT_WORD: (_WORD, True),
}  # fmt: skip
_RUSTS = re.compile(r"\\([xu])\{([0-9a-fA-F]{1,6})\}|\(\?<(?=[A-Za-z_])|\\z|\\.", re.DOTALL)
_BEGINS = (op.AT_BEGINNING, op.AT_BEGINNING_STRING)
_ENDS = (op.AT_END, op.AT_END_STRING)
_FOLDED = 0x2000  # characters above have no other case here


def regex_node(source: str, flags: str = "") -> Node:
    """The tree of an expression; `flags` are letters of `imsx`.

    GrammarError: it is no regular expression. NotEnforceable: it has look-around, back-references,
    or classes of characters by property."""
    bits = sum({"i": re.I, "m": re.M, "s": re.S, "x": re.X}.get(flag, 0) for flag in set(flags))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = parser.parse(_RUSTS.sub(_python, source), int(bits))
    except (re.error, OverflowError) as error:
        kind = NotEnforceable if "bad escape" in str(error) else GrammarError
        raise kind(f"the regular expression {source[:60]!r}: {error}") from None
    except RecursionError:
        raise GrammarError("a regular expression is nested too deeply") from None
    return _Writer(source).sequence(list(tree), tree.state.flags, True, True, 0)


def _python(match: re.Match[str]) -> str:
    text = match[0]
    if match[2]:
        code = int(match[2], 16)
        return f"\\U{code:08x}" if code <= LAST else text
    return {"(?<": "(?P<", r"\z": r"\Z"}.get(text, text)


class _Writer:
    def __init__(self, source: str) -> None:
        self._source = source

    def refuse(self, feature: str) -> NotEnforceable:
        return NotEnforceable(f"the regular expression {self._source[:60]!r} has {feature}")

    def sequence(self, items: Sequence[tuple[Any, Any]], flags: int, first: bool, last: bool, depth: int) -> Node:
        """The tree of a sequence. `first`, `last`: nothing stands before it or after it."""
        if depth > MAX_DEPTH:
            raise GrammarError("a regular expression is nested too deeply")
        parts = []
        for i, (code, operand) in enumerate(items):
            begins, ends = first and i == 0, last and i == len(items) - 1
            if code is op.AT and not ((begins and operand in _BEGINS) or (ends and operand in _ENDS)):
                raise self.refuse("an anchor inside of it")
            if code is not op.AT:
                parts.append(self.part(code, operand, flags, begins, ends, depth))
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def part(self, code: Any, operand: Any, flags: int, first: bool, last: bool, depth: int) -> Node:
        if code is op.LITERAL:
            return chars(_folded([(operand, operand)], flags))
        if code is op.NOT_LITERAL:
            return chars(_folded([(operand, operand)], flags), True)
        if code is op.ANY:
            return chars([(0, LAST)]) if flags & re.S else chars([(10, 10)], True)
        if code is op.IN:
            return self.char_class(operand, flags)
        if code is op.BRANCH:
            return Alt(tuple(self.sequence(list(one), flags, first, last, depth + 1) for one in operand[1]))
        if code is op.SUBPATTERN:
            _, add, remove, inner = operand
            return self.sequence(list(inner), (flags | add) & ~remove, first, last, depth + 1)
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, inner = operand
            unbounded = most is op.MAXREPEAT
            if max(least, 0 if unbounded else most) > MAX_REPEAT:
                raise self.refuse(f"more than {MAX_REPEAT} repetitions")
            return Repeat(
                self.sequence(list(inner), flags, False, False, depth + 1), least, None if unbounded else most
            )
        raise self.refuse(_NAMES.get(code, str(code).lower()))

    def char_class(self, items: Sequence[tuple[Any, Any]], flags: int) -> Chars:
        ranges: list[tuple[int, int]] = []
        negated = False
        for code, operand in items:
            if code is op.NEGATE:
                negated = True
            elif code is op.LITERAL:
                ranges.append((operand, operand))
            elif code is op.RANGE:
                ranges.append(operand)
            elif code is op.CATEGORY and operand in _CATEGORIES:
                ranges += chars(list(_CATEGORIES[operand][0]), _CATEGORIES[operand][1]).ranges
            else:
                raise self.refuse(str(operand).lower())
        return chars(_folded(ranges, flags), negated)


_NAMES = {
    op.ASSERT: "look-around", op.ASSERT_NOT: "look-around", op.GROUPREF: "a back-reference",
    op.GROUPREF_EXISTS: "a condition", op.ATOMIC_GROUP: "an atomic group",
    op.POSSESSIVE_REPEAT: "possessive repetition",
}  # fmt: skip


def _folded(ranges: list[tuple[int, int]], flags: int) -> list[tuple[int, int]]:
    """The ranges with the other case of their characters, where case does not count."""
    if not flags & re.I:
        return ranges
    others = []
    for low, high in ranges:
        for code in range(low, min(high, _FOLDED) + 1):
            if unicodedata.category(chr(code))[0] == "L":
                others += [(ord(c), ord(c)) for c in (chr(code).lower(), chr(code).upper()) if len(c) == 1]
    return ranges + others

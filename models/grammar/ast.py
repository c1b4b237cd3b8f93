"""Syntax tree of a grammar: character classes and tokens in sequences, choices and repetitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

# of code points, both ends included; sorted, apart from each other
Ranges = tuple[tuple[int, int], ...]

LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a class."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the vocabulary; `negated`: any other token."""

    id: int
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference to another rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Seq:
    """Sequence of parts; without parts the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """Choice of one part."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Repetition: `least` to `most` times; None: without bound."""

    part: Node
    least: int
    most: int | None


Node = Chars | Token | Ref | Seq | Alt | Repeat


@dataclass(frozen=True, slots=True)
class Rules:
    """A grammar: its rules in the order of the source. A text of the grammar matches `root`."""

    rules: dict[str, Node]
    root: str = "root"


def walk(node: Node) -> Iterator[Node]:
    """A node and all nodes in it."""
    work = [node]
    while work:
        node = work.pop()
        yield node
        if isinstance(node, Seq | Alt):
            work += node.parts
        elif isinstance(node, Repeat):
            work.append(node.part)


def mapped(node: Node, leaf: Callable[[Node], Node]) -> Node:
    """A tree with other leaves: characters, tokens and references."""
    if isinstance(node, Seq | Alt):
        return type(node)(tuple(mapped(part, leaf) for part in node.parts))
    return replace(node, part=mapped(node.part, leaf)) if isinstance(node, Repeat) else leaf(node)


def chars(ranges: list[tuple[int, int]], negated: bool = False) -> Chars:
    """Class of the characters in some ranges, or of all others; surrogates are left out."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(joined[-1][1], high)
        else:
            joined.append((low, high))
    if negated:
        ends = [-1, *(end for pair in joined for end in pair), LAST + 1]
        joined = [(low + 1, high - 1) for low, high in zip(ends[::2], ends[1::2], strict=True) if low + 1 <= high - 1]
    low, high = _SURROGATES
    apart = []
    for a, b in joined:
        if b < low or a > high:
            apart.append((a, b))
        else:
            apart += [(a, low - 1)] if a < low else []
            apart += [(high + 1, b)] if b > high else []
    return Chars(tuple(apart))


_ESCAPED = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_FREE = 0x20  # the first character that may stand in a JSON string as it is


def literal(text: str) -> Node:
    """The sequence of a text's characters."""
    return Seq(tuple(chars([(ord(c), ord(c))]) for c in text))


def in_json(grammar: Rules) -> Rules:
    """The grammar of the same texts as they are written between the quotes of a JSON string."""
    return Rules({name: mapped(node, _escaped) for name, node in grammar.rules.items()}, grammar.root)


def _escaped(node: Node) -> Node:
    """A character of a class: as it is, or as its escape. Other nodes as they are."""
    if not isinstance(node, Chars):
        return node
    free: list[tuple[int, int]] = []
    escapes: list[Node] = []
    digits: dict[int, list[tuple[int, int]]] = {}  # by the first hexadecimal digit of a control character, the second
    for low, high in node.ranges:
        for code in range(low, min(high, ord("\\")) + 1):
            if chr(code) in _ESCAPED:
                escapes.append(literal(_ESCAPED[chr(code)]))
            elif code < _FREE:
                digits.setdefault(code >> 4, []).append((ord(f"{code & 15:x}"), ord(f"{code & 15:x}")))
            else:
                free.append((code, code))
        if high > ord("\\"):
            free.append((max(low, ord("\\") + 1), high))
    escapes += [Seq((literal(f"\\u00{first:x}"), chars(second))) for first, second in digits.items()]
    if not escapes:
        return chars(free)
    return Alt((*([chars(free)] if free else []), *escapes))

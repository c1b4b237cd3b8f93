"""Syntax tree of a grammar: character classes and tokens in sequences, choices and repetitions."""

from __future__ import annotations

from dataclasses import dataclass

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

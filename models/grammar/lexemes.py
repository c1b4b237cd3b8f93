"""Lexeme analysis: parts of a grammar that a greedy lexer may take without changing the language.

A part is a lexeme if
1. it is deterministic: every character of a text leaves one position of the part's automaton
   (Glushkov 1961);
2. no character that could extend a match of it may also follow it;
3. no other lexeme begins with a character that it may begin with, so that lexemes never compete.
Other parts are split, down to single characters, which are always exact."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from logitless.models.grammar.ast import Alt, Chars, Node, Ref, Repeat, Rules, Seq, Token, walk

_MAX_POSITIONS = 400  # of a lexeme's automaton
_MAX_NODES = 4000  # of a grammar; larger ones are lexed by characters
_MAX_ROUNDS = 30
_ANYTHING = -1  # every character, as a set of bits
K = TypeVar("K")


@dataclass(slots=True)
class _Automaton:
    """Positions as bits. `classes[p]`: the characters of position p."""

    classes: list[int]
    follow: list[int]
    first: int = 0
    last: int = 0
    nullable: bool = True


class _TooLarge(Exception):
    pass


class Lexemes:
    """Lexemes of a grammar; `regular`: names of the rules that a regular expression can express."""

    def __init__(self, grammar: Rules, regular: set[str]) -> None:
        self._rules, self._regular, self._root = grammar.rules, regular, grammar.root
        self._split: set[Node] = set()  # parts that must be split
        self._machines: dict[Node, _Automaton | None] = {}
        n_nodes = sum(1 for node in grammar.rules.values() for _ in walk(node))
        self._worthwhile = n_nodes <= _MAX_NODES
        if self._worthwhile:
            self._atoms = _atoms(grammar.rules.values())
            self._decide()

    def is_lexeme(self, node: Node) -> bool:
        """True if a part of a rule is one lexeme."""
        if isinstance(node, Chars):
            return True
        return self._worthwhile and node not in self._split and node != Seq(()) and self._is_regular(node)

    def parsed_rules(self) -> list[str]:
        """Names of the rules that the parser needs: reached from the root without entering a lexeme."""
        visited, work = {self._root: None}, [self._root]
        while work:
            for node in self._leaves(self._rules[work.pop()]):
                if isinstance(node, Ref) and not self.is_lexeme(node) and node.name not in visited:
                    visited[node.name] = None
                    work.append(node.name)
        return list(visited)

    def _is_regular(self, node: Node) -> bool:
        return all(
            not isinstance(part, Token) and (not isinstance(part, Ref) or part.name in self._regular)
            for part in walk(node)
        )

    def _leaves(self, node: Node) -> Iterator[Node]:
        """Lexemes, references and tokens of a rule: the parser's symbols."""
        work = [node]
        while work:
            node = work.pop()
            if self.is_lexeme(node) or isinstance(node, Ref | Token):
                yield node
            elif isinstance(node, Repeat):
                work.append(node.part)
            elif isinstance(node, Seq | Alt):
                work += node.parts

    # -- the three conditions

    def _decide(self) -> None:
        for _ in range(_MAX_ROUNDS):
            leaves = {leaf: None for name in self.parsed_rules() for leaf in self._leaves(self._rules[name])}
            lexemes = [leaf for leaf in leaves if self.is_lexeme(leaf)]
            follow = self._follow()
            machines = {leaf: self._automaton(leaf) for leaf in lexemes}
            bad: set[Node] = set()
            starts: dict[Node, int] = {}
            for leaf, machine in machines.items():
                starts[leaf] = _ANYTHING if machine is None else _union(machine, machine.first)
                if isinstance(leaf, Chars):
                    continue
                if machine is None or not _deterministic(machine) or _prolonging(machine) & follow.get(leaf, 0):
                    bad.add(leaf)
            if not bad:  # only now: a split part may have been the other side of a conflict
                for leaf in lexemes:
                    others = (start for other, start in starts.items() if other != leaf)
                    if not isinstance(leaf, Chars) and any(starts[leaf] & start for start in others):
                        bad.add(leaf)
            if not bad:
                return
            self._split |= bad
        self._worthwhile = False

    def _mask(self, node: Chars) -> int:
        mask = 0
        for low, high in node.ranges:
            for i, (a, b) in enumerate(self._atoms):
                if low <= a and b <= high:
                    mask |= 1 << i
        return mask

    def _automaton(self, node: Node) -> _Automaton | None:
        """The position automaton of a part; None if it is too large."""
        if node not in self._machines:
            machine: _Automaton | None = _Automaton([], [])
            assert machine is not None
            try:
                machine.nullable, machine.first, machine.last = self._positions(node, machine)
            except (_TooLarge, RecursionError):
                machine = None
            self._machines[node] = machine
        return self._machines[node]

    def _positions(self, node: Node, m: _Automaton) -> tuple[bool, int, int]:
        """Add a node's positions; returns (nullable, first positions, last positions)."""
        if isinstance(node, Chars):
            if len(m.classes) >= _MAX_POSITIONS:
                raise _TooLarge
            m.classes.append(self._mask(node))
            m.follow.append(0)
            bit = 1 << (len(m.classes) - 1)
            return False, bit, bit
        if isinstance(node, Ref):
            return self._positions(self._rules[node.name], m)
        if isinstance(node, Seq):
            return self._sequence(node.parts, m)
        if isinstance(node, Alt):
            positions = [self._positions(part, m) for part in node.parts]
            first = last = 0
            for _, a, b in positions:
                first, last = first | a, last | b
            return any(nullable for nullable, _, _ in positions), first, last
        assert isinstance(node, Repeat)
        if node.most is None:
            least = [node.part] * max(1, node.least)
            nullable, first, last = self._sequence(least[:-1], m)
            again = self._positions(node.part, m)
            _link(m, again[2], again[1])
            both = _joined(m, (nullable, first, last), again)
            return both[0] or node.least == 0, both[1], both[2]
        if node.most == 0:
            return True, 0, 0
        if node.most > _MAX_POSITIONS:
            raise _TooLarge
        result = self._sequence([node.part] * node.least, m)
        whole, ends = result, result[2]
        # x (x (x)?)?, each optional one after the one before it
        for _ in range(node.most - node.least):
            part = self._positions(node.part, m)
            _link(m, ends, part[1])
            whole = whole[0], whole[1] | (part[1] if whole[0] and not ends else 0), whole[2] | part[2]
            ends = part[2] | (ends if part[0] else 0)
        return whole

    def _sequence(self, parts: Iterable[Node], m: _Automaton) -> tuple[bool, int, int]:
        result = True, 0, 0
        for part in parts:
            result = _joined(m, result, self._positions(part, m))
        return result

    # -- follow sets

    def _follow(self) -> dict[Node, int]:
        """Characters that may come after each lexeme."""
        names = self.parsed_rules()
        nullable = dict.fromkeys(names, False)
        first = dict.fromkeys(names, 0)
        after: dict[str, int] = dict.fromkeys(names, 0)
        follow: dict[Node, int] = {}
        changed = True

        def head(node: Node) -> tuple[bool, int]:
            if self.is_lexeme(node):
                machine = self._automaton(node)
                return (True, _ANYTHING) if machine is None else (machine.nullable, _union(machine, machine.first))
            if isinstance(node, Ref):
                return nullable[node.name], first[node.name]
            if isinstance(node, Token):
                return False, _ANYTHING
            if isinstance(node, Repeat):
                empty, chars = head(node.part)
                return empty or node.least == 0, chars
            assert isinstance(node, Seq | Alt)
            chars = 0
            for part in node.parts:
                empty, more = head(part)
                chars |= more
                if isinstance(node, Seq) and not empty:
                    return False, chars
            return isinstance(node, Seq) or any(head(part)[0] for part in node.parts), chars

        def visit(node: Node, rest: int) -> None:
            """Propagate `rest`, the characters that may follow the node."""
            nonlocal changed
            if self.is_lexeme(node):
                changed |= _add(follow, node, rest)
            elif isinstance(node, Ref):
                changed |= _add(after, node.name, rest)
            elif isinstance(node, Repeat):
                visit(node.part, rest | (0 if node.most == 1 else head(node.part)[1]))
            elif isinstance(node, Alt):
                for part in node.parts:
                    visit(part, rest)
            elif isinstance(node, Seq):
                for part in reversed(node.parts):
                    visit(part, rest)
                    empty, chars = head(part)
                    rest = chars | (rest if empty else 0)

        while changed:
            changed = False
            for name in names:
                start = head(self._rules[name])
                if start != (nullable[name], first[name]):
                    nullable[name], first[name] = start
                    changed = True
                visit(self._rules[name], after[name])
        return follow


def _add(table: dict[K, int], key: K, characters: int) -> bool:
    """Add characters to a key's set; True: it has more of them now."""
    before = table.get(key)
    table[key] = (before or 0) | characters
    return table[key] != before


def _atoms(nodes: Iterable[Node]) -> list[tuple[int, int]]:
    """Ranges of characters that no class of the grammar separates."""
    starts = {0}
    for node in nodes:
        for part in walk(node):
            if isinstance(part, Chars):
                starts |= {end for a, b in part.ranges for end in (a, b + 1)}
    ordered = sorted(starts)
    return list(zip(ordered, [start - 1 for start in ordered[1:]] + [0x10FFFF], strict=True))


def _bits(set_: int) -> Iterator[int]:
    while set_:
        low = set_ & -set_
        yield low.bit_length() - 1
        set_ ^= low


def _link(m: _Automaton, ends: int, starts: int) -> None:
    for p in _bits(ends):
        m.follow[p] |= starts


def _joined(m: _Automaton, a: tuple[bool, int, int], b: tuple[bool, int, int]) -> tuple[bool, int, int]:
    """(nullable, first, last) of a sequence of two."""
    _link(m, a[2], b[1])
    return a[0] and b[0], a[1] | (b[1] if a[0] else 0), b[2] | (a[2] if b[0] else 0)


def _union(m: _Automaton, positions: int) -> int:
    mask = 0
    for p in _bits(positions):
        mask |= m.classes[p]
    return mask


def _deterministic(m: _Automaton) -> bool:
    for positions in (m.first, *m.follow):
        union = 0
        for p in _bits(positions):
            if union & m.classes[p]:
                return False
            union |= m.classes[p]
    return True


def _prolonging(m: _Automaton) -> int:
    """Characters that extend a match to a longer one."""
    mask = 0
    for p in _bits(m.last):
        mask |= _union(m, m.follow[p])
    return mask

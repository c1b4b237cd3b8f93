"""Parser of GBNF, the grammar language of llama.cpp (`llama-grammar.cpp`, 2026).

Rules `name ::= alternatives`, of literals "…", classes […] and [^…], `.`, references, groups (…),
repetition * + ? {m} {m,} {m,n}, comments #…, escapes \\n \\r \\t \\\\ \\" \\[ \\] \\xHH \\uHHHH
\\UHHHHHHHH, and tokens <text>, <[id]>, !<text>. A rule ends with its line, except inside of a group
and after `|` or `::=`. Left recursion, which llama.cpp refuses, is allowed."""

from __future__ import annotations

import re
from typing import NoReturn

from logitless.models.grammar.ast import LAST, Alt, Chars, Node, Ref, Repeat, Rules, Seq, Token, chars
from logitless.models.grammar.errors import GrammarError, placed
from logitless.models.tokenizer import Tokenizer

MAX_REPEAT = 2000  # llama.cpp's "sane default"
MAX_DEPTH = 100
MAX_RULES = 10_000
MAX_PARTS = 40_000  # characters, classes and references
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_INT = re.compile(r"[0-9]+")
_BLANK = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_TOKEN = re.compile(r"<\[([0-9]{1,9})\]>|<([^>\r\n]+)>")
_ANY = chars([(0, LAST)])


def parse(source: str, tokenizer: Tokenizer) -> Rules:
    """The rules of a grammar. GrammarError names line and column, or the rule."""
    return _Parser(source, tokenizer).rules()


class _Parser:
    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self.text = source
        self.at = 0
        self.depth = 0
        self.n_parts = 0
        self.tokenizer = tokenizer
        self.references: dict[str, int] = {}  # name → where it is used first

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        raise GrammarError(placed(message, self.text, self.at if at is None else at))

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        if match is None:
            return ""
        self.at = match.end()
        return match[0]

    def space(self, newlines: bool) -> None:
        self.skip(_SPACE if newlines else _BLANK)

    # -- rules

    def rules(self) -> Rules:
        rules: dict[str, Node] = {}
        self.space(True)
        while self.at < len(self.text):
            start = self.at
            name = self.skip(_NAME)
            if not name:
                self.fail("expected the name of a rule")
            self.space(False)
            if not self.text.startswith("::=", self.at):
                self.fail("expected ::=")
            self.at += 3
            self.space(True)
            if len(rules) >= MAX_RULES:
                self.fail(f"more than {MAX_RULES} rules", start)
            # llama.cpp: of two rules with one name the last counts
            rules[name] = self.alternatives(False)
            if self.at < len(self.text) and self.peek() not in "\r\n":
                self.fail("expected a new line or an element")
            self.space(True)
        missing = [name for name in self.references if name not in rules]
        if missing:
            self.fail(f"rule {missing[0]!r} is not defined", self.references[missing[0]])
        if "root" not in rules:
            raise GrammarError("there is no rule 'root'")
        return Rules(rules)

    def alternatives(self, nested: bool) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail("nested too deeply")
        parts = [self.sequence(nested)]
        while self.peek() == "|":
            self.at += 1
            self.space(True)
            parts.append(self.sequence(nested))
        self.depth -= 1
        return parts[0] if len(parts) == 1 else Alt(tuple(parts))

    def sequence(self, nested: bool) -> Node:
        parts: list[Node] = []
        while (part := self.element()) is not None:
            self.space(nested)
            while (times := self.repetition(nested)) is not None:
                part = Repeat(part, *times)
            parts.append(part)
        if self.peek() and self.peek() in "*+?{":
            self.fail("expected an element before the repetition")
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def element(self) -> Node | None:
        char = self.peek()
        self.n_parts += 1
        if self.n_parts > MAX_PARTS:
            self.fail(f"more than {MAX_PARTS} elements")
        if char == '"':
            return self.literal()
        if char == "[":
            return self.char_class()
        if char == ".":
            self.at += 1
            return _ANY
        if char in ("<", "!"):
            return self.token()
        if char == "(":
            self.at += 1
            self.space(True)
            group = self.alternatives(True)
            if self.peek() != ")":
                self.fail("expected )")
            self.at += 1
            return group
        start = self.at
        name = self.skip(_NAME)
        if not name:
            return None
        self.references.setdefault(name, start)
        return Ref(name)

    # -- elements

    def literal(self) -> Node:
        start = self.at
        self.at += 1
        codes: list[Chars] = []
        while self.peek() != '"':
            if not self.peek():
                self.fail("a literal without its end", start)
            code = self.char()
            codes.append(chars([(code, code)]))
        self.n_parts += len(codes)
        self.at += 1
        return codes[0] if len(codes) == 1 else Seq(tuple(codes))

    def char_class(self) -> Node:
        start = self.at
        self.at += 1
        negated = self.peek() == "^"
        self.at += negated
        ranges: list[tuple[int, int]] = []
        while self.peek() != "]":
            if not self.peek():
                self.fail("a class without its end", start)
            low = high = self.char()
            if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = self.char()
            if high >= low:  # llama.cpp: a range that runs backwards is empty
                ranges.append((low, high))
        self.at += 1
        return chars(ranges, negated)

    def char(self) -> int:
        """A character's code point, after its escape."""
        char = self.peek()
        start = self.at
        self.at += 1
        if char != "\\":
            return ord(char)
        char = self.peek()
        self.at += 1
        if char in _ESCAPES:
            return ord(_ESCAPES[char])
        if char not in _HEX:
            self.fail("unknown escape", start)
        digits = self.text[self.at : self.at + _HEX[char]]
        if not re.fullmatch(f"[0-9a-fA-F]{{{_HEX[char]}}}", digits):
            self.fail(f"expected {_HEX[char]} hexadecimal digits", start)
        self.at += len(digits)
        code = int(digits, 16)
        if code > LAST or 0xD800 <= code <= 0xDFFF:
            self.fail("no Unicode character", start)
        return code

    def token(self) -> Node:
        start = self.at
        negated = self.peek() == "!"
        self.at += negated
        match = _TOKEN.match(self.text, self.at)
        if match is None:
            self.fail("expected a token, <text> or <[id]>", start)
        self.at = match.end()
        if match[1] is not None:
            id = int(match[1])
            if id >= self.tokenizer.n_vocab:
                self.fail(f"token {id} is outside the vocabulary of {self.tokenizer.n_vocab}", start)
            return Token(id, negated)
        ids = self.tokenizer.encode(match[0], add_special=False, parse_special=True)
        if len(ids) != 1:
            self.fail("not one token of the vocabulary", start)
        return Token(ids[0], negated)

    def repetition(self, nested: bool) -> tuple[int, int | None] | None:
        start = self.at
        char = self.peek()
        if char == "*" or char == "+" or char == "?":
            self.at += 1
            self.space(nested)
            return int(char == "+"), 1 if char == "?" else None
        if char != "{":
            return None
        self.at += 1
        self.space(nested)
        least = self.integer()
        most: int | None = least
        self.space(nested)
        if self.peek() == ",":
            self.at += 1
            self.space(nested)
            most = self.integer() if self.peek().isdigit() else None
            self.space(nested)
        if self.peek() != "}":
            self.fail("expected , or }")
        self.at += 1
        self.space(nested)
        if max(least, most or 0) > MAX_REPEAT:
            self.fail(f"more than {MAX_REPEAT} repetitions", start)
        if most is not None and most < least:
            self.fail("a repetition whose limits are the wrong way round", start)
        return least, most

    def integer(self) -> int:
        digits = self.skip(_INT)
        if not digits:
            self.fail("expected a number")
        return min(int(digits[:9]), 1 << 30) if len(digits) < 10 else 1 << 30

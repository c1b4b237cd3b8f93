"""Parser of Lark's grammar language (lark-parser 1.x), as OpenAI's custom tools use it.

Rules and terminals of texts "…"i, /regular expressions/, ranges "a".."z", groups (…), options […],
repetitions ? * + ~ n ~ n..m {n,m}, aliases `-> name`, priorities, `%import common.…`, `%ignore`,
comments // and #. Terminals are read as parts of the rules: there is no lexer, and so no priority
among them. Templates, `%declare`, `%override`, `%extend` and other imports are not enforceable."""

from __future__ import annotations

import ast
import re
import warnings
from typing import NoReturn

from logitless.models.grammar.ast import Alt, Node, Ref, Repeat, Rules, Seq, chars, mapped
from logitless.models.grammar.errors import GrammarError, NotEnforceable, placed
from logitless.models.grammar.regex import MAX_DEPTH, MAX_REPEAT, regex_node

_MAX_TOKENS = 40_000
_TOKEN = re.compile(
    r"""(?P<blank>[ \t\f]+|\\\r?\n)|(?P<comment>(?://|\#)[^\n]*)|(?P<line>\r?\n\s*)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)|(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[imslux]*)
    |(?P<directive>%[a-z]+)|(?P<name>_{0,2}[A-Za-z][A-Za-z0-9_]*)|(?P<number>-?[0-9]+)
    |(?P<op>\.\.|->|[:|()\[\]*+?~{},.@&!<>=])""",
    re.VERBOSE,
)
COMMON = {
    "DIGIT": "[0-9]", "HEXDIGIT": "[a-fA-F0-9]", "INT": "[0-9]+", "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_FLOAT": r"[+-]?([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
    "NUMBER": r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "LETTER": "[A-Za-z]", "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+", "WS": r"[ \t\f\r\n]+", "CR": r"\r", "LF": r"\n", "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*", "CPP_COMMENT": r"//[^\n]*", "SQL_COMMENT": r"--[^\n]*",
    "C_COMMENT": r"/\*([^*]|\*+[^*/])*\*+/",
}  # fmt: skip
"""Terminals of Lark's `common` grammar."""

_Lexeme = tuple[str, str, int]  # kind, text, place


def parse_lark(source: str) -> Rules:
    """The rules of a grammar; the root is `start`.

    GrammarError names line and column, or the rule. NotEnforceable: it is well-formed as far as it
    was read, and has a part that this engine cannot enforce."""
    return _Parser(source).rules()


def is_terminal(name: str) -> bool:
    """True for the name of a terminal: it is in upper case."""
    return name.lstrip("_")[:1].isupper()


def _spaced(node: Node) -> Node:
    """A terminal with the ignored ones after it."""
    return Seq((node, Ref(_IGNORED))) if isinstance(node, Ref) and is_terminal(node.name) else node


class _Parser:
    def __init__(self, source: str) -> None:
        self.text = source
        self.depth = 0
        self.nodes: dict[str, Node] = {}
        self.ignored: list[Node] = []
        self.references: dict[str, int] = {}  # name → where it is used first
        self.tokens = self.scanned()
        self.at = 0

    def fail(self, message: str, place: int | None = None) -> NoReturn:
        raise GrammarError(self.placed(message, place))

    def placed(self, message: str, place: int | None = None) -> str:
        place = self.tokens[self.at][2] if place is None else place
        return placed(message, self.text, place)

    def unsupported(self, feature: str) -> NoReturn:
        raise NotEnforceable(self.placed(f"{feature} cannot be enforced"))

    def scanned(self) -> list[_Lexeme]:
        """The tokens; lines that go on with | are joined."""
        tokens: list[_Lexeme] = []
        at, brackets = 0, 0
        while at < len(self.text):
            match = _TOKEN.match(self.text, at)
            if match is None:
                self.fail("unexpected character", at)
            kind, text = str(match.lastgroup), match[0]
            at = match.end()
            if kind in ("blank", "comment") or (kind == "line" and brackets):
                continue
            if kind == "line" and (not tokens or tokens[-1][0] == "line"):
                continue
            if text == "|" and tokens and tokens[-1][0] == "line":
                tokens.pop()
            brackets = max(0, brackets + (text in ("(", "[")) - (text in (")", "]"))) if kind == "op" else brackets
            tokens.append((kind, text, match.start()))
            if len(tokens) > _MAX_TOKENS:
                self.fail(f"more than {_MAX_TOKENS} elements", at)
        return [*tokens, ("line", "", len(self.text)), ("end", "", len(self.text))]

    # -- tokens

    @property
    def kind(self) -> str:
        return self.tokens[self.at][0]

    @property
    def word(self) -> str:
        return self.tokens[self.at][1]

    def is_op(self, *texts: str) -> bool:
        return self.kind == "op" and self.word in texts

    def take(self, kind: str, description: str) -> str:
        if self.kind != kind:
            self.fail(f"expected {description}")
        self.at += 1
        return self.tokens[self.at - 1][1]

    def take_op(self, text: str) -> None:
        if not self.is_op(text):
            self.fail(f"expected {text}")
        self.at += 1

    def end_line(self) -> None:
        self.take("line", "the end of the line")

    # -- statements

    def rules(self) -> Rules:
        while self.kind != "end":
            if self.kind == "line":
                self.at += 1
            elif self.kind == "directive":
                self.directive()
            else:
                self.rule()
        for name, place in self.references.items():
            if name not in self.nodes:
                self.fail(f"{name!r} is not defined", place)
        if "start" not in self.nodes:
            raise GrammarError("there is no rule 'start'")
        rules = self.nodes
        if self.ignored:
            rules = {name: rule if is_terminal(name) else mapped(rule, _spaced) for name, rule in rules.items()}
            rules |= {_IGNORED: Repeat(Alt(tuple(self.ignored)), 0, None)}
            rules |= {_WHOLE: Seq((Ref(_IGNORED), Ref("start")))}
            return Rules(rules, _WHOLE)
        return Rules(rules, "start")

    def directive(self) -> None:
        name = self.word
        if name == "%ignore":
            self.at += 1
            self.ignored.append(self.alternatives())
        elif name == "%import":
            self.at += 1
            self.imported()
        else:
            self.unsupported(name)
        self.end_line()

    def imported(self) -> None:
        if self.is_op("."):
            self.unsupported("an import from a file")
        library = self.take("name", "a library")
        if library != "common":
            self.at -= 1
            self.unsupported("an import from another grammar than common")
        if self.is_op("."):
            self.at += 1
            names = [self.take("name", "a terminal")]
        else:
            self.take_op("(")
            names = [self.take("name", "a terminal")]
            while self.is_op(","):
                self.at += 1
                names.append(self.take("name", "a terminal"))
            self.take_op(")")
        for name in names:
            if name not in COMMON:
                self.fail(f"common has no terminal {name!r}")
            self.nodes[name] = regex_node(COMMON[name])
        if self.is_op("->"):
            self.at += 1
            self.nodes[self.take("name", "a name")] = self.nodes[names[0]]

    def rule(self) -> None:
        while self.is_op("?", "!"):
            self.at += 1
        name = self.take("name", "a rule or a terminal")
        if self.is_op("{"):
            self.unsupported("a template")
        if self.is_op("["):
            self.unsupported("an attribute")
        if self.is_op("."):  # a priority
            self.at += 1
            self.take("number", "a priority")
        self.take_op(":")
        if name in self.nodes:
            self.fail(f"{name!r} is defined twice")
        self.nodes[name] = self.alternatives()
        self.end_line()

    # -- expressions

    def alternatives(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail("nested too deeply")
        parts = [self.sequence()]
        while self.is_op("|"):
            self.at += 1
            parts.append(self.sequence())
        self.depth -= 1
        return parts[0] if len(parts) == 1 else Alt(tuple(parts))

    def sequence(self) -> Node:
        parts: list[Node] = []
        while self.kind in ("string", "regex", "name") or self.is_op("(", "["):
            parts.append(self.repeated())
        if self.is_op("->"):
            self.at += 1
            self.take("name", "an alias")
        if self.is_op("&", "~", "<", "@") or self.kind == "directive":
            self.unsupported(self.word)
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def repeated(self) -> Node:
        part = self.element()
        while self.is_op("?", "*", "+", "~", "{"):
            sign = self.word
            self.at += 1
            if sign in "?*+":
                part = Repeat(part, int(sign == "+"), 1 if sign == "?" else None)
                continue
            least = most = int(self.take("number", "a number")[:9])
            if self.is_op("..", ","):
                self.at += 1
                most = int(self.take("number", "a number")[:9])
            if sign == "{":
                self.take_op("}")
            if not 0 <= least <= most:
                self.fail("a repetition whose limits are the wrong way round")
            if most > MAX_REPEAT:
                self.unsupported(f"more than {MAX_REPEAT} repetitions")
            part = Repeat(part, least, most)
        return part

    def element(self) -> Node:
        kind, text, place = self.tokens[self.at]
        self.at += 1
        if kind == "op":
            inner = self.alternatives()
            self.take_op(")" if text == "(" else "]")
            return inner if text == "(" else Repeat(inner, 0, 1)
        if kind == "name":
            if self.is_op("{") and self.tokens[self.at + 1][0] != "number":
                self.unsupported("a template")
            self.references.setdefault(text, place)
            return Ref(text)
        last = self.tokens[self.at + 1][1] if kind == "string" and self.is_op("..") else ""
        self.at += 2 if last else 0
        name = f"T:{text}..{last}" if last else f"T:{text}"
        if name not in self.nodes:
            self.nodes[name] = self.terminal(kind, text, last, place)
        return Ref(name)

    def terminal(self, kind: str, text: str, last: str, place: int) -> Node:
        """A text, a regular expression, or a range of characters."""
        if last:
            low, high = self.unquoted(text, place), self.unquoted(last, place)
            if len(low) != 1 or len(high) != 1 or low > high:
                self.fail("a range goes from one character to a later one", place)
            return chars([(ord(low), ord(high))])
        if kind == "regex":
            body, _, flags = text[1:].rpartition("/")
        else:
            body, flags = re.escape(self.unquoted(text, place)), "i" if text.endswith("i") else ""
        try:
            return regex_node(body.replace(r"\/", "/"), flags)
        except NotEnforceable as error:
            raise NotEnforceable(self.placed(str(error), place)) from None
        except GrammarError as error:
            self.fail(str(error), place)

    def unquoted(self, text: str, place: int) -> str:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                return str(ast.literal_eval(text.removesuffix("i")))
        except (ValueError, SyntaxError, SyntaxWarning):
            self.fail("a text in quotes with an unknown escape", place)


_IGNORED, _WHOLE = "_ignored", "_whole"

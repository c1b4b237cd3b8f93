"""Translator from GBNF rules to llguidance's Lark.

llguidance's lexer is greedy: it takes the longest lexeme and never goes back, while a GBNF grammar
has no lexer at all. A grammar without recursion becomes one lexeme, which is exact. In the others
characters are lexemes (exact, but a mask then takes longer), and longer parts only where the greedy
choice is the only one (lexemes.py)."""

from __future__ import annotations

from logitless.models.grammar.ast import Alt, Chars, Node, Ref, Repeat, Rules, Seq, Token, literal, walk
from logitless.models.grammar.errors import GrammarError
from logitless.models.grammar.lexemes import Lexemes

_MAX_REGEX = 100_000  # characters of one regular expression
_MAX_LARK = 4_000_000


def to_lark(grammar: Rules) -> str:
    """The grammar's text in Lark; GrammarError when it is too large."""
    return "\n".join(lark_rules(grammar)) + "\n"


def lark_rules(grammar: Rules, name: str = "start", *, end: str = "") -> list[str]:
    """Lark of a grammar: the rule `name`, and rules whose names begin with it. `end`: a text after it, which the
    text of a grammar without recursion cannot contain.

    GrammarError when it is too large."""
    prefix = "" if name == "start" else f"{name}_"
    if end:
        inside = {"@": Seq((Ref(grammar.root), literal(end)))}
        grammar = Rules({**grammar.rules, **inside}, "@")
    regex = _regular(grammar)
    if grammar.root in regex:
        if end:
            return [f"{name}[lazy]: /{regex[grammar.root]}/"]
        return [f"{name}: {prefix.upper()}TEXT", f"{prefix.upper()}TEXT: /{regex[grammar.root]}/"]
    return _Writer(grammar, regex, prefix).lines(name)


def _references(node: Node) -> set[str] | None:
    """Names of the rules that a node refers to; None if it has tokens, which regular expressions cannot have."""
    parts = list(walk(node))
    return None if any(isinstance(p, Token) for p in parts) else {p.name for p in parts if isinstance(p, Ref)}


def _regular(grammar: Rules) -> dict[str, str]:
    """Regular expressions of the rules that reach neither recursion nor tokens.

    A rule comes after the rules that it refers to."""
    waits = {name: _references(node) for name, node in grammar.rules.items()}
    users: dict[str, list[str]] = {name: [] for name in grammar.rules}
    for name, references in waits.items():
        for other in references or ():
            users[other].append(name)
    regex: dict[str, str] = {}
    ready = [name for name, references in waits.items() if references is not None and not references]
    while ready:
        name = ready.pop()
        text = regex_of(grammar.rules[name], regex)
        if len(text) > _MAX_REGEX:
            continue
        regex[name] = text
        for user in users[name]:
            awaited = waits[user]
            if awaited is not None:
                awaited.discard(name)
                if not awaited:
                    ready.append(user)
    return regex


def regex_of(node: Node, rules: dict[str, str]) -> str:
    """The regular expression (Rust's syntax) of a node without tokens."""
    if isinstance(node, Chars):
        return _char_class(node)
    if isinstance(node, Ref):
        return f"(?:{rules[node.name]})"
    if isinstance(node, Seq):
        return "".join(_grouped(part, rules) for part in node.parts)
    if isinstance(node, Alt):
        return "|".join(regex_of(part, rules) for part in node.parts)
    if isinstance(node, Repeat):
        return _grouped(node.part, rules, node) + _times(node)
    raise TypeError(node)


def _grouped(node: Node, rules: dict[str, str], within: Node | None = None) -> str:
    text = regex_of(node, rules)
    whole = isinstance(node, Chars | Ref) or (within is None and not isinstance(node, Alt))
    return text if whole else f"(?:{text})"


def _times(node: Repeat) -> str:
    if (node.least, node.most) in ((0, None), (1, None), (0, 1)):
        return {(0, None): "*", (1, None): "+", (0, 1): "?"}[node.least, node.most]
    return f"{{{node.least},{'' if node.most is None else node.most}}}"


def _char_class(node: Chars) -> str:
    if len(node.ranges) == 1 and node.ranges[0][0] == node.ranges[0][1]:
        return _code(node.ranges[0][0])
    if not node.ranges:
        return r"[^\x{0}-\x{10FFFF}]"
    inside = (_code(a) if a == b else f"{_code(a)}-{_code(b)}" for a, b in node.ranges)
    return f"[{''.join(inside)}]"


def _code(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:X}}}"


class _Writer:
    """Writer of a grammar that needs a parser: lexemes in upper case, rules in lower case."""

    def __init__(self, grammar: Rules, regex: dict[str, str], prefix: str) -> None:
        self.grammar, self.regex, self.prefix = grammar, regex, prefix
        self.names = {name: f"{prefix}r{i}" for i, name in enumerate(grammar.rules)}
        self.lexemes: dict[str, str] = {}  # regular expression → name
        self.whole = Lexemes(grammar, set(regex))

    def lines(self, start: str) -> list[str]:
        lines = [f"{start}: {self.names[self.grammar.root]}"]
        size = 0
        for name in self.whole.parsed_rules():
            lines.append(f"{self.names[name]}: {self.rule(self.grammar.rules[name])}")
            size += len(lines[-1])
            if size > _MAX_LARK:
                raise GrammarError("too large")
        return lines + [f"{name}: /{regex}/" for regex, name in self.lexemes.items()]

    def rule(self, node: Node) -> str:
        if self.whole.is_lexeme(node):
            regex = regex_of(node, self.regex)
            return self.lexemes.setdefault(regex, f"{self.prefix.upper()}T{len(self.lexemes)}")
        if isinstance(node, Ref):
            return self.names[node.name]
        if isinstance(node, Token):
            return f"<[^{node.id}]>" if node.negated else f"<[{node.id}]>"
        if isinstance(node, Seq):
            return " ".join(self.group(part) for part in node.parts) or '""'
        if isinstance(node, Alt):
            return " | ".join(self.rule(part) for part in node.parts)
        assert isinstance(node, Repeat)
        return self.group(node.part) + _times(node)

    def group(self, node: Node) -> str:
        text = self.rule(node)
        return text if self.whole.is_lexeme(node) or isinstance(node, Ref | Token) else f"({text})"

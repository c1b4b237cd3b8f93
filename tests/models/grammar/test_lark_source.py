"""Lark grammars and regular expressions of custom tools: matching texts, bare, in JSON, before a tag."""

from __future__ import annotations

import json
import random
import re

import pytest

from logitless.models.grammar import Grammar, GrammarError
from logitless.models.grammar.ast import Rules, in_json
from logitless.models.grammar.errors import NotEnforceable
from logitless.models.grammar.lark import lark_rules
from logitless.models.grammar.lark_source import COMMON, parse_lark
from logitless.models.grammar.regex import regex_node
from tests.helpers.grammars import accepts, compile_grammar

APPLY_PATCH = """\
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""Of Codex's tool apply_patch."""
PATCH = '*** Begin Patch\n*** Update File: a/é "x".py\n@@ def f():\n-\tone\\n\n+two\n*** End Patch'
SUMS = """\
// expressions
start: expr
expr: term (("+" | "-") term)*      # one line
?term: factor
     | term ("*" | "/") factor -> product
factor: NUMBER | "(" expr ")"
%import common (NUMBER, WS)
%ignore WS
"""
SQL = """\
start: "select"i WS column ("," WS? column)* WS "from"i WS CNAME (WS limit)? ";"
column: CNAME | "*"
limit: "limit"i WS DIGIT~1..3
DIGIT: "0".."9"
%import common.CNAME
%import common.WS_INLINE -> WS
"""


NESTED = 'start: "(" start ")" | "[" "]"'


def compiled(rules: Rules, name: str = "start", end: str = "") -> Grammar:
    lines = lark_rules(rules, name, end=end)
    return compile_grammar("\n".join(lines if name == "start" else [f"start: {name}", *lines]), "lark")


def test_codex_patches() -> None:
    rules = parse_lark(APPLY_PATCH)
    bare, quoted, tagged = compiled(rules), compiled(in_json(rules)), compiled(rules, "text_0", end="\n</parameter>\n")
    for text in (
        PATCH,
        PATCH + "\n",
        PATCH.replace("@@ def f():\n", ""),
        PATCH.replace("Update", "Add").replace("-", "+"),
    ):
        fits = "@@ def" not in text or "Add" not in text
        assert accepts(bare, text) == fits
        assert accepts(quoted, json.dumps(text, ensure_ascii=False)[1:-1]) == fits
        assert accepts(tagged, text + "\n</parameter>\n") == fits
    for text in ("", "ls", PATCH[:-1], PATCH.replace("+two", "two"), f" {PATCH}", "*** Begin Patch\n*** End Patch"):
        assert not accepts(bare, text)
        assert not accepts(quoted, json.dumps(text)[1:-1])
    assert not accepts(quoted, PATCH)  # line breaks must be escaped


@pytest.mark.parametrize(
    ("source", "right", "wrong"),
    [
        (SUMS, ["1", " 1 + 2.5e3 ", "(1*(2 -3) )/4"], ["", "1+", "(1", "1 2", "+1", ")"]),
        (SQL, ["SELECT a, b FROM t limit 100;", "select * from t;"], ["select from t;", "select a from t limit 1000;"]),
        ('start: "a"? [B] c+\nB: "b" | /x+y?/i\nc: "c"{2}', ["cc", "abcc", "aXXYcccc"], ["accc", "bacc", ""]),
        ('start: _A\n_A: "a" ~ 2\n\n    | "b"', ["aa", "b"], ["a", "ab", ""]),
        ('start: ESCAPED_STRING "\\n" /\\//\n%import common.ESCAPED_STRING', ['"a\\"b"\n/'], ['"a"/', '"a"b"\n/']),
        (NESTED, ["[]", "(([]))"], ["([]", "[])"]),
        ('!start.2: "a" "b"i // x\n', ["ab", "aB"], ["Ab"]),
    ],
)
def test_texts_as_larks_own_parser_takes_them(source: str, right: list[str], wrong: list[str]) -> None:
    rules = parse_lark(source)
    bare, quoted = compiled(rules), compiled(in_json(rules))
    for text in (*right, *wrong):
        assert accepts(bare, text) == (text in right), text
        assert accepts(quoted, json.dumps(text)[1:-1]) == (text in right), text


COMMON_TEXTS = {
    'DIGIT': ['1'],
    'HEXDIGIT': ['1', 'a', 'A', 'f'],
    'INT': ['1'],
    'SIGNED_INT': ['1', '-1'],
    'DECIMAL': ['1.5', '1.'],
    'FLOAT': ['1.5', '.5e-3', '1e9', '1.'],
    'SIGNED_FLOAT': ['1.5', '.5e-3', '1e9', '1.'],
    'NUMBER': ['1', '1.5', '.5e-3', '1e9', '1.'],
    'SIGNED_NUMBER': ['1', '-1', '1.5', '.5e-3', '1e9', '1.'],
    'ESCAPED_STRING': ['"a\\"b"'],
    'LCASE_LETTER': ['a', 'f', 'g'],
    'UCASE_LETTER': ['A'],
    'LETTER': ['a', 'A', 'f', 'g'],
    'WORD': ['a', 'A', 'word', 'f', 'g'],
    'CNAME': ['a', 'A', '_a1', 'word', 'f', 'g'],
    'WS_INLINE': [' ', '\t'],
    'WS': [' ', '\t', '\n', '\r\n', '\r'],
    'CR': ['\r'],
    'LF': ['\n'],
    'NEWLINE': ['\n', '\r\n'],
    'SH_COMMENT': ['# x'],
    'CPP_COMMENT': ['// x'],
    'SQL_COMMENT': ['-- x'],
    'C_COMMENT': ['/* x */'],
}  # fmt: skip
"""Texts of Lark's common terminals, as lark-parser 1.3 takes them; it takes none of the others here."""


def test_common_terminals() -> None:
    assert set(COMMON_TEXTS) == set(COMMON)
    texts = {text for right in COMMON_TEXTS.values() for text in right} | {"/* x */ */", '"a"b"', ""}
    for name, right in COMMON_TEXTS.items():
        ours = compiled(parse_lark(f"start: {name}\n%import common.{name}"))
        assert {text for text in texts if accepts(ours, text)} == set(right), name


@pytest.mark.parametrize(
    "pattern",
    [r"^a[b-d]{2,3}$", r"(?i)ab|c", r"(?P<year>\d{4})-\d\d", r"(?<x>a)b?", r"\x{41}\u{42}\x43", r"a.c", r"(?s:a.c)",
     r"[^a\n]+", r"\s*\w+\S?", r"(a|ab)(c|bcd)*?", r"^(?:a|b)$", r"\"\\/", r"[\]\-x]*", r"(?i)[a-c]é", ""],
)  # fmt: skip
def test_regular_expressions(pattern: str) -> None:
    ours = compiled(Rules({"start": regex_node(pattern)}, "start"))
    quoted = compiled(in_json(Rules({"start": regex_node(pattern)}, "start")))
    pythons = pattern.replace(r"\x{41}\u{42}", "AB").replace("(?<x>", "(?P<x>")
    choose = random.Random(pattern)
    texts = ["abb", "abcd", "AB", "2024-01", "a\nc", "axc", "ABC", '"\\/', "]-x", "é", "aÉ", "bé", "a b", ""]
    texts += ["".join(choose.choices("abcdxAé2-_ \n", k=choose.randrange(6))) for _ in range(60)]
    for text in texts:
        fits = re.fullmatch(pythons, text) is not None
        assert accepts(ours, text) == fits, text
        assert accepts(quoted, json.dumps(text, ensure_ascii=False)[1:-1]) == fits, text


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("start: /a(?=b)/", "line 1, column 8: the regular expression 'a(?=b)' has look-around"),
        ('start: "a"\n%import .file.X', "line 2, column 9: an import from a file"),
        ("%import python.NAME\nstart: NAME", "line 1, column 9: an import from another grammar"),
        ('start: _list{"a"}\n_list{x}: x', "line 1, column 13: a template"),
        ("start: %json {}", "line 1, column 8: %json"),
        ("start: A & B\nA: /a/\nB: /b/", "line 1, column 10: &"),
        ('%declare X\nstart: "a"', "line 1, column 1: %declare"),
        ("start: /\\p{L}+/", "bad escape"),
        ('start: "a"~3000', "repetitions"),
    ],
)
def test_unenforceable_source_raises_its_own_error(source: str, what: str) -> None:
    with pytest.raises(NotEnforceable, match=re.escape(what)):
        parse_lark(source)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("", "there is no rule 'start'"),
        ('root: "a"', "there is no rule 'start'"),
        ("start: missing", "line 1, column 8: 'missing' is not defined at 'missing'"),
        ('start: "a', "line 1, column 8: unexpected character"),
        ('start "a"', "line 1, column 7: expected :"),
        ('start: ("a"', "expected )"),
        ('start: "a"\nstart: "b"', "line 2, column 8: 'start' is defined twice"),
        ("start: /(/", "line 1, column 8: the regular expression '('"),
        ('start: "b".."a"', "a range goes from one character to a later one"),
        ("%import common.NONE\nstart: NONE", "common has no terminal 'NONE'"),
        ("start: " + "(" * 500 + '"a"' + ")" * 500, "nested too deeply"),
        ("start: /" + "(" * 5000 + "a" + ")" * 5000 + "/", "nested too deeply"),
        ('start: "\\q"', "unknown escape"),
        ('start: "a"~3..1', "limits are the wrong way round"),
        ("start: ->", "expected an alias"),
        ("[", "expected a rule or a terminal"),
    ],
)
def test_mistakes_are_placed(source: str, what: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(what)) as caught:
        parse_lark(source)
    assert not isinstance(caught.value, NotEnforceable)


def test_odd_sources_never_fail_otherwise() -> None:
    choose = random.Random(7)
    words = [*'()[]|?*+~{}:.,/"%!&\\ \n\t#', "start", "A", "..", "->", "%import", "common", '"a"', "/b/", "3", "é", "i"]
    n_right = 0
    for _ in range(3000):
        source = "start: " + "".join(choose.choices(words, k=choose.randrange(14)))
        try:
            parse_lark(source)
            n_right += 1
        except GrammarError:
            pass
    assert n_right > 50

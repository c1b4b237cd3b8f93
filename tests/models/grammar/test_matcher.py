"""Grammar matcher: masks against an independent recogniser, errors, and a generation's state."""

from __future__ import annotations

import functools
import itertools
import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.models.grammar import GrammarError, json_rule, quoted
from logitless.models.grammar.ast import LAST, Alt, Chars, Node, Ref, Repeat, Seq, chars
from logitless.models.grammar.matcher import Matcher
from tests.helpers.grammars import EOS, TOKENS, accepts, compile_grammar


def allowed(matcher: Matcher) -> set[str]:
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    assert not bits[len(TOKENS) :].any()
    return {TOKENS[i] for i in np.flatnonzero(bits[: len(TOKENS)])}


# --- what a grammar allows


def ends(node: Node, rules: dict[str, Node], text: str) -> dict[int, set[int]]:
    """End positions of matches of a node, by start; the least fixed point, found by iteration."""
    names = {name: {i: set[int]() for i in range(len(text) + 1)} for name in rules}

    def match(node: Node, at: int) -> set[int]:
        if isinstance(node, Chars):
            fits = at < len(text) and any(a <= ord(text[at]) <= b for a, b in node.ranges)
            return {at + 1} if fits else set()
        if isinstance(node, Ref):
            return names[node.name][at]
        if isinstance(node, Seq):
            return functools.reduce(lambda at, part: {e for s in at for e in match(part, s)}, node.parts, {at})
        if isinstance(node, Alt):
            return {end for part in node.parts for end in match(part, at)}
        assert isinstance(node, Repeat)
        reached, now, n = (set() if node.least else {at}), {at}, 0
        while now and n < (node.least + len(text) + 1 if node.most is None else node.most):
            now, n = {e for s in now for e in match(node.part, s)}, n + 1
            reached |= now if n >= node.least else set()
        return reached

    changed = True
    while changed:
        changed = False
        for name, at in itertools.product(rules, range(len(text) + 1)):
            result = match(rules[name], at)
            changed |= result != names[name][at]
            names[name][at] = result
    return {at: match(node, at) for at in range(len(text) + 1)}


def shown(node: Node) -> str:
    """A node as GBNF."""
    if isinstance(node, Chars):
        return f"[{''.join(f'{chr(a)}-{chr(b)}' for a, b in node.ranges)}]"
    if isinstance(node, Ref):
        return node.name
    if isinstance(node, Repeat):
        return f"({shown(node.part)}){{{node.least},{'' if node.most is None else node.most}}}"
    if isinstance(node, Seq):
        return " ".join(f"({shown(part)})" for part in node.parts)
    return " | ".join(shown(part) for part in node.parts)


LEAVES = st.one_of(
    st.sampled_from([chars([(97, 97)]), chars([(98, 98)]), chars([(97, 98)]), chars([(97, 99)])]),
    st.sampled_from([Ref("root"), Ref("p"), Ref("q")]),
    st.text("abc", min_size=1, max_size=3).map(lambda t: Seq(tuple(chars([(ord(c), ord(c))]) for c in t))),
)
NODES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: Seq(tuple(parts))),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: Alt(tuple(parts))),
        st.builds(Repeat, inner, st.just(0), st.sampled_from([1, 2, None])),
        st.builds(Repeat, inner, st.just(1), st.sampled_from([3, None])),
    ),
    max_leaves=6,
)
TEXTS = ["".join(t) for n in range(4) for t in itertools.product("abc", repeat=n)]


@settings(max_examples=60)
@given(NODES, NODES, NODES)
def test_a_grammar_allows_what_its_rules_say(root: Node, p: Node, q: Node) -> None:
    rules = {"root": root, "p": p, "q": q}
    expected = {text for text in TEXTS if len(text) in ends(Ref("root"), rules, text)[0]}
    try:
        grammar = compile_grammar("\n".join(f"{name} ::= {shown(node)}" for name, node in rules.items()))
    except GrammarError:  # it allows no text at all
        assert not expected
        return
    assert {text for text in TEXTS if accepts(grammar, text)} == expected


@pytest.mark.parametrize(
    ("source", "text", "ok"),
    [
        ('root ::= "a" # comment\n  | "b"', None, False),  # a rule ends with its line
        ('root ::= ("a" # comment\n | "b")', "b", True),
        ('root ::= |\n "a"\n\n', "", True),
        ('root ::= "\\x41\\u00e9\\U0001F600\\n\\"\\\\"', 'Aé😀\n"\\', True),
        ("root ::= [^a\\]]", "\n", True),
        ("root ::= [^a\\]]", "]", False),
        ("root ::= [a-]", "-", True),
        ("root ::= .", "\n", True),
        ("root ::= .", "é", True),
        ("root ::= .{2}", "é", False),
        ('root ::= "ab"{2,3}', "ababab", True),
        ('root ::= "ab"{2,3}', "ab", False),
        ('root ::= "ab"{0,}', "", True),
        ("root ::= a-b_2\na-b_2 ::= [z]+", "zz", True),
        ('root ::= "a"\nroot ::= "b"', "b", True),  # the last of the same name
        ('root ::= root "a" | "b"', "baa", True),
        ('root ::= "if" | [a-z]+ root?', "ifx", True),
        ('root ::= "(" root ")" | [a-z]* "b"', "(abab)", True),
    ],
)
def test_the_dialect_of_llama_cpp(source: str, text: str | None, ok: bool) -> None:
    if text is None:
        with pytest.raises(GrammarError, match="line 2, column 3: expected the name of a rule"):
            compile_grammar(source)
    else:
        assert accepts(compile_grammar(source), text) == ok


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("", "there is no rule 'root'"),
        ('root = "a"', "line 1, column 6: expected ::="),
        ('a ::= "x"\nroot ::= "b" foo', "line 2, column 14: rule 'foo' is not defined"),
        ("root ::= [a-", "line 1, column 10: a class without its end"),
        ('root ::= "a', "line 1, column 10: a literal without its end"),
        ('root ::= "\\q"', "line 1, column 11: unknown escape"),
        ('root ::= "\\x4"', "column 11: expected 2 hexadecimal digits"),
        ('root ::= "\\uD800"', "no Unicode character"),
        ('root ::= "a"{3,2}', "the wrong way round"),
        ('root ::= "a"{2001}', "more than 2000 repetitions"),
        ('root ::= "a"{99999999999999999999}', "more than 2000 repetitions"),
        ("root ::= *", "expected an element before the repetition"),
        ('root ::= ("a"', "expected )"),
        ('root ::= "a" )', "expected a new line or an element"),
        ("root ::= <nope>", "not one token of the vocabulary"),
        ("root ::= <[99999]>", "token 99999 is outside the vocabulary"),
        ("root ::= " + "(" * 5000, "nested too deeply"),
        ("root ::= root", "allows no text"),
        ("root ::= []", "allows no text"),
    ],
)
def test_a_bad_grammar_says_where(source: str, problem: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compile_grammar(source)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "source", "problem"),
    [
        ("json_schema", "{", "the schema is not JSON"),
        ("json_schema", "[1]", "must be an object or a boolean"),
        ("json_schema", "[" * 100_000, "nested too deeply"),
        ("json_schema", "false", "in the schema at /: "),
        ("json_schema", '{"type": "foo"}', "in the schema at /: Invalid type: foo"),
        ("json_schema", '{"$ref": "#/$defs/x"}', "in the schema at /: Pointer"),
        ("json_schema", '{"properties": {"a": {"items": {"minimum": "q"}}}}', "in the schema at /properties/a/items: "),
        (
            "strict_json_schema",
            '{"anyOf": [{"type": "null"}, {"type": "string", "pattern": "("}]}',
            "at /anyOf/1: regex '(', column 1: unclosed group",
        ),
        ("strict_json_schema", '{"type": "object", "properties": {"a": {"not": {}}}}', "at /properties/a: Unimpl"),
        ("regex", "ab[0-9", "column 3: unclosed character class"),
        ("regex", "a(?=b)", "look-around"),
        ("regex", "(" * 1000, "regex"),
    ],
)
def test_a_bad_schema_or_regex_says_where(kind: str, source: str, problem: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compile_grammar(source, kind)
    assert problem in str(caught.value)


def test_unenforceable_keyword_is_ignored_unless_strict() -> None:
    assert accepts(compile_grammar('{"not": {"type": "string"}, "type": "integer"}', "json_schema"), "12")


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("gbnf", "root ::= " + " ".join(['("a"{0,2000}'] * 60) + ")" * 60),
        ("gbnf", "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)) + '\nr60 ::= "a"\nroot ::= r0'),
        ("gbnf", "root ::= " + '"a" ' * 200_000),
        ("gbnf", 'root ::= a a a a a\na ::= a a | a a a | "a" | ""'),
        ("regex", "(((((a{1000}){1000}){1000}){1000}){1000}){1000}"),
        ("regex", "(a|b)*a(a|b){200}"),
        ("json_schema", json.dumps({"type": "string", "pattern": "^(.*a.*){50}$"})),
        ("json_schema", json.dumps({"type": "array", "minItems": 10**9})),
        ("json_schema", json.dumps({"anyOf": [{"enum": [f"{i}"]} for i in range(8_000)]})),
    ],
    ids=range(9),
)
def test_work_is_bounded(kind: str, source: str) -> None:
    """Grammars that would take for ever end in an error, or work; each in a few seconds on any machine."""
    started = time.process_time()
    try:
        matcher = compile_grammar(source, kind).matcher()
        for _ in range(20):
            matcher.mask()
            if not matcher.accept_bytes(b"a"):
                break
    except GrammarError:
        pass
    assert time.process_time() - started < 10


# --- a generation's state


def test_masks_allow_the_tokens_that_a_text_may_begin_with() -> None:
    matcher = compile_grammar('root ::= "ab" [xy] | "c"').matcher()
    assert allowed(matcher) == {"a", "<0x61>", "ab", "c", "<0x63>"}
    assert matcher.accept(TOKENS.index("ab"))
    assert allowed(matcher) == {"x", "y", "<0x78>", "<0x79>"}
    assert not matcher.accept(TOKENS.index("c"))
    assert not matcher.accept(EOS)
    assert matcher.accept(TOKENS.index("x"))
    assert allowed(matcher) == {"</s>"}  # the end of the grammar allows nothing else
    assert matcher.accept(EOS)
    assert allowed(matcher) == {"</s>"}


def test_the_end_is_allowed_wherever_the_grammar_can_end() -> None:
    matcher = compile_grammar('root ::= "a"*').matcher()
    assert allowed(matcher) == {"a", "<0x61>", "</s>"}


def test_any_tokens_that_spell_the_text_are_allowed() -> None:
    assert allowed(compile_grammar('{"const": true}', "json_schema").matcher()) == {"<0x74>", "true"}


def test_characters_may_be_put_together_from_bytes() -> None:
    matcher = compile_grammar("root ::= [é]").matcher()
    assert allowed(matcher) == {"é", "<0xC3>"}
    assert matcher.accept(TOKENS.index("<0xC3>"))
    assert allowed(matcher) == {"<0xA9>"}


def test_special_tokens_count_as_their_text() -> None:
    """As in llama.cpp, so that a grammar may ask for <tool>; tokens that end a generation do not."""
    assert allowed(compile_grammar('root ::= "<tool>" | "</s>"').matcher()) == {"<tool>", "<0x3C>"}
    assert allowed(compile_grammar("root ::= <tool> | <[5]>").matcher()) == {"<tool>", "<0x01>"}


def test_rollback_takes_tokens_back() -> None:
    matcher = compile_grammar('root ::= "abc" "x"*').matcher()
    states = [allowed(matcher)]
    steps = [
        lambda: matcher.accept(TOKENS.index("ab")),
        lambda: matcher.accept_bytes(b"cx"),
        lambda: matcher.accept(EOS),
    ]
    for step in steps:
        assert step()
        states.append(allowed(matcher))
    other = matcher.copy()
    for n in (1, 2, 3):
        matcher.rollback(1)
        assert allowed(matcher) == states[3 - n]
    other.rollback(2)
    assert allowed(other) == states[1]
    with pytest.raises(ValueError, match="2 tokens to take back of 1"):
        other.rollback(2)


def test_tool_calls_are_lark_of_literals_and_schemas() -> None:
    rule = json_rule({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})
    grammar = compile_grammar(f"start: {quoted('<tool>')} {rule} {quoted(chr(10))}", "lark")
    assert accepts(grammar, '<tool>{"x": 1}\n')
    assert not accepts(grammar, '<tool>{"y": 1}\n')
    assert not accepts(grammar, '<tool>{"x":   1}\n')  # one blank at most, as llama.cpp's


def test_every_character_is_a_character() -> None:
    grammar = compile_grammar("root ::= .*")
    assert accepts(grammar, "".join(map(chr, (0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFFF, 0x10000, LAST))))
    assert not grammar.matcher().accept_bytes(b"\xff")
    assert not grammar.matcher().accept_bytes(b"\xa9")

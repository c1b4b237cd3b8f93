"""Structured output: grammars compiled for a vocabulary, and the token bitmasks that they give.

    grammar = Grammar.compile("json_schema", '{"type": "object"}', tokenizer)   # GrammarError says where it is wrong
    matcher = grammar.matcher()                                                 # one generation's state
    bits = matcher.mask()                                                       # (⌈V/32⌉,) u32, a bit a token
    matcher.accept(id); matcher.rollback(1)

A tool call is a "lark" grammar of literals and schemas:

    "start: " + quoted("<tool_call>\\n") + " " + json_rule(schema) + " " + quoted("\\n</tool_call>")
"""

from logitless.models.grammar.errors import GrammarError
from logitless.models.grammar.matcher import Grammar, Matcher
from logitless.models.grammar.sources import KINDS, in_regex, json_rule, quoted, regex_rule

__all__ = ["KINDS", "Grammar", "GrammarError", "Matcher", "in_regex", "json_rule", "quoted", "regex_rule"]

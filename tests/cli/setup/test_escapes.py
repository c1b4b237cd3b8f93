"""Escape sequences of the command line: llama.cpp's rules, in every text that has them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitless.cli.flags.flags import UsageError, parse
from logitless.cli.flags.options import SERVE
from logitless.cli.setup.escapes import texts, unescaped

FLAGS = [flag for group in SERVE for flag in group.flags]


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        (r"\n", "\n"),
        (r"a\tb\r\n", "a\tb\r\n"),
        (r"\'\"", "'\""),
        (r"\\n", r"\n"),
        (r"\\\n", "\\\n"),
        (r"\x41\x0a", "A\n"),
        (r"\xc3\xa9", "é"),
        (r"\x4", r"\x4"),
        (r"\xg0", r"\xg0"),
        (r"\q\d", r"\q\d"),
        ("ends with \\", "ends with \\"),
        ("Köln\n", "Köln\n"),
    ],
)
def test_sequences_are_those_of_llama_cpp(text: str, meaning: str) -> None:
    assert unescaped("--reverse-prompt", text) == meaning


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(UsageError, match=re.escape(r"--reverse-prompt: '\\xff': byte 0 of it is not UTF-8")):
        unescaped("--reverse-prompt", r"\xff")


@given(st.text(max_size=20))
def test_a_backslash_doubled_is_a_backslash(text: str) -> None:
    assert unescaped("-r", text.replace("\\", "\\\\")) == text


def test_both_flags_have_them_unless_no_escape() -> None:
    words = ["-r", r"\n", "-r", "x", "--dry-sequence-breaker", r"\t"]
    for more, expected in (([], (["\n", "x"], ["\t"])), (["--no-escape"], ([r"\n", "x"], [r"\t"]))):
        options = parse(FLAGS, [*words, *more], {})
        assert (texts(options, "reverse_prompt"), texts(options, "dry_sequence_breaker")) == expected

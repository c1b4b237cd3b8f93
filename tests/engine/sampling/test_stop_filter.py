"""Stop filter: stop strings, incomplete characters, indentation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.engine.sampling.stop_filter import StopFilter
from logitless.models.tokenizer import StreamDecoder
from tests.helpers.scheduler_fakes import PIECES, FakeVocab


class Texts:
    """Every id stands for one of the given texts."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def push(self, id: int) -> str:
        return self.texts[id]

    def flush(self) -> str:
        return ""


def decode(
    texts: list[str], stop: tuple[str, ...] = (), n_indent: int = 0, **settings: Any
) -> tuple[list[str], str | None]:
    stop_filter = StopFilter(Texts(texts), stop, n_indent, **settings)
    shown: list[str] = []
    for i in range(len(texts)):
        text, word = stop_filter.push(i)
        shown.append(text)
        if stop_filter.ended:
            assert stop_filter.finish() == ""
            return shown, word
    return [*shown, stop_filter.finish()], None


@pytest.mark.parametrize(
    ("texts", "stop", "shown", "word"),
    [
        (["hello", " world"], (), ["hello", " world", ""], None),
        (["hel", "lo ST", "OP rest"], ("STOP",), ["hel", "lo ", ""], "STOP"),
        (["a S", "T", "x"], ("STOP",), ["a ", "", "STx", ""], None),
        (["a S", "T"], ("STOP",), ["a ", "", "ST"], None),
        (["xabcd"], ("cd", "b"), ["xa"], "b"),  # the one that begins first
        (["xabc"], ("b", "abc"), ["x"], "abc"),  # also where it overlaps one that is listed before it
        (["xab", "c"], ("b", "abc"), ["xa"], "b"),  # it was not complete yet
        (["xab"], ("ab", "abc"), ["x"], "ab"),  # as soon as one is complete
        (["xabc"], ("ab", "abc"), ["x"], "ab"),  # at the same place the first listed
        (["xabc"], ("abc", "ab"), ["x"], "abc"),
        (["aa", "ab"], ("aab",), ["", "a"], "aab"),  # a beginning inside a beginning
        (["ééS", "é"], ("Sé",), ["éé", ""], "Sé"),
    ],
)
def test_stop_texts(texts: list[str], stop: tuple[str, ...], shown: list[str], word: str | None) -> None:
    assert decode(texts, stop) == (shown, word)


@pytest.mark.parametrize(
    ("texts", "stop", "shown", "word"),
    [
        (["hel", "lo ST", "OP rest"], ("STOP",), ["hel", "lo ", "STOP"], "STOP"),
        (["xab"], ("ab", "abc"), ["xab"], "ab"),
        (["a S", "T"], ("STOP",), ["a ", "", "ST"], None),
    ],
)
def test_stop_texts_that_are_kept(texts: list[str], stop: tuple[str, ...], shown: list[str], word: str | None) -> None:
    assert decode(texts, stop, keep_stop=True) == (shown, word)


@pytest.mark.parametrize(
    ("texts", "shown", "word"),
    [
        (["xab", "y", "ab"], "xaby", "ab"),  # the first two tokens cannot end it
        (["x", "ab", "ab"], "xab", "ab"),
        (["x", "ya", "b"], "xy", "ab"),  # it ends in the third
        (["xab", "yab"], "xabyab", None),
        (["xa", "bc", "z", "bcd"], "xabcz", "bcd"),
    ],
)
def test_stop_texts_after_the_first_tokens(texts: list[str], shown: str, word: str | None) -> None:
    result, stop = decode(texts, ("ab", "bcd"), min_tokens=2)
    assert ("".join(result), stop) == (shown, word)


def test_stop_text_of_the_first_tokens_is_not_held_back() -> None:
    assert decode(["xab", "y", "z"], ("ab",), min_tokens=2)[0][0] == "xab"


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (["def f():\n", "  return", " 1\n", " x"], ["def f():\n", "  return", " 1\n", " "]),
        (["no indentation\n", "\tx", "\t y"], ["no indentation\n", "\t"]),
        (["one line", " only"], ["one line", " only", ""]),
        (["a\n", "\n"], ["a\n", ""]),
        (["a\n  b\n  c"], ["a\n  b\n  c", ""]),
    ],
)
def test_indentation(texts: list[str], shown: list[str]) -> None:
    assert decode(texts, n_indent=2)[0] == shown


@given(st.lists(st.integers(1, len(PIECES) - 1), max_size=30), st.lists(st.text("abc\né ", min_size=1, max_size=4)))
@settings(max_examples=150)
def test_nothing_is_lost_or_shown_twice(ids: list[int], stop: list[str]) -> None:
    stop_filter = StopFilter(StreamDecoder(FakeVocab()), tuple(stop))  # type: ignore[arg-type]
    shown, result = "", None
    for n, id in enumerate(ids, 1):
        text, result = stop_filter.push(id)
        shown += text
        assert not any(word in shown for word in stop)
        if result is not None:
            whole = b"".join(PIECES[id] for id in ids[:n]).decode(errors="replace")
            assert whole.startswith(shown + result)
            return
    assert shown + stop_filter.finish() == b"".join(PIECES[id] for id in ids).decode(errors="replace")

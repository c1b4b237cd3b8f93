"""Reasoning budget: start, end and forced end of reasoning, by its tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.engine.sampling.reasoning_budget import ReasoningBudget, ReasoningLimit

QUIET = settings(max_examples=150)
OPEN, CLOSE = b"<think>", b"</think>"


def run(text: str, budget: int = -1, begun: bool = False, size: int = 3) -> tuple[str, int, bool]:
    """State, tokens of reasoning, and whether it had to be ended, after a text in tokens of `size` bytes."""
    raw = text.encode()
    pieces = [raw[i : i + size] for i in range(0, len(raw), size)]
    budget = ReasoningBudget(ReasoningLimit(OPEN, CLOSE, (7, 8), budget, begun), lambda id: pieces[id])
    ended = False
    for id in range(len(pieces)):
        budget.push(id)
        ended = ended or budget.due == (7, 8)
    return budget.state, budget.n_tokens, ended


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("before", 0, False)),
        ("\n <thi", ("before", 0, False)),
        ("Hello <think>", ("after", 0, False)),
        ("<thing>", ("after", 0, False)),
        ("<think>ab", ("inside", 0, False)),
        ("<think>abcdefgh", ("inside", 2, False)),
        ("<think>abcdef</think>abcdef", ("after", 4, False)),
    ],
)
def test_where_it_begins_and_ends(text: str, expected: tuple[str, int, bool]) -> None:
    assert run(text) == expected


def test_a_budget() -> None:
    for budget in range(1, 9):
        state, n, ended = run("<think>" + "x" * 30, budget, size=1)
        assert (state, n, ended) == ("after", budget, True)
        assert run("x" * 30, budget, begun=True, size=1) == ("after", budget, True)
        assert run("x" * 30, budget, size=1) == ("after", 0, False)
    assert run("<think>ab</think>" + "x" * 30, 20, size=1)[2] is False


@QUIET
@given(st.text("<>/think x", max_size=30), st.integers(1, 7))
def test_tokens_of_any_size_end_in_the_same_state(text: str, size: int) -> None:
    assert run(text, begun=True, size=size)[0] == ("after" if "</think>" in text else "inside")
    begins, rest = text.lstrip(), text.partition("<think>")[2]
    expected = "after" if "</think>" in rest else "inside"
    if not begins.startswith("<think>"):
        expected = "before" if "<think>".startswith(begins) else "after"
    assert run(text, size=size)[0] == expected


def test_a_call_ends_it() -> None:
    pieces = [b"ab", b"<tool_", b"call>", b"x", b"x"]
    limit = ReasoningLimit(OPEN, CLOSE, (7,), budget=4, begun=True, calls=(b"<tool_call>",))
    budget = ReasoningBudget(limit, lambda id: pieces[id])
    for id in range(len(pieces)):
        budget.push(id)
    assert (budget.state, budget.n_tokens, budget.due) == ("after", 3, ())


def test_ending_it_by_hand() -> None:
    budget = ReasoningBudget(ReasoningLimit(OPEN, CLOSE, (7,)), lambda id: [b"<think>", b"a", b"</think>"][id])
    assert not budget.end()
    budget.push(0)
    assert budget.end()
    assert (budget.take(), budget.take()) == ((7,), ())
    assert not budget.end()

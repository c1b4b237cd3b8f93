"""Answer spans of a long conversation: places of its answers in the text, by few renderings.

An exact search renders the conversation up to each answer, which is quadratic. Here the answers are
marked, and the template's text around an answer is read from a few of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

Message = dict[str, Any]
Span = tuple[int, int]

N_TRIED = 8  # answers that are compared with the conversation up to them
_BEGIN, _END = "\ue0f0", "\ue0f1"  # of private use
_MARK = re.compile(f"[{_BEGIN}{_END}]")


def spans_of_answers(
    messages: Sequence[Message], learned: Sequence[int], whole: str, render: Callable[[list[Message], bool], str]
) -> list[Span] | None:
    """The span of each learned answer in the whole text: from the end of its generation prompt to
    the end of its turn.

    `render(messages, with a generation prompt)` renders the first of them, or marked ones; errors
    are its own. None: an answer is not found by its text, or the template does not write all
    answers alike (it may rewrite earlier turns)."""
    texts = [messages[i].get("content") for i in learned]
    plain = all(isinstance(text, str) and text.strip() for text in texts)
    if not plain or any(messages[i].get("tool_calls") for i in learned) or _MARK.search(whole):
        return None
    for outside in (True, False):  # templates may trim
        inner = _inner(messages, learned, whole, render, outside)
        if inner is not None:
            return _outer(messages, learned, whole, render, inner)
    return None


def _inner(
    messages: Sequence[Message],
    learned: Sequence[int],
    whole: str,
    render: Callable[[list[Message], bool], str],
    outside: bool,
) -> list[Span] | None:
    """The spans of the answers' texts, with blanks around them or without."""
    marked = list(messages[: learned[-1] + 1])
    for i in learned:
        text = marked[i]["content"]
        core = text if outside else text.strip()
        begin = text.index(core)
        marked[i] = marked[i] | {"content": f"{text[:begin]}{_BEGIN}{core}{_END}{text[begin + len(core) :]}"}
    rendered = render(marked, False)
    marks = [(match[0], match.start() - n) for n, match in enumerate(_MARK.finditer(rendered))]
    if [mark for mark, _ in marks] != [_BEGIN, _END] * len(learned) or _MARK.sub("", rendered) != whole:
        return None
    places = [place for _, place in marks]
    return list(zip(places[::2], places[1::2], strict=True))


def _outer(
    messages: Sequence[Message],
    learned: Sequence[int],
    whole: str,
    render: Callable[[list[Message], bool], str],
    inner: Sequence[Span],
) -> list[Span] | None:
    """The spans with the template's text around them, which must be the same for all."""
    n = len(learned)
    tried = sorted({0, 1, n - 2, n - 1, *(k * (n - 1) // (N_TRIED - 1) for k in range(N_TRIED))} & set(range(n)))
    heads, tails = set(), set()
    for k in tried:
        i, (begin, end) = learned[k], inner[k]
        before = render(list(messages[:i]), True) if i else ""
        after = render(list(messages[: i + 1]), False)
        if not (whole.startswith(after) and after.startswith(before) and len(before) <= begin and end <= len(after)):
            return None
        if i:
            heads.add(whole[len(before) : begin])
        tails.add(whole[end : len(after)])
    if len(heads) > 1 or len(tails) != 1:
        return None
    head, tail = "".join(heads), tails.pop()
    spans, at = [], 0
    for i, (begin, end) in zip(learned, inner, strict=True):
        span = (begin - len(head) if i else 0), end + len(tail)
        if span[0] < at or (i and whole[span[0] : begin] != head) or whole[end : span[1]] != tail:
            return None
        spans.append(span)
        at = span[1]
    return spans

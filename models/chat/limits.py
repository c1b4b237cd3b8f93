"""How long a text in a chat template may become: asked before it is made, because one expression has no clock.

A template comes with a model's file, so it may be anybody's. Loops look at the clock; what is here are the operations
that make more than they are given: concatenation, `%`, methods of strings, and Jinja's filters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

MAX_CHARS = 64 * 1024 * 1024
_MAX_WIDTH = 100_000  # of a field, in characters
_MAX_EXPONENT = 1000
_WIDTH = re.compile(r"\*|\d{6}")
_WIDENING = frozenset(("center", "ljust", "rjust", "zfill", "expandtabs"))
_DROPPED = ("center", "filesizeformat", "pprint", "urlize", "wordwrap", "xmlattr")  # no chat template has them


class TooLarge(Exception):
    """What the template does, as the end of a sentence."""


def fits(n: int) -> None:
    """TooLarge: a text of n characters."""
    if n > MAX_CHARS:
        raise TooLarge(f"makes a value longer than {MAX_CHARS}")


def operation(operator: str, left: Any, right: Any) -> None:
    """Before a binary operator: + * ** %."""
    if operator == "+":
        fits(_length(left) + _length(right))
    elif operator == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(value, str | list | tuple):
                fits(_length(value) * times)
    elif operator == "%" and isinstance(left, str):
        _format(left)
    elif operator == "**" and (abs(right) > _MAX_EXPONENT or abs(left) > 2**64):
        raise TooLarge("computes a number that is too large")


def concatenated(*values: Any) -> str:
    """The operator ~."""
    texts = [str(value) for value in values]
    fits(sum(map(len, texts)))
    return "".join(texts)


def method(text: str, name: str, args: tuple[Any, ...]) -> None:
    """Before a method of a string."""
    if name in _WIDENING:
        if any(isinstance(arg, int) and arg > _MAX_WIDTH for arg in args):
            raise TooLarge(f"makes a field wider than {_MAX_WIDTH}")
        fits(text.count("\t") * _MAX_WIDTH if name == "expandtabs" else 0)
    elif name == "replace" and len(args) > 1 and all(isinstance(arg, str) for arg in args[:2]):
        fits(len(text) + text.count(args[0]) * len(args[1]))
    elif name == "join" and args and isinstance(args[0], list | tuple):
        _join(args[0], text)
    elif name == "format":
        _format(text)


def filters(known: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Jinja's filters, those that can write more than they read with a look before it."""
    kept = {name: known[name] for name in known if name not in _DROPPED}
    return kept | {
        "format": _before(kept["format"], lambda text, *_, **__: _format(str(text))),
        "indent": _before(kept["indent"], lambda text, width=4, *_, **__: _indent(str(text), width)),
        "join": _before(kept["join"], lambda _, values, d="", *__, **___: _join(values, d)),
        "replace": _before(kept["replace"], lambda _, text, old, new, *__: method(str(text), "replace", (old, new))),
    }


def _before(function: Callable[..., Any], look: Callable[..., None]) -> Callable[..., Any]:
    @wraps(function)  # keeps Jinja's mark that the first argument is its context
    def bounded(*args: Any, **kwargs: Any) -> Any:
        args = tuple(list(arg) if hasattr(arg, "__next__") else arg for arg in args)  # a generator is read once
        look(*args, **kwargs)
        return function(*args, **kwargs)

    return bounded


def _format(text: str) -> None:
    if _WIDTH.search(text):
        raise TooLarge(f"makes a field wider than {_MAX_WIDTH - 1}, or of a width that is computed")


def _indent(text: str, width: Any) -> None:
    size = width if isinstance(width, int) else len(str(width))
    fits(len(text) + (text.count("\n") + 1) * size)


def _join(values: Any, between: Any) -> None:
    if isinstance(values, Iterable):
        lengths = [_length(value) + len(str(between)) for value in values]
        fits(sum(lengths))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0

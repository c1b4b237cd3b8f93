"""Reads a JSON object field by field. Null means the default; every refusal is one line that names the field."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from logitless.engine.errors import InvalidRequest, NotSupported
from logitless.engine.sampling.params import FLOAT_MAX

INT_MAX = 2**31 - 1
MAX_DEPTH = 256  # of JSON: what is told again, rendered or compiled costs some calls a level, of Python's 1000


def json_object(raw: bytes) -> dict[str, Any]:
    """A request's body that must be an object, or 400."""
    body = json_value(raw)
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {article(body)}")
    return body


def json_value(raw: bytes) -> object:
    """A request's body, or 400. Stricter than Python: UTF-8 only, no NaN or Infinity, no lone surrogates."""
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
        if b"\\u" in raw:
            json.dumps(body, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8 (byte {error.start})") from None
    except UnicodeEncodeError:
        raise InvalidRequest("the body has a surrogate escape without its partner") from None
    except RecursionError:
        raise _nested() from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _is_deep(body):
        raise _nested()
    parsed: object = body
    return parsed


def _is_deep(value: object) -> bool:
    """Whether arrays and objects lie in each other more than MAX_DEPTH times."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [v for v in level if isinstance(v, list | dict)]
        if not level:
            return False
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return True


def _nested() -> InvalidRequest:
    return InvalidRequest("the body is nested too deeply")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def article(value: object) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def refuse(name: str, message: str) -> NoReturn:
    """400 about one field."""
    raise InvalidRequest(f"field '{name}': {message}")


def unsupported(name: str, message: str = "is not supported yet") -> NoReturn:
    """501 about one field."""
    raise NotSupported(f"field '{name}': {message}")


def as_number(name: str, value: object) -> float | int:
    """A finite JSON number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(name, f"expected a number, got {article(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        refuse(name, "the number is too large")
    return value


def as_integer(name: str, value: object) -> int:
    """A JSON number without a fraction (2.0 counts)."""
    number = as_number(name, value)
    if isinstance(number, float) and not number.is_integer():
        refuse(name, f"expected an integer, got {number!r}")
    return int(number)


def as_text(name: str, value: object) -> str:
    """A JSON string."""
    if not isinstance(value, str):
        refuse(name, f"expected a string, got {article(value)}")
    return value


def limited(name: str, value: float, low: float, high: float, hard: bool) -> float:
    """`value` inside the limits: a hard limit refuses, a soft one clamps."""
    if low <= value <= high:
        return value
    if hard:
        refuse(name, f"must be between {low} and {high}, got {str(value)[:32]}")
    return min(max(value, low), high)


class Fields:
    """The fields of one JSON object; a later name is an alias that counts when the earlier are absent or null.
    `within`: the object's own name with a dot, where it is a field itself."""

    def __init__(self, body: Mapping[str, Any], within: str = "") -> None:
        self.body = body
        self._within = within

    def inside(self, name: str) -> Fields:
        """Those of the object in this field."""
        return Fields(self.object(name), f"{self._within}{name}.")

    def find(self, *names: str) -> tuple[str, Any]:
        """(name, value) of the first that is given, else (first name, None)."""
        for name in names:
            value = self.body.get(name)
            if value is not None:
                return name, value
        return names[0], None

    def _named(self, *names: str) -> tuple[str, Any]:
        name, value = self.find(*names)
        return self._within + name, value

    def number(
        self, *names: str, default: float, low: float = -FLOAT_MAX, high: float = FLOAT_MAX, hard: bool = False
    ) -> float:
        """A float within limits."""
        name, value = self._named(*names)
        return default if value is None else float(limited(name, as_number(name, value), low, high, hard))

    def integer(
        self, *names: str, default: int, low: int = -INT_MAX - 1, high: int = INT_MAX, hard: bool = False
    ) -> int:
        """An integer within limits."""
        name, value = self._named(*names)
        return default if value is None else int(limited(name, as_integer(name, value), low, high, hard))

    def boolean(self, name: str, default: bool = False) -> bool:
        """true or false, nothing that merely looks like it."""
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            refuse(self._within + name, f"expected a boolean, got {article(value)}")
        return value

    def text(self, name: str, default: str = "") -> str:
        """A string."""
        value = self.body.get(name)
        return default if value is None else as_text(self._within + name, value)

    def array(self, name: str) -> Sequence[Any] | None:
        """A list, or None when it is not given."""
        value = self.body.get(name)
        if value is not None and not isinstance(value, list):
            refuse(self._within + name, f"expected an array, got {article(value)}")
        return value

    def object(self, name: str) -> Mapping[str, Any]:
        """An object; empty when it is not given."""
        value = self.body.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            refuse(self._within + name, f"expected an object, got {article(value)}")
        return value


MOST = 64  # different ones


_told: set[str] = set()


def warn_once(log: logging.Logger, line: str) -> None:
    if line not in _told and len(_told) < MOST:
        _told.add(line)
        log.warning("%s", line)


def forget() -> None:
    """Tell all again."""
    _told.clear()

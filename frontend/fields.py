"""Body reader: parsed JSON → typed structs. Null is the default; a refusal names the field in one line."""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Final, NoReturn, TypeVar

from msgspec import Struct, ValidationError, convert
from msgspec.structs import force_setattr

from logitless.engine.errors import InvalidRequest
from logitless.engine.sampling.params import Param, params_of

S = TypeVar("S", bound=Struct)
MAX_FORM_TEXT: Final = 1 << 16  # bytes of a form's field that is no file


def article(value: object) -> str:
    """The type of a JSON value, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def bad_request(name: str, message: str) -> NoReturn:
    """400 about one field."""
    raise InvalidRequest(f"field '{name}': {message}")


def as_number(name: str, value: object) -> float | int:
    """A finite JSON number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        bad_request(name, f"expected a number, got {article(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        bad_request(name, "the number is too large")
    return value


def as_integer(name: str, value: object) -> int:
    """A JSON number without a fraction (2.0 counts)."""
    number = as_number(name, value)
    if isinstance(number, float) and not number.is_integer():
        bad_request(name, f"expected an integer, got {number!r}")
    return int(number)


def as_text(name: str, value: object) -> str:
    """A JSON string."""
    if not isinstance(value, str):
        bad_request(name, f"expected a string, got {article(value)}")
    return value


def as_object(name: str, value: object) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        bad_request(name, f"expected an object, got {article(value)}")
    return value


def as_array(name: str, value: object) -> list[Any]:
    """A JSON array."""
    if not isinstance(value, list):
        bad_request(name, f"expected an array, got {article(value)}")
    return value


def limited(name: str, value: float, low: float, high: float, hard: bool) -> float:
    """`value` inside the limits: a hard limit refuses, a soft one clamps."""
    if low <= value <= high:
        return value
    if hard:
        bad_request(name, f"must be between {low} and {high}, got {str(value)[:32]}")
    return min(max(value, low), high)


def read(
    kind: type[S], body: Mapping[str, Any], *, defaults: Mapping[str, Any] = {}, within: str = "", **highs: float
) -> S:
    """The body as its struct. InvalidRequest names the field that is wrong.

    Null means the default, which `defaults` may change. A field counts where it or the first of its
    aliases is given. `highs` are limits that the server's settings decide; `within` is what stands
    before the names of an object's fields."""
    declared, names = params_of(kind), dict[str, str]()
    fields = {name: value for name, value in defaults.items() if value is not None}
    ranks, known = dict[str, int](), _aliases_of(kind)
    for alias in known if len(body) > len(known) else body:
        if alias in known and (value := body.get(alias)) is not None:
            name, rank, is_any = known[alias]
            if rank < ranks.get(name, len(known)):
                fields[name], names[name], ranks[name] = value if is_any else _whole(value), within + alias, rank
    try:
        result = _converted(fields, kind)
    except ValidationError as error:
        raise _named(str(error), names, within) from None
    for name, place in names.items():
        param, value = declared[name][1], getattr(result, name)
        if type(value) in (int, float):
            value = _limited(place, value, param, min(param.high, highs.get(name, math.inf)))
            force_setattr(result, name, value)
        elif isinstance(value, list | tuple):
            if len(value) < param.least:
                bad_request(place, "must be a non-empty array")
            if param.most is not None and len(value) > param.most:
                problem = f"at most {param.most} are allowed, got {len(value)}" if param.most else "must be empty"
                bad_request(place, problem)
        elif param.choices and value not in param.choices:
            bad_request(place, f"must be one of {', '.join(param.choices)}")
    return result


@cache
def _aliases_of(kind: type[Struct]) -> Mapping[str, tuple[str, int, bool]]:
    """(field, place among the field's names, takes anything) by each name that a body may give."""
    return {
        alias: (name, rank, of is Any)
        for name, (of, param) in params_of(kind).items()
        for rank, alias in enumerate((name, *param.aliases))
    }


_first_use = threading.Lock()
_used: set[type[Struct]] = set()  # structs whose decoder is there


def _converted(value: Mapping[str, Any], kind: type[S]) -> S:
    """The struct of these values. msgspec makes a struct's decoder at its first use, and two threads
    that do so at once crash the process."""
    if kind not in _used:
        with _first_use:
            if kind not in _used:
                with suppress(ValidationError):
                    convert({}, kind)
                _used.add(kind)
    return convert(value, kind)


_KINDS = {
    "float": "a number", "int": "an integer", "str": "a string", "bool": "a boolean", "array": "an array",
    "object": "an object", "null": "null",
}  # fmt: skip
_MISTAKE = re.compile(r"(.*?)(?: - at `\$\.?(.*)`)?")
_EXPECTED = re.compile(r"Expected `(.*)`, got `(\w+)`")
_MISSING = re.compile(r"Object missing required field `(.*)`")


def _whole(value: object) -> object:
    """A number, or an array of numbers, in which 2.0 is an integer."""
    if type(value) is list and float in set(map(type, value)):
        return [_whole(item) for item in value]
    return int(value) if type(value) is float and value.is_integer() else value


def _named(mistake: str, names: Mapping[str, str], within: str) -> InvalidRequest:
    """400 for msgspec's message about a body: `field 'messages[2].role': expected a string, got null`."""
    match = _MISTAKE.fullmatch(mistake)
    assert match is not None
    message, path = match[1], match[2] or ""
    name = re.match(r"[^.\[]*", path)
    assert name is not None
    place, rest = names.get(name[0], within + name[0]), path[name.end() :]
    if (missing := _MISSING.fullmatch(message)) is not None:
        key = missing[1]
        return InvalidRequest(f"field '{place + rest + '.' + key if path else within + key}': is required")
    if (wrong := _EXPECTED.fullmatch(message)) is not None:
        kinds = [_KINDS[kind] for kind in wrong[1].split(" | ") if kind != "null"]
        got = "a number" if wrong[2] in ("float", "int") else _KINDS.get(wrong[2], wrong[2])
        message = f"expected {' or '.join(kinds)}, got {got}"
    elif message == "Number out of range":
        message = "the number is too large"
    if re.fullmatch(r"\[\d+\]", rest) and "an object" not in message.partition(",")[0]:  # an array of plain values
        return InvalidRequest(f"field '{place}': item {rest[1:-1]}: {message}")
    return InvalidRequest(f"field '{place}{rest}': {message}")


def _limited(name: str, value: float, param: Param, high: float) -> float:
    if isinstance(value, float) and not math.isfinite(value):
        bad_request(name, "the number is too large")
    return limited(name, value, param.low, high, param.hard)


MOST = 64  # different ones


_logged: set[str] = set()


def warn_once(log: logging.Logger, line: str) -> None:
    if line not in _logged and len(_logged) < MOST:
        _logged.add(line)
        log.warning("%s", line)


def forget() -> None:
    """Tell all again."""
    _logged.clear()

"""Option values: converters from text (of a flag, a variable, a keyword) to a checked value.

Each converter raises ValueError with the end of a sentence: "--flag: 'text' ..."."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


def whole(low: int, high: int = 2**31 - 1, *, or_minus_one: str = "") -> Callable[[str], int]:
    """A whole number in the closed range, or -1 where `or_minus_one` says what that means."""

    def convert(text: str) -> int:
        try:
            n = int(text)
        except ValueError:
            n = None
        if n is None or not (low <= n <= high or (n == -1 and or_minus_one)):
            extra = f", or -1 ({or_minus_one})" if or_minus_one else ""
            raise ValueError(f"is not a whole number from {low} to {high}{extra}")
        return n

    return convert


def number(low: float = -3.4e38, high: float = 3.4e38) -> Callable[[str], float]:
    """A finite decimal number in the closed range."""

    def convert(text: str) -> float:
        try:
            x = float(text)
        except ValueError:
            x = float("nan")
        if not low <= x <= high:
            if low > -1e38 and (high < 1e38 or x > high):
                raise ValueError(f"is not a number from {low:g} to {high:g}")
            raise ValueError(f"is not a number of at least {low:g}" if low > -1e38 else "is not a number")
        return x

    return convert


def numbers(text: str) -> list[float]:
    """Decimal numbers separated by commas."""
    try:
        return [number()(part.strip()) for part in text.split(",")]
    except ValueError:
        raise ValueError("is not a list of numbers separated by commas") from None


def cpu_mask(text: str) -> frozenset[int]:
    """The processors of a hexadecimal mask, of which bit 0 is the first."""
    if not re.fullmatch(r"(0[xX])?[0-9a-fA-F]{1,1024}", text, re.ASCII) or not int(text, 16):
        raise ValueError("is not a hexadecimal mask of processors, such as f0")
    mask = int(text, 16)
    return frozenset(i for i in range(mask.bit_length()) if mask >> i & 1)


def cpu_range(text: str) -> frozenset[int]:
    """The processors from LO to HI, both included; without one of them from the first, or to the last."""
    match = re.fullmatch(r"(\d{0,4})-(\d{0,4})", text, re.ASCII)
    low, high = (int(match[1] or 0), int(match[2] or 4095)) if match and text != "-" else (1, 0)
    if low > high:
        raise ValueError("is not a range of processors, such as 0-3")
    return frozenset(range(low, high + 1))


def zmq_endpoint(text: str) -> str:
    """An address of ZMQ: tcp://HOST:PORT, ipc://PATH or inproc://NAME."""
    if not re.fullmatch(r"tcp://\S+:(\d+|\*)|(ipc|inproc)://\S+", text):
        raise ValueError("is not tcp://HOST:PORT or ipc://PATH")
    return text


@dataclass(frozen=True)
class Choice:
    """One of the allowed words, in any case."""

    allowed: tuple[str, ...]

    def __call__(self, text: str) -> str:
        if text.lower() not in self.allowed:
            raise ValueError(f"is not one of {', '.join(self.allowed)}")
        return text.lower()


def choice(*allowed: str) -> Choice:
    """One of these words, in any case."""
    return Choice(allowed)


def on_or_off(text: str) -> bool:
    """on or off, or another word for them."""
    known = {"on": True, "1": True, "true": True, "enabled": True, "off": False, "0": False, "false": False}
    if (value := (known | {"disabled": False}).get(text.strip().lower())) is None:
        raise ValueError("is not on or off")
    return value


def several(*allowed: str) -> Callable[[str], list[str]]:
    """Converter of a comma list of these words."""

    def convert(text: str) -> list[str]:
        chosen = [word.strip() for word in text.split(",") if word.strip()]
        if other := [word for word in chosen if word not in allowed]:
            raise ValueError(f"{other[0]!r} is not one of {', '.join(allowed)}")
        return chosen

    return convert


def json_object(text: str) -> dict[str, Any]:
    """The members of a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    return value


def device_list(text: str) -> str:
    """Devices in order of preference, named as `logitless devices` does: `vulkan:0,cpu`.

    `rpc:HOST:PORT` is a device of another machine. `none`: the CPU alone, nothing is offloaded."""
    names = [name.strip().lower() for name in text.split(",")]
    names = ["cpu"] if names == ["none"] else names
    for name in names:
        kind, _, index = name.partition(":")
        numbered = kind in ("opencl", "vulkan") and (name == kind or index.isdecimal())
        if not (name == "cpu" or numbered or (kind == "rpc" and _is_address(index))):
            raise ValueError("is not a list of cpu, opencl:N, vulkan:N and rpc:HOST:PORT, or none")
    return ",".join(name if ":" in name or name == "cpu" else f"{name}:0" for name in names)


def devices_or_auto(text: str) -> str:
    """As `device_list`; `auto`: the devices that the machine chooses."""
    return text.strip().lower() if text.strip().lower() == "auto" else device_list(text)


def one_device(text: str) -> str:
    """One device, as in `device_list`."""
    if "," in text:
        raise ValueError("is more than one device")
    return device_list(text)


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 1 << 16


def addresses(value: str) -> list[str]:
    """Servers as `HOST:PORT,...`."""
    servers = [part.strip().lower() for part in value.split(",")]
    if not all(map(_is_address, servers)):
        raise ValueError("is not a list of HOST:PORT")
    return servers


def text(value: str) -> str:
    """Any text."""
    return value


def words(value: str) -> list[str]:
    """A list separated by commas; empty items are dropped."""
    return [w.strip() for w in value.split(",") if w.strip()]


def names_of_http(value: str) -> list[str]:
    """A list of names of methods or headers, or *."""
    names = words(value)
    if not names or not all(re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name, re.ASCII) for name in names):
        raise ValueError("is not a list of names separated by commas")
    return names


def _not_blank(value: str) -> str:
    """The text, or "" if it is all blanks."""
    return value if value.strip() else ""


def required(convert: Callable[[str], T], reason: str) -> Callable[[str], T]:
    """A value that is not empty, as that of an unset shell variable would be."""

    def check(value: str) -> T:
        converted = convert(value)
        if not converted:
            raise ValueError(reason)
        return converted

    return check


not_empty = required(text, "must not be empty")


file_name = required(text, "names no file")


file_names = required(words, "names no file")  # separated by commas


folder_name = required(text, "names no folder")


address = required(_not_blank, "names no address")  # an empty one would listen on all networks


keys = required(words, "must have a key")  # a server whose key is missing must not be open to all


key = required(_not_blank, "must have a key")  # one key, which may have commas in it


def wholes(low: int, high: int) -> Callable[[str], list[int]]:
    """Whole numbers separated by commas."""
    one = whole(low, high)

    def convert(value: str) -> list[int]:
        try:
            return [one(part.strip()) for part in value.split(",")]
        except ValueError:
            raise ValueError(f"is not a list of whole numbers from {low} to {high} separated by commas") from None

    return convert


def mebibytes(value: str) -> tuple[int, ...]:
    """A size for each device, in MiB."""
    return tuple(wholes(0, 2**30)(value))


ALL_LAYERS = 2**31 - 1


def layer_range(value: str) -> tuple[int, int]:
    """The first and the last layer, two numbers from 1."""
    match = re.fullmatch(r"\s*(\d{1,5})\s*[:,]\s*(\d{1,5})\s*", value, re.ASCII)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError("is not START END, the first and the last layer, counted from 1")
    return int(match[1]), int(match[2])


def layers(value: str) -> int | str:
    """A number of layers, "auto", or "all" (ALL_LAYERS)."""
    if value.lower() in ("auto", "-1"):
        return "auto"
    if value.lower() in ("all", "-2"):
        return ALL_LAYERS
    try:
        return whole(0)(value)
    except ValueError:
        raise ValueError("is not a number of layers, auto or all") from None


def proportions(value: str) -> tuple[float, ...]:
    """Numbers separated by `,` or `/`, at least one of them above 0."""
    try:
        numbers = tuple(float(part) for part in re.split("[,/]", value))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 <= x < 1e30 for x in numbers) or not sum(numbers):
        raise ValueError("is not a list of numbers of at least 0, such as 3,1, that has one above 0")
    return numbers


SPLIT_MODES = ("none", "layer", "row", "tensor")


def split_mode(value: str) -> str:
    """Division of a model between devices."""
    if value.lower() not in SPLIT_MODES:
        raise ValueError(f"is not one of {', '.join(SPLIT_MODES)}")
    return value.lower()


def tensor_rules(value: str) -> list[tuple[str, str]]:
    """`PATTERN=DEVICE,...` as (pattern of tensor names, device) pairs."""
    pairs = []
    for rule in value.split(","):
        pattern, _, device = rule.partition("=")
        if not pattern or not device:
            raise ValueError(f"is not a list of PATTERN=DEVICE: {rule!r}")
        try:
            re.compile(pattern)
            pairs.append((pattern, device_list(device)))
        except re.error as error:
            raise ValueError(f"has a pattern that is none, {pattern!r}: {error}") from None
        except ValueError as error:
            raise ValueError(f"is not a list of PATTERN=DEVICE: {device!r} {error}") from None
    return pairs


_TYPES = "int|float|bool|str"
_NEXT_RULE = re.compile(rf",(?=[^=,]+=(?:{_TYPES}):)")
_RULE = re.compile(rf"([^=]+)=({_TYPES}):(.*)", re.DOTALL)


def metadata_rules(value: str) -> list[tuple[str, int | float | bool | str]]:
    """`KEY=TYPE:VALUE,...` as (GGUF metadata key, value) pairs."""
    return [_metadata_rule(part) for part in _NEXT_RULE.split(value)]


def _metadata_rule(rule: str) -> tuple[str, int | float | bool | str]:
    parts = _RULE.fullmatch(rule)
    if parts is None:
        raise ValueError(f"is not KEY=TYPE:VALUE with a type of {_TYPES.replace('|', ', ')}")
    key, kind, value = parts.groups()
    if kind == "bool":
        if value not in ("true", "false"):
            raise ValueError(f"has a bool {value!r} that is not true or false")
        return key, value == "true"
    if kind == "int":
        if not re.fullmatch(r"[+-]?\d{1,18}", value, re.ASCII):
            raise ValueError(f"has an int {value!r} that is not a whole number")
        return key, int(value)
    return key, value if kind == "str" else number()(value)

"""Names and times as Ollama's clients write them: `model:tag`, durations, timestamps."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

from logitless.frontend.fields import article, bad_request

_HUBS = ("hf.co/", "huggingface.co/")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h)", re.ASCII)


def tagged(name: str) -> str:
    """The name with its tag, which is "latest" where it has none."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def candidates(name: str) -> tuple[str, ...]:
    """Our names that a client's name may stand for, the likeliest first."""
    bare = name
    for hub in _HUBS:
        bare = bare.removeprefix(hub)
    return tuple(dict.fromkeys((name, bare, bare.removesuffix(":latest"))))


def seconds(name: str, value: object) -> float:
    """The duration in the field `name`: a number of seconds, or a text such as "1h30m". Negative: without end."""
    problem = 'must be a number of seconds or a duration such as "5m"'
    if isinstance(value, str):
        sign, text = (-1.0, value[1:]) if value.startswith("-") else (1.0, value)
        if re.fullmatch(r"\d{1,15}", text, re.ASCII):
            return sign * float(text)
        parts = _PART.findall(text[:64])
        if not parts or "".join(number + unit for number, unit in parts) != text:
            bad_request(name, problem)
        return sign * sum(float(number) * _UNITS[unit] for number, unit in parts)
    if isinstance(value, bool) or not isinstance(value, int | float):
        bad_request(name, f"{problem}, not {article(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        bad_request(name, problem)
    return float(max(min(value, 10**15), -1))


def timestamp(at: float | None = None) -> str:
    """A Unix time (None: now) in Ollama's form."""
    moment = datetime.now(UTC) if at is None else datetime.fromtimestamp(at, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")

"""Loss plots: SVG, or PNG painted by Pillow."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from logitless.models.atomic_write import unfinished

Points = Sequence[tuple[float, float]]
SUFFIXES = (".svg", ".png")
_W, _H, _WEST, _RIGHT, _TOP, _BOTTOM = 720, 420, 64, 16, 52, 44
_COLOURS = ("#4477aa", "#cc6677", "#228833", "#aa3377")
_SCALE = 2  # pixels of a PNG to a unit
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}  # of a word on its baseline


@dataclass(frozen=True)
class _Line:
    points: Points
    colour: str
    width: float = 1.0


@dataclass(frozen=True)
class _Word:
    x: float
    y: float
    text: str
    anchor: str = "middle"
    colour: str = "#000000"
    size: int = 12


def refusal(path: str) -> str:
    """Why no picture can be written under this name; "" if it can."""
    if not path.lower().endswith(SUFFIXES):
        return f"{path!r} does not end in {' or '.join(SUFFIXES)}"
    if path.lower().endswith(".png") and importlib.util.find_spec("PIL") is None:
        return "a .png needs Pillow, which is not installed: pip install 'logitless[plot]', or write an .svg"
    return ""


def plot(path: str | Path, curves: Mapping[str, Points], title: str = "", x_name: str = "optimizer step") -> None:
    """Write the picture; points that are not finite are left out. ValueError: see `refusal`."""
    if reason := refusal(str(path)):
        raise ValueError(reason)
    with unfinished(path) as part:
        if str(path).lower().endswith(".png"):
            _paint(part, curves, title, x_name)
        else:
            part.write_text(svg(curves, title, x_name), encoding="utf-8")


def svg(curves: Mapping[str, Points], title: str = "", x_name: str = "optimizer step") -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_W} {_H}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_W}" height="{_H}" fill="white"/>',
    ]
    for part in _parts(curves, title, x_name):
        if isinstance(part, _Line):
            places = " ".join(f"{x:.1f},{y:.1f}" for x, y in part.points)
            lines.append(
                f'<polyline points="{places}" fill="none" stroke="{part.colour}" stroke-width="{part.width}"/>'
            )
        else:
            how = f'text-anchor="{part.anchor}" font-size="{part.size}" fill="{part.colour}"'
            lines.append(f'<text x="{part.x:.1f}" y="{part.y:.1f}" {how}>{escape(part.text)}</text>')
    return "\n".join([*lines, "</svg>\n"])


def _paint(path: Path, curves: Mapping[str, Points], title: str, x_name: str) -> None:
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("RGB", (_W * _SCALE, _H * _SCALE), "white")
    draw = ImageDraw.Draw(picture)
    for part in _parts(curves, title, x_name):
        if isinstance(part, _Line):
            places = [(x * _SCALE, y * _SCALE) for x, y in part.points]
            draw.line(places, part.colour, round(part.width * _SCALE), joint="curve")
        else:
            font = ImageFont.load_default(part.size * _SCALE)
            place = part.x * _SCALE, part.y * _SCALE
            draw.text(place, part.text, part.colour, font, anchor=_ANCHORS[part.anchor])
    picture.save(path, "PNG")


def _parts(curves: Mapping[str, Points], title: str, x_name: str) -> Iterator[_Line | _Word]:
    finite = {name: [p for p in points if all(map(math.isfinite, p))] for name, points in curves.items()}
    every = [p for points in finite.values() for p in points] or [(0.0, 0.0)]
    x0, x1 = _bounds([x for x, _ in every])
    y0, y1 = _bounds([y for _, y in every])

    def at(x: float, y: float) -> tuple[float, float]:
        across = _WEST + (x - x0) / (x1 - x0) * (_W - _WEST - _RIGHT)
        return across, _H - _BOTTOM - (y - y0) / (y1 - y0) * (_H - _TOP - _BOTTOM)

    yield _Word(_W / 2, 20, title, size=14)
    for value in _ticks(y0, y1):
        _, y = at(x0, value)
        yield _Line([(_WEST, y), (_W - _RIGHT, y)], "#dddddd")
        yield _Word(_WEST - 6, y + 4, f"{value:g}", "end")
    for value in _ticks(x0, x1):
        x, _ = at(value, y0)
        yield _Word(x, _H - _BOTTOM + 18, f"{value:g}")
    yield _Word(_W / 2, _H - 8, x_name)
    name_at = _WEST  # names stand above the curves, where none can cross them
    for i, (name, points) in enumerate(finite.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        places = [at(*p) for p in points]
        if len(places) == 1:  # one validation: a line of one point would not be seen
            ((x, y),) = places
            places = [(x - 4, y), (x + 4, y)]
        yield _Line(places, colour, 1.5)
        yield _Word(name_at, 40, name, "start", colour)
        name_at += 7 * len(name) + 24


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float) -> list[float]:
    """Four to eight round numbers within the bounds."""
    step: float = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= 8)
    first = math.ceil(low / step)
    return [round(step * (first + i), 10) for i in range(int((high - first * step) / step + 1e-9) + 1)]

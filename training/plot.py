"""Loss curves as an SVG picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

Points = Sequence[tuple[float, float]]
_W, _H, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 420, 64, 16, 36, 44
_COLOURS = ("#4477aa", "#cc6677", "#228833", "#aa3377")


def plot(path: str | Path, curves: Mapping[str, Points], title: str = "") -> None:
    """Write the picture; points that are not finite are left out."""
    Path(path).write_text(svg(curves, title), encoding="utf-8")


def svg(curves: Mapping[str, Points], title: str = "") -> str:
    shown = {name: [p for p in points if all(map(math.isfinite, p))] for name, points in curves.items()}
    every = [p for points in shown.values() for p in points] or [(0.0, 0.0)]
    x0, x1 = _bounds([x for x, _ in every])
    y0, y1 = _bounds([y for _, y in every])

    def at(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - x0) / (x1 - x0) * (_W - _LEFT - _RIGHT)
        return across, _H - _BOTTOM - (y - y0) / (y1 - y0) * (_H - _TOP - _BOTTOM)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_W} {_H}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_W}" height="{_H}" fill="white"/>',
        f'<text x="{_W / 2}" y="20" text-anchor="middle" font-size="14">{escape(title)}</text>',
    ]
    for value in _ticks(y0, y1):
        _, y = at(x0, value)
        lines.append(f'<line x1="{_LEFT}" x2="{_W - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in _ticks(x0, x1):
        x, _ = at(value, y0)
        lines.append(f'<text x="{x:.1f}" y="{_H - _BOTTOM + 18}" text-anchor="middle">{value:g}</text>')
    lines.append(f'<text x="{_W / 2}" y="{_H - 8}" text-anchor="middle">optimizer step</text>')
    for i, (name, points) in enumerate(shown.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in points))
        lines.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        lines.append(
            f'<text x="{_W - _RIGHT - 8}" y="{_TOP + 14 + 16 * i}" text-anchor="end" fill="{colour}">'
            f"{escape(name)}</text>"
        )
    return "\n".join([*lines, "</svg>\n"])


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float) -> list[float]:
    """Four to eight round numbers within the bounds."""
    step: float = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= 8)
    first = math.ceil(low / step)
    return [round(step * (first + i), 10) for i in range(int((high - first * step) / step + 1e-9) + 1)]

"""Patches of tiles: their order, their pixels, and their places in a table of positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def patch_places(rows: int, columns: int, merge: int, *, columns_first: bool = False) -> Array:
    """(row, column) of each patch of a grid, (n, 2): merged blocks row by row, or column by column,
    in each its patches row by row."""
    y, x = np.mgrid[:rows, :columns]
    places = np.stack([y, x], -1).reshape(rows // merge, merge, columns // merge, merge, 2)
    return places.transpose(*((2, 0) if columns_first else (0, 2)), 1, 3, 4).reshape(-1, 2)


def flat_patches(pixels: Array, patch: int, places: Array) -> Array:
    """Patches (n, 3 · patch²) f32 of pixels (height, width, 3) u8, colours first, in this order."""
    height, width, _ = pixels.shape
    grid = pixels.reshape(height // patch, patch, width // patch, patch, 3).transpose(0, 2, 4, 1, 3)
    return grid[places[:, 0], places[:, 1]].reshape(len(places), -1).astype(np.float32)


def filtered_shares(places: Array, grid: tuple[int, int], side: int) -> Array:
    """Shares (n, side²) f32 of a position table's rows in patches of another grid: bilinear with
    anti-aliasing, centres on centres (torch's interpolate)."""
    axes = []
    for n in grid:
        factor = side / n
        centres = (np.arange(n) + 0.5) * factor
        away = np.abs(np.arange(side) + 0.5 - centres[:, None]) / max(1.0, factor)
        shares = np.maximum(0.0, 1 - away)
        axes.append(shares / shares.sum(1, keepdims=True))
    return _joint_shares(places, axes)


def cubic_shares(places: Array, grid: tuple[int, int], side: int, *, filtered: bool = False) -> Array:
    """Shares (n, side²) f32 of a position table's rows in patches of another grid: bicubic."""
    return _joint_shares(places, [cubic_axis(n, side, filtered=filtered) for n in grid])


def _joint_shares(places: Array, axes: list[Array]) -> Array:
    """Shares (n, side²) f32 at these places, from those (…, side) along lines and along columns."""
    y, x = (shares[places[:, axis]] for axis, shares in enumerate(axes))
    joint: Array = (y[:, :, None] * x[:, None, :]).reshape(len(places), -1)
    return joint.astype(np.float32)


def cubic_axis(n: int, side: int, *, filtered: bool = False) -> Array:
    """Shares (n, side) of `side` places in n others on their line: cubic (Keys, 1981), centres on
    centres. Edges are repeated, a = −0.75; `filtered`: with anti-aliasing, not beyond the edges, a =
    −0.5 (both torch's interpolate)."""
    a, width = (-0.5, max(1.0, side / n)) if filtered else (-0.75, 1.0)
    at = (np.arange(n) + 0.5) * (side / n) - 0.5
    beyond = 0 if filtered else 2
    taps = np.arange(-beyond, side + beyond)
    away = np.abs(at[:, None] - taps) / width
    near = ((a + 2) * away - (a + 3)) * away**2 + 1
    far = ((a * away - 5 * a) * away + 8 * a) * away - 4 * a
    values = np.where(away <= 1, near, np.where(away < 2, far, 0.0))
    shares = np.zeros((n, side))
    np.add.at(shares, (np.arange(n)[:, None], np.clip(taps, 0, side - 1)), values)
    return shares / shares.sum(1, keepdims=True) if filtered else shares


def linear_axis(n: int, side: int) -> Array:
    """Shares (n, side) of `side` places in n others on their line: of the two nearest, centres on centres."""
    at = np.clip((np.arange(n) + 0.5) * (side / n) - 0.5, 0, side - 1)
    shares: Array = np.maximum(0.0, 1 - np.abs(at[:, None] - np.arange(side)))
    return shares


def resized_places(
    places: Array, grid: tuple[int, int], side: int, *, enlarged: bool = False
) -> tuple[list[Array], list[Array]]:
    """(rows of a position table for a grid of side², their shares) whose sum is a patch's position
    in another grid: bilinear, corners on corners; `enlarged`: centres on centres of a grid that is
    0.1 patches larger."""
    corners, weights = [], []
    for axis, n in enumerate(grid):
        at = places[:, axis] * ((side - 1) / max(1, n - 1))
        if enlarged:
            at = np.clip((places[:, axis] + 0.5) * (side / (n + 0.1)) - 0.5, 0, side - 1)
        low = at.astype(np.int64)
        corners.append((low, np.minimum(low + 1, side - 1)))
        weights.append((1 - (at - low), at - low))
    pairs = [(y, x) for y in (0, 1) for x in (0, 1)]
    ids = [corners[0][y] * side + corners[1][x] for y, x in pairs]
    return ids, [weights[0][y] * weights[1][x] for y, x in pairs]

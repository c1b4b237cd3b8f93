"""RoPE, rotary position embedding (Su et al., 2021): angles once a step, rotations per layer."""

from __future__ import annotations

import numpy as np

from logitless.graph.op import Array, Case, op

FARTHEST = 2**24  # position that f32 tells from its neighbours


@op("pos i32 (T) in 1 - FARTHEST:FARTHEST", "frequency f32 (P)", gives="f32 (T, 2, P)")
def rope_angles(pos: Array, frequency: Array, *, magnitude: float = 1.0) -> Array:
    """magnitude · cos and sin of pos · frequency: (T,) and (n/2,) → (T, 2, n/2).

    Every scaling (linear, Llama 3, YaRN, long factors) is in `frequency` and `magnitude`; see
    models/architectures/rope.py."""
    angle = pos[:, None] * frequency
    return np.stack([np.cos(angle), np.sin(angle)], 1) * magnitude


rope_angles.case(lambda r: ([np.array([0, 1, 5, 1000]), 100.0 ** (-np.arange(6) / 6)], {"magnitude": 1.2}))


rope_angles.tolerance = 1e-4  # f32 angles: 1000 rad has a spacing of 6e-5


@op(
    "pos i32 (S, T) in 1 - FARTHEST:FARTHEST",
    "frequency f32 (P)",
    "component i32 (P) in :S",
    gives="f32 (T, 2, P)",
)
def mrope_angles(pos: Array, frequency: Array, component: Array, *, magnitude: float = 1.0) -> Array:
    """`rope_angles` where pair i turns by component[i] of a position: pos (S, T), frequency and
    component (n/2,) → (T, 2, n/2).

    M-RoPE (Wang et al., 2024: Qwen2-VL), and 2D RoPE of image patches."""
    angle = pos[component].T * frequency
    return np.stack([np.cos(angle), np.sin(angle)], 1) * magnitude


@mrope_angles.case
def _(r: np.random.Generator) -> Case:
    pos = np.array([[0, 1, 5, 1000], [3, 2, 1, 0], [7, 7, 900, 8]], np.int32)
    return [pos, 100.0 ** (-np.arange(6) / 6), np.array([0, 1, 2, 0, 2, 1], np.int32)], {"magnitude": 1.2}


mrope_angles.tolerance = 1e-4


@op("x f32 (T, H, D)", "angles f32 (T, 2, P)", gives="x", needs="2 * P <= D")
def rope(x: Array, angles: Array, *, interleaved: bool, sign: float = 1.0) -> Array:
    """Rotate the first n of each head's elements: (T, H, D) with angles (T, 2, n/2).

    Pairs are (2i, 2i+1) when interleaved (llama), (i, i+n/2) otherwise (NeoX). sign −1 rotates
    back."""
    half = angles.shape[-1]
    c, s = angles[:, None, 0], angles[:, None, 1] * sign
    head, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else (head[..., :half], head[..., half:])
    parts = a * c - b * s, a * s + b * c
    turned = np.stack(parts, -1).reshape(head.shape) if interleaved else np.concatenate(parts, -1)
    return np.concatenate([turned, rest], -1)


rope.vjp(lambda g, y, x, angles, interleaved, sign=1.0: (rope(g, angles, interleaved=interleaved, sign=-sign), None))
rope.case(lambda r: ([r.normal(size=(3, 2, 8)), r.normal(size=(3, 2, 4))], {"interleaved": True}))
rope.case(lambda r: ([r.normal(size=(3, 2, 40)), r.normal(size=(3, 2, 16))], {"interleaved": False}))


rope.inplace = (0,)

"""L-BFGS (Nocedal, 1980) on the host, for small problems; line search by the Wolfe condition.

Defaults are llama.cpp's: six corrections, 100 iterations, 20 steps of the line search, ftol 1e-4,
Wolfe 0.9."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
Evaluate = Callable[[F64], tuple[float, F64]]  # x → loss and gradient
Pairs = tuple[tuple[F64, F64, float], ...]  # s, y, 1 / s·y


@dataclass
class Minimum:
    """End point of a search, and its reason to stop."""

    x: F64
    loss: float
    reason: str = ""
    losses: list[float] = field(default_factory=list)  # after each iteration
    first: float = math.nan  # the loss where it began
    pairs: Pairs = ()  # curvature pairs: with x, the whole state of the search


def minimize(  # noqa: PLR0913  (the algorithm's parameters, by their names)
    evaluate: Evaluate,
    x: F64,
    *,
    m: int = 6,
    n_iter: int = 100,
    max_linesearch: int = 20,
    eps: float = 1e-5,
    ftol: float = 1e-4,
    wolfe: float = 0.9,
    min_step: float = 1e-20,
    max_step: float = 1e20,
    pairs: Pairs = (),
) -> Minimum:
    """The best point found from x. `eps` bounds ‖g‖ / max(1, ‖x‖) at the end. A search that goes on
    from another's `x` and `pairs` does what that one would have done."""
    loss, g = evaluate(x)
    best = Minimum(x.copy(), loss, first=loss)
    known = deque(pairs, maxlen=m)
    direction, step = -g, 1 / max(_norm(g), 1e-12)
    if known:
        direction, step = -_inverse_hessian(g, known), 1.0
    for _ in range(n_iter):
        if _norm(g) <= eps * max(1.0, _norm(x)):
            best.reason = "the gradient is small"
            break
        slope = _dot(g, direction)
        if slope >= 0:  # the corrections mislead: begin anew
            known.clear()
            direction, slope = -g, -_dot(g, g)
        for _ in range(max_linesearch):
            new_x = x + step * direction
            new_loss, new_g = evaluate(new_x)
            if not new_loss <= loss + step * ftol * slope:
                step *= 0.5
            elif _dot(new_g, direction) < wolfe * slope:
                step *= 2.1
            else:
                break
            if not min_step <= step <= max_step:
                break
        if not new_loss < loss:
            best.reason = "the line search found nothing better"
            break
        s, y = new_x - x, new_g - g
        x, g, loss = new_x, new_g, new_loss
        best.x, best.loss = x.copy(), loss
        best.losses.append(loss)
        if _dot(s, y) > 1e-12:
            known.append((s, y, 1 / _dot(s, y)))
        direction, step = -_inverse_hessian(g, known), 1.0
    else:
        best.reason = "all iterations are done"
    best.pairs = tuple(known)
    return best


def _dot(a: F64, b: F64) -> float:
    """Without BLAS, whose threads cost more than they save on vectors as short as these."""
    return float(np.einsum("i,i->", a, b))


def _norm(a: F64) -> float:
    return math.sqrt(_dot(a, a))


def _inverse_hessian(g: F64, pairs: deque[tuple[F64, F64, float]]) -> F64:
    """The two loops: the approximate inverse Hessian times g."""
    q, alphas = g.copy(), []
    for s, y, rho in reversed(pairs):
        alphas.append(rho * _dot(s, q))
        q -= alphas[-1] * y
    if pairs:
        s, y, rho = pairs[-1]
        q /= rho * _dot(y, y)
    for (s, y, rho), alpha in zip(pairs, reversed(alphas), strict=True):
        q += (alpha - rho * _dot(y, q)) * s
    return q

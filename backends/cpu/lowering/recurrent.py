"""Lowering of recurrent layers: causal convolutions, linear attention, and their gradients."""

from __future__ import annotations

from logitless.backends.cpu.lowering.registry import At, lower, lower_plain
from logitless.backends.cpu.threads.pool import Task, bits
from logitless.graph.tensor import Tensor

# kernels/recurrent.py, kernels/recurrent_backward.py
COLUMNS, WIDTH, UNROLL, SAVED = 64, 32, 4, 16
RULES = {(False, False): "sum", (True, False): "delta", (False, True): "bonus", (True, True): "keys"}


lower_plain(text_begins=lambda T, length, **_: ((length,), T, 4096))


def _sources(t: Tensor, n: int, at: At) -> list[int]:
    """Addresses of the sources; 0 for a missing `end`, the last of n."""
    addresses = [at(s) for s in t.src]
    return addresses + [0] * (n - len(addresses))


def _forms(t: Tensor) -> tuple[int, ...]:
    return bits(t.attrs["scale"]), int(t.attrs["delta"]), int(t.attrs["grouped"])


def _conv(t: Tensor, at: At) -> list[Task]:
    rows, columns, size = *t.shape, t.src[1].shape[2]
    args = (*_sources(t, 5, at), at(t), rows, columns, size, t.src[2].shape[0])
    return [Task("causal_conv", args, -(-columns // COLUMNS), 1, 4 * (2 * size + 1) * COLUMNS)]


def _attention(t: Tensor, at: At) -> list[Task] | None:
    (rows, heads, width), (_, k_heads, size), axes = t.shape, t.src[0].shape, len(t.src[3].shape)
    rule = RULES[t.attrs["delta"], len(t.src[4].shape) > 2]
    if size % UNROLL or (rule, axes) == ("delta", 4):
        return None
    scale, _, grouped = _forms(t)
    args = (*_sources(t, 8, at), at(t), rows, heads, k_heads, size, width, scale, grouped, t.src[5].shape[0])
    kernel = f"linear_attention:{rule}:{axes}"
    return [Task(kernel, args, heads * -(-width // WIDTH), 1, 4 * (2 * size + 4) * WIDTH)]


for _form in ("", "_update"):
    lower(f"causal_conv{_form}")(_conv)
    lower(f"linear_attention{_form}")(_attention)


@lower("causal_conv_back")
def _(t: Tensor, at: At) -> list[Task]:
    (rows, columns), size = t.src[1].shape, t.src[2].shape[2]
    args = (*map(at, t.src), at(t), rows, columns, size)
    return [Task("causal_conv_back", args, -(-columns // COLUMNS), 1, 4 * size * COLUMNS)]


@lower("linear_attention_back")
def _(t: Tensor, at: At) -> list[Task] | None:
    (rows, heads, width), (_, k_heads, size) = t.src[3].shape, t.src[1].shape
    if len(t.src[4].shape) > 2 or len(t.src[5].shape) > 2:  # decays of rows, RWKV's betas
        return None
    args = (*map(at, t.src), at(t), rows, heads, k_heads, size, width, *_forms(t))
    states = -(-rows // SAVED) + SAVED + 2
    return [Task("linear_attention_back", args, k_heads, 1, 4 * (states * size * width + (SAVED + 2) * width))]

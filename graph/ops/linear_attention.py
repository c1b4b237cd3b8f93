"""Linear attention and SSM layers (Mamba 2, Gated DeltaNet, RWKV, LFM 2): state and short convolution.

Rows are tokens of any sequences, each sequence's in order and adjacent. A recurrent state is a row
of `states`: begin[t] is the state that token t starts from, or -1 where it continues from the row
before it. Each op has a form that writes states: end[t] is the row that gets the state after token
t, or -1. No state is both read and written in one run, so earlier states can be continued from
again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from logitless.graph.op import Array, Case, Variable, op
from logitless.graph.ops.shape import reshape, slice_rows
from logitless.graph.tensor import Tensor


def _spans(begin: Array) -> Iterator[tuple[int, int, int]]:
    """(first row, end row, state) of each span of rows that continue each other."""
    starts = [t for t in range(len(begin)) if begin[t] >= 0]
    for first, stop in zip(starts, [*starts[1:], len(begin)], strict=True):
        yield first, stop, int(begin[first])


@op("start i32 (T) in :length", gives="start in -1:1", needs="length > 0 and T % length == 0")
def text_begins(start: Array, *, length: int) -> Array:
    """`begin` (T,) i32 of texts that begin with state 0: start (T,) says in which row of its window
    of `length` a row's text begins."""
    return np.where(start == np.arange(len(start)) % length, 0, -1).astype(np.int32)


text_begins.case(lambda r: ([np.array([0, 0, 2, 2, 2, 0, 1, 1, 1, 4], np.int32)], {"length": 5}))


LAST = "end i32 (T) in -1:N"
CONVOLUTION = "x f32 (T, C)", "w f32 (C, 1, K)", "states f32 (N, L, C)", "begin i32 (T) in -1:N"


@op(*CONVOLUTION, gives="x", needs="K > 1 and L == K - 1")
def causal_conv(x: Array, w: Array, states: Array, begin: Array) -> Array:
    """Depthwise causal convolution over time (Mamba, LFM 2): x (T, C), w (C, 1, K) → (T, C).

    y[t] = Σ w[:, 0, j] · x[t − K + 1 + j]; states (N, K − 1, C) have the rows before the first, the
    oldest first."""
    return _convolve(x, w, states, begin, np.full(len(x), -1))


def _convolve(x: Array, w: Array, states: Array, begin: Array, end: Array) -> Array:
    y = np.zeros_like(x)
    k = w.shape[2]
    for first, stop, state in _spans(begin):
        rows = np.concatenate([states[state], x[first:stop]])
        for t in range(first, stop):
            at = t - first
            y[t] = (rows[at : at + k] * w[:, 0].T).sum(0)
            if end[t] >= 0:
                states[end[t]] = rows[at + 1 : at + k]
    return y


@op(*CONVOLUTION, LAST, gives="x", needs=causal_conv.needs, writes=(2,), returns_destination=False)
def causal_conv_update(x: Array, w: Array, states: Array, begin: Array, end: Array) -> Array:
    """`causal_conv` that also writes the last K − 1 rows to states."""
    return _convolve(x, w, states, begin, end)


@causal_conv.vjp
def _(g: Tensor, y: Tensor, x: Tensor, w: Tensor, states: Tensor, begin: Tensor) -> tuple[Tensor | None, ...]:
    both = causal_conv_back(g, x, w, states, begin)
    n = x.shape[0]
    of_w = reshape(slice_rows(both, start=n, stop=n + w.shape[2]), shape=w.shape)
    return slice_rows(both, start=0, stop=n), of_w, None, None


@op("g f32 (T, C)", *CONVOLUTION, gives="f32 (T + K, C)", needs=causal_conv.needs)
def causal_conv_back(g: Array, x: Array, w: Array, states: Array, begin: Array) -> Array:
    """The gradients of x, then of w as its bytes: (T + K, C)."""
    dx, dw, k = np.zeros_like(x), np.zeros_like(w), w.shape[2]
    for first, stop, state in _spans(begin):
        rows = np.concatenate([states[state], x[first:stop]])
        for t in range(first, stop):
            dw[:, 0] += g[t][:, None] * rows[t - first : t - first + k].T
            for j in range(max(0, k - 1 - (t - first)), k):
                dx[t - k + 1 + j] += g[t] * w[:, 0, j]
    return np.concatenate([dx, dw.reshape(k, -1)])


SOURCES = (
    *("q f32 (T, G, D)", "k f32 (T, G, D)", "v f32 (T, H, E)", "decay f32 (T, H)|(T, H, D)|(T, H, D, E)"),
    *("beta f32 (T, H)|(T, H, D)|(T, H, 2, D)", "states f32 (N, H, D, E)", "begin i32 (T) in -1:N"),
)
_BETAS = "H % G == 0 and len(beta.shape) != (3 if delta else 4)"


@op(*SOURCES, gives="v", needs=_BETAS)
def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    decay: Array,
    beta: Array,
    states: Array,
    begin: Array,
    *,
    scale: float,
    delta: bool,
    grouped: bool,
) -> Array:
    """Gated linear attention: Mamba 2's state space duality (Dao and Gu, 2024); `delta`: gated
    delta rule.

    The gated delta rule is that of Gated DeltaNet (Yang, Kautz and Hatamizadeh, 2024).

    q and k (T, H_k, D), v (T, H, E), decay and beta (T, H), states (N, H, D, E) → (T, H, E). Of
    each head S ← decay · S, then S ← S + k (beta · v)ᵀ, or with `delta` S + k (beta · (v − Sᵀk))ᵀ;
    y = scale · Sᵀq. Head i has the queries and keys of head i mod H_k; `grouped`: of head i / (H /
    H_k), those that share them side by side. Decays may also be of each row of S, (T, H, D) (Kimi
    Delta Attention), or of each element, (T, H, D, E) (Mamba).

    RWKV (Peng et al., 2024, 2025) has other betas. (T, H, D) without `delta` is a bonus (version 6):
    y = scale · (S + (beta · k) vᵀ)ᵀq of the S before the token, then S ← decay · S + k vᵀ. (T, H, 2, D)
    with `delta` are two keys (version 7), a to read and b to write: S ← decay · S + k vᵀ + b (Sᵀa)ᵀ.
    """
    src = q, k, v, decay, beta, states, begin
    return _attend(src, np.full(len(v), -1), scale=scale, delta=delta, grouped=grouped)


def _attend(src: Sequence[Array], end: Array, *, scale: float, delta: bool, grouped: bool) -> Array:
    """`src`: q to begin; S after row t goes to row end[t] of the states, unless that is -1."""
    q, k, v, decay, beta, states, begin = src
    y = np.zeros_like(v)
    for first, stop, state in _spans(begin):
        s = states[state].copy()
        for t in range(first, stop):
            key, query = _of_heads(k[t], s, grouped), _of_heads(q[t], s, grouped)
            if beta.ndim == 3:
                y[t] = scale * (np.einsum("hde,hd->he", s, query) + (beta[t] * key * query).sum(1)[:, None] * v[t])
            _advance(s, key, v[t], decay[t], beta[t], delta)
            if beta.ndim != 3:
                y[t] = scale * np.einsum("hde,hd->he", s, query)
            if end[t] >= 0:
                states[end[t]] = s
    return y


@op(
    *SOURCES,
    LAST,
    gives="v",
    needs=_BETAS,
    writes=(5,),
    returns_destination=False,
    like=linear_attention,
)
def linear_attention_update(*src: Array, **attrs: Any) -> Array:
    """`linear_attention` that also writes S to states; its last source is `end` (T,)."""
    *others, end = src
    return _attend(others, end, **attrs)


def _of_heads(x: Array, s: Array, grouped: bool) -> Array:
    """Rows (H_k, n) as rows (H, n)."""
    times = s.shape[0] // x.shape[0]
    return np.repeat(x, times, 0) if grouped else np.tile(x, (times, 1))


def _advance(s: Array, k: Array, v: Array, decay: Array, beta: Array, delta: bool) -> Array:
    """Advance S by one token in place; returns the correction (H, E), or what key a reads."""
    if beta.ndim > 1:
        read = np.einsum("hde,hd->he", s, beta[:, 0]) if delta else v
        s *= _fade(decay)
        s += np.einsum("hd,he->hde", k, v)
        s += np.einsum("hd,he->hde", beta[:, 1], read) if delta else 0.0
        return read
    s *= _fade(decay)
    correction = v - np.einsum("hde,hd->he", s, k) if delta else v
    s += np.einsum("hd,he->hde", k, beta[:, None] * correction)
    return correction


def _fade(decay: Array) -> Array:
    """Decays of one token as factors of S (H, D, E)."""
    return decay.reshape(decay.shape + (1,) * (3 - decay.ndim))


@linear_attention.vjp
def _(g: Tensor, y: Tensor, *src: Tensor, scale: float, delta: bool, grouped: bool) -> tuple[Tensor | None, ...]:
    gradients, start = [], 0
    joined = linear_attention_back(g, *src, scale=scale, delta=delta, grouped=grouped)
    for t in src[:5]:
        size = t.size
        gradients.append(reshape(slice_rows(joined, start=start, stop=start + size), shape=t.shape))
        start += size
    return (*gradients, None, None)


@op("g f32 (T, H, E)", *SOURCES, gives="f32 (sum(t.size for t in (q, k, v, decay, beta)),)", needs=_BETAS)
def linear_attention_back(
    g: Array,
    q: Array,
    k: Array,
    v: Array,
    decay: Array,
    beta: Array,
    states: Array,
    begin: Array,
    *,
    scale: float,
    delta: bool,
    grouped: bool,
) -> Array:
    """The gradients of q, k, v, decay and beta one after the other, flat."""
    dq, dk, dv, dd, db = (np.zeros_like(x) for x in (q, k, v, decay, beta))
    for first, stop, state in _spans(begin):
        s = states[state].copy()
        before, corrections = [], []
        for t in range(first, stop):
            before.append(s.copy())
            corrections.append(_advance(s, _of_heads(k[t], s, grouped), v[t], decay[t], beta[t], delta))
        ds = np.zeros_like(s)
        for t in reversed(range(first, stop)):
            old, correction = before[t - first], corrections[t - first]
            kt, qt = (_of_heads(x[t], s, grouped) for x in (k, q))
            decayed = _fade(decay[t]) * old
            if beta.ndim > 2:
                of_q, of_k, dv[t], db[t], before_token = _rwkv_back(
                    scale * g[t], qt, kt, v[t], beta[t], old, decayed, correction, ds, delta
                )
                _add_heads(dq[t], of_q, grouped)
                _add_heads(dk[t], of_k, grouped)
                ds += scale * np.einsum("hd,he->hde", qt, g[t]) if delta else 0.0
                dd[t] = (ds * old).sum(tuple(range(decay.ndim - 1, 3)))
                ds = ds * _fade(decay[t]) + before_token
                continue
            new = decayed + np.einsum("hd,he->hde", kt, beta[t][:, None] * correction)
            _add_heads(dq[t], scale * np.einsum("hde,he->hd", new, g[t]), grouped)
            ds += scale * np.einsum("hd,he->hde", qt, g[t])
            of_sum = np.einsum("hde,hd->he", ds, kt)
            db[t] = (of_sum * correction).sum(-1)
            dv[t] = beta[t][:, None] * of_sum
            _add_heads(dk[t], np.einsum("hde,he->hd", ds, beta[t][:, None] * correction), grouped)
            if delta:
                _add_heads(dk[t], -np.einsum("hde,he->hd", decayed, dv[t]), grouped)
                ds -= np.einsum("hd,he->hde", kt, dv[t])
            dd[t] = (ds * old).sum(tuple(range(decay.ndim - 1, 3)))
            ds *= _fade(decay[t])
    return np.concatenate([x.reshape(-1) for x in (dq, dk, dv, dd, db)])


def _rwkv_back(
    g: Array, q: Array, k: Array, v: Array, beta: Array, old: Array, decayed: Array, read: Array, ds: Array, delta: bool
) -> tuple[Array, ...]:
    """The gradients of one token's q, k, v and beta, and of S before it but for the decay; `ds`: of S after it
    from later tokens; g: of y / scale."""
    if not delta:
        both = (v * g).sum(1)[:, None]
        of_q = np.einsum("hde,he->hd", old, g) + beta * k * both
        of_k = np.einsum("hde,he->hd", ds, v) + beta * q * both
        of_v = np.einsum("hde,hd->he", ds, k) + (beta * k * q).sum(1)[:, None] * g
        return of_q, of_k, of_v, q * k * both, np.einsum("hd,he->hde", q, g)
    new = decayed + np.einsum("hd,he->hde", k, v) + np.einsum("hd,he->hde", beta[:, 1], read)
    ds = ds + np.einsum("hd,he->hde", q, g)
    of_read = np.einsum("hde,hd->he", ds, beta[:, 1])
    of_keys = np.stack([np.einsum("hde,he->hd", old, of_read), np.einsum("hde,he->hd", ds, read)], 1)
    of_k, of_v = np.einsum("hde,he->hd", ds, v), np.einsum("hde,hd->he", ds, k)
    return np.einsum("hde,he->hd", new, g), of_k, of_v, of_keys, np.einsum("hd,he->hde", beta[:, 0], of_read)


def _add_heads(out: Array, x: Array, grouped: bool) -> None:
    n = out.shape[0]
    out += x.reshape(n, -1, x.shape[1]).sum(1) if grouped else x.reshape(-1, *out.shape).sum(0)


BEGIN, END = np.full(12, -1, np.int32), np.full(12, -1, np.int32)
# three sequences: of one token, of seven whose states after two are kept, and of four
BEGIN[[0, 1, 8]] = 3, 0, 3
END[[0, 4, 7, 9]] = 1, 2, 5, 4


def _conv_case(r: np.random.Generator, columns: int, size: int, form: str) -> Case:
    x, w, g = r.normal(size=(12, columns)), r.normal(size=(columns, 1, size)), r.normal(size=(12, columns))
    states = Variable(r.normal(size=(6, size - 1, columns)), "f32")
    return [*([g] if form == "back" else []), x, w, states, BEGIN, *([END] if form == "kept" else [])], {}


def _attention_case(
    r: np.random.Generator,
    heads: int,
    k_heads: int,
    d: int,
    e: int,
    delta: bool,
    grouped: bool,
    form: str,
    axes: int = 2,
    rwkv: bool = False,
) -> Case:
    q, k = (r.normal(size=(12, k_heads, d)) for _ in range(2))
    k /= np.sqrt((k * k).sum(-1, keepdims=True))
    v, of_beta = r.normal(size=(12, heads, e)), (((2, d) if delta else (d,)) if rwkv else ())
    beta = r.uniform(0, 1, (12, heads, *of_beta)) * (d**-0.5 if rwkv and delta else 1)
    decay = r.uniform(0.3, 1, (12, heads, d, e)[:axes])
    sources = [q, k, v, decay, beta, Variable(r.normal(size=(6, heads, d, e)), "f32"), BEGIN]
    before, after = [r.normal(size=v.shape)] if form == "back" else [], [END] if form == "kept" else []
    return [*before, *sources, *after], {"scale": d**-0.5, "delta": delta, "grouped": grouped}


FORMS = ("", "kept", "back")
for _columns, _size in ((24, 4), (100, 3), (256, 2)):
    for _op, _form in zip((causal_conv, causal_conv_update, causal_conv_back), FORMS, strict=True):
        _op.case(_conv_case, _columns, _size, _form)
for _sizes in (
    (2, 2, 16, 16, True, False),
    (6, 2, 24, 40, True, False),
    (4, 4, 64, 128, True, False),
    (6, 2, 24, 40, True, True),
    (6, 2, 24, 40, False, True),
    (3, 1, 128, 64, False, True),
):
    for _op, _form in zip((linear_attention, linear_attention_update, linear_attention_back), FORMS, strict=True):
        _op.case(_attention_case, *_sizes, _form)
for _sizes, _axes, _rwkv in (
    ((4, 4, 24, 40, True, False), 3, False),
    ((3, 1, 16, 32, False, False), 4, False),
    ((2, 2, 16, 16, False, False), 3, False),
    ((2, 2, 24, 24, False, False), 3, True),
    ((2, 2, 24, 40, True, False), 3, True),
):
    for _op, _form in zip((linear_attention, linear_attention_update, linear_attention_back), FORMS, strict=True):
        _op.case(_attention_case, *_sizes, _form, _axes, _rwkv)

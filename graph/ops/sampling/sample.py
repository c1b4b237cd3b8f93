"""Sampling ops: logits stay on the device; sampled ids and log-probabilities leave it.

Everything that differs between requests is data, so one compiled plan serves every mix of them."""

from __future__ import annotations

import functools

import numpy as np

from logitless.graph.op import Array, Case, Variable, Variants, op, require
from logitless.graph.ops.elementwise import scale
from logitless.graph.ops.sampling import samplers as s
from logitless.graph.ops.shape import reshape
from logitless.graph.ops.training.loss import cross_entropy_back
from logitless.graph.tensor import Tensor

PERTURB = 512  # vocabulary of the cases


_LISTS = "Q == R + 1 and W == (R if mask is None else 2 * R) and (mask is None) == (mask_row is None)"


@op(
    "logits f32 (R, V)",
    f"state f32 (S, {s.N_STATE})",
    f"params f32 (R, {s.N_PARAMS})",
    "chain i32 (R, C) in s.END:s.ADAPTIVE + 1",
    "draws u32 (W, 4)",
    "list_ptr i32 (Q) in :L + 1",
    "list_kind i32 (L)",
    "list_id i32 (L)",
    "list_value f32 (L)",
    "slot i32 (R)",
    "mask u32 (M, B)?",
    "mask_row i32 (R)? in -2:M",
    gives="i32 (R, 3 + 2 * n_probs if n_probs else 1)",
    needs=f"{_LISTS} and (mask is None or B == -(-V // 32)) and n_probs >= 0",
    writes=(1,),
    returns_destination=False,
)
def sample(
    logits: Array,
    state: Array,
    params: Array,
    chain: Array,
    draws: Array,
    list_ptr: Array,
    list_kind: Array,
    list_id: Array,
    list_value: Array,
    slot: Array,
    mask: Array | None = None,
    mask_row: Array | None = None,
    *,
    n_probs: int = 0,
) -> Array:
    """Choose a token for each row of the logits (R, V), by the samplers that its row of `chain` (R,
    C) i32 names.

    state      (S, 4)  f32   what mirostat and adaptive-p remember, one row per slot; written params
    (R, P)  f32   temperatures and thresholds, see the columns in samplers.py draws      (R, 4)  u32
    two words of the row's uniform, one of XTC's, one spare list_ptr   (R+1,)  i32   row r's sparse
    entries are list_ptr[r]:list_ptr[r+1] of list_kind, list_id (L,) i32, list_value (L,) f32: 0
    logit bias, 1 a token's count for penalties, 2 DRY's penalty slot       (R,)    i32   the row's
    row of the state; rows that follow each other with one slot are one sequence
                             (a token and its drafts) and take over each other's unused draws; -1: not so
    mask       (M, ⌈V/32⌉) u32, mask_row (R,) i32: optional, both or none. A row of the mask has a
    bit for each token
                             that a grammar allows; mask_row says which one holds for a row of the logits, -1 for none;
                             -2: the row is not sampled after all, as with an empty chain. Draws are then (2R, 4):
                             those of row r are 2r and 2r + 1.

    A row with a mask is sampled twice as llama.cpp does: first without the mask, and if the token
    is not allowed, again with the next draws from logits that are -inf where the mask has no bit
    (so allowed tokens keep their probability, and the rest of it is shared out by the masked
    chain).

    An empty chain (0 first) gives id 0. Result (R, 1) i32: the id in the low 28 bits, TWO_DIST,
    TWO_XTC, NO_DIST and NO_XTC above. With n_probs: (R, 3 + 2·n_probs) with, after the word, the
    number of candidates left, the bits of the chosen one's probability, the likeliest ids (-1 for
    none: a probability is never 0), and the bits of theirs."""
    rows, per_row = len(logits), 1 if mask is None else 2
    out = np.zeros((rows, 1 if n_probs == 0 else 3 + 2 * n_probs), np.int32)
    drawn = drawn_xtc = 0
    for r in range(rows):
        if r == 0 or slot[r] < 0 or slot[r] != slot[r - 1]:
            drawn = drawn_xtc = per_row * r
        codes = [int(code) for code in chain[r]]
        if codes[0] == s.END or (mask_row is not None and mask_row[r] == -2):
            out[r, 0] = np.uint32(s.NO_DIST | s.NO_XTC).view(np.int32)
            continue
        entries = [
            (int(list_kind[j]), int(list_id[j]), list_value[j]) for j in range(int(list_ptr[r]), int(list_ptr[r + 1]))
        ]
        seat = state[min(max(int(slot[r]), 0), len(state) - 1)]
        s.reset(seat, params[r])
        before = seat.copy()
        draw = int(draws[drawn, 0]), int(draws[drawn, 1])
        c = s.whole_vocabulary(logits[r], params[r], entries)
        draw_xtc, n_vocab = int(draws[drawn_xtc, 2]), logits.shape[1]
        chosen, flags = s.run_chain(c, params[r], codes, draw, draw_xtc, entries, seat, n_vocab)
        n_dist, n_xtc = s.used(flags)
        if mask is not None and mask_row is not None and mask_row[r] >= 0:
            allowed = s.allowed(mask[mask_row[r]], n_vocab)
            if not allowed[c.ids[chosen]]:
                # remembers only tokens that were taken; mirostat learns from both
                if s.ADAPTIVE in codes:
                    seat[:] = before
                drawn, drawn_xtc = drawn + n_dist, drawn_xtc + n_xtc
                draw = int(draws[drawn, 0]), int(draws[drawn, 1])
                masked = np.where(allowed, logits[r], logits.dtype.type(-np.inf))
                c, draw_xtc = s.whole_vocabulary(masked, params[r], entries), int(draws[drawn_xtc, 2])
                chosen, flags = s.run_chain(c, params[r], codes, draw, draw_xtc, entries, seat, n_vocab)
                again_dist, again_xtc = s.used(flags)
                flags = s.flags_of(n_dist + again_dist, n_xtc + again_xtc)
                n_dist, n_xtc = again_dist, again_xtc
        drawn, drawn_xtc = drawn + n_dist, drawn_xtc + n_xtc
        out[r, 0] = np.uint32(int(c.ids[chosen]) | flags).view(np.int32)
        if n_probs:
            assert c.p is not None
            p = c.p.astype(np.float32)
            best = [i for i in np.lexsort((c.ids, -c.logits))[:n_probs] if p[i] > 0]
            out[r, 1] = len(c)
            out[r, 2] = p[chosen].view(np.int32)
            out[r, 3 : 3 + n_probs] = -1
            out[r, 3 : 3 + len(best)] = c.ids[best]
            out[r, 3 + n_probs : 3 + n_probs + len(best)] = p[best].view(np.int32)
    return out


sample.variants = Variants(s.ALL + 1, 3, s.variant_of)


@op("logits f32 (R, V)", "ids i32 (R, W)", "targets i32 (R) in -2**31:V", gives="f32 (R, 1 + 2 * n)", needs="n >= 0")
def log_probs(logits: Array, ids: Array, targets: Array, *, n: int) -> Array:
    """ln softmax of the logits (R, V), before any sampler: (R, 1 + 2n) f32 with the value at the
    row's target, the n likeliest ids (as numbers, exact up to 2²⁴; -1 where the rest is
    impossible), and their values.

    The target is targets[r] (R,) i32, or where that is negative the token in the word ids[r, 0] (R,
    W) i32 (`sample`)."""
    f = logits.dtype.type
    out = np.zeros((len(logits), 1 + 2 * n), logits.dtype)
    for r, row in enumerate(logits):
        c = s.Candidates(np.arange(len(row)), np.where(np.isnan(row), f(-np.inf), row))
        total = c.weights().sum(dtype=np.float64)
        lse = np.log(f(total)) if total > 0 else f(0)
        target = int(targets[r]) if targets[r] >= 0 else int(ids[r, 0]) & s.ID
        with np.errstate(invalid="ignore"):
            values = (c.logits - c.logits.max()) - lse
            out[r, 0] = row[min(target, len(row) - 1)] - c.logits.max() - lse
        best = [i for i in np.lexsort((c.ids, -c.logits))[:n] if not np.isneginf(c.logits[i])]
        out[r, 1 : 1 + n], out[r, 1 + n :] = -1, -np.inf
        out[r, 1 : 1 + len(best)], out[r, 1 + n : 1 + n + len(best)] = best, values[best]
    return out


@log_probs.vjp
def _(g: Tensor, y: Tensor, logits: Tensor, ids: Tensor, targets: Tensor, n: int) -> tuple[Tensor | None, ...]:
    """A gradient for targets that are given, without likeliest ids."""
    require(n == 0, "log_probs", "there is no gradient with likeliest ids", logits)
    return cross_entropy_back(scale(reshape(g, shape=(-1,)), factor=-1.0), logits, targets), None, None


@log_probs.case
def _(r: np.random.Generator) -> Case:
    ids = np.array([[3 | s.NO_DIST], [5], [700]], np.int32)
    return [r.normal(size=(3, 1000)) * 3, ids, np.array([-1, 17, -1], np.int32)], {"n": 0}


@log_probs.case
def _(r: np.random.Generator) -> Case:
    logits = np.float64(np.float32(r.normal(size=(3, 300)) * 3))
    ids = np.array([[3, 0], [5, 0], [200, 0]], np.int32)
    return [logits, ids, np.array([-1, 17, -1], np.int32)], {"n": 5}


@log_probs.case
def _(r: np.random.Generator) -> Case:
    return [r.normal(size=(4, 70)) * 2, np.zeros((4, 1), np.int32), np.array([0, 69, 7, 7], np.int32)], {"n": 0}


DEFAULT = (s.TOP_K, s.TYP_P, s.TOP_P, s.MIN_P, s.XTC, s.TEMPERATURE, s.DIST)
CASES: dict[str, tuple[tuple[int, ...], dict[int, float]]] = {
    "default": (DEFAULT, {}),
    "greedy": ((s.GREEDY,), {}),
    "dist": ((s.DIST,), {}),
    "cold": ((s.TEMPERATURE, s.DIST), {s.TEMP: 0.0}),
    "greedy penalties": ((s.PENALTIES, s.DRY, s.GREEDY), {s.REPEAT: 1.3, s.FREQUENCY: 0.2, s.PRESENCE: 0.4}),
    "penalties": ((s.PENALTIES, s.TOP_K, s.DIST), {s.REPEAT: 1.3, s.FREQUENCY: 0.2, s.PRESENCE: 0.4}),
    "penalties late": ((s.TOP_K, s.PENALTIES, s.DIST), {s.REPEAT: 1.3, s.FREQUENCY: 0.2, s.PRESENCE: 0.4}),
    "dry": ((s.DRY, s.MIN_P, s.DIST), {s.LEAST_P: 0.02}),
    "top_n_sigma": ((s.TOP_N_SIGMA, s.DIST), {s.N_SIGMA: 1.5}),
    "typical": ((s.TYP_P, s.TEMPERATURE, s.DIST), {s.TYPICAL: 0.5}),
    "top_p": ((s.TOP_P, s.DIST), {s.P: 0.8}),
    "min_p": ((s.MIN_P, s.TEMPERATURE, s.DIST), {s.LEAST_P: 0.01}),
    "min_keep": ((s.MIN_P, s.TOP_P, s.DIST), {s.LEAST_P: 0.9, s.P: 0.1, s.MIN_KEEP: 7}),
    "xtc": ((s.XTC, s.DIST), {s.XTC_PROBABILITY: 1.0, s.XTC_THRESHOLD: 0.02}),
    "dynatemp": ((s.TOP_K, s.TEMPERATURE, s.DIST), {s.RANGE: 0.5, s.EXPONENT: 1.2}),
    "mirostat 1": ((s.TEMPERATURE, s.MIROSTAT_1), {s.RESET: 8.0}),
    "mirostat 2": ((s.TEMPERATURE, s.MIROSTAT_2), {s.RESET: 6.0}),
    "adaptive": ((s.MIN_P, s.ADAPTIVE), {s.TARGET: 0.4, s.DECAY: 0.9, s.RESET: 4.0, s.RESET + 1: 10.0}),
}


def default_params() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """A row of parameters with llama-server's defaults; the state is kept."""
    q = np.zeros(s.N_PARAMS)
    q[[s.TEMP, s.EXPONENT, s.K, s.P, s.LEAST_P, s.N_SIGMA]] = 0.8, 1, 40, 0.95, 0.05, -1
    q[[s.XTC_THRESHOLD, s.TYPICAL, s.REPEAT, s.TAU, s.ETA, s.TARGET, s.DECAY]] = 0.1, 1, 1, 5, 0.1, -1, 0.9
    q[s.RESET :] = np.nan
    return q


def make_case(r: np.random.Generator, names: list[str]) -> Case:
    """One row per name, each in a slot of its own, with a few sparse entries of every kind."""
    rows, width = len(names), max(len(CASES[name][0]) for name in names) + 1
    params, chain = np.stack([default_params()] * rows), np.zeros((rows, width), np.int32)
    for i, name in enumerate(names):
        codes, changed = CASES[name]
        chain[i, : len(codes)] = codes
        params[i, list(changed)] = list(changed.values())
    kinds = np.arange(9 * rows, dtype=np.int32) % 3
    ids = r.integers(0, PERTURB, 9 * rows).astype(np.int32)
    values = np.where(kinds == 1, r.integers(1, 4, 9 * rows), r.normal(size=9 * rows))
    ptr = np.arange(0, 9 * rows + 1, 9, dtype=np.int32)
    draws = r.integers(0, 2**32, (rows, 4), dtype=np.uint32)
    logits = np.float64(np.float32(r.normal(size=(rows, PERTURB)) * 3))
    state = Variable(np.full((rows, s.N_STATE), 3.0), "f32")
    slot = np.arange(rows, dtype=np.int32)
    return [logits, state, params, chain, draws, ptr, kinds, ids, values, slot], {"n_probs": 0}


def make_masked_case(r: np.random.Generator, names: list[str]) -> Case:
    """A case with masks: a few tokens, all but a few, none (-1), and unsampled rows (-2)."""
    sources, attrs = make_case(r, names)
    rows = len(names)
    few, most = np.zeros(PERTURB, bool), np.ones(PERTURB, bool)
    few[r.integers(0, PERTURB, 20)] = True
    most[r.integers(0, PERTURB, 20)] = False
    words = np.packbits([few, most], axis=1, bitorder="little").view(np.uint32)
    sources[4] = r.integers(0, 2**32, (2 * rows, 4), dtype=np.uint32)
    return [*sources, words, np.arange(rows, dtype=np.int32) % 4 - 2], attrs


for _name in CASES:
    sample.case(functools.partial(make_case, names=[_name] * 3))
for _variant in range(sample.variants.n):  # rows that it takes together
    _names = [_name for _name, (_codes, _) in CASES.items() if s.variant_of(np.array(_codes)) <= _variant]
    sample.case(functools.partial(make_case, names=_names))
    sample.case(functools.partial(make_masked_case, names=_names))
sample.case(functools.partial(make_masked_case, names=list(reversed(CASES))))

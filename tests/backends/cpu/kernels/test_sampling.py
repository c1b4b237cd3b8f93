"""CPU sampling kernels against their reference, and properties for any inputs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from logitless.graph.ops.sampling import sample
from logitless.graph.ops.sampling import samplers as s
from tests.helpers import sampling_kernel
from tests.helpers.sampling_kernel import run, typed

SELECTIONS = (s.GREEDY, s.DIST, s.MIROSTAT_1, s.MIROSTAT_2, s.ADAPTIVE)


def rows_of(r: np.random.Generator, n_rows: int, n_vocab: int) -> list[np.ndarray]:
    """Sources of `sample` with any chain, parameters, sparse entries, and slots shared by
    neighbours.
    """
    chain = np.zeros((n_rows, 12), np.int32)
    params = np.stack([sample.default_params() for _ in range(n_rows)])
    for row, q in zip(chain, params, strict=True):
        n = int(r.integers(0, 10))
        row[:n] = r.integers(1, 10, n)
        row[n] = r.choice(SELECTIONS)
        q[s.TEMP] = r.choice([0.0, 0.3, 1.0, 1.7])
        q[s.RANGE], q[s.EXPONENT] = r.choice([0.0, 0.4]), r.choice([1.0, 1.3])
        q[s.K] = r.choice([0, 1, 5, 40, 300, 100000])
        q[s.P], q[s.LEAST_P] = r.choice([0.1, 0.5, 0.9, 0.99, 1.0]), r.choice([0.0, 0.001, 0.05, 0.5])
        q[s.N_SIGMA], q[s.TYPICAL] = r.choice([-1.0, 0.7, 2.0]), r.choice([0.3, 0.8, 1.0])
        q[s.XTC_PROBABILITY], q[s.XTC_THRESHOLD] = r.choice([0.0, 0.5, 1.0]), r.choice([0.02, 0.2, 0.6])
        q[s.REPEAT], q[s.FREQUENCY], q[s.PRESENCE] = r.choice([1.0, 1.3]), r.choice([0.0, 0.2]), r.choice([0.0, 0.5])
        q[s.MIN_KEEP], q[s.TARGET] = r.choice([0, 0, 1, 7]), r.choice([-1.0, 0.2, 0.7])
        q[s.RESET : s.RESET + 2] = r.choice([np.nan, 4.0]), r.choice([np.nan, 10.0])
    counts = r.integers(0, 12, n_rows)
    ptr = np.concatenate(([0], np.cumsum(counts)))
    kinds = r.integers(0, 3, counts.sum() + 3)
    ids = r.integers(0, n_vocab, len(kinds))
    values = np.where(kinds == 1, r.integers(1, 4, len(kinds)), r.normal(size=len(kinds)))
    values = np.where((kinds == 0) & (r.random(len(kinds)) < 0.3), -np.inf, values)
    logits = r.normal(size=(n_rows, n_vocab)) * r.choice([0.5, 3.0, 8.0])
    logits[r.random(logits.shape) < r.choice([0.0, 0.3])] = -np.inf
    slots = np.maximum(np.arange(n_rows) // 2, 0) - (r.random(n_rows) < 0.3)
    draws = r.integers(0, 2**32, (n_rows, 4), dtype=np.uint32)
    state = np.full((n_rows + 1, s.N_STATE), 5.0)
    return typed("sample", [logits, state, params, chain, draws, ptr, kinds, ids, values, slots])


def with_masks(r: np.random.Generator, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Masks of any density for some of the rows, and the second draws that they need."""
    n_rows, n_vocab = arrays[0].shape
    bits = r.random((3, -(-n_vocab // 32) * 32)) < np.array([[0.02], [0.5], [0.95]])
    bits[:, r.integers(0, n_vocab)] = True
    draws = r.integers(0, 2**32, (2 * n_rows, 4), dtype=np.uint32)
    words = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    return [*arrays[:4], draws, *arrays[5:], words, r.integers(-2, 3, n_rows, dtype=np.int32)]


def copies(arrays: list[np.ndarray]) -> list[np.ndarray]:
    return [a.copy() for a in arrays]


@settings(max_examples=150)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 65, 300, 2500]), st.booleans())
@example(96948, 2500, False)  # two tokens that are equally typical
def test_sample_agrees_with_the_reference(seed: int, n_vocab: int, masked: bool) -> None:
    r = np.random.default_rng(seed)
    arrays = rows_of(r, 6, n_vocab)
    arrays = with_masks(r, arrays) if masked else arrays
    ours, theirs = copies(arrays), copies(arrays)
    with np.errstate(all="ignore"):
        expected = sample.sample.reference(*theirs)
    words = run("sample", ours)
    same = words == expected
    # a rounding tie may fall the other way: move each logit by a hair to detect it
    if not same.all():
        for _ in range(16):
            near = copies(arrays)
            near[0] *= (1 + 3e-7 * r.normal(size=near[0].shape)).astype(np.float32)
            with np.errstate(all="ignore"):
                shifted = sample.sample.reference(*near)
            same |= (words == shifted) | (expected != shifted)
        assert same.all()
    else:
        assert np.allclose(ours[1], theirs[1], rtol=1e-3, equal_nan=True)


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_sample_does_not_depend_on_other_rows(seed: int) -> None:
    arrays = rows_of(np.random.default_rng(seed), 5, 700)
    arrays[9][:] = np.arange(5)
    together = run("sample", copies(arrays), n_threads=2)
    logits, state, params, chain, draws, ptr, kinds, ids, values, slot = arrays
    for r in range(5):
        one = slice(r, r + 1)
        lists = [np.append(a[ptr[r] : ptr[r + 1]], a.dtype.type(0)) for a in (kinds, ids, values)]  # one is unused
        end = np.array([0, ptr[r + 1] - ptr[r]], np.int32)
        alone = [logits[one], state.copy(), params[one], chain[one], draws[one], end, *lists, slot[one]]
        assert run("sample", [np.ascontiguousarray(a) for a in alone])[0, 0] == together[r, 0]


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_masked_rows_sample_allowed_tokens(seed: int) -> None:
    r = np.random.default_rng(seed)
    plain = rows_of(r, 8, 700)
    plain[0] = r.normal(size=(8, 700)).astype(np.float32)  # only the mask rules out a token
    plain[6][:] = 1
    plain[9][:] = np.arange(8)
    masked = with_masks(r, plain)
    words, rows = masked[10], masked[11]
    plain[4] = masked[4][::2].copy()
    without, words_out = run("sample", copies(plain)), run("sample", copies(masked))
    for i in range(8):
        id = int(words_out[i, 0]) & s.ID
        if rows[i] == -2:
            assert words_out[i, 0].view(np.uint32) == s.NO_DIST | s.NO_XTC
        elif rows[i] == -1:
            assert words_out[i, 0] == without[i, 0]
        else:
            assert words[rows[i], id // 32] >> (id % 32) & 1
            before = int(without[i, 0]) & s.ID
            # was allowed, so nothing is sampled again
            if words[rows[i], before // 32] >> (before % 32) & 1:
                assert words_out[i, 0] == without[i, 0]


def test_disallowed_token_is_resampled_with_the_next_draws() -> None:
    arrays = typed("sample", sample.make_case(np.random.default_rng(4), ["dist"] * 2)[0])
    arrays[5][:] = 0
    first = int(run("sample", copies(arrays))[0, 0]) & s.ID
    bits = np.ones((1, sample.PERTURB), bool)
    bits[0, first] = False
    draws = np.stack([arrays[4][0], arrays[4][1]] * 2)
    masks = [np.packbits(bits, axis=1, bitorder="little").view(np.uint32), np.array([0, -1], np.int32)]
    word = int(run("sample", [*copies(arrays[:4]), draws, *copies(arrays[5:]), *masks]).view(np.uint32)[0, 0])
    alone = copies(arrays)
    alone[0][0, first] = -np.inf
    alone[4][0] = arrays[4][1]
    assert word & s.ID == int(run("sample", alone)[0, 0]) & s.ID
    assert s.used(word) == (2, 0)


@pytest.mark.parametrize("bad", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("name", sample.CASES)
def test_impossible_logits_give_a_valid_token(name: str, bad: float) -> None:
    sources, _ = sample.make_case(np.random.default_rng(1), [name] * 2)
    arrays = typed("sample", sources)
    arrays[0][0] = bad
    arrays[0][1, ::2] = bad
    words = run("sample", arrays).view(np.uint32)
    assert ((words & s.ID) < sample.PERTURB).all()


def test_empty_chain_gives_id_0_without_draws() -> None:
    arrays = typed("sample", sample.make_case(np.random.default_rng(0), ["dist"])[0])
    arrays[3][:] = 0
    assert run("sample", arrays).view(np.uint32).tolist() == [[s.NO_DIST | s.NO_XTC]]


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    arrays = typed("sample", sample.make_case(np.random.default_rng(0), ["greedy"])[0])
    arrays[5][:] = 0  # no entries
    arrays[0][0, [401, 77, 300]] = 50
    assert run("sample", arrays)[0, 0] & s.ID == 77


def test_drafts_reuse_unconsumed_draws() -> None:
    """Rows of one slot give what separate steps would, if the first consumes none of its uniforms."""
    arrays = typed("sample", sample.make_case(np.random.default_rng(3), ["greedy", "dist", "dist"])[0])
    arrays[9][:] = 2
    together = run("sample", copies(arrays)) & s.ID
    arrays[9][:] = -1
    arrays[4][1:] = arrays[4][:2].copy()
    assert (run("sample", arrays) & s.ID == together).all()


@pytest.mark.parametrize("name", [n for n in sample.CASES if n != "mirostat 1"])
def test_probabilities_after_sampling(name: str) -> None:
    sources, _ = sample.make_case(np.random.default_rng(5), [name] * 3)
    ours, theirs = typed("sample", sources), typed("sample", sources)
    out, expected = run("sample", ours, n_probs=6), sample.sample.reference(*theirs, n_probs=6)
    assert (out[:, :2] == expected[:, :2]).all()
    assert (out[:, 3:9] == expected[:, 3:9]).all()
    values, expected = out.view(np.float32), expected.view(np.float32)
    assert values[:, 2] == pytest.approx(expected[:, 2], rel=1e-5)
    assert values[:, 9:] == pytest.approx(expected[:, 9:], rel=1e-5)


def test_log_probabilities_of_a_large_vocabulary() -> None:
    r = np.random.default_rng(0)
    logits = (r.normal(size=(3, 100_003)) * 4).astype(np.float32)
    logits[1, 5:9] = logits[1].max() + 1  # equal values: lowest id first
    ids = np.array([[7 | s.NO_XTC - (1 << 32)], [3], [99]], np.int32)
    targets = np.array([-1, 100_002, -1], np.int32)
    out = run("log_probs", [logits, ids, targets], n=20)
    expected = sample.log_probs.reference(logits.astype(np.float64), ids, targets, n=20)
    assert (out[:, 1:21] == expected[:, 1:21]).all()
    assert out == pytest.approx(expected, abs=3e-6)


def test_whole_vocabulary_is_sorted() -> None:
    """top_k beyond a vocabulary of 5000 equal pairs: the radix sort, and the order of equals."""
    arrays = typed("sample", sample.make_case(np.random.default_rng(0), ["default"])[0])
    arrays[0] = np.repeat(np.random.default_rng(2).normal(size=(1, 2500)), 2, 1).astype(np.float32)
    arrays[2][0, s.K] = 1e6
    arrays[3][0, :3] = s.TOP_K, s.DIST, 0
    arrays[5][:] = 0
    out, expected = run("sample", copies(arrays), n_probs=100), sample.sample.reference(*copies(arrays), n_probs=100)
    assert (out[:, 3:103] == expected[:, 3:103]).all()
    assert out[0, 1] == 5000


def test_scratch_suffices_for_every_size() -> None:
    """The memory after the scratch stays untouched, at sizes around the block's."""
    from logitless.backends.cpu.lowering.sampling import scratch_nbytes

    for n in (1, 63, 64, 65, 1000, 4097):
        size = -(-n // 64) * 64
        used = 512 + (size // 16 + 64) + size * 8 + size * 24 + 16384
        assert used <= scratch_nbytes(n)
    assert sampling_kernel.pool().n_threads == 1

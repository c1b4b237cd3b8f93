"""Random sampler chains on devices: ids and states of the numpy reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from logitless.backends.gpu.language.dialect import SIMT
from logitless.graph.backend import Backend
from logitless.graph.execution.session import Session
from logitless.graph.ops.sampling import sample
from logitless.graph.ops.sampling import samplers as s
from logitless.graph.tensor import Tensor, feed
from logitless.graph.testing.conformance import OK, problems, register_all
from logitless.graph.testing.conformance import run as judge
from tests.backends.cpu.kernels.test_sampling import copies, rows_of, with_masks
from tests.helpers.sampling_kernel import DTYPES, typed

register_all()


@pytest.fixture
def gpu(open_device: Callable[[str], Backend]) -> Iterator[Backend]:
    """A device as if it were a GPU with groups of 512 threads. Those of 256 have the same text."""
    from logitless.backends.vulkan.backend import VulkanBackend

    open_device("vulkan:0")
    backend = VulkanBackend()
    backend.shape = replace(SIMT, threads=1024, dot=True)
    yield backend
    backend.close()


def run(backend: Backend, arrays: list[np.ndarray], n_probs: int) -> np.ndarray:
    """`sample` on the device; writes the state among the arrays, as the reference does."""
    session, sources, feeds = Session([backend]), [], {}
    for i, (array, dtype) in enumerate(zip(arrays, DTYPES["sample"], strict=False)):
        if i == 1:
            raw = array.copy().reshape(-1).view(np.uint8)
            sources.append(session.define("state", array.shape, "f32", lambda raw=raw: raw))  # type: ignore[misc]
        else:
            sources.append(feed(f"s{i}", array.shape, dtype))
            feeds[f"s{i}"] = array
    node: Tensor = sample.sample(*sources, n_probs=n_probs)
    (words,) = session.plan(lambda: [node]).run(feeds)
    arrays[1][...] = session.read("state")
    result: np.ndarray = words
    return result


@pytest.mark.parametrize("device", ["opencl:0", "vulkan:0"])
@pytest.mark.parametrize("n_vocab", [1, 2, 65, 300, 2500])
def test_random_sampler_chains_match_the_reference(
    device: str, n_vocab: int, open_device: Callable[[str], Backend]
) -> None:
    backend = open_device(device)
    for seed in range(8):
        r = np.random.default_rng([n_vocab, seed])
        arrays = rows_of(r, 6, n_vocab)
        arrays[9][:] = np.arange(6) // 2  # two rows of each of three sequences
        arrays = with_masks(r, arrays) if seed % 2 else arrays
        ours, theirs, near = copies(arrays), copies(arrays), copies(arrays)
        near[0] *= np.float32(1 + 2e-6)
        n_probs = (0, 3)[seed // 2 % 2]
        with np.errstate(all="ignore"):
            expected = sample.sample.reference(*theirs, n_probs=n_probs)
            moved = sample.sample.reference(*near, n_probs=n_probs)
        words = run(backend, ours, n_probs)
        same = words[:, 0] == expected[:, 0]
        # a rounding tie may fall the other way: it does so too when the logits are moved by a hair
        assert (same | (words[:, 0] == moved[:, 0]) | (expected[:, 0] != moved[:, 0])).all()
        if same.all():
            np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-3)
            if n_probs:
                assert (words[:, 1] == expected[:, 1]).all()  # how many candidates are left


@pytest.mark.parametrize("op", ["sample", "log_probs"])
def test_sampling_kernels_of_gpus_match_the_reference(op: str, gpu: Backend) -> None:
    outcomes = [judge(problem, [gpu]) for problem in problems(op)]
    assert [o for o in outcomes if o.status != OK] == []


def arrays_of(r: np.random.Generator, variants: list[int]) -> list[np.ndarray]:
    """Rows, each of a sequence of its own, whose chains need these variants of the kernel; some have masks."""
    arrays = with_masks(r, rows_of(r, len(variants), 700))
    arrays[9][:] = np.arange(len(variants))
    for row, variant in zip(arrays[3], variants, strict=True):
        codes = [code for code in range(1, 10) if s.variant_of(np.array(code)) <= variant]
        n = int(r.integers(0, 8))
        row[:] = s.END
        row[:n] = r.choice(codes, n)
        row[n] = (s.GREEDY, s.DIST, r.choice([s.MIROSTAT_1, s.MIROSTAT_2, s.ADAPTIVE]))[variant]
        assert s.variant_of(row) == variant
    return arrays


def only(arrays: list[np.ndarray], rows: list[int]) -> list[np.ndarray]:
    """Some of the rows, with their draws and entries."""
    logits, state, params, chain, draws, ptr, *lists, slot, mask, mask_row = arrays
    entries = np.concatenate([np.arange(ptr[r], ptr[r + 1]) for r in rows] + [[0]])  # the last one is unused
    ends = np.cumsum([0, *(ptr[r + 1] - ptr[r] for r in rows)], dtype=np.int32)
    draws = draws.reshape(-1, 2, 4)[rows].reshape(-1, 4)
    return [logits[rows], state.copy(), params[rows], chain[rows], draws, ends, *(a[entries] for a in lists),
            slot[rows], mask, mask_row[rows]]  # fmt: skip


@pytest.mark.parametrize("device", ["opencl:0", "vulkan:0", "gpu"])
def test_variants_of_the_kernel_and_batches_of_any_rows_give_the_same_bits(
    device: str, open_device: Callable[[str], Backend], gpu: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, needs = gpu if device == "gpu" else open_device(device), s.variant_of
    for seed in range(3):
        arrays = arrays_of(np.random.default_rng(seed), [0, 2, 1, 0, 1, 2, 0, 1])
        together = copies(arrays)
        words = run(backend, together, 0)
        for variant, rows in ((0, [0, 3, 6]), (1, [2, 4, 7]), (1, [0, 2, 3, 4, 6, 7]), *((2, [r]) for r in range(8))):
            for least in {0, variant}:
                monkeypatch.setattr(s, "variant_of", lambda chains, least=least: max(least, needs(chains)))
                part = only(arrays, rows)
                assert (run(backend, part, 0) == words[rows]).all()
                assert part[1][rows].tobytes() == together[1][rows].tobytes()
            monkeypatch.setattr(s, "variant_of", needs)


CHAINS = (
    (s.GREEDY,),
    (s.DIST,),
    (s.TOP_K, s.TOP_P, s.MIN_P, s.TEMPERATURE, s.DIST),
    (s.TEMPERATURE, s.TOP_P, s.DIST),
    (s.TYP_P, s.DIST),
    (s.MIN_P, s.DIST),
    (s.XTC, s.TOP_K, s.DIST),
)


# logits of a value: none, more than a group's threads, all
@pytest.mark.parametrize("n_equal", [1, 700, 40_000])
# few of a short list, few of more than a thread each, most
@pytest.mark.parametrize("n_top", [3, 90, 30_000])
def test_equal_logits_come_in_order_of_ids(n_equal: int, n_top: int, gpu: Backend) -> None:
    """Ties that reach over the parts of the list that threads have, cut by a count, a mass and a
    draw.
    """
    r, n_vocab, rows = np.random.default_rng([n_equal, n_top]), 40_007, len(CHAINS)
    logits = np.floor(r.permuted(np.tile(np.arange(n_vocab), (rows, 1)), axis=1) / n_equal) * (9 * n_equal / n_vocab)
    logits[:, r.integers(0, n_vocab, 9)] = -np.inf
    params, chain = np.tile(sample.default_params(), (rows, 1)), np.zeros((rows, 6), np.int32)
    params[:, s.K], params[:, s.P], params[:, s.LEAST_P], params[:, s.TYPICAL] = n_top, 0.7, 0.02, 0.4
    params[:, [s.XTC_PROBABILITY, s.XTC_THRESHOLD]] = 1, 3e-5
    for row, codes in zip(chain, CHAINS, strict=True):
        row[: len(codes)] = codes
    draws, none = r.integers(0, 2**32, (rows, 4), dtype=np.uint32), np.zeros(1)
    lists = [np.zeros(rows + 1), none, none, none]
    arrays = typed("sample", [logits, np.zeros((rows, 4)), params, chain, draws, *lists, np.arange(rows)])
    for n_probs in (0, 5):
        expected = sample.sample.reference(*copies(arrays), n_probs=n_probs)
        words = run(gpu, copies(arrays), n_probs)
        assert (words[:, : 2 if n_probs else 1] == expected[:, : 2 if n_probs else 1]).all()
        assert (words[:, 3 : 3 + n_probs] == expected[:, 3 : 3 + n_probs]).all()

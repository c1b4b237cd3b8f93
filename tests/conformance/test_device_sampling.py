"""Random chains of samplers on devices: the ids of the definition, and the same state afterwards."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from graph.backend import Backend
from graph.ops import select
from graph.session import Session
from graph.tensor import Tensor, feed
from tests.unit.sampling_kernel import DTYPES
from tests.unit.test_sampling_kernel import copies, rows_of, with_masks


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
    node: Tensor = select.sample(*sources, n_probs=n_probs)
    (words,) = session.plan(lambda: [node]).run(feeds)
    arrays[1][...] = session.read("state")
    result: np.ndarray = words
    return result


@pytest.mark.parametrize("device", ["opencl:0", "vulkan:0"])
@pytest.mark.parametrize("n_vocab", [1, 2, 65, 300, 2500])
def test_random_chains(device: str, n_vocab: int, open_device: Callable[[str], Backend]) -> None:
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
            expected = select.sample.reference(*theirs, n_probs=n_probs)
            moved = select.sample.reference(*near, n_probs=n_probs)
        words = run(backend, ours, n_probs)
        same = words[:, 0] == expected[:, 0]
        # a rounding tie may fall the other way: it does so too when the logits are moved by a hair
        assert (same | (words[:, 0] == moved[:, 0]) | (expected[:, 0] != moved[:, 0])).all()
        if same.all():
            np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-3)
            if n_probs:
                assert (words[:, 1] == expected[:, 1]).all()  # how many candidates are left

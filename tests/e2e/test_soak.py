"""A short soak (scripts/soak runs the long one): random clients and one kill -9."""

from __future__ import annotations

import pytest
import soak


def test_soak() -> None:
    if not soak.MODEL.exists():
        pytest.skip("no stories260K.gguf beside the checkout")
    run, figures = soak.soak(seconds=8, n_clients=8, n_kills=1, seed=1)
    assert not run.wrong, figures
    assert run.counts["texts compared"] > 3
    assert run.counts["kills"] == 1

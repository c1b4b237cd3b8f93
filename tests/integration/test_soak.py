"""Soak of twelve seconds, by hand (scripts/soak runs half an hour): random clients and one kill -9."""

from __future__ import annotations

import pytest

from tests.helpers import soak


@pytest.mark.long
def test_soak() -> None:
    if not soak.MODEL.exists():
        pytest.skip("no stories260K.gguf beside the checkout")
    run, figures = soak.soak(seconds=12, n_clients=16, n_kills=1, seed=1, pause=0.5)
    assert not run.wrong, (run.wrong, figures)
    assert run.counts["texts compared"] > 20
    assert run.counts["kills"] == 1

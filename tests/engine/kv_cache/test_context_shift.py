"""Numbers of kept and discarded tokens of a context shift."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from logitless.engine.kv_cache.context_shift import kept_and_discarded


@pytest.mark.parametrize(
    ("n_keep", "n_discard", "add_bos", "kept", "discarded"),
    [
        (0, 0, False, 0, 31),  # half of what is not kept, as in llama-server
        (0, 0, True, 1, 31),
        (10, 0, True, 11, 26),
        (-1, 0, False, 20, 21),  # the whole prompt
        (100, 0, True, 60, 1),  # four tokens of the context are never kept
        (0, 5, True, 1, 5),
        (50, 90, False, 50, 13),
    ],
)
def test_kept_and_discarded_are_those_of_llama_server(
    n_keep: int, n_discard: int, add_bos: bool, kept: int, discarded: int
) -> None:
    request = SimpleNamespace(n_keep=n_keep, n_discard=n_discard)
    seq: Any = SimpleNamespace(slot=SimpleNamespace(n_ctx=64), request=request, n_prompt=20, n_computed=63)
    assert kept_and_discarded(seq, add_bos=add_bos) == (kept, discarded)

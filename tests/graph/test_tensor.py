"""Tensors are immutable."""

from __future__ import annotations

import pytest

from logitless.graph.tensor import feed


def test_tensors_are_immutable() -> None:
    x = feed("x", (2,))
    with pytest.raises(AttributeError):
        x.shape = (3,)  # type: ignore[misc]
    with pytest.raises(TypeError):
        x.attrs["factor"] = 1  # type: ignore[index]

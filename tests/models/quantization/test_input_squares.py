"""Sums of squared inputs: those of a float64 reference and of llama.cpp's own activations, also by expert."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.backends.registry import open_backends
from logitless.graph.execution.session import Session
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import define_model, hparams_of
from logitless.models.quantization.input_squares import InputSquares
from logitless.models.weights.weights import check_weights
from tests.helpers.llama_cpp_library import activations, needs_llama_cpp
from tests.helpers.reference_model import Spec, reference, write

DENSE = Spec(n_embd=64, n_ff=96, n_vocab=512, dtype="f32", vocabulary=True)
EXPERTS = replace(DENSE, n_expert=4, n_expert_used=2)
N_CTX = 32


class Watched(np.ndarray[Any, Any]):
    """A weight that keeps the inputs of the products with it."""

    name: str
    expert: int
    inputs: dict[tuple[str, int], list[np.ndarray[Any, Any]]]

    def __array_finalize__(self, other: Any) -> None:
        self.name, self.expert = getattr(other, "name", ""), getattr(other, "expert", 0)
        self.inputs = getattr(other, "inputs", {})

    def __getitem__(self, place: Any) -> Any:
        result = super().__getitem__(place)
        if isinstance(result, Watched) and self.ndim == 3 and np.ndim(place) == 0:
            result.expert = int(place)
        return result

    def __rmatmul__(self, x: Any) -> Any:
        self._keep(x)
        return np.asarray(x) @ np.asarray(self)

    def __matmul__(self, x: Any) -> Any:
        self._keep(x)
        return np.asarray(self) @ np.asarray(x)

    def _keep(self, x: Any) -> None:
        self.inputs.setdefault((self.name, self.expert), []).append(np.atleast_2d(np.asarray(x)))


def windows(s: Spec, n: int = 2) -> np.ndarray[Any, Any]:
    return np.random.default_rng(5).integers(3, s.n_vocab, (n, N_CTX)).astype(np.int32)


def ours(path: Path, tokens: np.ndarray[Any, Any], *, output: bool = False) -> dict[str, tuple[Any, Any]]:
    with GGUFFile.open(path) as gguf, Session(open_backends(["cpu"], 1)) as session:
        h = hparams_of(gguf)
        model = define_model(session, gguf, h, N_CTX)
        squares = InputSquares(session, model, gguf, check_weights(gguf, h), N_CTX, output=output)
        for window in tokens:
            squares.add(window)
        return squares.result()


@pytest.mark.parametrize("s", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_sums_are_those_of_the_reference(s: Spec, tmp_path: Path) -> None:
    tensors, tokens = write(tmp_path / "m.gguf", s), windows(s)
    inputs: dict[tuple[str, int], list[np.ndarray[Any, Any]]] = {}
    names = {n for n, values in tensors.items() if n.startswith(("blk.", "output.weight")) and values.ndim > 1}
    watched = {name: np.asarray(values, np.float64) for name, values in tensors.items()}
    for name in names:
        watched[name] = matrix = watched[name].view(Watched)
        matrix.name, matrix.inputs = name, inputs
    frequency = 10000.0 ** (-np.arange(0, s.d, 2) / s.d)
    for window in tokens:
        reference(s, watched, window, lambda _: (frequency, 1.0), lambda _: 0, s.d**-0.5, (0, 0))
    got = ours(tmp_path / "m.gguf", tokens, output=True)
    assert got.keys() == names
    for name, (sums, counts) in got.items():
        for expert in range(len(counts)):
            rows = np.concatenate(inputs.get((name, expert), [np.zeros((0, sums.shape[1]))]))
            assert counts[expert] == len(rows), (name, expert)
            np.testing.assert_allclose(sums[expert], np.square(rows).sum(axis=0), rtol=2e-4, atol=1e-7)


@needs_llama_cpp
@pytest.mark.parametrize("s", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_sums_are_those_of_llama_cpp(s: Spec, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", s)
    tokens = windows(s)
    theirs = activations(tmp_path / "m.gguf", tokens, s.n_vocab, tmp_path)
    got = ours(tmp_path / "m.gguf", tokens)
    assert {f"{name}.sums" for name in got} == {key for key in theirs if key.endswith(".sums")}
    for name, (sums, counts) in got.items():
        np.testing.assert_array_equal(counts, theirs[f"{name}.counts"], name)
        # its keys and values are rounded to f16
        np.testing.assert_allclose(sums, theirs[f"{name}.sums"], rtol=1e-2, atol=1e-6, err_msg=name)

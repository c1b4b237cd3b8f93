"""The examples learn, and their commands run."""

from __future__ import annotations

import gzip
import math
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from examples import mnist, sine
from examples.lbfgs import minimize
from examples.network import Batches
from examples.sine import N_BATCH, N_STEPS, OPTIMIZERS, Sine, picture, wave
from logitless.graph.execution.session import Session
from logitless.training.errors import TrainingError


def drawn_wrong(toy: Sine) -> float:
    """Error of the drawn heights: the mean over three periods, at the worst phase."""
    phases = [i * 2 * np.pi / 16 + 0.1 for i in range(16)]
    return max(float(np.abs(np.array(toy.draw(48, phase)) - wave(phase, 8 + 48)[8:]).mean()) for phase in phases)


def test_the_toy_learns_waves(session: Session, tmp_path: Path) -> None:
    toy = Sine(session, tmp_path)
    assert drawn_wrong(toy) > 2
    losses = toy.train()
    assert len(losses) == 32
    assert losses[-1] < losses[0] / 4
    assert toy.n_evaluations < 32 * 24  # a line search takes little more than one a time
    assert drawn_wrong(toy) < 0.4
    assert wave(0.0, 17).tolist() == [4, 5, 6, 7, 7, 7, 6, 5, 4, 2, 1, 0, 0, 0, 1, 2, 3]
    assert picture([1, 0, 2]).splitlines() == ["   *", "*", "      *"]


def test_the_command_draws_what_the_toy_has_learned(capsys: pytest.CaptureFixture[str]) -> None:
    sine.main(["-t", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:32]] == [f"batch {i}" for i in range(1, 33)]
    heights = [line.index("*") // 3 for line in lines[33:]]
    assert np.abs(np.array(heights) - wave(0.0, 8 + 48)[8:]).mean() < 0.4


def waves(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    heights = np.stack([wave(rng.uniform(0, 2 * math.pi), 9) for _ in range(N_BATCH)])
    return heights[:, :-1], heights[:, 1:]


def test_lbfgs_is_as_good_as_scipys_and_beats_adamw_after_equally_many_evaluations(
    session: Session, tmp_path: Path
) -> None:
    """For one batch. SciPy 1.17's L-BFGS-B (maxcor=6, ftol=0) on the same loss has 9.906, 6.810, 5.465 and 5.061."""
    tokens, labels = waves(5)
    toy, seen = Sine(session, tmp_path), [math.inf]

    def evaluate(x: np.ndarray) -> tuple[float, np.ndarray]:
        toy.write(x)
        loss, gradient = toy.loss(tokens, labels)
        seen.append(min(seen[-1], loss))
        return loss, gradient

    minimize(evaluate, toy.read(), n_iter=200)
    own = Session(session.backends)
    adamw = Sine(own, tmp_path, optimizer="adamw")
    for n, scipys in ((24, 9.906), (48, 6.810), (96, 5.465), (192, 5.061)):
        assert seen[n] <= 1.01 * scipys
        while adamw.n_evaluations < n:
            adamw.learn(tokens, labels, adamw.n_evaluations // N_STEPS)
        assert adamw.n_evaluations == n
        own_loss = adamw.loss(tokens, labels)[0]
        adamw.n_evaluations -= 1
        assert seen[n] < own_loss, n
    own.release()


def test_lbfgs_beats_adamw_on_waves_that_neither_has_seen(session: Session, tmp_path: Path) -> None:
    """After four batches, with fewer evaluations."""
    after, evaluations = {}, {}
    for optimizer in OPTIMIZERS:
        own = Session(session.backends)
        toy = Sine(own, tmp_path, optimizer=optimizer)
        toy.train(4)
        evaluations[optimizer] = toy.n_evaluations
        after[optimizer] = np.mean([toy.loss(*waves(seed))[0] for seed in range(5)])
        own.release()
    assert evaluations["adamw"] >= evaluations["lbfgs"]
    assert after["lbfgs"] < 0.9 * after["adamw"], after


def test_the_toy_learns_by_cross_entropy_too(session: Session, tmp_path: Path) -> None:
    losses = Sine(session, tmp_path, loss_kind="cross-entropy", optimizer="adamw").train(3)
    assert losses[0] > 8 * np.log(8)  # of a row's eight guesses, knowing nothing
    assert losses[-1] < 8 * np.log(8) - 2


def test_products_of_thin_matrices_learn_too(session: Session, tmp_path: Path) -> None:
    """Every matrix but the embedding is B · A and nothing else."""
    toy = Sine(session, tmp_path, rank=4)
    assert toy.trainable.n_params == 8 * 32 + 3 * 32 + 4 * (4 * 64 + 3 * 128)  # embedding, norms, r · (n_in + n_out)
    losses = toy.train(4)
    assert losses[-1] < 0.75 * losses[0]


def digits(shared_data: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    whole = mnist.load(shared_data / "mnist")
    assert [len(whole[name][0]) for name in ("train", "test")] == [60000, 10000]
    (x, y), (u, v) = whole["train"], whole["test"]
    return {"train": (x[:3000], y[:3000]), "test": (u[:1000], v[:1000])}


@pytest.mark.parametrize(("kind", "least"), [("fc", 0.85), ("cnn", 0.7)])
def test_networks_learn_digits(kind: str, least: float, session: Session, shared_data: Path) -> None:
    data = digits(shared_data)
    network = getattr(mnist, kind)(session, 0, Batches(100, 50))
    seen = []
    test = mnist.train(network, data, 2, on_epoch=lambda i, t, v: seen.append((i, t.loss, v.n_data)))
    assert [i for i, _, _ in seen] == [1, 2]
    assert seen[1][1] < seen[0][1]
    assert seen[0][2] == 150
    assert test.n_data == 1000
    assert test.accuracy > least


@pytest.mark.skipif("LOGITLESS_SLOW" not in os.environ, reason="minutes: LOGITLESS_SLOW=1 runs it")
@pytest.mark.parametrize(("name", "least"), [("mnist-fc", 0.975), ("mnist-cnn", 0.983)])
def test_all_digits_are_learned(name: str, least: float, session: Session, shared_data: Path) -> None:
    network = {"mnist-fc": mnist.fc, "mnist-cnn": mnist.cnn}[name](session, 1337)
    assert mnist.train(network, mnist.load(shared_data / "mnist"), mnist.EPOCHS[name], 1337).accuracy >= least


def test_one_logical_batch_is_its_physical_ones(session: Session, shared_data: Path) -> None:
    x, y = digits(shared_data)["train"]
    found = []
    for physical in (100, 25):
        own = Session(session.backends)
        network = mnist.fc(own, 0, Batches(100, physical))
        network.epoch(network.table("digits", x, y), np.arange(200, dtype=np.int32))
        found.append({name: own.read(p.name) for name, p in network.params.items()})
        own.release()
    for name in found[0]:
        np.testing.assert_allclose(found[0][name], found[1][name], atol=2e-4)
    with pytest.raises(TrainingError, match="a logical batch of 100 is not a multiple of 30"):
        Batches(100, 30)


def test_files_that_are_not_digits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        mnist.load(tmp_path)
    header = gzip.compress(struct.pack(">4I", 0x803, 2, 28, 28))
    damaged = header[:12] + bytes([255]) + header[13:]
    for raw, told in ((b"no gzip", "Not a gzipped file"), (damaged, "Error -3"), (header, "wrong header")):
        (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(raw)
        with pytest.raises(TrainingError, match=f"is not an IDX file of 3 dimensions: {told}"):
            mnist.load(tmp_path)


@pytest.mark.parametrize("words", [["--data", "nowhere"], ["--data", "nowhere", "--device", "abacus"]])
def test_user_error_is_one_line(words: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"^error: .*(nowhere|abacus)[^\n]*$"):
        mnist.main(words)

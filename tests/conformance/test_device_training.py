"""Training on OpenCL and Vulkan: the CPU's losses; parameters and moments stay on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import mnist
from examples.network import Batches
from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.backend import Backend
from logitless.graph.execution.session import Session
from logitless.graph.ops.elementwise import add, scale, silu
from logitless.graph.ops.linear import linear
from logitless.graph.tensor import Tensor, feed
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import define_model, hparams_of
from logitless.models.synthetic.model import ModelShape
from logitless.training.adapters.lora import lora
from logitless.training.adapters.options import LoraOptions
from logitless.training.checkpoint import read_checkpoint, save_checkpoint
from logitless.training.config import TrainingConfig
from logitless.training.data.packing import StridedSamples
from logitless.training.data.sampler import Sampler
from logitless.training.scratch import new_model
from logitless.training.step import Slice
from logitless.training.trainable import FULL, LORA, full
from logitless.training.trainer import Step, Trainer

TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 12, np.uint8).astype(np.int32) + 3
N_BATCH, N_CTX, N_STEPS = 2, 16, 5
DEVICES = ["opencl:0", "vulkan:0"]
Start = Callable[..., Trainer]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    new_model(path, None, ModelShape(32, 2, 4, 2, 48, 0, n_ctx=64), seed=3)
    return path


@pytest.fixture(scope="module")
def cpu() -> Iterator[Backend]:
    backend = CPUBackend(1)
    yield backend
    backend.close()


@pytest.fixture
def start(model: Path, cpu: Backend) -> Iterator[Start]:
    """A run on a session of its own, whose devices belong to other tests too."""
    with GGUFFile.open(model) as gguf:

        def make(kind: str, device: Backend, *, apart: bool = False, **changes: object) -> Trainer:
            session, h = Session([device, cpu] if device is not cpu else [cpu]), hparams_of(gguf)
            base = define_model(session, gguf, h, 64)
            options = LoraOptions(rank=3, alpha=6.0)
            trainable = lora(session, base, options) if kind == LORA else full(session, base, gguf, h)
            data = StridedSamples(TEXT, N_CTX)
            limits = {"ctx_size": N_CTX, "batch_size": N_BATCH, "iterations": N_STEPS}
            default = {**limits, "learning_rate": 1e-2, "weight_decay": 0.1}
            indices = np.arange(len(data), dtype=np.int32)
            settings = TrainingConfig(**(default | changes))  # type: ignore[arg-type]
            return Trainer(trainable, settings, Sampler(data, indices[:-4], "text", 5), indices[-2:], apart=apart)

        yield make


def losses(trainer: Trainer) -> list[float]:
    results: list[float] = []
    trainer.fit(lambda e: results.append(e.loss) if isinstance(e, Step) else None)
    return results


def count_bytes(device: Backend, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes that cross to the device and back from now on."""
    n = {"up": 0, "down": 0}
    upload, download = device.upload, device.download

    def counted_upload(place: Any, data: Any) -> None:
        n["up"] += len(data)
        upload(place, data)

    def counted_download(place: Any, nbytes: int) -> Any:
        n["down"] += nbytes
        return download(place, nbytes)

    monkeypatch.setattr(device, "upload", counted_upload)
    monkeypatch.setattr(device, "download", counted_download)
    return n


def on_one_device(session: Session, build: Callable[[], list[Tensor]]) -> bool:
    """The first, with all states."""
    placement, _ = session.measure(build)
    return {segment.backend for segment in placement.segments} == {0} == set(placement.variable_backend.values())


@pytest.mark.parametrize("kind", [LORA, FULL])
@pytest.mark.parametrize("device", DEVICES)
def test_training_on_a_device_has_the_losses_of_the_cpu(
    device: str,
    kind: str,
    start: Start,
    cpu: Backend,
    open_device: Callable[[str], Backend],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = open_device(device)
    trainer = start(kind, backend)
    session, crossed, results = trainer.trainable.session, {"up": 0, "down": 0}, []
    rows = N_BATCH * N_CTX
    for event in trainer.work():
        if isinstance(event, Step):
            results.append(event.loss)
            # the first step makes the plan, and brings the parameters to the device
            if event.iteration == 1:
                crossed = count_bytes(backend, monkeypatch)
            else:
                # losses, likeliest tokens and the gradient's norm; before the last save they are measured again
                n_runs = 2 if event.iteration == N_STEPS else 1
                assert 0 <= n_runs * 4 * (2 * rows + 1) - crossed["down"] <= (n_runs - 1) * 4 * (rows + 1)
                # feeds, each with its padding
                assert 4 * 5 * rows <= crossed["up"] <= n_runs * (4 * 5 * rows + 8192)
            crossed.update(up=0, down=0)
            if event.iteration == N_STEPS:
                break
    assert on_one_device(session, trainer.steps._step)
    assert set(trainer.steps.state_names()) <= session.cached_plan(("train", "step"), list).variables
    # the bound above would tell if they moved
    assert 4 * 5 * rows + 8192 < trainer.steps.optimizer_nbytes
    expected = losses(start(kind, cpu))
    assert expected[-1] < expected[0] - 0.1
    np.testing.assert_allclose(results, expected, rtol=0.01)
    trained = trainer.trainable.read()
    assert crossed["down"] == sum(values.nbytes for values in trained.values())


@pytest.mark.parametrize("device", DEVICES)
def test_resumed_training_ends_with_the_same_bytes(
    device: str, start: Start, open_device: Callable[[str], Backend], tmp_path: Path
) -> None:
    """Checkpoints read the device's parameters and moments back; accumulated gradients and SGD run
    there too. The rest is left at every part for another run, whose arena is filled with numbers.
    """
    backend = open_device(device)
    whole = start(LORA, backend, grad_acc=2, iterations=4)
    losses(whole)
    part = start(LORA, backend, grad_acc=2, iterations=2)
    losses(part)
    save_checkpoint(tmp_path / "c.gguf", part, "llama")
    rest = start(LORA, backend, apart=True, grad_acc=2, iterations=4)
    assert read_checkpoint(tmp_path / "c.gguf").restore(rest)
    x = np.full((1 << 16,), 7.0, np.float32)
    other = rest.trainable.session.plan(lambda: [add(silu(feed("x", x.shape)), scale(feed("y", x.shape), factor=2.0))])
    n_parts = 0
    for event in rest.work():
        if isinstance(event, Slice):
            n_parts += 1
            if n_parts % 16 == 1:
                other.run({"x": x, "y": x}, [0])
    assert n_parts > 50
    expected = whole.trainable.read()
    assert all(values.tobytes() == expected[name].tobytes() for name, values in rest.trainable.read().items())
    assert on_one_device(rest.trainable.session, rest.steps._accumulate)
    assert on_one_device(rest.trainable.session, rest.steps._step_of_totals)


@pytest.mark.parametrize("device", DEVICES)
def test_sgd_on_a_device_has_the_losses_of_the_cpu(
    device: str, start: Start, cpu: Backend, open_device: Callable[[str], Backend]
) -> None:
    results = losses(start(FULL, open_device(device), optimizer="sgd", iterations=2))
    np.testing.assert_allclose(results, losses(start(FULL, cpu, optimizer="sgd", iterations=2)), rtol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["fc", "cnn"])
def test_digit_networks_on_a_device_have_the_losses_of_the_cpu(
    kind: str, device: str, cpu: Backend, open_device: Callable[[str], Backend]
) -> None:
    """Dense and convolutional networks on made-up digits: the losses of the CPU."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, 64).astype(np.int32)
    media = rng.random((64, 28, 28), np.float32) * np.float32(0.1)
    for medium, label in zip(media, y, strict=True):
        medium[label // 5 * 12 + 2 :, label % 5 * 5 + 1 :][:5, :4] = 1
    results = []
    for backends in ([open_device(device), cpu], [cpu]):
        session = Session(backends)
        network = getattr(mnist, kind)(session, 0, Batches(32, 16))
        data = network.table("digits", media.reshape(64, -1), y)
        result = network.epoch(data, np.arange(64, dtype=np.int32))
        assert on_one_device(session, partial(network._step, data))
        results.append(result.losses)
    assert results[1][-1] < results[1][0]
    np.testing.assert_allclose(results[0], results[1], rtol=0.01)


@pytest.mark.parametrize("device", DEVICES)
def test_product_rows_are_batch_invariant(device: str, open_device: Callable[[str], Backend]) -> None:
    """Few rows and many have kernels of their own, and adapters run through both."""
    session, rng = Session([open_device(device)]), np.random.default_rng(6)
    w, x = session.define("w", (70, 300)), rng.normal(size=(41, 300)).astype(np.float32)
    session.write("w", rng.normal(size=(70, 300)).astype(np.float32))
    results = []
    for rows in (x, x[:1], x[-5:]):
        product = [linear(feed("x", rows.shape), w)]
        results += session.plan(lambda product=product: product).run({"x": rows})  # type: ignore[misc]
    every, first, last = results
    assert np.array_equal(every[:1], first)
    assert np.array_equal(every[-5:], last)

"""Random placements of nodes on CPU, OpenCL and Vulkan: logits, gradients and ids of float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.engine.runner.embedder import Embedder
from logitless.graph.autodiff import backward
from logitless.graph.backend import Backend
from logitless.graph.execution.memory import owners_of
from logitless.graph.execution.partition import TRANSFER
from logitless.graph.execution.plan import Plan
from logitless.graph.execution.session import Session
from logitless.graph.ops.sampling import samplers
from logitless.graph.ops.sampling.sample import log_probs, sample
from logitless.graph.order import toposort
from logitless.graph.tensor import ALIASES, Tensor, feed
from logitless.graph.testing.conformance import decode
from logitless.graph.testing.evaluate import evaluate
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import AdaptedModel, define_model, hparams_of
from tests.backends.cpu.kernels.test_sampling import rows_of
from tests.conformance.test_device_models import TinyModel, steps
from tests.conformance.test_training_step import Trained
from tests.helpers.bert_model import tensors, write
from tests.helpers.paths import MODELS
from tests.helpers.sampling_kernel import DTYPES

NAMES = ("llama-gqa-F32", "qwen2-F32", "qwen3-F32", "gemma2-F32", "gemma3-F32", "phi3-F32", "llama-gqa-Q4_K_M")
Array = np.ndarray[Any, Any]


class Part:
    """A device that takes only what was given to it."""

    def __init__(self, inner: Backend, i: int, given: Mapping[Tensor, int]) -> None:
        self.inner, self._i, self._given = inner, i, given

    def supports(self, t: Tensor) -> bool:
        return self._given[t] == self._i

    def close(self) -> None:
        """The device belongs to all tests."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Placer:
    """Three devices, and who runs what. All that touches one state has one place, and so have the
    states of a cache.
    """

    def __init__(self, devices: Sequence[Backend], seed: int) -> None:
        self._rng = np.random.default_rng([seed, 8])
        self._given: dict[Tensor, int] = {}
        self._homes: dict[str, int] = {}
        self.parts: list[Any] = [Part(device, i, self._given) for i, device in enumerate(devices)]

    def plan(self, session: Session, graph: Sequence[Tensor]) -> Plan:
        """A plan in which every device has a part, with seams between them."""
        order = toposort(graph)
        roots = owners_of(order)
        for t in order:
            if t.is_leaf or t.op in ALIASES:
                continue
            touched = [roots[s][0] for s in t.src]
            states = [s.name for s in touched if s.op == "variable" and not s.attrs["constant"]]
            place = self._home(states[0]) if states else int(self._rng.integers(3))
            assert self.parts[place].inner.supports(t), t
            self._given[t] = place
        placement, _ = session.measure(lambda: graph)
        ran = [s.backend for s in placement.segments if s.nodes[0].op != TRANSFER]
        assert set(ran) == {0, 1, 2}
        assert len(ran) > 6
        return session.plan(lambda: graph)

    def _home(self, state: str) -> int:
        of_cache = state == "tables" or state[:2] in ("k.", "v.")
        return self._homes.setdefault("cache" if of_cache else state, int(self._rng.integers(3)))


@pytest.fixture(scope="module")
def devices(open_device: Callable[[str], Backend]) -> Iterator[list[Backend]]:
    cpu = CPUBackend(1)
    yield [open_device("opencl:0"), open_device("vulkan:0"), cpu]
    cpu.close()


def sampling(seed: int, n_vocab: int, *, greedy: bool) -> tuple[list[Tensor], dict[str, Array]]:
    """The sources of `sample` after the state, for any chain, and their values."""
    arrays = rows_of(np.random.default_rng([seed, 9]), 1, n_vocab)[2:]
    arrays[-1][:] = 0
    if greedy:
        arrays[1][:] = [samplers.GREEDY] + [0] * 11
    kinds = DTYPES["sample"][2:]
    feeds = {f"sample.{i}": array for i, array in enumerate(arrays)}
    return [feed(n, a.shape, kind) for (n, a), kind in zip(feeds.items(), kinds, strict=False)], feeds


@pytest.mark.parametrize("name", NAMES)
def test_steps_on_random_placements_match_float64(name: str, devices: list[Backend]) -> None:
    """A prompt in two parts and a token more, each with a chain of samplers of its own."""
    path = MODELS / f"arch-{name}.gguf"
    if not path.exists():
        pytest.skip(f"no {path.name} beside the checkout")
    exact = name.endswith("F32")
    bound = 1e-3 if exact else 5e-2  # the CPU rounds activations to 8 bits for quantised weights
    expected: list[list[Array]] = []
    for seed in range(2):
        placer = Placer(devices, seed)
        model = TinyModel(path, placer.parts)
        state = model.session.define("sampler", (1, samplers.N_STATE))
        graphs, feeds = [], []
        for i, given in enumerate(steps()):
            (logits,) = model.build(len(given["pos"]))
            sources, values = sampling(i, logits.shape[1], greedy=not exact)
            words = sample(logits, state, *sources)
            likely = log_probs(logits, words, feed("targets", (1,), "i32"), n=3)
            graphs.append([logits, words, likely])
            feeds.append({**given, **values, "targets": np.array([5], np.int32)})
        if not expected:
            held: dict[str, Array] = {}
            for t in (t for graph in graphs for t in toposort(graph) if t.op == "variable" and t.name not in held):
                first = model.session._variable(t.name)
                held[t.name] = decode(first.initial_bytes() if first.source is None else first.source(), t)
            expected = [evaluate(g, f, held) for g, f in zip(graphs, feeds, strict=True)]
        for graph, given, (want, ids, chances) in zip(graphs, feeds, expected, strict=True):
            got, words, likely = placer.plan(model.session, graph).run(given)
            assert np.abs(got - want).max() < bound * np.abs(want).max()
            assert words.tolist() == ids.tolist()
            of_target, of_top = (0,), (4, 5, 6)  # between them are the likeliest ids
            np.testing.assert_allclose(
                likely[:, of_target + of_top], chances[:, of_target + of_top], atol=bound * np.abs(want).max()
            )
        model.gguf.close()


def test_encoder_on_random_placements_matches_float64(devices: list[Backend], tmp_path: Path) -> None:
    path = write(tmp_path / "bert.gguf", tensors())
    rng = np.random.default_rng(3)
    feeds = {
        "tokens": rng.integers(0, 40, 32).astype(np.int32),
        "pos": np.arange(32, dtype=np.int32) % 16,
        "types": np.zeros(32, np.int32),
        "count": np.array([16, 9], np.int32),
        "first": np.array([0, 16], np.int32),
        "size": np.array([16, 9], np.int32),
    }
    for pooling, seed in (("mean", 0), ("rank", 1)):
        placer = Placer(devices, seed)
        with GGUFFile.open(path) as gguf:
            session, h = Session(placer.parts), hparams_of(gguf)
            model = define_model(session, gguf, h, 16)
            tuned = AdaptedModel(session, lambda _, m=model: m)  # type: ignore[misc]
            graph = [Embedder(lambda _, t=tuned: t, h, 64, 16).graph(2, 16, pooling)]  # type: ignore[misc]
            (got,) = placer.plan(session, graph).run(feeds)
            held = {}
            for t in toposort(graph):
                if t.op == "variable":
                    source = session._variable(t.name).source
                    assert source is not None
                    held[t.name] = decode(source(), t)
        (want,) = evaluate(graph, feeds, held)
        assert np.abs(got - want).max() < 1e-3 * np.abs(want).max()


@pytest.mark.parametrize("name", ["llama-gqa-F32", "gemma3-F32"])
def test_gradients_of_every_weight(name: str, devices: list[Backend], shared_data: Path) -> None:
    placer = Placer(devices, 2)
    trained = Trained.open(shared_data / "models" / f"arch-{name}.gguf", Session(placer.parts))
    loss = trained.loss()
    gradients = list(backward(loss, list(trained.model.weights.tensors.values())).values())
    target = evaluate([loss, *gradients], trained.feeds(), trained.values)
    result = placer.plan(trained.session, [loss, *gradients]).run(trained.feeds())
    for got, want in zip(result, target, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-3 * np.abs(want).max())

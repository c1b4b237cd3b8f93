"""Tensor parallelism by `--split-mode row` and `tensor` has the bits of one device."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.backends.registry import open_backends
from logitless.engine.requests import CompletionRequest, Finished, Token
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.engine.runner.placement import PlacementOptions
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from logitless.graph.backend import Backend
from logitless.graph.execution.division import Division
from logitless.graph.execution.session import Session
from logitless.graph.ops.elementwise import glu
from logitless.graph.ops.linear import linear
from logitless.graph.ops.norm import rms_norm
from logitless.graph.tensor import Tensor, feed, variable
from logitless.models import tokenizer
from logitless.models.synthetic.model import synthesize
from tests.helpers.drafter_files import write_dflash
from tests.helpers.reference_model import Spec, write
from tests.models.architectures.test_t5 import SPEC as T5

GREEDY = SamplingParams(temperature=0.0, n_probs=2)
Answers = list[list[tuple[int, Any]]]


class Card(CPUBackend):
    """A device with the CPU's bits and memory of its own."""

    def __init__(self, name: str) -> None:
        super().__init__(1)
        self.name, self.memory_bytes = name, 1 << 30


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(names: Sequence[str], threads: int = 0) -> list[Backend]:
        return [*(Card(name) for name in names if name != "cpu"), CPUBackend(1)]

    monkeypatch.setattr("logitless.engine.runner.model_runner.open_backends", opened)


def opened(path: Path, devices: str, divide: str = "", n_layers: int = 99, **options: Any) -> ModelRunner:
    placement = PlacementOptions(n_gpu_layers=n_layers, divide=divide, shares=options.pop("shares", ()))
    sizes: dict[str, Any] = {"n_ctx": 256, "n_slots": 3, "n_ubatch": 16, "warmup": False}
    return ModelRunner(path, RunnerOptions(devices=tuple(devices), placement=placement, **sizes, **options))


def model(*where: Any, **options: Any) -> ModelRunner:
    engine = opened(*where, **options)
    engine.load()
    return engine


def answers(engine: ModelRunner, lengths: Sequence[int] = (7, 40, 3), n_predict: int = 6) -> Answers:
    """Tokens and probabilities of requests at once; the first prompt again, whose blocks are cached."""
    words = tokenizer.from_metadata(engine.gguf.metadata, path=engine.gguf.path)
    scheduler = Scheduler(engine, words, SchedulerConfig(n_slots=3, n_ctx=engine.n_ctx, n_ubatch=16))
    found: dict[Any, list[tuple[int, Any]]] = {}
    for n in (*lengths, lengths[0]):
        rng = random.Random(n)
        prompt = tuple(rng.randrange(5, engine.hparams.n_vocab) for _ in range(n))
        found[scheduler.submit(CompletionRequest(prompt, GREEDY, n_predict=n_predict, ignore_eos=True))] = []
    while not scheduler.idle:
        for seq, event in scheduler.step():
            assert isinstance(event, Token | Finished), event
            if isinstance(event, Token):
                found[seq].append((event.id, event.prob))
    return list(found.values())


def bytes_on(engine: ModelRunner, i: int) -> int:
    buffers = [v.buffers.get(i) for v in engine.session._variables.values()]
    return sum(buffer.nbytes for buffer in buffers if buffer is not None)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tiny", {}),
        ("mini", {"type_k": "q8_0", "type_v": "q4_0"}),
        ("tiny-moe", {}),
        ("arch-gemma3-F32.gguf", {"swa_full": False}),
    ],
)
def test_divided_model_has_the_bits_of_one_device(
    name: str, options: dict[str, Any], cards: None, tmp_path: Path, shared_data: Path
) -> None:
    path = shared_data / "models" / name
    if "." not in name:
        path = tmp_path / "m.gguf"
        synthesize(path, name, "Q8_0")
    whole = model(path, "a", **options)
    expected, entry = answers(whole), whole.memory.full.read(whole.session, 0)
    alone = bytes_on(whole, 0)
    whole.close()
    divisions: list[tuple[str, str, tuple[int, ...]]] = [("tensor", "abc", (3, 1, 1))]
    if name == "tiny":
        divisions += [("row", "ab", ()), ("tensor", "ab", ())]
    for divide, devices, shares in divisions:
        engine = model(path, devices, divide, shares=shares, **options)
        assert answers(engine) == expected
        assert engine.memory.full.read(engine.session, 0).tobytes() == entry.tobytes()  # as slot files have it
        assert 0 < bytes_on(engine, 1) < alone
        assert bytes_on(engine, 0) < alone
        pool, session = engine.memory.full, engine.session
        pool.write(session, 1, entry)
        assert pool.read(session, 1).tobytes() == entry.tobytes()
        assert pool.read(session, 0).tobytes() == entry.tobytes()
        engine.close()


def test_layers_on_the_cpu_are_not_divided(cards: None, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    synthesize(path, "tiny", "Q8_0")
    engine = model(path, "ab", "tensor", n_layers=0)
    assert bytes_on(engine, 0) == bytes_on(engine, 1) == 0
    expected = answers(engine)
    engine.close()
    half = model(path, "ab", "tensor", n_layers=2)
    division = half.session.division
    assert division is not None
    assert division._n_units("v.blk.30.attn_q.weight", 64) == 1  # encoders stay whole
    assert division._n_units("weights.1.blk.0.ffn_up.weight", 64) == 2
    assert answers(half) == expected
    assert min(bytes_on(half, i) for i in range(3)) > 0
    half.close()


def test_drafter_with_sinks_keeps_caches_whole(cards: None, tmp_path: Path) -> None:
    spec = Spec("llama", n_layer=3, n_vocab=512, vocabulary=True)
    embedding = write(path := tmp_path / "m.gguf", spec)["token_embd.weight"]
    sinks = {f"blk.{i}.attn_sinks.weight": np.ones(4) for i in range(2)}
    for name, more, divided in (("plain", {}, True), ("sinks", sinks, False)):
        write_dflash(drafter := tmp_path / f"{name}.gguf", spec, embedding=embedding, **more)
        engine = opened(path, "ab", "tensor", drafter=str(drafter), n_draft_tokens=3)
        assert (len(engine.session.pieces_of(engine.memory.full.caches[0])) > 1) == divided
        engine.close()


def test_biases_by_distance_keep_caches_whole(cards: None, tmp_path: Path) -> None:
    """Of T5's decoder, whose encoder fills caches, too."""
    write(path := tmp_path / "t5.gguf", T5)
    alone = model(path, "a")
    expected = answers(alone)
    alone.close()
    engine = model(path, "ab", "tensor")
    assert len(engine.session.pieces_of(engine.memory.full.caches[0])) == 1
    assert bytes_on(engine, 1) > 0
    assert answers(engine) == expected
    engine.close()


def test_moved_cells_have_the_bits_of_one_device(cards: None, tmp_path: Path) -> None:
    """Context shift rotates keys on the device of their heads."""
    path = tmp_path / "m.gguf"
    synthesize(path, "tiny", "Q8_0")
    found = []
    for devices, divide in (("a", ""), ("ab", "tensor")):
        engine = model(path, devices, divide, moves="--context-shift")
        answers(engine)
        engine.cells.move([(3, 40, 5), (4, 41, 5)])
        found.append([engine.memory.full.read(engine.session, i).tobytes() for i in range(4)])
        engine.close()
    assert found[0] == found[1]


def test_division_on_real_devices_agrees_with_the_cpu(
    open_device: Callable[[str], Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces on Vulkan, OpenCL and the CPU: FFN and a norm behind it."""
    backends = [open_device("vulkan:0"), open_device("opencl:0"), *open_backends(["cpu"], 1)]
    draw = np.random.default_rng(1)
    sizes = {"gate": (192, 64), "up": (192, 64), "down": (64, 192)}
    weights = {name: draw.normal(0, 0.1, shape).astype(np.float32) for name, shape in sizes.items()}
    x = draw.normal(size=(5, 64)).astype(np.float32)

    def build() -> list[Tensor]:
        gate, up, down = (variable(name, shape, constant=True) for name, shape in sizes.items())
        t = feed("x", x.shape)
        y = linear(glu(linear(t, gate), linear(t, up), activation="silu"), down)
        return [rms_norm(y, variable("norm", (64,)), eps=1e-5)]

    results = []
    for shares in ((), (1, 1, 1)):
        session = Session(backends if shares else backends[-1:])
        for name, w in weights.items():
            session.define(name, w.shape, source=lambda w=w: w, constant=True)
        session.define("norm", (64,), source=lambda: np.ones(64, np.float32))
        if shares:
            session.division = Division(session, shares, lambda _, rows: rows // 16, caches=False)
            session.hint_of = lambda t, v: (int(v.name.partition("#")[2] or 0), 0)
        results.append(np.array(session.plan(build).run({"x": x})[0]))
        if shares:
            placement = session.place(build())
            products = [(t.src[1].name, placement.backend_of[t]) for t in placement.order if "linear" in t.op]
            assert {b for _, b in products} == {0, 1, 2}
        session.release()
    np.testing.assert_allclose(results[1], results[0], rtol=1e-3, atol=1e-3)
    backends[-1].close()

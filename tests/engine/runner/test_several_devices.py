"""Several (fake) devices: a lost one, a wrong one, and copies between two in the plan's report."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from logitless.backends import disk_cache, registry, self_test
from logitless.backends.cpu.backend import CPUBackend
from logitless.backends.errors import DeviceError, DeviceLost, KernelRefused
from logitless.cli.commands.benchmark.bench import greedy
from logitless.cli.commands.planning import plan
from logitless.cli.progress import CompileProgress
from logitless.engine.batch import DeviceFailed, StepFailed, UBatch
from logitless.engine.loading.open_model import load_weights
from logitless.engine.loading.options import OptionConflict
from logitless.engine.requests import CompletionRequest, Failed, Finished, Token
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.engine.runner.placement import PlacementOptions
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from logitless.engine.speculation.draft_model import ModelDrafter
from logitless.engine.speculation.settings import SpeculationParams, SpeculationSettings
from logitless.engine.speculation.speculator import Speculator
from logitless.graph.backend import Location, Program
from logitless.graph.execution.session import Session
from logitless.graph.op import OPS
from logitless.graph.ops.elementwise import silu
from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.sampling import samplers
from logitless.graph.tensor import Tensor, feed
from logitless.models import tokenizer
from logitless.models.synthetic.model import synthesize
from logitless.models.weights.placement import Places
from tests.helpers.numpy_backend import NumpyBackend


class Flaky(CPUBackend):
    """A device that can be told to get lost, and that refuses some ops."""

    def __init__(self, name: str, refuses: Sequence[str] = ()) -> None:
        super().__init__(1)
        self.name, self.refuses, self.lost = name, refuses, False  # type: ignore[misc]

    def supports(self, t: Tensor) -> bool:
        return t.op not in self.refuses and super().supports(t)

    def compile(self, nodes: Sequence[Tensor], locate: Callable[[Tensor], Location]) -> Program:
        inner = super().compile(nodes, locate)

        def run() -> None:
            if self.lost:
                raise DeviceLost(f"{self.name}: it fell off the bus")
            inner.run()

        return SimpleNamespace(run=run)  # type: ignore[return-value]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> dict[str, Flaky]:
    """Devices opencl:0 and opencl:1 that are CPUs; the second does no norms."""
    opened: dict[str, Flaky] = {}
    real = registry._open_backend

    def open_(name: str, threads: int) -> Any:
        if name == "cpu":
            return real(name, 1)
        opened[name] = Flaky(name, ("rms_norm",) if name == "opencl:1" else ())
        return opened[name]

    monkeypatch.setattr("logitless.backends.registry._open_backend", open_)
    return opened


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("devices") / "tiny.gguf"
    synthesize(path, "tiny", "F32")
    return path


def step(engine: ModelRunner, tokens: list[int], codes: Sequence[int] = (samplers.GREEDY,), n_probs: int = 0) -> int:
    """The token that this chain chooses after these, from an empty cache."""
    n, row = len(tokens), greedy()
    row.chain[: len(codes)] = codes
    batch = UBatch(
        tokens=tokens,
        pos=list(range(n)),
        slot=[0] * n,
        slot_mapping=list(range(n)),
        out=[n - 1],
        rows=[row],
        targets=[-1],
        tables={0: [0]},
        n_probs=n_probs,
    )
    return int(engine.step(batch).ids[0])


def test_a_lost_device_is_replaced_by_the_next(fake: dict[str, Flaky], model: Path) -> None:
    engine = ModelRunner(model, RunnerOptions(n_ctx=64, n_slots=1, n_ubatch=8, devices=("opencl:0", "cpu")))
    engine.load()
    expected = step(engine, [5, 9, 3])
    assert engine.session.backends[0] is fake["opencl:0"]
    fake["opencl:0"].lost = True
    with pytest.raises(DeviceFailed, match="fell off the bus"):
        step(engine, [5, 9, 3])
    assert engine.devices == ("cpu",)
    assert step(engine, [5, 9, 3]) == expected
    engine.close()


@pytest.mark.parametrize("error", [DeviceLost, DeviceError, MemoryError])
def test_one_that_fails_in_its_place_is_replaced_too(
    error: type[Exception], fake: dict[str, Flaky], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that has died takes all of its devices, one may be gone, and another too small for all layers."""
    engine = ModelRunner(model, RunnerOptions(n_ctx=64, n_slots=1, n_ubatch=8, devices=("opencl:0", "opencl:1", "cpu")))
    engine.load()
    expected = step(engine, [5, 9, 3])
    fake["opencl:0"].lost = True

    def fails(self: Flaky, t: Tensor, raw: Any) -> Any:
        if self.name == "opencl:1":
            raise error("opencl:1: gone as well")
        return CPUBackend.load(self, t, raw)

    monkeypatch.setattr(Flaky, "load", fails)
    with pytest.raises(DeviceFailed, match="fell off the bus"):
        step(engine, [5, 9, 3])
    assert engine.devices == ("cpu",)
    assert step(engine, [5, 9, 3]) == expected
    engine.close()


def test_layers_go_to_a_device_as_long_as_they_fit(
    fake: dict[str, Flaky], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And to the CPU from the first one on that does not; when the device is lost all of them are there."""

    def opened(memory: int, **wanted: Any) -> tuple[ModelRunner, int]:
        monkeypatch.setattr(Flaky, "memory_bytes", memory)
        options = RunnerOptions(64, 1, 8, devices=("opencl:0",), placement=PlacementOptions(**wanted))
        engine = ModelRunner(model, options)
        return engine, engine.session.device_bytes([engine.measure()])[0].total

    whole, n_bytes = opened(0)
    expected = step(whole, [5, 9, 3])
    whole.close()
    memory = int(0.9 * n_bytes)  # of which nine tenths may be used
    engine, used = opened(memory)
    assert isinstance(engine.session.hint_of, Places)
    n_there = engine.session.hint_of.slots.count(0)
    assert 0 < n_there <= engine.hparams.n_layer
    assert used <= 0.9 * memory < opened(memory, n_gpu_layers=n_there + 1)[1]
    engine.load()
    assert step(engine, [5, 9, 3]) == expected
    engine.session.backends[0].lost = True  # type: ignore[attr-defined]
    with pytest.raises(DeviceFailed, match="fell off the bus"):
        step(engine, [5, 9, 3])
    assert step(engine, [5, 9, 3]) == expected
    assert (engine.devices, engine.session.hint_of) == (("cpu",), None)
    engine.close()


def test_weights_beyond_host_memory_are_in_a_file_with_the_same_bits(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """First those of which a token reads least: an embedding that is not the output's, too, then experts."""
    monkeypatch.setattr(disk_cache, "writable_folder", lambda: tmp_path)  # the kernels stay where they are
    monkeypatch.setattr("logitless.models.weights.placement.BESIDE", 0)
    whole = ModelRunner(model, RunnerOptions(64, 1, 8))
    whole.load()
    expected, weights = step(whole, [5, 9, 3]), whole.model.weights.tensors
    need = sum(whole.session.backends[0].constant_nbytes(t) for t in weights.values())
    whole.close()
    assert not caplog.records
    engine = ModelRunner(model, RunnerOptions(64, 1, 8, host_bytes=(need // 2) * 10 // 9))
    engine.load()
    names = engine.session.in_file
    assert engine.exceeds_memory
    assert 0 < len(names) < len(weights)
    assert "memory has room for 0.0: 0.0 GiB are in a file, from which each token reads up to" in caplog.text
    assert step(engine, [5, 9, 3]) == expected
    report = plan.beyond_memory_of(engine)
    assert report is not None
    assert need // 2 <= report["in_file"]
    engine.close()
    assert list(tmp_path.glob("tmp*")) == []

    synthesize(path := tmp_path / "moe.gguf", "tiny-moe", "Q8_0")
    experts = ModelRunner(path, RunnerOptions(64, 1, 8, host_bytes=1 << 18))
    experts.measure()
    of_file = plan.beyond_memory_of(experts)
    assert of_file is not None
    in_file = experts.session.in_file
    assert all("exps" in name or name == "token_embd.weight" for name in in_file)
    experts.close()
    sizes = {name: t.nbytes for name, t in experts.model.weights.tensors.items() if "exps" in name and name in in_file}
    assert of_file["of_token"] == pytest.approx(sum(sizes.values()) * 3 / 8, rel=0.2)

    monkeypatch.setattr(os, "posix_fallocate", refuse_room)
    with pytest.raises(MemoryError, match=r"0\.00 GiB of weights: No space left on device; LOGITLESS_CACHE "):
        ModelRunner(model, RunnerOptions(64, 1, 8, host_bytes=1)).load()


def refuse_room(*_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_context_is_shortened_before_layers_leave_the_device(
    fake: dict[str, Flaky], model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def opened(memory: int, least: int, n_ctx: int = 8192, host: int = 0) -> ModelRunner:
        monkeypatch.setattr(Flaky, "memory_bytes", memory)
        options = RunnerOptions(n_ctx, 1, 8, devices=("opencl:0",), least_ctx=least, host_bytes=host)
        return ModelRunner(model, options)

    def on_device(engine: ModelRunner) -> int:
        engine.measure()
        places = engine.session.hint_of
        return places.slots.count(0) if isinstance(places, Places) else engine.hparams.n_layer + 1

    whole = opened(1 << 40, 1024)
    everything = whole.hparams.n_layer + 1
    need = whole.session.device_bytes([whole.measure()])[0].total
    assert (whole.n_ctx, on_device(whole)) == (8192, everything)
    whole.close()
    assert not caplog.records

    memory = int(need / 0.9 * 0.7)
    shorter = opened(memory, 1024)
    assert 1024 < shorter.n_ctx < 8192
    assert on_device(shorter) == everything
    assert shorter.session.device_bytes([shorter.measure()])[0].total <= 0.9 * memory
    assert "context reduced from 8192 to" in caplog.text
    shorter.load()
    assert step(shorter, [5, 9, 3]) >= 0
    shorter.close()

    wanted = opened(memory, 0)  # -c: the layers leave
    assert wanted.n_ctx == 8192
    assert on_device(wanted) < everything
    wanted.close()
    least = opened(need // 50, 1024)  # not even the weights
    assert (least.n_ctx, on_device(least) < everything) == (1024, True)
    least.close()


def test_host_memory_does_not_bound_the_context_of_a_device(
    fake: dict[str, Flaky], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Flaky, "memory_bytes", 1 << 40)
    options = RunnerOptions(8192, 1, 8, devices=("opencl:0",), host_bytes=32 << 20)
    engine = ModelRunner(model, options)
    assert engine.n_ctx == 8192
    engine.close()
    one_layer = PlacementOptions(n_gpu_layers=1)
    with pytest.raises(ValueError, match=r"--ctx-size 8192: the layers on the CPU would need .* more than"):
        ModelRunner(model, replace(options, placement=one_layer, host_bytes=1 << 20))


@pytest.mark.parametrize("layers", [None, 99])
def test_allocation_that_fails_leaves_layers_to_the_cpu(
    fake: dict[str, Flaky],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    layers: int | None,
) -> None:
    """The driver has less memory than it says: one half for the weights, then none."""
    load, weights = CPUBackend.load, [0, 0]
    whole = ModelRunner(model, RunnerOptions(64, 1, 8))
    whole.load()
    expected = step(whole, [5, 9, 3])
    need = sum(t.nbytes for t in whole.gguf.tensors.values())
    whole.close()

    def limited(self: Flaky, t: Tensor, raw: Any) -> Any:
        weights[0] += len(raw)
        if weights[0] > weights[1]:
            weights[0] = 0
            raise MemoryError(f"{self.name}: no room")
        return load(self, t, raw)

    monkeypatch.setattr(Flaky, "load", limited)
    monkeypatch.setattr(Flaky, "memory_bytes", 4 * need)
    for room in (need // 2, 0):
        weights[:] = 0, room
        placement = PlacementOptions(n_gpu_layers=layers)
        engine = ModelRunner(model, RunnerOptions(64, 1, 8, devices=("opencl:0",), placement=placement))
        load_weights(engine)
        assert (weights[0] > 0) == (room > 0)
        assert step(engine, [5, 9, 3]) == expected
        assert "an allocation failed (opencl:0: no room); again with" in caplog.text
        engine.close()


def test_host_without_room_is_named(fake: dict[str, Flaky], model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(Flaky, "load", full)
    engine = ModelRunner(model, RunnerOptions(64, 1, 8, devices=("opencl:0",)))
    with pytest.raises(OptionConflict, match=r"^out of memory \(no room\); --ctx-size N takes less"):
        load_weights(engine)
    engine.close()


def test_a_plan_is_made_again_where_compilers_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when somebody has said already that they are done."""
    compiling = CompileProgress()
    monkeypatch.setattr(plan, "COMPILING", compiling)
    pid = "__import__('os').getpid()"
    assert plan.measured(eval, pid) == os.getpid()
    compiling("a kernel", 0)
    compiling.end()
    assert plan.measured(eval, pid) != os.getpid()
    compiling("another one", 0)
    assert plan.measured(eval, pid) != os.getpid()
    assert compiling.n_kernels == 0


def test_a_plan_tells_what_crosses_between_devices(fake: dict[str, Flaky], model: Path) -> None:
    engine = ModelRunner(model, RunnerOptions(n_ctx=64, n_slots=1, n_ubatch=8, devices=("opencl:1", "cpu")))
    placement, _ = engine.measure()
    found = plan.crossings(placement, engine.devices)
    to_cpu = [c for c in found if c["to"] == "cpu"]
    back = [c for c in found if (c["from"], c["op"]) == ("cpu", "rms_norm")]
    n_norms = 2 * engine.hparams.n_layer + 2  # the last layer's rows that ask have one of their own
    assert sum(c["copies"] for c in back) == n_norms
    row = 4 * engine.hparams.n_embd
    n_rows = 8 * (n_norms - 3) + 3  # that, and what comes after it, are of the row that is wanted
    assert sum(c["bytes"] for c in back) == n_rows * row
    assert sum(c["copies"] for c in to_cpu) == n_norms
    engine.close()


class Wrong(NumpyBackend):
    """Computes one op wrongly, and cannot run another at all."""

    self_tested = True

    def __init__(self, *wrong: str) -> None:
        super().__init__("wrong", refuses=lambda t: t.op in self.refused)
        self.refused: set[str] = set()
        self.wrong = wrong

    def refuse(self, ops: Iterable[str]) -> None:
        self.refused.update(ops)

    def compile(self, nodes: Sequence[Tensor], locate: Callable[[Tensor], Location]) -> Any:
        program = super().compile(nodes, locate)

        def run() -> None:
            program.run()
            for t in nodes:
                if t.op in self.wrong:
                    program.view(t)[...] *= np.float32(1.01)
                elif t.op == "softmax":
                    raise RuntimeError("the driver has no idea")

        return SimpleNamespace(run=run)


def nodes() -> list[Tensor]:
    x = feed("x", (4, 6))
    return [silu(x), rms_norm(x, feed("w", (6,)), eps=1e-5), OPS["softmax"](x)]


def test_an_op_that_is_wrong_runs_on_the_next() -> None:
    from logitless.graph.testing.conformance import register_all

    register_all()
    device = Wrong("silu")
    why = self_test.run_self_test(device, nodes())
    assert set(why) == device.refused == {"silu", "softmax"}
    assert "1.0" in why["silu"] or "expected" in why["silu"]
    assert "the driver has no idea" in why["softmax"]
    session = Session([device, NumpyBackend("next")])
    x = np.ones((4, 6), np.float32)
    (got,) = session.plan(lambda: [silu(feed("x", (4, 6)))]).run({"x": x})
    np.testing.assert_allclose(got, 1 / (1 + np.exp(-1)), rtol=1e-6)


def test_the_result_is_kept_for_as_long_as_the_driver_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from logitless.graph.testing.conformance import register_all

    register_all()
    monkeypatch.setitem(os.environ, "LOGITLESS_CACHE", str(tmp_path))
    first, second, other = Wrong("silu"), Wrong(), Wrong()
    first.identity = second.identity = "driver 1"
    other.identity = "driver 2"
    for device in (first, second, other):
        self_test.run_self_test(device, nodes()[:2])
    assert (first.refused, second.refused, other.refused) == ({"silu"}, {"silu"}, set())
    assert second.ran == []  # read, not tried again


def test_no_time_means_no_judgement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "LOGITLESS_CACHE", str(tmp_path))
    device = Wrong("silu")
    device.identity = "driver 1"
    assert self_test.run_self_test(device, nodes(), seconds=-1.0) == {}
    assert not list(tmp_path.rglob("*"))


def prepare_all(engine: ModelRunner) -> None:
    while engine.prepare_ahead():
        pass


def kinds(*ops: str) -> list[Any]:
    return [self_test._kind(t) for t in nodes() if t.op in ops]


def test_the_next_start_goes_on_with_what_had_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "LOGITLESS_CACHE", str(tmp_path))
    first, second = Wrong("rms_norm"), Wrong("rms_norm")
    first.identity = second.identity = "driver 1"
    test = self_test.SelfTest(first, kinds("silu", "rms_norm"))
    while "silu" in test.untested or not test.untested:
        test.run(0.0)
        if test.failures:
            break
    assert test.failures.keys() == {"rms_norm"}  # the first case of each kind, in their order
    again = self_test.SelfTest(second, kinds("silu", "rms_norm"))
    assert (again.failures.keys(), second.refused, again.untested) == ({"rms_norm"}, {"rms_norm"}, ["silu"])
    while not again.run(0.0):
        pass
    third = Wrong()
    third.identity = "driver 1"
    assert self_test.SelfTest(third, kinds("silu")).untested == []
    for content in (b"version 2", b'["silu"]'):  # another version's
        disk_cache.write(again._path, content)
        assert self_test.SelfTest(third, kinds("silu")).untested == ["silu"]


@pytest.mark.parametrize(
    ("error", "fails", "lasts"),
    [(MemoryError("full"), False, False), (OSError("busy"), False, False), (RuntimeError("odd"), True, False),
     (KernelRefused("no such instruction"), True, True)],
)  # fmt: skip
def test_only_wrong_values_and_refused_kernels_last(
    error: Exception, fails: bool, lasts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "LOGITLESS_CACHE", str(tmp_path))

    class Failing(Wrong):
        identity = "driver 1"

        def compile(self, nodes: Sequence[Tensor], locate: Callable[[Tensor], Location]) -> Any:
            raise error

    device = Failing()
    assert bool(self_test.run_self_test(device, nodes()[:1])) == fails
    assert device.refused == ({"silu"} if fails else set())
    later = Wrong()
    later.identity = "driver 1"
    assert bool(self_test.run_self_test(later, nodes()[:1])) == lasts
    assert (later.ran == []) == lasts


def test_an_op_that_fails_while_the_server_is_idle_moves_to_the_next_device(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-test has no time at the start; requests before and after it get the CPU's tokens."""
    monkeypatch.setitem(os.environ, "LOGITLESS_CACHE", str(tmp_path))
    monkeypatch.setattr(self_test, "MAX_SECONDS", 0.0)

    class Sloppy(Flaky):
        self_tested = True
        identity = ""

        def __init__(self, name: str) -> None:
            super().__init__(name)
            self.refused: set[str] = set()

        def supports(self, t: Tensor) -> bool:
            return t.op not in self.refused and super().supports(t)

        def refuse(self, ops: Iterable[str]) -> None:
            self.refused.update(ops)

    monkeypatch.setattr(registry, "open_backends", lambda *_: [Sloppy("vulkan:0"), CPUBackend(1)])
    monkeypatch.setattr(
        "logitless.engine.runner.model_runner.open_backends", lambda *_: [Sloppy("vulkan:0"), CPUBackend(1)]
    )
    engine = ModelRunner(model, RunnerOptions(n_ctx=64, n_slots=1, n_ubatch=16, devices=("vulkan:0", "cpu")))
    engine.load()
    (test, *_) = engine._self_tests
    assert "rms_norm" in test.untested
    real = self_test.run

    def wrong(problem: Any, backends: Any) -> Any:
        if problem.op == "rms_norm":
            return SimpleNamespace(status="wrong", case="a case", detail="", error=1.0)
        return real(problem, backends)

    monkeypatch.setattr(self_test, "run", wrong)
    with pytest.raises(DeviceFailed, match="failed the self-test of rms_norm"):
        prepare_all(engine)
    assert engine.rerouted.keys() == {"rms_norm"}
    assert not engine.session.backends[0].supports(nodes()[1])
    while any(test.untested for test in engine._self_tests):
        engine.prepare_ahead()
    engine.close()


@pytest.mark.parametrize(
    ("device", "last"), [("vulkan:0", ((samplers.MIROSTAT_2,), 0)), ("opencl:0", ((samplers.GREEDY,), 1))]
)
def test_a_variant_of_the_sampler_is_compiled_and_tested_at_its_first_use(
    device: str,
    last: tuple[tuple[int, ...], int],
    model: Path,
    tmp_path: Path,
    open_device: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device of a user who samples nothing never compiles the others; a wrong one moves to the next device."""
    open_device(device)
    monkeypatch.setitem(os.environ, "LOGITLESS_CACHE", str(tmp_path))
    tested: set[int] = set()
    wrong = samplers.ALL

    def noted(problem: Any, backends: Any) -> Any:
        variant = samplers.variant_of(problem.feeds["s3"]) if problem.op == "sample" else -1
        tested.add(variant)
        return SimpleNamespace(status="wrong" if variant == wrong else "ok", case="", detail="", error=0.0)

    monkeypatch.setattr(self_test, "run", noted)
    engine = ModelRunner(model, RunnerOptions(n_ctx=64, n_slots=1, n_ubatch=16, devices=(device, "cpu"), warmup=False))
    engine.load()
    backend: Any = engine.session.backends[0]
    compiled = backend.pipelines._pipelines if device == "vulkan:0" else backend.programs._programs
    owner, name = (backend.pipelines, "get") if device == "vulkan:0" else (backend.programs, "program")
    real = getattr(owner, name)

    def full(kernel: Any, defines: Any) -> Any:
        if dict(defines).get("VARIANT") == samplers.USUAL:
            raise MemoryError(f"{device}: out of memory")
        return real(kernel, defines)

    for codes, variants in (((samplers.GREEDY,), {0}), ((samplers.TOP_K, samplers.GREEDY), {0, 1})):
        with monkeypatch.context() as patch:  # a driver without memory for a variant's compiler
            patch.setattr(owner, name, full)
            expected = step(engine, [5, 9, 3]), step(engine, [7, 1, 2])
            if samplers.TOP_K in codes:
                with pytest.raises(StepFailed, match="out of memory"):
                    step(engine, [5, 9, 3], codes)
        assert step(engine, [5, 9, 3], codes) == expected[0] != expected[1]
        prepare_all(engine)
        assert {dict(defines)["VARIANT"] for name, defines in compiled if name == "sample"} == variants
        assert tested == {-1, *variants}
    with pytest.raises(DeviceFailed, match="failed the self-test of sample"):
        step(engine, [5, 9, 3], *last)
    step(engine, [5, 9, 3], *last)
    assert engine.rerouted.keys() == {"sample"}
    engine.close()


def test_a_draft_model_outlives_a_lost_device(fake: dict[str, Flaky], model: Path) -> None:
    """Both models are on one device. The request that ran has failed; the next one is served, and drafted."""
    options = RunnerOptions(n_ctx=64, n_slots=1, n_ubatch=16, devices=("opencl:0", "cpu"))
    engine = ModelRunner(model, options)
    engine.load()
    draft = ModelRunner(model, options, target=engine)
    draft.load()
    n_vocab = engine.hparams.n_vocab
    vocab = tokenizer.from_metadata(engine.gguf.metadata, path=model)
    drafter = ModelDrafter(draft, n_blocks=draft.n_blocks, n_vocab=n_vocab, n_ubatch=16)
    speculator = Speculator(SpeculationSettings(), {"draft-simple": drafter})
    scheduler = Scheduler(engine, vocab, SchedulerConfig(n_slots=1, n_ctx=64, n_ubatch=16), speculator=speculator)

    def run(n_before_it_is_lost: int = 99) -> tuple[list[int], Any]:
        wish = SpeculationParams(("draft-simple",))
        sampling = SamplingParams(temperature=0.0)
        request = CompletionRequest((5, 9, 3), sampling, n_predict=24, ignore_eos=True, speculation=wish)
        scheduler.submit(request)
        events = []
        for i in range(99):
            fake["opencl:0"].lost = i >= n_before_it_is_lost
            events += [event for _, event in scheduler.step()]
            if scheduler.idle:
                break
        return [event.id for event in events if isinstance(event, Token)], events[-1]

    expected, end = run()
    assert isinstance(end, Finished)
    assert end.timings.draft_n_accepted > 10  # the same weights
    _, end = run(2)
    assert isinstance(end, Failed)
    assert (engine.devices, draft.devices) == (("cpu",), ("opencl:0", "cpu"))  # the draft model has not noticed yet
    for _ in range(2):
        tokens, end = run()
        assert tokens == expected
        assert isinstance(end, Finished)
    assert draft.devices == ("cpu",)
    assert end.timings.draft_n_accepted > 10
    draft.close()
    engine.close()

"""Vulkan backend: silent validation layer, memory with and without host access, caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from logitless.backends.gpu.device import dispatches
from logitless.backends.gpu.matmul import split_k, unpack_low
from logitless.backends.gpu.matmul import unpack as weights
from logitless.graph.backend import Backend, Location
from logitless.graph.execution.session import Session
from logitless.graph.op import OPS
from logitless.graph.ops.attention.paged_attention import attention
from logitless.graph.ops.elementwise import glu
from logitless.graph.ops.fused import linear_add, linear_glu, linear_parts
from logitless.graph.ops.linear import linear
from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.shape import reshape
from logitless.graph.tensor import Tensor, feed, variable
from logitless.graph.testing.conformance import OK, UNSUPPORTED, encode, problems, register_all, run

if TYPE_CHECKING:
    from logitless.backends.gpu.language.dialect import Shape
    from logitless.backends.gpu.lowering import Dispatch

register_all()


@pytest.fixture(params=["mapped", "copied"])
def watched(request: pytest.FixtureRequest, open_device: Callable[[str], Backend]) -> Iterator[Backend]:
    """A device of its own under the validation layer; fails if the layer reported anything."""
    from logitless.backends.vulkan.backend import VulkanBackend
    from logitless.backends.vulkan.instance import has_validation

    open_device("vulkan:0")
    if not has_validation():
        if request.config.getoption("--require-devices"):
            pytest.fail("the Vulkan validation layer is not installed")
        pytest.skip("the Vulkan validation layer is not installed")
    backend = VulkanBackend(validation=True, mapped=request.param == "mapped")
    said = backend.device.info.instance.messages
    yield backend
    backend.close()
    heard = said[:]
    said.clear()  # the instance is shared by all tests
    assert heard == []


def test_validation_is_silent(watched: Backend, request: pytest.FixtureRequest) -> None:
    """The last case of every op, with --long the first, too; synchronization validation is on."""
    outcomes = []
    for name in sorted(OPS):
        found = list(problems(name))
        found = found[-1:] + (found[:1] if request.config.getoption("--long") else [])
        outcomes += [run(problem, [watched]) for problem in found]
    assert [o for o in outcomes if o.status not in (OK, UNSUPPORTED)] == []
    assert sum(o.status == OK for o in outcomes) > len(outcomes) // 2


def test_products_as_a_gpu_agree_with_the_reference(
    open_device: Callable[[str], Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lavapipe has a `linear` of its own: that of GPUs must be right there too."""
    from logitless.backends.gpu.language.dialect import SIMT
    from logitless.backends.vulkan.backend import VulkanBackend

    open_device("vulkan:0")
    backend = VulkanBackend()
    backend.shape = SIMT
    types = ("q8_0", "q4_k")
    wanted = [f"f32[{rows}, 512] {dtype}[" for rows in (1, 33) for dtype in types]
    cases = [p for p in problems("linear") if "odd" not in p.label and any(w in p.label for w in wanted)]
    of_gradients = [p for name in ("matmul", "matmul_tn") for p in problems(name)]
    outcomes = [run(problem, [backend]) for problem in cases + of_gradients]
    monkeypatch.setattr(split_k, "FULL", 1)  # as a large product of many rows, which is not split
    outcomes += [run(problem, [backend]) for problem in cases if "[33, 512] q8_0" in problem.label]
    backend.close()
    assert (len(cases), len(outcomes)) == (len(wanted), len(cases + of_gradients) + 1)
    assert [o for o in outcomes if o.status != OK] == []


@pytest.mark.parametrize("gpu", [False, True], ids=["as it is", "as a GPU"])
def test_glu_is_batch_invariant(open_device: Callable[[str], Backend], gpu: bool) -> None:
    """1, 8 and 64 rows are three kernels: what is precise in one must be in the others, and
    in the op alone.
    """
    from logitless.backends.gpu.language.dialect import SIMT
    from logitless.backends.vulkan.backend import VulkanBackend

    open_device("vulkan:0")
    backend = VulkanBackend()
    backend.shape = SIMT if gpu else backend.shape
    session = Session([backend])
    draw = np.random.default_rng(1)
    values, made = draw.normal(size=(64, 96)), draw.normal(size=(2, 64, 96)) / 8
    for name, w in zip("gu", made, strict=True):
        session.define(name, w.shape, "q8_0", lambda w=w: encode(w.astype(np.float32), "q8_0"), constant=True)
    gate, up = (variable(name, (64, 96), "q8_0", constant=True) for name in "gu")

    def of(n: int) -> np.ndarray:
        x = feed("x", (n, 96))
        rows = [values[i : i + n].astype(np.float32) for i in range(0, 64, n)]
        return np.concatenate(
            [session.run(n, lambda: [linear_glu(x, gate, up, activation="gelu")], {"x": r})[0] for r in rows]
        )

    whole = of(64)
    for n in (1, 8):
        assert (of(n) == whole).all()
    x = feed("x", (64, 96))
    a, b = linear(x, gate), linear(x, up)
    alone, *_ = session.run("op", lambda: [glu(a, b, activation="gelu"), a, b], {"x": values.astype(np.float32)})
    backend.close()
    assert (alone == whole).all()


def test_a_wheel_without_soft_shaders_runs_the_plain_kernels_on_a_cpu(
    open_device: Callable[[str], Backend], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from logitless.backends.vulkan import autotune
    from logitless.backends.vulkan.instance import all_devices

    open_device("vulkan:0")
    info = replace(all_devices()[0], kind="cpu", fast_dots=False, broadcasts=True)
    with_them = autotune.class_of(info).name
    monkeypatch.setattr(autotune, "SOFT_SHADERS", tmp_path / "soft")
    assert (with_them, autotune.class_of(info).name) == ("soft", "simt")


@pytest.fixture
def dots(open_device: Callable[[str], Backend], monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A device that uses integer dot products, under the validation layer where that is
    installed.
    """
    from logitless.backends.vulkan.backend import VulkanBackend
    from logitless.backends.vulkan.instance import has_validation

    open_device("vulkan:0")
    monkeypatch.setenv("LOGITLESS_VULKAN_MATRICES", "0")
    monkeypatch.setenv("LOGITLESS_VULKAN_DOT", "0")
    assert not VulkanBackend().shape.dot
    monkeypatch.setenv("LOGITLESS_VULKAN_DOT", "1")
    backend = VulkanBackend(validation=has_validation())
    if not backend.shape.dot:
        pytest.skip(f"{backend.device.info.name} has no integer dot products")
    yield Session([backend])
    said = backend.device.info.instance.messages[:]
    backend.close()
    assert said == []


def test_integer_dot_products_agree_with_the_reference(dots: Session) -> None:
    """Few and many rows, every block type once but those of few bits, and every epilogue of a launch."""
    rows_1, rows_33 = (
        [p for p in problems("linear") if f"f32[{n}, 512]" in p.label and "odd" not in p.label] for n in (1, 33)
    )
    some = ("q3_k", "iq2_xxs")
    cases = [p for p in (*rows_1[::2], *rows_33[1::2]) if p.roots[0].src[1].dtype not in ("f32", "f16", "bf16")]
    cases = [p for p in cases if p.roots[0].src[1].dtype not in set(unpack_low.TYPES) - set(some)]
    cases += [next(problems(name)) for name in ("linear_add", "linear_glu", "linear_parts")]
    assert {p.roots[0].src[1].dtype for p in cases} >= {"q8_0", "q6_k"}
    assert len(cases) >= 11
    outcomes = [run(problem, dots.backends) for problem in cases]
    assert [o for o in outcomes if o.status != OK] == []


def test_weights_packed_for_dot_products_are_read_element_by_element(dots: Session) -> None:
    """Four words of a row lie side by side there, and gradients, rows and casts read the same bytes."""
    types = ("q8_0[", "q4_k[", "mxfp4[")
    ops = ("get_rows", "matmul", "cast", "expert_matmul")
    cases = [p for name in ops for p in problems(name) if any(t in p.label for t in types)]
    assert {p.roots[0].op for p in cases} >= {"get_rows", "matmul", "cast"}
    outcomes = [run(problem, dots.backends) for problem in cases]
    assert [o for o in outcomes if o.status != OK] == []


def test_integer_dot_products_are_batch_invariant(dots: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 and 5 rows are two kernels, 40 rows two more: a small product of them is split
    between threads.
    """
    draw = np.random.default_rng(1)
    values = draw.normal(size=(40, 256)).astype(np.float32)
    w = draw.normal(size=(48, 256)).astype(np.float32)
    dots.define("w", w.shape, "q8_0", lambda: encode(w, "q8_0"), constant=True)

    def of(rows: int, first: int, key: str = "") -> np.ndarray:
        x, n = values[first : first + rows], (key, rows)
        y = dots.run(n, lambda: [linear(feed("x", x.shape), variable("w", w.shape, "q8_0", constant=True))], {"x": x})
        return np.array(y[0])

    whole = of(40, 0)
    assert np.abs(whole - values @ w.T).max() < 0.02 * np.abs(whole).max()
    monkeypatch.setattr(split_k, "FULL", 1)
    assert (of(40, 0, "as if it were large") == whole).all()
    for rows, first in ((1, 0), (1, 39), (5, 7)):
        assert (of(rows, first) == whole[first : first + rows]).all()


def test_quantised_activations_pass_on_nan(dots: Session) -> None:
    dots.define("v", (16, 32), "q8_0", lambda: encode(np.ones((16, 32), np.float32), "q8_0"), constant=True)
    x = np.ones((3, 32), np.float32)
    x[0, 3], x[1, 5] = np.nan, -np.inf
    y = dots.run("v", lambda: [linear(feed("x", x.shape), variable("v", (16, 32), "q8_0", constant=True))], {"x": x})[0]
    assert np.isnan(y[:2]).all()
    assert np.allclose(y[2], 32, rtol=1e-2)


@pytest.mark.parametrize("dtype", weights.BLOCKS)
def test_cooperative_matrices_have_the_bits_of_dots(dots: Session, dtype: str) -> None:
    """A device may take either kernel for many rows, with any epilogue."""
    from logitless.backends.vulkan.backend import VulkanBackend

    (backend,) = dots.backends
    assert isinstance(backend, VulkanBackend)
    if backend.device.info.matrices is None:
        name = backend.device.info.name
        pytest.skip(f"{name} has no cooperative matrices that fit (lavapipe 26.2 does, LP_NATIVE_VECTOR_WIDTH=256)")
    draw = np.random.default_rng(1)
    x, e = draw.normal(size=(70, 768)).astype(np.float32), draw.normal(size=(70, 130)).astype(np.float32)
    x[3, :40], x[5] = 0, 1e-30
    made = {name: draw.normal(size=(n, 768)).astype(np.float32) for name, n in (("a", 40), ("b", 40), ("c", 130))}
    for name, w in made.items():
        dots.define(name, w.shape, dtype, lambda w=w: encode(w, dtype), constant=True)
    a, b, c = (variable(name, w.shape, dtype, constant=True) for name, w in made.items())
    rows = feed("x", x.shape)
    nodes = [
        linear_parts(rows, a, c),
        linear_glu(rows, a, b, activation="gelu"),
        linear_add(rows, c, feed("e", e.shape)),
    ]
    results, by_dots = {}, backend.shape
    for shape in (by_dots, replace(by_dots, coop=33)):
        backend.shape = shape
        assert all(("_coop_" in dispatches(t, shape)[-1].kernel) == (shape.coop > 0) for t in nodes)
        results[shape.coop > 0] = dots.run(shape, lambda: nodes, {"x": x, "e": e})
    backend.shape = by_dots
    for mine, other in zip(results[True], results[False], strict=True):
        assert mine.any()
        assert mine.tobytes() == other.tobytes()


def test_memory_starts_as_zero_and_keeps_writes(watched: Backend) -> None:
    memory = watched.alloc(40_000_001)  # more than one piece of staging memory
    assert not np.array(watched.download(Location(memory), 40_000_001)).any()
    data = np.random.default_rng(0).integers(0, 256, 33_000_003).astype(np.uint8)
    watched.upload(Location(memory, 5), data)
    assert (np.array(watched.download(Location(memory, 5), len(data))) == data).all()
    assert not np.array(watched.download(Location(memory), 5)).any()
    assert not np.array(watched.download(Location(memory, 5 + len(data)), 100)).any()


def test_small_downloads_reuse_one_recording(watched: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache has any number of pages to download."""
    from logitless.backends.vulkan.record import Recording

    memory, data = watched.alloc(4096), np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint8)
    watched.upload(Location(memory), data)
    made: list[Recording] = []
    make = Recording.__init__
    monkeypatch.setattr(Recording, "__init__", lambda self, device: (made.append(self), make(self, device))[1])
    for at in range(0, 4096, 64):
        assert (watched.download(Location(memory, at), 64) == data[at : at + 64]).all()
    assert made == []


def test_validation_reports_a_missing_barrier(watched: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: the layer reports a copy that is not ordered after its source's write."""
    from logitless.backends.vulkan.backend import VulkanBackend
    from logitless.backends.vulkan.record import Recording

    assert isinstance(watched, VulkanBackend)
    a, b, c = (watched.device.memory(64) for _ in range(3))
    recording = Recording(watched.device)
    recording.begin()
    recording.copy(a, 0, b, 0, 64)
    monkeypatch.setattr(recording, "_order", lambda reads, writes, *, copies=False: None)
    recording.copy(b, 0, c, 0, 64)
    recording.finish()
    recording.submit()
    watched.device.idle()
    said = watched.device.info.instance.messages
    assert any("READ_AFTER_WRITE" in message for message in said), said
    said.clear()


def test_pipeline_cache_survives_restart_and_damage(
    open_device: Callable[[str], Backend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from logitless.backends.vulkan.backend import VulkanBackend

    open_device("vulkan:0")
    monkeypatch.setenv("LOGITLESS_CACHE", str(tmp_path))
    problem = next(problems("rms_norm"))
    for damage in (False, True):
        backend = VulkanBackend()
        assert run(problem, [backend]).status == OK
        backend.close()
        (kept,) = (tmp_path / "vulkan").glob("*.cache")
        assert len(kept.read_bytes()) > 32
        if damage:
            kept.write_bytes(b"damaged")


@pytest.mark.parametrize("rows", [1, 40])
def test_programs_compile_before_memory_is_allocated(open_device: Callable[[str], Backend], rows: int) -> None:
    """`logitless plan` compiles so."""
    w = variable("w", (48, 512), "q8_0", constant=True)
    found, programs = Session([open_device("vulkan:0")]).planned_bytes([lambda: [linear(feed("x", (rows, 512)), w)]])
    assert len(programs) == 1
    assert found[0].weights >= 48 * 512


def test_close_twice_is_harmless(open_device: Callable[[str], Backend]) -> None:
    from logitless.backends.vulkan.backend import VulkanBackend

    open_device("vulkan:0")
    backend = VulkanBackend()
    assert run(next(problems("softmax")), [backend]).status == OK
    backend.close()
    backend.close()
    assert not backend.device.open


def test_absent_device_raises_device_error(open_device: Callable[[str], Backend]) -> None:
    from logitless.backends.errors import DeviceError
    from logitless.backends.vulkan.backend import VulkanBackend

    open_device("vulkan:0")
    with pytest.raises(DeviceError, match=r"^device 'vulkan:99' is not available: this machine has vulkan:0"):
        VulkanBackend("vulkan:99")


def test_missing_vulkan_loader_names_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from logitless.backends.errors import DeviceError
    from logitless.backends.vulkan import backend

    def no_loader(validation: bool) -> list[object]:
        raise DeviceError("Vulkan: no loader (libvulkan.so.1): install a GPU driver with Vulkan")

    monkeypatch.setattr(backend, "all_devices", no_loader)
    with pytest.raises(DeviceError, match=r"^device 'vulkan:99' is not available: Vulkan: no loader"):
        backend.VulkanBackend("vulkan:99")


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_fused_quantisation_has_the_bits_of_its_own_launch(
    dots: Session, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """A norm, attention of joined spans, and a GLU with its products, before products of bytes."""
    from logitless.backends.gpu import device

    draw = np.random.default_rng(2)
    pages, shapes = 40, {"k": (40, 2, 64, 16), "v": (40, 2, 16, 64)}
    k, v = (dots.define(name, shape, "f16") for name, shape in shapes.items())
    for name, shape in shapes.items():
        dots.write(name, draw.normal(size=shape).astype(np.float16))

    def weight(name: str, n: int, depth: int, dtype: str = "q8_0") -> Tensor:
        w = (draw.normal(size=(n, depth)) / 8).astype(np.float32)
        return dots.define(name, w.shape, dtype, lambda: encode(w, dtype), constant=True)

    weights, other, down = weight("w", 48, 128), weight("o", 16, 128, "q5_1"), weight("d", 32, 96)
    gates = [[weight(f"{dtype}{i}", 96, 128, dtype) for i in range(2)] for dtype in ("q8_0", "q4_0")]
    feeds = {
        "q": draw.normal(size=(3, 2, 64)).astype(np.float32),
        "x": draw.normal(size=(rows, 128)).astype(np.float32),
        "g": draw.normal(size=128).astype(np.float32),
        "tables": draw.permutation(pages).reshape(1, pages).astype(np.int32),
        "slot": np.zeros(3, np.int32),
        "pos": np.array([5, 400, 639], np.int32),
    }
    feeds["x"][-1, 2] = np.inf
    made: list[str] = []

    def build() -> list[Tensor]:
        q, x, g = (feed(name, feeds[name].shape) for name in "qxg")
        where = (feed(name, feeds[name].shape, "i32") for name in ("tables", "slot", "pos"))
        seen = reshape(attention(q, k, v, *where, scale=0.125), shape=(3, 128))
        normed = rms_norm(x, g, eps=1e-5)
        gated = [glu(linear(x, gate), linear(x, up), activation="gelu") for gate, up in gates]
        together = [linear(y, weights) for y in (seen, normed)]
        return [*together, linear(normed, other), *(linear(y, down) for y in gated)]

    def run() -> list[np.ndarray]:
        return [np.array(y) for y in dots.run(len(made), build, feeds)]

    join = device.joined

    def watched(work: list[Dispatch], shape: Shape) -> list[Dispatch]:
        found = join(work, shape)
        made.extend(d.kernel for d in found)
        return found

    monkeypatch.setattr(device, "joined", watched)
    together = run()
    assert "attention_join_rounded" in made
    assert ("rms_norm_rounded" in made) == (rows > 1)
    assert made.count("round_rows") == 2  # x by itself, for two types; what the norm rounded serves two
    monkeypatch.setattr(device, "joined", lambda work, shape: list(work))
    for mine, alone in zip(together, run(), strict=True):
        assert np.isfinite(mine[:-1]).all()
        assert np.array_equal(mine, alone, equal_nan=True)


@pytest.mark.parametrize(("dtype", "k"), [("q8_0", 544), ("nvfp4", 512), ("q4_k", 1024)])
def test_a_norm_in_a_products_launch_has_the_bits_of_its_own(
    dots: Session, monkeypatch: pytest.MonkeyPatch, dtype: str, k: int
) -> None:
    """One row, whose groups normalise it themselves; beside others a launch does so before."""
    from logitless.backends.gpu import device

    (backend,), draw, made = dots.backends, np.random.default_rng(3), list[str]()
    x = draw.normal(size=(3, k)).astype(np.float32) * 5
    constants = {name: draw.normal(size=k).astype(np.float32) for name in "gh"}
    for name, n in {"q": 48, "k": 17, "v": 16, "gate": 64, "up": 64}.items():
        constants[name] = draw.normal(size=(n, k)).astype(np.float32)
    w = {
        name: dots.define(
            name, c.shape, dtype if c.ndim > 1 else "f32",
            lambda c=c: encode(c, dtype) if c.ndim > 1 else c.view(np.uint8), constant=True,
        )
        for name, c in constants.items()
    }  # fmt: skip
    lower = device.lower_all

    def watched(nodes: Sequence[Tensor], shape: Shape) -> list[Dispatch]:
        found = lower(nodes, shape)
        made.extend(d.kernel for d in found)
        return found

    monkeypatch.setattr(device, "lower_all", watched)

    def run(rows: np.ndarray, *refused: str) -> list[np.ndarray]:
        monkeypatch.setattr(backend, "refused", set(refused))
        made.clear()

        def build() -> list[Tensor]:
            row = feed("x", rows.shape)
            one, other = (rms_norm(row, w[name], eps=1e-5) for name in "gh")
            gated = glu(linear(other, w["gate"]), linear(other, w["up"]), activation="silu")
            return [*(linear(one, w[name]) for name in "qkv"), gated]

        return [np.array(y) for y in dots.run((rows.shape, refused), build, {"x": rows})]

    alone = run(x[:1])
    assert made == [f"linear_dot_{dtype}"] * len(made)
    apart = run(x[:1], "norm_parts", "norm_glu")
    assert made.count("rms_norm_rounded") == 2
    together = run(x)
    assert made.count("rms_norm_rounded") == 2
    for mine, other, beside in zip(alone, apart, together, strict=True):
        assert np.isfinite(mine).all()
        assert (mine == other).all()
        assert (mine == beside[:1]).all()

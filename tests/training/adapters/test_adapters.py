"""Parameter-efficient methods: formulas in float64, published bits, resumed runs, refusals."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.autodiff import backward
from logitless.graph.execution.session import Session
from logitless.graph.ops.elementwise import mul, sum_to
from logitless.graph.tensor import feed
from logitless.graph.testing.evaluate import evaluate
from logitless.models.adapters.lora import read_adapter, write_adapter
from logitless.models.adapters.low_rank import LowRank
from logitless.models.adapters.merge import merge
from logitless.models.adapters.stacked_lora import StackedLora
from logitless.models.batch import Sequences
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import define_model, hparams_of
from logitless.models.weights.weights import check_weights
from logitless.training.adapters import lora as start
from logitless.training.adapters.lora import lora, principal, start_from
from logitless.training.adapters.neftune import Neftune
from logitless.training.adapters.options import LoraOptions
from logitless.training.checkpoint import read_checkpoint, save_checkpoint
from logitless.training.config import TrainingConfig
from logitless.training.data.packing import Sample, StridedSamples
from logitless.training.data.sampler import Sampler
from logitless.training.errors import TrainingError
from logitless.training.save import save_result
from logitless.training.trainer import Step, Trainer
from tests.models.adapters.test_lora import refusals

TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 12, np.uint8).astype(np.int32) + 3
METHODS = {
    "lora": LoraOptions(3, 5.0),
    "rslora": LoraOptions(3, 5.0, rslora=True),
    "dora": LoraOptions(3, 5.0, dora=True),
    "dora, rslora": LoraOptions(3, 5.0, dora=True, rslora=True),
    "pissa": LoraOptions(3, 5.0, start="pissa"),
    "targets": LoraOptions(3, 5.0, targets=("q_proj", "ffn_*", "blk.1.attn_v")),
}
WEIGHT = "blk.0.attn_k.weight"  # (16, 32)


class Opened:
    """A session with a model."""

    def __init__(self, path: Path) -> None:
        self.gguf = GGUFFile.open(path)
        self.h = hparams_of(self.gguf)
        self.session = Session([CPUBackend(1)])
        self.base = define_model(self.session, self.gguf, self.h, 64)

    def trainer(self, options: LoraOptions, **changes: Any) -> Trainer:
        trainable = lora(self.session, self.base, options, gguf=self.gguf)
        data = StridedSamples(TEXT, 16)
        order = Sampler(data, np.arange(len(data), dtype=np.int32), "text", 5)
        default = {"ctx_size": 16, "batch_size": 4, "iterations": 4, "learning_rate": 1e-2, "weight_decay": 0.1}
        return Trainer(trainable, TrainingConfig(**(default | changes)), order, np.zeros(0, np.int32))

    def close(self) -> None:
        self.session.close()
        self.gguf.close()


@pytest.fixture
def opened(model: Path) -> Iterator[Callable[[], Opened]]:
    made: list[Opened] = []

    def open_one() -> Opened:
        made.append(Opened(model))
        return made[-1]

    yield open_one
    for one in made:
        one.close()


# -- formulas


def layer(one: Opened, options: LoraOptions) -> dict[str, Any]:
    """One adapted matrix in float64: its inputs, output and gradients."""
    trainable = lora(one.session, one.base, options, gguf=one.gguf)
    rng = np.random.default_rng(1)
    values = {n: t.astype(np.float64) for n, t in trainable.read().items() if n.startswith(WEIGHT)}
    moved = {n: t + 0.2 * rng.normal(size=t.shape) for n, t in values.items()}  # B is not 0
    frozen = {n: one.session.read(t.name) for n, t in trainable.frozen}
    w = one.session.read(WEIGHT).astype(np.float64)
    x, slope = feed("x", (5, 32)), feed("slope", (5, 16))
    y = trainable.model.weights.block(0).linear("attn_k", x)
    variables = {f"train.{n}": v for n, v in {**moved, **frozen}.items()} | {WEIGHT: w}
    params = {n: t for n, t in zip(trainable.names, trainable.params, strict=True) if n.startswith(WEIGHT)}
    gradients = backward(sum_to(mul(y, slope), shape=()), [x, *params.values()])
    inputs = {"x": rng.normal(size=(5, 32)), "slope": rng.normal(size=(5, 16))}
    result = evaluate([y, gradients[x], *(gradients[t] for t in params.values())], inputs, variables)
    names = [n.removeprefix(f"{WEIGHT}.") for n in params]
    return {
        "w": w,
        **inputs,
        "start": {n.removeprefix(f"{WEIGHT}."): v for n, v in values.items()},
        "values": {n.removeprefix(f"{WEIGHT}."): v for n, v in moved.items()},
        "y": result[0],
        "of_x": result[1],
        "gradients": dict(zip(names, result[2:], strict=True)),
    }


def formula(found: dict[str, Any], options: LoraOptions, a: Any, b: Any, m: Any, norm: Any, x: Any) -> Any:
    """The papers' output of an adapted matrix. `norm`: DoRA's, which counts as a constant."""
    factor = options.alpha / (np.sqrt(3) if options.rslora else 3)
    w = found["w"]
    if options.start == "pissa":  # over the residual matrix
        w = w - factor * found["start"]["lora_b"] @ found["start"]["lora_a"]
    v = w + factor * b @ a
    return x @ (v if m is None else (m / norm)[:, None] * v).T


@pytest.mark.parametrize("name", [n for n in METHODS if n != "targets"])
def test_output_and_gradients_are_the_papers(name: str, opened: Callable[[], Opened]) -> None:
    options = METHODS[name]
    result = layer(opened(), options)
    values, x = result["values"], result["x"]
    a, b, m = (values.get(f"lora_{k}") for k in "abm")
    factor = options.alpha / (np.sqrt(3) if options.rslora else 3)
    norm = np.linalg.norm(result["w"] + factor * b @ a, axis=1)
    np.testing.assert_allclose(result["y"], formula(result, options, a, b, m, norm, x), rtol=1e-5, atol=1e-6)
    for i, (part, slope) in enumerate(result["gradients"].items()):
        rng = np.random.default_rng(i)
        way = rng.normal(size=slope.shape)

        def loss(step: float, part: str = part, way: Any = way) -> float:
            moved = {**values, part: values[part] + step * way}
            y = formula(result, options, *(moved.get(f"lora_{k}") for k in "abm"), norm, x)
            return float((y * result["slope"]).sum())

        central = (loss(1e-4) - loss(-1e-4)) / 2e-4
        assert float((slope * way).sum()) == pytest.approx(central, rel=1e-5), part


_PEFT = """
import json, sys, numpy as np, torch
from peft import LoraConfig, get_peft_model
found, options = json.load(sys.stdin)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.k = torch.nn.Linear(32, 16, bias=False)
        self.k.weight.data = torch.tensor(found["w"], dtype=torch.float32)
    def forward(self, x):
        return self.k(x)
pissa = options["start"] == "pissa"
config = LoraConfig(r=3, lora_alpha=5, target_modules=["k"], use_rslora=options["rslora"], use_dora=options["dora"],
                    init_lora_weights="pissa" if pissa else True)
net = get_peft_model(Net(), config).double()
own = net.base_model.model.k
starts = {"lora_a": own.lora_A["default"].weight, "lora_b": own.lora_B["default"].weight}
if options["dora"]:
    starts["lora_m"] = own.lora_magnitude_vector["default"].weight
product = (own.lora_B["default"].weight @ own.lora_A["default"].weight).detach().numpy().tolist()
magnitude = starts["lora_m"].detach().numpy().tolist() if options["dora"] else None
for name, p in starts.items():
    p.data = torch.tensor(found["values"][name], dtype=torch.float64).reshape(p.shape)
x = torch.tensor(found["x"], dtype=torch.float64, requires_grad=True)
y = net(x)
(y * torch.tensor(found["slope"], dtype=torch.float64)).sum().backward()
print(json.dumps({"y": y.tolist(), "of_x": x.grad.tolist(), "product": product, "magnitude": magnitude,
                  "gradients": {n: p.grad.tolist() for n, p in starts.items()}}))
"""


@pytest.mark.parametrize("name", [n for n in METHODS if n != "targets"])
def test_output_and_gradients_are_pefts(name: str, opened: Callable[[], Opened], request: Any) -> None:
    python = request.config.getoption("--peft")
    if not python:
        pytest.skip("--peft PYTHON names one with peft and torch")
    options = METHODS[name]
    result = layer(opened(), options)
    given = json.dumps(
        [result, {"rslora": options.rslora, "dora": options.dora, "start": options.start}], default=np.ndarray.tolist
    )
    ran = subprocess.run([python, "-c", _PEFT], input=given, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    theirs = json.loads(ran.stdout)
    if options.start == "pissa":
        ours = result["start"]["lora_b"] @ result["start"]["lora_a"]
        np.testing.assert_allclose(ours, theirs["product"], rtol=1e-5, atol=1e-6)
    if options.dora:
        np.testing.assert_allclose(result["start"]["lora_m"], theirs["magnitude"], rtol=1e-5)
    np.testing.assert_allclose(result["y"], theirs["y"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result["of_x"], theirs["of_x"], rtol=1e-5, atol=1e-5)
    for part, slope in result["gradients"].items():
        np.testing.assert_allclose(slope, np.reshape(theirs["gradients"][part], slope.shape), rtol=1e-5, atol=1e-5)


def test_pissa_begins_at_the_best_approximation(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    w = (rng.normal(size=(40, 24)) @ np.diag(0.7 ** np.arange(24)) @ rng.normal(size=(24, 24))).astype(np.float32)
    u, s, v = np.linalg.svd(w.astype(np.float64), full_matrices=False)
    best = u[:, :3] * s[:3] @ v[:3]
    for most in (start.EXACT_SVD, 8):
        monkeypatch.setattr(start, "EXACT_SVD", most)
        a, b = principal(w, 3, 2.0, seed=1)
        assert (a.shape, b.shape) == ((3, 24), (40, 3))
        np.testing.assert_allclose(2 * b @ a, best, atol=1e-4)
        assert np.array_equal(a, principal(w, 3, 2.0, seed=1)[0])
    with pytest.raises(TrainingError, match=r"lora_r: 25 .* 40 × 24"):
        principal(w, 25, 1.0, seed=1)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_begins_at_the_models_loss(name: str, opened: Callable[[], Opened]) -> None:
    result = []
    for options in (METHODS[name], LoraOptions(2)):
        trainer = opened().trainer(options)
        result.append(trainer.steps.evaluate(trainer.order.take(4)).losses)
    np.testing.assert_allclose(result[0], result[1], rtol=2e-5)


# -- runs


@pytest.mark.parametrize("name", METHODS)
def test_requests_get_the_bits_of_the_trainers_forward_pass(
    name: str, opened: Callable[[], Opened], tmp_path: Path
) -> None:
    """Published, written, read and stacked beside another adapter."""
    one = opened()
    trainer = one.trainer(METHODS[name])
    trainer.fit()
    save_result(tmp_path / "a.gguf", trainer.trainable, one.gguf, one.h)
    assert bool(refusals(tmp_path / "a.gguf", Path(one.gguf.path))) == METHODS[name].dora  # by llama.cpp
    other = lora(one.session, one.base, LoraOptions(4, seed=9), "other")
    stack = StackedLora(one.session, check_weights(one.gguf, one.h))
    stack.put(other.adapter())
    handle = stack.put(read_adapter(tmp_path / "a.gguf", one.gguf, one.h))
    scales = feed("lora_scales", (24, stack.n_columns))
    served = one.base.adapted(LowRank(stack.pairs, scales, deltas=stack.deltas))
    inputs = trainer.steps.feeds(trainer.order.take(2), 1.0)
    sequences = Sequences.feeds(2, 12)
    inputs = {n: v.reshape(4, 16)[:2, :12].reshape(-1) for n, v in inputs.items() if n in ("tokens", "pos", "start")}
    inputs["start"] = np.zeros_like(inputs["start"])
    inputs["pos"] = np.tile(np.arange(12, dtype=np.int32), 2)
    expected, base = (
        one.session.compute([m.training_logits(sequences)], inputs)[0] for m in (trainer.trainable.model, one.base)
    )
    assert not np.array_equal(expected, base)
    rows = [((handle, 1.0),)] * 12 + [()] * 12
    (result,) = one.session.compute(
        [served.training_logits(sequences)], inputs | {"lora_scales": stack.row_scales(rows, 24)}
    )
    assert np.array_equal(result[:12], expected[:12])
    assert np.array_equal(result[12:], base[12:])


@pytest.mark.parametrize("name", METHODS)
def test_a_merged_model_computes_what_the_adapter_does(name: str, opened: Callable[[], Opened], tmp_path: Path) -> None:
    one = opened()
    trainer = one.trainer(METHODS[name])
    trainer.fit()
    merge(tmp_path / "m.gguf", one.gguf, one.h, [(trainer.trainable.adapter(), 1.0)])
    merged = Opened(tmp_path / "m.gguf")
    samples = trainer.order.take(4)
    expected = trainer.steps.evaluate(samples).losses
    result = merged.trainer(LoraOptions(1)).steps.evaluate(samples).losses
    np.testing.assert_allclose(result, expected, rtol=2e-4, atol=2e-5)
    merged.close()


@pytest.mark.parametrize("name", METHODS)
def test_a_run_resumes_to_the_same_bytes(name: str, opened: Callable[[], Opened], tmp_path: Path) -> None:
    """With noise, and a rate of its own for B; a checkpoint has the adapter's options."""
    changes = {"neftune_noise_alpha": 5.0, "seed": 7, "lora_plus_ratio": 8.0, "grad_acc": 2}
    whole = opened().trainer(METHODS[name], **changes)
    whole.fit()
    half = opened().trainer(METHODS[name], **{**changes, "iterations": 2})
    half.fit()
    save_checkpoint(tmp_path / "c.gguf", half, "llama")
    checkpoint = read_checkpoint(tmp_path / "c.gguf")
    assert checkpoint.lora == METHODS[name]
    resumed = opened().trainer(replace(METHODS[name], seed=3), **changes)
    checkpoint.restore(resumed)
    resumed.fit()
    for part, values in whole.trainable.read().items():
        assert np.array_equal(values, resumed.trainable.read()[part]), part
    assert whole.trainable.adapter().digest == resumed.trainable.adapter().digest


def test_lora_plus_multiplies_the_rate_of_b(opened: Callable[[], Opened]) -> None:
    result = []
    for ratio in (1.0, 4.0):
        changes = {"optimizer": "sgd", "weight_decay": 0, "lora_plus_ratio": ratio}
        trainer = opened().trainer(LoraOptions(2), iterations=1, **changes)
        trainer.fit()
        result.append(trainer.trainable.read())
    for name, values in result[0].items():
        assert values.any()
        assert np.array_equal(result[1][name], values * (4 if name.endswith("lora_b") else 1))


def test_noise_follows_from_seed_step_and_window() -> None:
    tokens = np.zeros(12, np.int32)
    sample = Sample(tokens, tokens, np.ones(12, np.float32), starts=(0, 4))
    noise = Neftune(5.0, 1)
    result = noise.of([sample, sample], 3, 6, (36, 8))
    bounds = 5 / np.sqrt(np.array([4] * 4 + [8] * 8) * 8)  # of sequences of 4 and 8 tokens
    assert (np.abs(result[:12]) <= bounds[:, None]).all()
    assert (np.abs(result[:12]).max(1) > 0.4 * bounds).all()
    assert not result[24:].any()  # there is no third window
    assert np.array_equal(result[12:24], noise.of([sample], 3, 7, (12, 8)))
    for other in (Neftune(5.0, 2).of([sample], 3, 6, (12, 8)), noise.of([sample], 4, 6, (12, 8)), result[12:24]):
        assert not np.array_equal(result[:12], other)


def test_noise_is_that_of_training_alone(opened: Callable[[], Opened]) -> None:
    losses, evaluated = [], []
    for alpha in (0.0, 50.0):
        trainer = opened().trainer(LoraOptions(2), neftune_noise_alpha=alpha, iterations=1)
        evaluated.append(trainer.steps.evaluate(trainer.order.take(4)).losses)
        trainer.fit(lambda e: losses.append(e.loss) if isinstance(e, Step) else None)
    assert np.array_equal(*evaluated)
    assert abs(losses[0] - losses[1]) > 1e-4


def test_a_run_starts_from_an_rslora_file(opened: Callable[[], Opened], tmp_path: Path) -> None:
    one = opened()
    first, second = (
        lora(one.session, one.base, LoraOptions(3, 5.0, rslora=True, seed=s), f"r{s}", one.gguf) for s in (0, 1)
    )
    rng = np.random.default_rng(2)
    values = {name: rng.standard_normal(v.shape, np.float32) for name, v in first.read().items()}
    first.write(values)
    write_adapter(tmp_path / "a.gguf", first.adapter(), one.gguf, one.h)
    start_from(second, read_adapter(tmp_path / "a.gguf", one.gguf, one.h))
    for name, result in second.read().items():
        np.testing.assert_allclose(result, values[name], rtol=1e-6)


# -- targets and refusals


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("q_proj", "v_proj"), ["attn_q", "attn_v"]),
        (("ffn_*",), ["ffn_gate", "ffn_down", "ffn_up"]),
        (("all-linear",), ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_down", "ffn_up"]),
        (("blk.0.attn_k", "gate_up_proj"), ["attn_k", "ffn_gate", "ffn_up"]),
        (("embed_tokens", "down_proj"), ["token_embd", "ffn_down"]),
    ],
)
def test_targets_choose_matrices(targets: tuple[str, ...], expected: list[str], opened: Callable[[], Opened]) -> None:
    one = opened()
    result = lora(one.session, one.base, LoraOptions(2, targets=targets))
    names = {n.removesuffix(".weight.lora_a").removeprefix("blk.0.") for n in result.names if n.endswith("lora_a")}
    assert {n for n in names if not n.startswith("blk.1")} == set(expected)
    assert ("blk.1.attn_k.weight.lora_a" in result.names) == ("all-linear" in targets)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ("q_proj", "experts")}, "lora_target_modules: the model has no matrix 'experts'"),
        ({"rslora": True}, "lora_rslora: needs a lora_alpha"),
        ({"start": "zero"}, "lora_init: 'zero' is not one of"),
        ({"dora": True, "start": "pissa"}, "lora_dora: begins at the model"),
        ({"dora": True, "targets": ("embed_tokens",)}, "lora_dora: is of matrices"),
        ({"start": "pissa", "targets": ("blk.0.attn_norm",)}, "lora_init: is of matrices"),
    ],
)
def test_options_that_cannot_be_are_refused(options: Any, message: str, opened: Callable[[], Opened]) -> None:
    one = opened()
    with pytest.raises(TrainingError, match=message):
        lora(one.session, one.base, LoraOptions(2, **options), gguf=one.gguf)

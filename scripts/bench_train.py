"""`scripts/bench-train`: training steps of synthetic models here and in torch by turns, a process each."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from examples import mnist
from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.autodiff import backward
from logitless.graph.execution.session import Session
from logitless.graph.gradient_checkpointing import choose, layers_of
from logitless.graph.ops.elementwise import sum_to
from logitless.graph.ops.training.optimizer import adamw_params, adamw_step
from logitless.graph.tensor import Tensor, const, feed
from logitless.models.architectures.rope import Rotary
from logitless.models.batch import Sequences
from logitless.models.hparams.hparams import Hparams
from logitless.models.hparams.rope_scaling import RopeScaling
from logitless.models.model import Model
from logitless.models.synthetic.model import SHAPES
from logitless.models.weights.tensor_map import tensor_map
from logitless.models.weights.weights import Weights
from logitless.training.head import gradients
from logitless.training.reporting.plot import plot

N_SEQUENCES, LENGTH = 4, 128
N_IMAGES, STEPS_OF_DIGITS = 6000, 10  # times the steps of a model
ROOT = Path(__file__).resolve().parent.parent


class Step:
    """The training step of a synthetic shape: every weight is a state and has moments."""

    def __init__(self, shape_name: str, threads: int) -> None:
        s = SHAPES[shape_name]
        rope = (s.head_dim, s.rope_base, RopeScaling())
        sizes = (s.n_ctx, s.n_embd, s.n_layer, s.n_ff, s.n_head, s.n_head_kv, s.head_dim, s.head_dim, s.n_vocab)
        h = Hparams("llama", *sizes, 1e-5, *rope, s.head_dim**-0.5)
        self.session = session = Session([CPUBackend(threads)])
        self.rng = np.random.default_rng(0)
        weights = {
            name: session.define(name, part.shape, "f32", lambda shape=part.shape: self._first(shape))  # type: ignore[misc]
            for name, part in tensor_map(h, {})
            if part.required
        }
        frequency = (s.rope_base ** (-np.arange(0, s.head_dim, 2) / s.head_dim)).astype(np.float32)
        rotary = Rotary(session.define("frequency", frequency.shape, "f32", lambda: frequency.view(np.uint8)), 1.0)
        self.model, self.params = Model(h, Weights(weights), rotary), list(weights.values())
        self.moments = {p.name: [session.define(f"{kind}.{p.name}", p.shape) for kind in "mv"] for p in self.params}

    def _first(self, shape: tuple[int, ...]) -> Any:
        small = self.rng.standard_normal(shape, np.float32) * 0.02
        return (np.ones(shape, np.float32) if len(shape) == 1 else small).reshape(-1).view(np.uint8)

    def build(self, segment: int | None = None) -> list[Tensor]:
        """`segment`: layers between checkpoints, 0 as the formula has it, None for no checkpoints."""
        sequences = Sequences.feeds(N_SEQUENCES, LENGTH)
        found, told = gradients(self.model, (sequences, sequences), self.params, segment=segment)
        adamw, one = feed("adamw", (9,)), const(1.0)
        steps = [adamw_step(p, *self.moments[p.name], found[p], adamw, one) for p in reversed(self.params)]
        return [*told, *steps]

    def feeds(self) -> dict[str, Any]:
        n = N_SEQUENCES * LENGTH
        tokens = self.rng.integers(0, self.model.hparams.n_vocab, n).astype(np.int32)
        feeds: dict[str, Any] = {"tokens": tokens, "pos": np.arange(n, dtype=np.int32) % LENGTH}
        return (
            feeds
            | {"start": np.zeros(n, np.int32), "targets": np.roll(tokens, -1)}
            | {"weight": np.full(n, 1 / n, np.float32)}
        )


def ours(shape_name: str, threads: int, n_steps: int, segment: int | None) -> dict[str, float]:
    """Tokens a second of the best step, and the process's largest memory in bytes."""
    step = Step(shape_name, threads)
    plan, feeds, times = step.session.plan(lambda: step.build(segment)), step.feeds(), []
    for i in range(n_steps):
        start = time.perf_counter()
        n_told = plan.n_fetches - len(step.params)
        plan.run({**feeds, "adamw": adamw_params(i + 1, 1e-3)}, [None] * n_told + [0] * len(step.params))
        times.append(time.perf_counter() - start)
    step.session.close()
    n = N_SEQUENCES * LENGTH
    return {"tokens_s": n / min(times), "median": n / sorted(times)[len(times) // 2], "bytes": _peak()}


def digits(threads: int, n_steps: int) -> dict[str, float]:
    """The fully connected network of the digits, 784-500-10, in steps of 1000 images, 500 at a time."""
    session = Session([CPUBackend(threads)])
    rng, n = np.random.default_rng(0), N_IMAGES
    network, times = mnist.fc(session), []
    data = network.table("digits", rng.random((n, 784), np.float32), rng.integers(0, 10, n).astype(np.int32))
    for _ in range(n_steps * STEPS_OF_DIGITS):
        start = time.perf_counter()
        network.epoch(data, rng.permutation(n)[: network.batches.logical].astype(np.int32))
        times.append(time.perf_counter() - start)
    session.close()
    n = network.batches.logical
    return {"tokens_s": n / min(times), "median": n / sorted(times)[len(times) // 2], "bytes": _peak()}


def memory(shape_name: str) -> dict[str, list[tuple[float, float]]]:
    """The curve of checkpointing: MB of a step's arena by the layers between two checkpoints, and without any."""
    step = Step(shape_name, 1)
    loss = sum_to(step.model.training_logits(Sequences.feeds(N_SEQUENCES, LENGTH)), shape=())
    chosen = choose(loss, backward(loss, step.params), layers_of(loss))
    print(f"{shape_name}: u = {chosen.u / 1e6:.2f} MB, v = {chosen.v / 1e6:.2f} MB, a = {chosen.a:.1f}")
    found: dict[int | None, float] = {}
    for segment in (None, *(k for k in (1, 2, 3, 4, 5, 6, 10, 15, 30) if k <= step.model.hparams.n_layer)):
        _, layout = step.session.measure(lambda segment=segment: step.build(segment))  # type: ignore[misc]
        found[segment] = sum(layout.sizes.values()) / 1e6
        what = "no checkpoints" if segment is None else f"a checkpoint every {segment} layers"
        print(f"{what}: {found[segment]:.0f} MB")
    without = found.pop(None)
    curve = [(float(k), size) for k, size in found.items() if k is not None]
    return {shape_name: curve, f"{shape_name} without": [(1.0, without), (curve[-1][0], without)]}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def main() -> None:
    parser = argparse.ArgumentParser(description="training steps here and in torch")
    parser.add_argument("--torch", metavar="PYTHON", help="an interpreter with torch")
    parser.add_argument("--shape", action="append", help="15M, 135M, mnist-fc (default: all)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="steps a turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--checkpoint", type=int, metavar="LAYERS", help="layers between checkpoints; 0: the formula's")
    parser.add_argument("--memory", action="store_true", help="only measure the memory that checkpoints save")
    parser.add_argument("--plot", metavar="FILE", help="a picture of that: .svg or .png")
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory:
        curves = [memory(shape) for shape in args.shape or ["135M", "15M"]]
        if args.plot:
            every = {name: curve for found in curves for name, curve in found.items()}
            plot(args.plot, every, "MB of a step of 512 tokens", "layers between two checkpoints")
        return
    for shape in args.shape or ["mnist-fc", "15M", "135M"]:
        if args.ours:
            if shape == "mnist-fc":
                print(json.dumps(digits(args.threads, args.steps)))
            else:
                print(json.dumps(ours(shape, args.threads, args.steps, args.checkpoint)))
            continue
        keep = [] if args.checkpoint is None else ["--checkpoint", str(args.checkpoint)]
        commands = {"here": [sys.executable, "-m", "scripts.bench_train", "--ours", *keep]}
        if args.torch:
            commands["torch"] = [args.torch, str(ROOT / "scripts" / "bench_train_torch.py")]
        best: dict[str, dict[str, float]] = {}
        for _ in range(args.turns):
            for who, command in commands.items():
                options = ["--shape", shape, "--threads", str(args.threads), "--steps", str(args.steps)]
                out = subprocess.run([*command, *options], cwd=ROOT, check=True, capture_output=True, text=True).stdout
                found = json.loads(out.strip().splitlines()[-1])
                if who not in best or found["tokens_s"] > best[who]["tokens_s"]:
                    best[who] = found
        what = "images" if shape == "mnist-fc" else "tokens"
        for who, found in best.items():
            speed, median = found["tokens_s"], found["median"]
            print(f"{shape} {who}: {speed:.0f} {what}/s (median {median:.0f}), {found['bytes'] / 1e9:.2f} GB at most")
        if "torch" in best:
            faster, typical, less = (best["here"][k] / best["torch"][k] for k in ("tokens_s", "median", "bytes"))
            print(f"{shape}: {faster:.2f} × torch's speed (medians {typical:.2f}), {less:.2f} × its memory", flush=True)


if __name__ == "__main__":
    main()

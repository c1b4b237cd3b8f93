"""Training steps: gradients of every architecture's weights and of adapters, and the optimizer step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.backends.cpu.compiler import warmup
from logitless.backends.cpu.lowering.registry import LOWERINGS
from logitless.graph.autodiff import backward
from logitless.graph.execution.partition import partition
from logitless.graph.execution.session import Session
from logitless.graph.ops.elementwise import add, mul, scale, sum_to
from logitless.graph.ops.linear import linear
from logitless.graph.ops.training.loss import cross_entropy
from logitless.graph.ops.training.optimizer import adamw_params, adamw_step, clip_factor, global_norm
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor, feed, variable
from logitless.graph.testing.evaluate import evaluate
from logitless.models.batch import Batch, PagedMemory, Sequences
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import Model, define_model, hparams_of
from logitless.models.weights.weights import Weights
from tests.helpers.architecture_specs import DELTA, OF_MAMBA, OF_XIELU
from tests.helpers.mla_specs import LATENT
from tests.helpers.reference_model import Spec, write

ARCHITECTURES = ("llama-gqa-F32", "qwen2-F32", "qwen3-F32", "gemma2-F32", "gemma3-F32", "phi3-F32")
SMALL: dict[str, Any] = {"n_embd": 32, "n_head": 2, "n_head_kv": 1, "n_ff": 16}
SMALL_MAMBA = OF_MAMBA | {"ssm.state_size": 8, "ssm.inner_size": 64}
SMALL_STATES = DELTA | {"ssm.state_size": 8, "ssm.inner_size": 32}
OF_LATENT = ("deepseek2 in groups", "deepseek2 together", "minicpm3", "plm")
MADE_UP = {
    "qwen3moe": Spec("qwen3moe", n_embd=32, n_head=2, n_head_kv=1, n_ff=16, n_expert=4, n_expert_used=2),
    "gpt-oss": Spec(
        *("gpt-oss", 32, 2, 2, 1, 0, 16),
        n_expert=4,
        n_expert_used=2,
        biases=("attn_v", "ffn_gate_inp", "ffn_gate_exps", "ffn_down_exps"),
        keys={"attention.sliding_window": 4},
    ),
    "llama4": Spec(
        "llama4",
        n_layer=4,
        n_expert=4,
        n_expert_used=2,
        keys={"interleave_moe_layer_step": 2, "attention.chunk_size": 2, "attention.temperature_length": 2},
        **SMALL,
    ),
    "command-r": Spec("command-r", keys={"logit_scale": 0.25}, **SMALL),
    "stablelm": Spec("stablelm", untied=True, biases=("attn_norm", "ffn_norm", "output_norm"), **SMALL),
    "starcoder2": Spec("starcoder2", biases=("ffn_norm", "ffn_up"), **SMALL),
    "gptneox": Spec("gptneox", fused=True, untied=True, keys={"use_parallel_residual": True}, **SMALL),
    "arcee": Spec("arcee", **SMALL),
    "apertus": Spec("apertus", keys=OF_XIELU, **SMALL),
    "hunyuan-dense": Spec("hunyuan-dense", **SMALL),
    "command-r plus": Spec(
        "command-r",
        traits=(
            "attn_q_norm",
            "attn_k_norm",
        ),
        **SMALL,
    ),
    "gpt2": Spec("gpt2", fused=True, biases=("ffn_up", "output_norm"), **SMALL),
    "olmo2": Spec("olmo2", n_layer=4, untied=True, keys={"attention.sliding_window": 4}, **SMALL),
    "exaone4": Spec("exaone4", n_layer=4, keys={"attention.sliding_window": 4}, **SMALL),
    "mistral3": Spec(
        "mistral3",
        keys={
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 2,
            "attention.temperature_scale": 0.5,
        },
        **SMALL,
    ),
    **{name: replace(LATENT[name], n_embd=32, n_head=2, n_head_kv=2, n_ff=16) for name in OF_LATENT},
    "qwen35": Spec("qwen35", n_layer=3, keys=SMALL_STATES, **SMALL),
    "lfm2": Spec("lfm2", n_layer=3, keys={"shortconv.l_cache": 3, "attention.head_count_kv": [0, 1, 0]}, **SMALL),
    "granitehybrid": Spec(
        "granitehybrid",
        biases=("ssm_conv1d",),
        keys=SMALL_MAMBA | {"attention.head_count_kv": [0, 1], "residual_scale": 0.5},
        **SMALL,
    ),
    "nemotron_h_moe": Spec(
        "nemotron_h_moe",
        n_layer=3,
        n_expert=4,
        n_expert_used=2,
        keys=SMALL_MAMBA
        | {"attention.head_count_kv": [0, 0, 1], "feed_forward_length": [0, 16, 0], "moe_latent_size": 16}
        | {"expert_shared_feed_forward_length": 16},
        **SMALL,
    ),
    "falcon-h1": Spec("falcon-h1", n_layer=1, keys=SMALL_MAMBA, **SMALL),
    "mamba2": Spec("mamba2", biases=("ssm_conv1d",), keys=SMALL_MAMBA | {"attention.head_count": 0}, **SMALL),
    "qwen2moe": Spec("qwen2moe", n_expert=4, n_expert_used=2, keys={"expert_shared_feed_forward_length": 16}, **SMALL),
    "glm4moe": Spec(
        "glm4moe",
        n_expert=4,
        n_expert_used=2,
        keys={"leading_dense_block_count": 1, "expert_weights_norm": False, "expert_weights_scale": 1.5},
        **SMALL,
    ),
}
GEMMA4 = {
    "attention.sliding_window": 4,
    "attention.sliding_window_pattern": [True, False] * 2,
    "attention.key_length_swa": 8,
    "attention.value_length_swa": 8,
    "embedding_length_per_layer_input": 8,
    "attention.shared_kv_layers": 2,
    "feed_forward_length": [16, 16, 32, 32],
}
MADE_UP |= {
    "gemma4": Spec("gemma4", n_layer=4, head_dim=16, keys=GEMMA4, traits=("layer_output_scale",), **SMALL),
    "gemma4, experts": Spec(
        "gemma4",
        n_layer=4,
        head_dim=16,
        n_expert=4,
        n_expert_used=2,
        keys=GEMMA4 | {"attention.shared_kv_layers": 0, "expert_feed_forward_length": 16},
        traits=("keys as values", "layer_output_scale"),
        **SMALL,
    ),
}
MADE_UP["gemma3n"] = Spec(
    "gemma3n",
    n_layer=4,
    keys={
        "attention.sliding_window": 4,
        "attention.sliding_window_pattern": [True, False] * 2,
        "embedding_length_per_layer_input": 8,
        "attention.shared_kv_layers": 2,
        "activation_sparsity_scale": [0.5, 0.5, float("-inf"), float("-inf")],
    },
    **SMALL,
)
OF_GPT_OSS = {"causal_attention", "causal_attention_back", "sinks_back"}
N_SEQUENCES, LENGTH, STEP = 2, 6, 1e-5


@dataclass
class Trained:
    """A model whose float weights are mutable states, and what its loss is fed."""

    model: Model
    session: Session
    values: dict[str, Any]

    @classmethod
    def open(cls, path: Path, session: Session) -> Trained:
        gguf = GGUFFile.open(path)
        model = define_model(Session(session.backends), gguf, hparams_of(gguf), 32)
        weights, values = {}, {}
        for name, t in model.weights.tensors.items():
            weights[name] = session.define(name, t.shape, t.dtype)
            values[name] = np.random.default_rng(len(values)).normal(size=t.shape) * 0.3 + (len(t.shape) == 1)
            if name.endswith("ssm_a"):  # states fade
                values[name] *= -1
            session.write(name, values[name].astype(np.float32))
        rotary = model.rotary
        frequencies: dict[Tensor, Tensor] = {}
        for i, t in enumerate(f for f in (rotary.frequency, rotary.local_frequency) if f is not None):
            frequencies[t] = session.define(f"frequency.{i}", t.shape)
            values[f"frequency.{i}"] = 100.0 ** (-np.arange(t.shape[0]) / t.shape[0])
            session.write(f"frequency.{i}", values[f"frequency.{i}"].astype(np.float32))
        local = frequencies[rotary.local_frequency] if rotary.local_frequency is not None else None
        rotary = replace(rotary, frequency=frequencies[rotary.frequency], local_frequency=local)
        if rotary.temperature is not None:
            rotary = replace(rotary, temperature=session.define("temperature", rotary.temperature.shape))
            values["temperature"] = 1 + np.arange(rotary.temperature.shape[0], dtype=np.float32)[:, None]
            session.write("temperature", values["temperature"])
        return cls(Model(model.hparams, Weights(weights), rotary), session, values)

    def loss(self, model: Model | None = None) -> Tensor:
        model = model or self.model
        sequences = Sequences.feeds(N_SEQUENCES, LENGTH)
        losses = cross_entropy(model.training_logits(sequences), feed("targets", sequences.tokens.shape, "i32"))
        return sum_to(mul(losses, feed("weight", losses.shape)), shape=())

    def feeds(self) -> dict[str, Any]:
        n, rng = N_SEQUENCES * LENGTH, np.random.default_rng(5)
        targets = rng.integers(0, self.model.hparams.n_vocab, n).astype(np.int32)
        targets[2] = -1
        return {
            "tokens": rng.integers(0, self.model.hparams.n_vocab, n).astype(np.int32),
            "pos": np.arange(n, dtype=np.int32) % LENGTH,
            "start": np.zeros(n, np.int32),
            "targets": targets,
            "weight": np.full(n, 1 / (n - 1)),
        }


def kernels_of(session: Session, fetches: list[Tensor]) -> set[str]:
    nodes = [t for segment in partition(fetches, session.backends).segments for t in segment.nodes]
    return {i.kernel for t in nodes for i in LOWERINGS[t.op](t, lambda _: 0) or ()}


@pytest.mark.parametrize("name", [*ARCHITECTURES, *MADE_UP])
def test_gradients_of_every_weight(name: str, shared_data: Path, tmp_path: Path) -> None:
    """Slopes in float64 along one random direction through all weights; each kind of weight
    has one.
    """
    path = shared_data / "models" / f"arch-{name}.gguf"
    if name in MADE_UP:
        write(path := tmp_path / "m.gguf", MADE_UP[name])
    trained = Trained.open(path, Session([CPUBackend(1)]))
    loss, feeds = trained.loss(), trained.feeds()
    feeds["start"][-2:] = LENGTH - 2  # the last window has two texts
    weights = trained.model.weights.tensors
    # which only choose
    params = [w for name, w in weights.items() if not name.endswith("exp_probs_b.bias")]
    gradients = backward(loss, params)
    assert set(gradients) == set(params)
    rng = np.random.default_rng(7)
    slopes = evaluate([gradients[p] for p in params], feeds, trained.values)
    directions = {p.name: rng.normal(size=p.shape) / np.sqrt(p.nbytes / 4) for p in params}
    expected = sum(float((s * directions[p.name]).sum()) for p, s in zip(params, slopes, strict=True))
    moved = [
        {n: v + sign * STEP * directions[n] if n in directions else v for n, v in trained.values.items()}
        for sign in (1, -1)
    ]
    ahead, behind = (float(evaluate([loss], feeds, values)[0]) for values in moved)
    assert expected == pytest.approx((ahead - behind) / (2 * STEP), rel=1e-6)
    assert all(np.abs(s).max() > 0 for s in slopes)
    fetches = [loss, *gradients.values()]
    plan: Any = trained.session.plan(lambda: fetches)
    fallbacks = {op for program in plan.programs for op in program.fallbacks}
    assert fallbacks == (OF_GPT_OSS if name == "gpt-oss" else set())
    assert name in MADE_UP or kernels_of(trained.session, fetches) <= set(warmup.TRAINING)
    for gradient, target in zip(plan.run(feeds)[1:], slopes, strict=True):
        least = 1e-7 if target.size == 1 else 0  # the scale of Gemma 4's last layer, before a norm, has a slope of 1e-6
        np.testing.assert_allclose(gradient, target, atol=max(1e-3 * np.abs(target).max(), least))
    trained.session.close()


@pytest.mark.parametrize("name", ["llama-gqa-F32", "gemma4"])
def test_gradients_through_the_cache_match_those_without_it(name: str, shared_data: Path, tmp_path: Path) -> None:
    """A prompt written into pages and attended to there, against the same tokens as a training
    batch.
    """
    path = shared_data / "models" / f"arch-{name}.gguf"
    if name in MADE_UP:
        write(path := tmp_path / "m.gguf", MADE_UP[name])
    trained = Trained.open(path, Session([CPUBackend(1)]))
    memory = PagedMemory.define(trained.session, trained.model.hparams, 3, (1, 2), "f32", "f32")
    batch, params = Batch.feeds(LENGTH), list(trained.model.weights.tensors.values())
    sequences = Sequences.feeds(1, LENGTH)
    pos = np.arange(LENGTH, dtype=np.int32)
    feeds = {name: values[:LENGTH] for name, values in trained.feeds().items()}
    feeds |= {"slot": 0 * pos, "slot_mapping": pos + 32}
    caches = {t.name: np.zeros(t.shape) for t in memory.full.caches}
    states = {**trained.values, **caches, "tables": np.array([[2, 0]])}
    result = []
    for logits in (trained.model.training_logits(sequences), trained.model.logits(batch, memory)):
        losses = cross_entropy(logits, feed("targets", (LENGTH,), "i32"))
        gradients = backward(sum_to(losses, shape=()), params)
        assert set(gradients) == set(params)
        result.append(evaluate([gradients[p] for p in params], feeds, states))
    for plain, cached in zip(*result, strict=True):
        np.testing.assert_allclose(cached, plain, rtol=1e-9, atol=1e-12)
    trained.session.close()


def test_adapters_get_gradients_frozen_weights_do_not(shared_data: Path) -> None:
    trained = Trained.open(shared_data / "models" / "arch-llama-gqa-F32.gguf", Session([CPUBackend(1)]))
    rng, rank = np.random.default_rng(3), 2
    values, adapters = dict(trained.values), {}
    for name, w in trained.model.weights.tensors.items():
        if len(w.shape) == 2:
            for part, shape in (("a", (rank, w.shape[1])), ("b", (w.shape[0], rank))):
                adapters[f"{name}.{part}"] = variable(f"{name}.{part}", shape)
                values[f"{name}.{part}"] = rng.normal(size=shape) * 0.1

    class Adapted(Weights):
        def block(self, i: int) -> Weights:
            return Adapted(self.tensors, f"{self.prefix}blk.{i}.")

        def linear(self, name: str, x: Tensor) -> Tensor:
            full = f"{self.prefix}{name}.weight"
            low = linear(linear(x, adapters[f"{full}.a"]), adapters[f"{full}.b"])
            return add(super().linear(name, x), scale(low, factor=0.5))

    loss = trained.loss(replace(trained.model, weights=Adapted(trained.model.weights.tensors)))
    used = [t for t in toposort([loss]) if t.name in adapters]
    gradients = backward(loss, used)
    assert set(gradients) == set(used)
    assert {"blk.0.attn_q.weight.a", "blk.0.ffn_down.weight.b"} <= {t.name for t in used}
    directions = {t.name: rng.normal(size=t.shape) for t in used}
    slopes = evaluate([gradients[t] for t in used], trained.feeds(), values)
    expected = sum(float((s * directions[t.name]).sum()) for t, s in zip(used, slopes, strict=True))
    ahead, behind = (
        float(
            evaluate(
                [loss], trained.feeds(), {n: v + sign * STEP * directions.get(n, 0 * v) for n, v in values.items()}
            )[0]
        )
        for sign in (1, -1)
    )
    assert expected == pytest.approx((ahead - behind) / (2 * STEP), rel=1e-5)
    trained.session.close()


def test_training_steps_match_the_oracle(shared_data: Path) -> None:
    """Two clipped AdamW steps in one plan, against the same graph in float64; moments take twice
    the weights' bytes.
    """
    backend = CPUBackend(2)
    trained = Trained.open(shared_data / "models" / "arch-llama-gqa-F32.gguf", Session([backend]))
    session, params = trained.session, list(trained.model.weights.tensors.values())
    moments = {p.name: [session.define(f"{kind}.{p.name}", p.shape) for kind in "mv"] for p in params}
    assert sum(t.nbytes for pair in moments.values() for t in pair) == 2 * sum(p.nbytes for p in params)

    def build() -> list[Tensor]:
        loss = trained.loss()
        gradients = backward(loss, params)
        norm = global_norm(list(gradients.values()))
        factor, adamw = clip_factor(norm, feed("clip", ())), feed("adamw", (9,))
        steps = [
            adamw_step(p, *moments[p.name], gradients[p], adamw, factor, decays=len(p.shape) > 1)
            for p in reversed(params)
        ]
        return [loss, norm, *steps]

    values = {**trained.values, **{t.name: np.zeros(t.shape) for pair in moments.values() for t in pair}}
    losses = []
    for i in (1, 2):
        feeds = {**trained.feeds(), "clip": np.array(1.0), "adamw": adamw_params(i, 0.01, decay=0.1)}
        loss, norm, *_ = session.run("step", build, feeds)
        expected = evaluate(build(), feeds, values)
        assert float(loss) == pytest.approx(float(expected[0]), rel=1e-5)
        assert float(norm) == pytest.approx(float(expected[1]), rel=1e-4)
        losses.append(float(loss))
    assert losses[1] < losses[0]
    assert session.n_plans_built == 1
    programs: Any = session.cached_plan("step", build).programs
    assert [program.fallbacks for program in programs] == [[]]
    assert kernels_of(session, build()) <= set(warmup.TRAINING)
    for p in params:
        # a gradient near 0 may turn a whole step of 0.01 around
        gap = np.abs(session.read(p.name) - values[p.name])
        assert gap.mean() < 1e-6
        assert gap.max() < 0.04
    session.close()
    backend.close()

"""Logits of synthetic models, against an independent forward pass in float64 (test_llama_cpp.py: llama.cpp)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.cli.flags.flags import parse
from logitless.cli.flags.options import MODEL_KEYS
from logitless.cli.setup.model import model_options
from logitless.engine.loading.open_model import metadata_overrides
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.graph.execution.session import Session
from logitless.graph.order import toposort
from logitless.models.batch import Batch, Cached, PagedMemory, Sequences
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.overrides import NONE, Overrides
from logitless.models.model import Model, define_model, hparams_of
from tests.helpers.architecture_specs import GPT_OSS, MAPPED, PLAIN
from tests.helpers.reference_model import REFERENCES, Array, Spec, reference, write
from tests.helpers.reference_rope import plain, yarn

N_TOKENS = 40


# -- ours


def unread(model: Model, memory: PagedMemory) -> set[str]:
    """Weights that neither logits nor scores nor embeddings read; RoPE's factors are read with the file, a visual
    expert for images."""
    batch = Batch.feeds(2)
    x = model.hidden(batch, Cached(memory, batch))
    wanted = [model.head(x), model.projected(x), *([model.scores(x, batch.slot)] if model.ranks else [])]
    read = {node.name for node in toposort(wanted)}
    elsewhere = ("rope_f", *(f"blk.{i}.vis_" for i in range(model.hparams.n_layer)))
    return {name for name in model.weights.tensors if name not in read and not name.startswith(elsewhere)}


def compute(
    path: Path,
    s: Spec,
    ids: Array,
    chunks: Sequence[int] = (N_TOKENS,),
    types: tuple[str, str] = ("f32", "f32"),
    overrides: Overrides = NONE,
) -> Array:
    """Logits of every token; the prompt in chunks, its pages out of order."""
    with GGUFFile.open(path, overrides) as gguf:
        session = Session([CPUBackend(1)])
        try:
            h = hparams_of(gguf)
            model = define_model(session, gguf, h, s.n_ctx)
            memory = PagedMemory.define(session, h, 5, (1, 4), *types, n_states=3)
            assert not unread(model, memory)
            table = np.array([[3, 0, 2, 1]], np.int32)
            session.write("tables", table)
            rows, start = [], 0
            for n in chunks:
                pos = np.arange(start, start + n, dtype=np.int32)
                feeds = {
                    "tokens": ids[pos].astype(np.int32),
                    "pos": pos,
                    "slot": np.zeros(n, np.int32),
                    "slot_mapping": (table[0, pos // 16] * 16 + pos % 16).astype(np.int32),
                }
                feeds |= goes_on(n, len(rows)) if h.recurrent else {}
                rows.append(session.run(n, lambda n=n: [model.logits(Batch.feeds(n), memory)], feeds)[0].copy())  # type: ignore[misc]
                start += n
            return np.concatenate(rows)
        finally:
            session.close()


def goes_on(n: int, chunk: int) -> dict[str, Array]:
    """State rows that continue from the chunk before."""
    begin, end = np.full(n, -1, np.int32), np.full(n, -1, np.int32)
    begin[0], end[-1] = chunk and 1 + (chunk - 1) % 2, 1 + chunk % 2
    return {"begin": begin, "end": end}


def tokens(s: Spec) -> Array:
    return np.random.default_rng(3).integers(0, s.n_vocab, N_TOKENS)


def error(got: Array, want: Array) -> float:
    """The worst difference, in deviations of the logits."""
    return float(np.abs(got - want).max() / want.std())


def no_window(layer: int) -> int:
    return 0


def check(tmp_path: Path, s: Spec, bound: float = 1e-4, rope: Any = None, **more: Any) -> None:
    path = tmp_path / "m.gguf"
    t = write(path, s)
    ids = tokens(s)
    options = {"window": no_window, "scale": s.keys.get("attention.scale") or s.d**-0.5, "caps": (0, 0)} | more
    want = reference(s, t, ids, rope or plain(s), **options)
    assert np.isfinite(want).all()
    assert error(compute(path, s, ids), want) < bound


IN_FLOAT64 = [name for name, s in PLAIN.items() if s.arch in REFERENCES and s.arch != "deepseek2"]


@pytest.mark.parametrize("name", IN_FLOAT64)
def test_logits(tmp_path: Path, name: str) -> None:
    s = PLAIN[name]
    # f16 and bf16 matrices meet activations that may be rounded to their type
    check(tmp_path, s, {"f32": 1e-4, "f16": 5e-3, "bf16": 5e-2}[s.dtype])


@pytest.mark.parametrize("name", sorted(PLAIN.keys() - set(IN_FLOAT64)))
def test_every_weight_of_an_architecture_is_read(tmp_path: Path, name: str) -> None:
    write(path := tmp_path / "m.gguf", s := PLAIN[name])
    assert np.isfinite(compute(path, s, tokens(s), (1,))).all()


def test_rope_of_linear_scaling(tmp_path: Path) -> None:
    for i, keys in enumerate(
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope.scaling.factor": 4.0},  # linear where no type is named
            {"rope.scale_linear": 4.0},  # the old name
        )
    ):
        (folder := tmp_path / str(i)).mkdir()
        s = Spec(keys=keys | {"rope.freq_base": 5000.0})
        check(folder, s, rope=plain(s, base=5000.0, divide=4))
    s = Spec(keys={"rope.scaling.type": "none", "rope.scaling.factor": 4.0})
    check(tmp_path, s)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "phi3"])
def test_rope_of_yarn(tmp_path: Path, arch: str) -> None:
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    s = Spec(arch, n_embd=128, keys=keys | {"rope.scaling.attn_factor": 1.25}, n_ctx_train=256)
    check(tmp_path, s, rope=yarn(s, 4.0, 64, 1.25))


def test_rope_of_yarn_takes_the_training_context_where_no_other_is_named(tmp_path: Path) -> None:
    s = Spec(n_embd=128, keys={"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, n_ctx_train=128)
    check(tmp_path, s, rope=yarn(s, 2.0, 128))


@pytest.mark.parametrize("in_file", [{}, {"rope.scaling.type": "linear", "rope.scaling.factor": 7.0}])
def test_override_counts_as_key_of_the_file(tmp_path: Path, in_file: dict[str, Any]) -> None:
    """As if the file had said so: llama.cpp's --override-kv and --rope-..., which count for the
    file's architecture."""
    path = tmp_path / "m.gguf"
    s = Spec("qwen2", n_embd=128, keys=in_file, n_ctx_train=256)
    t = write(path, s)
    words = ["--rope-scaling", "yarn", "--rope-freq-scale", "0.25", "--yarn-orig-ctx", "64"]
    flags = parse(MODEL_KEYS.flags, [*words, "--override-kv", "qwen2.rope.scaling.attn_factor=float:1.25"], {})
    want = reference(s, t, tokens(s), yarn(s, 4.0, 64, 1.25), no_window, s.d**-0.5, (0, 0))
    assert error(compute(path, s, tokens(s), overrides=metadata_overrides(model_options(flags))), want) < 1e-4
    assert error(compute(path, s, tokens(s)), want) > 1e-2
    for key, kind in (("general.architecture", "a string"), ("qwen2.block_count", "a number")):
        flags = parse(MODEL_KEYS.flags, ["--override-kv", f"{key}=bool:true"], {})
        with pytest.raises(ModelFileError, match=f"m.gguf: key '{key}' is {kind}, and a boolean is to stand in for it"):
            GGUFFile.open(path, metadata_overrides(model_options(flags)))


def test_rope_factors_of_llama_3(tmp_path: Path) -> None:
    s = Spec(factors={"rope_freqs": 8.0}, keys={"rope.freq_base": 500000.0})
    check(tmp_path, s, rope=plain(s, base=500000.0, factors=8.0))


@pytest.mark.parametrize("kind", [None, "longrope"])
@pytest.mark.parametrize(("n_ctx", "top"), [(32, 2.0), (33, 12.0)])
def test_long_rope_factors(tmp_path: Path, kind: str | None, n_ctx: int, top: float) -> None:
    """Phi-3.5 and Phi-4-mini: llama.cpp's converter writes both tensors and the magnitude, but no
    scaling type."""
    s = Spec(
        "phi3",
        fused=True,
        untied=True,
        head_dim=32,
        n_ctx=n_ctx,
        factors={"rope_factors_short": 2.0, "rope_factors_long": 12.0},
        keys={
            "rope.dimension_count": 24,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.attn_factor": 1.19,
            "rope.scaling.type": kind,
        },
    )
    check(tmp_path, s, rope=plain(s, factors=top, magnitude=1.19))


def test_heads_and_gates_of_a_layer_are_its_own(tmp_path: Path) -> None:
    plain = PLAIN["qwen35"]
    s = replace(plain, keys=plain.keys | {"attention.head_count": [8, 4, 8, 4]})  # recurrent, attends, …
    logits = []
    for i, spec in enumerate((plain, s)):
        write(tmp_path / f"{i}.gguf", spec)
        logits.append(compute(tmp_path / f"{i}.gguf", spec, tokens(spec)))
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("n_layer", [3, 46])
def test_gemma2(tmp_path: Path, n_layer: int) -> None:
    s = Spec("gemma2", n_embd=48, n_layer=n_layer, n_head=4, head_dim=16, keys={"attention.sliding_window": 8})
    scale = (48 / 4 if n_layer == 46 else 16) ** -0.5  # 46 layers are the 27B model
    bound = 1e-4 if n_layer == 3 else 2e-3
    check(tmp_path, s, bound, window=lambda i: 8 if i % 2 == 0 else 0, scale=scale, caps=(50.0, 30.0))


def test_gemma2_with_other_caps(tmp_path: Path) -> None:
    keys = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "rope.freq_base": 20000.0}
    s = Spec("gemma2", keys=keys)  # the window is 4096 where none is named
    check(tmp_path, s, rope=plain(s, base=20000.0), caps=(2.0, 3.0))


@pytest.mark.parametrize(
    ("keys", "local", "window", "divide"),
    [
        ({}, lambda i: i % 6 != 5, 8, 1.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, lambda i: i % 6 != 5, 8, 8.0),
        ({"attention.sliding_window_pattern": 3, "rope.freq_base_swa": 2e4}, lambda i: i % 3 != 2, 8, 1.0),
        ({"attention.sliding_window_pattern": [True, True, False] * 2 + [True]}, lambda i: i % 3 != 2, 8, 1.0),
        ({"attention.sliding_window": None}, lambda i: False, 0, 1.0),
        ({"final_logit_softcapping": 5.0}, lambda i: i % 6 != 5, 8, 1.0),
    ],
)
def test_gemma3(tmp_path: Path, keys: dict[str, Any], local: Any, window: int, divide: float) -> None:
    s = Spec(
        "gemma3",
        n_embd=48,
        n_layer=7,
        head_dim=16,
        n_head=4,
        n_head_kv=1,
        keys={"attention.sliding_window": 8, "rope.freq_base": 1e6} | keys,
    )
    far, near = plain(s, base=1e6, divide=divide), plain(s, base=keys.get("rope.freq_base_swa", 1e4))
    check(
        tmp_path,
        s,
        2e-4,
        rope=lambda i: (near if local(i) else far)(i),
        window=lambda i: window if local(i) else 0,
        caps=(0, keys.get("final_logit_softcapping", 0)),
    )


@pytest.mark.parametrize("arch", ["cohere2", "exaone4", "olmo2"])
def test_layers_with_a_window_are_those_of_the_files_pattern(tmp_path: Path, arch: str) -> None:
    """Without one three of four, as llama.cpp has them (test_llama_cpp.py), which reads none of cohere2's."""
    logits = []
    for n in (None, 4, 2):
        pattern = {"attention.sliding_window_pattern": [i % n != n - 1 for i in range(8)]} if n else {}
        s = Spec(arch, n_layer=8, untied=arch != "cohere2", keys={"attention.sliding_window": 8} | pattern)
        write(path := tmp_path / "m.gguf", s)
        logits.append(compute(path, s, tokens(s)))
    np.testing.assert_array_equal(logits[0], logits[1])
    assert error(logits[2], logits[0]) > 0.1


def test_sinks_give_the_same_bits_however_a_prompt_is_cut(tmp_path: Path) -> None:
    write(path := tmp_path / "m.gguf", GPT_OSS)
    ids = tokens(GPT_OSS)
    whole, *others = (compute(path, GPT_OSS, ids, chunks) for chunks in ((40,), (1,) * 40, (7, 20, 13), (33, 7)))
    for other in others:
        np.testing.assert_array_equal(whole, other)


def test_positions_end_where_the_file_says(tmp_path: Path) -> None:
    write(path := tmp_path / "m.gguf", replace(PLAIN["gpt2"], n_ctx_train=48))
    session = Session([CPUBackend(1)])
    with GGUFFile.open(path) as gguf:
        h = hparams_of(gguf)
        define_model(session, gguf, h, 48)
        with pytest.raises(ModelFileError, match="has positions for 48 tokens, not for a context of 49"):
            define_model(session, gguf, h, 49)
    session.close()
    for slots, given, wanted in ((1, 256, 48), (4, 64, 48), (2, 32, 32)):
        engine = ModelRunner(path, RunnerOptions(n_ctx=given, n_slots=slots))
        assert engine.n_ctx_slot == wanted
        engine.close()


OF_ROWS = (
    *("deci", "afmoe", "falcon 40B", "mistral4", "llama4", "llama4 of more experts"),
    *("command-r", "gpt2", "starcoder2", "arcee", "olmo2", "glm4", "qwen2moe", "glm4moe"),
    *(
        "glm4moe unnormed",
        "olmoe",
        "deepseek2",
        "deepseek2 together",
        "minicpm3",
        "bailingmoe2",
        "hunyuan-dense",
        "command-r plus",
    ),
)


@pytest.mark.parametrize(("name", "dtype"), [*zip(OF_ROWS, cycle(("f32", "q8_0")), strict=False)])
def test_other_architectures_give_the_same_bits_however_a_prompt_is_cut(tmp_path: Path, name: str, dtype: str) -> None:
    s = replace(PLAIN[name], dtype=dtype, types={"ffn_gate_inp": "f32"})
    write(path := tmp_path / "m.gguf", s)
    ids = tokens(s)
    whole, *others = (compute(path, s, ids, chunks) for chunks in ((40,), (1,) * 40, (3, 19, 18), (33, 7)))
    assert whole.std() > 0.1 * (name != "command-r")
    for other in others:
        np.testing.assert_array_equal(whole, other)


@pytest.mark.parametrize("name", sorted(MAPPED.keys() - {"baichuan", "baichuan 13B"}))  # of 32 and 40 layers
def test_architectures_without_a_float64_pass_give_the_same_bits_however_a_prompt_is_cut(
    tmp_path: Path, name: str
) -> None:
    s = MAPPED[name]
    write(path := tmp_path / "m.gguf", s)
    ids = tokens(s)
    whole, *others = (compute(path, s, ids, chunks) for chunks in ((40,), (1,) * 40, (3, 19, 18)))
    assert whole.std() > 0.01
    for other in others:
        np.testing.assert_array_equal(whole, other)


def test_alibi_of_whole_sequences_is_that_over_a_kv_cache(tmp_path: Path) -> None:
    """Training's logits; heads are no power of two, and share one key head."""
    write(path := tmp_path / "m.gguf", s := MAPPED["refact"])
    ids = tokens(s)
    feeds = {"tokens": np.array([*ids, *ids[:10]]), "pos": np.array([*range(N_TOKENS), *range(10)])}
    feeds["start"] = np.repeat([0, N_TOKENS], [N_TOKENS, 10])  # two texts in one window
    with GGUFFile.open(path) as gguf, Session([CPUBackend(1)]) as session:
        logits = define_model(session, gguf, hparams_of(gguf), s.n_ctx).training_logits(Sequences.feeds(1, 50))
        (got,) = session.compute([logits], {name: value.astype(np.int32) for name, value in feeds.items()})
    want = compute(path, s, ids)
    assert error(got, np.concatenate([want, want[:10]])) < 1e-4


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0", "q4_0", "q4_k"])
def test_a_rows_experts_give_the_same_bits_in_any_company(tmp_path: Path, dtype: str) -> None:
    """However a prompt is cut: how many rows an expert has, and so the form of its product, differs
    between cuts."""
    sizes = {"n_embd": 256, "n_ff": 256} if dtype == "q4_k" else {}
    s = Spec(**sizes, n_expert=5, n_expert_used=2, dtype=dtype, types={"ffn_gate_inp": "f32"})  # type: ignore[arg-type]
    path = tmp_path / "m.gguf"
    write(path, s)
    ids = tokens(s)
    whole, *others = (compute(path, s, ids, chunks) for chunks in ((40,), (1,) * 40, (3, 19, 18), (33, 7)))
    assert whole.std() > 0.1
    for other in others:
        np.testing.assert_array_equal(whole, other)


KV = [("f32", "f32"), ("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0")]
MIXED = [("f32", "f16"), ("f16", "q8_0"), ("q8_0", "bf16"), ("q5_0", "q4_1")]
# twice the errors of these two models
COSTS = {"f32": 1e-5, "f16": 4e-3, "bf16": 5e-2, "q8_0": 0.08, "q5_0": 0.8, "q4_1": 0.8, "q4_0": 1.2}


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
@pytest.mark.parametrize("types", [*KV, *(pytest.param(pair, marks=pytest.mark.long) for pair in MIXED)])
def test_cache_types_and_chunks(tmp_path: Path, arch: str, types: tuple[str, str]) -> None:
    """However a prompt is cut, the bits are the same; the cache's type costs what its rounding
    costs."""
    window = 8 if arch == "gemma2" else 0
    s = Spec(arch, n_embd=64, n_head=4, head_dim=32, keys={"attention.sliding_window": 8} if window else {})
    path = tmp_path / "m.gguf"
    t = write(path, s)
    ids = tokens(s)
    whole, *others = (
        compute(path, s, ids, chunks, types) for chunks in ((40,), (1,) * 40, (7, 20, 13), (16, 16, 8), (33, 7))
    )
    for other in others:
        np.testing.assert_array_equal(whole, other)
    caps = (50.0, 30.0) if window else (0, 0)
    want = reference(s, t, ids, plain(s), lambda i: window if i % 2 == 0 else 0, s.d**-0.5, caps)
    assert error(whole, want) < max(COSTS[kind] for kind in types)


@pytest.mark.parametrize("name", ["hy_v4", "bailingmoe3"])
def test_latent_attention_without_its_output_gate_is_refused(tmp_path: Path, name: str) -> None:
    """As in llama.cpp; Kimi K3's files may lack it."""
    write(path := tmp_path / "m.gguf", s := MAPPED[name])
    with GGUFFile.open(path) as gguf, Session([CPUBackend(1)]) as session:
        gates = [tensor for tensor in gguf.tensors if tensor.endswith("attn_gate.weight")]
        gguf.tensors = {tensor: info for tensor, info in gguf.tensors.items() if tensor != gates[-1]}
        with pytest.raises(ModelFileError, match=rf"tensor '{gates[-1]}' is missing"):
            define_model(session, gguf, hparams_of(gguf), s.n_ctx)

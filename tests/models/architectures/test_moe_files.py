"""Mixture-of-experts models: files, adapters, finetunes, memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.cli.main import main
from logitless.graph.autodiff import backward
from logitless.graph.execution.session import Session
from logitless.graph.ops.elementwise import sum_to
from logitless.graph.ops.pointwise import square
from logitless.models.adapters.lora import Adapter, Pair, read_adapter, write_adapter
from logitless.models.batch import Sequences
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.keys import Keys
from logitless.models.hparams.moe import read_experts
from logitless.models.model import define_model, hparams_of
from logitless.models.weights.weights import check_weights
from logitless.training.save import save_result
from logitless.training.trainable import full
from tests.helpers.architecture_specs import GPT_OSS, MAPPED, OF_XIELU
from tests.helpers.mla_specs import DEEPSEEK, DENSE_FIRST, GROUPS
from tests.helpers.reference_model import Spec, write

MIXTRAL = Spec(n_expert=4, n_expert_used=2)
GLM = Spec("glm4moe", n_expert=4, n_expert_used=2)
PARALLEL = Spec("gptneox", keys={"use_parallel_residual": True})
DOTS = Spec("dots1", n_expert=4, n_expert_used=2, keys={"expert_gating_func": 1})


@pytest.mark.parametrize(
    ("spec", "keys", "words"),
    [
        (MIXTRAL, {"expert_used_count": 5}, "key 'llama.expert_used_count' is 5, of 4 experts"),
        (MIXTRAL, {"expert_used_count": 0}, "key 'llama.expert_used_count' is 0"),
        (MIXTRAL, {"expert_count": 5}, "'blk.0.ffn_gate_inp.weight' has shape (4, 64), expected (5, 64)"),
        (MIXTRAL, {"expert_count": 0}, "tensor 'blk.0.ffn_gate.weight' is missing"),
        (replace(MIXTRAL, arch="qwen3moe"), {"expert_count": None}, "'qwen3moe.expert_count' is missing"),
        (
            Spec("qwen3moe", n_expert=2, n_expert_used=1, traits=("balanced",)),
            {},
            "tensor 'blk.0.exp_probs_b.bias' is unknown in qwen3moe with 2 blocks",
        ),
        (GLM, {"expert_group_count": 2}, "key 'glm4moe.expert_group_used_count' is missing"),
        (GLM, {"expert_gating_func": 3}, "key 'glm4moe.expert_gating_func' is 3; supported are 1, 2"),
        (GLM, {"expert_weights_norm": [True, False]}, "'glm4moe.expert_weights_norm' is neither true nor"),
        (GLM, {"expert_weights_norm": "x"}, "glm4moe.expert_weights_norm' is neither true nor false"),
        (DOTS, {"expert_gating_func": None}, "key 'dots1.expert_gating_func' is missing"),
        (
            replace(MAPPED["laguna"], traits=(*MAPPED["laguna"].traits, "one unbalanced")),
            {},
            "tensor 'blk.4.exp_probs_b.bias' is missing",
        ),
        (
            Spec("apertus", keys=OF_XIELU),
            {"xielu.alpha_n": None},
            "key 'xielu.alpha_n' is not a number for each of 2 layers",
        ),
        (PARALLEL, {"use_parallel_residual": None}, "key 'gptneox.use_parallel_residual' is missing"),
        (PARALLEL, {"use_parallel_residual": 1}, "key 'gptneox.use_parallel_residual' is neither true"),
        (
            Spec("cohere2", keys={"attention.sliding_window": 4}),
            {"attention.sliding_window": None},
            "key 'cohere2.attention.sliding_window' is missing",
        ),
        (Spec("mistral3"), {"attention.temperature_scale": -0.5}, "temperature_scale' is -0.5, which is negative"),
        (GLM, {"expert_weights_scale": -1.0}, "key 'glm4moe.expert_weights_scale' is -1"),
        (replace(GLM, keys=DENSE_FIRST), {"expert_feed_forward_length": 64}, "'blk.1.ffn_gate_exps"),
        (replace(GLM, n_layer=3), {"nextn_predict_layers": 1}, "tensor 'blk.2.attn_norm.weight' is of a plain block"),
        (GLM, {"nextn_predict_layers": 2}, "key 'glm4moe.nextn_predict_layers' is 2, of 2 blocks"),
        (DEEPSEEK, {"expert_group_count": 3}, "key 'deepseek2.expert_group_count' is 3, of 8 experts"),
        (
            DEEPSEEK,
            GROUPS | {"expert_group_used_count": 1},
            "key 'deepseek2.expert_group_used_count' is 1, of 4 groups of 2",
        ),
        (
            Spec("qwen2"),
            {"expert_count": 2, "expert_used_count": 1},
            "key 'qwen2.expert_count' is 2: experts are supported in llama, ",
        ),
    ],
)
def test_bad_files(tmp_path: Path, spec: Spec, keys: dict[str, Any], words: str) -> None:
    write(path := tmp_path / "m.gguf", spec, keys)
    with GGUFFile.open(path) as gguf, pytest.raises(ModelFileError) as caught:
        hparams_of(gguf)
    assert words in str(caught.value)


def test_the_first_files_of_qwen2moe_do_not_say_how_wide_experts_are() -> None:
    """Of Qwen1.5-MoE-A2.7B: 60 experts of 1,408 and a shared one of 5,632."""
    said = {"expert_count": 60, "expert_used_count": 4, "feed_forward_length": 5632}
    experts = read_experts(Keys({f"qwen2moe.{key}": value for key, value in said.items()}, "qwen2moe", "file"))
    assert experts is not None
    assert (experts.n_ff, experts.n_ff_shared, experts.weights_norm) == (1408, 5632, False)


@pytest.mark.parametrize("traits", [(), ("vectors",), ("scales",)])
def test_a_matrix_of_one_row_may_be_a_vector(tmp_path: Path, traits: tuple[str, ...]) -> None:
    """As llama-quantize writes it; the trained model has the file's shapes, and numbers that have its scales."""
    spec = Spec("qwen2moe", n_expert=4, n_expert_used=2, keys={"expert_shared_feed_forward_length": 32}, traits=traits)
    t = write(path := tmp_path / "m.gguf", spec)
    assert t["blk.1.ffn_gate_inp_shexp.weight"].shape == ((64,) if "vectors" in traits else (1, 64))
    session = Session([CPUBackend(1)])
    with GGUFFile.open(path) as gguf:
        h = hparams_of(gguf)
        trained = full(session, define_model(session, gguf, h, 64), gguf, h)
        wanted = t["blk.1.ffn_gate_inp_shexp.weight"].reshape(1, 64)
        np.testing.assert_array_equal(trained.read()["blk.1.ffn_gate_inp_shexp.weight"], wanted.astype(np.float32))
        save_result(tmp_path / "out.gguf", trained, gguf, h)
        name = "blk.1.ffn_gate_inp_shexp.weight"
        with GGUFFile.open(tmp_path / "out.gguf") as saved:
            assert hparams_of(saved) == h
            assert {n: i.shape for n, i in saved.tensors.items()} == {n: i.shape for n, i in gguf.tensors.items()}
            np.testing.assert_array_equal(saved.bytes_of(name).view(np.float32), wanted.reshape(-1).astype(np.float32))
            for scale in (n for n in saved.tensors if n.endswith(".scale")):
                assert (saved.bytes_of(scale).view(np.float32) == 1).all(), scale
    session.close()


def test_a_whole_finetune_leaves_heads_alone(tmp_path: Path) -> None:
    """Of a reranker: its loss is that of texts, to which the head says nothing."""
    write(path := tmp_path / "m.gguf", Spec("qwen3", head_dim=16, traits=("ranks",)))
    session = Session([CPUBackend(1)])
    with GGUFFile.open(path) as gguf:
        h = hparams_of(gguf)
        model = define_model(session, gguf, h, 64)
        assert model.ranks
        trained = full(session, model, gguf, h)
        assert "cls.output.weight" in trained.model.weights.tensors
        assert "cls.output.weight" not in trained.names
        logits = trained.model.training_logits(Sequences.feeds(1, 8))
        assert set(backward(sum_to(logits, shape=()), list(trained.params))) == set(trained.params)
        save_result(tmp_path / "out.gguf", trained, gguf, h)
        with GGUFFile.open(tmp_path / "out.gguf") as saved:
            name = "cls.output.weight"
            assert saved.bytes_of(name).tobytes() == gguf.bytes_of(name).tobytes()
    session.close()


def test_experts_of_any_width_are_trained(tmp_path: Path) -> None:
    """Gradients are the same beside frozen experts, which are padded, and trained ones, which are
    not; files keep their shapes."""
    write(path := tmp_path / "m.gguf", replace(MIXTRAL, n_ff=75, n_embd=40, types={"ffn_down_exps": "f16"}))
    name, ids = "blk.0.attn_q.weight", np.arange(8, dtype=np.int32)
    feeds = {"tokens": ids, "pos": ids, "start": 0 * ids}
    found = []
    for patterns in (["*"], [name]):
        session = Session([CPUBackend(1)])
        with GGUFFile.open(path) as gguf:
            h = hparams_of(gguf)
            trained = full(session, define_model(session, gguf, h, 64), gguf, h, patterns)
            sequences = Sequences.feeds(1, 8)
            logits = trained.model.training_logits(sequences)
            total = sum_to(square(logits), shape=())
            (param,) = (p for p, n in zip(trained.params, trained.names, strict=True) if n == name)
            gradient = backward(total, [param])[param]
            found += session.plan(lambda gradient=gradient: [gradient]).run(feeds)  # type: ignore[misc]
            save_result(tmp_path / "out.gguf", trained, gguf, h)
            with GGUFFile.open(tmp_path / "out.gguf") as saved:
                assert {n: t.shape for n, t in saved.tensors.items()} == {n: t.shape for n, t in gguf.tensors.items()}
                source = "blk.1.ffn_up_exps.weight"
                assert saved.bytes_of(source).tobytes() == gguf.bytes_of(source).tobytes()
        session.close()
    assert np.abs(found[0]).max() > 1
    np.testing.assert_allclose(found[0], found[1], atol=1e-3 * np.abs(found[0]).max())


def test_blocks_that_predict_more_tokens_at_once_are_left_alone(tmp_path: Path) -> None:
    """Of three blocks the last: the model is that of the first two."""
    weights = []
    for n_mtp in (0, 1):
        write(path := tmp_path / f"{n_mtp}.gguf", replace(GLM, n_layer=2, n_mtp=n_mtp))
        with GGUFFile.open(path) as gguf:
            h = hparams_of(gguf)
            assert h.n_layer == 2
            weights.append({p.source: gguf.bytes_of(p.source).tobytes() for p in check_weights(gguf, h).values()})
    assert weights[0] == weights[1]


def test_an_adapter_of_a_norm_that_has_another_name_in_the_file(tmp_path: Path) -> None:
    """gpt-oss's norm before its experts stands as post_attention_norm in files. A bias may have no
    adapter."""
    write(path := tmp_path / "m.gguf", GPT_OSS)
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 96), (1, 2)))
    with GGUFFile.open(path) as gguf:
        h = hparams_of(gguf)
        write_adapter(tmp_path / "a.gguf", Adapter({"blk.0.ffn_norm.weight": Pair(a, b)}, 2.0), gguf, h)
        read = read_adapter(tmp_path / "a.gguf", gguf, h)
        assert read.pairs.keys() == {"blk.0.ffn_norm.weight"}
        name = "blk.0.ffn_gate_exps.bias"
        wrong = {name: Pair(rng.normal(size=(2, 64)).astype(np.float32), rng.normal(size=(6, 2)).astype(np.float32))}
        write_adapter(tmp_path / "b.gguf", Adapter(wrong, 2.0), gguf, h)
        with pytest.raises(ModelFileError, match=f"the model has no matrix '{name}'"):
            read_adapter(tmp_path / "b.gguf", gguf, h)


def test_a_finetune_keeps_in_f32_what_must_be(tmp_path: Path) -> None:
    write(path := tmp_path / "m.gguf", GPT_OSS)
    session = Session([CPUBackend(1)])
    with GGUFFile.open(path) as gguf:
        h = hparams_of(gguf)
        trained = full(session, define_model(session, gguf, h, 64), gguf, h)
        save_result(tmp_path / "out.gguf", trained, gguf, h, "q8_0")
        with GGUFFile.open(tmp_path / "out.gguf") as saved:
            types = {name.removeprefix("blk.1."): t.dtype for name, t in saved.tensors.items()}
            assert types["ffn_up_exps.weight"] == types["attn_q.weight"] == "q8_0"
            for name in ("ffn_up_exps.bias", "ffn_gate_inp.weight", "attn_sinks.weight", "attn_q.bias"):
                assert types[name] == "f32", name
            assert hparams_of(saved) == h
    session.close()


def test_packed_weights_are_in_memory_once(tmp_path: Path) -> None:
    """Bytes of a file are not copied beside their packed form."""
    import tracemalloc

    write(path := tmp_path / "m.gguf", Spec(n_embd=512, n_ff=1024, n_vocab=2048, dtype="q3_k"))

    def grown() -> tuple[int, int]:
        """Bytes of Python's memory that a plan takes, and of the model's weights."""
        session = Session([CPUBackend(1)])
        with GGUFFile.open(path) as gguf:
            model = define_model(session, gguf, hparams_of(gguf), 64)
            nbytes = sum(session.backends[0].constant_nbytes(t) for t in model.weights.tensors.values())
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            session.plan(lambda: [model.forward(*two_windows())])
            after = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
        session.close()
        return after - before, nbytes

    grown()  # kernels may have to be compiled, which takes memory, too
    n, nbytes = grown()
    assert nbytes > 2 << 20
    assert n < nbytes // 4  # packed weights are in slabs that are mapped, which are not counted


def two_windows() -> tuple[Any, Any]:
    from logitless.models.batch import Sequences

    rows = Sequences.feeds(2, 4)
    return rows, rows


@pytest.mark.parametrize(
    "spec",
    [
        replace(MIXTRAL, n_expert_used=1),
        replace(GPT_OSS, n_embd=128, n_ff=64, types={"ffn_up_exps": "mxfp4", "ffn_down_exps": "iq4_nl"}),
    ],
    ids=["one expert", "types of codes"],
)
def test_selftest_of_a_model(tmp_path: Path, spec: Spec, capsys: pytest.CaptureFixture[str]) -> None:
    write(path := tmp_path / "m.gguf", replace(spec, keys=spec.keys | {"vocab_size": spec.n_vocab}))
    code = main(["selftest", "-m", str(path), "-t", "1"])
    told = capsys.readouterr()
    assert "internal error" not in told.err
    assert code == 0, told

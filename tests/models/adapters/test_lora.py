"""LoRA adapter files, mixes by row, and merging, against W + scale · alpha / r · B A."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from logitless.backends.cpu.backend import CPUBackend
from logitless.engine.batch import UBatch
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.graph.execution.session import Session
from logitless.models.adapters.lora import Adapter, Pair, matrix_shape, read_adapter, write_adapter
from logitless.models.adapters.low_rank import EMBEDDING, NORMS
from logitless.models.adapters.merge import merge
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import define_model, hparams_of
from logitless.models.quantization.quantize import dequantized
from logitless.models.weights.weights import check_weights, numbers_of
from logitless.training.adapters.lora import lora, start_from
from logitless.training.adapters.options import LoraOptions
from logitless.training.errors import TrainingError
from tests.helpers.architecture_specs import PLAIN
from tests.helpers.reference_model import Spec, write
from tests.models.architectures.test_gemma3n import GEMMA3N, SMALL

PROMPT = [1, 17, 90, 42, 5, 8]


def random_adapter(base: GGUFFile, seed: int, rank: int = 4, alpha: float = 0.0, size: float = 0.3) -> Adapter:
    h = hparams_of(base)
    rng = np.random.default_rng(seed)
    pairs = {}
    for name, part in check_weights(base, h).items():
        if (len(part.shape) == 2 and not part.n_experts and name.startswith("blk.")) or NORMS.fullmatch(name):
            n_out, n_in = matrix_shape(part.shape)
            a = rng.normal(size=(rank, n_in)) / np.sqrt(n_in)
            pairs[name] = Pair(a.astype(np.float32), (rng.normal(size=(n_out, rank)) * size).astype(np.float32))
    return Adapter(pairs, alpha)


def log_probs(engine: ModelRunner, mixes: list[tuple[tuple[int, float], ...]], weights: int = 0) -> list[bytes]:
    """Log-probabilities after each prompt token, of one sequence a slot, as bits."""
    batch = UBatch(n_top=1, weights=weights)
    for slot, mix in enumerate(mixes):
        if mix:
            batch.mixes[slot] = mix
        batch.tables[slot] = [slot]
        for pos, token in enumerate(PROMPT):
            batch.out.append(len(batch.tokens))
            batch.rows.append(None)
            batch.targets.append(7)
            batch.tokens.append(token)
            batch.pos.append(pos)
            batch.slot.append(slot)
            batch.slot_mapping.append(slot * 16 + pos)
    result = engine.step(batch)
    assert result.logprobs is not None
    values = result.logprobs[:, 0].reshape(len(mixes), -1)
    return [row.tobytes() for row in values]


def values(bits: bytes) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.frombuffer(bits, np.float32)


@pytest.mark.parametrize("name", ["arch-llama-gqa-F32", "arch-llama-gqa-Q6_K"])
def test_rows_have_their_own_adapters(name: str, shared_data: Path) -> None:
    engine = ModelRunner(shared_data / "models" / f"{name}.gguf", RunnerOptions(n_ctx=64, n_slots=4, n_ubatch=64))
    engine.load()
    base = log_probs(engine, [()])[0]
    one = engine.adapters.put(random_adapter(engine.gguf, 1))
    alone = log_probs(engine, [((one, 1.0),)])[0]
    two = engine.adapters.put(random_adapter(engine.gguf, 2, rank=9))
    three = engine.adapters.put(random_adapter(engine.gguf, 3, rank=20))  # a new stack: there were 16 columns
    mixed = log_probs(engine, [((one, 1.0),), (), ((two, 0.5), (three, -1.0)), ((three, 1.0),)])
    assert len({base, *mixed}) == 4
    assert mixed[0] == alone
    assert mixed[1] == base
    assert log_probs(engine, [((two, 0.5), (three, -1.0))])[0] == mixed[2]
    engine.adapters.keep([three])
    assert log_probs(engine, [((three, 1.0),)])[0] == mixed[3]
    four = engine.adapters.put(random_adapter(engine.gguf, 1))  # where the first one was
    assert log_probs(engine, [(), ((four, 1.0),)]) == [base, alone]
    engine.close()


@pytest.mark.parametrize(("call", "n"), [("define", 1), ("define", 4), ("write", 7)])
def test_an_adapter_that_has_no_room_changes_nothing(
    call: str, n: int, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for those that run, and it may come again."""
    engine = ModelRunner(
        shared_data / "models" / "arch-llama-gqa-F32.gguf", RunnerOptions(n_ctx=64, n_slots=2, n_ubatch=64)
    )
    bank, session = engine.adapters, engine.session
    one = bank.put(random_adapter(engine.gguf, 1))
    mix = ((one, 1.0),)
    alone, states = log_probs(engine, [mix]), set(session._variables)
    large = random_adapter(engine.gguf, 2, rank=20)
    with monkeypatch.context() as patch:
        real = getattr(session, call)
        calls = iter([real] * (n - 1))
        refuse = Mock(side_effect=MemoryError)
        patch.setattr(session, call, lambda *args: next(calls, refuse)(*args))
        with pytest.raises(MemoryError):
            bank.put(large)
    assert (set(session._variables), bank.n_columns) == (states, 16)
    assert log_probs(engine, [mix]) == alone
    two = bank.put(large)
    assert log_probs(engine, [mix, ((two, 1.0),)])[0] == alone[0]
    engine.close()


def test_whole_finetunes_answer_beside_the_model(shared_data: Path, tmp_path: Path) -> None:
    path = shared_data / "models" / "arch-llama-gqa-F32.gguf"
    with GGUFFile.open(path) as gguf:
        adapter, h = random_adapter(gguf, 4), hparams_of(gguf)
        merge(tmp_path / "whole.gguf", gguf, h, [(adapter, 1.0)])
    options = RunnerOptions(n_ctx=64, n_slots=4, n_ubatch=64)
    alone = ModelRunner(tmp_path / "whole.gguf", options)
    expected = log_probs(alone, [()])
    alone.close()
    engine = ModelRunner(path, options)
    base = log_probs(engine, [()])
    handle = engine.weight_sets.put(tmp_path / "whole.gguf")
    one = engine.adapters.put(random_adapter(engine.gguf, 1))
    assert log_probs(engine, [(), ((one, 1.0),)], handle)[0] == expected[0]
    assert log_probs(engine, [()]) == base
    own = [name for name in engine.session._variables if name.startswith(f"weights.{handle}.")]
    assert sorted(own) == sorted(f"weights.{handle}.{name}" for name in adapter.pairs)  # the rest is the model's
    engine.weight_sets.keep([])
    assert handle not in engine.weight_sets
    assert not any(name.startswith("weights.") for name in engine.session._variables)
    for other in ("arch-llama3-rope-F32", "stories260K"):
        with pytest.raises(ModelFileError, match="is a model of other sizes than the one that is served"):
            engine.weight_sets.put(shared_data / "models" / f"{other}.gguf")
    engine.close()


def test_an_adapter_whose_products_overflow_harms_only_its_own_rows(shared_data: Path) -> None:
    engine = ModelRunner(
        shared_data / "models" / "arch-llama-gqa-F32.gguf", RunnerOptions(n_ctx=64, n_slots=4, n_ubatch=64)
    )
    base = log_probs(engine, [()])[0]
    sane = random_adapter(engine.gguf, 1)
    huge = engine.adapters.put(
        Adapter({name: Pair(pair.a * np.float32(1e38), pair.b) for name, pair in sane.pairs.items()})
    )
    mixed = log_probs(engine, [((huge, 1.0),), ()])
    assert mixed[1] == base
    broken = Adapter({name: Pair(pair.a, pair.b * np.float32(np.nan)) for name, pair in sane.pairs.items()})
    with pytest.raises(ValueError, match=r"the adapter of 'output_norm\.weight' holds a number that is not finite"):
        engine.adapters.put(broken)
    with pytest.raises(ValueError, match=r"holds a number that is not finite"):
        engine.adapters.put(Adapter(sane.pairs, alpha=3e39))  # times alpha / r
    engine.close()


@pytest.mark.parametrize(
    "arch",
    [
        "llama-gqa",
        "phi3",
        "gemma3",
        "gptneox",
        "deepseek2",
        "deepseek2 together",
        "gemma4",
        "gemma3n",
        "deci",
        "afmoe",
        "scales",
    ],
)
def test_mixed_equals_merged(arch: str, shared_data: Path, tmp_path: Path) -> None:
    path = shared_data / "models" / f"arch-{arch}-F32.gguf"
    made_up = PLAIN | {"gemma4": SMALL, "gemma3n": GEMMA3N["gemma3n, all keep keys"]}
    made_up["scales"] = Spec(traits=("scales",))
    if arch in made_up:  # layer norms; heads that make theirs of one row; layers without keys of their own; streams
        write(path := tmp_path / "base.gguf", replace(made_up[arch], n_vocab=512, vocabulary=True))
    with GGUFFile.open(path) as base:
        h = hparams_of(base)
        adapters = [(random_adapter(base, 1, alpha=6.0), 0.7), (random_adapter(base, 2, rank=3), -0.4)]
        read = []
        for i, (adapter, scale) in enumerate(adapters):
            write_adapter(tmp_path / f"{i}.gguf", adapter, base, h)
            read.append((read_adapter(tmp_path / f"{i}.gguf", base, h), scale))
        changed = merge(tmp_path / "merged.gguf", base, h, read)
        tensors = base.tensors.values()
        matrices = sum(len(t.shape) == 2 and t.name.startswith("blk.") and "kv_b" not in t.name for t in tensors)
        assert len(changed) == matrices + sum(NORMS.fullmatch(t.name) is not None for t in tensors)
        expected = {}
        for name in ("blk.1.attn_output.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
            w = numbers_of(base, check_weights(base, h), name).astype(np.float64)
            for (adapter, scale), alpha_r in zip(adapters, (6.0 / 4, 1.0), strict=True):
                product = adapter.pairs[name].b.astype(np.float64) @ adapter.pairs[name].a
                w += scale * alpha_r * product.reshape(w.shape)
            expected[name] = w
    with GGUFFile.open(tmp_path / "merged.gguf") as merged:
        for name, w in expected.items():
            np.testing.assert_allclose(
                dequantized(merged.tensors[name], merged.bytes_of(name)), w, rtol=1e-5, atol=1e-6
            )
    got = []
    for file, given in ((path, read), (tmp_path / "merged.gguf", [])):
        engine = ModelRunner(file, RunnerOptions(n_ctx=64, n_slots=2, n_ubatch=64, type_k="f32", type_v="f32"))
        mix = tuple((engine.adapters.put(adapter), scale) for adapter, scale in given)
        got.append(values(log_probs(engine, [mix])[0]))
        if given:
            assert np.abs(got[0] - values(log_probs(engine, [()])[0])).max() > 0.01
        engine.close()
    np.testing.assert_allclose(got[0], got[1], rtol=2e-4, atol=2e-4)


def refusals(adapter: Path, base: Path) -> list[str]:
    """Refusals of llama.cpp's loader, check by check in its order (llama-adapter.cpp, 2026);
    shapes as ggml's."""
    file, model = GGUFReader(adapter), GGUFReader(base)
    told = [
        f"{key} is not {value!r} but {file.fields[key].contents()!r}"
        for key, value in (
            ("general.type", "adapter"),
            ("general.architecture", model.fields["general.architecture"].contents()),
            ("adapter.type", "lora"),
        )
        if file.fields[key].contents() != value
    ]
    if file.fields["adapter.lora.alpha"].types != [GGUFValueType.FLOAT32]:
        told.append("adapter.lora.alpha has another type")
    if "adapter.alora.invocation_tokens" in file.fields:
        told.append("works only behind some tokens")
    tensors = {t.name: t for t in file.tensors}
    told += [f"{name}: unexpected suffix" for name in tensors if name[-7:] not in (".lora_a", ".lora_b")]
    told += [f"{t.name}: neither f32 nor f16" for t in file.tensors if t.tensor_type.name not in ("F32", "F16")]
    of_model = {t.name: [*map(int, t.shape), 1][:2] for t in model.tensors}
    for name in {name[:-7] for name in tensors}:
        if not {f"{name}.lora_a", f"{name}.lora_b"} <= set(tensors):
            told.append(f"{name}: a component is missing")
        elif name not in of_model:
            told.append(f"{name}: not in the model")
        else:
            a, b = ([int(n) for n in tensors[f"{name}.lora_{half}"].shape] for half in "ab")
            width, height = of_model[name]
            if name == "token_embd.weight":  # A and B change places
                fits = (width, height) == (b[1], a[1]) and a[0] == b[0]
            else:
                fits = (width, height) == (a[0], b[1]) and a[1] == b[0]
            if not fits:
                told.append(f"{name}: {a} and {b} for a matrix of {[width, height]}")
    n_bytes = adapter.stat().st_size
    told += [f"{t.name}: beyond the end" for t in file.tensors if t.data_offset + t.n_bytes > n_bytes]
    return told


@pytest.mark.parametrize("arch", ["llama-gqa-F32", "llama-untied-bias-F32", "phi3-F32", "gemma2-F32", "llama-gqa-Q6_K"])
def test_the_file_is_llama_cpps(arch: str, shared_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = shared_data / "models" / f"arch-{arch}.gguf"
    with GGUFFile.open(path) as base:
        adapter = random_adapter(base, 1, alpha=8.0)
        n_vocab, n_embd = base.tensors[EMBEDDING].shape
        embedding = Pair(np.ones((n_vocab, 4), np.float32), np.ones((n_embd, 4), np.float32))
        write_adapter(
            tmp_path / "a.gguf", Adapter({**adapter.pairs, EMBEDDING: embedding}, 8.0), base, hparams_of(base)
        )
    assert refusals(tmp_path / "a.gguf", path) == []
    assert ("llama.cpp ends when it uses" in caplog.text) == (arch not in ("llama-untied-bias-F32", "phi3-F32"))
    reader = GGUFReader(tmp_path / "a.gguf")
    assert reader.fields["adapter.lora.alpha"].contents() == 8.0
    names = {t.name for t in reader.tensors}
    assert {f"{EMBEDDING}.lora_a", "blk.0.ffn_down.weight.lora_b", "blk.0.attn_norm.weight.lora_a"} <= names


@pytest.mark.parametrize("arch", ["llama-gqa-F32", "phi3-F32"])
def test_a_run_starts_from_the_adapter_of_a_file(arch: str, shared_data: Path, tmp_path: Path) -> None:
    """phi3's query, key and value are one matrix of the file."""
    path = shared_data / "models" / f"arch-{arch}.gguf"
    with GGUFFile.open(path) as gguf:
        h = hparams_of(gguf)
        sessions = [Session([CPUBackend(1)]) for _ in range(3)]
        first, second = (
            lora(session, define_model(session, gguf, h, 16), LoraOptions(rank=3, alpha=6.0, seed=seed), "t")
            for seed, session in enumerate(sessions[:2])
        )
        rng = np.random.default_rng(2)
        values = {name: rng.standard_normal(v.shape, np.float32) for name, v in first.read().items()}
        first.write(values)
        write_adapter(tmp_path / "a.gguf", first.adapter(), gguf, h)
        start_from(second, read_adapter(tmp_path / "a.gguf", gguf, h))
        for name, results in second.read().items():
            assert np.allclose(results, values[name], rtol=1e-6)
        narrow = lora(sessions[2], define_model(sessions[2], gguf, h, 16), LoraOptions(rank=4))
        with pytest.raises(TrainingError, match="lora_a' is of shape"):
            start_from(narrow, read_adapter(tmp_path / "a.gguf", gguf, h))
    for session in sessions:
        session.close()


def test_norms_as_a_whole_are_passed_over(shared_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """llama.cpp's converter puts them beside the pairs, and llama.cpp does not use them."""
    with GGUFFile.open(shared_data / "models" / "arch-llama-gqa-F32.gguf") as base:
        h = hparams_of(base)
        q = "blk.0.attn_q.weight"
        pair = random_adapter(base, 1).pairs[q]
        writer = GGUFWriter(tmp_path / "a.gguf", "llama")
        writer.add_string("general.type", "adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", 8.0)
        writer.add_tensor(f"{q}.lora_a", pair.a.astype(np.float16))
        writer.add_tensor(f"{q}.lora_b", pair.b)
        writer.add_tensor("blk.0.attn_norm.weight", np.ones(h.n_embd, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        adapter = read_adapter(tmp_path / "a.gguf", base, h)
    assert list(adapter.pairs) == [q]
    assert adapter.factor(q) == 8.0 / 4
    assert np.array_equal(adapter.pairs[q].a, pair.a.astype(np.float16).astype(np.float32))
    assert "tensor 'blk.0.attn_norm.weight' is ignored" in caplog.text


def test_pairs_of_matrices_that_nobody_uses_are_passed_over(
    shared_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Gemma 4's checkpoints have keys and values of layers that see those of others; so may
    adapters of them."""
    write(path := tmp_path / "m.gguf", replace(SMALL, traits=("unused",)))
    with GGUFFile.open(path) as base:
        h = hparams_of(base)
        pairs, used, unused = random_adapter(base, 1).pairs, "blk.5.attn_k.weight", "blk.8.attn_k.weight"
        writer = GGUFWriter(tmp_path / "a.gguf", h.arch)
        writer.add_string("general.type", "adapter")
        writer.add_string("adapter.type", "lora")
        for name in (used, unused):
            writer.add_tensor(f"{name}.lora_a", pairs[used].a)
            writer.add_tensor(f"{name}.lora_b", pairs[used].b)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert list(read_adapter(tmp_path / "a.gguf", base, h).pairs) == [used]
    assert f"tensor '{unused}.lora_a' is ignored" in caplog.text


def test_files_that_do_not_fit_are_refused(shared_data: Path, tmp_path: Path) -> None:
    with GGUFFile.open(shared_data / "models" / "arch-llama-gqa-F32.gguf") as base:
        h = hparams_of(base)
        good = random_adapter(base, 1)

        def refusal(arch: str = "llama", kind: str = "adapter", **tensors: np.ndarray) -> str:
            writer = GGUFWriter(tmp_path / "bad.gguf", arch)
            writer.add_string("general.type", kind)
            writer.add_string("adapter.type", "lora")
            for name, array in tensors.items():
                writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            with pytest.raises(ModelFileError) as refused:
                read_adapter(tmp_path / "bad.gguf", base, h)
            return refused.value.problem

        q = "blk.0.attn_q.weight"
        a, b = good.pairs[q].a, good.pairs[q].b
        assert "is not a LoRA adapter" in refusal(kind="model")
        assert "is an adapter for 'qwen2', the model is 'llama'" in refusal("qwen2")
        assert refusal() == "has no tensors"
        assert refusal(**{f"{q}.lora_a": a}) == f"tensor '{q}.lora_b' is missing"
        assert "do not fit" in refusal(**{f"{q}.lora_a": a[:, 1:], f"{q}.lora_b": b})
        assert "do not fit" in refusal(**{f"{q}.lora_a": a[1:], f"{q}.lora_b": b})
        assert "the model has no matrix 'blk.9.x.weight'" in refusal(
            **{"blk.9.x.weight.lora_a": a, "blk.9.x.weight.lora_b": b}
        )
        assert "not finite" in refusal(**{f"{q}.lora_a": a * np.nan, f"{q}.lora_b": b})
        assert "is not part of an adapter" in refusal(**{q: a})

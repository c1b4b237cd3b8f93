"""Adapters in peft's format: read back by hand, and (--peft PYTHON) by peft over transformers' model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless import Trainer
from logitless.backends.cpu.backend import CPUBackend
from logitless.cli.main import main
from logitless.graph.execution.session import Session
from logitless.models.adapters.lora import Adapter, Pair, Scaling, read_adapter, write_adapter
from logitless.models.adapters.low_rank import EMBEDDING, LowRank
from logitless.models.adapters.merge import merge
from logitless.models.adapters.peft import write_peft
from logitless.models.batch import Sequences
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams
from logitless.models.huggingface.safetensors import write_safetensors
from logitless.models.model import define_model, hparams_of
from logitless.models.synthetic.model import ModelShape
from logitless.training.scratch import new_model
from tests.helpers.huggingface_folders import write_folder
from tests.helpers.reference_model import Spec, write

F32 = np.ndarray
KINDS = ("plain", "ranks", "dora", "rslora", "rslora-ranks", "dora-alpha", "rslora-dora")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    new_model(path, None, ModelShape(32, 2, 4, 2, 48, 0, n_ctx=64), seed=3)
    return path


def adapter_of(base: GGUFFile, kind: str) -> Adapter:
    rng = np.random.default_rng(4)
    pairs = {}
    for i, name in enumerate(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")):
        weight = f"blk.{i % 2}.{name}.weight"
        n_out, n_in = base.tensors[weight].shape
        rank = 2 + i % 2 if "ranks" in kind else 2
        a, b = rng.normal(size=(rank, n_in)), rng.normal(size=(n_out, rank))
        delta = (0.3 * rng.normal(size=n_out)).astype(np.float32) if "dora" in kind and i < 4 else None
        pairs[weight] = Pair((0.3 * a).astype(np.float32), (0.3 * b).astype(np.float32), delta)
    if "ranks" in kind:
        n_vocab, n_embd = base.tensors[EMBEDDING].shape
        a, b = rng.normal(size=(n_vocab, 4)), rng.normal(size=(n_embd, 4))
        pairs[EMBEDDING] = Pair((0.1 * a).astype(np.float32), (0.1 * b).astype(np.float32))
    if kind in ("plain", "ranks", "dora"):
        return Adapter(pairs, 5.0)
    return Adapter(pairs, trained=Scaling(6.0, rslora="rslora" in kind))


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, F32]]:
    """The configuration and the tensors of a folder of peft."""
    raw = (folder / "adapter_model.safetensors").read_bytes()
    n = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n])
    assert header.pop("__metadata__") == {"format": "pt"}
    tensors = {}
    for name, about in header.items():
        start, stop = about["data_offsets"]
        tensors[name] = np.frombuffer(raw[8 + n + start : 8 + n + stop], np.float32).reshape(about["shape"])
    return json.loads((folder / "adapter_config.json").read_text()), tensors


def hugging_face(gguf: GGUFFile) -> dict[str, F32]:
    """Weights of a llama by Hugging Face's names, as its converter has them before it permutes."""
    names = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    results = {}
    for name, info in gguf.tensors.items():
        values = gguf.bytes_of(name).view(np.float32).reshape(info.shape)
        if name.startswith("blk."):
            _, i, kind, _ = name.split(".")
            n_head = {"attn_q": 4, "attn_k": 2}.get(kind)
            if n_head:  # undo reshape(n_head, 2, d / 2, columns).swapaxes(1, 2)
                half = values.reshape(n_head, len(values) // n_head // 2, 2, -1)
                values = np.ascontiguousarray(half.swapaxes(1, 2)).reshape(values.shape)
            results[f"model.layers.{i}.{names[kind]}.weight"] = values
        else:
            of = {EMBEDDING: "model.embed_tokens", "output_norm.weight": "model.norm", "output.weight": "lm_head"}
            results[f"{of[name]}.weight"] = values
    return results


def effective(folder: Path, weights: dict[str, F32]) -> dict[str, F32]:
    """Weights with the adapter, by peft's formulas."""
    config, tensors = read_folder(folder)
    result = dict(weights)
    for module in config["target_modules"]:
        rank = config["rank_pattern"].get(module, config["r"])
        alpha = config["alpha_pattern"].get(module, config["lora_alpha"])
        factor = alpha / np.sqrt(rank) if config["use_rslora"] else alpha / rank
        prefix, w = f"base_model.model.{module}", weights[f"{module}.weight"]
        if f"{prefix}.lora_embedding_A" in tensors:
            a, b = tensors[f"{prefix}.lora_embedding_A"], tensors[f"{prefix}.lora_embedding_B"]
            result[f"{module}.weight"] = w + factor * (b @ a).T
            continue
        a, b = (tensors[f"{prefix}.lora_{half}.weight"].astype(np.float64) for half in "AB")
        assert len(a) == b.shape[1] == rank
        v = w + factor * b @ a
        if config["use_dora"]:
            v *= (tensors[f"{prefix}.lora_magnitude_vector"] / np.linalg.norm(v, axis=1))[:, None]
        result[f"{module}.weight"] = v
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_with_the_adapter_are_those_of_a_merged_model(kind: str, model: Path, tmp_path: Path) -> None:
    with GGUFFile.open(model) as base:
        h = hparams_of(base)
        write_adapter(tmp_path / "a.gguf", adapter_of(base, kind), base, h)
        adapter = read_adapter(tmp_path / "a.gguf", base, h)
        write_peft(tmp_path / "peft", adapter, base, h)
        results = effective(tmp_path / "peft", hugging_face(base))
        again = read_adapter(tmp_path / "peft", base, h)
        assert again.pairs.keys() == adapter.pairs.keys()
        for name, pair in again.pairs.items():
            own = adapter.pairs[name]
            np.testing.assert_array_equal(pair.a, own.a)
            np.testing.assert_allclose(pair.b, adapter.factor(name) * own.b, rtol=2e-6, atol=1e-6)
            deltas = (np.zeros(len(p.b)) if p.delta is None else p.delta for p in (pair, own))
            np.testing.assert_allclose(*deltas, atol=1e-6)
        pairs = {name: pair for name, pair in adapter.pairs.items() if name != EMBEDDING}  # is the output, too
        merge(tmp_path / "m.gguf", base, h, [(replace(adapter, pairs=pairs), 1.0)])
    with GGUFFile.open(tmp_path / "m.gguf") as merged:
        for name, values in hugging_face(merged).items():
            if name != "model.embed_tokens.weight" or "ranks" not in kind:
                np.testing.assert_allclose(results[name], values, atol=1e-5, err_msg=name)
    config, _ = read_folder(tmp_path / "peft")
    assert (config["use_dora"], len(config["target_modules"])) == ("dora" in kind, 7 if "ranks" in kind else 6)


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({"lora_alpha": 6.0, "lora_rslora": True}, (6.0, True, False)),
        ({"lora_alpha": 6.0, "lora_dora": True}, (6.0, False, True)),
        ({"lora_alpha": 6.0, "lora_dora": True, "lora_rslora": True}, (6.0, True, True)),
        ({"lora_dora": True}, (2.0, False, True)),
        ({"lora_alpha": 6.0}, (6.0, False, False)),
        ({"lora_alpha": 6.0, "lora_init": "pissa"}, (4.0, False, False)),  # twice the rank
    ],
)
def test_peft_gets_the_trained_parameters_themselves(
    options: dict[str, Any], config: tuple[float, bool, bool], model: Path, tmp_path: Path
) -> None:
    """B without the scale, and DoRA's norms, by the Python API and from the adapter's file."""
    data = [{"prompt": f"{i}", "completion": "a b c"} for i in range(4)]
    with Trainer(model, data, lora_r=2, iterations=2, learning_rate=0.1, threads=1, **options) as trainer:
        trainer.fit()
        trainer.save_peft(tmp_path / "peft")
        trainer.save(tmp_path / "a.gguf")
        trained = trainer._run.trainer.trainable.read()
    words = f"export-lora -m {model} --lora {tmp_path}/a.gguf --peft-out {tmp_path}/again"
    assert main(words.split()) == 0
    for folder in ("peft", "again"):
        results, tensors = read_folder(tmp_path / folder)
        assert (results["lora_alpha"], results["use_rslora"], results["use_dora"]) == config
        module = "base_model.model.model.layers.1.mlp.down_proj"
        for half, name in (
            ("lora_A.weight", "lora_a"),
            ("lora_B.weight", "lora_b"),
            ("lora_magnitude_vector", "lora_m"),
        ):
            if (key := f"blk.1.ffn_down.weight.{name}") in trained and "lora_init" not in options:
                np.testing.assert_allclose(tensors[f"{module}.{half}"], trained[key], rtol=2e-5, atol=1e-6)


_PEFT = """
import json, sys, numpy as np, torch
from peft import PeftModel
from transformers import LlamaConfig, LlamaForCausalLM
folder, weights, asked = sys.argv[1], np.load(sys.argv[2]), json.load(sys.stdin)
model = LlamaForCausalLM(LlamaConfig(**asked["config"]))
missing, unexpected = model.load_state_dict({n: torch.tensor(weights[n]) for n in weights}, strict=False)
assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
model.tie_weights()
ids = torch.tensor([asked["tokens"]])
model.eval()
plain = model(ids).logits[0].tolist()
print(json.dumps([plain, PeftModel.from_pretrained(model, folder).eval()(ids).logits[0].tolist()]))
"""


@pytest.mark.parametrize("kind", ["plain", "dora", "rslora", "dora-alpha", "rslora-dora"])
def test_peft_computes_our_logits(kind: str, model: Path, tmp_path: Path, request: Any) -> None:
    python = request.config.getoption("--peft")
    if not python:
        pytest.skip("--peft PYTHON names one with peft and transformers")
    tokens = list(range(5, 17))
    with GGUFFile.open(model) as base, Session([CPUBackend(1)]) as session:
        h = hparams_of(base)
        write_adapter(tmp_path / "a.gguf", adapter_of(base, kind), base, h)
        adapter = read_adapter(tmp_path / "a.gguf", base, h)
        write_peft(tmp_path / "peft", adapter, base, h)
        np.savez(tmp_path / "w.npz", **hugging_face(base))
        plain = define_model(session, base, h, 64)
        stacked = _adapted(session, plain, adapter)
        rows = Sequences.feeds(1, len(tokens))
        start = np.zeros(len(tokens), np.int32)
        inputs = {"tokens": np.array(tokens, np.int32), "pos": np.arange(len(tokens), dtype=np.int32), "start": start}
        ours = [session.compute([m.training_logits(rows)], inputs)[0] for m in (plain, stacked)]
        config = _config(h)
    command = [python, "-c", _PEFT, str(tmp_path / "peft"), str(tmp_path / "w.npz")]
    given = json.dumps({"config": config, "tokens": tokens})
    ran = subprocess.run(command, input=given, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    theirs = json.loads(ran.stdout)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)
    assert np.abs(ours[0] - ours[1]).max() > 0.1


def _adapted(session: Session, model: Any, adapter: Adapter) -> Any:
    pairs, deltas = {}, {}
    for name, pair in adapter.pairs.items():
        halves = []
        for half, values in (("a", pair.a), ("b", pair.b), ("delta", pair.delta)):
            if values is not None:
                halves.append(session.define(f"t.{name}.{half}", values.shape))
                session.write(halves[-1].name, values)
        pairs[name] = halves[0], halves[1]
        if len(halves) > 2:
            deltas[name] = halves[2]
    factors = {name: adapter.factor(name) for name in pairs}
    return model.adapted(LowRank(pairs, factors=factors, deltas=deltas))


def _config(h: Hparams) -> dict[str, Any]:
    return {
        "hidden_size": h.n_embd,
        "intermediate_size": h.n_ff,
        "num_hidden_layers": h.n_layer,
        "num_attention_heads": h.n_head,
        "num_key_value_heads": h.n_head_kv,
        "vocab_size": h.n_vocab,
        "rms_norm_eps": h.eps,
        "max_position_embeddings": h.n_ctx_train,
        "rope_theta": h.rope_base,
        "tie_word_embeddings": True,
    }


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"peft_type": "IA3"}, "'peft_type' is 'IA3'; supported is LORA"),
        ({"bias": "all"}, "'bias' is 'all'; supported is none"),
        ({"lora_alpha": "x"}, "'lora_alpha' is 'x', not a number"),
        ({"lora_alpha": 1e39}, "'lora_alpha' is '1e\\+39', beyond 32-bit floats"),
        ({"alpha_pattern": {"(": 1}}, "'alpha_pattern' has '\\(', no regular expression"),
    ],
)
def test_folder_of_peft_with_unknown_settings_is_refused(
    changes: dict[str, Any], problem: str, model: Path, tmp_path: Path
) -> None:
    with GGUFFile.open(model) as base:
        h = hparams_of(base)
        write_peft(tmp_path, adapter_of(base, "plain"), base, h)
        path = tmp_path / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        with pytest.raises(ModelFileError, match=problem):
            read_adapter(tmp_path, base, h)
        with pytest.raises(ModelFileError, match="is an adapter of peft, not a model"):
            GGUFFile.open(tmp_path)


def with_tensors(folder: Path, base: GGUFFile, more: dict[str, F32], kind: str = "plain", **settings: Any) -> Path:
    """A folder of peft with these tensors beside its pairs."""
    write_peft(folder, adapter_of(base, kind), base, hparams_of(base))
    (folder / "adapter_config.json").write_text(json.dumps(read_folder(folder)[0] | settings))
    whole = {**read_folder(folder)[1], **{f"base_model.model.{name}": values for name, values in more.items()}}
    rows = {n: ("F32", a.shape, [a.astype(np.float32)]) for n, a in whole.items()}
    write_safetensors(folder / "adapter_model.safetensors", rows)
    return folder


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("untied") / "m.gguf"
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_head_kv": 2, "n_ff": 48, "n_vocab": 300}
    write(path, Spec("llama", untied=True, **sizes))
    return path


def test_rows_of_embedding_and_head_that_are_trained_as_a_whole_are_a_pair(untied: Path, tmp_path: Path) -> None:
    with GGUFFile.open(untied) as base:
        h, rng, own = hparams_of(base), np.random.default_rng(5), hugging_face(base)
        embedding, head = own["model.embed_tokens.weight"].copy(), own["lm_head.weight"].copy()
        embedding[[3, 299]] += rng.normal(size=(2, 32)).astype(np.float32)
        head[7] = 0
        more = {"model.embed_tokens.weight": embedding, "lm_head.modules_to_save.weight": head}
        pairs = read_adapter(with_tensors(tmp_path / "whole", base, more), base, h).pairs
        a, b = pairs[EMBEDDING].a, pairs[EMBEDDING].b
        np.testing.assert_allclose(own["model.embed_tokens.weight"] + a @ b.T, embedding, atol=1e-6)
        a, b = pairs["output.weight"].a, pairs["output.weight"].b
        np.testing.assert_allclose(own["lm_head.weight"] + b @ a, head, atol=1e-6)
        assert (pairs[EMBEDDING].rank, pairs["output.weight"].rank) == (2, 1)
        delta = {"model.embed_tokens.token_adapter.trainable_tokens_delta": embedding[[299, 3]]}
        folder = with_tensors(tmp_path / "ids", base, delta, trainable_token_indices={"embed_tokens": [299, 3]})
        again = read_adapter(folder, base, h).pairs[EMBEDDING]
        np.testing.assert_allclose(again.a @ again.b.T, pairs[EMBEDDING].a @ pairs[EMBEDDING].b.T, atol=1e-6)
        dora = read_adapter(with_tensors(tmp_path / "dora", base, more, kind="dora"), base, h).pairs
        assert (dora["output.weight"].delta, dora["output.weight"].rank) == (None, 1)  # DoRA is of the other pairs
        same = with_tensors(tmp_path / "same", base, {"lm_head.weight": own["lm_head.weight"]})
        assert "output.weight" not in read_adapter(same, base, h).pairs  # saved, but not trained


@pytest.mark.parametrize(
    ("module", "shape", "settings", "problem"),
    [
        ("model.norm.weight", (32,), {}, "is of module 'model.norm', trained as a whole: read are embed_tokens and lm"),
        ("score.weight", (2, 32), {}, "is of module 'score', trained as a whole"),
        ("lm_head.weight", (300, 32), {}, "differs from the model's in 300 rows, of which at most 256 are read; merge"),
        ("lm_head.weight", (304, 32), {}, r"is F32 of shape \(304, 32\); the model has one of shape \(300, 32\)"),
        ("lm_head.weight", (300,), {}, r"is F32 of shape \(300,\)"),
        (
            "lm_head.token_adapter.trainable_tokens_delta",
            (2, 32),
            {"trainable_token_indices": [3]},
            r"is F32 of shape \(2, 32\); the model has one",
        ),
        (
            "lm_head.token_adapter.trainable_tokens_delta",
            (1, 32),
            {"trainable_token_indices": [300]},
            "has a row of a token beyond the model's 300",
        ),
        *(
            (
                "lm_head.token_adapter.trainable_tokens_delta",
                (2, 32),
                {"trainable_token_indices": ids},
                "adapter_config.json: 'trainable_token_indices' is no list of different tokens for 'lm_head'",
            )
            for ids in ([3, 3], None, 5, [1.0, 2.0], {"embed_tokens": [3, 4]})
        ),
        ("lm_head.lora_A.weight", (2, 32), {}, "has two tensors that are 'output.weight.lora_a' in"),
    ],
)
def test_module_that_is_trained_as_a_whole_and_not_read_is_named(
    module: str, shape: tuple[int, ...], settings: dict[str, Any], problem: str, untied: Path, tmp_path: Path
) -> None:
    with GGUFFile.open(untied) as base:
        more = {module: np.ones(shape)}
        if "lora" in module:
            more["lm_head.weight"] = hugging_face(base)["lm_head.weight"] + (np.arange(300) == 3)[:, None]
        folder = with_tensors(tmp_path / "peft", base, more, **settings)
        with pytest.raises(ModelFileError, match=problem) as error:
            read_adapter(folder, base, hparams_of(base))
    assert "\n" not in str(error.value)


def test_head_of_a_model_whose_embedding_is_its_head_is_refused(model: Path, tmp_path: Path) -> None:
    with GGUFFile.open(model) as base:
        n = base.tensors[EMBEDDING].shape[0]
        folder = with_tensors(tmp_path / "peft", base, {"lm_head.weight": np.ones((n, 32))})
        with pytest.raises(ModelFileError, match="the model has no such matrix"):
            read_adapter(folder, base, hparams_of(base))
        delta = {"model.embed_tokens.token_adapter.trainable_tokens_delta": np.ones((1, 32))}
        folder = with_tensors(tmp_path / "ids", base, delta, trainable_token_indices=[3])
        with pytest.raises(ModelFileError, match="is of an embedding that is the LM head, too"):
            read_adapter(folder, base, hparams_of(base))
        whole = {
            "model.embed_tokens.weight": hugging_face(base)["model.embed_tokens.weight"] + (np.arange(n) == 3)[:, None]
        }
        apart = read_adapter(with_tensors(tmp_path / "apart", base, whole), base, hparams_of(base))
        assert apart.pairs[EMBEDDING].rank == 1  # peft has the head as it was
        folder = with_tensors(tmp_path / "tied", base, whole, ensure_weight_tying=True)
        with pytest.raises(ModelFileError, match="is of an embedding that is the LM head, too"):
            read_adapter(folder, base, hparams_of(base))
        folder = with_tensors(tmp_path / "pair", base, {}, kind="ranks", ensure_weight_tying=True)
        with pytest.raises(ModelFileError, match="'ensure_weight_tying' adapts the LM head, too: merge it"):
            read_adapter(folder, base, hparams_of(base))


def test_rows_of_an_embedding_that_the_folder_has_otherwise_are_refused(tmp_path: Path) -> None:
    """Falcon-H1's numbers are multiplied by a setting of its config.json, which an adapter has not."""
    with GGUFFile.open(write_folder(tmp_path / "model", "falcon-h1")) as base:
        (tmp_path / "peft").mkdir()
        (tmp_path / "peft" / "adapter_config.json").write_text('{"trainable_token_indices": [3]}')
        name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
        rows = np.ones((1, base.tensors[EMBEDDING].shape[1]), np.float32)
        write_safetensors(tmp_path / "peft" / "adapter_model.safetensors", {name: ("F32", rows.shape, [rows])})
        with pytest.raises(ModelFileError, match="is of a matrix that falcon-h1 has in another form"):
            read_adapter(tmp_path / "peft", base, hparams_of(base))


def test_module_unknown_to_peft_is_refused(model: Path, tmp_path: Path) -> None:
    with GGUFFile.open(model) as base:
        h = hparams_of(base)
        norm = "blk.0.attn_norm.weight"
        pairs = {norm: Pair(np.ones((1, 32), np.float32), np.ones((1, 1), np.float32))}
        with pytest.raises(ModelFileError, match=f"a pair for '{norm}', for which peft has no name"):
            write_peft(tmp_path / "p", Adapter(pairs), base, h)
        adapter = adapter_of(base, "dora")
        first = next(iter(adapter.pairs))
        delta = -np.ones(len(adapter.pairs[first].b), np.float32)
        zero = Adapter({**adapter.pairs, first: replace(adapter.pairs[first], delta=delta)})
        with pytest.raises(ModelFileError, match="with the factor 0"):
            write_peft(tmp_path / "p", zero, base, h)
    write(path := tmp_path / "q.gguf", Spec("command-r", n_embd=32, n_head=2, n_head_kv=1, n_ff=16))
    with GGUFFile.open(path) as other, pytest.raises(ModelFileError, match=r"'command-r' is not among those for peft"):
        write_peft(tmp_path / "p", Adapter({}), other, hparams_of(other))
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("end", "change", "problem"),
    [
        ("magnitude_vector", lambda m: None, "DoRA of 'blk.0.attn_q.weight' has not a pair and a vector that fit"),
        ("magnitude_vector", lambda m: m[:-1], r"do not fit tensor 'blk.0.attn_q.weight.lora_delta' of shape \(31,\)"),
        ("magnitude_vector", lambda m: m[:, None], r"_vector' is F32 of shape \(32, 1\), expected a vector"),
        ("A.weight", lambda a: a[:-1], "DoRA of 'blk.0.attn_q.weight' has not a pair and a vector that fit"),
        ("B.weight", lambda b: b[:, :0], r"lora_B.weight' has shape \(32, 0\), and so no numbers"),
        ("A.weight", lambda a: a * 0 + 3e38, "'blk.0.attn_q.weight.lora_b' holds a number that is not finite"),
    ],
)
def test_dora_of_peft_with_wrong_tensors_is_refused_in_one_line(
    end: str, change: Callable[[F32], F32 | None], problem: str, model: Path, tmp_path: Path
) -> None:
    with GGUFFile.open(model) as base:
        h = hparams_of(base)
        write_peft(tmp_path, adapter_of(base, "dora"), base, h)
        _, tensors = read_folder(tmp_path)
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_" + end
        changed = {**tensors, name: change(tensors[name])}
        rows = {n: ("F32", a.shape, [a.astype(np.float32)]) for n, a in changed.items() if a is not None}
        write_safetensors(tmp_path / "adapter_model.safetensors", rows)
        with pytest.raises(ModelFileError, match=problem) as error:
            read_adapter(tmp_path, base, h)
    assert "\n" not in str(error.value)

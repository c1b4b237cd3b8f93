"""Families of Hugging Face folders: log-probabilities of transformers, and of llama.cpp on the converted files."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.engine.batch import UBatch, token_slots
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.engine.speculation.mtp import MTPDrafter
from logitless.graph.execution.session import Session
from logitless.models.architectures.mtp import can_guess
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.huggingface.safetensors import write_safetensors
from logitless.models.model import define_model, hparams_of
from logitless.models.quantization.quantize import dequantized
from logitless.models.quantization.quantize_model import plan_copy
from logitless.models.tokenizer import from_metadata
from logitless.models.weights.weights import check_weights
from tests.helpers.huggingface_folders import FAMILIES, recorded, write_folder, write_tensors
from tests.helpers.huggingface_weights import IDS, STEP, weight
from tests.models.architectures.test_encoder import opened
from tests.models.architectures.test_llama_cpp import LLAMA_CPP, VECTORS, answers
from tests.models.architectures.test_mtp_llama_cpp import ours

NOT_IN_LLAMA_CPP = {
    "deepseek2": "without q_lora_rank only of 27 layers",
    "gemma3n": "whose layers' inputs are always of 256",
    "exaone4": "with a sliding window only of 64 layers",
    "bitnet": "with SiLU alone",
    "orion": "as stablelm",
    "phimoe": "as stablelm",
    "stablelm": "its likeliest tokens are bytes that are no text, for which there is no answer",
}
GELU_BY_TANH = ("gptneox", "mpt", "falcon", "falcon-7b")  # as in llama.cpp
ENCODERS = (
    "bert",
    "bert-rank",
    "roberta",
    "roberta-rank",
    "nomic",
    "modern",
    "modern-rank",
    "jina2",
    "jina3",
    "gemma",
    "eurobert",
)
OF_REPOSITORIES: dict[str, dict[str, Any]] = {  # settings that `save_pretrained` writes otherwise
    "gemma4moe": {"per_layer_config": None, "global_head_dim": 32, "num_global_key_value_heads": 1},
    "nemotron-h": {"layers_block_type": None, "hybrid_override_pattern": "M-*-", "num_hidden_layers": 4},
    "encoders/nomic": {
        **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")),
        "n_embd": 64,
        "n_inner": 96,
        "n_layer": 2,
        "n_head": 4,
        "layer_norm_epsilon": 1e-12,
        "layer_norm_eps": None,
        "rope_parameters": None,
        "rotary_emb_base": 1000,
        "n_positions": 64,
    },
    "encoders/modern": {
        "rope_parameters": None,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "layer_types": None,
    },
    "granitehybrid": {"layer_types": ["mamba", "attention", "mamba"], "num_experts_per_tok": 0},
    "mimo2": {
        **dict.fromkeys(("layer_types", "rope_parameters", "rms_norm_eps")),
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "swa_num_key_value_heads": 4,
        "rope_theta": 5000000,
        "swa_rope_theta": 1000,
        "partial_rotary_factor": 0.334,
        "sliding_window_size": 3,
        "layernorm_epsilon": 1e-5,
    },
}
DENSE = (("2_Dense", 96, 64), ("3_Dense", 64, 96))  # (module, rows, columns)
Array = np.ndarray[tuple[int, int], np.dtype[np.float64]]


def logprobs(path: Path) -> Array:
    """Log-probabilities of all tokens after each prefix of the prompt, with a cache of f32."""
    engine = ModelRunner(path, RunnerOptions(n_ctx=256, n_slots=1, n_ubatch=64, type_k="f32", type_v="f32"))
    n, n_vocab = len(IDS), engine.hparams.n_vocab
    rows = list(range(n))
    batch = UBatch(IDS, rows, [0] * n, rows, rows, [None] * n, [0] * n, n_top=1 + n_vocab)
    batch.tables[0] = [0]
    batch.begin, batch.end = [0] + [-1] * (n - 1), [-1] * n
    result = engine.step(batch)
    engine.close()
    assert result.top_ids is not None
    assert result.logprobs is not None
    values = np.full((n, n_vocab), -np.inf)
    for row, ids, of_ids in zip(values, result.top_ids, result.logprobs[:, 1:], strict=True):
        row[ids[ids >= 0]] = of_ids[ids >= 0]
    return values


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The GGUF file of each family."""
    folder, files = tmp_path_factory.mktemp("families"), {}
    for i, family in enumerate(FAMILIES):
        files[family] = folder / f"{i}.gguf"  # llama.cpp looks for tokens of Phi 3 in a model of this name
        with GGUFFile.open(write_folder(folder / f"{i}", family)) as gguf:
            plan_copy(gguf).write(files[family])
    return files


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_has_the_log_probabilities_of_transformers(family: str, converted: dict[str, Path]) -> None:
    expected = np.array(recorded(family)["logprobs"])
    ours = logprobs(converted[family].with_suffix(""))
    assert np.abs(ours[:, ::STEP] - expected).max() < (1e-3 if family in GELU_BY_TANH else 5e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_converted_file_has_the_tensors_and_keys_of_its_folder(family: str, converted: dict[str, Path]) -> None:
    with GGUFFile.open(converted[family]) as file, GGUFFile.open(converted[family].with_suffix("")) as folder:
        assert file.tensors.keys() == folder.tensors.keys()
        for name, info in file.tensors.items():
            assert (info.shape, info.dtype) == (folder.tensors[name].shape, folder.tensors[name].dtype)
            assert (file.bytes_of(name) == folder.bytes_of(name)).all(), name
        for key, value in folder.metadata.items():
            assert np.array_equal(file.metadata[key], value), key


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each encoder; those that are no classifier have the files of sentence-transformers."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ENCODERS}
    for name, folder in folders.items():
        write_folder(folder, f"encoders/{name}")
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true, "include_prompt": true}')
    for module, n_out, n_in in DENSE:
        dense = folders["gemma"] / module
        dense.mkdir()
        settings = {"in_features": n_in, "out_features": n_out, "bias": False}
        settings["activation_function"] = "torch.nn.modules.linear.Identity"
        (dense / "config.json").write_text(json.dumps(settings))
        write_tensors(dense / "model.safetensors", {"linear.weight": weight(module, (n_out, n_in))})
    shapes = recorded("encoders/bert")["tensors"]
    tensors = {name: ("F32", tuple(shape), [weight(name, shape)]) for name, shape in shapes.items()}
    places = {"embeddings.position_ids": ("I64", (1, 64), [np.arange(64)])}  # as older files have them
    write_safetensors(folders["bert"] / "model.safetensors", tensors | places)
    return folders


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_has_the_vectors_and_scores_of_transformers(name: str, encoders: dict[str, Path]) -> None:
    record = recorded(f"encoders/{name}")
    session, embedder = opened(encoders[name])
    expected, kind = (record["score"], "rank") if "score" in record else (record["vector"], "mean")
    assert embedder.default == kind
    if name == "gemma":  # with the dense layers of sentence-transformers
        for module, *sizes in DENSE:
            expected = weight(module, sizes) @ np.array(expected)
    assert np.abs(embedder.embed([IDS], kind)[0] - expected).max() < 5e-4  # GELU by tanh, as in llama.cpp
    session.close()


def test_t5_has_the_log_probabilities_of_transformers(tmp_path: Path) -> None:
    folder, target = write_folder(tmp_path / "model", "encoders/t5-decoder"), [0, *IDS[:6]]
    engine = ModelRunner(folder, RunnerOptions(n_ctx=64, n_slots=1, n_ubatch=64, type_k="f32", type_v="f32"))
    n, n_vocab, table = len(IDS), engine.hparams.n_vocab, [0, 1]
    pos = list(range(n, n + len(target)))
    batch = UBatch(target, pos, [0] * len(target), pos, list(range(len(target))), n_top=1 + n_vocab)
    batch.slot_mapping = token_slots(table, pos)
    batch.tables[0] = table
    batch.sources.append((0, IDS, token_slots(table, range(n))))
    batch.n_source, batch.rows, batch.targets = [n] * len(target), [None] * len(target), [0] * len(target)
    result = engine.step(batch)
    engine.close()
    assert result.top_ids is not None
    assert result.logprobs is not None
    ours = np.empty((len(target), n_vocab))
    np.put_along_axis(ours, result.top_ids, result.logprobs[:, 1:], 1)
    assert np.abs(ours[:, ::STEP] - recorded("encoders/t5-decoder")["logprobs"]).max() < 1e-4
    settings = recorded("encoders/t5-decoder")["config"] | {"scale_decoder_outputs": True}
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelFileError, match="'tie_word_embeddings' is not false"):
        GGUFFile.open(folder)


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="no llama.cpp (the package xllamacpp)")
def test_llama_cpp_has_the_same_vectors_of_converted_encoders(encoders: dict[str, Path]) -> None:
    text, paths = "hello world, another thing", []
    for name in (name for name in ENCODERS if "vector" in recorded(f"encoders/{name}")):
        paths.append(encoders[name] / "out.gguf")
        with GGUFFile.open(encoders[name]) as gguf:
            plan_copy(gguf).write(paths[-1])
            ids = from_metadata(gguf.metadata).encode(text)
    lines = answers(VECTORS, json.dumps([(str(path), [text]) for path in paths]))
    for path, line in zip(paths, lines, strict=True):
        session, embedder = opened(path)
        vector = embedder.embed([ids], embedder.default)[0]
        assert np.abs(vector / np.linalg.norm(vector) - json.loads(line)[0]).max() < 1e-3, path
        session.close()


MTP = {  # the layer whose parts the block has, and the settings that name it
    "glm4moe": (1, {"num_nextn_predict_layers": 1}),
    "deepseek3": (1, {"num_nextn_predict_layers": 1}),
    "deepseek32": (2, {"num_nextn_predict_layers": 1}),
    "qwen3next": (3, {}),
    "qwen35": (3, {"mtp_num_hidden_layers": 1}),
    "cohere2moe": (4, {"num_nextn_predict_layers": 1}),
    "mimo2": (1, {}),
}


NORM_BEHIND = ("nextn.shared_head_norm", "shared_head.norm")


def write_mtp(folder: Path, family: str, left_out: str = "") -> dict[str, np.ndarray[Any, Any]]:
    """A folder with a block behind its layers, as its repository names it; the block's tensors by their ends."""
    write_folder(folder, family)
    like, settings = MTP[family]
    config, shapes = recorded(family)["config"], recorded(family)["tensors"]
    (folder / "config.json").write_text(json.dumps(config | settings))
    own, n = f"model.layers.{like}.", config["num_hidden_layers"]
    ends = {name.removeprefix(own): shape for name, shape in shapes.items() if name.startswith(own)}
    ends |= {f"{name}.weight": [64] for name in ("enorm", "hnorm", "shared_head.norm")} | {"eh_proj.weight": [64, 128]}
    if family == "mimo2":
        ends["final_layernorm.weight"] = ends.pop("shared_head.norm.weight")
        ends["pre_mlp_layernorm.weight"] = ends.pop("post_attention_layernorm.weight")
    elif "qwen" not in family:
        ends |= {f"{name}.weight": [272, 64] for name in ("embed_tokens", "shared_head.head")}
    qwen = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
    qwen |= {"shared_head.norm": "norm"}
    block = {end: weight(f"block.{end}", shape) for end, shape in ends.items() if end != left_out}
    tensors = {name: weight(name, shape) for name, shape in shapes.items()}
    for end, values in block.items():
        bare = end.removesuffix(".weight")
        name = f"mtp.{qwen[bare]}.weight" if bare in qwen else f"mtp.layers.0.{end}"
        if family == "mimo2":
            name = f"model.mtp.layers.0.{end}"
        tensors[name if "qwen" in family or family == "mimo2" else f"model.layers.{n}.{end}"] = values
    write_tensors(folder / "model.safetensors", tensors)
    return block


@pytest.mark.parametrize("family", MTP)
def test_block_that_predicts_one_token_more_is_read_and_written(family: str, tmp_path: Path) -> None:
    block, n = write_mtp(tmp_path / "model", family), recorded(family)["config"]["num_hidden_layers"]
    with GGUFFile.open(tmp_path / "model") as folder:
        plan_copy(folder).write(tmp_path / "m.gguf")
        own = {name: folder.bytes_of(name).tobytes() for name in folder.tensors if name.startswith(f"blk.{n}.")}
    with GGUFFile.open(tmp_path / "m.gguf") as gguf:
        h = hparams_of(gguf)
        assert (h.n_layer, h.n_mtp, can_guess(gguf, h)) == (n, 1, True)
        check_weights(gguf, h)
        assert own == {name: gguf.bytes_of(name).tobytes() for name in own}
        b, one = f"blk.{n}.", np.float32("qwen" in family)  # Qwen's norms count from one
        behind = ("layer_output_norm", "final_layernorm") if family == "mimo2" else NORM_BEHIND
        for name, end in (("nextn.eh_proj", ""), ("nextn.enorm", ""), ("nextn.hnorm", ""), behind):
            values = block[f"{end or name.removeprefix('nextn.')}.weight"]
            stored = gguf.bytes_of(f"{b}{name}.weight").view(np.float32).reshape(values.shape)
            assert np.array_equal(stored, values + one if "norm" in name else values)
        assert np.array_equal(
            gguf.bytes_of(f"{b}attn_norm.weight").view(np.float32), block["input_layernorm.weight"] + one
        )


def test_drafts_of_a_folder_change_no_token_of_its_answers(tmp_path: Path) -> None:
    write_mtp(tmp_path / "model", "qwen35")
    (*drafted, (alone, n, _)) = ours(tmp_path / "model", MTPDrafter)
    assert n == 0
    assert all(text == alone and n_drafted > 0 for text, n_drafted, _ in drafted)


@pytest.mark.parametrize(
    ("family", "left_out", "problem"),
    [
        ("qwen35", "eh_proj.weight", r"tensor 'model.layers.4.\S+' is unknown in qwen35, of 4 layers"),
        ("glm4moe", "hnorm.weight", "tensor 'blk.2.nextn.hnorm.weight' is missing"),
    ],
)
def test_block_without_one_of_its_parts_is_refused(family: str, left_out: str, problem: str, tmp_path: Path) -> None:
    write_mtp(tmp_path / "model", family, left_out)
    with pytest.raises(ModelFileError, match=problem), GGUFFile.open(tmp_path / "model") as gguf:
        define_model(Session([CPUBackend(1)]), gguf, hparams_of(gguf), 64, mtp=True)


def contents(path: Path) -> dict[str, bytes]:
    with GGUFFile.open(path) as gguf:
        return {name: gguf.bytes_of(name).tobytes() for name in gguf.tensors}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"bias": True}, "has the module '2_Dense' of sentence-transformers, which is not supported"),
        ({"activation_function": "torch.nn.modules.activation.Tanh"}, "has the module '2_Dense' of sentence-transf"),
        ({"out_features": 32}, r"has linear.weight of shape \(96, 64\), config.json says \(32, 64\)"),
        ({"in_features": None}, "2_Dense/config.json: 'in_features' is missing"),
        (None, "2_Dense/model.safetensors"),
    ],
)
def test_dense_module_that_does_not_fit_is_named(
    change: dict[str, Any] | None, problem: str, encoders: dict[str, Path], tmp_path: Path
) -> None:
    dense = copytree(encoders["gemma"], tmp_path / "model") / "2_Dense"
    if change is None:
        (dense / "model.safetensors").unlink()
    else:
        (dense / "config.json").write_text(json.dumps(json.loads((dense / "config.json").read_text()) | change))
    with pytest.raises(ModelFileError, match=problem) as error:
        GGUFFile.open(tmp_path / "model")
    assert "\n" not in str(error.value)


def test_jina_with_adapters_is_its_base_and_says_so(
    encoders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """jinaai/jina-embeddings-v3, whose weights have an adapter for each task beside them."""
    folder = copytree(encoders["jina3"], tmp_path / "model")
    own = {"architectures": ["XLMRobertaModel"], "lora_adaptations": ["separation", "text-matching"]}
    own |= {"rope_parameters": None, "rotary_emb_base": 20000.0, "max_position_embeddings": 66}
    (folder / "config.json").write_text(json.dumps(recorded("encoders/jina3")["config"] | own))
    tensors = {}
    for name, shape in recorded("encoders/jina3")["tensors"].items():
        parametrized = name.endswith(("Wqkv.weight", "embeddings.weight"))
        new = name.removesuffix("weight") + "parametrizations.weight.original" if parametrized else name
        tensors[f"roberta.{new}"] = weight(name, shape)
        if parametrized:
            tensors[f"roberta.{new.replace('original', '0.lora_A')}"] = np.ones((2, 4, 64), np.float32)
    write_tensors(folder / "model.safetensors", tensors)
    assert contents(folder) == contents(encoders["jina3"])
    assert "its adapters are not read (separation, text-matching)" in caplog.text
    with GGUFFile.open(folder) as gguf:
        assert (hparams_of(gguf).arch, hparams_of(gguf).n_ctx_train) == ("jina-bert-v3", 64)


def test_nomic_experts_are_rows_of_their_two_matrices(tmp_path: Path) -> None:
    """nomic-embed-text-v2-moe: experts in every second layer, below each other in both matrices."""
    folder = write_folder(tmp_path / "model", "encoders/nomic")
    sizes = {"n_embd": 64, "n_inner": 96, "n_layer": 2, "n_head": 4, "n_positions": 2048, "max_trained_positions": 2048}
    experts = {"num_experts": 4, "moe_top_k": 2, "moe_every_n_layers": 2, "activation_function": "gelu"}
    own = {"architectures": ["NomicBertModel"], "vocab_size": 272, "layer_norm_epsilon": 1e-5}
    (folder / "config.json").write_text(json.dumps(own | sizes | experts | {"rotary_emb_base": 10000.0}))
    layer = {"attn.Wqkv": (192, 64), "attn.out_proj": (64, 64), "norm1": (64,), "norm2": (64,)}
    plain = {"mlp.fc1": (96, 64), "mlp.fc2": (64, 96)}
    moe = {"mlp.router.layer": (4, 64), "mlp.experts.mlp.w1": (384, 64), "mlp.experts.mlp.w2": (384, 64)}
    shapes = {"embeddings.word_embeddings.weight": (272, 64), "embeddings.token_type_embeddings.weight": (1, 64)}
    shapes |= {"emb_ln.weight": (64,), "emb_ln.bias": (64,)}
    for i, parts in enumerate((layer | plain, layer | moe)):
        for part, shape in parts.items():
            name = f"encoder.layers.{i}.{part}"
            shapes[name if ".experts." in name else f"{name}.weight"] = shape
            if part in layer or part in plain:
                shapes[f"{name}.bias"] = shape[:1]
    shapes["encoder.layers.1.mlp.experts.bias"] = (64,)
    tensors = {name: weight(name, shape) for name, shape in shapes.items()}
    write_tensors(folder / "model.safetensors", tensors)
    session, embedder = opened(folder)
    assert np.isfinite(embedder.embed([IDS], "mean")[0]).all()
    session.close()
    with GGUFFile.open(folder) as gguf:
        h = hparams_of(gguf)
        assert (h.arch, h.n_ctx_train, [h.experts_of(i) is not None for i in range(2)]) == (
            "nomic-bert-moe",
            512,
            [False, True],
        )
        for name, part, inverse in (("up", "w1", (0, 1, 2)), ("down", "w2", (0, 2, 1))):
            stored = gguf.bytes_of(f"blk.1.ffn_{name}_exps.weight").view(np.float32)
            expected = tensors[f"encoder.layers.1.mlp.experts.mlp.{part}"].reshape(4, 96, 64).transpose(inverse)
            assert np.array_equal(stored, expected.reshape(-1))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("modern-rank", "head.dense.weight"),
        ("bert-rank", "bert.pooler.dense.weight"),
        ("roberta-rank", "classifier.out_proj.bias"),
    ],
)
def test_reranker_without_a_part_of_its_head_is_refused(name: str, tensor: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", f"encoders/{name}")
    shapes = recorded(f"encoders/{name}")["tensors"]
    write_tensors(folder / "model.safetensors", {n: weight(n, shape) for n, shape in shapes.items() if n != tensor})
    with pytest.raises(ModelFileError, match=r"no safetensors file has the classifier's tensor cls\."):
        GGUFFile.open(folder)


def fused(tensors: dict[str, np.ndarray[Any, Any]], name: str, groups: int) -> None:
    """Put queries, keys and values into one matrix, in so many groups."""
    for query in [name for name in tensors if name.endswith("q_proj.weight")]:
        parts = [tensors.pop(query.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        rows = [part.reshape(groups, -1, part.shape[1]) for part in parts]
        tensors[query.replace("self_attn.q_proj", name)] = np.concatenate(rows, 1).reshape(-1, 64)


INTERNLM2 = {
    "model.embed_tokens": "model.tok_embeddings",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "lm_head": "output",
}


@pytest.mark.parametrize("architecture", ["BaichuanForCausalLM", "InternLM2ForCausalLM", "XverseForCausalLM"])
def test_llama_under_other_names_has_its_tensors(architecture: str, tmp_path: Path) -> None:
    """Architectures whose code is in their repositories: their networks are Llama's."""
    llama, other = (write_folder(tmp_path / name, "mistral") for name in ("llama", "other"))
    n_kv = 4 if architecture == "BaichuanForCausalLM" else 2
    settings = recorded("mistral")["config"] | {"num_key_value_heads": n_kv}
    for folder, own in ((llama, "LlamaForCausalLM"), (other, architecture)):
        (folder / "config.json").write_text(json.dumps(settings | {"architectures": [own]}))
    shapes = recorded("mistral")["tensors"]
    wide = {n: [32 * n_kv, 64] if "k_proj" in n or "v_proj" in n else shape for n, shape in shapes.items()}
    tensors = {name: weight(name, shape) for name, shape in wide.items()}
    write_tensors(llama / "model.safetensors", tensors)
    if n_kv == 4:
        fused(tensors, "self_attn.W_pack", 1)
    elif "Intern" in architecture:
        fused(tensors, "attention.wqkv", n_kv)
        for old, new in INTERNLM2.items():
            tensors = {name.replace(old, new): values for name, values in tensors.items()}
    write_tensors(other / "model.safetensors", tensors)
    assert contents(other) == contents(llama)
    with GGUFFile.open(other) as gguf:
        check_weights(gguf, hparams_of(gguf))


def ternary(values: Array) -> Array:
    """Weights -1, 0 and 1 times their mean, as 1bitLLM rounds them; the factor of F16."""
    mean = np.abs(values).mean(dtype=np.float64)
    return np.clip(np.round(values / np.float32(mean)), -1, 1) * np.float32(np.float16(mean))


# (architecture, settings, tensors, a layer's tensors, those of GGUF)
PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "jais": (
        "JAISLMHeadModel",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "n_positions": 128, "layer_norm_epsilon": 1e-5}
        | {"mup_embeddings_scale": 1.5, "mup_output_alpha": 2.0, "mup_width_scale": 0.25},
        {"transformer.wte.weight": (272, 64), "transformer.ln_f.weight": (64,), "transformer.ln_f.bias": (64,)}
        | {"transformer.relative_pe.slopes": (4, 1)},
        {f"transformer.h.{{}}.ln_{i}.{end}": (64,) for i in (1, 2) for end in ("weight", "bias")}
        | {
            f"transformer.h.{{}}.{name}.{end}": (*ins[: end == "weight"], n)
            for name, ins, n in (
                ("attn.c_attn", (64,), 192),
                ("attn.c_proj", (64,), 64),
                ("mlp.c_fc", (64,), 96),
                ("mlp.c_fc2", (64,), 96),
                ("mlp.c_proj", (96,), 64),
            )
            for end in ("weight", "bias")
        },
        {
            "token_embd": lambda t: t["transformer.wte.weight"] * np.float32(1.5),
            "output": lambda t: t["transformer.wte.weight"] * np.float32(0.5),
            "blk.0.ffn_gate": lambda t: t["transformer.h.0.mlp.c_fc2.weight"].T,
            "blk.1.attn_qkv": lambda t: t["transformer.h.1.attn.c_attn.weight"].T,
        },
    ),
    "refact": (
        "GPTRefactForCausalLM",
        {"n_embd": 96, "n_layer": 2, "n_head": 6, "n_positions": 128, "layer_norm_epsilon": 1e-5, "multi_query": True},
        {"transformer.wte.weight": (272, 96), "ln_f.weight": (96,), "lm_head.weight": (272, 96)},
        {f"transformer.h.{{}}.ln_{i}.weight": (96,) for i in (1, 2)}
        | {"transformer.h.{}.attn.q.weight": (96, 96), "transformer.h.{}.attn.kv.weight": (32, 96)}
        | {"transformer.h.{}.attn.c_proj.weight": (96, 96), "transformer.h.{}.mlp.gate_up_proj.weight": (512, 96)}
        | {"transformer.h.{}.mlp.c_proj.weight": (96, 256)},
        {
            "blk.0.attn_k": lambda t: t["transformer.h.0.attn.kv.weight"][:16],
            "blk.1.attn_v": lambda t: t["transformer.h.1.attn.kv.weight"][16:],
            "blk.1.ffn_up": lambda t: t["transformer.h.1.mlp.gate_up_proj.weight"][256:],
        },
    ),
    "plamo": (
        "PlamoForCausalLM",
        {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "n_shared_head": 3, "rms_norm_eps": 1e-6}
        | {"intermediate_size": 64, "num_key_value_heads": 6},
        {"model.embed_tokens.weight": (272, 96), "model.norm.weight": (96,), "lm_head.weight": (272, 96)},
        {f"model.layers.layers.{{}}.self_attn.{name}_proj.weight": (96, 96) for name in "qo"}
        | {f"model.layers.layers.{{}}.self_attn.{name}_proj.weight": (32, 96) for name in "kv"}
        | {f"model.layers.layers.{{}}.mlp.{name}_proj.weight": (64, 96) for name in ("gate", "up")}
        | {"model.layers.layers.{}.norm.weight": (96,), "model.layers.layers.{}.mlp.down_proj.weight": (96, 64)},
        {
            "blk.0.attn_q": lambda t: np.concatenate(  # heads 0, 2 and 4 read the first key
                [t["model.layers.layers.0.self_attn.q_proj.weight"][16 * i :][:16] for i in (0, 2, 4, 1, 3, 5)]
            ),
            "blk.1.attn_output": lambda t: np.concatenate(
                [t["model.layers.layers.1.self_attn.o_proj.weight"][:, 16 * i :][:, :16] for i in (0, 2, 4, 1, 3, 5)], 1
            ),
        },
    ),
    "bitnet": (
        "BitnetForCausalLM",
        {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 256}
        | {"rms_norm_eps": 1e-5, "hidden_act": "silu"},
        {"model.embed_tokens.weight": (272, 256), "model.norm.weight": (256,), "lm_head.weight": (272, 256)},
        {f"model.layers.{{}}.self_attn.{name}_proj.weight": (256, 256) for name in "qkvo"}
        | {f"model.layers.{{}}.mlp.{name}_proj.weight": (256, 256) for name in ("gate", "up", "down")}
        | {
            f"model.layers.{{}}.{name}.weight": (256,)
            for name in ("input_layernorm", "post_attention_layernorm", "self_attn.inner_attn_ln", "mlp.ffn_layernorm")
        },
        {
            f"blk.0.{name}": lambda t, of=of: ternary(t[f"model.layers.0.{of}_proj.weight"])
            for name, of in (("attn_q", "self_attn.q"), ("ffn_down", "mlp.down"))
        },
    ),
}


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="no llama.cpp (the package xllamacpp)")
@pytest.mark.parametrize("arch", PUBLISHED)
def test_published_names_are_ggufs_tensors_of_llama_cpps_log_probabilities(arch: str, tmp_path: Path) -> None:
    """Families whose code is in their repositories, and that no class of transformers is like."""
    architecture, settings, shapes, of_layer, expected = PUBLISHED[arch]
    folder = write_folder(tmp_path / "model", "qwen2")
    common = {"vocab_size": 272, "architectures": [architecture], "bos_token_id": 256, "eos_token_id": 257}
    (folder / "config.json").write_text(json.dumps(common | settings))
    layers = range(settings.get("num_hidden_layers", settings.get("n_layer")))
    shapes = shapes | {name.format(i): shape for i in layers for name, shape in of_layer.items()}
    tensors = {name: weight(name, shape) for name, shape in shapes.items()}
    write_tensors(folder / "model.safetensors", tensors)
    with GGUFFile.open(folder) as gguf:
        plan_copy(gguf).write(tmp_path / "m.gguf")
        for name, values in expected.items():
            stored = dequantized(gguf.tensors[f"{name}.weight"], gguf.bytes_of(f"{name}.weight"))
            assert np.array_equal(stored.reshape(-1), values(tensors).reshape(-1)), name
    # beside ternary weights llama.cpp rounds activations to 8 bits
    assert difference_from_llama_cpp(tmp_path / "m.gguf") < (0.1 if arch == "bitnet" else 0.005)
    for name in shapes.keys() - {"transformer.relative_pe.slopes", "lm_head.weight"}:
        write_tensors(folder / "model.safetensors", {n: values for n, values in tensors.items() if n != name})
        with pytest.raises(ModelFileError) as error, GGUFFile.open(folder) as gguf:
            check_weights(gguf, hparams_of(gguf))
        assert "\n" not in str(error.value)


OF_QWEN = {  # RWKV in the place of a Qwen 2's attention: (architecture, settings, a layer's tensors, those of GGUF)
    "arwkv7": (
        "RwkvHybridForCausalLM",
        {"head_size": 64, "wkv_version": 7, "wkv_has_gate": True},
        {
            **{f"time_mixer.x_{name}": (1, 1, 64) for name in "rwkvag"},
            **{f"time_mixer.{name}0": (1, 1, 64) for name in "wav"},
            **{f"time_mixer.{n}1": (64, rank) for n, rank in zip("wavg", (64, 64, 32, 128), strict=True)},
            **{f"time_mixer.{n}2": (rank, 64) for n, rank in zip("wavg", (64, 64, 32, 128), strict=True)},
            **{f"time_mixer.{name}": (64,) for name in ("k_k", "k_a", "ln_x.weight", "ln_x.bias")},
            "time_mixer.r_k": (1, 64),
            **{f"time_mixer.{name}.weight": (64, 64) for name in ("receptance", "key", "value", "output")},
        },
        {
            "1.time_mix_lerp_fused": lambda t: np.stack([t[f"1.time_mixer.x_{name}"] for name in "rwkvag"]),
            "1.time_mix_v1": lambda t: t["1.time_mixer.v1"].T,
            "0.time_mix_v1": lambda t: t["0.time_mixer.a1"].T,  # as llama.cpp wants it, where there is none
            "0.time_mix_a0": lambda t: t["0.time_mixer.a0"],
            "1.time_mix_g2": lambda t: t["1.time_mixer.g2"].T,
            "1.time_mix_r_k": lambda t: t["1.time_mixer.r_k"],
        },
    ),
    "rwkv6qwen2": (
        "RWKV6Qwen2ForCausalLM",
        {"num_attention_heads": 4, "num_key_value_heads": 2},
        {
            **{f"time_maa_{name}": (1, 1, 64) for name in "xwkvrg"},
            "time_maa_w1": (64, 160),
            "time_maa_w2": (5, 32, 64),
            "time_decay": (1, 1, 64),
            "time_decay_w1": (64, 64),
            "time_decay_w2": (64, 64),
            **{f"{name}_proj.{end}": shape for name in "kv" for end, shape in (("weight", (32, 64)), ("bias", (32,)))},
            **{f"{name}.weight": (64, 64) for name in ("q_proj", "gate", "o_proj")},
            "q_proj.bias": (64,),
        },
        {
            "1.time_mix_lerp_fused": lambda t: np.stack([t[f"1.time_maa_{name}"] for name in "wkvrg"]),
            "0.time_mix_w1": lambda t: t["0.time_maa_w1"].T.reshape(5, 32, 64)[[3, 1, 2, 0, 4]],
            "0.time_mix_w2": lambda t: t["0.time_maa_w2"].swapaxes(1, 2)[[3, 1, 2, 0, 4]],
            "1.time_mix_decay_w1": lambda t: t["1.time_decay_w1"].T,
            "1.time_mix_lerp_x": lambda t: t["1.time_maa_x"],
        },
    ),
}


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="no llama.cpp (the package xllamacpp)")
@pytest.mark.parametrize("arch", OF_QWEN)
def test_rwkv_between_ffns_of_qwen_2_has_its_tensors_and_llama_cpps_log_probabilities(
    arch: str, tmp_path: Path
) -> None:
    """Families whose code is in their repositories, by their published names."""
    architecture, settings, layer, expected = OF_QWEN[arch]
    folder = write_folder(tmp_path / "model", "qwen2")
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "rope_parameters"))
    config = recorded("qwen2")["config"] | heads | {"architectures": [architecture], **settings}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {name: shape for name, shape in recorded("qwen2")["tensors"].items() if "self_attn" not in name}
    own = {f"{i}.{name}": weight(f"{i}.{name}", shape) for i in range(2) for name, shape in layer.items()}
    tensors = {name: weight(name, shape) for name, shape in shapes.items()}
    tensors |= {f"model.layers.{name.replace('.', '.self_attn.', 1)}": values for name, values in own.items()}
    write_tensors(folder / "model.safetensors", tensors)
    with GGUFFile.open(folder) as gguf:
        plan_copy(gguf).write(tmp_path / "m.gguf")
        for name, values in expected.items():
            assert np.array_equal(gguf.bytes_of(f"blk.{name}.weight").view(np.float32), values(own).reshape(-1)), name
    assert difference_from_llama_cpp(tmp_path / "m.gguf") < 0.001
    for name in tensors:
        write_tensors(folder / "model.safetensors", {n: values for n, values in tensors.items() if n != name})
        may_lack = (".0.self_attn.time_mixer.v", "ln_x", "bias")
        if not any(part in name for part in may_lack):
            with pytest.raises(ModelFileError) as error, GGUFFile.open(folder) as gguf:
                check_weights(gguf, hparams_of(gguf))
            assert "\n" not in str(error.value)


def difference_from_llama_cpp(path: Path) -> float:
    """The largest one of log-probabilities of the likeliest tokens behind each prefix of the prompt."""
    prefixes = [IDS[: n + 1] for n in range(len(IDS))]
    likeliest = json.loads(answers(LLAMA_CPP, json.dumps([(str(path), [], [[]], prefixes)]))[0])
    rows = zip(logprobs(path), likeliest, strict=True)
    compared = [abs(row[id] - value) for row, of_row in rows for id, value in of_row]
    assert len(compared) >= 8
    return max(compared)


@pytest.mark.parametrize(
    ("family", "architecture", "settings"),
    [
        ("mistral4", "Mistral3ForConditionalGeneration", {}),
        ("deepseek3", "KimiK25ForConditionalGeneration", {"model_type": "kimi_k2", "scoring_func": "sigmoid"}),
        ("deepseek3", "KimiVLForConditionalGeneration", {"model_type": "deepseek_v3"}),
    ],
)
def test_text_part_of_a_model_with_images_is_its_family(
    family: str, architecture: str, settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, whole = write_folder(tmp_path / "plain", family), write_folder(tmp_path / "whole", family)
    config = {"architectures": [architecture], "text_config": recorded(family)["config"] | settings}
    (whole / "config.json").write_text(json.dumps(config | {"vision_config": {}}))
    tensors = {f"language_model.{name}": weight(name, s) for name, s in recorded(family)["tensors"].items()}
    other = {f"{part}.proj.weight": np.ones((4, 4), np.float32) for part in ("vision_tower", "mm_projector")}
    write_tensors(whole / "model.safetensors", tensors | other)
    assert contents(whole) == contents(plain)
    assert "the text model alone is read, not mm_projector, vision_tower" in caplog.text
    metadata = []
    for folder in (plain, whole):
        with GGUFFile.open(folder) as gguf:
            metadata.append({k: np.asarray(v).tolist() for k, v in gguf.metadata.items() if k != "general.name"})
    assert metadata[0] == metadata[1]


def test_names_without_a_prefix_are_those_of_the_model(tmp_path: Path) -> None:
    """Qwen3-Embedding's, whose vector is that of the last token."""
    folder = write_folder(tmp_path, "qwen3")
    with GGUFFile.open(folder) as gguf:
        expected = {name: gguf.bytes_of(name).tobytes() for name in gguf.tensors}
    shapes = recorded("qwen3")["tensors"]
    tensors = {name.removeprefix("model."): weight(name, shape) for name, shape in shapes.items()}
    write_tensors(folder / "model.safetensors", tensors)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    with GGUFFile.open(folder) as gguf:
        assert {name: gguf.bytes_of(name).tobytes() for name in gguf.tensors} == expected
        assert hparams_of(gguf).pooling == "last"
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(ModelFileError, match="has the pooling 'max'; supported are mean, cls, lasttoken"):
        GGUFFile.open(folder)
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    for module in ("2_Normalize", "3_Dense"):
        GGUFFile.open(folder).close()
        (folder / module).mkdir()
        (folder / module / "config.json").write_text("{}")
    with pytest.raises(ModelFileError, match="has the module '3_Dense' of sentence-transformers, which is not supp"):
        GGUFFile.open(folder)


@pytest.mark.parametrize("family", OF_REPOSITORIES)
def test_settings_of_repositories_mean_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, family)
    with GGUFFile.open(folder) as gguf:
        expected = {key: np.asarray(value).tolist() for key, value in gguf.metadata.items()}
    settings = recorded(family)["config"] | OF_REPOSITORIES[family]
    (folder / "config.json").write_text(json.dumps(settings))
    with GGUFFile.open(folder) as gguf:
        assert {key: np.asarray(value).tolist() for key, value in gguf.metadata.items()} == expected


@pytest.mark.parametrize(
    ("family", "changes", "problem"),
    [
        ("qwen35", {"linear_num_key_heads": 0}, "has sizes that do not fit tensor 'blk.0.attn_gate.weight'"),
        ("nemotron-h", {"n_groups": 7}, r"sizes that do not fit tensor 'blk.0.ssm_norm.weight' of shape \(7, 9\)"),
        (
            "nemotron-h",
            {"layers_block_type": ["mamba", "mlp", "moe", "mlp"]},
            "'layers_block_type' has not one kind of FFN",
        ),
        ("rwkv7", {"head_dim": 1}, r"attention.r_k.weight' has heads of 64 numbers, config.json of 1"),
        ("deepseek4", {"rope_parameters": {"compress": {}, "main": 1}}, "'rope_parameters' is no object"),
        ("llama", {"partial_rotary_factor": -1}, "config.json: makes the key 'llama.rope.dimension_count' -"),
        ("openelm", {"num_query_heads": [2**31, 4, 6]}, "makes the key 'openelm.attention.head_count' 2.1"),
        ("cohere2moe", {"num_shared_experts": 2**31 - 1}, "makes the key 'cohere2moe.expert_shared_feed_forward_len"),
        ("gemma3n", {"activation_sparsity_pattern": ["x"]}, "'activation_sparsity_pattern' is no list of numbers"),
        ("gemma4", {"per_layer_config": {"5": {"head_dim": 1e9}}}, "'head_dim' is '1000000000.0', not a count"),
        (
            "llama3",
            {"rope_parameters": recorded("llama3")["config"]["rope_parameters"] | {"rope_theta": -1}},
            "'rope_parameters' has a number of llama3 that is not positive",
        ),
        (
            "qwen2-yarn",
            {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 1 << 40}},
            "'original_max_position_embeddings' is '1099511627776', not a count",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_one_line(
    family: str, changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path, family)
    (folder / "config.json").write_text(json.dumps(recorded(family)["config"] | changes))
    with pytest.raises(ModelFileError, match=problem), GGUFFile.open(folder) as gguf:
        plan_copy(gguf).write(tmp_path / "out.gguf")


@pytest.mark.parametrize(
    ("family", "tensor", "problem"),
    [
        ("openelm", "transformer.layers.0.ffn.proj_1.weight", "has 129 rows, of which no half is one of two matrices"),
        ("gptneox", "gpt_neox.layers.0.attention.query_key_value.weight", "has shape|sizes that do not fit"),
    ],
)
def test_matrix_of_parts_with_a_row_too_many_is_named(family: str, tensor: str, problem: str, tmp_path: Path) -> None:
    shapes = recorded(family)["tensors"]
    tensors = {name: weight(name, shape) for name, shape in shapes.items()}
    tensors[tensor] = weight(tensor, [shapes[tensor][0] + 1, shapes[tensor][1]])
    write_tensors(write_folder(tmp_path / "model", family) / "model.safetensors", tensors)
    with pytest.raises(ModelFileError, match=problem) as error, GGUFFile.open(tmp_path / "model") as gguf:
        plan_copy(gguf).write(tmp_path / "out.gguf")
    assert "\n" not in str(error.value)


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="no llama.cpp (the package xllamacpp)")
def test_llama_cpp_has_the_same_log_probabilities_of_converted_files(
    converted: dict[str, Path], tmp_path: Path
) -> None:
    prefixes = [IDS[: n + 1] for n in range(len(IDS))]  # no answer where the likeliest token is no text
    files = {family: path for family, path in converted.items() if family not in NOT_IN_LLAMA_CPP}
    files["mellum"] = tmp_path / "mellum.gguf"
    folder = write_folder(tmp_path / "mellum", "mellum")
    settings = recorded("mellum")["config"]
    rope = settings["rope_parameters"]  # llama.cpp has one base for all layers
    rope = rope | {"sliding_attention": {"rope_type": "default", "rope_theta": rope["full_attention"]["rope_theta"]}}
    (folder / "config.json").write_text(json.dumps(settings | {"rope_parameters": rope}))
    with GGUFFile.open(folder) as gguf:
        plan_copy(gguf).write(files["mellum"])
    cases = [(str(path), [], [[]], prefixes) for path in files.values()]
    lines = [json.loads(line) for line in answers(LLAMA_CPP, json.dumps(cases))]
    for (family, path), likeliest in zip(files.items(), lines, strict=True):
        ours = logprobs(path)
        compared = [abs(row[id] - value) for row, of_row in zip(ours, likeliest, strict=True) for id, value in of_row]
        assert len(compared) >= 8, family
        assert max(compared) < 0.01, family

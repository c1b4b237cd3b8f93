"""Damaged and incomplete Hugging Face folders, refused in one line that names the file or tensor; whole folders."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.frontend.config import model_name
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import hparams_of
from logitless.router.catalog import models_of_folder
from tests.helpers.huggingface_folders import recorded, write_folder, write_tensors
from tests.helpers.huggingface_weights import weight

FAMILY = "qwen2"
WEIGHTS = "model.safetensors"


def config(**changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        values = {**json.loads((folder / "config.json").read_text()), **changes}
        (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))

    return change


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """A changed header before the same data."""

    def rewrite(folder: Path) -> None:
        raw = (folder / WEIGHTS).read_bytes()
        n = int.from_bytes(raw[:8], "little")
        values = json.loads(raw[8 : 8 + n])
        change(values)
        text = json.dumps(values).encode()
        (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + n :])

    return rewrite


def raw(change: Callable[[bytes], bytes], name: str = WEIGHTS) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def index(weight_map: object) -> Callable[[Path], object]:
    return lambda folder: (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def renamed(new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / WEIGHTS).rename(folder / new)


def tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def rewrite(folder: Path) -> None:
        values = {name: weight(name, shape) for name, shape in recorded(FAMILY)["tensors"].items()}
        change(values)
        write_tensors(folder / WEIGHTS, values)

    return rewrite


EMBEDDING, NORM, Q = "model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (raw(lambda data: data[:-9]), "needs bytes up to .* the file has .* cut off"),
    "header of 2^60 bytes": (raw(lambda data: (1 << 60).to_bytes(8, "little") + data[8:]), "its header claims 1152"),
    "five bytes": (raw(lambda data: data[:5]), "no safetensors file, or cut off"),
    "empty": (raw(lambda _: b""), "is empty"),
    "LFS pointer": (raw(lambda _: b"version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer"),
    "header of no JSON": (raw(lambda data: data[:8] + b"x" * (len(data) - 8)), "no JSON object"),
    "type of no text": (raw(lambda data: data.replace(b'"F32"', b'"F\xcd2"', 1)), "has no dtype, shape and data_offs"),
    "overlap": (
        header(lambda h: h[NORM].update(data_offsets=[o - 4 for o in h[NORM]["data_offsets"]])),
        "overlap at byte",
    ),
    "offsets and shape differ": (header(lambda h: h[NORM].update(shape=[65])), "has 260 bytes by its shape and 256"),
    "negative offset": (header(lambda h: h[NORM].update(data_offsets=[-256, 0])), "bytes by its shape"),
    "impossible shape": (header(lambda h: h[NORM].update(shape=[1 << 40, 1 << 40])), "the impossible shape"),
    "unknown type": (header(lambda h: h[NORM].update(dtype="F7")), "'model.norm.weight' has the unknown type 'F7'"),
    "integers": (header(lambda h: h[NORM].update(dtype="I32")), "has the type I32, which is not supported"),
    "no offsets": (header(lambda h: h[NORM].pop("data_offsets")), "'model.norm.weight' has no dtype, shape"),
    "pickles": (renamed("pytorch_model.bin"), "has pytorch_model.bin, a pickle, .* needs .*safetensors"),
    "no weights": (renamed("model.txt"), "has no weights"),
    "shard without others": (renamed("model-00001-of-00003.safetensors"), "has 1 of 3 safetensors files"),
    "missing shard": (
        index({Q: "model-00002-of-00002.safetensors"}),
        "model-00002-of-00002.safetensors: is missing, and .*index.json names it",
    ),
    "index with an absent tensor": (index({"model.x": WEIGHTS}), f"{WEIGHTS}: has no tensor 'model.x'"),
    "index out of the folder": (index({Q: f"../{WEIGHTS}"}), "is no safetensors file of the folder"),
    "index with a long name": (index({Q: "x" * 300 + ".safetensors"}), "xxx.safetensors: is missing, and"),
    "index of no names": (index([1]), "'weight_map' does not name a file"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "is a directory without config.json"),
    "config of no JSON": (raw(lambda _: b"{", "config.json"), "config.json: is no JSON"),
    "config of a list": (raw(lambda _: b"[]", "config.json"), "config.json: is no JSON object"),
    "no architecture": (config(architectures=...), "'architectures' is missing"),
    "unknown architecture": (config(architectures=["FooForCausalLM"]), "Hugging Face architecture 'FooForCausalLM'"),
    "no width": (config(hidden_size=...), "config.json: 'hidden_size' is missing"),
    "width of a word": (config(hidden_size="64"), "'hidden_size' is '64', not a count"),
    "unknown RoPE": (config(rope_parameters={"rope_type": "ntk"}), "'rope_type' is 'ntk', which is not supported"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "neither tokenizer.json nor tokenizer.model"),
    "tokenizer of no kind": (raw(lambda _: b'{"model": {}}', "tokenizer.json"), "'model' is of the kind 'None'"),
    "tokenizer without merges": (
        raw(lambda _: b'{"model": {"type": "BPE", "vocab": {"a": 0}}}', "tokenizer.json"),
        "tokenizer.json: is damaged",
    ),
    "unknown tensor": (tensors(lambda t: t.update({"model.foo": t[NORM]})), "tensor 'model.foo' is unknown in qwen2"),
    "layer too many": (
        tensors(lambda t: t.update({Q.replace(".0.", ".2."): t[Q]})),
        "is unknown in qwen2, of 2 layers",
    ),
    "missing tensor": (tensors(lambda t: t.pop(Q)), "tensor 'blk.0.attn_q.weight' is missing"),
    "wrong shape": (tensors(lambda t: t.update({Q: t[Q][:32]})), r"'blk.0.attn_q.weight' has shape \(32, 64\)"),
    "one number": (tensors(lambda t: t.update({EMBEDDING: np.float32(1)})), "is one number without a dimension"),
    "pipe": (lambda folder: os.mkfifo(folder / "generation_config.json"), "config.json: is not a regular file"),
    "no embedding": (tensors(lambda t: t.pop(EMBEDDING)), "no safetensors file has the token embedding"),
}


@pytest.mark.parametrize("name", BAD)
def test_damaged_folder_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    change, problem = BAD[name]
    change(write_folder(tmp_path / "model", FAMILY))
    with pytest.raises(ModelFileError, match=problem) as error, GGUFFile.open(tmp_path / "model") as gguf:
        hparams_of(gguf)
    assert "\n" not in str(error.value)


def test_folder_with_an_image_encoder_says_what_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_folder(tmp_path / "model", FAMILY)
    tensors(
        lambda values: values.update({"visual.blocks.0.norm.weight": np.ones(4), "x.rotary_emb.inv_freq": np.ones(4)})
    )(folder)
    with GGUFFile.open(folder) as file:
        assert not any("visual" in name for name in file.tensors)
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [
        "the text model alone is read, not visual"
    ]


def test_folder_without_its_output_matrix_is_refused_unless_it_is_tied_or_an_embedder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", FAMILY)
    tensors(lambda values: values.pop("lm_head.weight"))(folder)
    with pytest.raises(ModelFileError, match=r"tensor 'lm_head.weight' is missing, and config.json says"):
        GGUFFile.open(folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')  # Qwen3-Embedding-8B's
    GGUFFile.open(folder).close()
    (folder / "1_Pooling" / "config.json").unlink()
    config(tie_word_embeddings=True)(folder)
    GGUFFile.open(folder).close()


@pytest.mark.parametrize(
    ("family", "left_out", "problem"),
    [
        ("qwen", "transformer.h.1.attn.c_attn.bias", "blk.1.attn_qkv.bias"),
        ("qwen2", "model.layers.0.self_attn.v_proj.bias", "blk.0.attn_v.bias"),
        ("llama", "model.layers.1.self_attn.q_proj.bias", "blk.1.attn_q.bias"),
        ("gpt2", "transformer.ln_f.bias", "output_norm.bias"),
        ("bloom", "transformer.h.0.mlp.dense_h_to_4h.bias", "blk.0.ffn_up.bias"),
        ("gpt-oss", "model.layers.1.mlp.router.bias", "blk.1.ffn_gate_inp.bias"),
        ("gptneox", "gpt_neox.layers.0.attention.dense.bias", "blk.0.attn_output.bias"),
        ("jais2", "model.layers.0.mlp.up_proj.bias", "blk.0.ffn_up.bias"),
        ("llama", "model.layers.0.self_attn.o_proj.bias", "blk.0.attn_output.bias"),  # another layer has it
        ("phimoe", "lm_head.bias", "output.bias"),
        ("glm4moe", "model.layers.0.self_attn.q_norm.weight", "blk.0.attn_q_norm.weight"),
        ("deepseek3", "model.layers.1.mlp.gate.e_score_correction_bias", "blk.1.exp_probs_b.bias"),
        ("glm-dsa", "model.layers.1.mlp.gate.e_score_correction_bias", "blk.1.exp_probs_b.bias"),
        ("ernie4_5moe", "model.layers.1.mlp.moe_statics.e_score_correction_bias", "blk.1.exp_probs_b.bias"),
        ("hy-v3", "model.layers.1.mlp.expert_bias", "blk.1.exp_probs_b"),
        ("falcon-h1", "model.layers.0.mamba.conv1d.bias", "blk.0.ssm_conv1d.bias"),
        ("mamba2", "backbone.layers.0.mixer.conv1d.bias", "blk.0.ssm_conv1d.bias"),
        ("jamba", "model.layers.0.mamba.dt_layernorm.weight", "blk.0.ssm_dt_norm.weight"),
        ("mimo2", "model.layers.1.self_attn.attention_sink_bias", "blk.1.attn_sinks.weight"),
        ("qwen2moe", "model.layers.0.mlp.shared_expert_gate.weight", "blk.0.ffn_gate_inp_shexp.weight"),
        ("gemma4", "model.layers.0.layer_scalar", "blk.0.layer_output_scale.weight"),
        ("gemma4moe", "model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),
        ("encoders/t5", "encoder.block.0.layer.1.DenseReluDense.wi_0.weight", "enc.blk.0.ffn_gate.weight"),
        ("encoders/bert", "embeddings.token_type_embeddings.weight", "token_types.weight"),
        ("encoders/jina2", "encoder.layer.0.mlp.wo.bias", "blk.0.ffn_down.bias"),
    ],
)
def test_tensor_that_a_family_has_is_named_where_it_is_missing(
    family: str, left_out: str, problem: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "model", family)
    shapes = recorded(family)["tensors"]
    write_tensors(folder / WEIGHTS, {name: weight(name, shape) for name, shape in shapes.items() if name != left_out})
    with pytest.raises(ModelFileError, match=f"tensor '{re.escape(problem)}' is missing") as error:
        GGUFFile.open(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "end", "settings"),
    [
        ("deepseek3", "e_score_correction_bias", {"topk_method": "greedy"}),
        ("falcon-h1", "conv1d.bias", {"mamba_conv_bias": False}),
        ("mamba", "conv1d.bias", {"use_conv_bias": False}),
        ("glm4moe", "_norm.weight", {"use_qk_norm": False}),
        ("gptneox", "attention.dense.bias", {"attention_bias": False}),
        ("mimo2", "attention_sink_bias", {"add_swa_attention_sink_bias": False}),
        ("encoders/bert", "token_type_embeddings.weight", {"type_vocab_size": 0}),
    ],
)
def test_tensors_that_the_settings_rule_out_may_be_missing(
    family: str, end: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "model", family)
    shapes = recorded(family)["tensors"]
    ends = [end] if family != "gptneox" else [end, "query_key_value.bias"]
    ends = [f"self_attn.{part}{end}" for part in "qk"] if end == "_norm.weight" else ends
    present = {name: weight(name, shape) for name, shape in shapes.items() if not name.endswith(tuple(ends))}
    assert len(present) < len(shapes)
    write_tensors(folder / WEIGHTS, present)
    config(**settings)(folder)
    GGUFFile.open(folder).close()


def test_folder_of_gguf_files_names_one(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ModelFileError, match=re.escape("name its file m.gguf")):
        GGUFFile.open(tmp_path)


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_file_of_a_folder_names_the_folder(name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", FAMILY)
    with pytest.raises(ModelFileError, match=f"give its folder, {re.escape(str(folder))}"):
        GGUFFile.open(folder / name)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_matrices_are_as_in_the_file_and_vectors_f32(dtype: str, tmp_path: Path) -> None:
    with GGUFFile.open(write_folder(tmp_path / "model", "gemma", dtype)) as gguf:
        down = gguf.tensors["blk.1.ffn_down.weight"]
        values = weight(name := "model.layers.1.mlp.down_proj.weight", recorded("gemma")["tensors"][name])
        bits = values.astype(np.float16) if dtype == "F16" else (values.view(np.uint32) >> 16).astype(np.uint16)
        assert down.dtype == dtype.lower()
        assert gguf.bytes_of(down.name).tobytes() == bits.tobytes()
        norm = gguf.bytes_of("output_norm.weight").view(np.float32)
        assert gguf.tensors["output_norm.weight"].dtype == "f32"
        assert np.abs(norm - 1 - weight("model.norm.weight", [64])).max() < 0.01


def test_shards_are_one_model(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", FAMILY)
    with GGUFFile.open(folder) as whole:
        expected = {name: whole.bytes_of(name).tobytes() for name in whole.tensors}
    (folder / WEIGHTS).unlink()
    files = {}
    for i, part in enumerate((slice(0, 10), slice(10, None)), 1):
        names = list(recorded(FAMILY)["tensors"])[part]
        file = f"model-{i:05d}-of-00002.safetensors"
        write_tensors(folder / file, {name: weight(name, recorded(FAMILY)["tensors"][name]) for name in names})
        files |= dict.fromkeys(names, file)
    index(files)(folder)
    with GGUFFile.open(folder) as sharded:
        assert {name: sharded.bytes_of(name).tobytes() for name in sharded.tensors} == expected


def test_folder_is_served_by_its_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "models" / "Qwen2.5-0.5B", FAMILY)
    snapshot = write_folder(tmp_path / "models--me--My.Model-1.5B" / "snapshots" / "abc", FAMILY)
    assert models_of_folder(tmp_path / "models") == {"Qwen2.5-0.5B": folder}
    assert (model_name(folder), model_name(snapshot)) == ("Qwen2.5-0.5B", "My.Model-1.5B")

"""Valid GGUF files of unusable models: one line that names the cause, before any computation."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from logitless.backends.cpu.backend import CPUBackend
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.graph.execution.session import Session
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import read_hparams
from logitless.models.model import hparams_of
from logitless.models.synthetic.model import synthesize
from logitless.models.tokenizer import from_metadata
from logitless.training.config import TrainingConfig
from logitless.training.run import FineTuning
from tests.helpers.commands import command as run

Rewrite = Callable[..., Path]
GONE = object()
SMALL = RunnerOptions(n_ctx=64, n_slots=1, n_ubatch=16, threads=1)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "good.gguf"
    synthesize(path, "tiny", "Q8_0")
    return path


@pytest.fixture
def rewrite(good: Path, tmp_path: Path) -> Rewrite:
    """Write the good model again with other keys (under llama.) and tensors; GONE leaves one
    out."""

    def run(keys: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None, arch: str = "llama") -> Path:
        path, reader = tmp_path / "bad.gguf", GGUFReader(good)
        keys = {k if "." in k and k.startswith("tokenizer.") else f"llama.{k}": v for k, v in (keys or {}).items()}
        tensors = tensors or {}
        writer = GGUFWriter(path, arch)
        for f in reader.fields.values():
            if f.name.startswith("GGUF.") or f.name == "general.architecture" or f.name in keys:
                continue
            writer.add_key_value(f.name, f.contents(), f.types[0], f.types[1] if len(f.types) > 1 else None)
        for name, value in keys.items():
            if isinstance(value, str):
                writer.add_string(name, value)
            elif isinstance(value, float):
                writer.add_float32(name, value)
            elif isinstance(value, list):
                writer.add_array(name, value)
            elif value is not GONE:
                writer.add_key_value(name, value, GGUFValueType.UINT64)
        for t in reader.tensors:
            if t.name not in tensors:
                writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
        for name, array in tensors.items():
            if array is not GONE:
                writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return run


def refused(path: Path) -> str:
    with GGUFFile.open(path) as gguf, pytest.raises(ModelFileError) as caught:
        hparams_of(gguf)
    line = str(caught.value)
    assert line.startswith(f"{path}: ")
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 10**9),
        ("block_count", 0),
        ("context_length", 2**40),
        ("context_length", "long"),
        ("embedding_length", 2**31),
        ("embedding_length", 2**63),
        ("attention.head_count", 0),
        ("attention.head_count", [4, 2]),
        ("attention.head_count_kv", 0),
        ("attention.head_count_kv", [2, 1, 1]),
        ("attention.head_count_kv", [2, 0]),
        ("feed_forward_length", [1.5, 2.5]),
        ("attention.layer_norm_rms_epsilon", float("nan")),
        ("attention.layer_norm_rms_epsilon", -1.0),
        ("rope.freq_base", float("inf")),
        ("rope.freq_base", 0.0),
        ("rope.dimension_count", 15),
        ("rope.dimension_sections", [4, 4]),
        ("rope.scaling.type", "dynamic"),
        ("rope.scaling.type", 3),
        ("rope.scaling.factor", -2.0),
        ("rope.scaling.original_context_length", 0),
        ("rope.scaling.yarn_beta_fast", 0.0),
        ("rope.freq_base", 1e-45),
        ("rope.scaling.factor", 1e-40),
        ("rope.freq_base", 1e35),
        ("expert_count", 8.5),
        ("block_count", GONE),
        ("context_length", GONE),
        ("embedding_length", GONE),
        ("feed_forward_length", GONE),
        ("attention.head_count", GONE),
        ("attention.layer_norm_rms_epsilon", GONE),
    ],
)
def test_keys(rewrite: Rewrite, key: str, value: object) -> None:
    assert f"key 'llama.{key}" in refused(rewrite({key: value}))


@pytest.mark.parametrize("arch", ["chameleon", "wavtokenizer-dec", "qwen2audio"])
def test_unknown_architecture(rewrite: Rewrite, arch: str) -> None:
    assert f"architecture '{arch}' is not supported" in refused(rewrite(arch=arch))


def test_sizes_that_no_tensor_has(rewrite: Rewrite) -> None:
    assert "'blk.0.ffn_gate.weight' has shape (96, 64), expected (3, 64)" in refused(
        rewrite({"feed_forward_length": 3})
    )
    assert "'blk.2.attn_norm.weight' is missing" in refused(rewrite({"block_count": 3}))
    assert "'blk.1." in refused(rewrite({"block_count": 1}))  # never serve a part of a model
    assert "'blk.0.attn_k.weight'" in refused(rewrite({"attention.head_count_kv": 1}))
    assert "'blk.1.attn_k.weight'" in refused(rewrite({"attention.head_count_kv": [2, 1]}))
    assert "'blk.0.attn_q.weight'" in refused(rewrite({"attention.key_length": 2**30}))


def test_every_tensor_must_be_there(rewrite: Rewrite, good: Path) -> None:
    with GGUFFile.open(good) as gguf:
        names = [n for n in gguf.tensors if not n.startswith("blk.0.")]
    for name in names:
        assert f"tensor '{name}' is missing" in refused(rewrite(tensors={name: GONE}))


def test_tensors_that_are_not_as_they_must_be(rewrite: Rewrite) -> None:
    zeros = np.zeros
    for name, array, words in (
        ("blk.1.attn_k.weight", zeros((64, 33), np.float32), "(64, 33), expected (32, 64)"),
        ("blk.1.attn_k.weight", zeros((32, 64), np.int32), "type i32"),
        ("blk.0.attn_norm.weight", zeros(63, np.float32), "(63,), expected (64,)"),
        ("token_embd.weight", zeros((2, 2, 16), np.float32), "(2, 2, 16), expected (n_vocab, 64)"),
        ("blk.0.attn_norm.bias", zeros(64, np.float32), "unknown"),
        ("blk.0.ffn_gate_inp.weight", zeros((8, 64), np.float32), "unknown"),
        ("token_embd_norm.weight", zeros(64, np.float32), "unknown"),
        ("position_embd.weight", zeros((256, 64), np.float32), "unknown"),
        ("output_norm.bias", zeros(64, np.float32), "unknown"),
        ("output.scale", zeros(1, np.float32), "is a scale without its 'output.weight'"),
        ("blk.0.attn_q.input_scale.scale", zeros(1, np.float32), "is a scale without its"),
        ("blk.0.attn_norm.scale", zeros(1, np.float32), "unknown"),
        ("blk.0.attn_q.scale", zeros(1, np.float32), "has a scale that is 0, NaN or infinite"),
        ("blk.0.attn_q.scale", np.full(1, np.nan, np.float32), "has a scale that is 0, NaN or infinite"),
        ("blk.0.attn_q.scale", np.ones(64, np.float32), "(64,), expected (1,)"),
        ("blk.1.ffn_up.scale", np.ones(1, np.int32), "type i32"),
        ("cls.output.weight", zeros((1, 64), np.float32), "unknown"),
        ("dense_2.weight", zeros((64, 64), np.float32), "unknown"),
        ("blk.2.nextn.eh_proj.weight", zeros((64, 128), np.float32), "unknown"),
        ("rope_freqs.weight", zeros(9, np.float32), "(9,), expected (8,)"),
    ):
        line = refused(rewrite({"tokenizer.ggml.tokens": GONE}, {name: array}))
        assert f"tensor '{name}'" in line
        assert words in line


def test_a_bias_without_its_weight_is_unknown(rewrite: Rewrite) -> None:
    """Tied embeddings: the output has no weight of its own that the bias could belong to."""
    tensors = {"output.weight": GONE, "output.bias": np.zeros(512, np.float32)}
    assert "tensor 'output.bias' is unknown" in refused(rewrite(tensors=tensors))


def test_tensors_that_change_no_result_are_passed_over(rewrite: Rewrite) -> None:
    """Encoders of images and sounds, training state, and what old files derived."""
    names = ("v.blk.0.attn_q.weight", "mm.0.weight", "optimizer.adam.first_moments", "blk.0.attn_rot_embd.weight")
    names += ("blk.0.attn_q.input_scale",)
    with GGUFFile.open(rewrite(tensors={name: np.ones(8, np.float32) for name in names})) as gguf:
        assert hparams_of(gguf).n_layer == 2


def test_mtp_blocks_where_an_architecture_has_none(rewrite: Rewrite) -> None:
    assert "key 'llama.nextn_predict_layers' is 1" in refused(rewrite({"nextn_predict_layers": 1}))


@pytest.mark.parametrize("key", ["head_count_kv", "head_count", "layer_norm_rms_epsilon"])
@pytest.mark.parametrize("n", [1, 3])
def test_arrays_have_one_value_for_each_block(rewrite: Rewrite, key: str, n: int) -> None:
    value = 1e-5 if "norm" in key else 2
    line = refused(rewrite({f"attention.{key}": [value] * n}))
    assert f"key 'llama.attention.{key}' has {n} values, for 2 blocks" in line


@pytest.mark.parametrize(
    ("arch", "key", "value", "words"),
    [
        ("llama", "general.type", "adapter", "is a LoRA adapter"),
        ("llama", "adapter.type", "lora", "is a LoRA adapter"),
        ("llama", "general.type", "checkpoint", "is a training checkpoint"),
        ("llama", "general.type", "imatrix", "is an importance matrix"),
        ("clip", "general.type", "mmproj", "load the file of its text"),
        ("clip", "general.name", "m", "load the file of its text"),
    ],
)
def test_files_of_other_kinds(tmp_path: Path, arch: str, key: str, value: str, words: str) -> None:
    writer = GGUFWriter(path := tmp_path / "other.gguf", arch)
    writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert words in refused(path)


def test_numbers_that_are_not_finite(rewrite: Rewrite) -> None:
    name = "blk.1.ffn_down.weight"
    values = np.zeros((64, 96), np.float32)
    values[-1, -1] = np.nan
    runner = ModelRunner(rewrite(tensors={name: values}), SMALL)
    with pytest.raises(ModelFileError, match=f"tensor '{name}' has a number that is NaN or infinite"):
        runner.load()
    runner.close()


def test_a_missing_pre_tokenizer_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    tokens = [chr(c) for c in range(33, 127)]
    keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": []}
    for pre, n in (({"tokenizer.ggml.pre": "gpt-2"}, 0), ({}, 1)):
        from_metadata(keys | pre)
        assert len(caplog.records) == n
        assert all("'tokenizer.ggml.pre' is missing" in record.message for record in caplog.records)


@pytest.mark.parametrize(("value", "n"), [(93, 0), (94, 1), (2**32 - 1, 0)])
def test_a_special_token_that_is_not_there_is_a_warning(value: int, n: int, caplog: pytest.LogCaptureFixture) -> None:
    tokens = [chr(c) for c in range(33, 127)]
    keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": []}
    from_metadata(keys | {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.eos_token_id": value})
    told = ["key 'tokenizer.ggml.eos_token_id' is 94, which is none of the 94 tokens"]
    assert [record.message for record in caplog.records] == told[:n]


@pytest.mark.parametrize("value", [3, "{% if"])
def test_a_chat_template_that_cannot_be_used(
    rewrite: Rewrite, caplog: pytest.LogCaptureFixture, tmp_path: Path, value: object
) -> None:
    """ChatML stands in for it, also where a model is trained."""
    path = rewrite({"tokenizer.chat_template": value})
    (tmp_path / "rows.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 4
    )
    session = Session([CPUBackend(1)])
    FineTuning(session, path, tmp_path / "rows.jsonl", TrainingConfig(ctx_size=32)).close()
    session.close()
    assert [r.message for r in caplog.records if "ChatML stands in" in r.message]


def test_a_rerank_template_that_is_no_text(rewrite: Rewrite) -> None:
    path = rewrite({"tokenizer.chat_template.rerank": 3})
    with pytest.raises(ModelFileError, match=r"key 'tokenizer\.chat_template\.rerank' is 3, which is not a text"):
        ModelRunner(path, SMALL)


def test_as_many_tokens_as_embeddings(rewrite: Rewrite) -> None:
    line = refused(rewrite(tensors={"token_embd.weight": np.zeros((500, 64), np.float32)}))
    assert "'tokenizer.ggml.tokens' has 512 tokens" in line
    assert "500 rows" in line


# type numbers of ggml that are read as files but not as weights; of some, tiny's rows are not whole
# blocks
@pytest.mark.parametrize("number", [10, 11, 16, 23, 34, 35, 99, 2**32 - 1])
def test_unsupported_types(good: Path, tmp_path: Path, number: int) -> None:
    data = bytearray(good.read_bytes())
    name = b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 16
    data[at : at + 4] = struct.pack("<I", number)
    path = tmp_path / "type.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=r"tensor 'blk\.0\.attn_q\.weight'"), GGUFFile.open(path) as gguf:
        hparams_of(gguf)


@pytest.mark.parametrize("command", ["serve", "generate", "plan", "bench", "selftest"])
def test_each_command_refuses_in_one_line(rewrite: Rewrite, command: str) -> None:
    path = rewrite(tensors={"blk.1.ffn_down.weight": GONE})
    more = {"serve": ["--port", "0"], "generate": ["-p", "x"]}.get(command, [])
    got = run(command, "-m", str(path), *more)
    assert got.returncode == 1
    assert got.stdout == b""
    assert re.fullmatch(r"logitless: \S+: tensor 'blk\.1\.ffn_down\.weight' is missing\n", got.stderr.decode())


@pytest.mark.parametrize("arch", ["nemesis", "x" * 500, "two\nlines", None])
def test_refusal_of_an_architecture_is_a_short_line(arch: str | None) -> None:
    with pytest.raises(ModelFileError, match=r"'llada' fills masks in rounds and has no next token: docs/models\.md"):
        read_hparams({"general.architecture": "llada"}, 8, "m.gguf")
    with pytest.raises(ModelFileError, match="is not supported; docs") as refused:
        read_hparams({"general.architecture": arch}, 8, "/models/some-model-of-a-long-name-Q4_K_M.gguf")
    assert len(str(refused.value)) <= 200
    assert "\n" not in str(refused.value)

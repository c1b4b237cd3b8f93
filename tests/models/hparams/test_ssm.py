"""Hyper-parameters that no layer can have, foremost of recurrent layers (SSM keys)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import hparams_of
from tests.helpers.architecture_specs import MAPPED, PLAIN
from tests.helpers.reference_model import write
from tests.models.architectures.test_mtp import GONE, changed
from tests.models.architectures.test_registry import compute, tokens


@pytest.mark.parametrize(
    ("arch", "keys", "message"),
    [
        ("qwen35", {"ssm.state_size": None}, "key 'qwen35.ssm.state_size' is missing"),
        ("qwen35", {"ssm.state_size": 0}, "key 'qwen35.ssm.state_size' is 0, which is not a possible size"),
        ("qwen35", {"ssm.group_count": 3}, "so many heads cannot share 3 of keys"),
        ("qwen35", {"ssm.inner_size": 65}, "is not that of 4 heads of 16"),
        ("qwen35", {"ssm.conv_kernel": 1}, "key 'qwen35.ssm.conv_kernel' is 1; supported are 2 to 64"),
        ("qwen35", {"full_attention_interval": 9}, "leaves none of 4 layers that attends"),
        ("qwen35", {"attention.recurrent_layers": [True, False]}, "has 2 values, for 4 blocks"),
        ("qwen35", {"attention.recurrent_layers": [True] * 4}, "leaves none of 4 layers that attends"),
        ("lfm2", {"shortconv.l_cache": None}, "key 'lfm2.shortconv.l_cache' is missing"),
        ("lfm2", {"attention.head_count_kv": [0, 2]}, "'lfm2.attention.head_count_kv' has 2 values"),
        ("lfm2", {"attention.head_count_kv": [0, 0, 0, 0]}, "is not one number for all layers that attend"),
        ("lfm2", {"attention.head_count_kv": [0, 2, 1, 0]}, "is not one number for all layers that attend"),
        ("lfm2", {"attention.head_count_kv": 2}, "is not a number for each of 4 layers"),
        ("deci", {"attention.head_count_kv": [0] * 6}, "key 'deci.attention.head_count_kv' is 0"),
        ("deci", {"feed_forward_length": [96, 96, 96, 0, 0, 96]}, "key 'deci.feed_forward_length' is 0 where a layer"),
        ("deci", {"attention.head_count": [4, 2, 0, 0, 4, 0]}, "differs between layers"),
        ("deci", {"attention.head_count": [0] * 6}, "key 'deci.attention.head_count' is 0: no layer attends"),
        ("deci", {"attention.head_count": [0, 4, 4, 4, 4, 4]}, "0 heads cannot share"),
        ("bitnet", {"hidden_activation": "xielu"}, "is 'xielu'; supported are silu, gelu, relu, relu2"),
        ("granitehybrid", {"attention.head_count_kv": 2}, "is not a number for each of 4 layers"),
        ("granitehybrid", {"attention.head_count_kv": [2, 2, 2, 2]}, "leaves no layer that keeps a state"),
        ("granitehybrid", {"ssm.inner_size": 130}, "ssm.inner_size' is 130, not a multiple of 4 heads"),
        ("granitehybrid", {"ssm.group_count": 3}, "so many heads cannot share 3 of keys"),
        ("nemotron_h", {"feed_forward_length": [0, 96, 96, 0, 96]}, "is set for a layer that attends"),
        ("nemotron_h", {"feed_forward_length": [0, 96]}, "has 2 values, for 5 blocks"),
        ("nemotron_h", {"attention.head_count_kv": [0, 0, 0, 0, 0]}, "is not one number for all layers that attend"),
        ("qwen4exp", {"ple.layers": [1]}, "ple.layers' has layer 1, which has no recurrent state"),
        ("qwen4exp", {"ple.layers": [2, 2]}, "ple.layers' are 2, the first 2; supported is one of 4"),
        ("qwen4exp", {"ple.ngram_size": 9}, "ple.ngram_size' is 9; supported are 2 to 8"),
        ("qwen4exp", {"ple.head_offsets": [0, 1, 2]}, "ple.head_offsets' has not 4 whole numbers of at least 0"),
        ("qwen4exp", {"ple.head_vocab_sizes": [1, 0, 1, 1]}, "has a number that is not a possible size"),
        ("qwen4exp", {"ple.head_offsets": [0, 1, 2, 371]}, "'per_layer_token_embd.weight' has shape"),
        ("deepseek4", {"attention.compress_ratios": [0, 4]}, "compress_ratios' is not a number for each of 4 layers"),
        ("deepseek4", {"attention.compress_ratios": [0, 4, 8, 4]}, "ratios' has 8; supported are 0, 4 and 128"),
        ("deepseek4", {"attention.output_group_count": 3}, "output_group_count' is 3, of 4 heads"),
        ("deepseek4", {"attention.indexer.key_length": 8}, "indexer.key_length' is 8, of which 16 have RoPE"),
        ("deepseek4", {"attention.head_count_kv": 2}, "head_count_kv' must be 1, with values as wide as keys"),
        (
            "glm-dsa",
            {"attention.indexer.types": [0, 1, 1]},
            "indexer.types' has no indexer in the first layer that attends",
        ),
        ("glm-dsa", {"attention.indexer.types": [1, 1]}, "indexer.types' has 2 values, for 3 blocks"),
        ("glm-dsa", {"attention.indexer.key_length": 6}, "indexer.key_length' is 6, of which 8 have RoPE"),
        ("glm5-next", {"attention.indexer.kpool": 3}, "indexer.kpool' is 3; it must be one number from 2 to 64"),
        ("glm5-next", {"attention.indexer.kpool_select_tail": False}, "kpool_select_tail' is false, which is not"),
        ("qwen4exp", {"attention.compress_ratios": [0, 2, 0, 4]}, "compress_ratios' is 4; it must be one number"),
        ("glm5-next", {"nextn_predict_layers": 2}, "indexer.types' has no indexer in the first layer that attends"),
        (
            "minimax-m3",
            {"attention.indexer.local_blocks": 3},
            "indexer.local_blocks' is 3, of 2 blocks that are chosen",
        ),
        ("minimax-m3", {"attention.indexer.head_count": 4}, "indexer.head_count' is 4, for 2 key heads"),
        ("mamba2", {"ssm.conv_kernel": 65}, "key 'mamba2.ssm.conv_kernel' is 65; supported are 2 to 64"),
        ("falcon-h1", {"ssm.state_size": None}, "key 'falcon-h1.ssm.state_size' is missing"),
    ],
)
def test_impossible_value_is_refused_by_its_key(arch: str, keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    spec = (PLAIN | MAPPED)[arch]
    write(path := tmp_path / "m.gguf", spec)  # with the tensors of what is right
    from gguf import GGUFReader, GGUFWriter

    reader, changed = GGUFReader(path), tmp_path / "changed.gguf"
    writer = GGUFWriter(changed, arch)
    for name, field in reader.fields.items():
        short = name.removeprefix(f"{arch}.")
        if name.startswith(("GGUF.", "general.architecture")) or short in keys:
            continue
        writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for short, value in keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array, str: writer.add_string}
        if value is not None:
            add[type(value)](f"{arch}.{short}", value)
    for t in reader.tensors:
        writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile.open(changed) as gguf, pytest.raises(ModelFileError, match=message):
        hparams_of(gguf)


def test_layers_that_all_attend(tmp_path: Path) -> None:
    spec = PLAIN["qwen35"]
    write(path := tmp_path / "m.gguf", replace(spec, keys=spec.keys | {"full_attention_interval": 1}))
    with GGUFFile.open(path) as gguf:
        assert hparams_of(gguf).recurrent is None


def test_a_convolution_without_a_bias_is_one_with_a_bias_of_zeros(tmp_path: Path) -> None:
    """Granite's, which llama.cpp does not load without one."""
    s, name = PLAIN["granitehybrid that turns"], "blk.0.ssm_conv1d.bias"
    size = write(path := tmp_path / "m.gguf", s)[name].shape
    files = [changed(path, tmp_path / "0.gguf", {name: np.zeros(size, np.float32)})]
    files.append(changed(path, tmp_path / "1.gguf", {name: GONE}))
    np.testing.assert_array_equal(*(compute(file, s, tokens(s)) for file in files))

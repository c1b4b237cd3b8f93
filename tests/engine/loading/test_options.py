"""Model options: one declaration gives the type, the check, the flag and the keyword."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from logitless.cli.flags.flags import parse
from logitless.cli.flags.options import SERVE
from logitless.cli.setup.model import model_options
from logitless.engine.loading.open_model import open_model
from logitless.engine.loading.options import OPTIONS, ModelOptions, OptionConflict, OptionError, text_file
from logitless.graph.dtype import KV_TYPES

FLAGS = [flag for group in SERVE for flag in group.flags]


def test_each_option_is_a_flag_of_the_server_with_its_name_and_default() -> None:
    for name in (f.name for f in fields(ModelOptions)):
        assert OPTIONS[name].long == "--" + name.replace("_", "-")
        assert [flag.default for flag in FLAGS if flag.dest == name] == [getattr(ModelOptions(), name)], name


def test_flags_and_keywords_mean_the_same() -> None:
    words = "-c 512 --device VULKAN:0,cpu -ts 3,1 --lora a.gguf,b.gguf --lora-scaled c.gguf 0.5 -ot ffn=cpu --no-kvu"
    given = words.replace("--no-kvu", "-no-kvu").split()
    assert model_options(parse(FLAGS, given, {})) == ModelOptions(
        ctx_size=512,
        device=["vulkan", "cpu"],  # type: ignore[arg-type]
        tensor_split=(3, 1),
        lora=["a.gguf", Path("b.gguf")],  # type: ignore[list-item]
        lora_scaled=[("c.gguf", 0.5)],  # type: ignore[list-item]
        override_tensor={"ffn": "cpu"},  # type: ignore[arg-type]
        kv_unified=False,
    )


def test_checked_options_stay_as_they_are() -> None:
    options = ModelOptions(device="opencl", override_kv="a=int:1", rpc="h:1,k:2", gpu_layers="all")  # type: ignore[arg-type]
    assert replace(options) == options
    assert (options.device, options.override_kv, options.rpc) == ("opencl:0", (("a", 1),), ("h:1", "k:2"))


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ({"ctx_size": -5}, "--ctx-size: -5 is not a whole number from 0 to 1073741824"),
        ({"ctx_size": True}, "--ctx-size: True is not text or a number"),
        ({"kv_unified": 1}, "--kv-unified: 1 is not True or False"),
        ({"cache_type_k": "q4"}, f"--cache-type-k: 'q4' is not one of {', '.join(KV_TYPES)}"),
        ({"device": "cuda"}, "--device: 'cuda' is not a list of cpu, opencl:N, vulkan:N and rpc:HOST:PORT, or none"),
        ({"device": {}}, "--device: {} is not text or a number"),
        ({"lora": [4]}, "--lora: [4] is not text"),
        ({"slot_prompt_similarity": float("nan")}, "--slot-prompt-similarity: nan is not a number from 0 to 1"),
    ],
)
def test_wrong_values_name_the_option(option: dict[str, Any], line: str) -> None:
    with pytest.raises(OptionError) as caught:
        ModelOptions(**option)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ({"spec_type": "telepathy"}, "--spec-type: 'telepathy' is not one of none, draft-simple"),
        ({"spec_type": "draft-simple"}, "--spec-type draft-simple needs --model-draft FILE"),
        ({"lora_scaled": "a.gguf"}, "--lora-scaled: 'a.gguf' is not a file and a scale"),
        ({"chat_template": "{% if %}"}, "--chat-template: "),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused_before_anything_is_allocated(
    shared_data: Path, option: dict[str, Any], line: str
) -> None:
    model = shared_data / "models" / "prometheus-shakespeare-2.3M-F32.gguf"
    with pytest.raises(OptionError) as caught:
        open_model(model, ModelOptions(**option))
    assert str(caught.value).startswith(line)
    assert isinstance(caught.value, OptionConflict) is ("--spec-type:" not in line and "--lora" not in line)


def test_yarn_options_stand_in_for_the_files_keys(shared_data: Path) -> None:
    model = shared_data / "models" / "arch-llama-yarn-F32.gguf"
    scaling = open_model(model).hparams.rope_scaling
    changed = open_model(model, ModelOptions(yarn_beta_fast=16, yarn_beta_slow=2)).hparams.rope_scaling
    assert (changed.beta_fast, changed.beta_slow) == (16, 2) != (scaling.beta_fast, scaling.beta_slow)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_text_file_with_a_byte_order_mark_is_its_text(tmp_path: Path, mark: bytes) -> None:
    """--json-schema-file, --grammar-file, --chat-template-file, --file."""
    path = tmp_path / "schema.json"
    path.write_bytes(mark + '{"ö": "\ufeff"}'.encode())
    assert text_file(str(path)) == '{"ö": "\ufeff"}'

"""Sampling defaults of a model's file and of generation_config.json, which flags, requests and programs override."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless import AsyncLLM, SamplingParams
from logitless.cli.flags.flags import parse
from logitless.cli.flags.options import SERVE
from logitless.cli.setup.sampling import sampling_defaults
from logitless.engine.loading.open_model import open_model
from logitless.engine.sampling.model_defaults import model_defaults
from logitless.engine.sampling.params import ALIASES
from logitless.frontend.parser import RequestParser
from logitless.jobs import completion_job
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.overrides import Overrides
from logitless.models.quantization.quantize_model import plan_copy
from tests.helpers.huggingface_folders import write_folder
from tests.models.architectures.test_llama_cpp import answers

FLAGS = [flag for group in SERVE for flag in group.flags]
GENERATION = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.125, "do_sample": True}
OWN = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repeat_penalty": 1.125, "repeat_last_n": -1, "min_p": 0.05}
PROPS = """
import urllib.request
server = opened(json.load(sys.stdin), 64)
print(urllib.request.urlopen(server.listening_address + "/props", timeout=60).read().decode())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("defaults") / "model", "qwen2")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return folder


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    """The converted file, with a sampler chain, too."""
    chain = Overrides((("general.sampling.sequence", "top_k;nucleus;temperature;penalties"),))
    with GGUFFile.open(folder, chain) as gguf:
        plan_copy(gguf).write(folder.with_suffix(".gguf"))
    return folder.with_suffix(".gguf")


def defaults(path: Path, *words: str, **environ: str) -> SamplingParams:
    """Those of a server with these flags and variables."""
    return sampling_defaults(parse(FLAGS, words, environ), open_model(path))


def differing(params: SamplingParams, **expected: Any) -> dict[str, Any]:
    return {n: getattr(params, n) for n, v in expected.items() if getattr(params, n) != pytest.approx(v)}


def test_generation_config_gives_the_defaults_of_a_server_and_flags_come_first(folder: Path) -> None:
    assert not differing(defaults(folder), **OWN)
    flags = defaults(folder, "--top-k", "40", "--temp", "0.8", LLAMA_ARG_REPEAT_PENALTY="1")
    assert not differing(flags, **OWN | {"top_k": 40, "temperature": 0.8, "repeat_penalty": 1})
    switch = defaults(folder, "--gpt-oss-20b-default", "--top-k", "5")
    assert not differing(switch, **OWN | {"top_k": 5, "temperature": 1, "top_p": 1, "min_p": 0.01})


def test_chain_of_a_file_gives_way_to_both_flags(file: Path) -> None:
    assert defaults(file).samplers == ("top_k", "top_p", "temperature", "penalties")
    assert defaults(file, "--samplers", "top_k").samplers == ("top_k",)
    assert defaults(file, "--sampler-seq", "kt").samplers == ("top_k", "temperature")


def test_request_of_a_program_is_of_the_model_unless_it_has_parameters(file: Path) -> None:
    llm = AsyncLLM(file, ctx_size=64)
    parser = RequestParser(llm.model.tokenizer, llm.config, 64)

    def sampling(params: SamplingParams | None) -> Any:
        return completion_job(parser, "hello", params).requests[0].sampling

    assert not differing(sampling(None), **OWN)
    assert not differing(sampling(llm.get_default_sampling_params()), **OWN)
    plain = SamplingParams(max_tokens=1)
    assert not differing(sampling(plain), temperature=0.8, top_k=40, repeat_last_n=64, samplers=plain.samplers)
    vllm = SamplingParams(repetition_penalty=1.5, temperature=1)
    assert not differing(sampling(vllm), temperature=1, repeat_penalty=1.5, repeat_last_n=-1)


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="no llama.cpp (the package xllamacpp)")
def test_llama_cpp_has_the_same_defaults_of_a_converted_file(file: Path) -> None:
    theirs = json.loads(answers(PROPS, json.dumps(str(file)))[0])["default_generation_settings"]["params"]
    assert not differing(defaults(file), **{name: theirs[name] for name in OWN})
    assert [ALIASES.get(name, name) for name in theirs["samplers"]] == list(defaults(file).samplers)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"temperature": "hot"}, "generation_config.json: 'temperature' is 'hot', not a number"),
        ({"min_p": 1e39}, "generation_config.json: 'min_p' is '1e\\+39', beyond 32-bit floats"),
        ({"top_k": 1.5}, "generation_config.json: 'top_k' is 1.5, not a count"),
        ({"top_p": [0.9]}, "generation_config.json: 'top_p' is .*, not a number"),
        ([], "generation_config.json: is no JSON object"),
    ],
)
def test_wrong_generation_config_is_refused_in_one_line(settings: object, problem: str, tmp_path: Path) -> None:
    (write_folder(tmp_path, "qwen2") / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelFileError, match=problem):
        GGUFFile.open(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("temp", "hot", "key 'general.sampling.temp' must be one number"),
        ("temp", np.array([0.5, 0.5]), "key 'general.sampling.temp' must be one number"),
        ("top_k", 1.5, "key 'general.sampling.top_k' is 1.5, not a whole number"),
        ("penalty_last_n", -2, "key 'general.sampling.penalty_last_n' is -2, not a whole number from -1"),
        ("sequence", 3, "key 'general.sampling.sequence' is no list of samplers"),
    ],
)
def test_wrong_key_is_refused_in_one_line(key: str, value: Any, problem: str) -> None:
    with pytest.raises(ModelFileError, match=problem):
        model_defaults({f"general.sampling.{key}": value}, Path("m.gguf"))


def test_numbers_beyond_their_limits_and_unknown_samplers_are_as_in_llama_cpp(caplog: pytest.LogCaptureFixture) -> None:
    own = {"general.sampling.top_k": -1, "general.sampling.top_p": 1.5, "general.sampling.sequence": "foo;top_k;"}
    assert model_defaults(own, Path("m.gguf")) == {"top_k": 0, "top_p": 1.0, "samplers": ("top_k",)}
    assert "there is no sampler 'foo'" in caplog.text
    assert model_defaults({"general.sampling.sequence": ""}, Path("m.gguf")) == {}

"""Control vectors: the same losses as llama.cpp's, files that do not fit, and no node where there are none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from logitless import LLM, SamplingParams
from logitless.backends.registry import open_backends
from logitless.engine.loading.open_model import open_model
from logitless.engine.loading.options import ModelOptions, OptionError
from logitless.graph.execution.session import Session
from logitless.models.adapters.control_vector import digest, read_directions, steered
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import define_model, hparams_of
from logitless.training.score import window_losses
from tests.helpers.architecture_specs import PLAIN
from tests.helpers.llama_cpp_library import activations, needs_llama_cpp
from tests.helpers.mla_specs import DEEPSEEK
from tests.helpers.reference_model import Spec, write
from tests.models.architectures.test_gemma3n import GEMMA3N, SMALL

Array = np.ndarray[Any, Any]
SPECS = {
    "llama": Spec(n_layer=5),
    "gemma4": SMALL,
    "gemma3n": next(iter(GEMMA3N.values())),
    "deepseek2": replace(DEEPSEEK, n_layer=4),
    "falcon-h1": PLAIN["falcon-h1"],
}


def written(path: Path, vectors: dict[str, Array]) -> str:
    """A file of llama.cpp's converter."""
    writer = GGUFWriter(path, "controlvector")
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_uint32("controlvector.layer_count", len(vectors))
    for name, vector in vectors.items():
        writer.add_tensor(name, vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def random_vectors(s: Spec, layers: range, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {f"direction.{i}": rng.normal(size=s.n_embd).astype(np.float32) for i in layers}


def losses_of(path: Path, files: list[tuple[str, float]], layers: tuple[int, int], window: Array) -> Array:
    with GGUFFile.open(path) as gguf, Session(open_backends(["cpu"], 1)) as session:
        h = hparams_of(gguf)
        model = steered(session, define_model(session, gguf, h, len(window)), read_directions(files, h, layers))
        return np.asarray(window_losses(session, model, window))


@needs_llama_cpp
@pytest.mark.parametrize("name", SPECS)
def test_losses_are_llama_cpps(name: str, tmp_path: Path) -> None:
    s = replace(SPECS[name], n_vocab=512, vocabulary=True)
    write(tmp_path / "m.gguf", s)
    window = np.random.default_rng(4).integers(3, 512, 24).astype(np.int32)
    first, second = random_vectors(s, range(1, s.n_layer)), random_vectors(s, range(1, s.n_layer - 1), 1)
    files = [(written(tmp_path / "a.gguf", first), 1.0), (written(tmp_path / "b.gguf", second), -0.5)]
    total = np.zeros((s.n_layer - 1, s.n_embd), np.float32)
    for vectors, scale in ((first, 1.0), (second, -0.5)):
        for i, vector in enumerate(vectors.values()):
            total[i] += vector * np.float32(scale)
    result = []
    for layers in ((0, 0), (2, s.n_layer - 1)):
        ours = losses_of(tmp_path / "m.gguf", files, layers, window)
        span = np.array([layers[0] or 1, layers[1] or s.n_layer], np.int32)
        told = activations(tmp_path / "m.gguf", window[None], 512, tmp_path, collect=False, control=total, layers=span)
        assert np.abs(ours - told["losses"][0]).mean() < (0.04 if name == "gemma3n" else 0.01)
        result.append(ours)
    plain = losses_of(tmp_path / "m.gguf", [], (0, 0), window)
    assert np.abs(result[0] - plain).mean() > 0.1
    assert np.abs(result[0] - result[1]).mean() > 0.03


@pytest.mark.parametrize(
    ("vectors", "line"),
    [
        ({"direction.1": np.zeros(32, np.float32)}, r"'direction.1' has f32 of shape \(32,\), expected f32 \(64,\)"),
        ({"direction.1": np.zeros((2, 64), np.float32)}, r"of shape \(2, 64\)"),
        ({"direction.1": np.zeros(64, np.float16)}, "has f16 of shape"),
        ({"direction.1": np.full(64, np.nan, np.float32)}, "'direction.1' holds a number that is not finite"),
        ({"direction.0": np.zeros(64, np.float32)}, "'direction.0': the first layer has no vector"),
        ({"vector.1": np.zeros(64, np.float32)}, "is no control vector: it has no tensor direction.N"),
        ({"direction.2": np.zeros(64, np.float32)}, "has vectors of other layers only"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_their_tensor(
    vectors: dict[str, Array], line: str, tmp_path: Path
) -> None:
    write(tmp_path / "m.gguf", Spec())
    path = written(tmp_path / "v.gguf", vectors)
    with GGUFFile.open(tmp_path / "m.gguf") as gguf, pytest.raises(ModelFileError, match=line):
        read_directions([(path, 1.0)], hparams_of(gguf))


def test_vectors_of_further_layers_are_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "m.gguf", Spec())
    path = written(tmp_path / "v.gguf", random_vectors(Spec(), range(1, 4)))
    with GGUFFile.open(tmp_path / "m.gguf") as gguf:
        assert list(read_directions([(path, 1.0)], hparams_of(gguf))) == [1]
    assert "'direction.2' is ignored: the model has 2 layers" in caplog.text


def test_no_vectors_define_nothing(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", Spec())
    with GGUFFile.open(tmp_path / "m.gguf") as gguf, Session(open_backends(["cpu"], 1)) as session:
        model = define_model(session, gguf, hparams_of(gguf), 16)
        assert steered(session, model, read_directions([], hparams_of(gguf))) is model
    assert digest({}) == ""


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"control_vector_layer_range": (1, 2)}, "--control-vector-layer-range is of --control-vector, which is not"),
        ({"control_vector": "v.gguf", "control_vector_layer_range": "2"}, "'2' is not START END"),
        ({"control_vector": "v.gguf", "control_vector_layer_range": "3,2"}, "'3,2' is not START END"),
        ({"control_vector_scaled": "v.gguf"}, "--control-vector-scaled: 'v.gguf' is not a file and a scale"),
        ({"control_vector_scaled": "v.gguf:nan"}, "--control-vector-scaled: 'v.gguf:nan' is not a file and a scale"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], line: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", replace(Spec(), n_vocab=512, vocabulary=True))
    with pytest.raises(OptionError, match=line):
        open_model(tmp_path / "m.gguf", ModelOptions(**options))


def test_a_models_cached_blocks_are_not_those_of_another_vector(tmp_path: Path) -> None:
    s = replace(Spec(), n_vocab=512, vocabulary=True)
    write(tmp_path / "m.gguf", s)
    path = written(tmp_path / "v.gguf", random_vectors(s, range(1, 2)))
    kinds = set()
    for more in ({}, {"control_vector": path}, {"control_vector_scaled": [(path, 0.5)]}):
        engine = open_model(tmp_path / "m.gguf", ModelOptions(ctx_size=64, parallel=1, threads=1, **more)).engine()
        kinds.add(engine.cache_kind)
        engine.close()
    assert len(kinds) == 3


def test_answers_have_the_vector_and_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    s = replace(Spec(), n_layer=3, n_vocab=512, vocabulary=True)
    write(tmp_path / "m.gguf", s)
    path = written(tmp_path / "v.gguf", random_vectors(s, range(1, 3)))
    prompts = [[5, 9, 300], [7] * 20, [400, 3]]
    common: dict[str, Any] = {"ctx_size": 256, "threads": 1, "parallel": 4}
    asked = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1)

    def answers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
        return [(reply.token_ids, reply.logprobs) for reply in llm.generate(prompts, asked)]

    with LLM(tmp_path / "m.gguf", control_vector_scaled=[(path, 2.0)], **common) as llm:
        together, alone = answers(llm, prompts), [answers(llm, [prompt])[0] for prompt in prompts]
    with LLM(tmp_path / "m.gguf", **common) as llm:
        plain = answers(llm, prompts)
    assert together == alone
    assert together != plain

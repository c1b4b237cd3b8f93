"""MTP head in a file of its own: equal to the model with the head inside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.execution.session import Session
from logitless.models.architectures.mtp import can_guess
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import define_model, hparams_of
from tests.helpers.mtp_specs import NEXTN
from tests.helpers.reference_model import Spec, write
from tests.models.architectures.test_mtp import GONE, changed

BLOCKS = ["qwen35", "deepseek2 balanced, no norm behind", "glm4moe", "cohere2moe", "nemotron_h_moe"]


def layers_of(s: Spec) -> Spec:
    """The same model without its MTP block, as its converter writes it."""
    n = s.n_layer + s.n_mtp
    keys = {k: v[: s.n_layer] if isinstance(v, list) and len(v) == n else v for k, v in s.keys.items()}
    return replace(s, n_mtp=0, keys=keys)


def three_files(folder: Path, s: Spec) -> tuple[Path, Path, Path]:
    """Files with both, with the layers, and with the block and what llama.cpp's converter adds
    to it."""
    both, layers = folder / "both.gguf", folder / "layers.gguf"
    tensors = write(both, s)
    write(layers, layers_of(s))
    own = f"blk.{s.n_layer}."
    left_out: dict[str, Any] = {name: GONE for name in tensors if name.startswith("blk.") and not name.startswith(own)}
    return both, layers, changed(both, folder / "mtp-both.gguf", left_out)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("whole", [False, True], ids=["the block alone", "all of the model"])
def test_two_files_are_one_model(tmp_path: Path, name: str, whole: bool) -> None:
    both, layers, block = three_files(tmp_path, NEXTN[name])
    with GGUFFile.open(layers) as alone:
        assert not can_guess(alone, hparams_of(alone))
    with GGUFFile.open(both) as one, GGUFFile.open(layers, block=str(both if whole else block)) as two:
        h = hparams_of(two)
        assert h == hparams_of(one)
        assert can_guess(two, h)
        assert one.tensors.keys() == two.tensors.keys()
        for tensor in one.tensors:
            np.testing.assert_array_equal(one.bytes_of(tensor), two.bytes_of(tensor))
        session = Session([CPUBackend(1)])
        model = define_model(session, two, h, 64, mtp=True)
        assert model.mtp is not None
        assert all(session.read(t.name).size for t in model.mtp.tensors.values())
        session.close()
        two.check_unchanged()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (replace(NEXTN["qwen35"], n_embd=96), "key 'qwen35.embedding_length' is 96, the model's is 64"),
        (replace(NEXTN["qwen35"], n_layer=6), "has a block behind 6 layers, the model has 4"),
        (NEXTN["glm4moe"], "key 'general.architecture' is glm4moe, the model's is qwen35"),
        (layers_of(NEXTN["qwen35"]), "has no block that predicts one token more"),
    ],
)
def test_another_models_block_is_refused(tmp_path: Path, other: Spec, message: str) -> None:
    _, layers, _ = three_files(tmp_path, NEXTN["qwen35"])
    write(path := tmp_path / "other.gguf", other)
    with pytest.raises(ModelFileError) as raised:
        GGUFFile.open(layers, block=str(path))
    assert str(raised.value) == f"{path}: {message}"


def test_a_model_with_a_block_takes_no_other(tmp_path: Path) -> None:
    both, _, block = three_files(tmp_path, NEXTN["qwen35"])
    with pytest.raises(ModelFileError, match=r"mtp-both.gguf: the model has block 4 itself"):
        GGUFFile.open(both, block=str(block))
    with pytest.raises(ModelFileError, match="no such file"):
        GGUFFile.open(both, block=str(tmp_path / "nothing.gguf"))

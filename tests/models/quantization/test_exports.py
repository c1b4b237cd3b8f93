"""Quantized finetunes and merges: the bytes of the F32 export, quantized afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from logitless.backends.registry import open_backends
from logitless.cli.main import main
from logitless.graph.execution.session import Session
from logitless.models.adapters.lora import write_adapter
from logitless.models.adapters.merge import merge
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import define_model, hparams_of
from logitless.models.quantization.presets import PresetError
from logitless.models.quantization.quantize_model import plan_quantization
from logitless.training.save import save_result
from logitless.training.trainable import full
from tests.helpers.reference_model import Spec, write
from tests.models.adapters.test_lora import random_adapter

SPEC = Spec(n_embd=256, n_ff=256, n_expert=2, n_expert_used=1, dtype="f16", untied=True)
UP, QUERY = "blk.1.ffn_up_exps.weight", "blk.0.attn_q.weight"


def content(path: Path) -> dict[str, tuple[str, bytes]]:
    with GGUFFile.open(path) as gguf:
        assert gguf.metadata["general.file_type"] == 15
        return {name: (info.dtype, gguf.bytes_of(name).tobytes()) for name, info in gguf.tensors.items()}


def afterwards(source: Path, out: Path, **more: bool) -> dict[str, tuple[str, bytes]]:
    with GGUFFile.open(source) as gguf:
        plan_quantization(gguf, "Q4_K_M", **more).write(out)
    return content(out)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """The finetune of some weights, before its first step."""

    def saved(model: Path, file_type: str, patterns: list[str]) -> Path:
        with GGUFFile.open(model) as gguf, Session(open_backends(["cpu"], 1)) as session:
            h = hparams_of(gguf)
            trained = full(session, define_model(session, gguf, h, 64), gguf, h, patterns)
            save_result(path := tmp_path / f"{file_type}.gguf", trained, gguf, h, file_type)
        return path

    return saved


@pytest.mark.parametrize("patterns", [["*"], ["blk.1.*"]])
def test_a_quantized_finetune(patterns: list[str], saved: Callable[..., Path], tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", SPEC)
    got = content(saved(tmp_path / "m.gguf", "q4_k_m", patterns))
    assert (got[UP][0], got["blk.1.attn_v.weight"][0], got["output.weight"][0]) == ("q4_k", "q6_k", "q6_k")
    assert got == afterwards(saved(tmp_path / "m.gguf", "F32", patterns), tmp_path / "q.gguf")


def test_untrained_matrices_that_are_quantized_stay(saved: Callable[..., Path], tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", Spec(n_embd=256, n_ff=256, dtype="q8_0"))
    got = content(saved(tmp_path / "m.gguf", "q4_k_m", ["blk.1.*"]))
    assert (got["blk.0.attn_k.weight"][0], got["blk.1.attn_k.weight"][0]) == ("q8_0", "q4_k")
    with GGUFFile.open(tmp_path / "m.gguf") as gguf:
        assert got["blk.0.attn_k.weight"][1] == gguf.bytes_of("blk.0.attn_k.weight").tobytes()
    with pytest.raises(PresetError, match="'Q9' is no type of a file"):
        saved(tmp_path / "m.gguf", "Q9", ["*"])


def test_a_quantized_merge(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, lora = tmp_path / "m.gguf", tmp_path / "a.gguf"
    write(model, Spec(n_embd=256, n_ff=256, dtype="f32", untied=True))
    with GGUFFile.open(model) as base:
        h, adapter = hparams_of(base), random_adapter(base, 3, 4, 0.0, size=0.2)
        write_adapter(lora, adapter, base, h, "a")
        assert QUERY in merge(tmp_path / "f32.gguf", base, h, [(adapter, 1.0)])
    words = ["export-lora", "-m", str(model), "--lora", str(lora), "-o", str(tmp_path / "q4.gguf"), "--output-type"]
    assert main([*words, "Q4_K_M"]) == 0
    got = content(tmp_path / "q4.gguf")
    assert got[QUERY][0] == "q4_k"
    assert got == afterwards(tmp_path / "f32.gguf", tmp_path / "q.gguf")
    capfd.readouterr()
    assert main([*words, "Q9"]) == 2
    assert "--output-type: 'Q9' is no type of a file" in capfd.readouterr().err

"""Types of the KV cache that do not suit the model or a device are refused at the start, in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.backends.errors import DeviceError
from logitless.backends.gpu.device import supports
from logitless.backends.gpu.language.dialect import CPU, SIMT
from logitless.engine.runner.cache_types import check_types, refusal
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.graph.backend import Backend
from logitless.graph.ops.attention.paged_attention import attention
from logitless.graph.tensor import Tensor, feed, variable
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import hparams_of
from logitless.training.policy.served_forward import is_served
from tests.helpers.reference_model import Spec, write


def test_blocks_that_do_not_fit_the_heads_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", Spec(n_embd=160, n_head=4, head_dim=40))
    with GGUFFile.open(tmp_path / "m.gguf") as gguf:
        h = hparams_of(gguf)
    check_types(h, "f32", "bf16")
    with pytest.raises(ValueError, match=r"^--cache-type-v-draft q4_0: needs heads of .* 40; f32, f16, bf16 take any$"):
        check_types(h, "bf16", "q4_0", "-draft")
    fits = replace(h, head_dim=64)
    check_types(fits, "q8_0", "q8_0", drafter=(0, fits.sizes(0)))
    with pytest.raises(ValueError, match=r"^--cache-type-k q8_0: needs heads of .*, the drafter's have 40; f32"):
        check_types(fits, "q8_0", "f16", drafter=(0, h.sizes(0)))
    assert is_served(h, ("f16", "f32"))
    assert not is_served(h, ("f16", "q8_0"))  # attention's gradient does not read blocks


@pytest.mark.parametrize(
    ("types", "works"),
    [(("q4_0", "q4_0"), True), (("q5_1", "iq4_nl"), True), (("q8_0", "q4_1"), True), (("q4_0", "f16"), False)],
)
@pytest.mark.parametrize("shape", [CPU, SIMT])
def test_types_without_attention_on_a_device_are_refused(types: tuple[str, str], works: bool, shape: Any) -> None:
    k, v = variable("k", (4, 2, 64, 16), types[0]), variable("v", (4, 2, 16, 64), types[1])
    inputs = feed("tables", (1, 4), "i32"), feed("slot", (1,), "i32"), feed("pos", (1,), "i32")
    graph = [attention(feed("q", (1, 2, 64)), k, v, *inputs, scale=0.125)]
    device = cast("Backend", SimpleNamespace(name="gpu:0", supports=lambda t: supports(t, shape, "gpu:0")))
    line = refusal(graph, [device], *types)
    assert line == ("" if works else f"--cache-type-k q4_0 --cache-type-v f16: {line.partition(': ')[2]}")
    assert works or "gpu:0 has no attention over these; equal types would do" in line


def test_a_dry_run_refuses_what_a_server_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Card(CPUBackend):
        name, memory_bytes = "gpu:0", 1 << 30

        def supports(self, t: Tensor) -> bool:
            return super().supports(t) and not (t.op == "attention" and t.src[1].dtype == "f32")

    def opened(names: tuple[str, ...], threads: int = 0) -> list[Backend]:
        return [*(Card(1) for name in names if name != "cpu"), CPUBackend(1)]

    monkeypatch.setattr("logitless.engine.runner.model_runner.open_backends", opened)
    write(path := tmp_path / "m.gguf", Spec(head_dim=32))
    for reason in ("", "the fastest"):
        options = RunnerOptions(
            n_ctx=64, type_k="f32", type_v="f32", devices=("gpu:0",), device_reason=reason, warmup=False
        )
        engine = ModelRunner(path, options)
        if reason:
            sizes, _ = engine.dry_run()
            assert len(sizes) == 1
            assert "gpu:0 has no attention over these" in engine.options.device_reason
        else:
            with pytest.raises(DeviceError, match="gpu:0 has no attention over these"):
                engine.dry_run()
        engine.close()

"""MTP head memory: counted in layer placement, and loaded with the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.engine.requests import CompletionRequest
from logitless.engine.runner import model_runner
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from logitless.engine.speculation.mtp import MTPDrafter
from logitless.engine.speculation.settings import SpeculationParams, SpeculationSettings
from logitless.engine.speculation.speculator import Speculator
from logitless.models.adapters.full_finetunes import digest_of
from logitless.models.model import hparams_of
from logitless.models.tokenizer import from_metadata
from tests.helpers.mtp_specs import NEXTN
from tests.helpers.reference_model import write
from tests.models.architectures.test_mtp import changed
from tests.models.gguf.test_mtp_file import three_files

OPTIONS = RunnerOptions(256, n_slots=2, n_ubatch=64, threads=1, n_draft_tokens=2)


def test_all_of_it_is_loaded_and_was_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, _, _ = three_files(tmp_path, NEXTN["glm4moe 355B"])
    asked: list[Any] = []
    monkeypatch.setattr(model_runner, "fit", lambda sizes, *_: asked.append(sizes) or True)
    engine = ModelRunner(both, OPTIONS)
    assert engine._fits(None)
    engine.load()
    own = f"blk.{engine.hparams.n_layer}."
    held = {name: state for name, state in engine.session._variables.items() if name.startswith(own)}
    assert len(held) > 20
    assert [name for name, state in held.items() if not state.buffers] == []
    planned, _ = engine.dry_run()
    assert asked[-1][0].weights == planned[0].weights
    assert asked[-1][0].variables == planned[0].variables
    engine.close()


def test_finetunes_made_before_the_block_came_are_served(tmp_path: Path) -> None:
    """Of a model whose block has a file of its own."""
    s = replace(NEXTN["glm4moe"], n_layer=2)
    both, layers, block = three_files(tmp_path, s)
    engine = ModelRunner(layers, replace(OPTIONS, block=str(block)))
    name = "blk.0.attn_q.weight"
    tuned = changed(layers, tmp_path / "tuned.gguf", {name: np.zeros((64, 64), np.float32)})
    for path in (tuned, both):
        handle = engine.weight_sets.put(path)
        assert engine.weight_sets.digest(handle) == digest_of(path)  # what slot files say of it
        model = engine.weight_sets.model(handle)
        assert model.hparams == hparams_of(engine.gguf)
        assert model.mtp is not None
        assert engine.model.mtp is not None
        assert model.mtp.tensors == engine.model.mtp.tensors
    engine.close()


def test_steps_that_verify_have_their_plans(tmp_path: Path) -> None:
    s = NEXTN["qwen35, no norm behind"]
    write(path := tmp_path / "m.gguf", replace(s, n_vocab=512, vocabulary=True, traits=(*s.traits, "agrees", "much")))
    engine = ModelRunner(path, OPTIONS)
    engine.load()
    while engine.prepare_ahead():
        pass
    assert engine.hidden is not None
    drafter = MTPDrafter(engine, engine.hidden, range(512))
    scheduler = Scheduler(
        engine,
        from_metadata(engine.gguf.metadata),
        SchedulerConfig(n_slots=2, n_ctx=256, n_ubatch=64),
        speculator=Speculator(SpeculationSettings(draft_n_max=2), {"draft-mtp": drafter}),
    )
    for i in range(2):
        params, greedy = SpeculationParams(("draft-mtp",)), SamplingParams(temperature=0.0)
        scheduler.submit(CompletionRequest((5 + i, 9, 3), greedy, 40, ignore_eos=True, speculation=params))
    scheduler.step()  # their prompts
    built = engine.session.n_plans_built
    while not scheduler.idle:
        scheduler.step()
    assert scheduler.stats.draft_tokens_accepted > 10
    assert engine.session.n_plans_built == built
    engine.close()

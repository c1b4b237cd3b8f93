"""MTP heads on OpenCL and Vulkan: whole on the device, and drafts equal to the model's own tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from logitless.engine.requests import CompletionRequest, Finished, Token
from logitless.engine.runner.buckets import StepShape
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from logitless.engine.speculation.draft_learner import DraftLearner
from logitless.engine.speculation.head_file import HeadFile
from logitless.engine.speculation.mtp import LearningDrafter, MTPDrafter
from logitless.engine.speculation.settings import SpeculationParams, SpeculationSettings
from logitless.engine.speculation.speculator import Speculator
from logitless.graph.backend import Backend
from logitless.models.tokenizer import from_metadata
from tests.helpers.mtp_specs import NEXTN
from tests.helpers.op_cases import ONE_GPU
from tests.helpers.reference_model import Spec, write

PROMPT = (1, 403, 407, 261, 378, 432, 383, 286, 261, 376, 298, 315)


def generate(scheduler: Scheduler, n: int, *kinds: str) -> tuple[list[int], Finished]:
    """Token ids of a greedy request, drafted by these kinds, and its end."""
    sampling, speculation = SamplingParams(temperature=0.0), SpeculationParams(kinds)
    scheduler.submit(CompletionRequest(PROMPT, sampling, n, ignore_eos=True, speculation=speculation))
    events = []
    while not scheduler.idle:
        events += [event for _, event in scheduler.step()]
    assert isinstance(events[-1], Finished)
    return [event.id for event in events if isinstance(event, Token)], events[-1]


@pytest.mark.parametrize("name", ["qwen35, no norm behind", "deepseek2", "nemotron_h_moe"])
@pytest.mark.parametrize("device", ONE_GPU)
def test_device_runs_the_mtp_head(
    name: str, device: str, tmp_path: Path, open_device: Callable[[str], Backend]
) -> None:
    open_device(device)
    s = replace(NEXTN[name], n_vocab=512, n_ctx_train=256, vocabulary=True, untied=name != "nemotron_h_moe")
    write(path := tmp_path / "m.gguf", replace(s, traits=(*s.traits, "agrees", "much")))
    engine = ModelRunner(path, RunnerOptions(256, n_slots=1, n_ubatch=16, n_draft_tokens=2, devices=(device,)))
    for shape in (StepShape(16, 2), StepShape(16, 0), StepShape(1, 1, whole=True, mtp=True)):
        placed = engine.session.place(engine.build(shape))
        assert placed.nodes_of(1) == [], "the CPU has nothing to do"
    engine.load()
    assert engine.hidden is not None
    drafter = MTPDrafter(engine, engine.hidden, range(engine.hparams.n_vocab))
    speculator = Speculator(SpeculationSettings(draft_n_max=2), {"draft-mtp": drafter})
    scheduler = Scheduler(
        engine,
        from_metadata(engine.gguf.metadata),
        SchedulerConfig(n_slots=1, n_ctx=256, n_ubatch=16),
        speculator=speculator,
    )

    want, _ = generate(scheduler, 24)
    got, end = generate(scheduler, 24, "draft-mtp")
    assert got == want
    assert end.timings.draft_n_accepted > 5
    engine.close()


@pytest.mark.parametrize("device", ONE_GPU)
def test_device_runs_and_trains_the_draft_head(
    device: str, tmp_path: Path, open_device: Callable[[str], Backend]
) -> None:
    open_device(device)
    write(path := tmp_path / "m.gguf", Spec(n_vocab=512, n_ctx_train=256, vocabulary=True, traits=("much",)))
    options = RunnerOptions(256, n_slots=1, n_ubatch=16, n_draft_tokens=2, learns=True, devices=(device,))
    engine = ModelRunner(path, options)
    assert engine.draft_head is not None
    assert engine.hidden is not None
    learner = DraftLearner(engine, HeadFile(tmp_path, engine.draft_head), 2)
    engine.load()
    learner.start()
    scheduler = Scheduler(
        engine,
        from_metadata(engine.gguf.metadata),
        SchedulerConfig(n_slots=1, n_ctx=256, n_ubatch=16),
        speculator=Speculator(
            SpeculationSettings(draft_n_max=2), {"draft-learn": LearningDrafter(engine, engine.hidden, learner)}
        ),
    )

    want, _ = generate(scheduler, 60)
    for _ in range(3):
        ids, end = generate(scheduler, 60, "draft-learn")
        assert ids == want
        learner.wait()
        learner.run(float("inf"), lambda: False)
    placed = engine.session.place(learner.nodes())
    assert placed.nodes_of(1) == [], "the CPU has nothing to do"
    assert learner.n_steps > 20
    assert end.timings.draft_n_accepted > 10
    engine.close()

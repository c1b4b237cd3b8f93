"""llama.cpp as the oracle of MTP drafts: the same draft tokens, and the same acceptance."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from logitless.engine.requests import CompletionRequest, Finished, Token
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from logitless.engine.sequence import Sequence
from logitless.engine.speculation.draft_builder import AllocateSlots
from logitless.engine.speculation.mtp import MTPDrafter
from logitless.engine.speculation.settings import SpeculationParams, SpeculationSettings
from logitless.engine.speculation.speculator import Speculator
from logitless.models.tokenizer import from_metadata
from tests.helpers.mtp_specs import MAPPED_NEXTN, NEXTN
from tests.helpers.reference_model import write
from tests.models.architectures.test_llama_cpp import TEXT, answers

pytestmark = pytest.mark.skipif(find_spec("xllamacpp") is None, reason="no llama.cpp (the package xllamacpp)")
N_TOKENS, MOST = 60, (1, 3)  # tokens of a text, and of a draft
GUESSES = """
for path, prompt, n_tokens, n_max in json.load(sys.stdin):
    speculative = xllamacpp.CommonParams().speculative
    speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
    speculative.draft.n_max = n_max
    server = opened(path, 256, speculative=speculative)
    body = {"prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
    told = server.handle_completions(body)
    timings = told["timings"]
    print(json.dumps([told["choices"][0]["text"], timings["draft_n"], timings["draft_n_accepted"]]))
"""
# Of models whose blocks often guess right, as their weights are small; of some they are smaller.
NAMES = {
    "qwen35, no norm behind": ("much",),
    "qwen35moe, a head of its own": (),
    "qwen3next": (),
    "deepseek2": ("much",),
    "glm4moe 355B": ("much",),
    "hy_v3": (),
    "cohere2moe": ("much",),
    "nemotron_h_moe of shorter rows": ("much",),
    "deepseek32": (),
    "glm-dsa": ("much",),
    "bailingmoe3": (),
    "step35": (),
    "mimo2": ("much",),
    "glm5-next": (),
    "qwen4exp": (),
    "deepseek4": ("much",),
}  # neither Mistral 4 nor DeepSeek 2 of other forms guess there
MORE = {  # whose heads load and run as those of others above
    "qwen35": (),
    "qwen35, a head of its own": (),
    "qwen35moe": (),
    "qwen3next, no norm behind": ("much",),
    "deepseek2 in groups": (),
    "glm4moe": ("much",),
    "hy_v3, a head of its own": (),
    "cohere2moe, no norm behind": ("much",),
    "cohere2moe, a head of its own": ("much",),
    "nemotron_h_moe": ("much",),
}
Told = tuple[str, int, int]  # a text, and how many tokens were guessed and came true


class Resting(MTPDrafter):
    """Does not guess after a wrong guess: llama.cpp, which cannot go back to an earlier state of
    Qwen3-Next, computes again what came true, and what came instead, in a step without guesses. By
    and by its guesses are others, for in such a step it takes what was said of the wrong guess for
    what was said of the token before."""

    n_wrong = 0

    def propose(self, wanted: list[tuple[Sequence, int]], grow: AllocateSlots) -> dict[Sequence, list[int]]:
        drafts = wanted[0][0].drafts
        assert drafts is not None
        before, self.n_wrong = self.n_wrong, drafts.n_drafted - drafts.n_accepted
        return super().propose(wanted, grow) if self.n_wrong == before else {}


def ours(path: Path, kind: type[MTPDrafter], n_tokens: int = N_TOKENS) -> list[Told]:
    """By drafts of so many tokens, and without any."""
    # few checkpoints and a longer context: windows have pages of their own
    options = RunnerOptions(n_ctx=512, n_slots=1, n_ubatch=64, type_k="f32", type_v="f32", swa_full=False)
    engine = ModelRunner(path, replace(options, n_checkpoints=0, n_draft_tokens=max(MOST)))
    assert engine.hidden is not None
    tokenizer, found = from_metadata(engine.gguf.metadata), []
    for n in (*MOST, 0):
        drafter = kind(engine, engine.hidden, range(engine.hparams.n_vocab))
        speculator = Speculator(SpeculationSettings(draft_n_max=max(1, n)), {"draft-mtp": drafter})
        scheduler = Scheduler(
            engine, tokenizer, SchedulerConfig(n_slots=1, n_ctx=512, n_ubatch=64), speculator=speculator
        )
        params, greedy = SpeculationParams(("draft-mtp",) if n else ()), SamplingParams(temperature=0.0)
        scheduler.submit(CompletionRequest(tuple(TEXT), greedy, n_tokens, ignore_eos=True, speculation=params))
        events = []
        while not scheduler.idle:
            events += [event for _, event in scheduler.step()]
        last = events[-1]
        assert isinstance(last, Finished)
        text = "".join(event.text for event in events if isinstance(event, Token)) + last.text
        found.append((text, last.timings.draft_n, last.timings.draft_n_accepted))
    engine.close()
    return found


@pytest.mark.parametrize("names", [NAMES, pytest.param(MORE, marks=pytest.mark.long)], ids=["one", "more"])
def test_guesses_are_llama_cpps(tmp_path: Path, names: dict[str, tuple[str, ...]]) -> None:
    asked, kinds = [], {}
    for name, traits in names.items():
        s = replace((NEXTN | MAPPED_NEXTN)[name], n_vocab=512, n_ctx_train=256, vocabulary=True, untied=True)
        write(path := tmp_path / f"{name}.gguf", replace(s, traits=(*s.traits, "agrees", *traits)))
        kinds[path] = Resting if s.arch == "qwen3next" else MTPDrafter
        asked += [(str(path), TEXT, N_TOKENS, n) for n in MOST]
    theirs = iter([tuple(json.loads(line)) for line in answers(GUESSES, json.dumps(asked))])
    unlike = []
    for path, kind in kinds.items():
        *guessed, (alone, *_) = ours(path, kind)
        if guessed != [next(theirs) for _ in MOST]:
            unlike.append(path.name)
        assert {text for text, *_ in guessed} == {alone}, path.name
        assert all(0 < n_accepted < n_drafted for _, n_drafted, n_accepted in guessed), path.name
    assert unlike == []

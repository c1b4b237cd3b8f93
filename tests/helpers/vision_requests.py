"""Requests with images and sounds on a model runner and its scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from logitless.engine.loading.open_model import media_input
from logitless.engine.requests import CompletionRequest, Failed, Token, TokenProb
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from logitless.models.audio.waveform import Waveform
from logitless.models.tokenizer import from_metadata


class Runs:
    """A model with a projector. Close it, or use it as a context manager."""

    def __init__(self, model: Path, projector: Path, *, n_ubatch: int = 512, n_ctx: int = 1024, **options: Any) -> None:
        self.runner = ModelRunner(
            model, RunnerOptions(n_ctx=n_ctx, n_slots=3, n_ubatch=n_ubatch, mmproj=str(projector), **options)
        )
        self.runner.load()
        self.words = from_metadata(self.runner.gguf.metadata)
        self.input = media_input(self.runner, self.words)
        self.scheduler = Scheduler(
            self.runner, self.words, SchedulerConfig(n_slots=3, n_ctx=n_ctx, n_ubatch=n_ubatch, cache_ram=0)
        )

    def __enter__(self) -> Runs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.runner.close()

    def request(self, text: str, media: Sequence[bytes | Waveform], n: int = 1, **more: Any) -> CompletionRequest:
        """A request for n tokens after a text with `<image>` in the places of images and sounds."""
        sampling = SamplingParams(temperature=0, n_probs=512)
        if not media:
            ids = tuple(self.words.encode(text))
            return CompletionRequest(ids, sampling, n_predict=n, ignore_eos=True, **more)
        assert self.input is not None
        pieces = [self.input.audio(m) if isinstance(m, Waveform) else self.input.image(m) for m in media]
        ids, of_prompt = self.input.prompt(text.split("<image>"), pieces)
        return CompletionRequest(ids, sampling, n_predict=n, ignore_eos=True, media=of_prompt, **more)

    def run(self, *requests: CompletionRequest) -> list[list[TokenProb]]:
        """The tokens of requests that are submitted together, with log-probabilities."""
        seqs = [self.scheduler.submit(request) for request in requests]
        found: dict[int, list[TokenProb]] = {seq.id: [] for seq in seqs}
        while not self.scheduler.idle:
            for seq, event in self.scheduler.step():
                assert not isinstance(event, Failed), event
                if isinstance(event, Token):
                    assert event.prob is not None
                    found[seq.id].append(event.prob)
        return [found[seq.id] for seq in seqs]

    def first(self, text: str, media: Sequence[bytes | Waveform]) -> tuple[int, dict[int, float]]:
        """(tokens of the prompt, log-probabilities of the next token by id)."""
        request = self.request(text, media, cache_prompt=False)
        ((prob,),) = self.run(request)
        return len(request.prompt), dict(prob.top)

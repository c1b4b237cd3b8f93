"""Equality of texts with and without speculation at temperature 1 for many seeds, and speed-ups.

python tests/helpers/speculation_seeds.py [SEEDS [MODEL]] checks 500 seeds and prints the table of
docs/experiments/speculation.md. The models are those of ../shared. `same_texts` is also run by the
tests, with fewer seeds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from logitless.engine.requests import CompletionRequest, Token
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.sampling.sampler import RowSampler
from logitless.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from logitless.engine.speculation.draft_model import ModelDrafter
from logitless.engine.speculation.settings import MODEL as DRAFTING
from logitless.engine.speculation.settings import NGRAM_KINDS, NgramSizes, SpeculationParams, SpeculationSettings
from logitless.engine.speculation.speculator import Speculator
from logitless.models import tokenizer
from tests.helpers.paths import MODELS

MODEL, DRAFT = MODELS / "stories260K.gguf", MODELS / "stories260K-conv-Q4_0.gguf"
PROMPT = "Once upon a time there was a little girl named Lily. Once upon"
SIZES = NgramSizes(n=3, m=8)
SETTINGS = SpeculationSettings(
    draft_n_max=5, simple=SIZES, map_k=SIZES, map_k4v=NgramSizes(2, 3), mod_n_match=3, mod_n_min=1, mod_n_max=8
)
HOT = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
KINDS = (DRAFTING, *NGRAM_KINDS)
Texts = dict[int, list[int]]
Wish = Callable[[int], SpeculationParams]


class Server:
    """Two engines on the same threads, and a scheduler per run."""

    def __init__(self, model: Path = MODEL, n_slots: int = 8) -> None:
        options = RunnerOptions(n_ctx=512 * n_slots, n_slots=n_slots, n_ubatch=256)
        self.engine = ModelRunner(model, options)
        self.engine.load()
        self.draft = ModelRunner(DRAFT, options, target=self.engine)
        self.draft.load()
        self.vocab = tokenizer.from_metadata(self.engine.gguf.metadata, path=model)
        self.prompt = tuple(self.vocab.encode(PROMPT))
        self.n_steps = 0

    def run(self, seeds: range, wish: Wish, n_predict: int = 64) -> tuple[Texts, Scheduler]:
        """Tokens for each seed."""
        n_vocab, n_blocks = self.engine.hparams.n_vocab, self.draft.n_blocks
        model = ModelDrafter(self.draft, n_blocks=n_blocks, n_vocab=n_vocab, n_ubatch=256, eog_ids=self.vocab.eog_ids)
        scheduler = Scheduler(
            self.engine,
            self.vocab,
            SchedulerConfig(n_slots=self.engine.options.n_slots, n_ctx=self.engine.n_ctx, n_ubatch=256),
            make_sampler=lambda params, _: RowSampler(params, self.vocab, 512),
            speculator=Speculator(SETTINGS, {"draft-simple": model}),
        )
        for seed in seeds:
            sampling = SamplingParams(seed=seed, **HOT)  # type: ignore[arg-type]
            request = CompletionRequest(self.prompt, sampling, n_predict, ignore_eos=True, speculation=wish(seed))
            scheduler.submit(request)
        texts: Texts = {seed: [] for seed in seeds}
        self.n_steps = 0
        while not scheduler.idle:
            self.n_steps += 1
            for seq, event in scheduler.step():
                if isinstance(event, Token):
                    texts[seq.request.sampling.seed].append(event.id)
        return texts, scheduler

    def close(self) -> None:
        self.draft.close()
        self.engine.close()


def half_right(texts: Texts, seed: int) -> SpeculationParams:
    """A client's draft with ten wrong tokens in the middle and five missing."""
    text, other = texts[seed], texts[max(texts) - seed + min(texts)]
    return SpeculationParams(draft=(*text[:20], *other[20:30], *text[30:40], *text[45:]))


def same_texts(server: Server, n_seeds: int, show: Callable[[str], None]) -> list[str]:
    """Kinds of speculation whose text differed for some seed."""
    seeds = range(n_seeds)
    plain, _ = server.run(seeds, lambda _: SpeculationParams())
    show(f"| none | {server.n_steps} | | |")
    wishes: dict[str, Wish] = {
        **{kind: (lambda _, kind=kind: SpeculationParams((kind,))) for kind in KINDS},  # type: ignore[misc]
        "client": lambda seed: half_right(plain, seed),
        "all": lambda seed: SpeculationParams(KINDS, draft=half_right(plain, seed).draft),
    }
    wrong = []
    for name, wish in wishes.items():
        texts, scheduler = server.run(seeds, wish)
        n_same = sum(texts[seed] == plain[seed] for seed in seeds)
        stats = scheduler.stats
        share = stats.draft_tokens_accepted / max(1, stats.draft_tokens)
        show(f"| {name} | {server.n_steps} | {share:.0%} of {stats.draft_tokens} | {n_same} of {n_seeds} |")
        if n_same < n_seeds or not stats.draft_tokens_accepted:
            wrong.append(name)
    return wrong


def speeds(server: Server, show: Callable[[str], None], n_predict: int, n_max: int, repeats: int = 3) -> None:
    """One stream with a client's draft whose every k-th token is wrong: acceptance, tokens a
    second.
    """
    plain, _ = server.run(range(1), lambda _: SpeculationParams(), n_predict)
    text = plain[0]
    for every in (0, 1, 2, 4, 8, 16, 1000):
        draft = [token if (i + 1) % max(1, every) else (token + 7) % 300 + 3 for i, token in enumerate(text)]
        params = SpeculationParams(draft=tuple(draft), n_max=n_max) if every else SpeculationParams()
        best = 1e9
        for _ in range(repeats):
            began = time.perf_counter()
            texts, scheduler = server.run(range(1), lambda _, params=params: params, n_predict)  # type: ignore[misc]
            best = min(best, time.perf_counter() - began)
            assert texts[0] == text
        stats = scheduler.stats
        share = stats.draft_tokens_accepted / max(1, stats.draft_tokens)
        show(f"| {every or 'no draft'} | {share:.0%} | {server.n_steps} | {n_predict / best:.0f} |")


def main() -> None:
    model = Path(sys.argv[2]) if len(sys.argv) > 2 else MODEL
    server = Server(model)
    if model == MODEL:
        print("| kind | steps | accepted | same text |\n|---|---|---|---|")
        wrong = same_texts(server, int(sys.argv[1]) if len(sys.argv) > 1 else 500, print)
        print(f"different: {', '.join(wrong) or 'none'}\n")
    print("| every k-th wrong | accepted | steps | tokens/s |\n|---|---|---|---|")
    speeds(server, print, 320 if model == MODEL else 64, 8)
    server.close()


if __name__ == "__main__":
    main()

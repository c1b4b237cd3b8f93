"""`logitless generate`: one text continued on the terminal, by the scheduler and the engine without HTTP between."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from logitless.cli.flags import speculation
from logitless.cli.flags.flags import CliError, UsageError
from logitless.cli.setup import adapters as lora
from logitless.cli.setup import engine as load
from logitless.cli.setup.speculation import check_draft_model, find_draft_model, make_speculator

if TYPE_CHECKING:
    from logitless.engine.requests import CompletionRequest, Timings
    from logitless.engine.scheduler.scheduler import Scheduler
    from logitless.models.tokenizer import Tokenizer


def run(options: SimpleNamespace) -> int:
    path = Path(load.model_path(options, "generate"))
    if (options.prompt is None) == (options.file is None):
        raise UsageError("generate: one of -p TEXT and -f FILE is required")
    prompt = options.prompt if options.file is None else load.text_file(options.file)
    from logitless.engine.requests import CompletionRequest
    from logitless.models import tokenizer

    find_draft_model(options, path)
    drafting = speculation.defaults(options)
    engine = load.open_engine(path, options)
    check_draft_model(options, engine.gguf)
    adapters = lora.given(options, engine.gguf, engine.hparams)
    vocabulary = tokenizer.from_metadata(engine.gguf.metadata, path=path)
    sampling = load.sampling_defaults(options, vocabulary)
    ids = prompt_ids(vocabulary, prompt)
    load.load_weights(engine)
    speculator = make_speculator(options, engine, vocabulary)
    scheduler = load.make_scheduler(engine, vocabulary, options, speculator)
    lora.connect(engine, scheduler, adapters)
    request = CompletionRequest(
        tuple(ids),
        sampling,
        n_predict=options.predict,
        stop=tuple(options.reverse_prompt),
        ignore_eos=options.ignore_eos,
        special=options.special,
        speculation=drafting,
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # whatever the locale says
    if options.display_prompt:
        show(prompt)
    timings = stream(scheduler, request)
    show("\n")
    print(summary(timings), file=sys.stderr)
    return 0


def prompt_ids(vocabulary: Tokenizer, prompt: str) -> list[int]:
    """The prompt's tokens; of an empty one the BOS. CliError: there is none."""
    ids = vocabulary.encode(prompt)
    if ids:
        return ids
    if vocabulary.bos_id is None:
        raise CliError("generate: the prompt is empty, and this vocabulary has no BOS token to start with")
    return [vocabulary.bos_id]


def stream(scheduler: Scheduler, request: CompletionRequest) -> Timings:
    """Show tokens as they come; the timings at the end."""
    from logitless.engine.requests import Failed, Finished, Token

    scheduler.submit(request)
    while not scheduler.idle:
        for _, event in scheduler.step():
            if isinstance(event, Token):
                show(event.text)
            elif isinstance(event, Failed):
                raise CliError(event.message)
            elif isinstance(event, Finished):
                show(event.text)
                return event.timings
    raise CliError("the generation ended without a result")


def show(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def summary(t: Timings) -> str:
    """One line with counts and speeds."""

    def part(n: int, ms: float) -> str:
        return f"{n} tokens in {ms:.0f} ms" + (f" ({n / ms * 1000:.1f} per second)" if ms > 0 else "")

    drafts = f"; of {t.draft_n} drafted {t.draft_n_accepted} came true" if t.draft_n else ""
    return f"prompt: {part(t.prompt_n, t.prompt_ms)}; generated: {part(t.predicted_n, t.predicted_ms)}{drafts}"

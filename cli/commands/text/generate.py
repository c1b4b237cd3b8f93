"""`logitless generate`: continue a text on the terminal, with the engine and without HTTP."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

from logitless.cli.flags.flags import CliError, UsageError
from logitless.cli.progress import compile_progress
from logitless.cli.setup import escapes
from logitless.cli.setup.model import find_draft_model, model_options, model_path
from logitless.cli.setup.sampling import sampling_defaults
from logitless.engine.loading.options import text_file

if TYPE_CHECKING:
    from logitless.engine.requests import CompletionRequest, Timings
    from logitless.engine.scheduler.scheduler import Scheduler
    from logitless.graph.execution.expert_cache import CacheUse
    from logitless.models.tokenizer import Tokenizer


def run(options: SimpleNamespace) -> int:
    path = model_path(options, "generate")
    if (options.prompt is None) == (options.file is None):
        raise UsageError("generate: one of -p TEXT and -f FILE is required")
    if options.file is None:
        prompt = escapes.unescaped("--prompt", options.prompt) if options.escape else options.prompt
    else:
        prompt = text_file(options.file)
    from logitless.engine.loading.open_model import open_model
    from logitless.engine.requests import CompletionRequest

    find_draft_model(options, path)
    model = open_model(
        path, model_options(options, parallel=1, swa_full=True, cache_ram=0, mmproj_auto=False), generates=True
    )
    sampling = sampling_defaults(options, model, ignore_eos=options.ignore_eos)
    ids = prompt_ids(model.tokenizer, prompt)
    with compile_progress():
        scheduler = model.load().scheduler
    request = CompletionRequest(
        tuple(ids),
        sampling,
        n_predict=options.predict,
        stop=tuple(escapes.texts(options, "reverse_prompt")),
        ignore_eos=options.ignore_eos,
        special=options.special,
        speculation=model.speculation,
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # in any locale
    if options.display_prompt:
        show(prompt)
    timings = stream(scheduler, request)
    show("\n")
    print(summary(timings, scheduler.engine.expert_memory.use), file=sys.stderr)
    return 0


def prompt_ids(vocabulary: Tokenizer, prompt: str) -> list[int]:
    """Token ids of the prompt; an empty one is the BOS. CliError: the vocabulary has none."""
    ids = vocabulary.encode(prompt)
    if ids:
        return ids
    if vocabulary.bos_id is None:
        raise CliError("generate: the prompt is empty, and this vocabulary has no BOS token to start with")
    return [vocabulary.bos_id]


def stream(scheduler: Scheduler, request: CompletionRequest) -> Timings:
    """Print tokens as they come; returns the timings."""
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


def summary(t: Timings, experts: CacheUse) -> str:
    """One line with counts and speeds."""

    def part(n: int, ms: float) -> str:
        return f"{n} tokens in {ms:.0f} ms" + (f" ({n / ms * 1000:.1f} per second)" if ms > 0 else "")

    drafts = f"; of {t.draft_n} drafted {t.draft_n_accepted} came true" if t.draft_n else ""
    use = ""
    if n := experts.hits + experts.misses:
        use = f"; of {n} experts {experts.hits} were on the device, {experts.nbytes / 2**20:.1f} MiB uploaded"
    return f"prompt: {part(t.prompt_n, t.prompt_ms)}; generated: {part(t.predicted_n, t.predicted_ms)}{drafts}{use}"

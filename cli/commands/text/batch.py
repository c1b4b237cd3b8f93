"""`logitless batch`: answer the requests of a file without a server, and go on where it was stopped."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from logitless.cli.flags.flags import CliError, UsageError
from logitless.cli.progress import StatusLine, compile_progress
from logitless.cli.setup.model import find_draft_model, find_projector, model_options, model_path
from logitless.cli.setup.sampling import sampling_defaults
from logitless.cli.setup.server import import_http

if TYPE_CHECKING:
    from logitless.engine.async_engine import LoadedModel
    from logitless.server.config import ServerConfig


def run(options: SimpleNamespace) -> int:
    """Answer the lines that the output file lacks; 1 if a request failed."""
    import asyncio

    path = model_path(options, "batch")
    if options.file is None or options.output is None:
        raise UsageError("batch: FILE and -o FILE are required")
    source, output = Path(options.file), Path(options.output)
    find_draft_model(options, path)
    find_projector(options, path)
    from logitless.engine.loading.drafting import model_kinds
    from logitless.engine.loading.open_model import open_model

    http = import_http()
    from logitless.server.api.batches.lines import check_lines
    from logitless.server.config import ServerConfig

    endpoint = _endpoint(source)
    total, errors = check_lines(source, endpoint)
    if errors:
        raise CliError(f"{source}: {errors[0]['message']}")
    done = _done(source, output)
    model = open_model(path, model_options(options))
    config = ServerConfig(
        model_path=str(path),
        n_parallel=model.options.n_slots,
        n_predict=options.predict,
        ignore_eos=options.ignore_eos,
        defaults=sampling_defaults(options, model),
        speculation=model.speculation,
        models_that_draft=model_kinds(model.options),
    )

    def load() -> LoadedModel:
        with compile_progress():
            return model.load()

    return asyncio.run(_answer(http, load, config, source, output, endpoint, total, done))


async def _answer(
    http: Any, load: Any, config: ServerConfig, source: Path, output: Path, endpoint: str, total: int, done: set[int]
) -> int:
    from logitless.engine.async_engine import AsyncEngine
    from logitless.server.api.batches.runner import answer_file

    service = AsyncEngine()
    service.start(load)
    await service.loaded()
    line, counts = StatusLine(), {True: 0, False: 0}
    with open(output, "ab") as file:

        def keep(answered: bool, text: bytes) -> None:
            file.write(text + b"\n")
            file.flush()  # a kill loses no answer that is there
            counts[answered] += 1
            if sys.stderr.isatty():
                line.show(f"{len(done) + sum(counts.values())} of {total} requests")

        try:
            await answer_file(http.make_app(service, config), source, endpoint, done, keep)
        finally:
            line.end()
            await service.stop()
    before = f", {len(done)} were answered before" if done else ""
    print(f"{output}: {counts[True]} of {total} requests answered, {counts[False]} failed{before}", file=sys.stderr)
    return 1 if counts[False] else 0


def _endpoint(source: Path) -> str:
    """The endpoint of the first request, which all share."""
    from logitless.server.api.batches.batch import ENDPOINTS

    with open(source, "rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        url = json.loads(first)["url"]
    except (ValueError, TypeError, KeyError):
        url = ENDPOINTS[0]
    if url not in ENDPOINTS:
        raise CliError(f"{source}: line 1: field 'url' must be one of {', '.join(ENDPOINTS)}")
    return str(url)


def _done(source: Path, output: Path) -> set[int]:
    """Numbers of the requests whose answers the output has. A line that a kill has cut off is dropped."""
    from logitless.server.api.batches.lines import read_lines

    if not output.exists():
        return set()
    raw = output.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if whole != raw:
        output.write_bytes(whole)
    try:
        answered = {json.loads(line)["custom_id"] for line in whole.splitlines()}
    except (ValueError, TypeError, KeyError):
        raise CliError(f"-o {output}: is no output of a batch") from None
    lines: Iterable[Any] = read_lines(source)
    numbers = {line.custom_id: line.number for line in lines}
    if foreign := answered - numbers.keys():
        raise CliError(f"-o {output}: has answers of another file, as of {min(foreign)!r}")
    return {numbers[id] for id in answered}

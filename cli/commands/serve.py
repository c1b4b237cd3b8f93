"""`logitless serve`: serve a model over HTTP."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from logitless.cli.flags.flags import CliError, UsageError
from logitless.cli.log import say_ignored, start_log
from logitless.cli.progress import compile_progress
from logitless.cli.setup import processor
from logitless.cli.setup.model import find_draft_model, find_projector, model_options, named_model
from logitless.cli.setup.server import import_http, server_config, writable_folder

if TYPE_CHECKING:
    from logitless.engine.async_engine import LoadedModel
    from logitless.training.graders.grade import Surroundings

SWITCH = 0.0005  # seconds that the engine and HTTP threads wait for the GIL, which each write to a socket releases


def run(options: SimpleNamespace) -> int:
    if options.list_devices:
        from logitless.cli.commands.machine import devices

        print(devices.as_text(devices.devices()))
        return 0
    if options.cache_list:
        from logitless.cli.hub import cached

        print("\n".join(cached.models()))
        return 0
    if options.completion_bash:
        from logitless.cli.command_table import COMMANDS
        from logitless.cli.commands import completion

        print(completion.script(["bash"], COMMANDS))
        return 0
    _handle_signals()
    import asyncio

    start_log(options)
    say_ignored(options)
    processor.settle(options)
    if _wants_router(options):
        from logitless.cli.commands import router

        return router.run(options)
    path = named_model(options)
    if path is None:
        from logitless.engine.loading.open_model import demo_model

        path = demo_model()
        why = "--demo" if options.demo else "no -m, and no model in the caches"
        print(f"{why}: serving the demo, a model of 0.9 million parameters that read Shakespeare", file=sys.stderr)
        options.alias = options.alias or [path.stem]  # the package's path is no name
    if (name := options.hf_repo or options.docker_repo) is not None and not options.alias:
        options.alias = [str(name)]
    find_draft_model(options, path)
    find_projector(options, path)
    try:
        asyncio.run(_serve(options, path))
    except OSError as error:
        if error.errno and not error.filename:  # the address, not a file
            reason = (error.strerror or str(error)).split(":")[-1].strip()
            raise CliError(f"cannot listen on {options.host}:{options.port}: {reason}") from None
        raise
    return 0


def _handle_signals() -> None:
    """Until the server handles signals itself: a start ends at once, whatever its threads do, and a
    hang-up has nothing to read again."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, lambda *_: None)


def _wants_router(options: SimpleNamespace) -> bool:
    """True if the server is a router: of models that a flag names, or of the downloaded ones where no flag does."""
    router = next((flag for flag in ("models_dir", "models_preset") if getattr(options, flag)), "")
    model = next(
        (flag for flag in ("model", "hf_repo", "hf_file", "model_url", "docker_repo") if getattr(options, flag)), ""
    )
    if options.demo and (router or model):
        raise UsageError(f"--demo and --{(router or model).replace('_', '-')}: give one of them")
    if router or model or options.demo:
        return bool(router)
    from logitless.cli.hub import cached

    n = len(cached.models())
    if not n and {"models_max", "models_autoload"} & {dest for dest, _ in options.given}:
        return True  # it may download models
    if n:
        print(f"no -m: serving the {n} models of the caches by their names (--demo: the demo)", file=sys.stderr)
    return n > 0


async def _serve(options: SimpleNamespace, path: Path) -> None:
    import asyncio

    # aiohttp takes as long to import as all work before it is needed
    http = asyncio.get_running_loop().run_in_executor(None, import_http)
    from logitless.engine.async_engine import AsyncEngine
    from logitless.engine.loading.open_model import open_model
    from logitless.frontend.workers import limit_threads

    # Errors of the file and the flags come before the port is taken.
    model = open_model(path, model_options(options))
    config = server_config(options, model)
    if options.threads_http > 0:
        limit_threads(options.threads_http)
    store = None
    if options.data_dir:
        from logitless.engine.records.store import Store

        store = Store(writable_folder("--data-dir", options.data_dir, make=True))
    names = {config.model, *config.aliases} if config.behind_router else None

    service = AsyncEngine()

    def around() -> Surroundings:
        from logitless.frontend.graders import surroundings

        return surroundings(service, config)

    def build() -> LoadedModel:
        with compile_progress():
            served = model.load(store, name=config.model, names=names, around=around, port=config.port)
        processor.lock_memory(options, exceeded=served.scheduler.engine.exceeds_memory)
        return replace(served, train_share=options.train_share / 100)

    sys.setswitchinterval(SWITCH)
    service.start(build)
    await (await http).serve(service, config)

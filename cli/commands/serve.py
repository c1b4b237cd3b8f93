"""`logitless serve`: a model over HTTP."""

from __future__ import annotations

import os
import signal
import sys
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from logitless.cli.flags import speculation
from logitless.cli.flags.flags import CliError
from logitless.cli.flags.model_keys import overrides
from logitless.cli.log import start_log
from logitless.cli.progress import show_compiling
from logitless.cli.setup import adapters as lora
from logitless.cli.setup import engine as load
from logitless.cli.setup import speculation as drafting
from logitless.cli.setup.server import chat_template, import_http, model_info, server_config

if TYPE_CHECKING:
    pass


def run(options: SimpleNamespace) -> int:
    if options.list_devices:
        from logitless.cli.commands import devices

        print(devices.as_text(devices.devices()))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # until the server minds signals itself
    import asyncio

    start_log(options)
    if options.models_dir or options.models_preset:
        from logitless.cli.commands import router

        return router.run(options)
    path = load.named_model(options)
    if path is None:
        path = demo_model()
        options.alias = options.alias or [path.stem]  # where the package lies tells a client nothing
    if options.hf_repo is not None and not options.alias:
        options.alias = [str(options.hf_repo)]
    drafting.find_draft_model(options, path)
    try:
        asyncio.run(_serve(options, path))
    except OSError as error:
        if error.errno and not error.filename:  # the address, not a file
            reason = (error.strerror or str(error)).split(":")[-1].strip()
            raise CliError(f"cannot listen on {options.host}:{options.port}: {reason}") from None
        raise
    return 0


async def _serve(options: SimpleNamespace, path: Path) -> None:
    import asyncio

    # importing aiohttp takes as long as all that is done before it is needed
    http = asyncio.get_running_loop().run_in_executor(None, import_http)
    from logitless.engine.async_engine import Served, Service
    from logitless.models import tokenizer
    from logitless.models.gguf.file import GGUFFile
    from logitless.models.model import hparams_of

    # What is wrong with the file is said before the port is taken.
    with GGUFFile.open(path, overrides(options), block=speculation.block_file(options)) as gguf:
        vocabulary = tokenizer.from_metadata(gguf.metadata, path=path)
        template = chat_template(options, gguf, vocabulary)
        config = server_config(options, path, vocabulary)
        hparams = hparams_of(gguf)
        speculation.check_nextn(options, gguf, hparams)
        wanted = load.engine_options(options, hparams, load.weights_nbytes(gguf))
        given = lora.given(options, gguf, hparams)
        drafting.check_draft_model(options, gguf)
    store = None
    if options.data_dir:
        from logitless.engine.finetuning.store import Store

        store = Store(options.data_dir)

    def build() -> Served:
        from logitless.backends.registry import prefetch_kernels

        show_compiling()
        if options.device == "cpu":  # other devices leave it little or nothing, which is known when the model is
            prefetch_kernels()
        engine = load.make_engine(path, wanted)
        load.load_weights(engine)
        speculator = drafting.make_speculator(options, engine, vocabulary)
        scheduler = load.make_scheduler(engine, vocabulary, options, speculator)
        adapters = lora.connect(engine, scheduler, given, apply=not options.lora_init_without_apply)
        info = model_info(engine, vocabulary)
        sleep = None
        if options.sleep_idle_seconds > 0:
            from logitless.engine.sleep import Sleep, Sleeper

            parts: list[Sleeper] = [engine, *speculator.models.values(), scheduler.cache]
            sleep = Sleep(options.sleep_idle_seconds, parts, scheduler.stats)
        tuning = None
        if store is not None:
            from logitless.engine.finetuning.worker import Tuning

            names = {config.model, *config.aliases} if config.behind_router else None
            tuning = Tuning(store, engine, vocabulary, template, adapters, config.model, names=names)
        share = options.train_share / 100
        return Served(scheduler, vocabulary, template, info, adapters, engine, tuning, share, engine.embedder, sleep)

    service = Service()
    service.start(build)
    await (await http).serve(service, config)


def demo_model() -> Path:
    """The project's own small model, which comes with the package (scripts/demo-model trained it)."""
    path = Path(str(files("logitless.models"))) / "demo" / "shakespeare.gguf"
    print("no -m: serving the demo, a model of 0.9 million parameters that read Shakespeare", file=sys.stderr)
    return path

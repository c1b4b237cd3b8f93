"""`logitless serve`: a model over HTTP."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from logitless.cli.flags import speculation, tls
from logitless.cli.flags.flags import CliError
from logitless.cli.flags.model_keys import overrides
from logitless.cli.log import start_log
from logitless.cli.progress import show_compiling
from logitless.cli.setup import adapters as lora
from logitless.cli.setup import engine as load

if TYPE_CHECKING:
    from logitless.engine.runner.model_runner import Engine
    from logitless.models.chat.template import ChatTemplate
    from logitless.models.gguf.file import GGUFFile
    from logitless.models.tokenizer import Tokenizer
    from logitless.server.config import ModelInfo, ServerConfig


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
    speculation.find_draft_model(options, path)
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
        speculation.check_draft_model(options, gguf)
    store = None
    if options.data_dir:
        from logitless.engine.finetuning.store import Store

        store = Store(options.data_dir)

    def build() -> Served:
        from logitless.backends.cpu.compiler import warmup

        show_compiling()
        if options.device == "cpu":  # other devices leave it little or nothing, which is known when the model is
            warmup.begin()
        engine = load.make_engine(path, wanted)
        load.load_weights(engine)
        speculator = speculation.make_speculator(options, engine, vocabulary)
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


def import_http() -> Any:
    """logitless.server.app, without the authorities' certificates, which aiohttp reads for its client: 0.1 s for
    nobody.
    """
    import ssl

    whole = ssl.create_default_context
    ssl.create_default_context = lambda *_, **__: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nobody
    try:
        return import_module("logitless.server.app")
    finally:
        ssl.create_default_context = whole


def chat_template(options: SimpleNamespace, gguf: GGUFFile, vocabulary: Tokenizer) -> ChatTemplate:
    from logitless.models.chat.template import ChatTemplateError, from_metadata

    source, flag = options.chat_template, "--chat-template"
    if options.chat_template_file:
        source, flag = load.text_file(options.chat_template_file), "--chat-template-file"
    try:
        return from_metadata(gguf.metadata, vocabulary, source)
    except ChatTemplateError as error:
        if source is not None:
            raise CliError(f"{flag}: {error}") from None
        print(f"logitless: the model's chat template is not usable, ChatML stands in: {error}", file=sys.stderr)
        return from_metadata({}, vocabulary)


def model_info(engine: Engine, vocabulary: Tokenizer) -> ModelInfo:
    from logitless.models.gguf.types import FILE_TYPES
    from logitless.server.config import ModelInfo

    h, gguf = engine.hparams, engine.gguf
    file_type = gguf.metadata.get("general.file_type")
    return ModelInfo(
        n_ctx=engine.n_ctx_slot,
        n_ctx_train=h.n_ctx_train,
        n_vocab=vocabulary.n_vocab,
        n_embd=h.n_embd,
        n_params=gguf.n_params,
        nbytes=sum(t.nbytes for t in gguf.tensors.values()),
        vocab_type=int(vocabulary.vocab_type),
        ftype=FILE_TYPES.get(file_type, "") if isinstance(file_type, int) else "",
        generates=h.causal,
    )


def server_config(options: SimpleNamespace, path: Path, vocabulary: Tokenizer) -> ServerConfig:
    from logitless.cli.flags.cache_options import slot_folder
    from logitless.server.config import ServerConfig

    return ServerConfig(
        **listening(options),
        model_path=str(path),
        alias=options.alias[0] if options.alias else "",
        aliases=tuple(options.alias),
        tags=tuple(options.tags),
        n_parallel=load.n_slots(options),
        n_predict=options.predict,
        n_keep=options.keep,
        cache_prompt=options.cache_prompt,
        n_cache_reuse=options.cache_reuse,
        backend_sampling=options.backend_sampling,
        special=options.special,
        spm_infill=options.spm_infill,
        static=static_folder(options.path),
        reverse_prompts=tuple(options.reverse_prompt),
        defaults=load.sampling_defaults(options, vocabulary),
        speculation=speculation.defaults(options),
        models_that_draft=speculation.models(options),
        metrics=options.metrics,
        slots=options.slots,
        slot_save_path=slot_folder(options.slot_save_path),
        props=options.props,
        prefill_assistant=options.prefill_assistant,
        reasoning_format=options.reasoning_format,
        reasoning_budget=options.reasoning_budget,
        pooling="rank" if options.rerank else options.pooling or "",
        chat_template_kwargs=template_variables(options),
        behind_router="LOGITLESS_BEHIND_ROUTER" in os.environ,
    )


def listening(options: SimpleNamespace) -> dict[str, Any]:
    """The settings of a server that do not depend on a model: who may connect, and how."""
    return {
        "host": options.host,
        "port": options.port,
        "api_keys": tuple(options.api_key),
        "api_key_file": api_key_file(options.api_key_file),
        "admin_api_key": options.admin_api_key or "",
        "api_prefix": api_prefix(options.api_prefix),
        "tls": tls.context(options),
        "reuse_port": reuse_port(options),
        "max_body": options.max_request_size << 20,
        "cors_origins": options.cors_origins,
        "timeout": options.timeout,
        "ui": options.ui,
        "verbose": options.verbose,
    }


def template_variables(options: SimpleNamespace) -> dict[str, Any]:
    """The chat template's further variables: --chat-template-kwargs, and what --reasoning says."""
    variables = dict(options.chat_template_kwargs or {})
    if options.reasoning != "auto":
        variables.setdefault("enable_thinking", options.reasoning == "on")
    if not isinstance(variables.get("enable_thinking", True), bool):
        raise CliError("--chat-template-kwargs: enable_thinking must be a boolean")
    return variables


def api_key_file(path: str | None) -> str:
    """The file of --api-key-file, once it is known to have a key."""
    from logitless.server.auth import read_keys

    try:
        if path is not None:
            read_keys(path)
    except ValueError as error:
        raise CliError(f"--api-key-file: {path} {error}") from None
    return path or ""


def static_folder(path: str | None) -> str:
    if path and not Path(path).is_dir():
        raise CliError(f"--path: {path} is not a folder")
    return path or ""


def api_prefix(prefix: str) -> str:
    if not re.fullmatch(r"[\w.~/-]*", prefix, re.ASCII):
        raise CliError(f"--api-prefix: {prefix!r} must be letters, digits, '-', '_', '.', '~' and '/'")
    return prefix if not prefix or prefix.startswith("/") else f"/{prefix}"


def reuse_port(options: SimpleNamespace) -> bool:
    if options.reuse_port and not hasattr(socket, "SO_REUSEPORT"):
        raise CliError("--reuse-port: this platform cannot do that")
    return bool(options.reuse_port)


def demo_model() -> Path:
    """The project's own small model, which comes with the package (scripts/demo-model trained it)."""
    path = Path(str(files("logitless.models"))) / "demo" / "shakespeare.gguf"
    print("no -m: serving the demo, a model of 0.9 million parameters that read Shakespeare", file=sys.stderr)
    return path

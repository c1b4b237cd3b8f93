"""Server settings from command-line options: chat template, model facts, keys, listening addresses."""

from __future__ import annotations

import os
import re
import socket
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from logitless.cli.flags import speculation, tls
from logitless.cli.flags.flags import CliError
from logitless.cli.setup import engine as load

if TYPE_CHECKING:
    from logitless.engine.model_info import ModelInfo
    from logitless.engine.runner.model_runner import Engine
    from logitless.models.chat.template import ChatTemplate
    from logitless.models.gguf.file import GGUFFile
    from logitless.models.tokenizer import Tokenizer
    from logitless.server.config import ServerConfig


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
    from logitless.engine.model_info import ModelInfo
    from logitless.models.gguf.types import FILE_TYPES

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

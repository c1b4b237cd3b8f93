"""Server settings from command-line options: chat template, model facts, keys, listening addresses."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from logitless import hooks
from logitless.cli.flags.flags import CliError
from logitless.cli.setup import escapes
from logitless.cli.setup.sampling import sampling_defaults
from logitless.engine.loading.values import json_object

if TYPE_CHECKING:
    import ssl

    from logitless.engine.loading.open_model import OpenModel
    from logitless.server.config import ServerConfig

_AS_THEY_ARE = (  # flags whose values are settings of the server
    *("cache_prompt", "backend_sampling", "special", "spm_infill", "metrics", "slots", "props", "embd_normalize"),
    *("media_urls", "audio_max_seconds", "prefill_assistant", "skip_chat_parsing", "sse_ping_interval"),
    *("reasoning_format", "reasoning_budget", "reasoning_budget_message"),
)
_ROLES = ("user", "assistant")
PRESERVE = {  # variables of chat templates that keep the reasoning of earlier answers: their value where they do
    "preserve_reasoning": True,
    "preserve_thinking": True,
    "clear_thinking": False,
    "truncate_history_thinking": False,
}


def import_http() -> Any:
    """logitless.server.app, without the authorities' certificates, which aiohttp reads for its client: 0.1 s for
    nobody."""
    import ssl

    whole = ssl.create_default_context
    ssl.create_default_context = lambda *_, **__: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # an empty trust store
    try:
        from logitless.server import app

        return app
    finally:
        ssl.create_default_context = whole


def extra_settings(options: SimpleNamespace) -> dict[str, Any]:
    """Fields of ServerConfig that extras make of their flags."""
    return {name: make(options) for name, make in hooks.rows("server_settings")}


def server_config(options: SimpleNamespace, model: OpenModel) -> ServerConfig:
    """The server's settings for this model."""
    from logitless.engine.loading.drafting import model_kinds
    from logitless.server.config import ServerConfig

    return ServerConfig(
        **listening(options),
        **{name: getattr(options, name) for name in _AS_THEY_ARE},
        model_path=str(model.path),
        alias=options.alias[0] if options.alias else "",
        aliases=tuple(options.alias),
        tags=tuple(options.tags),
        n_parallel=model.options.n_slots,
        n_predict=options.predict,
        n_keep=options.keep,
        n_cache_reuse=options.cache_reuse,
        static=static_folder(options.path),
        reverse_prompts=tuple(escapes.texts(options, "reverse_prompt")),
        ignore_eos=bool(options.ignore_eos),
        defaults=sampling_defaults(options, model),
        speculation=model.speculation,
        models_that_draft=model_kinds(model.options),
        slot_save_path=writable_folder("--slot-save-path", options.slot_save_path),
        log_prompts_dir=writable_folder("--log-prompts-dir", options.log_prompts_dir, make=True),
        **extra_settings(options),
        allow_graders=tuple(options.allow_graders),
        private_addresses=options.allow_private_addresses,
        allow_integrations=tuple(options.allow_integrations),
        grader_url=grader_url(options),
        grader_key=options.grader_api_key or "",
        media_path=media_folder(options.media_path),
        media_marker=os.environ.get("LLAMA_MEDIA_MARKER", ""),
        reasoning_effort="" if options.reasoning_effort == "default" else options.reasoning_effort,
        embeddings=options.embedding,
        pooling="rank" if options.rerank else options.pooling or "",
        chat_template_kwargs=template_variables(options),
        first_messages=first_messages(options.first_messages),
        behind_router="LOGITLESS_BEHIND_ROUTER" in os.environ,
    )


def grader_url(options: SimpleNamespace) -> str:
    """--grader-url. CliError: it is no address."""
    url: str = options.grader_url or ""
    if url and not url.startswith(("http://", "https://")):
        raise CliError(f"--grader-url {url}: must be an http:// or https:// address")
    return url


def listening(options: SimpleNamespace) -> dict[str, Any]:
    """The settings of a server that do not depend on a model: addresses, keys, TLS, limits."""
    return {
        "host": options.host,
        "port": options.port,
        "api_keys": tuple(options.api_key),
        "api_key_file": api_key_file(options.api_key_file),
        "admin_api_key": options.admin_api_key or "",
        "cache_isolation": options.cache_isolation,
        "cache_shared": tuple(options.cache_shared),
        "api_prefix": api_prefix(options.api_prefix),
        "tls": tls_context(options),
        "tls_files": (str(options.ssl_cert_file or ""), str(options.ssl_key_file or "")),
        "reuse_port": reuse_port(options),
        "max_body": options.max_request_size << 20,
        "cors_origins": cors_origins(options.cors_origins),
        "cors_methods": tuple(options.cors_methods),
        "cors_headers": tuple(options.cors_headers),
        "cors_credentials": options.cors_credentials,
        "allowed_hosts": tuple(options.allowed_hosts),
        "timeout": options.timeout,
        "ui": options.ui,
        "ui_settings": ui_settings(options),
        "verbose": options.verbose or options.verbosity > 3,
    }


def template_variables(options: SimpleNamespace) -> dict[str, Any]:
    """The chat template's further variables: --chat-template-kwargs, --reasoning and --reasoning-preserve."""
    variables = dict(options.chat_template_kwargs or {})
    if (keeps := options.reasoning_preserve) is not None:
        for name, value in PRESERVE.items():
            variables.setdefault(name, value is keeps)
    if options.reasoning != "auto":
        variables.setdefault("enable_thinking", options.reasoning == "on")
    if not isinstance(variables.get("enable_thinking", True), bool):
        raise CliError("--chat-template-kwargs: enable_thinking must be a boolean")
    return variables


def ui_settings(options: SimpleNamespace) -> dict[str, Any]:
    """The object of --ui-config, or of --ui-config-file. CliError: both are there, or the file has none."""
    if not (path := options.ui_config_file):
        return options.ui_config or {}
    if options.ui_config is not None:
        raise CliError("--ui-config and --ui-config-file: give one of them")
    try:
        return json_object(Path(path).read_text("utf-8-sig"))
    except UnicodeDecodeError:
        raise CliError(f"--ui-config-file: {path} is not UTF-8") from None
    except OSError as error:
        raise CliError(f"--ui-config-file: {path}: {error.strerror}") from None
    except ValueError as error:
        raise CliError(f"--ui-config-file: {path} {error}") from None


def first_messages(path: str | None) -> tuple[dict[str, str], ...]:
    """The messages of --first-messages. CliError: the file is no array of them."""
    if not path:
        return ()
    try:
        messages = json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise CliError(f"--first-messages: {path}: {' '.join(str(error).split())}") from None
    for i, message in enumerate(messages if isinstance(messages, list) else [None]):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise CliError(f"--first-messages: {path}: item {i} is no object of role and content")
        if not isinstance(message["content"], str) or message["role"] not in (*_ROLES, *(("system",) if not i else ())):
            raise CliError(
                f"--first-messages: {path}: item {i} has no text, or a role that is not {' or '.join(_ROLES)}"
            )
    return tuple(messages)


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


def cors_origins(text: str) -> str:
    """--cors-origins. CliError: an entry is no origin."""
    from logitless.server.origins import check_origins

    try:
        return check_origins(text)
    except ValueError as error:
        raise CliError(f"--cors-origins: {error}") from None


def api_prefix(prefix: str) -> str:
    if not re.fullmatch(r"[\w.~/-]*", prefix, re.ASCII):
        raise CliError(f"--api-prefix: {prefix!r} must be letters, digits, '-', '_', '.', '~' and '/'")
    return re.sub("/+", "/", f"/{prefix}") if prefix else ""


def media_folder(path: str) -> str:
    """--media-path, if it is a folder."""
    if path and not os.path.isdir(path):
        raise CliError(f"--media-path: {path} is not a folder")
    return path


def writable_folder(flag: str, path: str, *, make: bool = False) -> str:
    """A flag's folder, if files can be made in it. `make`: it need not exist."""
    if path and make:
        try:
            Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CliError(f"{flag}: {path} cannot be made: {error.strerror}") from None
    if path and not os.path.isdir(path):
        raise CliError(f"{flag}: {path} is not a folder")
    if path and not os.access(path, os.W_OK | os.X_OK):
        raise CliError(f"{flag}: {path} cannot be written to")
    return path


def reuse_port(options: SimpleNamespace) -> bool:
    if options.reuse_port and not hasattr(socket, "SO_REUSEPORT"):
        raise CliError("--reuse-port: this platform cannot do that")
    return bool(options.reuse_port)


def tls_context(options: SimpleNamespace) -> ssl.SSLContext | None:
    """TLS 1.2 or newer with the certificate chain (PEM) and its private key; None: plain HTTP."""
    key, certificate = options.ssl_key_file, options.ssl_cert_file
    if key is None and certificate is None:
        return None
    if key is None or certificate is None:
        lacking = "--ssl-key-file" if key is None else "--ssl-cert-file"
        raise CliError(f"{lacking} is needed too: TLS takes a key and a certificate")
    import ssl

    for path in (key, certificate):
        open(path, "rb").close()  # names the file that is missing; OpenSSL does not
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        tls.load_cert_chain(certificate, key, password="")  # never ask for one on the terminal
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None)
        words = reason.replace("_", " ").lower() if reason else "no PEM, or the key has a password"
        raise CliError(f"--ssl-cert-file {certificate} and --ssl-key-file {key} do not make a pair: {words}") from None
    return tls

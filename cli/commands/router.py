"""`logitless serve` without a model: a router over the downloaded models, --models-dir and --models-preset."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, TextIO

from logitless import hooks
from logitless.cli.flags.flags import FALSE, TRUE, CliError, Flag, UsageError, parse
from logitless.cli.flags.model_options import Repo
from logitless.cli.log import LineStyle
from logitless.engine.loading.values import words as split

if TYPE_CHECKING:
    from logitless.router.catalog import ModelArguments
    from logitless.router.downloads import Report
    from logitless.router.fleet import Entry
    from logitless.router.process import ServerProcess

log = logging.getLogger("logitless.router")
_SOURCES = ("model", "hf_repo", "hf_file", "model_url", "docker_repo")
_OWN = frozenset(  # flags of the router that children do not inherit
    (
        *("host", "port", "api_prefix", "api_key", "api_key_file", "admin_api_key", "ssl_key_file", "ssl_cert_file"),
        *("reuse_port", "cors_origins", "cors_methods", "cors_headers", "cors_credentials", "allowed_hosts"),
        *("cache_isolation", "ui", "ui_config", "ui_config_file", "models_dir", "models_max", "models_preset"),
        *("models_autoload", "max_blob_size", "alias", "path", "data_dir", "list_devices", "demo", "log_disable"),
        *(
            "verbosity",
            "log_timestamps",
            "log_prefix",
            "log_colors",
            "log_jsonl",
            "log_format",
            "help",
            "help_all",
            "version",
        ),
        *_SOURCES,
    )
)
_OF_EXTRAS = frozenset(flag.dest for group in hooks.rows("serve_flags") for flag in group.flags)
_SECRET = "hf_token"  # goes to children as a variable: their command lines are shown
_REFUSED = (*_SOURCES, "alias", "path")


def run(options: SimpleNamespace) -> int:
    """Serve until a signal."""
    for dest in _REFUSED:
        if getattr(options, dest):
            raise UsageError(f"--{dest.replace('_', '-')} is for a server of one model, not for a router")
    asyncio.run(_serve(options))
    return 0


async def _serve(options: SimpleNamespace) -> None:
    from logitless.cli.hub import cached
    from logitless.cli.setup.server import extra_settings, import_http, listening, writable_folder
    from logitless.server.config import ServerConfig

    config = ServerConfig(**listening(options), metrics=options.metrics, **extra_settings(options))
    import_http()
    from logitless.router.app import Router, serve
    from logitless.router.cached import Cache
    from logitless.router.catalog import CatalogError, Sources
    from logitless.router.fleet import Fleet
    from logitless.router.jobs import RouterJobs
    from logitless.router.process import ServerProcess, download, environment, quantize

    flags = _flags()
    common = tuple(word for dest, words in options.given if dest not in (*_OWN, _SECRET) for word in words)
    if options.data_dir:
        common += ("--data-dir", options.data_dir)
    style, is_json = LineStyle.of(options), options.log_jsonl or options.log_format == "json"
    common += ("--log-format", "json") if is_json else ()
    common += ("--verbose",) if style.level == logging.DEBUG and not options.verbose else ()
    folder, presets = (Path(p) if p else None for p in (options.models_dir, options.models_preset))
    own = frozenset(name for f in flags if f.dest in _OWN for name in (*f.env.split(), *_negatives(f)))
    environ = environment(own) | ({"HF_TOKEN": options.hf_token} if options.hf_token else {})

    def speaker(name: str) -> Callable[[str], None]:
        if options.log_disable:
            return _say_nothing
        if is_json:
            return partial(_say_json, name, style, sys.stdout if options.log_jsonl else sys.stderr)
        return partial(_say, name, style)

    store = None
    if folder is not None:
        made = (
            Store(folder, partial(quantize, environ, speaker("quantize")), options.max_blob_size << 30)
            for Store in hooks.rows("model_stores")
        )
        store = next(made, None)
    sources = Sources(folder, presets, common, cached.models, store)
    read = partial(sources.read, partial(meaning, flags, common))
    try:
        entries = read()
    except CatalogError as error:
        raise CliError(str(error)) from None

    async def start(entry: Entry) -> ServerProcess:
        say = speaker(entry.name)
        return await ServerProcess.start(entry.args, environ, say)

    async def fetch(source: str, report: Report) -> None:
        variable = "LLAMA_ARG_MODEL_URL" if "://" in source else "LLAMA_ARG_HF_REPO"  # may hold a secret
        say = speaker(cached.name_of(source))
        words = ["--offline"] if options.offline else []
        words += ["--allow-private-addresses"] if options.allow_private_addresses else ["--public-only"]
        await download(words, {**environ, variable: source}, report, say)

    log.info("%d models", len(entries))
    fleet = Fleet(entries, start, options.models_max)
    router = Router(
        fleet,
        config,
        read,
        RouterJobs(writable_folder("--data-dir", options.data_dir or "", make=True)),
        Cache(cached.name_of, fetch, cached.remove, cached.forget_parts),
        autoload=options.models_autoload,
        limit=options.models_max,
        created=store,
    )
    await serve(router, fleet, config)


def _say(name: str, style: LineStyle, line: str) -> None:
    """Print a line of a child's log, which has its own time and level."""
    if (text := style.relayed(line)) is not None:
        with suppress(OSError):
            print(f"[{name}] {text}", file=sys.stderr, flush=True)


def _say_json(name: str, style: LineStyle, stream: TextIO, line: str) -> None:
    """The same where logs are lines of JSON, which get the member `server`."""
    try:
        text = json.loads(line)
    except ValueError:
        text = None
    if not isinstance(text, dict):
        text = {"level": "info", "message": line}
    if style.passes(str(text.get("level"))):
        with suppress(OSError):
            print(json.dumps({**style.members(text), "server": name}, ensure_ascii=False), file=stream, flush=True)


def _say_nothing(_: str) -> None:
    """Drop a line (--log-disable). The child itself must log: its log says when it is ready."""


def _flags() -> list[Flag]:
    from logitless.cli.flags.options import SERVE

    return [f for group in SERVE for f in group.flags]


def _negatives(f: Flag) -> list[str]:
    return [name.replace("LLAMA_ARG_", "LLAMA_ARG_NO_", 1) for name in f.env.split()]


def meaning(
    flags: list[Flag],
    common: Sequence[str],
    where: str,
    settings: Mapping[str, str],
    name: str,
    file: Path | None,
) -> ModelArguments:
    """Settings of a preset as arguments; `common` are those of all models. The line of a CatalogError
    begins with `where`."""
    from logitless.cli.hub import cached
    from logitless.models.media.projector_choice import projector_of_folder
    from logitless.router.catalog import CatalogError, ModelArguments

    words: list[str] = []
    called: dict[str, list[str]] = {"alias": [], "tags": []}
    dests: set[str] = set()
    for key, value in settings.items():
        match = _word(flags, key)
        if match is None:
            raise CatalogError(f"{where} {key}: there is no such flag")
        f, word, on = match
        if f.dest == _SECRET:
            raise CatalogError(f"{where} {key}: is a secret, which /models would show; give it to the router")
        if f.dest in called:
            called[f.dest] += [word for word in split(value) if word not in (name, *called[f.dest])]
            continue
        if f.dest in _OWN | _OF_EXTRAS and f.dest not in _SOURCES:
            raise CatalogError(f"{where} {key}: is the router's own, and not a model's")
        dests.add(f.dest)
        if f.takes_value and on:
            words += [word, value]
        elif value.strip().lower() not in TRUE | FALSE:
            raise CatalogError(f"{where} {key}: {value!r} is not true or false")
        elif value.strip().lower() in TRUE:
            words.append(word)
        elif f.off_names:
            words.append(f.off_names[0] if on else f.long)
    if not dests & {*_SOURCES}:
        if file is not None:
            words += ["--model", str(file)]
        else:
            words += ["--hf-repo", _repo(where, name)]
    words += ["--alias", name] if "," not in name else []
    words += ["--tags", ",".join(called["tags"])] if called["tags"] else []
    try:
        files = tuple(cached.files(parse(flags, words, {})))
        options = parse(flags, [*words, *common], {})
        if file is not None and file.parent.name == name and options.model == str(file) and options.mmproj_auto:
            own = None if options.mmproj or options.mmproj_url else projector_of_folder(file)
            words += ["--mmproj", str(own)] if own is not None else []
            options = parse(flags, [*words, *common], {})
        images, audio = cached.media(options)
    except CliError as error:
        raise CatalogError(f"{where} {error}") from None
    return ModelArguments(tuple(words), tuple(called["alias"]), tuple(called["tags"]), files, images, audio)


def _word(flags: list[Flag], key: str) -> tuple[Flag, str, bool] | None:
    """The flag of a key (c, ctx-size, LLAMA_ARG_CTX_SIZE), its word, and True unless the word turns it off."""
    for f in flags:
        for word in (f"-{key}", f"--{key.replace('_', '-')}"):
            if word in f.all_names:
                return f, word, True
            if word in f.off_names:
                return f, word, False
        if key in f.env.split():
            return f, f.long, True
        if f.off_names and key in _negatives(f):
            return f, f.off_names[0], False
    return None


def _repo(where: str, name: str) -> str:
    from logitless.router.catalog import CatalogError

    try:
        return str(Repo.parse(name))
    except ValueError:
        raise CatalogError(f"{where} needs model = FILE, or hf-repo = USER/REPO") from None

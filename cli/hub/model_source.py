"""The model's source: a file, Hugging Face's hub, or a URL."""

from __future__ import annotations

import hashlib
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

from logitless.cli.flags.flags import CliError, UsageError
from logitless.cli.hub import llama_cache
from logitless.cli.hub.download import ProgressOf, Unreachable, fetch, forget_part
from logitless.cli.hub.hub import Hub, endpoint
from logitless.cli.hub.public import open_url
from logitless.cli.hub.repository import projector_beside
from logitless.training.graders.public import is_private


def find(options: SimpleNamespace, progress: ProgressOf | None = None) -> Path | None:
    """The model's file, downloaded if need be; None: no flag names one.

    Options that a program may leave out: `allow_private_addresses`, `public_only`."""
    if (model := getattr(options, "docker_repo", None)) is not None:
        for flag in ("hf_repo", "hf_file", "model", "model_url"):
            if getattr(options, flag):
                raise UsageError(f"--docker-repo and --{flag.replace('_', '-')}: give one of them")
        from logitless.cli.hub import docker

        return docker.find(model, _folder(), offline=options.offline, progress=progress)
    if options.hf_repo is None:
        if options.hf_file is not None:
            raise UsageError("--hf-file needs --hf-repo")
    elif options.model or options.model_url:
        raise UsageError(f"--hf-repo and {'-m' if options.model else '--model-url'}: give one of them")
    if options.hf_repo is not None:
        return hub_of(options, progress).model(options.hf_repo, options.hf_file or "")
    if options.model_url:
        return _of_url(options, options.model_url, Path(options.model) if options.model else None, progress)
    return Path(options.model) if options.model else None


def find_projector(options: SimpleNamespace, model: Path, progress: ProgressOf | None = None) -> Path | None:
    """The projector of --mmproj-url, else the one for a model of the hub, downloaded if need be, or
    of a cache folder; None: there is none."""
    if getattr(options, "mmproj_url", None) is not None:
        return _of_url(options, options.mmproj_url, None, progress)
    if getattr(options, "hf_repo", None) is None:
        return projector_beside(model)
    return hub_of(options, progress).projector(options.hf_repo, model)


def hub_of(options: SimpleNamespace, progress: ProgressOf | None = None) -> Hub:
    """The hub with the token and the rights of these options."""
    allow = getattr(options, "allow_private_addresses", False)
    return Hub(options.hf_token, offline=options.offline, progress=progress, allow_private=allow)


def _of_url(options: SimpleNamespace, address: str, path: Path | None, progress: ProgressOf | None) -> Path:
    strict = getattr(options, "public_only", False) and not _is_of_hub(address)
    allow = getattr(options, "allow_private_addresses", False)
    public_only = not allow and (strict or not is_private(address))
    return of_url(address, path, offline=options.offline, progress=progress, public_only=public_only)


def _is_of_hub(address: str) -> bool:
    """True if the address is at the hub that this machine's owner has chosen."""
    own, other = urlsplit(endpoint()), urlsplit(address)
    return (own.scheme, own.netloc) == (other.scheme, other.netloc)


def of_url(
    address: str,
    path: Path | None = None,
    *,
    offline: bool = False,
    progress: ProgressOf | None = None,
    public_only: bool = False,
) -> Path:
    """The file of an address: checked once at each start, and downloaded again if it changed there.

    `public_only`: neither the address nor a redirect may lead to this machine or a local network.
    """
    path = path or _cache_path(address)
    note = path.with_name(f"{path.name}.json")  # address and version of the file
    if offline:
        if not path.exists():
            raise CliError(f"--offline: {plain_url(address)} has never been downloaded to {path}")
        return path
    version_note = _read(note) if path.exists() else {}
    try:
        version = _version(address, public_only=public_only)
    except Unreachable:
        if version_note.get("url") == address:
            return path
        raise
    if version_note == {"url": address, "version": version} and version:
        return path
    if path.exists() and version_note.get("url") != address:
        raise CliError(f"-m {path}: is there already, and was not downloaded from {plain_url(address)}")
    path.unlink(missing_ok=True)
    fetch(address, path, name=plain_url(address), version=version, progress=progress, public_only=public_only)
    note.write_text(json.dumps({"url": address, "version": version}))
    return path


def plain_url(address: str) -> str:
    """The address without user, password and query, which may be secret."""
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def downloaded() -> Iterator[tuple[str, Path]]:
    """Downloaded files in the cache folder: (address without secrets, file)."""
    for note in sorted(_folder().glob("*/*.json")):
        address, path = str(_read(note).get("url", "")), note.with_suffix("")
        if address and path.is_file() and path.parent == _cache_path(address).parent:
            yield plain_url(address), path


def remove(name: str) -> None:
    """Delete the file of this address (without secrets)."""
    for other, path in list(downloaded()):
        if other == name:
            path.unlink(missing_ok=True)
            path.with_name(f"{path.name}.json").unlink(missing_ok=True)
            _remove_if_empty(path.parent)


def forget_parts(address: str) -> None:
    """Delete the partial files of this address."""
    path = _cache_path(address)
    for part in path.parent.glob("*.part"):
        forget_part(part)
    _remove_if_empty(path.parent)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _folder() -> Path:
    from logitless.backends import disk_cache

    return (llama_cache.named_folder() or disk_cache.cache_folder()) / "models"


def _cache_path(address: str) -> Path:
    name = unquote(urlsplit(address).path).rpartition("/")[2]
    if not re.fullmatch(r"\w[\w.+-]{0,200}", name, re.ASCII):
        name = "model.gguf"
    folder = hashlib.sha256(address.encode()).hexdigest()[:16]  # addresses may share a file name
    return _folder() / folder / name


def _version(address: str, *, public_only: bool) -> str:
    """Version of the content on the server (ETag or Last-Modified); "": it has none."""
    request = urllib.request.Request(address, method="HEAD", headers={"User-Agent": "logitless"})
    try:
        with open_url(request, 30, public_only=public_only) as reply:
            return str(reply.headers.get("ETag") or reply.headers.get("Last-Modified") or "")
    except urllib.error.HTTPError as error:
        error.close()  # it is the reply, and holds the connection
        if error.code in (403, 405, 501):  # GET may work nevertheless
            return ""
        raise CliError(f"{plain_url(address)}: the server answers {error.code} {error.reason}") from None
    except (urllib.error.URLError, OSError) as error:
        raise Unreachable(f"{plain_url(address)}: cannot be reached: {getattr(error, 'reason', '') or error}") from None


def _read(note: Path) -> dict[str, str]:
    try:
        content = json.loads(note.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}

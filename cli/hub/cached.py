"""Downloaded models of this machine, by the names under which a router serves them."""

from __future__ import annotations

from pathlib import Path

from logitless.cli.flags.model_options import Repo, url
from logitless.cli.hub import model_source
from logitless.cli.hub.hub import cache_folder
from logitless.cli.hub.repository import Cached, cached_repositories, choose


def models() -> dict[str, tuple[Path, str]]:
    """(file, alias) by name: USER/REPO:QUANT, or the address of a file. The default quantisation of a
    repository has the repository's name as its alias."""
    by_name: dict[str, tuple[Path, str]] = {}
    for cached in cached_repositories(cache_folder()):
        names = cached.names()
        for repo, name in cached.models():
            default = choose(names, Repo(repo.id))[0] == name
            by_name[str(repo)] = (cached.path(name), repo.id if default and repo.quant else "")
    for name, path in model_source.downloaded():
        by_name.setdefault(name, (path, ""))
    return by_name


def name_of(text: str) -> str:
    """Model name of a repository or address. ValueError: the text is neither."""
    if "://" in text:
        return model_source.shown(url(text))
    try:
        return str(Repo.parse(text))
    except ValueError as error:
        raise ValueError(f"{text[:200]!r} {error}, and no address of a GGUF file") from None


def remove(name: str) -> None:
    """Delete the files of one of `models`."""
    if "://" in name:
        model_source.remove(name)
    else:
        Cached(cache_folder(), Repo.parse(name)).remove()


def forget_parts(text: str) -> None:
    """Delete the partial files of a repository's or address's download."""
    if "://" in text:
        model_source.forget_parts(text)
    else:
        Cached(cache_folder(), Repo.parse(text)).forget_parts()

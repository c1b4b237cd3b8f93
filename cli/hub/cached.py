"""Downloaded models of this machine, by the names under which a router serves them.

They are in huggingface-hub's cache, in a folder of that layout that LLAMA_CACHE names (llama-server's), in the folder
of `--model-url`, and as plain files where older versions of llama.cpp put them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

from logitless.cli.flags.flags import CliError
from logitless.cli.flags.model_options import Repo, url
from logitless.cli.hub import llama_cache, model_source
from logitless.cli.hub.hub import cache_folder, folders
from logitless.cli.hub.repository import CachedFile, cached_repositories, choose, projector_beside
from logitless.models.media.projector_choice import media_of


def models() -> dict[str, tuple[Path, str]]:
    """(file, alias) by name: USER/REPO:QUANT, the address of a file, or a plain file's name without `.gguf`. The
    default quantisation of a repository has the repository's name as its alias."""
    by_name: dict[str, tuple[Path, str]] = {}
    for cached in (repository for folder in folders() for repository in cached_repositories(folder)):
        names = cached.names()
        if (whole := cached.whole_folder()) is not None:
            by_name.setdefault(cached.repo.id, (whole, ""))
        for repo, name in cached.models():
            default = choose(names, Repo(repo.id))[0] == name
            by_name.setdefault(str(repo), (cached.path(name), repo.id if default and repo.quant else ""))
    for name, path in (*model_source.downloaded(), *llama_cache.plain_files()):
        by_name.setdefault(name, (path, ""))
    return by_name


def files(options: SimpleNamespace) -> Iterator[Path]:
    """The files that a server with these options opens, as far as they are here: of the model and of its draft."""
    yield from (Path(path) for path in (options.model, options.model_draft) if path)
    for repo, file in ((options.hf_repo, options.hf_file or ""), (options.hf_repo_draft, "")):
        for folder in folders() if repo is not None else ():
            cached = CachedFile(folder, repo)
            if not file and (whole := cached.whole_folder()) is not None:
                yield whole
            with suppress(CliError):  # it has no such file
                yield cached.path(choose(cached.names(), repo, file)[0])


def media(options: SimpleNamespace) -> tuple[bool, bool]:
    """(images, sounds) that a server with these options reads, as far as the files here tell."""
    path, named = next(files(options), None), options.mmproj or options.mmproj_url
    if path is None or not (named or options.mmproj_auto):
        return bool(named), False
    projector = Path(options.mmproj) if options.mmproj else projector_beside(path)
    if options.mmproj_url or (options.mmproj and not Path(options.mmproj).is_file()):
        return True, False  # it is not here yet
    return media_of(path, projector)


def name_of(text: str) -> str:
    """Model name of a repository or address. ValueError: the text is neither."""
    if "://" in text:
        return model_source.plain_url(url(text))
    try:
        return str(Repo.parse(text))
    except ValueError as error:
        raise ValueError(f"{text[:200]!r} {error}, and no address of a GGUF file") from None


def remove(name: str) -> None:
    """Delete the files of one of `models`."""
    if "://" in name:
        model_source.remove(name)
    elif "/" in name:
        for folder in folders():
            CachedFile(folder, Repo.parse(name)).remove()
    else:
        llama_cache.remove(name)


def forget_parts(text: str) -> None:
    """Delete the partial files of a repository's or address's download."""
    if "://" in text:
        model_source.forget_parts(url(text))
    else:
        CachedFile(cache_folder(), Repo.parse(text)).forget_parts()

"""Hugging Face's hub: chooses a repository's file and fetches it into huggingface-hub's cache.

huggingface-hub lists files and manages the cache; the bytes come by `download.fetch`, because the library begins
an interrupted download anew and compares no checksum."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from logitless.cli.flags.flags import CliError
from logitless.cli.flags.model_options import Repo
from logitless.cli.hub import llama_cache
from logitless.cli.hub.download import ProgressOf, fetch
from logitless.cli.hub.repository import (
    CachedFile,
    choose,
    choose_block,
    choose_folder,
    choose_projector,
    in_repository,
    projector_beside,
)
from logitless.training.graders.public import is_private

_SHA256 = re.compile(r"[0-9a-f]{64}")


def cache_folder() -> Path:
    """The cache folder of huggingface-hub (HF_HUB_CACHE, HF_HOME)."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def folders() -> tuple[Path, ...]:
    """Folders of that layout where models may be: the cache folder, and LLAMA_CACHE, into which llama.cpp downloads."""
    own, other = cache_folder(), llama_cache.named_folder()
    return (own,) if other is None or other == own else (own, other)


def endpoint() -> str:
    """The hub's address (HF_ENDPOINT)."""
    from huggingface_hub import constants

    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or constants.ENDPOINT


class Hub:
    """One endpoint and one cache folder."""

    def __init__(
        self,
        token: str | None = None,
        *,
        offline: bool = False,
        cache: Path | None = None,
        progress: ProgressOf | None = None,
        allow_private: bool = False,
    ) -> None:
        """`token` None: the stored login, or HF_TOKEN. `allow_private`: the hub may send to addresses of this machine
        and of local networks, as one there may anyway."""
        from huggingface_hub import constants
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        self._token = token
        self._allow_private = allow_private
        self._offline = offline or constants.is_offline_mode()
        self._folders = folders() if cache is None else (cache,)
        self._cache = self._folders[0]  # the one that is written to
        self._progress = progress
        self._endpoint = endpoint()

    def model(self, repo: Repo, file: str = "") -> Path:
        """The model's file, its first part, or its folder, downloaded if need be. CliError: it cannot be had."""
        if self._offline:
            return self._local(repo, file)
        try:
            names = self._names(repo)
            if not file and not repo.quant and (files := choose_folder(names)):
                return self._folder(repo, files)
            first, *_ = (self._download(repo, name) for name in choose(names, repo, file))
            return first
        except _NoAnswerError as error:
            with suppress(CliError):
                return self._local(repo, file)
            raise CliError(f"{repo}: {error}") from None

    def _folder(self, repo: Repo, files: list[str]) -> Path:
        """The snapshot of a model of config.json and safetensors; one that is not supported is refused before its
        weights are downloaded."""
        from logitless.models.huggingface.config import Config
        from logitless.models.huggingface.folder import family_of

        config, *others = files
        path = self._download(repo, config).parent
        family_of(Config.read(path))
        for name in others:
            self._download(repo, name)
        return path

    def _local(self, repo: Repo, file: str) -> Path:
        """The model's file or folder as it was downloaded. CliError: it never was."""
        wholes = (CachedFile(folder, repo).whole_folder() for folder in self._folders)
        if not file and not repo.quant and (whole := next(filter(None, wholes), None)) is not None:
            return whole
        caches = [cached for folder in self._folders if (cached := CachedFile(folder, repo)).names()]
        if not caches:
            raise CliError(f"--offline: {repo.id} has never been downloaded to {self._cache}")
        here = next((cached for cached in caches if _has(cached.names(), repo, file)), caches[0])
        return here.path(choose(here.names(), repo, file)[0])

    def block(self, repo: Repo, model: Path | None = None, kind: str = "mtp") -> Path | None:
        """The file with the MTP head (models/gguf/file.py) for this model of the repository, or with its drafter
        of another kind; None where it has none."""
        like = "" if model is None else model.name
        if not self._offline:
            try:
                name = choose_block(self._names(repo), like, kind)
                return self._download(repo, name) if name else None
            except _NoAnswerError:
                pass
        caches = [CachedFile(folder, repo) for folder in self._folders]
        return next((c.path(name) for c in caches if (name := choose_block(c.names(), like, kind))), None)

    def projector(self, repo: Repo, model: Path) -> Path | None:
        """The projector of this model of the repository; None where it has none."""
        if not self._offline:
            try:
                name = choose_projector(self._names(repo), in_repository(model))
                return self._download(repo, name) if name else None
            except _NoAnswerError:
                pass
        return projector_beside(model)

    def _names(self, repo: Repo) -> list[str]:
        from huggingface_hub import HfApi

        with _HubErrors(repo, self._endpoint):
            info = HfApi(endpoint=self._endpoint, token=self._token).model_info(repo.id, timeout=30)
        names = [file.rfilename for file in info.siblings or ()]
        return [n for n in names if ".." not in PurePosixPath(n).parts and not n.startswith("/")]

    def _download(self, repo: Repo, name: str) -> Path:
        """Download the blob into the cache; the library then links it by name."""
        from huggingface_hub import hf_hub_download, hf_hub_url
        from huggingface_hub.file_download import get_hf_file_metadata
        from huggingface_hub.utils._headers import build_hf_headers

        url = hf_hub_url(repo.id, name, endpoint=self._endpoint)
        with _HubErrors(repo, self._endpoint, name):
            metadata = get_hf_file_metadata(url, token=self._token, endpoint=self._endpoint)
        etag = metadata.etag or ""
        if not re.fullmatch(r"[\w.-]{1,128}", etag, re.ASCII) or set(etag) == {"."}:
            raise CliError(f"{repo.id}/{name}: the server does not say which version it has")
        others = (CachedFile(folder, repo).file_with(name, etag) for folder in self._folders[1:])
        if (there := next(filter(None, others), None)) is not None:
            return there
        blob = CachedFile(self._cache, repo).folder / "blobs" / etag
        if not blob.exists():
            own = urlsplit(metadata.location).netloc == urlsplit(url).netloc
            secret = build_hf_headers(token=self._token).get("authorization") if own else None
            headers = {"Authorization": secret} if secret else {}
            checksum = etag if _SHA256.fullmatch(etag) else ""
            label = f"{repo.id}/{name}"
            fetch(
                metadata.location,
                blob,
                name=label,
                headers=headers,
                version=etag,
                size=metadata.size,
                sha256=checksum,
                progress=self._progress,
                public_only=not (self._allow_private or is_private(self._endpoint)),
            )
        with _HubErrors(repo, self._endpoint, name):
            path = hf_hub_download(repo.id, name, cache_dir=self._cache, token=self._token, endpoint=self._endpoint)
        return Path(str(path))


class _NoAnswerError(Exception):
    """The hub cannot be reached, or fails."""


class _HubErrors:
    """Turns errors of huggingface-hub into one line without tokens."""

    def __init__(self, repo: Repo, endpoint: str, name: str = "") -> None:
        self._repo, self._endpoint, self._name = repo, endpoint, name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or not isinstance(error, Exception):
            return
        from huggingface_hub import errors

        repo = self._repo.id
        if isinstance(error, errors.GatedRepoError):
            raise CliError(
                f"{repo} is gated: accept its terms at {self._endpoint}/{repo}, and give --hf-token or HF_TOKEN"
            ) from None
        if isinstance(error, errors.RepositoryNotFoundError):
            raise CliError(f"{repo} is not at {self._endpoint} (a private one needs --hf-token or HF_TOKEN)") from None
        if isinstance(error, errors.EntryNotFoundError):
            raise CliError(f"{repo} has no file {self._name}") from None
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise CliError(f"{repo}: {self._endpoint} answers {status}: the token is wrong, or not for it") from None
        if status is not None and status < 500 and status != 429:
            raise CliError(f"{repo}: {self._endpoint} answers {status}") from None
        if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
            raise CliError(f"{error.filename}: {error.strerror}") from None
        reason = f"answers {status}" if status is not None else f"cannot be reached ({type(error).__name__})"
        raise _NoAnswerError(f"{self._endpoint} {reason}") from None


def _has(cached: list[str], repo: Repo, file: str) -> bool:
    try:
        return bool(choose(cached, repo, file))
    except CliError:
        return False

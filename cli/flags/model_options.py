"""Flags that name the model: file, repository, URL. `model_source` resolves them and is imported only then."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from logitless.cli.flags.flags import Flag, Group
from logitless.engine.loading.values import file_name, folder_name, text, whole

_REPO = re.compile(r"([\w.-]{1,96}/[\w.-]{1,96})(?::([\w.-]+))?", re.ASCII)


@dataclass(frozen=True)
class Repo:
    """USER/REPO, and after a colon which of its quantisations ("": Q4_K_M, else the first file)."""

    id: str
    quant: str = ""

    @classmethod
    def parse(cls, text: str) -> Repo:
        """ValueError completes "--hf-repo: 'text' ..."."""
        match = _REPO.fullmatch(text)
        if match is None or ".." in text or any(part[0] in "-." for part in match[1].split("/")):
            raise ValueError("is not USER/REPO or USER/REPO:QUANT")
        return cls(match[1], match[2] or "")

    def __str__(self) -> str:
        return f"{self.id}:{self.quant}" if self.quant else self.id


@dataclass(frozen=True)
class DockerModel:
    """A model of Docker's hub: REPO/MODEL:TAG; the repository is ai, the tag latest, unless they are given."""

    repo: str
    tag: str = "latest"

    @classmethod
    def parse(cls, text: str) -> DockerModel:
        """ValueError completes "--docker-repo: 'text' ..."."""
        match = re.fullmatch(
            r"(?:([a-z0-9][a-z0-9._-]*)/)?([a-z0-9][a-z0-9._-]*)(?::([\w][\w.-]{0,127}))?", text, re.ASCII
        )
        if match is None or ".." in text:
            raise ValueError("is not MODEL, REPO/MODEL or REPO/MODEL:TAG")
        return cls(f"{match[1] or 'ai'}/{match[2]}", match[3] or "latest")

    def __str__(self) -> str:
        return f"{self.repo}:{self.tag}"


def url(value: str) -> str:
    """An address of HTTP."""
    try:
        parts = urlsplit(value)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and value.isascii() and value.isprintable()
    except ValueError:
        good = False
    if not good or " " in value:
        raise ValueError("is not an http:// or https:// address")
    return value


MODEL = Flag("-m --model", "the GGUF file, or a Hugging Face folder", file_name, metavar="FILE", env="LLAMA_ARG_MODEL",
             common=True)  # fmt: skip
DOWNLOADS = (
    Flag("-hf -hfr --hf-repo", "a model of Hugging Face's hub: USER/REPO:QUANT (without :QUANT its Q4_K_M, else its "
         "first GGUF file, else its safetensors); downloads are kept in huggingface-hub's cache (HF_HOME)", Repo.parse,
         metavar="REPO", env="LLAMA_ARG_HF_REPO", common=True),
    Flag("-hff --hf-file", "that file of the repository", file_name, metavar="FILE", env="LLAMA_ARG_HF_FILE"),
    Flag("-hft --hf-token", "token for private and gated repositories", text, metavar="TOKEN", env="HF_TOKEN"),
    Flag("-mu --model-url", "a GGUF file of the web; it is downloaded to -m FILE, or into LLAMA_CACHE or the cache "
         "folder", url, metavar="URL", env="LLAMA_ARG_MODEL_URL", common=True),
    Flag("-dr --docker-repo", "a model of Docker's hub: REPO/MODEL:TAG, ai and latest unless they are given",
         DockerModel.parse, metavar="MODEL", env="LLAMA_ARG_DOCKER_REPO"),
    Flag("--allow-private-addresses", "let a router's clients (POST /models), redirects and endpoint graders lead to "
         "this machine and its networks", env="LOGITLESS_ALLOW_PRIVATE_ADDRESSES"),
    Flag("--offline", "download nothing; use earlier downloads", env="LLAMA_ARG_OFFLINE", common=True),
)  # fmt: skip
MMPROJ_URL = Flag("-mmu --mmproj-url", "a projector file of the web; it is downloaded into LLAMA_CACHE or the cache "
                  "folder", url, metavar="URL", env="LLAMA_ARG_MMPROJ_URL")  # fmt: skip
DOWNLOAD = (
    Group("Download", (
        *DOWNLOADS,
        Flag("-m --model", "where --model-url's file is to be", file_name, metavar="FILE", env="LLAMA_ARG_MODEL",
             common=True),
        MMPROJ_URL,
        Flag("--mmproj-auto", "download the projector of a vision model of the hub, too", default=True,
             env="LLAMA_ARG_MMPROJ_AUTO", off="--no-mmproj --no-mmproj-auto"),
        Flag("--public-only", "refuse a URL at an address of this machine or a local network"),
        Flag("--json", "print progress as a line of JSON each"),
        Flag("-h --help", "show this and leave"),
        Flag("--version", "show the version and leave"),
    )),
)  # fmt: skip
ROUTER = Group("Several models (router)", (
    Flag("--models-dir", "serve the GGUF files and Hugging Face folders of a folder, each by its name; a model is "
         "loaded when a request names it", folder_name, metavar="FOLDER", env="LLAMA_ARG_MODELS_DIR", common=True),
    Flag("--max-blob-size", "most GiB of a model file that POST /api/blobs puts into --models-dir; 0: as many as the "
         "disk has room for", whole(0, 1 << 20), 0, "GIB"),
    Flag("--models-preset", "an INI file of models and their flags: a section each, [*] for all", file_name,
         metavar="FILE", env="LLAMA_ARG_MODELS_PRESET", common=True),
    Flag("--models-max", "models that are loaded at once; another one takes the place of the one used longest ago; 0: "
         "any number", whole(0, 10_000), 4, env="LLAMA_ARG_MODELS_MAX", common=True),
    Flag("--models-autoload", "load a model when a request names it; off: POST /models/load does", default=True,
         env="LLAMA_ARG_MODELS_AUTOLOAD", off="--no-models-autoload"),
))  # fmt: skip

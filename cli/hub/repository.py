"""A hub repository: its model files, and where huggingface-hub's cache has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from logitless.cli.flags.flags import CliError
from logitless.cli.flags.model_options import Repo
from logitless.cli.hub.download import forget_part
from logitless.models.huggingface.config import is_folder
from logitless.models.media.projector_names import n_bits

DEFAULT = "Q4_K_M"  # llama-server's
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_QUANT = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|BF16|F16|F32|MXFP4\w*))(?=[-.])", re.ASCII | re.IGNORECASE)
# names by llama.cpp's converter
_BLOCK = re.compile(r"(?:.*/)?(mtp|eagle3|dflash|dspark)-[^/]*\.gguf", re.IGNORECASE)
_PROJECTOR = re.compile(r".*mmproj.*\.gguf", re.IGNORECASE)
_OF_FOLDER = re.compile(
    r"(generation_config|tokenizer|tokenizer_config|tekken|added_tokens|chat_template|(?:pre)?processor_config)\.json"
    r"|tokenizer\.model|tiktoken\.model|qwen\.tiktoken|chat_template\.jinja|model\.safetensors\.index\.json"
    r"|[1-9]_\w+/(?:config\.json|model\.safetensors)"
)
_FOLDER = re.compile(r"models--([\w.-]+?)--([\w.-]+)", re.ASCII)


def choose(names: Iterable[str], repo: Repo, file: str = "") -> list[str]:
    """The chosen model file, or all its parts. CliError: there is none; the line lists the existing files."""
    models = sorted(_models(names))
    own = [n for n in models if not _BLOCK.match(n)]
    whole = [n for n in own if (part := _PART.fullmatch(n)) is None or int(part[2]) == 1]
    if file:
        name = file if file in models else ""
        if not name:
            raise CliError(f"--hf-file: {repo.id} has no file {file}; it has {_listed(models)}")
    elif not whole:
        but = f" that is a whole model; it has {_listed(models)}: --hf-file names one" if models else ""
        raise CliError(f"--hf-repo: {repo.id} has no GGUF file{but}")
    elif repo.quant:
        name = _first_with(whole, repo.quant)
        if not name:
            kinds = sorted({match[1] for n in whole if (match := _QUANT.search(n))})
            raise CliError(f"--hf-repo: {repo.id} has no {repo.quant}; it has {_listed(kinds or whole)}")
    else:
        name = _first_with(whole, DEFAULT) or whole[0]
    part = _PART.fullmatch(name)
    if part is None:
        return [name]
    parts = [f"{part[1]}-{i + 1:05d}-of-{part[3]}.gguf" for i in range(int(part[3]))]
    missing = [n for n in parts if n not in models]
    if missing:
        raise CliError(f"--hf-repo: {repo.id} has {name} but not its part {missing[0]}")
    return parts


def _models(names: Iterable[str]) -> Iterator[str]:
    return (n for n in names if n.endswith(".gguf") and not re.search("mmproj|imatrix", n, re.IGNORECASE))


def choose_folder(names: Iterable[str]) -> list[str]:
    """The files of a repository whose model is config.json and safetensors: small ones first; [] where it has GGUF
    files, or no such model."""
    top = sorted(n for n in names if "/" not in n or _OF_FOLDER.fullmatch(n))
    weights = [n for n in top if re.fullmatch(r"(?!adapter_|consolidated)[^/]*\.safetensors", n)]
    whole = [n for n in weights if n == "model.safetensors"] or weights
    if "config.json" not in top or not whole or any(True for _ in _models(names)):
        return []
    return ["config.json", *(n for n in top if _OF_FOLDER.fullmatch(n)), *whole]


def choose_block(names: Iterable[str], like: str, kind: str = "mtp") -> str:
    """The drafter's file of this kind in a repository, of the type of the model file `like` or of any; "": none."""
    blocks = sorted(n for n in names if (match := _BLOCK.match(n)) and match[1].lower() == kind)
    quant = _QUANT.search(like)
    return (_first_with(blocks, quant[1]) if quant else "") or next(iter(blocks), "")


def choose_projector(names: Iterable[str], model: str) -> str:
    """The projector of one of a repository's models: of those in its folder, else above it, the one
    of the nearest number of bits, as llama.cpp chooses; "" where there is none."""
    parts = model.split("/")[:-1]
    files = [n for n in sorted(names) if _PROJECTOR.fullmatch(n) and n.split("/")[:-1] == parts[: n.count("/")]]
    return min(files, key=lambda n: (-n.count("/"), abs(n_bits(n) - n_bits(model))), default="")


def _first_with(names: list[str], quant: str) -> str:
    """The first whose name has the word, in any case: Q4_0 is in m-q4_0.gguf, F16 is not in m-BF16.gguf."""
    word = re.compile(rf"(?<![^\W_]){re.escape(quant)}[-./]", re.IGNORECASE)
    return next((n for n in names if word.search(n)), "")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return ", ".join(names[:12]) + more if names else "no GGUF file"


@dataclass(frozen=True)
class CachedFile:
    """A repository in the cache folder: `blobs` by checksum, and links to them by name in `snapshots`."""

    cache: Path
    repo: Repo

    @property
    def folder(self) -> Path:
        return self.cache / f"models--{self.repo.id.replace('/', '--')}"

    def names(self) -> list[str]:
        """GGUF files that are complete here."""
        snapshot = self._snapshot()
        if snapshot is None:
            return []
        with suppress(OSError):  # somebody else's
            return [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf") if path.exists()]
        return []

    def whole_folder(self) -> Path | None:
        """The snapshot, where it is a complete model of config.json and safetensors, without GGUF files."""
        snapshot = self._snapshot()
        return snapshot if snapshot is not None and is_folder(snapshot) and not self.names() else None

    def path(self, name: str) -> Path:
        """Path of one of `names`."""
        snapshot = self._snapshot()
        assert snapshot is not None
        return snapshot / name

    def file_with(self, name: str, blob: str) -> Path | None:
        """Path of one of `names`, if this blob is its content."""
        path = (self._snapshot() or self.folder) / name
        return path if path.resolve().name == blob and path.exists() else None

    def _snapshot(self) -> Path | None:
        try:
            commit = (self.folder / "refs" / "main").read_text().strip()
        except (OSError, ValueError):
            return None
        return self.folder / "snapshots" / commit if re.fullmatch(r"\w{1,128}", commit, re.ASCII) else None

    def models(self) -> Iterator[tuple[Repo, str]]:
        """Complete models: (USER/REPO:QUANT, file or first part)."""
        names = self.names()
        for name in names:
            match = _QUANT.search(name)
            repo = Repo(self.repo.id, match[1].upper() if match else "")
            with suppress(CliError):  # a part is missing
                if choose(names, repo)[0] == name:
                    yield repo, name

    def remove(self) -> None:
        """Delete the model's files, but nothing outside this folder."""
        snapshots, blobs = self.folder / "snapshots", self.folder / "blobs"
        names = self.names()
        if (whole := self.whole_folder()) is not None:
            for path in list(whole.iterdir()):
                _unlink_with_blob(path, snapshots, blobs)
        with suppress(CliError):
            gone = choose(names, self.repo)
            left = [name for name in names if name not in gone]
            if not any(True for _ in _models(left)):
                gone += [name for name in left if _PROJECTOR.fullmatch(name)]  # no model needs them any more
            for name in gone:
                for path in snapshots.glob(f"*/{_escaped(name)}"):
                    _unlink_with_blob(path, snapshots, blobs)

    def forget_parts(self) -> None:
        """Delete partial files of interrupted downloads."""
        for part in (self.folder / "blobs").glob("*.part"):
            forget_part(part)


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _unlink_with_blob(path: Path, snapshots: Path, blobs: Path) -> None:
    if not path.parent.resolve().is_relative_to(snapshots.resolve()):
        return
    blob = path.resolve()
    path.unlink(missing_ok=True)
    in_use = any(other.is_symlink() and other.resolve() == blob for other in snapshots.rglob("*"))
    if not in_use and blob.parent == blobs.resolve():
        blob.unlink(missing_ok=True)


def cached_repositories(cache: Path) -> Iterator[CachedFile]:
    """All model repositories in the cache."""
    with suppress(OSError):
        for folder in sorted(cache.iterdir()):
            match = _FOLDER.fullmatch(folder.name)
            if match is not None:
                with suppress(ValueError):
                    yield CachedFile(cache, Repo.parse(f"{match[1]}/{match[2]}"))


def in_repository(model: Path) -> str:
    """The name in its repository of a model that lies in a cache folder; else the file's."""
    folder = _snapshot_of(model)
    return model.name if folder is None else model.absolute().relative_to(folder).as_posix()


def projector_beside(model: Path) -> Path | None:
    """The projector in the cache folder for a model that lies there; None: it does not, or has none."""
    folder = _snapshot_of(model)
    with suppress(OSError):
        names = (
            [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf") if path.exists()] if folder else []
        )
        name = choose_projector(names, in_repository(model))
        return folder / name if folder and name else None
    return None


def _snapshot_of(model: Path) -> Path | None:
    """The folder of a cache in which a repository's files have their names."""
    return next(
        (
            at
            for at in model.absolute().parents
            if (up := at.parent).name == "snapshots" and _FOLDER.fullmatch(up.parent.name)
        ),
        None,
    )

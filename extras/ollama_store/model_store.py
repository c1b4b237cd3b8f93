"""Store of created models: each is built in a folder of its own, renamed when complete, deleted as a whole."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from logitless.engine.errors import InvalidRequest, unkept
from logitless.extras.ollama_store.blobs import Blobs, discard
from logitless.extras.ollama_store.manifest import (
    MANIFEST,
    MESSAGES,
    MODEL,
    PROJECTOR,
    TEMPLATE,
    Manifest,
    created_models,
    has_manifest,
)
from logitless.frontend.dialects.ollama_template import jinja_of
from logitless.frontend.replies.encoding import encode_json
from logitless.frontend.workers import to_thread
from logitless.models.adapters.lora import read_adapter
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.media.projector_choice import projector_of_folder
from logitless.models.model import hparams_of

Quantize = Callable[[Path, Path, str], Awaitable[None]]  # from, to, type; ModelFileError
_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")


class CreatedModels:
    """The created models below `folder`. `most`: bytes of an upload; 0: any number."""

    def __init__(self, folder: Path, quantize: Quantize, most: int = 0) -> None:
        self._folder, self.quantize = folder, quantize
        self.blobs = Blobs(folder, most)
        self._swapping = asyncio.Lock()

    def owns(self, folder: Path) -> bool:
        """True for the folder of a created model."""
        return has_manifest(folder)

    def models(self) -> dict[str, tuple[Path, Manifest]]:
        """(first GGUF file, manifest) by name."""
        return created_models(self._folder)

    @contextmanager
    def building(self) -> Iterator[Path]:
        """A new folder. It is deleted at the block's end unless `keep` has taken it."""
        with self.blobs.unfinished() as path:
            path.mkdir(mode=0o755)
            try:
                yield path
            except OSError as error:
                raise unkept("the model cannot be kept", error) from None

    async def keep(self, built: Path, manifest: Manifest) -> None:
        """Write the manifest of a built folder and make it the model of its name, in the place of an earlier one."""
        async with self._swapping:
            await to_thread(partial(self._keep, built, manifest))

    def _keep(self, built: Path, manifest: Manifest) -> None:
        files: dict[str, Any] = {MANIFEST: encode_json(manifest)}
        if manifest.template:
            files[TEMPLATE] = jinja_of(manifest.template).encode("utf-8", "replace")
        if manifest.first_messages:
            files[MESSAGES] = encode_json(manifest.first_messages)
        for name, content in files.items():
            (built / name).write_bytes(content)
        place = self._folder / manifest.folder
        if place.is_symlink() or (place.exists() and not has_manifest(place)):
            raise InvalidRequest(f"model {manifest.name!r} has files that were not created here")
        with self.blobs.unfinished() as old:
            if place.exists():
                place.rename(old)
            built.rename(place)
            if old.exists():
                self._forget_uploads(old)

    async def remove(self, manifest: Manifest) -> None:
        """Delete a created model's folder, and the uploads that no other model has."""
        async with self._swapping:
            await to_thread(partial(self._remove, self._folder / manifest.folder))

    def _remove(self, place: Path) -> None:
        try:
            with self.blobs.unfinished() as old:
                if has_manifest(place):
                    place.rename(old)
                    self._forget_uploads(old)
        except OSError as error:
            raise unkept("the model cannot be deleted", error) from None

    def _forget_uploads(self, old: Path) -> None:
        """Delete a folder's files, and the uploads of them that no folder has any more."""
        files = [path.lstat() for path in old.iterdir()]
        discard(old)
        self.blobs.forget(files)

    # -- files of a model that is built

    async def take(self, source: Path, place: Path) -> None:
        """Put a file at another place too, as a hard link, or as a copy where links are impossible."""
        await to_thread(partial(self._take, source, place))

    def _take(self, source: Path, place: Path) -> None:
        real = Path(os.path.realpath(source))
        try:
            os.link(real, place)
        except OSError:
            self.blobs.check_room(real.stat().st_size)
            shutil.copyfile(real, place)


def files_of(path: Path, *, images: bool) -> dict[str, Path]:
    """The files of a model by their names in a created model's folder, the first one first: its parts, and its
    projector."""
    part = _PART.fullmatch(path.name)
    if part is None:
        files = {MODEL: path}
    else:
        paths = sorted(path.parent.glob(f"*-of-{part[2]}.gguf"))
        names = [file for file in paths if (match := _PART.fullmatch(file.name)) and match[1] == part[1]]
        files = {file.name: file for file in names}
    projector = projector_of_folder(path) if images else None
    return files | ({PROJECTOR: projector} if projector is not None else {})


def file_kind(path: Path) -> str:
    """The kind of a GGUF file: model, adapter or projector. ModelFileError: the file is neither."""
    with GGUFFile.open(path) as file:
        kind, arch = file.metadata.get("general.type"), file.metadata.get("general.architecture")
        if kind == "adapter":
            return "adapter"
        if kind == "mmproj" or arch == "clip":
            return "projector"
        if not isinstance(arch, str) or not file.tensors:
            raise ModelFileError(path, "has no architecture or no tensors")
        return "model"


def check_adapter(path: Path, base: Path) -> None:
    """Check that an adapter fits a model. ModelFileError: it does not."""
    with GGUFFile.open(base) as model:
        read_adapter(path, model, hparams_of(model))

"""The projector beside a model: the file whose name and tensors belong to that of the text model."""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path

from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams
from logitless.models.huggingface.visions import has_projector, projector_file
from logitless.models.media.encoders import Encoders
from logitless.models.media.params import MediaParams, params_for
from logitless.models.media.projector_names import contains, is_other_name, is_projector_name, n_bits, words_of
from logitless.models.model import hparams_of

log = logging.getLogger(__name__)


def projectors_in(folder: Path) -> list[Path]:
    """Files of a folder that are projectors by their names."""
    return sorted(path for path in folder.glob("*.gguf") if is_projector_name(path.name))


def fitting_projector(
    model: Path, text: GGUFFile, h: Hparams, *, own_folder: bool = False, warn: bool = True
) -> Path | None:
    """The projector beside a model, by name and by tensors; None: there is none, and a warning says
    why not the one that is there. `own_folder`: the folder is this model's, so any name will do
    where none belongs to the model's."""
    if model.is_dir():
        own = projector_file(model)
        return own if has_projector(model) and is_usable(own, text, h, warn=warn) else None
    paths = [path for path in projectors_in(model.parent) if path != model] if h.causal else []
    named = [path for path in paths if _belongs(path, model)] or (paths if own_folder else [])
    if paths and not named and warn:
        log.warning("images are not read: %s is not named like %s; --mmproj takes it", paths[0].name, model.name)
    chosen = min(named, key=lambda path: abs(n_bits(path.name) - n_bits(model.name)), default=None)
    return chosen if chosen is not None and is_usable(chosen, text, h, warn=warn) else None


def is_usable(path: Path, text: GGUFFile, h: Hparams, *, warn: bool = True) -> bool:
    """True if a text model takes images or sounds by this file, as far as the headers say; else a
    warning tells why not."""
    try:
        check_projector(path, text, h)
    except ModelFileError as error:
        if warn:
            log.warning("images are not read: %s", error)
        return False
    return True


def projector_of_folder(model: Path) -> Path | None:
    """The projector of a folder that is a model's own; None: it has none for this model. The server
    of the model warns."""
    if not projectors_in(model.parent):
        return None
    try:
        with GGUFFile.open(model) as text:
            return fitting_projector(model, text, hparams_of(text), own_folder=True, warn=False)
    except ModelFileError:
        return None


def check_projector(path: Path, text: GGUFFile, h: Hparams) -> MediaParams:
    """Read a projector's header, and check its tensors against a text model. ModelFileError: they
    do not go together."""
    with GGUFFile.open(path) as gguf:
        params = params_for(text, h, gguf)
        Encoders.check(gguf, params, h.n_embd)
        return params


def media_of(model: Path, projector: Path | None = None) -> tuple[bool, bool]:
    """(images, sounds) that a model reads by a projector, or by the one beside it."""
    beside = [projector_file(model)] if has_projector(model) else projectors_in(model.parent)
    files = [path for path in ([projector] if projector else beside) if path != model]
    if not files or not (model.is_file() or has_projector(model)):
        return False, False
    versions = tuple((path.name, status.st_mtime_ns, status.st_size) for path in files if (status := path.stat()))
    return _media_of(model, model.stat().st_mtime_ns, projector, versions)


@lru_cache(512)
def _media_of(model: Path, _: int, projector: Path | None, __: object) -> tuple[bool, bool]:
    try:
        with GGUFFile.open(model) as text:
            h = hparams_of(text)
            path = projector or fitting_projector(model, text, h, warn=False)
            params = check_projector(path, text, h) if path is not None else None
    except (ModelFileError, OSError):
        return False, False
    return (params.vision is not None, params.audio is not None) if params is not None else (False, False)


def _belongs(projector: Path, model: Path) -> bool:
    """True if a projector's name is part of the model's; or beside the only model of a folder, if it
    is the folder's, or says nothing."""
    words, own = words_of(projector.name), words_of(model.name)
    if words and contains(own, words):
        return True
    if words and words != words_of(model.absolute().parent.name):
        return False
    others = (path for path in model.parent.glob("*.gguf") if not is_other_name(path.name))
    return all(words_of(path.name) == own or not _is_model(path) for path in others)


def _is_model(path: Path) -> bool:
    """True unless a file's header says that it is an adapter or another thing beside a model."""
    try:
        with GGUFFile.open(path) as gguf:
            return bool(gguf.metadata.get("general.type", "model") == "model")
    except (ModelFileError, OSError):
        return False

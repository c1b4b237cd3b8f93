"""The router's catalog: GGUF files of a folder and sections of a preset file, by llama-server's rules."""

from __future__ import annotations

import configparser
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from logitless.models.huggingface.config import is_folder
from logitless.models.media.projector_names import is_projector_name
from logitless.router.fleet import CACHE, FOLDER, PRESET, Entry
from logitless.router.ollama.store import ModelStore

_PART = re.compile(r".*-(\d{5})-of-\d{5}\.gguf")
_EVERYONE = "*"
_OWN = frozenset({"load-on-startup", "stop-timeout", "dedup-cache-models"})  # keys of a section that are no flags
_TRUE, _FALSE = frozenset({"1", "true", "on", "yes"}), frozenset({"0", "false", "off", "no"})
MAX_PRESET_BYTES = 1 << 20


class CatalogError(Exception):
    """The folder or the preset file cannot be used: the reason in one line."""


@dataclass(frozen=True)
class Preset:
    """A section: flags by their names in the file, and settings of the router."""

    settings: Mapping[str, str]
    load_on_startup: bool = False
    stop_seconds: float = 10.0
    dedup: bool = False  # hide downloaded models whose files the section uses


def models_of_folder(folder: Path, owns: Callable[[Path], bool] = lambda _: False) -> dict[str, Path]:
    """Models by name: `name.gguf`, a folder with one model (in parts or not, with an mmproj file or not), or one of
    Hugging Face. Folders of created models (`owns`), and names that begin with a dot, are not among them."""
    models: dict[str, Path] = {}
    try:
        for path in sorted(folder.iterdir()):
            if path.name.startswith(".") or owns(path):
                continue
            name = path.name if path.is_dir() else path.stem
            model = _model_in(path)
            if model is not None and name.isprintable():
                models.setdefault(name, model)
    except OSError as error:
        raise CatalogError(f"--models-dir {folder}: {error.strerror}") from None
    return models


def _model_in(path: Path) -> Path | None:
    if not path.is_dir():
        return path if _is_model(path) else None
    try:
        models = sorted(file for file in path.iterdir() if _is_model(file))
    except OSError:
        return None
    return models[0] if models else path if is_folder(path) else None


def _is_model(path: Path) -> bool:
    part = _PART.fullmatch(path.name)
    first = part is None or int(part[1]) == 1
    return path.suffix == ".gguf" and not is_projector_name(path.name) and first and path.is_file()


def read_presets(path: Path) -> tuple[Preset, dict[str, Preset]]:
    """(settings for all models, presets by model name, each with those for all)."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_PRESET_BYTES + 1).decode("utf-8-sig")
    except OSError as error:
        raise CatalogError(f"--models-preset {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CatalogError(f"--models-preset {path}: byte {error.start} is not UTF-8") from None
    if len(text) > MAX_PRESET_BYTES:
        raise CatalogError(f"--models-preset {path}: is larger than {MAX_PRESET_BYTES} bytes")
    parser = configparser.RawConfigParser(
        delimiters=("=",), comment_prefixes=(";", "#"), default_section="", strict=False, empty_lines_in_values=False
    )
    parser.optionxform = str  # type: ignore[method-assign, assignment]  # environment variables are upper case
    try:
        parser.read_string(f"[top]\n{text}")  # `version = 1` may stand before all sections
    except configparser.Error as error:
        lines = [n for n, _ in error.errors] if isinstance(error, configparser.ParsingError) else []
        where = f" line {lines[0] - 1}:" if lines else ""
        raise CatalogError(f"--models-preset {path}:{where} is no INI file of presets") from None
    sections = {name: dict(parser.items(name)) for name in parser.sections() if name != "top"}
    common = sections.pop(_EVERYONE, {})
    everyone = _preset(path, _EVERYONE, common)
    return everyone, {name: _preset(path, name, {**common, **own}) for name, own in sections.items()}


def _preset(path: Path, name: str, words: Mapping[str, str]) -> Preset:
    if not name or not name.isprintable():
        raise CatalogError(f"--models-preset {path}: a section has no name")
    where, seconds = f"--models-preset {path}: [{name}]", words.get("stop-timeout", "10")
    if not re.fullmatch(r"\d{1,6}", seconds):
        raise CatalogError(f"{where} stop-timeout: is not a number of seconds")
    return Preset(
        {key: word for key, word in words.items() if key not in _OWN},
        load_on_startup=_truth(where, "load-on-startup", words),
        stop_seconds=float(seconds),
        dedup=_truth(where, "dedup-cache-models", words),
    )


def _truth(where: str, key: str, words: Mapping[str, str]) -> bool:
    word = words.get(key, "false").strip().lower()
    if word not in _TRUE | _FALSE:
        raise CatalogError(f"{where} {key}: {word!r} is not true or false")
    return word in _TRUE


@dataclass(frozen=True)
class ModelArguments:
    """Settings of a model as its server's command line, with its aliases and tags."""

    words: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()  # of models, as far as they are on this machine
    images: bool = False  # its projector reads images
    audio: bool = False  # its projector reads sounds


# (where it stands, settings, the model's name, its file if that is known without them) → what they mean
MeaningOf = Callable[[str, Mapping[str, str], str, Path | None], ModelArguments]


@dataclass(frozen=True)
class Sources:
    """The sources of models. `read` reads folder and presets anew each time."""

    folder: Path | None
    presets: Path | None
    common: tuple[str, ...]  # arguments of every child; they come last, so they win
    downloaded: Callable[[], Mapping[str, tuple[Path, str]]] = dict  # by name: (file, alias or "")
    store: ModelStore | None = None  # of created models in the folder

    def read(self, meaning_of: MeaningOf) -> list[Entry]:
        """All models by name. CatalogError: a source cannot be read, or has a setting that is no flag."""
        everyone, presets = read_presets(self.presets) if self.presets is not None else (Preset({}), {})
        files: dict[str, Path] = {}
        if self.folder is not None:
            files = (
                models_of_folder(self.folder) if self.store is None else models_of_folder(self.folder, self.store.owns)
            )
        created = {} if self.store is None else self.store.models()
        created = {name: result for name, result in created.items() if name not in files}
        files |= {name: path for name, (path, _) in created.items()}
        cached = {name: result for name, result in self.downloaded().items() if name not in {*files, *presets}}
        paths = {**files, **{name: path for name, (path, _) in cached.items()}}
        entries, hidden = [], set()
        for name in sorted({*paths, *presets}):
            preset = presets.get(name, everyone)
            meaning = meaning_of(f"--models-preset {self.presets}: [{name}]", preset.settings, name, paths.get(name))
            if preset.dedup and name in presets:
                hidden |= {path.resolve() for path in meaning.files}
            path, manifest = created.get(name, (None, None))
            own = manifest.words(path.parent) if manifest is not None and path is not None else ()
            entries.append(
                Entry(
                    name,
                    (*meaning.words, *own, *self.common),
                    path=str(paths.get(name, preset.settings.get("model", preset.settings.get("m", "")))),
                    aliases=meaning.aliases,
                    tags=meaning.tags,
                    source=PRESET if name in presets else FOLDER if name in files else CACHE,
                    preset="".join(f"{line}\n" for line in (f"[{name}]", *map(" = ".join, preset.settings.items()))),
                    images=meaning.images,
                    audio=meaning.audio,
                    created=manifest,
                    load_on_startup=preset.load_on_startup,
                    stop_seconds=preset.stop_seconds,
                )
            )
        _refuse_clashes(entries)
        taken = {word for entry in entries for word in (entry.name, *entry.aliases)}
        for i, entry in enumerate(entries):
            if entry.name in cached:
                path, alias = cached[entry.name]
                more = (alias,) if alias and alias not in taken else ()
                entries[i] = replace(entry, aliases=(*entry.aliases, *more), hidden=path.resolve() in hidden)
        return entries


def _refuse_clashes(entries: Sequence[Entry]) -> None:
    owners = {entry.name: entry.name for entry in entries}
    for entry in entries:
        for alias in entry.aliases:
            if owners.setdefault(alias, entry.name) != entry.name or alias == entry.name:
                raise CatalogError(f"[{entry.name}] alias {alias!r}: is the name of [{owners[alias]}]")

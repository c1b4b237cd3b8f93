"""Output files of commands, checked before hours of work instead of after."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from logitless.cli.flags.flags import CliError, UsageError
from logitless.models.atomic_write import part_of


def check_output(path: str | Path, flag: str, others: Iterable[tuple[str, str | Path | None]] = ()) -> None:
    """CliError: the file cannot be created, or is the file of another flag.

    A file is written beside its name and then takes it, so a device (/dev/null) or a folder would be replaced.
    """
    for other, name in others:
        if name and _files(name) & _files(path):
            raise CliError(f"{flag}: {path} is the file of {other}, and would take its place")
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise CliError(f"{folder}: no such folder")
    if Path(path).exists() and not Path(path).is_file():
        raise CliError(f"{path}: is not a regular file")
    part = part_of(path)
    try:
        part.touch()
        part.unlink()
    except OSError as error:
        raise CliError(f"{path}: cannot be written: {error.strerror}") from None


def _files(path: str | Path) -> set[str]:
    """Names that identify a file; parts of one split model count as one."""
    names = {os.path.abspath(path), os.path.realpath(path)}
    return {re.sub(r"-\d{5}(-of-\d{5}\.gguf)$", r"\1", name) for name in names}


def checked_type(name: str) -> str:
    """The preset of --output-type. UsageError: it is not written here."""
    from logitless.models.quantization.presets import PresetError, preset

    try:
        return preset(name)
    except PresetError as error:
        raise UsageError(f"--output-type: {error}") from None

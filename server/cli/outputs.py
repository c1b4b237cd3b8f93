"""Files that a command will write: whether it can is better known before hours of work than after."""

from __future__ import annotations

import tempfile
from pathlib import Path

from server.cli.flags import CliError


def check_output(path: str) -> None:
    """CliError: no file of this name can be made there.

    A file is written beside its name and then takes it, so a device (/dev/null) or a folder would be replaced.
    """
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise CliError(f"{folder}: no such folder")
    if Path(path).exists() and not Path(path).is_file():
        raise CliError(f"{path}: is not a regular file")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise CliError(f"{path}: cannot be written: {error.strerror}") from None

"""Errors of the Python API: one line each, which names the option, field, file or device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager


class Error(Exception):
    """Base of every error that this package raises on purpose."""


class OptionError(Error):
    """An option has a value that cannot be used, or that does not fit the model or the machine."""


class ModelError(Error):
    """A model's file is missing, damaged, or of a kind that is not supported."""


class DeviceError(Error):
    """A device cannot be opened, has no room, or was lost."""


class RequestError(Error):
    """A request cannot be served; the line names its field. `code` is HTTP's status for it."""

    def __init__(self, message: str, code: int = 400) -> None:
        super().__init__(message)
        self.code = code


class TrainingError(Error):
    """Data or settings of a training run cannot be used."""


class FileError(Error, OSError):
    """A file or folder is missing, or cannot be read or written."""


@contextmanager
def public_errors() -> Iterator[None]:
    """Raise the errors of the engine as those of the API."""
    from logitless.backends import errors as devices
    from logitless.cli.flags.flags import CliError
    from logitless.engine import errors as requests
    from logitless.engine.batch import StepFailed
    from logitless.engine.loading import options
    from logitless.models.errors import ModelFileError
    from logitless.models.quantization.presets import PresetError
    from logitless.training import errors as training

    try:
        yield
    except (options.OptionError, CliError, PresetError) as error:
        raise OptionError(_in_python(str(error))) from None
    except ModelFileError as error:
        raise ModelError(str(error)) from None
    except (devices.DeviceError, devices.DeviceLost, StepFailed) as error:
        raise DeviceError(_in_python(str(error))) from None
    except MemoryError as error:
        raise DeviceError(_in_python(f"out of memory{f' ({error})' if str(error) else ''}")) from None
    except requests.RequestError as error:
        raise RequestError(_in_python(error.message), error.code) from None
    except training.TrainingError as error:
        raise TrainingError(_in_python(str(error))) from None
    except UnicodeEncodeError as error:
        raise Error(f"a text has a lone surrogate, {error.object[error.start]!a}") from None
    except OSError as error:
        if error.filename is None:
            raise
        raise FileError(f"{error.filename}: {(error.strerror or 'cannot be used').lower()}") from None


def _in_python(message: str) -> str:
    """A message with options as keywords: `--ctx-size` is `ctx_size`. Names of files stay as they are."""
    return re.sub(r"(?<![^\s(])--([a-z][a-z0-9-]+)(?!\.\w|[\w/])", lambda flag: flag[1].replace("-", "_"), message)

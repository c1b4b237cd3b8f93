"""TrainingError: a training run that cannot start or go on."""

from __future__ import annotations


class TrainingError(ValueError):
    """The data, the settings or a checkpoint cannot be used; one line that names the file, field or
    flag."""

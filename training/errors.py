"""What can be wrong with a training run, as one exception."""

from __future__ import annotations


class TrainingError(ValueError):
    """The data, the settings or a checkpoint cannot be used; one line that names the file, field or flag."""

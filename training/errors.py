"""Errors of training: a run that cannot start, and one whose numbers are not finite any more."""

from __future__ import annotations


class TrainingError(ValueError):
    """The data, the settings or a checkpoint cannot be used; one line that names the file, field or flag."""


class TrainingDiverged(TrainingError):
    """A loss, a gradient or a parameter is NaN or infinite. Nothing of such a state is written."""

"""Files that a training run writes: their names, and which steps they hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logitless.training.schedule import Stopping


def named(pattern: str, iteration: int, o: SimpleNamespace) -> list[Path]:
    """The files of a save: a name with ITERATION is written under the number and under LATEST, as llama.cpp's."""
    if not pattern:
        return []
    path = Path(pattern)
    if o.pattern_fn_it not in path.name:
        return [path]
    return [path.parent / path.name.replace(o.pattern_fn_it, text) for text in (str(iteration), o.fn_latest)]


def newest(pattern: str, o: SimpleNamespace) -> Path | None:
    """The last file that `named` writes."""
    return next(reversed(named(pattern, 0, o)), None)


class TrainingFiles:
    """Results and checkpoints of a run. From the first validation on, a result is written where the
    validation loss is the lowest so far; a name with ITERATION also at each save, as checkpoints are."""

    def __init__(
        self,
        o: SimpleNamespace,
        output: str,
        stopping: Stopping,
        save_result: Callable[[Path], None],
        save_checkpoint: Callable[[Path], None],
    ) -> None:
        """`stopping`: of the run, which knows the step with the lowest validation loss (0: none yet)."""
        self._o, self._output, self._stopping = o, output, stopping
        self._save_result, self._save_checkpoint = save_result, save_checkpoint
        self._steps: dict[Path, int] = {}  # of each file
        best = self._best
        if stopping.best_step and best.exists():  # the run goes on from a checkpoint
            self._steps[best] = stopping.best_step

    @property
    def _best(self) -> Path:
        """The result with the lowest validation loss."""
        return named(self._output, self._stopping.best_step, self._o)[0]

    def validated(self, step: int) -> None:
        """Write the result after a validation, if its loss is the lowest."""
        if step == self._stopping.best_step:
            self._write(self._best, step, self._save_result)

    def save(self, step: int) -> None:
        """Write the files of a save."""
        best = self._steps.get(self._best)
        for path in named(self._output, step, self._o):
            if path != self._best or best is None or best != self._stopping.best_step:
                self._write(path, step, self._save_result)
        for path in named(self._o.checkpoint_out, step, self._o):
            self._write(path, step, self._save_checkpoint)

    def _write(self, path: Path, step: int, save: Callable[[Path], None]) -> None:
        save(path)
        self._steps[path] = step

    def best(self, step: int) -> str:
        """The file of the lowest validation loss, where the last `step` is another one; else ""."""
        best = self._stopping.best_step
        return str(self._best) if best < step and self._steps.get(self._best) == best else ""

    @property
    def last_good(self) -> str:
        """The newest state on disk and the result with the lowest validation loss, for a run that diverges."""
        if not self._steps:
            return "nothing was written"
        last = max(self._steps.values())
        files = ", ".join(str(path) for path, step in self._steps.items() if step == last)
        best = self.best(last)
        result = f"; the result is that of step {self._stopping.best_step}: {best}" if best else ""
        return f"the last good state is that of step {last}: {files}{result}"

"""Progress of a run as text: a bar on terminals, one line a step in files. Clocks are injected."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial

from logitless.training.reporting.results import Result
from logitless.training.trainer import Encoding, Event, Measuring, Step, Validated, Validating

WIDTH = 8  # characters of the bar
COLUMNS = 80
GAIN = 0.7  # of the newest step in the smoothed time per step
_MEASURES = ("reward_accuracy", "reward_margin", "mean_reward", "kl")  # beside the loss
_PLOTTED = ("reward_accuracy", "mean_reward")  # of numbers between 0 and 1, or about
_BLOCKS = " ▏▎▍▌▋▊▉█"


def bar(done: float, total: float) -> str:
    """|███▌    |"""
    eighths = round(8 * WIDTH * min(1.0, max(0.0, done / total if total else 0.0)))
    full, rest = divmod(eighths, 8)
    text = "█" * full + (_BLOCKS[rest] if rest else "")
    return f"|{text:<{WIDTH}}|"


def clock(seconds: float) -> str:
    """1:02:03, or 2:03 below an hour; -:-- if unknown."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def uncertain(value: float, uncertainty: float, digits: int) -> str:
    """1.234±0.005; without the second part if unknown."""
    if math.isnan(uncertainty):
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f}±{uncertainty:.{digits}f}"


# forms of a line, the longest first: digits of the loss, uncertainties, parts that are left out
_FORMS: tuple[tuple[int, bool, frozenset[str]], ...] = (
    (4, True, frozenset()),
    (3, True, frozenset()),
    (4, True, frozenset(("t",))),
    (3, True, frozenset(("t",))),
    (2, True, frozenset(("t",))),
    (2, True, frozenset(("t", "speed"))),
    (2, False, frozenset(("t", "speed"))),
    (2, False, frozenset(("t", "speed", "bar"))),
    (2, False, frozenset(("t", "speed", "bar", "acc"))),
    (2, False, frozenset(("t", "speed", "bar", "acc", "eta"))),
)


def status(
    name: str,
    count: tuple[int, int],
    result: Result,
    elapsed: float,
    eta: float,
    speed: float = 0.0,
    norm: float | None = None,
    columns: int = COLUMNS,
) -> str:
    """One line of at most so many columns. `count`: samples done, and all.

    If it is too long, digits of the loss go first, then the elapsed time, and so on; the loss and the gradient's `norm`
    stay."""
    unknown = math.nan
    for digits, spread, without in _FORMS:
        loss = uncertain(result.loss, result.loss_uncertainty if spread else unknown, digits)
        acc = uncertain(100 * result.accuracy, 100 * result.accuracy_uncertainty if spread else unknown, 1)
        parts = {"bar": bar(*count), "data": f"data={count[0]}/{count[1]}"}
        if "mean_reward" in result.metrics:
            parts["loss"] = f"mean_reward={result.metrics['mean_reward']:.4f}"
        else:
            parts |= {"loss": f"loss={loss}", "acc": f"acc={acc}%"}
        if norm is not None:
            parts["norm"] = f"norm={norm:.3g}"
        parts |= {"t": f"t={clock(elapsed)}", "eta": f"ETA={clock(eta)}"}
        if speed:
            parts["speed"] = f"{speed:.0f} tok/s"
        line = " ".join([f"{name}:", *(text for part, text in parts.items() if part not in without)])
        if len(line) <= columns:
            break
    return line[:columns]


class Reporter:
    """Text lines of a run's events: `write(text, final)`; lines that are not final may be overwritten."""

    def __init__(
        self,
        write: Callable[[str, bool], None],
        *,
        terminal: bool,
        now: Callable[[], float] = time.monotonic,
        columns: Callable[[], int] = lambda: COLUMNS,
    ) -> None:
        """`columns`: the most that a line may have on a terminal."""
        self.write, self.terminal, self._now, self._columns = write, terminal, now, columns
        self._began = now()
        self._last = self._began
        self._per_step = math.nan
        self._saving = 0.0  # seconds since the last step that were no training
        self._validation_began = 0.0
        self._n_validated = 0
        self._sample = 0  # of its epoch, at the last step
        self.first_loss = math.nan
        self.losses: list[tuple[int, float]] = []
        self.validations: list[tuple[int, float]] = []
        self._metrics: dict[str, list[tuple[int, float]]] = {}

    @property
    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Points of a plot by name. The loss of a method that learns from rewards tells nothing."""
        losses = {"training": self.losses, "validation": self.validations}
        return self._metrics if "mean reward" in self._metrics else {**losses, **self._metrics}

    @property
    def elapsed(self) -> float:
        return self._now() - self._began

    def __call__(self, event: Event) -> None:
        if isinstance(event, Step):
            self._step(event)
        elif isinstance(event, Encoding):
            if self.terminal or event.medium == event.n_media:
                text = f"images and sounds: {event.medium}/{event.n_media} are encoded"
                self.write(text, event.medium == event.n_media)
            self._last = self._now()
        elif isinstance(event, Measuring):
            if self.terminal or event.sample == event.n_samples:
                text = f"reference: {event.sample}/{event.n_samples} windows are measured"
                self.write(text, event.sample == event.n_samples)
            if event.sample == event.n_samples:
                self._last = self._now()
        elif isinstance(event, Validating):
            if not self._validation_began:
                self._validation_began = self._now()
            spent = self._now() - self._validation_began
            self._n_validated = event.n_samples
            if self.terminal:
                eta = spent / event.sample * (event.n_samples - event.sample)
                line = partial(status, "val", (event.sample, event.n_samples), event.result, spent, eta, 0.0, None)
                self._show(line, final=False)
        elif isinstance(event, Validated):
            spent = self._now() - self._validation_began
            self.outside(spent)
            self._validation_began = 0.0
            self.validations.append((event.iteration, event.result.loss))
            self._plot("validation ", event.iteration, event.result.metrics)
            n = self._n_validated
            self._show(partial(status, "val", (n, n), event.result, spent, 0.0, 0.0, None))

    def _show(self, line: Callable[[int], str], *, final: bool = True) -> None:
        """Write `line(columns)`; in a file it may be as wide as on most terminals."""
        self.write(line(min(COLUMNS, self._columns()) if self.terminal else COLUMNS), final)

    def outside(self, seconds: float) -> None:
        """Exclude seconds of saving or validating from the time of a step."""
        self._saving += seconds

    def _step(self, e: Step) -> None:
        now = self._now()
        spent = max(now - self._last - self._saving, 1e-9)
        self._last, self._saving = now, 0.0
        self._per_step = spent if math.isnan(self._per_step) else GAIN * spent + (1 - GAIN) * self._per_step
        eta = self._per_step * (e.n_steps - e.iteration)
        self.losses.append((e.iteration, e.loss))
        self._plot("", e.iteration, e.metrics)
        if math.isnan(self.first_loss):
            self.first_loss = e.loss
        if self.terminal:
            ended = (
                e.sample >= e.n_samples or e.sample < self._sample
            )  # within this step, the rest of which is the next's
            done = e.n_samples if ended else e.sample
            elapsed, speed = now - self._began, e.n_tokens / spent
            line = partial(status, "train", (done, e.n_samples), e.result, elapsed, eta, speed, e.norm)
            self._show(line, final=ended)
            self._sample = 0 if e.sample >= e.n_samples else e.sample
        else:
            fallen = min(2.0, max(0.0, self.first_loss - e.loss))  # 0 where that is NaN
            gained = "-" * round(10 * fallen) + ">"
            words = "".join(
                f"{name.removeprefix('reward_')}={e.metrics[name]:.4f} " for name in _MEASURES if name in e.metrics
            )
            self.write(
                f"train: iter={e.iteration}/{e.n_steps} sample={e.sample}/{e.n_samples} sched={e.factor:.6f} "
                f"loss={e.loss:.6f} {words}norm={e.norm:.4g} dt={clock(spent)} eta={clock(eta)} |{gained}",
                True,
            )

    def _plot(self, of: str, iteration: int, metrics: Mapping[str, float]) -> None:
        for name in _PLOTTED:
            if name in metrics:
                words = of + name.removeprefix("reward_").replace("_", " ")
                self._metrics.setdefault(words, []).append((iteration, metrics[name]))

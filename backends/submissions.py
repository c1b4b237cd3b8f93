"""Submissions of GPU programs: launches in groups of bounded duration.

Windows ends a submission after 2 s and Linux' amdgpu after 10 s, so a program's launches are cut
into submissions of at most `MAX_SECONDS`, which the device runs one after the other. The duration
of a new program is estimated by rates of the device, that of an older one was measured.
Preemptible plans cut finer (graph/execution/preemptible_plan.py), by the same function."""

from __future__ import annotations

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from logitless.backends.gpu.language.dialect import KERNELS
from logitless.backends.gpu.lowering import Dispatch
from logitless.graph.execution.cost import cost_without_feeds
from logitless.graph.tensor import Tensor

MAX_SECONDS = 0.1  # of a submission
LAUNCH_SECONDS = 5e-6  # of a launch beside its work
TOLERANCE = 1.5  # of MAX_SECONDS, before a program is cut anew
LEAST_SECONDS = 0.005  # of a run from which rates are learnt
MAX_STEP = 16.0  # factor by which one run changes a rate
BLOCKED = 0.1  # fraction of a run that the host waited for its end: the end was seen
P = TypeVar("P", bound="DeviceProgram")


class SubmittedWork(NamedTuple):
    """Bytes that launches move, their multiply-adds, and their number."""

    nbytes: float = 0
    macs: float = 0
    n: int = 0


@dataclass
class Rates:
    """Seconds of a device for a byte and for a multiply-add: at first those of a slow GPU.

    `compiles_late`: a program's first run compiles its kernels and tells nothing (PoCL, lavapipe)."""

    byte: float = 1 / 5e9
    mac: float = 1 / 2e11
    compiles_late: bool = False

    def seconds(self, work: SubmittedWork) -> float:
        return work.nbytes * self.byte + work.macs * self.mac + work.n * LAUNCH_SECONDS

    def learn(self, work: SubmittedWork, seconds: float) -> None:
        """Change both rates toward the duration of a run, each by its part of the estimate."""
        moving, computing = work.nbytes * self.byte, work.macs * self.mac
        estimate = moving + computing
        if not estimate or max(self.seconds(work), seconds) < LEAST_SECONDS:
            return
        ratio = max(seconds - work.n * LAUNCH_SECONDS, 0) / estimate
        ratio = min(max(ratio, 1 / MAX_STEP), MAX_STEP)
        self.byte *= ratio ** (moving / estimate)
        self.mac *= ratio ** (computing / estimate)


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch that is ready for a device, whose backend knows `content`.

    `seconds`: its expected duration. `separable`: other programs may run before it, since neither
    it nor a later launch reads what an earlier one left in the scratch memory. `groups`: its number
    of groups, of which `content.part(first, count)` is a launch; 1 where it cannot be divided."""

    content: Any
    work: SubmittedWork
    seconds: float
    separable: bool
    groups: int = 1

    def parts(self, most: float) -> list[Launch]:
        """Launches of at most so many seconds that do the same, where its groups allow it."""
        n = min(self.groups, math.ceil(self.seconds / most))
        if n < 2:
            return [self]
        ends = [self.groups * i // n for i in range(n + 1)]
        return [
            replace(
                self,
                content=self.content.part(first, end - first),
                seconds=self.seconds * (end - first) / self.groups,
                separable=self.separable and first == 0,
                groups=end - first,
            )
            for first, end in itertools.pairwise(ends)
        ]


class Submitted(Protocol):
    """A program that a device runs."""

    def ended(self, seconds: float) -> None:
        """Called after a run, with its duration."""


class Stopwatch:
    """Measures a device's runs, where one program at a time runs on it."""

    def __init__(self) -> None:
        self._program: Submitted | None = None
        self._n, self._began = 0, 0.0

    def start(self, program: Submitted) -> None:
        """Note that a program has been submitted."""
        self._program, self._n = program, self._n + 1
        if self._n == 1:
            self._began = time.perf_counter()

    def wait(self, wait: Callable[[], Any]) -> Any:
        """Call a function that waits for all that was submitted. Its result."""
        program, self._program, n, self._n = self._program, None, self._n, 0
        if program is None:
            return wait()
        before = time.perf_counter()
        result = wait()
        now = time.perf_counter()
        if n == 1 and now - before > BLOCKED * (now - self._began):
            program.ended(now - self._began)
        return result


def prepared(dispatches: Sequence[Dispatch], contents: Sequence[Any], rates: Rates) -> list[Launch]:
    """Launches with their expected durations. `contents`: of each, see `Launch`."""
    separable = _separable(dispatches)
    works = _works(dispatches)
    return [
        Launch(content, work, rates.seconds(work), alone, max(d.groups) if KERNELS[d.kernel].divisible else 1)
        for d, content, work, alone in zip(dispatches, contents, works, separable, strict=True)
    ]


def _works(dispatches: Sequence[Dispatch]) -> list[SubmittedWork]:
    """The work of a node counts for the first launch that writes its result."""
    counted: set[Tensor] = set()
    works = []
    for d in dispatches:
        work = SubmittedWork(n=1)
        for arg, (t, _) in zip(KERNELS[d.kernel].args, d.buffers, strict=True):
            if arg.access != "r" and t is not None and t not in counted and not t.is_leaf:
                counted.add(t)
                cost = cost_without_feeds(t)
                macs = cost.int8_macs + cost.f32_macs + cost.bf16_macs
                work = SubmittedWork(work.nbytes + cost.nbytes, work.macs + macs, 1)
        works.append(work)
    return works


def _separable(dispatches: Sequence[Dispatch]) -> list[bool]:
    """For each launch: no place of the scratch memory is read from here on before it is written."""
    live: set[int] = set()
    result = []
    for d in reversed(dispatches):
        scratch = [(arg, at) for arg, (t, at) in zip(KERNELS[d.kernel].args, d.buffers, strict=True) if t is None]
        live.difference_update(at for arg, at in scratch if arg.access == "w")
        live.update(at for arg, at in scratch if arg.access != "w")
        result.append(not live)
    return result[::-1]


def cut(launches: Sequence[Launch], most: float = MAX_SECONDS, *, anywhere: bool = False) -> list[list[Launch]]:
    """Launches in groups that take at most so many seconds, where a single one does not take longer.

    `anywhere`: no other program runs between the groups, so that scratch memory does not matter."""
    groups: list[list[Launch]] = []
    total = 0.0
    start = 0  # of the launches since the last place for a cut
    for i in range(1, len(launches) + 1):
        if i < len(launches) and not (anywhere or launches[i].separable):
            continue
        piece = list(launches[start:i])
        seconds = sum(launch.seconds for launch in piece)
        if not groups or total + seconds > most:
            groups.append([])
            total = 0.0
        groups[-1] += piece
        total += seconds
        start = i
    return groups


def scaled(launches: Sequence[Launch], seconds: float) -> list[Launch]:
    """Launches with new durations, whose sum is `seconds`."""
    factor = seconds / (sum(launch.seconds for launch in launches) or 1.0)
    return [replace(launch, seconds=launch.seconds * factor) for launch in launches]


def split(
    programs: Sequence[P], seconds: Sequence[float], most: float, program: Callable[[Sequence[Launch]], P]
) -> list[P]:
    """The launches of programs that took so many seconds each, as programs of at most `most` seconds."""
    pairs = zip(programs, seconds, strict=True)
    parts = cut([launch for p, took in pairs for launch in scaled(p.launches, took)], most)
    return list(programs) if len(parts) == len(programs) == 1 else list(map(program, parts))


class Submissions:
    """The launches of a program in submissions, cut anew where their durations turn out otherwise."""

    def __init__(self, launches: Sequence[Launch], rates: Rates) -> None:
        self.launches, self._rates = list(launches), rates
        self.expect_compilation()
        self.work = (
            SubmittedWork(*map(sum, zip(*(launch.work for launch in launches), strict=True)))
            if launches
            else SubmittedWork()
        )
        self._cut()

    def _cut(self) -> None:
        self.groups = cut([part for launch in self.launches for part in launch.parts(MAX_SECONDS)], anywhere=True)
        durations = [sum(launch.seconds for launch in group) for group in self.groups]
        self._expected, self._longest = sum(durations), max(durations, default=0.0)

    def expect_compilation(self) -> None:
        """The next run may compile a kernel."""
        self._compiles = self._rates.compiles_late

    def measured(self, seconds: float) -> bool:
        """Note the duration of a run. True if `groups` have changed."""
        if self._compiles:
            self._compiles = False
            return False
        self._rates.learn(self.work, seconds)
        longest = self._longest * seconds / (self._expected or 1.0)
        too_many = len(self.groups) > 2 * seconds / MAX_SECONDS + 1
        if longest <= TOLERANCE * MAX_SECONDS and not too_many:
            return False
        before = [len(group) for group in self.groups]
        self.launches = scaled(self.launches, seconds)
        self._cut()
        return [len(group) for group in self.groups] != before


class DeviceProgram(ABC):
    """A program of launches. A run takes its submissions as the device wants them, for the variant
    (gpu/lowering.py) that its values need; those of a variant are made at its first use."""

    def __init__(self, backend: Any, launches: Sequence[Launch]) -> None:
        self._backend = backend
        self._submissions = Submissions(launches, backend.rates)
        self._number = next((c.number for c in (launch.content for launch in launches) if c.number is not None), None)
        self._ready: dict[int, list[Any]] = {}  # submissions by the variant
        self.prepare(backend.variant if self._number is not None else 0)

    @property
    def launches(self) -> Sequence[Launch]:
        return self._submissions.launches

    @abstractmethod
    def submission(self, launches: Sequence[Launch], variant: int) -> Any:
        """Launches as the device takes them; those that have variants are of this one."""

    def prepare(self, variant: int) -> list[Any]:
        """Make the submissions of this variant."""
        others = next(iter(self._ready.values()), ())
        ready = []
        for i, group in enumerate(self._submissions.groups):
            varies = any(launch.content.number is not None for launch in group)
            ready.append(self.submission(group, variant) if varies or not others else others[i])
        self._ready[variant] = ready  # only now: a driver may be out of memory for one of them
        return ready

    def of_run(self) -> list[Any]:
        """The submissions of a run."""
        variant = 0
        if self._number is not None:
            self._backend.variant = variant = self._number()
        ready = self._ready.get(variant)
        if ready is None:  # a new variant, or the durations have changed
            if self._ready:
                self._submissions.expect_compilation()
            ready = self.prepare(variant)
        return ready

    def ended(self, seconds: float) -> None:
        if self._submissions.measured(seconds):
            self._ready = {}

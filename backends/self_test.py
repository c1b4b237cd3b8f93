"""Self-test of devices at start: ops that a device computes wrongly run on the next device.

Drivers are wrong now and then, on one device and not on another. The ops of a graph run on small
cases from the registry and are compared with their float64 reference, for two seconds at most; the
rest is left for idle time or the next start. Results are cached by kind of node for as long as
device, driver and kernels stay the same: a wrong value and a kernel that the driver refuses, but
not what a lack of memory or a busy driver prevented."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from logitless.backends import disk_cache
from logitless.backends.errors import DeviceLost, KernelRefused
from logitless.graph.backend import Backend, Kind
from logitless.graph.execution.session import Session
from logitless.graph.op import OPS
from logitless.graph.order import toposort
from logitless.graph.tensor import ALIASES, Tensor
from logitless.graph.testing.conformance import OK, UNSUPPORTED, Problem, problems, register_all, run

log = logging.getLogger("logitless.devices")
MAX_SECONDS = 2.0
MAX_TRIES = 3  # of a case that lack of memory or a busy driver prevents
Failures = dict[str, str]  # op → reason
Part = tuple[str, tuple[str, ...], int]  # a kind of node, and a variant of its kernels


class SelfTest:
    """Self-test of a device on kinds of nodes, in their order: one case of each, then the others.

    Ops that fail are refused by the device from then on."""

    def __init__(self, backend: Backend, kinds: Iterable[Kind], *, in_use: bool = False) -> None:
        """Take over the cached results; their failures count at once.

        `in_use`: variants of kernels after the first are not tested before `use`."""
        register_all()
        self.backend = backend
        self.failures: Failures = {}
        self._path = disk_cache.cache_folder() / "trust" / _digest(backend)
        results = self._cached()
        self._new: dict[str, str] = {}  # results by label of a kind, "": right
        self._tries = 0
        self._waiting: deque[tuple[Part, Iterator[Problem], Problem | None]] = deque()
        self.unused: set[Part] = set()
        for part in (part for kind in dict.fromkeys(kinds) for part in _parts(kind)):
            reason = results.get(_label(part))
            if reason:
                self.failures[part[0]] = reason
            elif reason is None and in_use and part[2]:
                self.unused.add(part)
            elif reason is None:
                self._waiting.append((part, _cases(part), None))
        backend.refuse(self.failures)

    def use(self, variant: int) -> bool:
        """Test this variant of kernels from now on, and first. False: it was tested, or will be."""
        parts = [part for part in self.unused if part[2] == variant]
        self.unused.difference_update(parts)
        self._waiting.extendleft((part, _cases(part), None) for part in parts)
        return bool(parts)

    @property
    def untested(self) -> list[str]:
        """The ops with cases that have not run."""
        return sorted({part[0] for part, _, _ in self._waiting})

    def run(self, seconds: float) -> bool:
        """Test for so long, at least one case; True: all are done. Raises DeviceLost."""
        end = time.perf_counter() + seconds
        try:
            while self._waiting:
                self._test_one()
                if time.perf_counter() > end:
                    break
        finally:
            self._save()
        return not self._waiting

    def _test_one(self) -> None:
        part, cases, problem = self._waiting.popleft()
        problem = problem or next(cases, None)
        if part[0] in self.failures:
            return
        if problem is None:
            self._new[_label(part)] = ""
            return
        try:
            outcome = run(problem, [self.backend])
        except DeviceLost:
            raise
        except KernelRefused as error:
            self._fail(part, f"{problem.label}: {error}", lasts=True)
        except (MemoryError, OSError) as error:
            self._tries += 1
            if self._tries < MAX_TRIES:
                self._waiting.append((part, cases, problem))
            else:
                log.warning("%s: %s is not tested: %s", self.backend.name, part[0], " ".join(str(error).split()))
                self._tries = 0
        except Exception as error:
            self._fail(part, f"{problem.label}: {type(error).__name__}: {error}", lasts=False)
        else:
            self._tries = 0
            if outcome.status in (OK, UNSUPPORTED):
                self._waiting.append((part, cases, None))
            else:
                self._fail(part, f"{outcome.case}: {outcome.detail or outcome.status}", lasts=True)

    def _fail(self, part: Part, reason: str, *, lasts: bool) -> None:
        """`lasts`: the next start need not try again."""
        reason = " ".join(reason.split())
        self.failures[part[0]] = reason
        self.backend.refuse([part[0]])
        if lasts:
            self._new[_label(part)] = reason

    def _cached(self) -> dict[str, str]:
        content = disk_cache.read(self._path) if self.backend.identity else b""
        try:
            results = json.loads(content or b"{}")
        except ValueError:
            results = {}
        return results if isinstance(results, dict) else {}  # another version's file counts as none

    def _save(self) -> None:
        if self._new and self.backend.identity:
            disk_cache.write(self._path, json.dumps(self._cached() | self._new).encode())
            self._new = {}


def run_self_test(backend: Backend, nodes: Iterable[Tensor], seconds: float = MAX_SECONDS) -> Failures:
    """Self-test the ops of these nodes; return the failed ones, which the device refuses from now on."""
    return _test_nodes(backend, nodes, seconds)[0]


def self_test_kinds(backend: Backend, kinds: Iterable[Kind], seconds: float = MAX_SECONDS) -> Failures:
    """Self-test kinds of nodes: failed ops, refused from now on. Unsupported kinds do not fail."""
    return _test_kinds(backend, kinds, seconds)[0]


def self_test_session(session: Session, fetches: Sequence[Tensor]) -> tuple[Failures, list[SelfTest]]:
    """Self-test every device but the last, which is complete, and log ops that fail: failures, and the
    tests that had no time to end, or have variants of kernels that nobody uses yet.

    Tested are the ops of the graph as it stands, and those that devices replace them by."""
    nodes = [*toposort(fetches), *session.place(fetches).order]
    failures: Failures = {}
    unfinished = []
    for backend in session.backends[:-1]:
        failed, test = _test_nodes(backend, nodes, MAX_SECONDS)
        log_failures(backend, failed)
        failures |= failed
        if test is not None and (test.untested or test.unused):
            unfinished.append(test)
        if test is not None and test.untested:
            log.info("%s: not tested yet: %s", backend.name, ", ".join(test.untested))
    return failures, unfinished


def log_failures(backend: Backend, failures: Failures) -> None:
    """A warning for each op that failed."""
    for op, reason in failures.items():
        log.warning("%s failed the self-test of %s (%s): it runs on the next device", backend.name, op, reason)


def _test_nodes(backend: Backend, nodes: Iterable[Tensor], seconds: float) -> tuple[Failures, SelfTest | None]:
    computed = [t for t in nodes if not t.is_leaf and t.op not in ALIASES]
    failures = backend.self_test(sorted(set(map(_kind, computed))))
    if failures is not None:
        return failures, None
    return _test_kinds(backend, [_kind(t) for t in computed if backend.supports(t)], seconds, in_use=True)


def _test_kinds(
    backend: Backend, kinds: Iterable[Kind], seconds: float, *, in_use: bool = False
) -> tuple[Failures, SelfTest | None]:
    if not backend.self_tested:
        return {}, None
    test = SelfTest(backend, kinds, in_use=in_use)
    if seconds > 0:
        test.run(seconds)
    return test.failures, test


def _kind(t: Tensor) -> Kind:
    return t.op, tuple(s.dtype for s in t.src)


def _parts(kind: Kind) -> list[Part]:
    variants = OPS[kind[0]].variants if kind[0] in OPS else None
    return [(*kind, i) for i in range(variants.n if variants is not None else 1)]


def _label(part: Part) -> str:
    return " ".join((part[0], *part[1], *([f"variant {part[2]}"] if part[2] else [])))


def _digest(backend: Backend) -> str:
    digest = hashlib.sha256(backend.identity.encode())
    for source in sorted((Path(__file__).parent / "gpu").rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def _cases(part: Part) -> Iterator[Problem]:
    """The registry's cases of a part: none for types that no case has."""
    op, dtypes, variant = part
    variants = OPS[op].variants
    if not OPS[op].cases:
        return
    for problem in problems(op):
        src = problem.roots[0].src
        needs = 0 if variants is None else variants.number(problem.feeds[src[variants.source].name])
        if tuple(s.dtype for s in src) == dtypes and needs == variant:
            yield problem

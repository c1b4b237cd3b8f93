"""Self-test of devices at start: ops that a device computes wrongly run on the next device.

Drivers are wrong now and then, on one device and not on another. The ops of a graph run on small
cases from the registry and are compared with their float64 reference, for two seconds at most.
Results are cached for as long as device, driver and kernels stay the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from logitless.backends import disk_cache
from logitless.backends.errors import DeviceLost
from logitless.graph.backend import Backend, Kind
from logitless.graph.execution.session import Session
from logitless.graph.op import OPS
from logitless.graph.order import toposort
from logitless.graph.tensor import ALIASES, Tensor
from logitless.graph.testing.conformance import OK, UNSUPPORTED, Problem, problems, register_all, run

log = logging.getLogger("logitless.devices")
MAX_SECONDS = 2.0
Failures = dict[str, str]  # op → reason


def run_self_test(backend: Backend, nodes: Iterable[Tensor], seconds: float = MAX_SECONDS) -> Failures:
    """Self-test the ops of these nodes; return the failed ones, which the device refuses from now on."""
    computed = [t for t in nodes if not t.is_leaf and t.op not in ALIASES]
    failures = backend.self_test(sorted(set(map(_kind, computed))))
    if failures is not None:
        return failures
    return self_test_kinds(backend, {_kind(t) for t in computed if backend.supports(t)}, seconds)


def self_test_kinds(backend: Backend, kinds: Iterable[Kind], seconds: float = MAX_SECONDS) -> Failures:
    """Self-test kinds of nodes: failed ops, refused from now on. Unsupported kinds do not fail."""
    if not backend.self_tested:
        return {}
    kinds = sorted(kinds)
    path = disk_cache.cache_folder() / "trust" / _digest(backend, kinds)
    failures = _cached(path) if backend.identity else None
    if failures is None:
        failures, complete = _test(backend, kinds, time.perf_counter() + seconds)
        if backend.identity and complete:
            disk_cache.write(path, json.dumps(failures).encode())
    backend.refuse(failures)
    return failures


def self_test_session(session: Session, fetches: Sequence[Tensor]) -> Failures:
    """Self-test every device but the last, which is complete, and log ops that fail.

    Tested are the ops of the graph as it stands, and those that devices replace them by.
    """
    nodes = [*toposort(fetches), *session.place(fetches).order]
    failures: Failures = {}
    for backend in session.backends[:-1]:
        for op, reason in run_self_test(backend, nodes).items():
            log.warning("%s failed the self-test of %s (%s): it runs on the next device", backend.name, op, reason)
            failures[op] = reason
    return failures


def _kind(t: Tensor) -> Kind:
    return t.op, tuple(s.dtype for s in t.src)


def _cached(path: Path) -> Failures | None:
    content = disk_cache.read(path)
    failures: Failures | None = json.loads(content) if content else None
    return failures


def _digest(backend: Backend, kinds: list[Kind]) -> str:
    digest = hashlib.sha256(f"{backend.identity}\0{kinds}".encode())
    for source in sorted((Path(__file__).parent / "gpu").rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def _test(backend: Backend, kinds: list[Kind], end: float) -> tuple[Failures, bool]:
    """Test one case of each kind, then the others: failures, and whether all were done by `end`."""
    register_all()
    failures: Failures = {}
    waiting = [_cases(kind) for kind in kinds]
    while waiting:
        for cases in list(waiting):
            problem = next(cases, None)
            if problem is None or problem.op in failures:
                waiting.remove(cases)
                continue
            if time.perf_counter() > end:
                return failures, False
            try:
                outcome = run(problem, [backend])
            except DeviceLost:
                raise
            except Exception as error:
                failures[problem.op] = f"{problem.label}: {type(error).__name__}: {error}".replace("\n", " ")
            else:
                if outcome.status not in (OK, UNSUPPORTED):
                    failures[problem.op] = f"{outcome.case}: {outcome.detail or outcome.status}"
    return failures, True


def _cases(kind: Kind) -> Iterator[Problem]:
    """The registry's cases of a kind: none for types that no case has."""
    op, dtypes = kind
    if not OPS[op].cases:
        return
    for problem in problems(op):
        if tuple(s.dtype for s in problem.roots[0].src) == dtypes:
            yield problem

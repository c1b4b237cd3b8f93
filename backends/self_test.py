"""A quick test of a device before it serves: what it computes wrongly is left to the next one.

Drivers are wrong now and then, on one device and not on another. The ops of a graph are tried on small cases from the
registry, against their float64 reference, for two seconds at most; the result is kept for as long as device, driver and
kernels stay the same.
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
SECONDS = 2.0


def examine(backend: Backend, nodes: Iterable[Tensor], seconds: float = SECONDS) -> dict[str, str]:
    """Ops of these nodes that the device gets wrong, and how; from now on it refuses them."""
    computed = [t for t in nodes if not t.is_leaf and t.op not in ALIASES]
    wrong = backend.self_test(sorted(set(map(_kind, computed))))
    if wrong is not None:
        return wrong
    return examine_kinds(backend, {_kind(t) for t in computed if backend.supports(t)}, seconds)


def examine_kinds(backend: Backend, wanted: Iterable[Kind], seconds: float = SECONDS) -> dict[str, str]:
    """The same of kinds of nodes; those that the device does not have are not wrong."""
    if not backend.self_tested:
        return {}
    kinds = sorted(wanted)
    path = disk_cache.cache_folder() / "trust" / _digest(backend, kinds)
    wrong = _kept(path) if backend.identity else None
    if wrong is None:
        wrong, complete = _try(backend, kinds, time.perf_counter() + seconds)
        if backend.identity and complete:
            disk_cache.write(path, json.dumps(wrong).encode())
    backend.refuse(wrong)
    return wrong


def examine_all(session: Session, fetches: Sequence[Tensor]) -> dict[str, str]:
    """The same for every device but the last, which is complete; what is wrong is told in the log, too.

    Tried are the ops of the graph as it stands, and those that devices put in their places.
    """
    nodes = [*toposort(fetches), *session.place(fetches).order]
    found: dict[str, str] = {}
    for backend in session.backends[:-1]:
        for op, why in examine(backend, nodes).items():
            log.warning("%s computes %s wrongly (%s): the next device does it", backend.name, op, why)
            found[op] = why
    return found


def _kind(t: Tensor) -> Kind:
    return t.op, tuple(s.dtype for s in t.src)


def _kept(path: Path) -> dict[str, str] | None:
    content = disk_cache.read(path)
    wrong: dict[str, str] | None = json.loads(content) if content else None
    return wrong


def _digest(device: Backend, kinds: list[Kind]) -> str:
    digest = hashlib.sha256(f"{device.identity}\0{kinds}".encode())
    for source in sorted((Path(__file__).parent / "gpu").rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def _try(device: Backend, kinds: list[Kind], end: float) -> tuple[dict[str, str], bool]:
    """What is wrong, and whether there was time for everything: one case of each kind first, then the others."""
    register_all()
    wrong: dict[str, str] = {}
    waiting = [_cases(kind) for kind in kinds]
    while waiting:
        for cases in list(waiting):
            problem = next(cases, None)
            if problem is None or problem.op in wrong:
                waiting.remove(cases)
                continue
            if time.perf_counter() > end:
                return wrong, False
            try:
                outcome = run(problem, [device])
            except DeviceLost:
                raise
            except Exception as error:
                wrong[problem.op] = f"{problem.label}: {type(error).__name__}: {error}".replace("\n", " ")
            else:
                if outcome.status not in (OK, UNSUPPORTED):
                    wrong[problem.op] = f"{outcome.case}: {outcome.detail or outcome.status}"
    return wrong, True


def _cases(kind: Kind) -> Iterator[Problem]:
    """The registry's cases of a kind. Types that are padded with others have none, and are not tried."""
    op, dtypes = kind
    if not OPS[op].cases:
        return
    for problem in problems(op):
        if tuple(s.dtype for s in problem.roots[0].src) == dtypes:
            yield problem

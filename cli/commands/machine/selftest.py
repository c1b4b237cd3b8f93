"""`logitless selftest`: compare a device's ops with their float64 references."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from logitless.cli.flags.flags import UsageError
from logitless.cli.progress import COMPILING, show_compiling
from logitless.cli.setup.model import choose_device, model_options

if TYPE_CHECKING:
    from logitless.engine.runner.model_runner import ModelRunner
    from logitless.graph.backend import Bytes
    from logitless.graph.tensor import Tensor
    from logitless.graph.testing.conformance import Outcome

SIZES = {"ctx_size": 128, "parallel": 2, "kv_unified": True, "batch_size": 64, "ubatch_size": 64, "swa_full": True}


def run(options: SimpleNamespace) -> int:
    from logitless.graph.testing.conformance import WRONG

    choose_device(options)
    outcomes = list(of_model(options) if options.model else of_registry(options))
    COMPILING.end()
    if options.json:
        ops = [
            {
                "op": o.op,
                "case": o.case,
                "status": o.status,
                "error": o.error if math.isfinite(o.error) else None,
                **({"detail": o.detail} if o.detail else {}),
            }
            for o in outcomes
        ]
        print(json.dumps({"device": options.device, "ops": ops}))
    else:
        print(as_text(outcomes))
    return 1 if any(o.status == WRONG for o in outcomes) else 0


def of_registry(options: SimpleNamespace) -> Iterator[Outcome]:
    """Every case of every op, or of the named ops."""
    from logitless.backends.registry import open_backends
    from logitless.graph.op import OPS
    from logitless.graph.testing.conformance import register_all, run_all

    register_all()
    for name in options.op:
        if name not in OPS:
            raise UsageError(f"--op: there is no op {name!r}; the ops are {', '.join(sorted(OPS))}")
    show_compiling()
    backends = open_backends(options.device.split(","), max(options.threads, 0))
    yield from run_all(backends[:1], options.op)


def of_model(options: SimpleNamespace) -> Iterator[Outcome]:
    """Each kind of node of the model's graph once, for steps of one token and of 32."""
    from logitless.engine.loading.open_model import open_engine
    from logitless.graph.testing.conformance import run
    from logitless.graph.testing.graph_cases import graph_problems

    show_compiling()
    engine = open_engine(options.model, model_options(options, **SIZES))
    done: set[tuple[str, str]] = set()

    def weight(name: str) -> Bytes | None:
        info = engine.gguf.tensors.get(name)
        return None if info is None else engine.gguf.bytes_of(name)

    for n_tokens in (1, 32):
        roots, feeds = step_graph(engine, n_tokens)
        for problem in graph_problems(roots, feeds, weight):
            if (problem.op, problem.label) not in done and (not options.op or problem.op in options.op):
                done.add((problem.op, problem.label))
                yield run(problem, engine.session.backends[:1])


def step_graph(engine: ModelRunner, n_tokens: int) -> tuple[list[Tensor], dict[str, Any]]:
    """The graph of a step of one sequence, and feeds that fit it."""
    from logitless.cli.commands.benchmark.bench import greedy
    from logitless.engine.batch import UBatch
    from logitless.engine.runner.buckets import StepShape
    from logitless.engine.runner.step_inputs import room_of
    from logitless.graph.order import toposort

    positions, n_out = list(range(n_tokens)), min(n_tokens, 4)
    batch = UBatch(
        tokens=[i % engine.hparams.n_vocab for i in positions],
        pos=positions,
        slot=[0] * n_tokens,
        slot_mapping=positions,
        out=positions[-n_out:],
        rows=[greedy()] * n_out,
        targets=[-1] * n_out,
        begin=[0, *[-1] * (n_tokens - 1)],
        end=[*[-1] * (n_tokens - 1), 1],
    )
    graph = engine.build(StepShape(n_tokens, n_out))
    room = room_of(toposort(graph))
    engine.step_feeds(room).write(batch)
    return graph, room


def as_text(outcomes: list[Outcome]) -> str:
    """One line per op, and one for each case that is wrong."""
    from logitless.graph.op import OPS
    from logitless.graph.testing.conformance import OK, UNSUPPORTED, WRONG

    rows: list[tuple[str, str, str, list[str]]] = []
    for name in dict.fromkeys(o.op for o in outcomes):
        of_op = [o for o in outcomes if o.op == name]
        counts = [f"{sum(o.status == s for o in of_op)} {s}" for s in (OK, WRONG, UNSUPPORTED)]
        summary = ", ".join(c for c in counts if not c.startswith("0 "))
        worst = max((o.error for o in of_op if o.status != UNSUPPORTED), default=0.0)
        limit = f"{OPS[name].tolerance:.0e}"
        if OPS[name].tolerance_quantised:
            limit += f" ({OPS[name].tolerance_quantised:.0e} with quantised weights)"
        wrong = [f"    wrong: {o.case}: {o.detail}" for o in of_op if o.status == WRONG]
        rows.append((name, summary, f"worst error {worst:.1e} of at most {limit}", wrong))
    widths = [2 + max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    lines = []
    for name, summary, error, wrong in rows:
        lines += [f"{name:<{widths[0]}}{summary:<{widths[1]}}{error}", *wrong]
    n_wrong = sum(o.status == WRONG for o in outcomes)
    lines.append(f"{len(outcomes)} cases, {n_wrong} wrong")
    return "\n".join(lines)

"""`logitless bench`: tokens per second of the engine, and the fraction of this machine's limit.

The limit of a run is the time that its bytes take at the machine's read bandwidth, or its multiply-adds at the peak,
whichever is longer; bandwidth and peaks are measured in the same process, on the same threads, before and after each
run, for a shared machine may read twice as fast a second later. Bytes are taken to come from memory: a model that stays
in the processor's cache can go beyond this limit, and its fraction means little."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from logitless.cli.commands.benchmark.limits import decode_work, prompt_work
from logitless.cli.commands.benchmark.ops import Ops, Profile, profiled, table_of
from logitless.cli.flags.flags import UsageError
from logitless.cli.progress import compile_progress
from logitless.cli.setup.model import model_options, model_path

if TYPE_CHECKING:
    from logitless.engine.batch import UBatch
    from logitless.engine.runner.model_runner import ModelRunner
    from logitless.engine.sampling.sampler import Row
    from logitless.graph.execution.cost import Cost

LONG = 6.0  # seconds after which a measurement is not repeated
Machine = dict[str, float]
Run = Callable[[], None]


def run(options: SimpleNamespace) -> int:
    report = measure(options)
    if options.json:
        print(json.dumps(report))
    else:
        show(report)
    return 0


def measure(options: SimpleNamespace) -> dict[str, Any]:
    """The machine's limits on the most threads, and a row for each test, batch and number of threads."""
    path = model_path(options, "bench")
    if not options.n_prompt and not options.n_gen:
        raise UsageError("bench: -p and -n are both 0")
    from logitless.backends.cores import cores

    rows: list[dict[str, Any]] = []
    machines: dict[int, Machine] = {}
    for n_threads in options.threads or [cores()]:
        bench = Bench(path, options, n_threads)
        for n_batch in options.batch:
            for test in bench.tests(options.n_prompt, options.n_gen, n_batch):
                test.warm_up()
                runs = bench.measured(test.once, options.repetitions)
                middle, fraction = runs[(len(runs) - 1) // 2], None
                if bench.alone:
                    fraction = round(statistics.median(run.fraction(test.cost) for run in runs), 4)
                row = {
                    "test": test.name,
                    "batch": n_batch,
                    "threads": n_threads,
                    "tok_s": round(test.n_tokens / middle.seconds, 2),
                    "limit_fraction": fraction,
                }
                limits = middle.limits if bench.alone else None
                rows.append(row | ({"ops": profiled(middle.ops, middle.seconds, limits)} if middle.ops else {}))
                note(f"{test.name} batch {n_batch} threads {n_threads}: {row['tok_s']:.1f} tokens/s")
        machines[n_threads] = mean(bench.limits_seen)
        bench.engine.close()
    return {"machine": machines[max(machines)], "rows": rows}


def mean(limits: list[Machine]) -> Machine:
    return {key: round(statistics.fmean(m[key] for m in limits), 2) for key in limits[0]}


@dataclass(frozen=True)
class Test:
    """A measured workload: `warm_up` makes its plans, `once` runs it."""

    name: str
    n_tokens: int
    cost: Cost
    warm_up: Run
    once: Run


@dataclass(frozen=True)
class Measurement:
    """One run of a test: its time, the machine's limits around it, and with --ops the time of each op."""

    seconds: float
    limits: Machine
    ops: Ops

    def fraction(self, cost: Cost) -> float:
        """Speed as a fraction of the machine's limit."""
        return max(cost.seconds(self.limits)) / self.seconds


class Bench:
    """An engine on `n_threads` threads; each slot has KV blocks of its own."""

    def __init__(self, path: Path, options: SimpleNamespace, n_threads: int) -> None:
        from logitless.backends.registry import cpu_peaks
        from logitless.engine.batch import BLOCK_SIZE
        from logitless.engine.loading.open_model import load_weights, open_engine

        n_slots = max(options.batch)
        self.depth: int = options.n_depth
        self.states: dict[int, int] = {}  # row of each slot's recurrent state
        self.n_blocks = (self.depth + max(options.n_prompt, options.n_gen)) // BLOCK_SIZE + 1  # of each slot
        settings = {
            "ctx_size": n_slots * self.n_blocks * BLOCK_SIZE,
            "parallel": n_slots,
            "kv_unified": True,
            "threads": n_threads,
            "threads_batch": None,
            "batch_size": options.ubatch_size,
            "swa_full": True,
        }
        self.row: Row | None = greedy()
        self.engine: ModelRunner = open_engine(path, model_options(options, **settings))
        self.profile: Profile | None = None
        if options.ops:
            self.profile = Profile()
            self.engine.session.observer = self.profile.add
        with compile_progress():
            load_weights(self.engine)
        self.peaks = cpu_peaks(self.engine.session.backends[-1])
        self.limits_seen: list[Machine] = []  # each measurement

    @property
    def alone(self) -> bool:
        """True if the CPU is the only device; the limits measured are the CPU's."""
        return len(self.engine.session.backends) == 1

    def limits(self) -> Machine:
        """The machine's limits at this moment, on the bench's threads."""
        self.limits_seen.append(self.peaks.measure())
        return self.limits_seen[-1]

    def measured(self, once: Run, repetitions: int) -> list[Measurement]:
        """The runs, the fastest first."""
        runs: list[Measurement] = []
        before = self.limits()
        while len(runs) < repetitions and sum(run.seconds for run in runs) < LONG:
            if self.profile is not None:
                self.profile.take()
            began = time.perf_counter()
            once()
            seconds = time.perf_counter() - began
            ops = self.profile.take() if self.profile is not None else {}
            after = self.limits()
            runs.append(Measurement(seconds, mean([before, after]), ops))
            before = after
        return sorted(runs, key=attrgetter("seconds"))

    def tests(self, n_prompt: int, n_gen: int, n_batch: int) -> Iterator[Test]:
        """Tests of this batch size, after a prefill of `depth` tokens."""
        if self.depth:
            self.prompts(self.depth, n_batch)
        behind = f" @ d{self.depth}" if self.depth else ""
        if n_prompt:
            cost, size = prompt_work(self.engine, n_prompt, n_batch, self.depth), self.engine.options.n_ubatch
            warm = min(n_batch, -(-size // n_prompt))  # one full step; a shorter one at the end has its own plan
            runs = [partial(self.prompts, n_prompt, n, self.depth) for n in (warm, n_batch)]
            yield Test(f"pp{n_prompt}{behind}", n_prompt * n_batch, cost, *runs)
        if n_gen:
            cost = decode_work(self.engine, n_gen, n_batch, self.depth)
            runs = [partial(self.decode, n, n_batch, self.depth) for n in (min(n_gen, 4), n_gen)]
            yield Test(f"tg{n_gen}{behind}", n_gen * n_batch, cost, *runs)

    def prompts(self, n_prompt: int, n_batch: int, depth: int = 0) -> None:
        """Prefill prompts of random tokens behind `depth` others, in steps of ubatch size."""
        todo = [(slot, depth + pos) for slot in range(n_batch) for pos in range(n_prompt)]
        size = self.engine.options.n_ubatch
        for start in range(0, len(todo), size):
            part = todo[start : start + size]
            last = [i for i, (_, pos) in enumerate(part) if pos == depth + n_prompt - 1]
            tokens = [(7919 * (i + start)) % self.engine.hparams.n_vocab for i in range(len(part))]
            self.engine.step(self.going_on(self.ubatch(tokens, part, last, first=start == 0)))

    def decode(self, n_gen: int, n_batch: int, depth: int = 0) -> None:
        """Decode greedily behind `depth` tokens, one token of every sequence a step."""
        from logitless.engine.batch import BLOCK_SIZE, UBatch
        from logitless.graph.ops.sampling.samplers import ID

        slots, rows, targets = list(range(n_batch)), [self.row] * n_batch, [-1] * n_batch
        tokens = [(7919 * slot) % self.engine.hparams.n_vocab for slot in slots]
        tables = self.tables()
        for pos in range(depth, depth + n_gen):
            cells = [slot * self.n_blocks * BLOCK_SIZE + pos for slot in slots]
            batch = UBatch(tokens, [pos] * n_batch, slots, cells, slots, rows, targets, tables=tables)
            tokens, tables = (self.engine.step(self.going_on(batch)).ids & ID).tolist(), {}

    def going_on(self, batch: UBatch) -> UBatch:
        """The batch with its recurrent states, if the model has such, continued from earlier steps."""
        if self.engine.states is not None:
            around = [None, *batch.slot, None]
            for i, slot in enumerate(batch.slot):
                first, last = around[i] != slot, around[i + 2] != slot
                batch.begin.append(self.states.get(slot, 0) if first and batch.pos[i] else -(not first))
                batch.end.append(1 + 2 * slot + (self.states.get(slot, 0) == 1 + 2 * slot) if last else -1)
            self.states |= {slot: row for slot, row in zip(batch.slot, batch.end, strict=True) if row > 0}
        return batch

    def tables(self) -> dict[int, list[int]]:
        """KV block ids of each slot."""
        n = self.n_blocks
        return {slot: list(range(slot * n, slot * n + n)) for slot in range(self.engine.options.n_slots)}

    def ubatch(self, tokens: list[int], part: list[tuple[int, int]], out: list[int], *, first: bool) -> UBatch:
        from logitless.engine.batch import BLOCK_SIZE, UBatch

        n = self.n_blocks
        return UBatch(
            tokens=tokens,
            pos=[pos for _, pos in part],
            slot=[slot for slot, _ in part],
            slot_mapping=[slot * n * BLOCK_SIZE + pos for slot, pos in part],
            out=out,
            rows=[self.row] * len(out),
            targets=[-1] * len(out),
            tables=self.tables() if first else {},
        )


def greedy() -> Row:
    """The row of a request with temperature 0."""
    from logitless.engine.sampling.params import MAX_CHAIN, SamplingParams
    from logitless.engine.sampling.sampler import Row, chain_codes, params_vector

    settings = SamplingParams(temperature=0.0)
    codes = chain_codes(settings)
    chain = np.zeros(MAX_CHAIN, np.int32)
    chain[: len(codes)] = codes
    return Row(params_vector(settings), chain, (0, 0, 0, 0))


def note(line: str) -> None:
    if sys.stderr.isatty():
        print(line, file=sys.stderr)


def show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    machine = report["machine"]
    console = Console()
    console.print(
        f"this machine: reads {machine['read_gb_s']:.1f} GB/s, multiplies and adds "
        + " or ".join(f"{machine[key]:.0f} G {key.partition('_')[0]}" for key in machine if key.endswith("gmac_s"))
        + " per second",
        soft_wrap=True,
    )
    table = Table("test", *("batch", "threads", "tokens/s", "of the limit"))
    for column in table.columns[1:]:
        column.justify = "right"
    for r in report["rows"]:
        share = "" if r["limit_fraction"] is None else f"{100 * r['limit_fraction']:.1f} %"
        table.add_row(r["test"], str(r["batch"]), str(r["threads"]), f"{r['tok_s']:.1f}", share)
    console.print(table)
    for r in report["rows"]:
        if "ops" in r:
            console.print(table_of(r))

"""`logitless bench`: tokens per second of the engine alone, and what part of this machine's limit that is.

The limit of a run is the time that its bytes take at the machine's read bandwidth, or its multiply-adds at the peak,
whichever is longer; bandwidth and peaks are measured in the same process, on the same threads. Bytes are taken to come
from memory: a model that stays in the processor's cache can go beyond this limit, and its fraction means little.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from server.cli import load
from server.cli.flags import UsageError
from server.cli.work import Work, decode_work, prompt_work

if TYPE_CHECKING:
    from server.engine import Engine
    from server.sampling import Row
    from server.ubatch import UBatch

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
    path = load.model_path(options, "bench")
    if not options.n_prompt and not options.n_gen:
        raise UsageError("bench: -p and -n are both 0")
    from backends.cpu.isa import cores

    rows: list[dict[str, Any]] = []
    machines: dict[int, Machine] = {}
    for n_threads in options.threads or [cores()]:
        bench = Bench(path, options, n_threads)
        seen = [bench.limits()]
        for n_batch in options.batch:
            for name, work, warm_up, once in bench.tests(options.n_prompt, options.n_gen, n_batch):
                warm_up()
                seconds = median_seconds(once, options.repetitions)
                seen.append(bench.limits())
                around = mean(seen[-2:])  # just before and just after: a shared machine drifts
                rows.append(
                    {
                        "test": name,
                        "batch": n_batch,
                        "threads": n_threads,
                        "tok_s": round(work.n_tokens / seconds, 2),
                        "limit_fraction": round(work.least_seconds(around) / seconds, 4),
                    }
                )
                note(f"{name} batch {n_batch} threads {n_threads}: {work.n_tokens / seconds:.1f} tokens/s")
        machines[n_threads] = mean(seen)
        bench.engine.close()
    return {"machine": machines[max(machines)], "rows": rows}


def mean(seen: list[Machine]) -> Machine:
    return {key: round(statistics.fmean(m[key] for m in seen), 2) for key in seen[0]}


def median_seconds(once: Callable[[], None], repetitions: int) -> float:
    times: list[float] = []
    while len(times) < repetitions and sum(times) < LONG:
        began = time.perf_counter()
        once()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


class Bench:
    """One engine on some threads; each slot has pages of its own."""

    def __init__(self, path: str, options: SimpleNamespace, n_threads: int) -> None:
        from server.ubatch import PAGE

        n_slots = max(options.batch)
        self.n_pages = max(options.n_prompt, options.n_gen) // PAGE + 1  # of each slot
        settings = {
            "ctx_size": n_slots * self.n_pages * PAGE,
            "parallel": n_slots,
            "threads": n_threads,
            "threads_batch": None,
            "batch_size": options.ubatch_size,
        }
        self.row = greedy()
        self.engine: Engine = load.open_engine(path, SimpleNamespace(**(vars(options) | settings)))
        load.load_weights(self.engine)

    def limits(self) -> Machine:
        """What the machine can do at this moment, on the bench's threads."""
        from backends.cpu import peaks

        return peaks.measure(self.engine.session.backends[-1].pool)  # type: ignore[attr-defined]

    def tests(self, n_prompt: int, n_gen: int, n_batch: int) -> list[tuple[str, Work, Run, Run]]:
        """(name, work, a function that makes the plans, one that does the work once) for this batch."""
        found: list[tuple[str, Work, Run, Run]] = []
        if n_prompt:
            work, size = prompt_work(self.engine, n_prompt, n_batch), self.engine.options.n_ubatch
            warm = min(n_batch, -(-size // n_prompt))  # one full step; a shorter one at the end has its own plan
            runs = partial(self.prompts, n_prompt, warm), partial(self.prompts, n_prompt, n_batch)
            found.append((f"pp{n_prompt}", work, *runs))
        if n_gen:
            work = decode_work(self.engine, n_gen, n_batch)
            few = min(n_gen, 4)
            runs = partial(self.decode, few, n_batch), partial(self.decode, n_gen, n_batch)
            found.append((f"tg{n_gen}", work, *runs))
        return found

    def prompts(self, n_prompt: int, n_batch: int) -> None:
        """Evaluate prompts of random tokens, in steps as large as they may be."""
        todo = [(slot, pos) for slot in range(n_batch) for pos in range(n_prompt)]
        size = self.engine.options.n_ubatch
        for start in range(0, len(todo), size):
            part = todo[start : start + size]
            last = [i for i, (_, pos) in enumerate(part) if pos == n_prompt - 1]
            tokens = [(7919 * (i + start)) % self.engine.hparams.n_vocab for i in range(len(part))]
            self.engine.step(self.ubatch(tokens, part, last, first=start == 0))

    def decode(self, n_gen: int, n_batch: int) -> None:
        """Generate greedily from an empty context, one token of every sequence a step."""
        from graph.ops.samplers import ID

        tokens = [(7919 * slot) % self.engine.hparams.n_vocab for slot in range(n_batch)]
        for pos in range(n_gen):
            part = [(slot, pos) for slot in range(n_batch)]
            result = self.engine.step(self.ubatch(tokens, part, list(range(n_batch)), first=pos == 0))
            tokens = [int(word) & ID for word in result.ids[:n_batch]]

    def ubatch(self, tokens: list[int], part: list[tuple[int, int]], out: list[int], *, first: bool) -> UBatch:
        from server.ubatch import PAGE, UBatch

        n = self.n_pages
        return UBatch(
            tokens=tokens,
            pos=[pos for _, pos in part],
            slot=[slot for slot, _ in part],
            cells=[slot * n * PAGE + pos for slot, pos in part],
            out=out,
            rows=[self.row] * len(out),
            targets=[-1] * len(out),
            tables={s: list(range(s * n, s * n + n)) for s in range(self.engine.options.n_slots)} if first else {},
        )


def greedy() -> Row:
    """The row of a request with temperature 0."""
    from server.sampling import MAX_CHAIN, Row, SamplingParams, chain_codes, params_vector

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
        f"{machine['int8_gmac_s']:.0f} G int8 or {machine['f32_gmac_s']:.0f} G f32 per second",
        soft_wrap=True,
    )
    table = Table("test", *("batch", "threads", "tokens/s", "of the limit"))
    for column in table.columns[1:]:
        column.justify = "right"
    for r in report["rows"]:
        share = f"{100 * r['limit_fraction']:.1f} %"
        table.add_row(r["test"], str(r["batch"]), str(r["threads"]), f"{r['tok_s']:.1f}", share)
    console.print(table)

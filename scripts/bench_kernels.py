"""`scripts/bench-kernels`: matmuls of several checkouts by turns, each in a process that stays.

A machine with neighbours is now faster and now slower by a twentieth; turns of some milliseconds meet the same weather,
so that medians of their ratios tell a hundredth.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Product:
    """m rows times `count` weights (n, k), one after the other: enough of them lie in memory, not in a cache."""

    dtype: str
    m: int
    n: int
    k: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Product:
        found = re.fullmatch(r"(\w+):(\d+)x(\d+)x(\d+)(?:\*(\d+))?", text)
        if not found:
            raise argparse.ArgumentTypeError(f"{text} is not like q8_0:512x2048x2048 or q8_0:8x8192x2048*20")
        dtype, *sizes = found.groups(default="1")
        return cls(dtype, *map(int, sizes))

    def __str__(self) -> str:
        return f"{self.dtype}:{self.m}x{self.n}x{self.k}*{self.count}"


def numbers(rng: np.random.Generator, dtype: str) -> np.ndarray:
    """Bytes of a packed weight that are ordinary numbers: subnormal ones would be slow."""
    if dtype in ("f32", "f16", "bf16"):
        values = rng.normal(size=1 << 16).astype(np.float16 if dtype == "f16" else np.float32)
        return values.view(np.uint8) if dtype != "bf16" else values.view(np.uint16)[1::2].copy().view(np.uint8)
    return rng.integers(0, 60, 1 << 16, dtype=np.uint8) + np.uint8(64 * (dtype == "mxfp4"))  # scales are ordinary


def work(product: Product, threads: int) -> None:
    """In one checkout: for each line of the input the seconds of so many runs' median."""
    from logitless.backends.cpu import backend  # noqa: F401 — registers the lowering of products
    from logitless.backends.cpu.fusion.packing import packed_nbytes
    from logitless.backends.cpu.lowering.registry import LOWERINGS, REWRITES
    from logitless.backends.cpu.threads.pool import Task, TaskList, WorkerPool
    from logitless.backends.host_memory import aligned
    from logitless.graph.ops.linear import linear
    from logitless.graph.order import toposort
    from logitless.graph.tensor import feed, variable

    rng, pool = np.random.default_rng(0), WorkerPool(threads)
    try:
        nbytes = packed_nbytes(product.dtype, product.n, product.k)
    except ValueError as error:
        sys.exit(f"bench-kernels: {error}")
    weight = np.resize(numbers(rng, product.dtype), nbytes)
    x = rng.normal(size=(product.m, product.k)).astype(np.float32)
    memory: list[Any] = [x]
    first: list[Task] = []
    rest: list[Task] = []
    for _ in range(product.count):
        node = linear(feed("x", x.shape), variable("w", (product.n, product.k), product.dtype, constant=True))
        places: dict[int, int] = {}

        def at(t: Any, places: dict[int, int] = places) -> int:
            if t.name == "x":
                return int(x.ctypes.data)
            if id(t) not in places:
                memory.append((t, aligned(len(weight) if t.name == "w" else t.nbytes)))
                if t.name == "w":
                    memory[-1][1][:] = weight
                places[id(t)] = memory[-1][1].ctypes.data
            return places[id(t)]

        *before, last = [t for t in toposort([REWRITES["linear"](node)]) if not t.is_leaf]
        first += [i for t in before for i in LOWERINGS[t.op](t, at) or ()]
        rest += LOWERINGS[last.op](last, at) or ()
    pool.run(TaskList(first))
    table = TaskList(rest)
    pool.run(table)
    print("ready", flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            began = time.perf_counter()
            pool.run(table)
            times.append(time.perf_counter() - began)
        print(statistics.median(times), flush=True)
    pool.close()


def compare(product: Product, options: argparse.Namespace) -> str:
    workers: list[subprocess.Popen[str]] = []
    for tree in options.checkout:
        command = [sys.executable, __file__, "--work", "--threads", str(options.threads), str(product)]
        environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        workers.append(subprocess.Popen(command, cwd=tree, env=environment, **pipes))
    times: list[list[float]] = [[] for _ in workers]
    for tree, worker in zip(options.checkout, workers, strict=True):
        if worker.stdout is None or worker.stdout.readline() != "ready\n":
            sys.exit(f"bench-kernels: {tree} cannot do {product}")
    for turn in range(options.turns):
        order = list(zip(workers, times, strict=True))
        for worker, seen in order if turn % 2 else reversed(order):
            assert worker.stdin is not None
            assert worker.stdout is not None
            print(options.runs, file=worker.stdin, flush=True)
            seen.append(float(worker.stdout.readline()))
    for worker in workers:
        worker.communicate()
    macs = product.m * product.n * product.k * product.count
    cells = [f"{macs / statistics.median(times[0]) / 1e9:.0f}"]
    for seen in times[1:]:
        ratio = statistics.median(a / b for a, b in zip(times[0], seen, strict=True))
        cells.append(f"{macs / statistics.median(seen) / 1e9:.0f} ({ratio:.3f} ×)")
    return " | ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description="products in checkouts by turns: 10^9 multiply-adds a second")
    parser.add_argument("product", nargs="+", type=Product.parse, metavar="TYPE:ROWSxNxK[*WEIGHTS]")
    parser.add_argument(
        "--checkout", nargs="+", type=Path, metavar="FOLDER", help="the others are compared with the first"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--runs", type=int, default=15, help="of a turn, whose median counts: some milliseconds in all")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.product[0], options.threads)
        return
    options.checkout = options.checkout or [Path(__file__).resolve().parents[1]]
    print("| product | " + " | ".join(map(str, options.checkout)) + " |\n" + "|---" * (1 + len(options.checkout)) + "|")
    for product in options.product:
        print(f"| {product} | {compare(product, options)} |", flush=True)


if __name__ == "__main__":
    main()

"""`scripts/bench-quota`: steps on cores of which a quota or another program takes a part.

A thief is a real-time process on the last core that is busy for a share of each period: to a step, a core that is so
much slower all the time. Its ideal is the sum of what both cores have left. A quota is one of a control group, which
stops all threads when its share of each 0.1 s is spent; its ideal is that share. Processes with 1, 2, ... threads take
turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

GROUP = Path("/sys/fs/cgroup/cpu") / f"bench-quota-{os.getpid()}"
PERIOD = 200e-6  # seconds of a thief's turn: less than a look for preempted threads (stall_rescue.py)
PRESSURE = 20  # real-time priority of the thief


def work(path: Path, threads: int, n_prompt: int, n_gen: int) -> None:
    """For each line of the input: seconds of each step of decode, then those of a prompt."""
    from logitless.cli.commands.benchmark.bench import Bench
    from logitless.cli.flags.flags import parse
    from logitless.cli.flags.options import BENCH

    flags = [flag for group in BENCH for flag in group.flags]
    options = parse(flags, ["-m", str(path), "-p", str(n_prompt), "-n", str(n_gen)], {})
    bench = Bench(path, options, threads)
    tests = list(bench.tests(n_prompt, n_gen, 1))
    step, stamps = bench.engine.step, [0.0]

    def stamped(batch: Any) -> Any:
        result = step(batch)
        stamps.append(time.perf_counter())
        return result

    bench.engine.step = stamped  # type: ignore[method-assign]
    for test in tests:
        test.warm_up()
        test.once()
    print("[]", flush=True)
    for _ in sys.stdin:
        found = []
        for test in tests:
            stamps[:] = [time.perf_counter()]
            test.once()
            found.append([b - a for a, b in pairwise(stamps)])
        print(json.dumps(found), flush=True)


def steal(share: float) -> None:
    """Be busy on the last core for this share of each period."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRESSURE))
    at = time.perf_counter()
    while True:
        while time.perf_counter() < at + share * PERIOD:
            pass
        at += PERIOD
        time.sleep(max(0.0, at - time.perf_counter()))


@contextlib.contextmanager
def thief(share: float) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-m", "scripts.bench_quota", "--steal", str(share)])
    time.sleep(0.3)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def quota(cores: float) -> Iterator[None]:
    (GROUP / "cpu.cfs_quota_us").write_text(str(int(cores * 100_000)))
    yield
    (GROUP / "cpu.cfs_quota_us").write_text("-1")


@contextlib.contextmanager
def group(processes: list[int]) -> Iterator[None]:
    """A control group that comes before all others."""
    GROUP.mkdir()
    try:
        (GROUP / "cpu.shares").write_text("262144")
        for process in processes:
            (GROUP / "cgroup.procs").write_text(str(process))
        yield
    finally:
        for process in processes:
            (GROUP.parent / "cgroup.procs").write_text(str(process))
        GROUP.rmdir()


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    rows: dict[str, Any] = {"alone": contextlib.nullcontext}
    rows |= {f"thief {share}": lambda share=share: thief(share) for share in args.thief}
    return rows | {f"quota {cores}": lambda cores=cores: quota(cores) for cores in args.quota}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    shares = lambda text: [float(share) for share in text.split(",")]  # noqa: E731
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--quota", type=shares, default=[])
    parser.add_argument("--thief", type=shares, default=[])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("-p", type=int, default=512)
    parser.add_argument("-n", type=int, default=256)
    parser.add_argument("--steal", type=float)
    parser.add_argument("--work", type=int)
    args = parser.parse_args()
    if args.steal:
        steal(args.steal)
    elif args.work:
        work(args.model, args.work, args.p, args.n)
    else:
        compare(args)


def compare(args: argparse.Namespace) -> None:
    base = [
        sys.executable,
        "-m",
        "scripts.bench_quota",
        str(args.model),
        "-p",
        str(args.p),
        "-n",
        str(args.n),
        "--work",
    ]
    workers = {n: subprocess.Popen([*base, str(n)], stdin=-1, stdout=-1, text=True) for n in args.threads}
    for worker in workers.values():
        worker.stdout.readline()  # type: ignore[union-attr]
    results: dict[tuple[str, int], list[list[list[float]]]] = {}
    with group([worker.pid for worker in workers.values()]):
        for name, condition in list(conditions(args).items()) * args.turns:
            for n, worker in workers.items():
                with condition():
                    print(file=worker.stdin, flush=True)
                    results.setdefault((name, n), []).append(json.loads(worker.stdout.readline()))  # type: ignore
    print("condition | threads | prompt tokens/s | decode tokens/s | p50 ms | p99 ms | longest ms")
    for (name, n), runs in results.items():
        prompt = statistics.median(args.p / sum(run[0]) for run in runs)
        decode = statistics.median(len(run[1]) / sum(run[1]) for run in runs)
        steps = sorted(1e3 * step for run in runs for step in run[1])
        tail = [steps[int(at * (len(steps) - 1))] for at in (0.5, 0.99, 1)]
        print(f"{name} | {n} | {prompt:.0f} | {decode:.1f} |", " | ".join(f"{ms:.1f}" for ms in tail))
    for worker in workers.values():
        worker.kill()
        worker.wait()


if __name__ == "__main__":
    main()

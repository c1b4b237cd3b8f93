"""`scripts/bench-llama`: prefill and decode here and in llama.cpp, or peers like it, on the same file, by turns.

Each program is a process that stays, and only one of them works at a time. Ours draws its tokens, the peers stop at
the logits: the comparison is to their advantage.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from logitless.cli.commands.benchmark.bench import Bench
from logitless.cli.flags.flags import parse
from logitless.cli.flags.options import BENCH
from logitless.models.errors import ModelFileError
from logitless.training.reporting.plot import plot
from scripts.bench_llama_images import IMAGES
from scripts.bench_llama_images import compare as compare_images
from scripts.bench_llama_peer import PEERS, Peer

ROOT = Path(__file__).resolve().parent.parent
PROMPT, N_GEN = 512, 32  # tokens of a prompt, steps of decoding
BATCHES = (1, 2, 4, 8, 16)
HERE = "logitless"


class Here:
    """The engine alone, as `logitless bench` drives it."""

    def __init__(self, path: str, threads: int, depth: int, clock: Callable[[], float]) -> None:
        sizes = ["-p", str(PROMPT), "-n", str(N_GEN), "-b", ",".join(map(str, BATCHES)), "-d", str(depth)]
        self.bench = Bench(
            Path(path), parse([f for group in BENCH for f in group.flags], ["-m", path, *sizes], {}), threads
        )
        self.n_filled, self.clock = 0, clock

    def prompt(self, n: int) -> float:
        self._fill(1)
        return self._seconds(partial(self.bench.prompts, n, 1, self.bench.depth))

    def decode(self, n_batch: int, n: int) -> float:
        self._fill(n_batch)
        return self._seconds(partial(self.bench.decode, n, n_batch, self.bench.depth))

    def _fill(self, n_seqs: int) -> None:
        if self.bench.depth and self.n_filled < n_seqs:
            self.bench.prompts(self.bench.depth, n_seqs)
            self.n_filled = n_seqs

    def _seconds(self, run: Callable[[], None]) -> float:
        began = self.clock()
        run()
        return self.clock() - began


def work(program: Here | Peer) -> None:
    """A line of JSON on standard input is a run: how many sequences (0: a prompt) and tokens; its seconds come back."""
    for line in sys.stdin:
        n_batch, n = json.loads(line)
        print(program.decode(n_batch, n) if n_batch else program.prompt(n), flush=True)


class Worker:
    """A process that does runs when it is asked to."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "scripts.bench_llama", *options]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tokens_per_second(self, n_batch: int, n: int) -> float:
        assert self.process.stdin
        assert self.process.stdout
        print(json.dumps([n_batch, n]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(1)  # it has said why
        return max(1, n_batch) * n / float(answer)

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def compare(path: str, options: argparse.Namespace) -> list[tuple[float, float]]:
    """Print a line for each test; how many times as fast as the fastest peer decoding is here, by sequences at once."""
    base = ["--threads", str(options.threads), "--depth", str(options.depth), "-m", path]
    base += ["--llama", options.llama] if options.llama else []
    base += ["--processor-time"] if options.processor_time else []
    workers = {who: Worker("--worker", who, *base) for who in (HERE, *options.peer)}
    curve: list[tuple[float, float]] = []
    for n_batch, n in [(0, PROMPT), *((b, N_GEN) for b in BATCHES)]:
        speeds: dict[str, list[float]] = {who: [] for who in workers}
        for turn in range(options.turns + 1):
            for who, worker in workers.items():
                speed = worker.tokens_per_second(n_batch, n)
                if turn:  # the first makes plans and touches pages
                    speeds[who].append(speed)
        cells, ratios = [f"{statistics.median(speeds[HERE]):.0f}"], []
        for peer in options.peer:
            ratios.append(statistics.median(a / b for a, b in zip(speeds[HERE], speeds[peer], strict=True)))
            cells += [f"{statistics.median(speeds[peer]):.0f}", f"{ratios[-1]:.2f}"]
        test = f"{n_batch} at once" if n_batch else f"prompt of {n}"
        test += f" behind {options.depth}" if options.depth else ""
        print(f"| {Path(path).stem} | {test} | {' | '.join(cells)} |", flush=True)
        if n_batch:
            curve.append((n_batch, min(ratios)))
    for worker in workers.values():
        worker.close()
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description="prompts and decoding here and in peers, by turns")
    parser.add_argument("-m", "--model", action="append", metavar="FILE", help="may be given again")
    parser.add_argument("--peer", action="append", choices=PEERS, help="llama if none is given; may be given again")
    parser.add_argument("--llama", metavar="FOLDER", help="of llama.cpp's shared libraries")
    parser.add_argument(
        "--image", nargs="?", const="all", choices=("all", *IMAGES), help="encoding images instead, with random weights"
    )
    parser.add_argument("--layers", type=int, default=0, help="of these encoders; 0: all, minutes an image")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="in the place of the clock's: for a machine with other work, and one thread",
    )
    parser.add_argument("--depth", type=int, default=0, help="tokens of each sequence that are there before")
    parser.add_argument("--turns", type=int, default=5, help="of which the medians count")
    parser.add_argument("--plot", metavar="FILE", help="a picture of decoding: .svg or .png")
    parser.add_argument("--worker", choices=(HERE, *PEERS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.image:
        compare_images(options)
        return
    if not options.model:
        parser.error("-m is needed, or --image")
    if options.worker:
        try:
            path, threads, depth = options.model[0], options.threads, options.depth
            clock = time.process_time if options.processor_time else time.perf_counter
            if options.worker == HERE:
                work(Here(path, threads, depth, clock))
            else:
                work(Peer(options.worker, options.llama, path, threads, max(BATCHES), depth, clock))
        except (OSError, ModelFileError) as error:
            sys.exit(f"bench-llama: {error}")
        return
    options.peer = options.peer or ["llama"]
    columns = [f"{PEERS[peer][0]}, tokens/s | ratio" for peer in options.peer]
    print(
        f"| model | test | logitless, tokens/s | {' | '.join(columns)} |\n{'|---' * (3 + 2 * len(columns))}|",
        flush=True,
    )
    curves = {Path(path).stem: compare(path, options) for path in options.model}
    if options.plot:
        plot(
            options.plot,
            curves,
            f"decoding: times as fast as {' or '.join(PEERS[peer][0] for peer in options.peer)}",
            "sequences at once",
        )


if __name__ == "__main__":
    main()

"""`scripts/bench-gaps`: gaps between a stream's tokens while a long prompt arrives and is prefilled.

Gaps are told as multiples of the stream's median before the prompt. What a client sees is not the server's alone: other
processes, the kernel and a virtual machine's host add to it (docs/experiments/scheduling.md). A gap beside a
prompt is meant to last as long as two without one. So the same is told of two tokens of the same stream, before the
prompt came and after its first token: what of these is beyond the bound is not the prompt's. With `--prompt 0` none
comes.
"""

from __future__ import annotations

import argparse
import selectors
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise

from scripts.bench_http import Stream, begin, connect, message, part, receive

BOUND = 3.0
LEAST_ALONE = 30  # tokens of the stream before the prompt
SETTLED = 5  # gaps after the stream's begin and the prompt's end, which are neither's


@dataclass(frozen=True)
class Round:
    alone: float  # seconds, the median
    gaps: list[float]  # beside the prompt, in medians, sorted
    pairs: list[float]  # two gaps without it, in medians
    first: float  # seconds to the prompt's first token; without one to the stream's end


def measure(url: str, turn: int, options: argparse.Namespace) -> Round:
    stream = begin(connect(url), message(url, turn, 0, 16, options.gen))
    long = message(url, turn, 1, options.prompt, 2) if options.prompt else b""
    waiting = connect(url)  # already, so that this client reads as data arrive
    sent, prompt = 0.0, Stream(waiting)
    with selectors.DefaultSelector() as selector:
        selector.register(stream.socket, selectors.EVENT_READ, stream)
        while selector.get_map():
            receive(selector)
            if not sent and len(stream.times) > max(LEAST_ALONE, options.gen // 4):
                sent = time.perf_counter()
                if long:
                    prompt = begin(waiting, long)
                    selector.register(prompt.socket, selectors.EVENT_READ, prompt)
    stream.n_tokens()
    if long:
        prompt.n_tokens()
    waiting.close()
    first = prompt.times[0] if long else stream.times[-1]
    gaps = [(b, b - a) for a, b in pairwise(stream.times)]
    before = [gap for end, gap in gaps if end < sent][SETTLED:]
    after = [gap for end, gap in gaps if end > first][SETTLED:]
    alone = statistics.median(before)
    pairs = [(a + b) / alone for part in (before, after) for a, b in zip(part[::2], part[1::2], strict=False)]
    return Round(alone, sorted(gap / alone for end, gap in gaps if sent < end <= first), pairs, first - sent)


def main() -> None:
    parser = argparse.ArgumentParser(description="gaps of a stream beside a long prompt")
    parser.add_argument("url", help="http://host:port of a server that runs; no other one should, busy or not")
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of the long prompt; 0: none comes")
    parser.add_argument("--gen", type=int, default=300, help="tokens of the stream; it should outlast the prompt")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.6, help="seconds between turns, as users make them")
    options = parser.parse_args()
    if options.gen < 2 * LEAST_ALONE:
        parser.error(f"--gen: at least {2 * LEAST_ALONE}, for the stream's own pace")
    titles = "alone, ms", "gaps", "median, x", "p95, x", "p99, x", "greatest, x", f"beyond {BOUND:g} x"
    print("|", " | ".join([*titles, "first token, s", f"two alone beyond {BOUND:g} x"]), "|")
    print("|---" * 9 + "|")
    for turn in range(options.turns):
        time.sleep(options.pause)
        found = measure(options.url, turn, options)
        shares = " | ".join(f"{part(found.gaps, share):.2f}" for share in (0.5, 0.95, 0.99, 1.0))
        beyond, control = (sum(gap > BOUND for gap in gaps) for gaps in (found.gaps, found.pairs))
        row = f"{1e3 * found.alone:.2f} | {len(found.gaps)} | {shares} | {beyond} | {found.first:.2f}"
        print(f"| {row} | {control} of {len(found.pairs)} |", flush=True)


if __name__ == "__main__":
    main()

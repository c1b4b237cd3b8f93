"""`scripts/bench-batches`: speed of a batch, and gaps of streams beside it, by turns with the engine alone.

One process has the model, the batch and the streams. A turn measures tokens per second of the
scheduler alone (all requests at once, on the engine thread), those of a batch of the same requests
through the server's routes, the streams' gaps alone, and their gaps beside the batch with the
tokens per second that it has then. Ratios are of one turn: other processes disturb both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from logitless.cli.setup.server import import_http
from logitless.engine.async_engine import AsyncEngine
from logitless.engine.loading.open_model import ModelOptions, open_model
from logitless.engine.requests import CompletionRequest, Finished, Token
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.scheduler.scheduler import Scheduler
from logitless.server.api.batches.runner import answer_file
from logitless.server.config import ServerConfig
from scripts.bench_http import VOCABULARY, part

WARM = 8  # tokens of a stream whose gaps do not count


class Bench:
    """A served model, and the requests of a batch."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.model = open_model(Path(options.model), ModelOptions(parallel=options.slots))
        self.service = AsyncEngine()
        self.app: Any = None
        self.n_turns = 0

    async def start(self) -> None:
        self.service.start(self.model.load)
        await self.service.loaded()
        config = ServerConfig(model_path=self.options.model, n_parallel=self.options.slots)
        self.app = lambda: import_http().make_app(self.service, config)

    def prompts(self) -> list[list[int]]:
        """Prompts that no other turn has, so that nothing is found in the prefix cache."""
        self.n_turns += 1
        return [
            [(7919 * (i + 1) + 31 * j + 331 * self.n_turns) % VOCABULARY + 300 for j in range(self.options.prompt)]
            for i in range(self.options.lines)
        ]

    async def engine(self) -> float:
        """Tokens per second of the scheduler alone."""
        prompts, n_gen = self.prompts(), self.options.gen

        def run(scheduler: Scheduler) -> float:
            began = time.perf_counter()
            for i, ids in enumerate(prompts):
                scheduler.submit(request(ids, n_gen, i))
            n = 0
            while not scheduler.idle:
                n += sum(isinstance(event, Token) for _, event in scheduler.step())
            return n / (time.perf_counter() - began)

        return await self.service.ask(run)

    def file(self) -> Path:
        """The lines of a batch."""
        path = self.folder / f"{self.n_turns}.jsonl"
        sampling = {"max_tokens": self.options.gen, "ignore_eos": True, "temperature": 0.8}
        with open(path, "w") as file:
            for i, ids in enumerate(self.prompts()):
                body = {"prompt": ids, "seed": i, **sampling}
                file.write(json.dumps({"custom_id": str(i), "url": "/v1/completions", "body": body}) + "\n")
        return path

    async def batch(self) -> float:
        """Tokens per second of a batch."""
        path, n = self.file(), 0

        def keep(answered: bool, text: bytes) -> None:
            nonlocal n
            assert answered, text
            n += 1

        began = time.perf_counter()
        await answer_file(self.app(), path, "/v1/completions", (), keep)
        return n * self.options.gen / (time.perf_counter() - began)

    async def gaps(self, n_tokens: int) -> list[float]:
        """Seconds between tokens of the streams, sorted."""
        self.n_turns += 1
        found = await asyncio.gather(*(self._stream(i, n_tokens) for i in range(self.options.streams)))
        return sorted(gap for gaps in found for gap in gaps)

    async def _stream(self, index: int, n_tokens: int) -> list[float]:
        ids = [(7919 * (index + 7) + 31 * j + 331 * self.n_turns) % VOCABULARY + 300 for j in range(16)]
        times: list[float] = []
        async with await self.service.submit([request(ids, n_tokens, index)], f"stream {index}") as stream:
            while events := await stream.batch():
                times.append(time.perf_counter())
                assert isinstance(events[-1][1], Token | Finished), events
        return [b - a for a, b in pairwise(times[WARM:])]

    async def beside(self) -> tuple[list[float], float]:
        """Gaps of streams beside a batch that is under way, and the batch's tokens per second then."""
        path, done = self.file(), asyncio.Event()
        batch = asyncio.create_task(answer_file(self.app(), path, "/v1/completions", (), lambda *_: done.set()))
        await done.wait()  # its first answer
        n, began = await self._n_predicted(), time.perf_counter()
        gaps = await self.gaps(self.options.tokens)
        n_batch = await self._n_predicted() - n - self.options.streams * self.options.tokens
        seconds = time.perf_counter() - began
        assert not batch.done(), "--lines: the streams must not outlast the batch"
        batch.cancel()
        await asyncio.wait([batch])
        return gaps, n_batch / seconds

    async def _n_predicted(self) -> int:
        return await self.service.ask(lambda scheduler: scheduler.stats.tokens_predicted)


def request(ids: Sequence[int], n_predict: int, seed: int) -> CompletionRequest:
    sampling = SamplingParams(temperature=0.8, seed=seed)
    return CompletionRequest(tuple(ids), sampling, n_predict=n_predict, ignore_eos=True)


async def measure(options: argparse.Namespace, folder: Path) -> None:
    bench = Bench(options, folder)
    await bench.start()
    await bench.engine()
    await bench.batch()
    titles = "engine, tokens/s", "batch", "ratio", "alone, ms", "p99", "beside, ms", "p99", "ratio", "p99, x", "batch"
    print("|", " | ".join(titles), "|\n" + "|---" * len(titles) + "|")
    rows = []
    for _ in range(options.turns):
        engine, batch = await bench.engine(), await bench.batch()
        row = [engine, batch, batch / engine]
        if options.streams:
            alone = await bench.gaps(options.tokens)
            beside, n_batch = await bench.beside()
            middles = [1e3 * statistics.median(gaps) for gaps in (alone, beside)]
            late = [1e3 * part(gaps, 0.99) for gaps in (alone, beside)]
            row += [middles[0], late[0], middles[1], late[1], middles[1] / middles[0], late[1] / middles[0], n_batch]
        rows.append(row)
        print("|", " | ".join(f"{value:.{0 if value > 50 else 2}f}" for value in row), "|", flush=True)
    print("|", " | ".join(f"{statistics.median(c):.2f}" for c in zip(*rows, strict=True)), "| (medians)")
    await bench.service.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description="speed of a batch, and gaps of streams beside it")
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--lines", type=int, default=128, help="of the batch")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each line's prompt")
    parser.add_argument("--gen", type=int, default=64, help="tokens of each line's answer")
    parser.add_argument("--streams", type=int, default=1, help="streams beside the batch; 0: none")
    parser.add_argument("--tokens", type=int, default=300, help="of each stream")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(options, Path(folder)))


if __name__ == "__main__":
    main()

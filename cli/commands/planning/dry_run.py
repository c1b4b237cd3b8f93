"""Dry run of a server: one request a slot in this process, without a device, to measure its memory."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from logitless.cli.setup.server import import_http
from logitless.engine.async_engine import AsyncEngine, LoadedModel
from logitless.engine.batch import BLOCK_SIZE, StepResult, UBatch
from logitless.engine.loading.open_model import OpenModel, model_info
from logitless.engine.runner.model_runner import ModelRunner
from logitless.server.config import ServerConfig

T = TypeVar("T")
LONGEST = 4096  # tokens of a request's prompt
REPLY = 128  # tokens


class DryRunEngine:
    """An engine whose steps run nothing and sample one fixed token."""

    def __init__(self, engine: ModelRunner) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, batch: UBatch) -> StepResult:
        import numpy as np

        return StepResult(np.full(len(batch.out), self._engine.hparams.n_vocab - 1, np.uint32))


async def dry_run(
    model: OpenModel,
    engine: ModelRunner,
    load: Callable[[], T],
    measure: Callable[[], int],
) -> tuple[T, int]:
    """(result of `load`, result of `measure` after the requests).

    The requests: one as long as a prompt may be for each slot, then all slots at once."""
    loop = asyncio.get_running_loop()
    http = loop.run_in_executor(None, import_http)
    results: list[T] = []

    def build() -> LoadedModel:
        results.append(load())
        scheduler = model.scheduler(cast("ModelRunner", DryRunEngine(engine)))
        return LoadedModel(scheduler, model.tokenizer, model.template, model_info(engine, model.tokenizer))

    service = AsyncEngine()
    service.start(build)
    app = await http
    await service.loaded()
    try:
        async with app.listening(service, ServerConfig(port=0, model_path="m")) as port:
            if engine.hparams.causal:
                share = max(2, engine.n_ctx // engine.options.n_slots // BLOCK_SIZE * BLOCK_SIZE - 1)
                reply = min(REPLY, share // 2)
                await _ask_all(service, port, engine, max(1, min(LONGEST, engine.n_ctx_slot - 2)), 1)
                await _ask_all(service, port, engine, min(LONGEST, share - reply), reply)
            return results[0], measure()
    finally:
        await service.stop()


async def _ask_all(service: AsyncEngine, port: int, engine: ModelRunner, n_prompt: int, n_reply: int) -> None:
    """Send a request for each slot; the engine starts when all have arrived."""
    body = {"prompt": [1] * n_prompt, "n_predict": n_reply, "stream": True, "ignore_eos": True, "cache_prompt": False}
    all_arrived = threading.Event()
    blocker = asyncio.ensure_future(service.ask(lambda _: all_arrived.wait()))
    requests = [asyncio.ensure_future(_ask(port, json.dumps(body).encode())) for _ in range(engine.options.n_slots)]
    try:
        while service.n_streams < len(requests) and not any(a.done() for a in requests):
            await asyncio.sleep(0)
    finally:
        all_arrived.set()
    await asyncio.gather(blocker, *requests)


async def _ask(port: int, body: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /completion HTTP/1.1\r\nHost: m\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    while await reader.read(1 << 16):
        pass
    writer.close()
    await writer.wait_closed()

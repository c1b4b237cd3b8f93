"""Rollout helper: samples answers for the reinforcement job of another process.

It defines the job's adapter beside the model, writes the values of each batch to it, and answers
the batch's questions in the time that training has (engine/time_sharing.py)."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Generator, Mapping
from functools import partial

from logitless.engine.engine_task import EngineTask
from logitless.engine.finetuning.rollout_queue import BEAT, Queue, QueueLost, Queues, RolloutBatch
from logitless.engine.finetuning.rollouts import Rollouts
from logitless.engine.finetuning.shared_rollouts import Share, kind_of
from logitless.engine.runner.model_runner import ModelRunner
from logitless.engine.scheduler.scheduler import Scheduler
from logitless.training.adapters.lora import lora
from logitless.training.step import Slice
from logitless.training.trainable import F32
from logitless.training.trainer import OffDeviceWork

log = logging.getLogger("logitless.tuning")


class _Adapter:
    """An adapter of another process's job in this one, whose values come with each batch."""

    def __init__(self, engine: ModelRunner, scheduler: Scheduler, batch: RolloutBatch) -> None:
        """Define it, and compile its plans (off-thread)."""
        self.job, self._engine, self.session = batch.job, engine, engine.session
        self.trainable = lora(engine.session, engine.model, batch.lora, f"rollouts.{batch.job}", engine.gguf)
        self.rollouts = Rollouts(scheduler, engine, self.trainable.model, batch.job)
        engine.prepare_kernels(self.rollouts.graph(engine))

    @property
    def alive(self) -> bool:
        """False once the device was lost, and the adapter with it."""
        return self.session is self._engine.session

    def close(self) -> None:
        self.rollouts.close()
        if self.alive:
            self.session.delete([t.name for t in self.trainable.state])


class RolloutHelper:
    """Samples answers for the job of another process; a part of the FineTuningWorker.

    `run` and `close` are for the engine thread."""

    def __init__(
        self,
        queues: Queues,
        engine: ModelRunner,
        scheduler: Scheduler,
        wake: Callable[[], None],
        may_help: Callable[[], bool],
    ) -> None:
        """`may_help`: False in the process that runs the jobs."""
        self._queues, self._engine, self._scheduler = queues, engine, scheduler
        self._wake, self._may_help = wake, may_help
        self._process = secrets.token_hex(8)
        self._changed = threading.Condition()
        self._closed = False
        # of the thread that talks to the queue
        self._newest = ""  # name of the newest batch
        self._share: Share | None = None  # of it; None: there is none to help with
        self._values: Mapping[str, F32] = {}  # of its adapter
        # of the engine thread
        self.task: EngineTask | None = None  # makes the adapter
        self._adapter: _Adapter | None = None
        self._work: Generator[Slice | OffDeviceWork, None, None] | None = None
        self._of: Share | None = None  # the share of the work
        self._waits = False  # nothing runs: the work waits for questions
        self._failed = ""  # the last job that could not be helped here
        threading.Thread(target=self._listen, name="rollout-helper", daemon=True).start()

    @property
    def ready(self) -> bool:
        if self.task is not None:
            return self.task.wants
        share = self._share
        if share is not self._of or share is None:
            return share is not self._of
        return self._work is not None and (not self._waits or bool(share.waiting) or share.over)

    def run(self, seconds: float, waits: Callable[[], object] = lambda: False) -> None:
        """Sample for about so many seconds, or until a request `waits`."""
        until = time.perf_counter() + seconds
        try:
            if self.task is not None:
                self._attend(self.task)
            elif self._adapter is not None and not self._adapter.alive:
                self._abandon()
            elif self._share is self._of or self._switch(self._share):
                self._waits = False
                while self._work is not None and not self._waits:
                    event = next(self._work, None)
                    if event is None:
                        self._work = None
                    elif isinstance(event, OffDeviceWork):
                        self._waits = True
                    elif waits() or time.perf_counter() + event.following > until:
                        return
        except Exception as error:
            share = self._share
            self._failed = "" if share is None else share.batch.job
            log.warning(
                "%s: no answers are sampled here: %s", self._failed, error, exc_info=log.isEnabledFor(logging.DEBUG)
            )
            self._abandon()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._forget()

    # -- engine thread

    def _attend(self, task: EngineTask) -> None:
        if task.over:
            self.task = None
            self._adapter = task.result()
        else:
            task.serve()

    def _switch(self, share: Share | None) -> bool:
        """Go over to another batch. False: there is none, or its adapter has to be made."""
        if self._work is not None:
            self._work.close()
            self._work = None
        if share is None or share.batch.job == self._failed:
            self._of = share
            self._forget()
            return False
        if self._adapter is None or self._adapter.job != share.batch.job:
            self._forget()
            self.task = EngineTask(partial(_Adapter, self._engine, self._scheduler, share.batch), self._wake)
            self.task.start()
            return False
        self._adapter.trainable.write(self._values)
        self._of, self._work = share, self._adapter.rollouts.answer(share, share.batch.version)
        return True

    def _abandon(self) -> None:
        """Leave the batch under a new name, so that the queue gives this process's questions to others."""
        with self._changed:
            self._process, self._share, self._newest = secrets.token_hex(8), None, ""
        self._forget()

    def _forget(self) -> None:
        if self._work is not None:
            self._work.close()
        if self._adapter is not None:
            self._adapter.close()
        self._work = self._adapter = None

    # -- the thread that talks to the queue

    def _listen(self) -> None:
        queue: Queue | None = None
        while not self._closed:
            if not self._may_help():
                queue = None
            elif queue is None:
                queue = self._queues.find()
            try:
                if queue is not None:
                    self._take(queue)
                    continue
            except QueueLost:
                queue = None
            self._show(None)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, BEAT)

    def _take(self, queue: Queue) -> None:
        """Ask for questions, or for another batch."""
        share, kind = self._share, kind_of(self._engine)
        if share is None or share.over:
            news = queue.take(self._process, kind, self._newest, 0, -1, BEAT)
        else:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or share.n_wanted > 0, BEAT)
                n = max(0, share.n_wanted)
            news = queue.take(self._process, kind, self._newest, n, -1, BEAT if n else 0.0)
            share.receive(news)
        batch = news.batch
        if batch is None:
            self._newest = ""
        elif batch.name != self._newest:
            values = queue.values(batch.name) if batch.kind == kind else None
            self._newest = batch.name
            if batch.kind != kind:
                log.warning("%s: no answers are sampled here: this process rounds otherwise than the job's", batch.job)
            if values is not None:
                self._values = values
                self._show(Share(self._process, queue, batch, self._changed))
        self._wake()

    def _show(self, share: Share | None) -> None:
        if share is not self._share:
            self._share = share
            self._wake()

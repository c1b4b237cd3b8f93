"""Fine-tuning worker: runs one job at a time on the engine thread, between steps of requests.

After a kill, a job resumes from its checkpoint, to the same bytes. Adapters and full finetunes are
published between two steps; a running request keeps the version that it began with."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logitless.engine.engine_task import EngineTask
from logitless.engine.errors import is_full
from logitless.engine.finetuning.job import (
    base_of,
    checkpoint_path,
    failure_of,
    grader_row,
    media_reader,
    method_of,
    method_row,
    metrics_of,
    metrics_table,
    prepare,
    set_status,
    trackers_of,
)
from logitless.engine.finetuning.status import ENDED, RUNNING
from logitless.engine.finetuning.tuned_models import TunedModel, delete, find, tuned_models
from logitless.engine.records.store import Row, Store, event_of, new_id
from logitless.engine.stats import TrainingStats
from logitless.models.atomic_write import private
from logitless.models.errors import ModelFileError
from logitless.training.config import REINFORCEMENT, job_row
from logitless.training.errors import TrainingError

if TYPE_CHECKING:
    from logitless.engine.adapters import Adapters
    from logitless.engine.finetuning.rollout_helper import RolloutHelper
    from logitless.engine.finetuning.rollout_queue import Queues
    from logitless.engine.finetuning.rollouts import Rollouts
    from logitless.engine.finetuning.shared_rollouts import SharedRollouts
    from logitless.engine.runner.model_runner import ModelRunner
    from logitless.engine.scheduler.scheduler import Scheduler
    from logitless.graph.execution.session import Session
    from logitless.models.chat.template import ChatTemplate
    from logitless.models.gguf.file import GGUFFile
    from logitless.models.media.encoders import Encoders
    from logitless.models.media.media_input import MediaInput
    from logitless.models.tokenizer import Tokenizer
    from logitless.training.data.run_media import RunMedia
    from logitless.training.graders.grade import Surroundings
    from logitless.training.reporting.trackers import Trackers
    from logitless.training.run import RunPlan
    from logitless.training.trainable import Trainable
    from logitless.training.trainer import Event, Trainer

log = logging.getLogger("logitless.tuning")
CLOSE_SECONDS = 2.0  # seconds that shutdown waits for the end of an optimizer step
ESTIMATE_SECONDS = 10.0  # seconds between two estimates of a job's end
SAVE_SECONDS = 30.0  # seconds between checkpoints, about: work that a kill may cost


def _nothing(_: object) -> None:
    pass


def _reward(metrics: Mapping[str, float]) -> str:
    return f", mean reward={metrics['mean_reward']:.4f}" if "mean_reward" in metrics else ""


class FineTuningWorker:
    """Queue and training loop of fine-tuning jobs; a time_sharing.Background.

    `run` and `close` are for the engine thread, the other public methods for any thread."""

    def __init__(  # noqa: PLR0913  (the parts of a server that it works with)
        self,
        store: Store,
        engine: ModelRunner,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        adapters: Adapters,
        base: str,
        on_change: Callable[[], None] = lambda: None,
        *,
        names: Collection[str] | None = None,
        scheduler: Scheduler | None = None,
        around: Callable[[], Surroundings] | None = None,
        media: MediaInput | None = None,
    ) -> None:
        """`base`: name of the base model. `scheduler`: samples the answers of reinforcement;
        `around`: what its graders may use. `media`: the model's reader of images and sounds.

        `on_change`: called when events or states have changed. `names`: model names whose jobs this
        server runs, if other servers share the store; None: all."""
        self.store, self.engine, self.adapters, self.base = store, engine, adapters, base
        # store for off-thread tasks, which may wait for other processes
        self._keeper = store.patient()
        self._names = names
        self._scheduler, self._around = scheduler, around
        self._policy: Rollouts | SharedRollouts | None = None  # of a job that samples
        self._queues: Queues | None = None  # where it meets other processes that sample
        self._helper: RolloutHelper | None = None  # that samples for jobs of others
        self._tokenizer, self._template, self._media = tokenizer, template, media
        self.on_change = on_change
        self.wake: Callable[[], None] = lambda: None  # wakes the engine thread
        self.stats = TrainingStats()  # written by the engine thread
        self._lock = threading.Lock()
        self._job: str | None = None  # id of the job that has the device
        self._prepared: RunPlan | Exception | None = None
        self._trainer: Trainer | None = None
        self._work: Generator[Event, None, None] | None = None
        self._start_file: GGUFFile | None = None  # the whole model that the job starts from
        self._left_alone: set[str] = set()  # failed jobs whose failure could not be stored
        self._saved, self._saved_at = 0, 0.0  # last checkpoint: its optimizer steps and its time
        self._first, self._began_at = 0, 0.0  # optimizer steps and time when the run began here
        self._estimated_at = 0.0
        self._trackers: Trackers | None = None  # of the job's integrations
        self._published = 0  # optimizer step of the last model that requests got
        self._settled = True  # the trainer is between two optimizer steps
        self._task: EngineTask | None = None  # off-thread task of the job, which waits for it
        self._then: Callable[[Any], None] = _nothing  # called with the task's result
        self._session: Session | None = None  # session at the start of the task
        self._turn = store.turn(base)
        self._registered: set[str] = set()  # models of the store that requests can name
        with suppress(OSError):  # the disk is full: `follow` comes back to it
            self._register_models()
        self._choose()

    def follow(self) -> None:
        """Take up the models and jobs of other processes that share the store (engine thread).

        One of them runs the jobs of a model; when it ends, another one takes its turn."""
        self._register_models()
        self._choose()
        self.on_change()

    def share_rollouts(self, queues: Queues) -> None:
        """Sample the answers of jobs together with the other processes that share the store."""
        from logitless.engine.finetuning.rollout_helper import RolloutHelper

        assert self._scheduler is not None
        self._queues = queues
        scheduler, may_help = self._scheduler, lambda: not self._turn.is_held
        self._helper = RolloutHelper(queues, self.engine, scheduler, lambda: self.wake(), may_help)

    def _register_models(self) -> None:
        """Give requests the models of the store, each with its newest weights."""
        known = {entry.name: entry for entry in self.adapters.entries if entry.name and not entry.removed}
        current: set[str] = set()
        for model in tuned_models(self.store):
            if self._owns(model.job):
                current.add(model.name)
                if model.name not in known or known[model.name].path != model.path:
                    self._register(model.job, model.name, model.path, listed=not model.is_checkpoint)
        for name in self._registered - current:  # deleted by another process
            self.adapters.remove(name)
        self._registered = current

    def _jobs(self) -> list[Row]:
        """Jobs of this server, the oldest first."""
        return [job for job in reversed(self.store.all("jobs")) if self._owns(job)]

    def _owns(self, job: Row) -> bool:
        return self._names is None or base_of(job) in self._names

    # -- any thread

    def created(self) -> None:
        """Note that there is a new job, or that one may resume."""
        self._choose()

    def _choose(self) -> None:
        """Give the device to the oldest waiting job."""
        with self._lock:
            try:
                jobs = self._jobs() if self._job is None and self._takes_turn() else []
            except OSError as error:
                log.error("the jobs cannot be read: %s", error)
                return
            waiting = [job for job in jobs if job["status"] in RUNNING and job["id"] not in self._left_alone]
            if not waiting:
                return
            self._job = waiting[0]["id"]
        threading.Thread(target=self._prepare, args=(waiting[0],), name="tuning", daemon=True).start()

    def _takes_turn(self) -> bool:
        """True if this process runs the jobs. It then also clears up what a killed one left undone."""
        if self._turn.is_held:
            return True
        if not self._turn.take():
            return False
        for job in self._jobs():
            if job["status"] in RUNNING:
                self._forget_undone(job["id"])
        return True

    def _prepare(self, job: Row) -> None:
        """Read and tokenize the data, on a thread of its own."""
        try:
            self.engine.prepare_training()
            template = self._template_of(job)
            n_ctx_train = self.engine.hparams.n_ctx_whole
            if method_of(job) == REINFORCEMENT:
                from logitless.engine.finetuning.reinforcement_job import prepare_reinforcement

                n_ctx = min(n_ctx_train, self.engine.n_ctx_slot)  # requests sample the answers
                self._prepared = prepare_reinforcement(job, self.store, self._tokenizer, template, n_ctx)
            else:
                media = media_reader(job, self.store, self._open_media)
                self._prepared = prepare(job, self.store, self._tokenizer, template, n_ctx_train, media)
        except Exception as error:
            self._prepared = error
        self.wake()

    def _open_media(self) -> RunMedia:
        """The images and sounds of a run, for the model's own encoders. TrainingError: it has none."""
        from logitless.training.data.run_media import RunMedia

        if self._media is None:
            raise TrainingError("an image or a sound needs a projector: this server was started without --mmproj")

        def encoders(_: Session) -> Encoders:
            assert self.engine.media is not None
            return self.engine.media.encoders

        n_embd = self.engine.hparams.n_embd
        return RunMedia(self._media, n_embd, encoders, shared=True, folder=self.store.folder)

    def check(self, path: Path, filename: str, goes_on: Callable[[], None] = lambda: None) -> None:
        """Check a training file. TrainingError names the wrong line; `goes_on` is called often and may raise."""
        from logitless.training.data.media import MediaReader
        from logitless.training.data.sources import rows_of
        from logitless.training.data.tokenize_rows import row_texts

        media = MediaReader(self._open_media)
        for record in rows_of(path, filename, filename):
            if record.is_prompt:
                goes_on()
                continue
            answered = [record.answered(answer) for answer in record.answers]
            for _ in row_texts(answered or [record], self._template, filename, goes_on):
                pass
            for medium in record.media:
                goes_on()
                media.check(medium)

    def delete_model(self, model: TunedModel) -> None:
        """Delete a model of a job that is over, and forget its name. InvalidRequest: it is not."""
        for name in delete(self.store, model):
            self.adapters.remove(name)

    @property
    def ready(self) -> bool:
        """True if `run` has something to do."""
        if self._helper is not None and self._helper.ready:
            return True
        if self._task is not None:
            return self._task.wants
        return self._work is not None or self._prepared is not None

    @property
    def pending(self) -> bool:
        """True while an off-thread task runs and asks for nothing."""
        tasks = (None if self._helper is None else self._helper.task, self._task)
        return any(task is not None and not task.wants for task in tasks)

    # -- engine thread

    def run(self, seconds: float, waits: Callable[[], object] = lambda: False) -> None:
        """Run parts of the job's device runs for about so many seconds, or until a part ends while
        a request `waits`, or serve its off-thread task.

        Requests wait meanwhile, so it stops before a part that would exceed the time: a part's
        expected time is its last one, or that of the part before if unknown."""
        if self._helper is not None and self._helper.ready:
            self._helper.run(seconds, waits)
            return
        began = time.perf_counter()
        until = began + seconds
        try:
            while (task := self._task) is not None and task.wants:
                self._attend(task)
                if time.perf_counter() > until:
                    return
            if self._task is None and self.ready and self._goes_on():
                while (following := self._part()) is not None:
                    now = time.perf_counter()
                    if waits() or now + (following or now - began) > until:
                        break
                    began = now
        except Exception as error:
            log.error("job %s failed: %s", self._job, error, exc_info=log.isEnabledFor(logging.DEBUG))
            self._fail(error)
            self.on_change()

    def _goes_on(self) -> bool:
        """True if the job has a run to continue.

        Jobs are paused and cancelled between optimizer steps only."""
        assert self._job is not None
        if self._trainer is not None and self._trainer.trainable.session is not self.engine.session:
            self._trainer = None  # the device was lost, with the state of the run
            self._leave()
            return False
        if not self._settled:
            return True
        job = self.store.get("jobs", self._job)
        if job is None or job["status"] in (*ENDED, "paused"):  # cancelled or paused
            if job is not None and job["status"] == "paused" and self._worth_saving:
                self._send(partial(self._save, job), self._leave)
            else:
                self._leave()
            self.on_change()
            return False
        if self._work is None:
            prepared, self._prepared = self._prepared, None
            if isinstance(prepared, Exception):
                raise prepared
            assert prepared is not None
            self._send(partial(self._begin, job, prepared), self._begun)
            return False
        if job["status"] == "queued":  # paused and resumed before this thread looked
            self._send(partial(self._update, job, status="running"))
            return False
        return True

    def _part(self) -> float | None:
        """Advance the trainer by one event; returns seconds of the next part (0: unknown), or None.

        None: the event is more than the end of a part."""
        from logitless.training.step import Slice
        from logitless.training.trainer import Settled

        assert self._work is not None
        assert self._job is not None
        self._settled = False  # also where the step fails
        event = next(self._work)
        self._settled = isinstance(event, Settled)
        if isinstance(event, Slice):
            self.engine.session.wait()
            return event.following
        job = self.store.get("jobs", self._job)
        if job is not None:
            self._handle(job, event)
            self.on_change()
        return None

    # -- off-thread tasks

    def _send(self, call: Callable[[], Any], then: Callable[[Any], None] = _nothing) -> None:
        """Run `call` off-thread; the job continues after `then` has got its result."""
        self._session, self._then = self.engine.session, then
        still_runs = lambda: (self._keeper.get("jobs", self._job or "") or {}).get("status") in RUNNING  # noqa: E731
        self._task = EngineTask(call, lambda: self.wake(), still_runs)
        self._task.start()

    def _attend(self, task: EngineTask) -> None:
        """Answer a question of the off-thread task, or take its result."""
        if not task.over:
            task.serve()
            return
        self._task = None
        if self._session is not self.engine.session:  # the device was lost
            self._trainer = None
            self._leave()
        else:
            self._then(task.result())
        self.on_change()

    def _on_device(self, call: Callable[[], Any]) -> Any:
        """Run `call` on the engine thread, from that thread or from an off-thread task."""
        task = self._task
        return call() if task is None or not task.is_here else task.ask(call)

    @property
    def weights(self) -> Collection[str]:
        """Names of the model's weights, for the choice of those that an adapter changes."""
        return self.engine.model.weights.tensors.keys()

    def _begin(self, job: Row, plan: RunPlan) -> Trainer:
        """Create the trainer of a job, restored from its checkpoint, and compile its plans (off-thread)."""
        from logitless.models.adapters.lora import read_adapter
        from logitless.models.gguf.file import GGUFFile
        from logitless.training.adapters.lora import lora, start_from
        from logitless.training.checkpoint import read_checkpoint
        from logitless.training.run import lora_of
        from logitless.training.trainable import full

        prefix = f"job.{job['id']}"
        engine = self.engine
        path = self._checkpoint_path(job["id"])
        start = None if path.exists() else self._start_of(job)
        if plan.config.full:
            weights = engine.gguf if start is None else GGUFFile.open(start)
            self._start_file = weights if weights is not engine.gguf else None
            trainable = full(engine.session, engine.model, weights, engine.hparams, prefix=prefix)
        else:
            trainable = lora(engine.session, engine.model, lora_of(plan.config), prefix, engine.gguf)
            if start is not None:
                start_from(trainable, read_adapter(start, engine.gguf, engine.hparams))
        trainable = replace(trainable, owner=self._on_device)
        if plan.grpo is not None:
            trainer = self._reinforcement(job, plan, trainable, prefix)
        else:
            trainer = plan.trainer(trainable, prefix=prefix, apart=True)
        try:
            if path.exists():
                read_checkpoint(path).restore(trainer)
            nodes = trainer.steps.plan_ahead(plan.settings.grad_acc)
            if self._policy is not None:
                nodes = [*nodes, *self._policy.graph(engine)]
            engine.prepare_kernels(nodes)
            done = trainer.counters.iterations
            self._keeper.forget_events(job["id"], done)
            message = f"The job goes on after step {done}" if done else "Fine-tuning job started"
            self._keeper.add_event(job["id"], message)
            if plan.choices and not done:
                self._keeper.add_event(job["id"], plan.choices)
            for line in () if done else plan.warnings:
                self._keeper.add_event(job["id"], line, level="warn")
            values = job_row(plan.config)
            self._trackers = trackers_of(job, trainer, self.store.folder / "trackers", partial(self._warn, job["id"]))
            self._update(
                job,
                status="running",
                started_at=job.get("started_at") or int(time.time()),
                hyperparameters=values,
                method=method_row(method_of(job), values, grader_row(job)),
            )
        except BaseException:
            self._forget_run(trainer)
            raise
        return trainer

    def _reinforcement(self, job: Row, plan: RunPlan, trainable: Trainable, prefix: str) -> Trainer:
        """The trainer of a job that learns from rewards."""
        from logitless.engine.finetuning.reinforcement_job import reinforcement_trainer
        from logitless.engine.finetuning.rollouts import Rollouts
        from logitless.engine.finetuning.sampled_answers import AnswerReader
        from logitless.training.graders.grade import Surroundings
        from logitless.training.graders.parse import parse_grader

        assert self._scheduler is not None
        grader = parse_grader(grader_row(job), self._around() if self._around is not None else Surroundings())
        self._policy = Rollouts(self._scheduler, self.engine, trainable.model, job["id"])
        if self._queues is not None and trainable.lora is None:
            self._keeper.add_event(job["id"], "All weights are trained: one replica samples the answers", level="warn")
        elif self._queues is not None:
            from logitless.engine.finetuning.shared_rollouts import SharedRollouts

            self._policy = SharedRollouts(self._policy, trainable, job["id"], self.engine, self._queues)
        reader, engine = AnswerReader(self._tokenizer, self._template_of(job)), self.engine
        return reinforcement_trainer(plan, trainable, engine, self._policy, grader, reader, prefix=prefix, apart=True)

    def _template_of(self, job: Row) -> ChatTemplate | None:
        """The chat template of a job's rows."""
        from logitless.training.run import template_of

        return template_of(job["hyperparameters"].get("chat_template", ""), self._tokenizer, self._template)

    def _forget_run(self, trainer: Trainer | None) -> None:
        """Free the memory of a run."""
        if self._policy is not None:
            self._policy.close()
            self._policy = None
        if trainer is not None:
            trainer.steps.forget()

    def _start_of(self, job: Row) -> str | None:
        """File of the fine-tuned model that a job starts from; None: it starts from the base model."""
        if base_of(job) == job["model"]:
            return None
        model = find(self._keeper, job["model"])
        if model is None:
            raise TrainingError(f"the model {job['model']} is gone")
        return model.path

    def _warn(self, id: str, line: str) -> None:
        """Tell of a tracker that fails (on its thread)."""
        with suppress(OSError):
            self._keeper.add_event(id, line, level="warn")
            self.on_change()

    def _begun(self, trainer: Trainer) -> None:
        self._trainer, self._work, self._settled = trainer, trainer.work(), True
        stats = self.stats
        stats.jobs_running, stats.loss, stats.valid_loss = 1, None, None
        stats.step, stats.n_steps = trainer.counters.iterations, trainer.n_steps
        self._saved, self._saved_at, self._published = trainer.counters.iterations, time.monotonic(), 0
        self._first, self._began_at, self._estimated_at = self._saved, self._saved_at, -math.inf

    def close(self) -> None:
        """Save a checkpoint, from which the job resumes when the server starts again."""
        until = time.perf_counter() + CLOSE_SECONDS
        if self._helper is not None:
            self._helper.close()
        try:
            while (self._task is not None or self._within_step) and time.perf_counter() < until:
                if self._task is None:
                    self._part()
                elif self._task.finish(until - time.perf_counter()):
                    task, self._task = self._task, None
                    task.result()
                    if self._then == self._leave:  # the job has ended or is paused
                        self._trainer = None
            if self._task is None and self._worth_saving:
                self._save({"id": self._job})
        except Exception as error:
            log.warning("the checkpoint of %s could not be written: %s", self._job, error)
        with suppress(OSError):
            self._end_trackers(CLOSE_SECONDS)
        self._turn.close()
        self.store.close()

    @property
    def _within_step(self) -> bool:
        return self._trainer is not None and not self._settled

    @property
    def _worth_saving(self) -> bool:
        """True between optimizer steps, if there is a step since the last checkpoint."""
        return self._trainer is not None and self._settled and self._trainer.counters.iterations > self._saved

    def _handle(self, job: Row, event: Event) -> None:
        from logitless.training.trainer import (
            Encoding,
            Finished,
            LogMessage,
            Measuring,
            OffDeviceWork,
            Save,
            Settled,
            Step,
            Validated,
        )

        trainer = self._trainer
        assert trainer is not None
        if self._trackers is not None:
            self._trackers(event)
        stats = self.stats
        if isinstance(event, Encoding):
            if event.medium == event.n_media:
                self._send(partial(self._keeper.add_event, job["id"], f"{event.n_media} images and sounds are encoded"))
        elif isinstance(event, Measuring):
            if event.sample == event.n_samples:
                rows = f"Reference log-probabilities of {event.n_samples} windows are measured"
                self._send(partial(self._keeper.add_event, job["id"], rows))
        elif isinstance(event, OffDeviceWork):
            self._send(event.call, partial(setattr, event, "result"))
        elif isinstance(event, LogMessage):
            self._send(partial(self._keeper.add_event, job["id"], event.message, level=event.level))
        elif isinstance(event, Step):
            stats.steps, stats.tokens = stats.steps + 1, stats.tokens + event.n_tokens
            stats.step, stats.loss = event.iteration, event.loss
            numbers = f"training loss={event.loss:.4f}, gradient norm={event.norm:.4g}{_reward(event.metrics)}"
            message = f"Step {event.iteration}/{event.n_steps}: {numbers}"
            metrics = {**metrics_of(event), "total_steps": event.n_steps}
            ended_epoch = trainer.counters.epochs > event.epoch and event.iteration < event.n_steps
            publish = ended_epoch and not len(trainer.validation_indices)
            self._send(partial(self._tell, job, message, metrics, publish=publish))
        elif isinstance(event, Validated):
            stats.valid_loss = event.result.loss
            metrics = metrics_of(event)
            message = f"Step {event.iteration}: validation loss={event.result.loss:.4f}{_reward(event.result.metrics)}"
            publish = event.iteration < trainer.n_steps  # an epoch ended
            self._send(partial(self._tell, job, message, metrics, publish=publish))
        elif isinstance(event, Settled) and (
            event.keep or (self._worth_saving and time.monotonic() - self._saved_at > SAVE_SECONDS)
        ):
            self._send(partial(self._save, job))
        elif isinstance(event, Save) and event.iteration != self._published:
            # else its epoch has published it
            self._send(partial(self._publish, job))
        elif isinstance(event, Finished):
            self._send(partial(self._finish, job, event.reason), self._leave)

    def _tell(self, job: Row, message: str, metrics: Row, *, publish: bool) -> None:
        """Store the metrics of a step (off-thread)."""
        self._keeper.add_event(job["id"], message, type="metrics", step=metrics["step"], data=metrics)
        self._estimate(job)
        if publish:
            self._publish(job)

    def _estimate(self, job: Row) -> None:
        """Tell when the job will have ended, by its time for a step so far (off-thread)."""
        trainer, now = self._trainer, time.monotonic()
        assert trainer is not None
        done, n_left = trainer.counters.iterations - self._first, trainer.n_steps - trainer.counters.iterations
        if done and n_left and now - self._estimated_at > ESTIMATE_SECONDS:
            self._estimated_at = now
            finish = time.time() + (now - self._began_at) / done * n_left
            self._update(job, estimated_finish=math.ceil(finish))

    def _finish(self, job: Row, reason: str) -> None:
        """Store the success of a job and its result file (off-thread)."""
        trainer = self._trainer
        assert trainer is not None
        events = [e["data"] for _, e in self._keeper.events(job["id"]) if e["type"] == "metrics"]
        table = metrics_table(events, trainer.method)
        results = self._keeper.add_file(table.encode(), "step_metrics.csv", "fine-tune-results", job.get("owner", ""))
        if trainer.counters.iterations < trainer.n_steps:
            self._keeper.add_event(job["id"], f"The job ends early: {reason}")
        if summary := self._policy and self._policy.summary:
            self._keeper.add_event(job["id"], summary)
        job = self._keeper.get("jobs", job["id"]) or job
        best = self._best(job)
        if best is not None:
            self._register(job, job["model_name"], best["path"])
            message = f"The model is that of step {best['step_number']}, which has the lowest validation loss"
            self._keeper.add_event(job["id"], message)
        self._update(
            job,
            status="succeeded",
            finished_at=int(time.time()),
            estimated_finish=None,
            model_path=best["path"] if best is not None else None,
            fine_tuned_model=job["model_name"],
            trained_tokens=trainer.counters.tokens,
            result_files=[results["id"]],
            events=(f"New fine-tuned model created: {job['model_name']}", "The job has successfully completed"),
        )

    def _best(self, job: Row) -> Row | None:
        """Checkpoint with the lowest validation loss, if the job stops early; else None: the last."""
        assert self._trainer is not None
        stopping = self._trainer.stopping
        if not stopping.patience:
            return None
        rows = self._keeper.checkpoints(job["id"])
        return next((row for row in rows if row["step_number"] == stopping.best_step), None)

    # -- checkpoints

    def _checkpoint_path(self, job: str) -> Path:
        return checkpoint_path(self.store, job)

    def _forget_undone(self, job: str) -> None:
        """Delete the metrics of steps after the last checkpoint, which a kill has lost."""
        from logitless.training.checkpoint import steps_behind

        path = self._checkpoint_path(job)
        with suppress(ModelFileError, OSError):  # the job reports it when it begins
            self.store.forget_events(job, steps_behind(path) if path.exists() else 0)

    def _save(self, job: Row) -> None:
        from logitless.training.checkpoint import save_checkpoint

        assert self._trainer is not None
        save_checkpoint(private(self._checkpoint_path(job["id"])), self._trainer, self.engine.hparams.arch)
        self._saved, self._saved_at = self._trainer.counters.iterations, time.monotonic()

    def _publish(self, job: Row) -> None:
        """Publish a checkpoint to requests (off-thread): first the result, then the training state."""
        from logitless.training.save import save_result

        trainer = self._trainer
        assert trainer is not None
        step = trainer.counters.iterations
        path = self.store.folder / "checkpoints" / f"{job['id']}@{step}.gguf"
        save_result(private(path), trainer.trainable, self.engine.gguf, self.engine.hparams)
        name = f"{job['model_name']}@{step}"
        row = {
            "id": new_id("ftckpt"),
            "object": "fine_tuning.job.checkpoint",
            "created_at": int(time.time()),
            "fine_tuned_model_checkpoint": name,
            "fine_tuning_job_id": job["id"],
            "step_number": step,
            "metrics": self._metrics(job["id"], step),
            "path": str(path),
        }
        self._keeper.add_checkpoint(job["id"], step, row)
        self._save(job)
        self._register(job, name, str(path), listed=False)
        self._register(job, job["model_name"], str(path))
        self._published = step
        self._keeper.add_event(job["id"], f"Checkpoint created at step {step}: {name}", step=step)

    def _metrics(self, job: str, step: int) -> Row:
        """Metrics of a step from its events."""
        metrics: Row = {"step": float(step)}
        for _, event in self._keeper.events(job):
            if event["type"] == "metrics" and event["data"].get("step") == step:
                metrics |= {k: v for k, v in event["data"].items() if k.startswith(("train_", "full_valid_"))}
        return metrics

    def _register(self, job: Row, name: str, path: str, *, listed: bool = True) -> None:
        from logitless.models.adapters.lora import read_adapter

        whole = job["hyperparameters"].get("full")
        source = None if whole else partial(read_adapter, path, self.engine.gguf, self.engine.hparams)
        self._on_device(partial(self.adapters.add, path, source, name=name, listed=listed))

    # -- ends

    def _update(self, job: Row, *, events: Sequence[str] = (), level: str = "info", **fields: Any) -> None:
        """Change a job's row with events that tell of it (off-thread), but not its status if it was
        cancelled or paused meanwhile."""

        def change(now: Row) -> Row:
            stays = {"status": now["status"], "estimated_finish": None} if now["status"] in (*ENDED, "paused") else {}
            return {**now, **fields, **stays}

        lines = [event_of(message, level) for message in events]
        if self._keeper.change("jobs", job["id"], change, lines) is None:
            self._keeper.put("jobs", {**job, **fields})

    def set_status(self, id: str, allowed: Collection[str], status: str) -> Row | None:
        """Cancel, pause or resume a job; None if its status is not in `allowed`."""
        job = set_status(self.store, id, allowed, status)
        if job is None:
            return None
        if status == "queued":
            self._left_alone.discard(id)
            self._choose()
        self.wake()
        self.on_change()
        return job

    def _fail(self, error: Exception) -> None:
        """Store a job's failure and start the next job."""
        if self._job is None:
            self._leave()
        else:
            self._send(partial(self._keep_failure, self._job, error), self._leave)

    def _keep_failure(self, id: str, error: Exception) -> None:
        """Store a job's failure (off-thread). With a full disk the job is paused: somebody paused it while
        it waited for room, or it could not begin."""
        pauses = is_full(error)
        try:
            detail = failure_of(error, self._keeper, id)
            if (job := self._keeper.get("jobs", id)) is not None:
                if pauses:
                    line = f"The job is paused until it is resumed, because the disk is full: {detail['message']}"
                    fields: Row = {"status": "paused"}
                else:
                    line = f"The job failed: {detail['message']}"
                    fields = {"status": "failed", "finished_at": int(time.time()), "error": detail}
                self._update(job, **fields, estimated_finish=None, events=(line,), level="error")
        except Exception as refused:  # its row still says running: do not retry it at once
            log.error("the failure of job %s cannot be stored: %s", id, refused)
            self._left_alone.add(id)

    def _end_trackers(self, seconds: float = 0.0) -> None:
        if self._trackers is not None:
            job = None
            with suppress(OSError):  # a store that cannot be read is told by `_choose`
                job = self.store.get("jobs", self._job) if self._job is not None else None
            succeeded = job is not None and job["status"] == "succeeded"
            self._trackers.finish(succeeded=succeeded, seconds=seconds)
            self._trackers = None

    def _leave(self, _: object = None) -> None:
        """Release the device and choose the next job."""
        if self._work is not None:
            self._work.close()
        self._forget_run(self._trainer)
        if self._start_file is not None:
            self._start_file.close()
        self._end_trackers()
        self._work = self._trainer = self._prepared = self._start_file = None
        self._settled = True
        self.stats.jobs_running = 0
        with self._lock:
            self._job = None
        self._choose()

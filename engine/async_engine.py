"""Async engine: runs the scheduler on its own thread and hands its events to asyncio streams.

Requests reach the thread by an inbox; the events of a step come back in one call."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from logitless.engine.adapters import Adapters
from logitless.engine.batch import DeviceFailed
from logitless.engine.errors import InvalidRequest, RequestError, ServerFault, TooManyRequests, Unavailable
from logitless.engine.requests import CompletionRequest, Event, Failed, Finished, Lora, Token
from logitless.engine.sleep import Sleep, trim_memory
from logitless.engine.stats import Latencies
from logitless.engine.stream import MOST_STREAMED, MOST_TOGETHER, STREAMED, UNREAD, Delivery, Stream
from logitless.engine.time_sharing import Background, TimeSlicer
from logitless.models.chat.template import ChatTemplate
from logitless.models.media.prompt_media import PromptMedia
from logitless.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from logitless.engine.finetuning.worker import FineTuningWorker
    from logitless.engine.kv_disk.disk_cache import DiskCache
    from logitless.engine.kv_events.publisher import KVEventPublisher
    from logitless.engine.runner.embedder import F32, Embedder
    from logitless.engine.runner.model_runner import ModelRunner
    from logitless.engine.scheduler.scheduler import Scheduler
    from logitless.engine.scheduler.slot_claims import Claim
    from logitless.engine.sequence import Sequence as Generation
    from logitless.engine.speculation.draft_learner import DraftLearner
    from logitless.models.media.media_input import MediaInput


log = logging.getLogger("logitless.service")
T = TypeVar("T")
PAUSE = 0.2  # idle seconds before each warm-up task; none before the first request
ALONE = 0.02  # seconds of training at a time while no request runs or comes
UNREAD_SECONDS = 60.0  # a stream whose log-probabilities nobody reads ends
MUCH, TRIM_SECONDS = 1 << 20, 1.0  # log-probabilities whose memory is returned to the system; when
LOST_SECONDS = 5.0  # idle seconds before each try of a remote device that was lost
FLUSH_SECONDS = 5.0  # of bringing cached prompts to the disk at the end (--cache-disk)
RETRY = 5.0  # seconds between attempts of training to wake a model that cannot be loaded


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Loaded model: scheduler, tokenizer and everything else that a request needs."""

    scheduler: Scheduler
    tokenizer: Tokenizer
    template: ChatTemplate | None
    info: ModelInfo
    adapters: Adapters | None = None
    engine: ModelRunner | None = None
    tuning: FineTuningWorker | None = None
    train_share: float = 0.5  # share of the device's time for training while requests run
    embedder: Embedder | None = None
    sleep: Sleep | None = None
    media: MediaInput | None = None
    kv_events: KVEventPublisher | None = None
    disk: DiskCache | None = None
    learner: DraftLearner | None = None

    def embed(
        self,
        texts: Sequence[Sequence[int]],
        pooling: str,
        lora: Lora | None = None,
        media: PromptMedia | None = None,
    ) -> list[F32] | None:
        """Embed one of the embedder's groups of texts, and count it. On the engine thread. None: of
        the images of the only text some wait for their encoding, which is to be asked for again."""
        assert self.embedder is not None
        if media is not None and not self.scheduler.encode([span.tile for span in media.spans]):
            return None
        began, stats = time.perf_counter(), self.scheduler.stats
        vectors = self.embedder.embed(texts, pooling, self.scheduler.resolve_lora(lora), media)
        stats.n_decode += 1
        stats.prompt_tokens += sum(map(len, texts))
        stats.prompt_seconds += time.perf_counter() - began
        return vectors

    def prepare_ahead(self, request_waits: Callable[[], bool]) -> bool:
        """Do one warm-up task, so that requests need not wait for it; False: all are done.

        `request_waits()` is True if a request waits by now."""
        from logitless.models.grammar import vocabulary

        self.scheduler.prepare_ahead(request_waits)
        try:
            if self.engine is not None and self.engine.prepare_ahead(request_waits):
                return True
        except DeviceFailed:
            self.scheduler.forget_cache()
            return True
        return self.info.generates and vocabulary.prepare_ahead(self.tokenizer)

    @property
    def has_lost_devices(self) -> bool:
        """True if a remote device was lost, which may return."""
        return self.engine is not None and bool(self.engine.lost_remotes)

    def take_up_devices(self) -> bool:
        """Load the model onto remote devices that have returned; False: none has. No sequence may run."""
        if self.engine is None or not self.engine.take_up_returned():
            return False
        self.scheduler.forget_cache()
        return True


@dataclass(slots=True)
class _RequestState:
    """Sequence of a stream's request, with its times. Belongs to the engine thread."""

    sequence: Generation
    stream: Stream
    index: int
    submitted: float
    last_token: float = 0.0
    buffer: list[Event] = field(default_factory=list)  # of a whole stream, until the request ends


class AsyncEngine:
    """Async engine.

    Call its methods on the event loop's thread, except for those marked otherwise."""

    def __init__(self) -> None:
        self.latency = Latencies()
        self.served: LoadedModel | None = None  # None: still loading
        # set whenever something about a fine-tuning job is new
        self.listeners: set[asyncio.Event] = set()
        self._loop: asyncio.AbstractEventLoop
        self._loaded: asyncio.Future[LoadedModel]
        self._ended: asyncio.Future[None]
        self._fault: ServerFault | None = None  # why the thread failed
        self._pending: set[asyncio.Future[Any]] = set()  # pending futures that the thread resolves
        self._streams: set[Stream] = set()
        self._with_logprobs: set[Stream] = set()  # open streams whose log-probabilities are bounded
        self._trims = False  # free memory goes back to the system soon
        self._held_streams: set[Stream] = set()  # streams whose sequences wait for the reader; the engine thread's
        self._drained: asyncio.Event
        self._accepting = True
        self._stopping = False
        self._inbox: deque[Callable[[Scheduler], None]] = deque()
        self._wake = threading.Event()
        self._states: dict[int, _RequestState] = {}  # by id() of the sequence; the engine thread's
        self._has_request = False  # there was a request; the engine thread's
        self._thread: threading.Thread | None = None
        self._sleep: Sleep | None = None  # the engine thread's

    def start(self, build: Callable[[], LoadedModel]) -> None:
        """Start the engine thread, which loads the model; returns at once."""
        self._loop = asyncio.get_running_loop()
        self._loaded = self._loop.create_future()
        # marks an error as retrieved
        self._loaded.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._ended = self._loop.create_future()
        self._drained = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(build,), name="engine", daemon=True)
        self._thread.start()

    def move(self) -> None:
        """Serve the running event loop, after the one before was closed; its requests are cancelled.

        Raises Unavailable if the engine ended with it."""
        if self.served is None or self._stopping:
            raise Unavailable("the event loop was closed while the model was loaded: open it again")
        for stream in list(self._streams):
            self.cancel(stream)
        self._pending.clear()
        self._with_logprobs.clear()
        self._trims = False
        self._loop = asyncio.get_running_loop()
        self._loaded, self._ended = self._loop.create_future(), self._loop.create_future()
        self._loaded.set_result(self.served)
        self._drained = asyncio.Event()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of its streams."""
        return self._loop

    @property
    def asleep(self) -> bool:
        """True if the idle model was unloaded (--sleep-idle-seconds)."""
        return self.served is not None and self.served.sleep is not None and self.served.sleep.asleep

    async def loaded(self) -> LoadedModel:
        """Wait for the model. Raises the error of `build`."""
        return await asyncio.shield(self._loaded)

    @property
    def accepting(self) -> bool:
        """True until the engine ends."""
        return self._accepting

    @property
    def n_streams(self) -> int:
        """Number of running and waiting streams."""
        return len(self._streams)

    def adapters_in_use(self) -> tuple[set[int], set[int]]:
        """Ids of the adapters that running requests name, and of those that waiting ones do."""
        running, waiting = set[int](), set[int]()
        for state in list(self._states.values()):  # the engine thread's: as of one moment
            named = {id for id, scale in state.sequence.request.lora or () if scale}
            (waiting if state.sequence.slot is None else running).update(named)
        return running, waiting

    async def submit(
        self, requests: Sequence[CompletionRequest], client: str = "", delivery: Delivery = STREAMED
    ) -> Stream:
        """Queue a client's requests, all or none. Raises the RequestError of the first one that is refused."""
        self._check_open()
        admitted: asyncio.Future[None] = self._new_future()
        try:
            on_admitted = partial(_resolve, admitted, None)
            stream = self._open(requests, client, delivery, on_admitted)
        except RequestError:
            admitted.cancel()
            raise
        try:
            await admitted
        except BaseException:
            stream.close()
            del stream  # nor it nor the future: both have the error, whose traceback has this frame
            raise
        finally:
            del admitted
        return stream

    def begin(self, requests: Sequence[CompletionRequest], client: str = "", delivery: Delivery = STREAMED) -> Stream:
        """Queue a client's requests without waiting for the engine thread: a refusal is raised by the stream."""
        self._check_open()
        return self._open(requests, client, delivery)

    def _check_open(self) -> None:
        if self.served is None:
            raise Unavailable("Loading model")
        if not self._accepting:
            raise Unavailable("the server is shutting down")

    def _open(
        self,
        requests: Sequence[CompletionRequest],
        client: str,
        delivery: Delivery,
        admitted: Callable[[BaseException | None], None] | None = None,
    ) -> Stream:
        """A stream for these requests. `admitted` gets the error of a refusal, or None; without it the stream does."""
        most = delivery.most_logprobs
        weight = sum([r.prompt_weight for r in requests]) if most is not None else 0
        stream = Stream(self, len(requests), delivery, weight)
        if most is not None and (weight or any(r.sampling.n_probs > 0 for r in requests)):
            if weight > (room := most if delivery.whole else min(most, MOST_STREAMED)):
                raise _too_many_logprobs(room)
            if self._weight_unread() + weight > MOST_TOGETHER:
                raise TooManyRequests(_NO_ROOM)
            self._with_logprobs.add(stream)
        self._streams.add(stream)
        self._post(lambda scheduler: self._admit(scheduler, requests, client, stream, admitted))
        return stream

    async def ask(self, question: Callable[[Scheduler], T], *, wakes: bool = True) -> T:
        """Run `question(scheduler)` on the engine thread between two steps, and return its result.

        `wakes`: load a sleeping model first. Raises Unavailable if the engine ends before."""
        return await _outcome(self._put(question, wakes))

    def _put(self, question: Callable[[Scheduler], T], wakes: bool) -> asyncio.Future[T]:
        answer: asyncio.Future[T] = self._new_future()
        self._post(lambda scheduler: self._answer(answer, question, scheduler, wakes))
        return answer

    async def ask_about(self, ids: Sequence[int], question: Callable[[Scheduler], T], timeout: float) -> T:
        """Run `question(scheduler)` on the engine thread once all of these slots are idle.

        Raises Unavailable after `timeout` seconds. The caller may cancel earlier."""
        answer: asyncio.Future[T] = self._new_future()
        claims: list[Claim] = []

        def claim(scheduler: Scheduler) -> None:
            claims.append(scheduler.claims.add(ids, lambda: self._answer(answer, question, scheduler)))

        def withdraw(scheduler: Scheduler) -> None:
            for old in claims:
                scheduler.claims.withdraw(old)

        self._post(claim)
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise Unavailable(f"slot {', '.join(map(str, ids))} is processing a request; try again later") from None
        finally:
            self._post(withdraw)

    async def end_reasoning(self, stream: Stream) -> bool:
        """Force the end of reasoning in the stream's sequences; False: none is reasoning."""

        def end(_: Scheduler) -> bool:
            budgets = [t.sequence.reasoning for t in self._states.values() if t.stream is stream]
            return sum([budget.end() for budget in budgets if budget is not None]) > 0

        return await self.ask(end)

    def unload(self) -> None:
        """Put the model to sleep at once if it is idle; the next request wakes it."""
        if self.served is not None and self.served.sleep is not None:
            sleep = self.served.sleep
            self._post(lambda _: sleep.expire())

    def cancel(self, stream: Stream) -> None:
        """Stop the stream's sequences."""
        self.forget(stream)
        self._post(lambda scheduler: self._cancel(scheduler, stream))

    def forget(self, stream: Stream) -> None:
        """Remove a stream whose requests have ended."""
        self._streams.discard(stream)
        if not self._streams and not self._accepting:
            self._drained.set()

    def release(self, stream: Stream) -> None:
        """Free the room of a stream's log-probabilities."""
        self._with_logprobs.discard(stream)
        if stream.weight > MUCH:
            self.trim_soon()
        if stream.is_held:
            self._post(lambda _: self._held_streams.discard(stream))

    def trim_soon(self) -> None:
        """Return free memory to the system soon: a large request has ended."""
        if not self._trims:
            self._trims = True
            self._loop.call_later(TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        self._trims = False
        self._post(lambda _: trim_memory())

    def resume(self, stream: Stream) -> None:
        """Go on with the sequences of a stream that is read again."""
        stream.is_held = False
        self._post(lambda _: self._hold(stream, is_held=False))

    def _weight_unread(self) -> int:
        """Memory of the log-probabilities that no client has. On any thread."""
        return sum([stream.unread for stream in list(self._with_logprobs)])

    def _watch(self, stream: Stream) -> None:
        """End a stream that waits for its reader, after UNREAD_SECONDS without one read."""
        if not stream.watched:
            stream.watched = True
            self._loop.call_later(UNREAD_SECONDS, self._look, stream, stream.n_reads)

    def _look(self, stream: Stream, n_reads: int) -> None:
        stream.watched = False
        if stream.closed or stream.ended or not stream.is_held:
            return
        if n_reads == stream.n_reads:
            self._end(stream, TooManyRequests("the client does not read the log-probabilities of its stream"))
        else:
            self._watch(stream)

    def _end(self, stream: Stream, error: RequestError) -> None:
        """End the running requests of a stream with this error."""
        if not stream.ended:
            stream.fail(Failed(error.code, error.type, error.message))
            self.cancel(stream)

    async def stop(self, timeout: float = 5.0) -> None:
        """Refuse new requests, let running ones finish for most of `timeout`, cancel the rest, end
        the thread.

        `timeout`: seconds."""
        self._accepting = False
        if self._thread is None:
            return
        began = self._loop.time()
        if self._streams:
            try:
                async with asyncio.timeout(timeout * 0.6):
                    await self._drained.wait()
            except TimeoutError:
                failed = Failed(Unavailable.code, Unavailable.type, "the server is shutting down")
                for stream in list(self._streams):
                    stream.fail(failed)
                    self.cancel(stream)
        self._stopping = True
        self._wake.set()
        if self.served is None:  # loading cannot be interrupted, and leaves nothing undone
            return
        try:
            async with asyncio.timeout_at(began + timeout * 0.9 + (FLUSH_SECONDS + 1.0 if self.served.disk else 0.0)):
                await self._ended
        except TimeoutError:
            log.warning("the engine is still busy; leaving it behind")

    async def ended(self) -> None:
        """Wait for the end of the engine thread. Raises ServerFault if it failed."""
        await asyncio.shield(self._ended)
        if self._fault is not None:
            raise self._fault

    def _new_future(self) -> asyncio.Future[Any]:
        """Create a future that the engine thread resolves; it gets an error if the thread ends."""
        if self._ended.done():
            raise self._gone()
        n_uncomputed: asyncio.Future[Any] = self._loop.create_future()
        self._pending.add(n_uncomputed)
        n_uncomputed.add_done_callback(self._pending.discard)
        return n_uncomputed

    def _gone(self) -> Unavailable:
        return Unavailable("the server is shutting down" if self._fault is None else self._fault.message)

    def _over(self, error: BaseException | None) -> None:
        """Fail everything that waits for the engine thread, which has ended."""
        if error is not None and self.served is None:
            _resolve(self._loaded, None, error)
        elif error is not None:
            self._fault = ServerFault(f"the engine has ended: {_line(error)}")
            log.error("%s", self._fault.message)
        self._accepting = False
        gone = self._gone()
        for stream in list(self._streams):
            stream.fail(Failed(gone.code, gone.type, gone.message))
        for n_uncomputed in list(self._pending):
            _resolve(n_uncomputed, None, gone)
        _resolve(self._ended, None, None)

    def _post(self, call: Callable[[Scheduler], None]) -> None:
        self._inbox.append(call)
        self._wake.set()

    def _load_done(self, served: LoadedModel) -> None:
        self.served = served
        self._loaded.set_result(served)

    # -- on the engine thread

    def _tell(self, call: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the event loop is closed: nobody reads these requests; another may come (`move`)
            self._stopping = self._stopping or self.served is None
            self._post(partial(self._drop_all, list(self._states.values())))
            self._states.clear()

    def _answer(
        self, answer: asyncio.Future[T], question: Callable[[Scheduler], T], scheduler: Scheduler, wakes: bool = True
    ) -> None:
        try:
            if wakes:
                self._use_model()
            self._tell(_resolve, answer, question(scheduler), None)
        except Exception as error:
            self._tell(_resolve, answer, None, error)

    def _run(self, build: Callable[[], LoadedModel]) -> None:
        ended_by: BaseException | None = None
        try:
            served = build()
            self._sleep = served.sleep
            self._use_model()
            self._tell(self._load_done, served)
            jobs = self._background(served)
            while True:
                self._wake.clear()  # before the inbox is read, so that no later message is missed
                while self._inbox:
                    self._inbox.popleft()(served.scheduler)
                if self._stopping:
                    break
                # cancelled sequences need no steps
                waiting = served.scheduler.idle or not self._states or (self._held_streams and self._all_held())
                began = time.perf_counter()
                ready = [(job, slicer) for job, slicer in jobs if job.ready and (waiting or slicer.left > 0)]
                if ready:
                    job, slicer = ready[0]
                    if self._ready_for_training():
                        job.run(ALONE if waiting else slicer.left, self._inbox.__len__)
                    if not waiting:
                        slicer.ran(time.perf_counter() - began)
                elif waiting and any(job.pending for job, _ in jobs):
                    self._wake.wait()
                elif waiting:
                    self._wait(served)
                else:
                    self._step(served.scheduler)
                    for _, slicer in jobs:
                        slicer.stepped(time.perf_counter() - began)
            for job, _ in jobs:
                job.close()
            if served.disk is not None:
                served.scheduler.cache.flush(served.disk, FLUSH_SECONDS)
            if served.kv_events is not None:
                served.kv_events.close()
        except BaseException as error:
            log.debug("the engine thread ended", exc_info=True)
            ended_by = error
        self._tell(self._over, ended_by)

    def _wait(self, served: LoadedModel) -> None:
        """Wait for work: do warm-up tasks first, and unload the model after the idle time."""
        sleep, scheduler, request_waits = self._sleep, served.scheduler, self._wake.is_set
        if scheduler.idle:
            while not self._wake.wait(PAUSE if self._has_request else 0.0) and (sleep is None or sleep.left()):
                if not served.prepare_ahead(request_waits):
                    break
        if scheduler.idle and served.has_lost_devices and not self.asleep:
            left = sleep.left() if sleep is not None else None
            if self._wake.wait(LOST_SECONDS if left is None else min(left, LOST_SECONDS)):
                return
            if served.take_up_devices() or sleep is None or sleep.left():
                return
        if sleep is None or not scheduler.idle:
            self._wake.wait()
        elif not self._wake.wait(sleep.left()):
            sleep.begin()
            log.info("the model sleeps: it is idle, and the next request loads it again")

    def _use_model(self) -> None:
        """Wake the model and restart its idle time.

        Raises ServerFault if it cannot be loaded again."""
        if self._sleep is not None and self._sleep.use():
            log.info("the model is awake")

    def _ready_for_training(self) -> bool:
        try:
            self._use_model()
        except ServerFault as error:
            log.error("training waits: %s", error)
            self._wake.wait(RETRY)
            return False
        return True

    def _background(self, served: LoadedModel) -> list[tuple[Background, TimeSlicer]]:
        """Background work by rank, each with its share of the time."""
        jobs: list[tuple[Background, TimeSlicer]] = []
        if served.tuning is not None:
            served.tuning.wake = self._wake.set
            served.tuning.on_change = lambda: self._tell(self._changed)
            jobs.append((served.tuning, TimeSlicer(served.train_share)))
        if served.learner is not None:
            jobs.append((served.learner, TimeSlicer(served.learner.share)))
        return jobs

    def _changed(self) -> None:
        """Notify the listeners of a change of a fine-tuning job. Runs on the event loop."""
        for listener in self.listeners:
            listener.set()

    def _admit(
        self,
        scheduler: Scheduler,
        requests: Sequence[CompletionRequest],
        client: str,
        stream: Stream,
        admitted: Callable[[BaseException | None], None] | None,
    ) -> None:
        now = time.perf_counter()
        self._has_request = True
        try:
            self._use_model()
            for index, request in enumerate(requests):
                sequence = scheduler.submit(request, client)
                self._states[id(sequence)] = _RequestState(sequence, stream, index, now)
        except Exception as error:
            if not isinstance(error, RequestError):
                log.error("submit failed: %s", _line(error), exc_info=log.isEnabledFor(logging.DEBUG))
            self._cancel(scheduler, stream)
            self._tell(admitted or stream.refuse, error)
        else:
            if admitted is not None:
                self._tell(admitted, None)

    def _cancel(self, scheduler: Scheduler, stream: Stream) -> None:
        for key, state in list(self._states.items()):
            if state.stream is stream:
                del self._states[key]
                self._drop(scheduler, state)
        self._held_streams.discard(stream)

    def _hold(self, stream: Stream, *, is_held: bool) -> None:
        """Let the decoding sequences of a stream wait, or go on."""
        for state in self._states.values():
            if state.stream is stream:
                state.sequence.hold(is_held=is_held)
        if is_held:
            self._held_streams.add(stream)
        else:
            self._held_streams.discard(stream)

    def _all_held(self) -> bool:
        """True if every sequence waits for its reader."""
        return all(state.sequence.is_held for state in self._states.values())

    def _bound(self, streams: set[Stream]) -> None:
        """Keep the log-probabilities of these streams within their bounds."""
        for stream in streams:
            if stream.overflows:
                self._tell(self._end, stream, _too_many_logprobs(stream.most or 0))
            elif not stream.whole and stream.unread > UNREAD:
                if not stream.is_held:
                    stream.is_held = True
                    self._tell(self._watch, stream)
                self._hold(stream, is_held=True)
        if self._weight_unread() > MOST_TOGETHER:
            whole = [stream for stream in streams if stream.whole]
            if whole:
                self._tell(self._end, max(whole, key=lambda stream: stream.unread), TooManyRequests(_NO_ROOM))

    def _drop_all(self, states: Sequence[_RequestState], scheduler: Scheduler) -> None:
        for state in states:
            self._drop(scheduler, state)

    def _drop(self, scheduler: Scheduler, state: _RequestState) -> None:
        try:
            scheduler.cancel(state.sequence)
        except Exception as error:
            log.error("cancel failed: %s", _line(error), exc_info=log.isEnabledFor(logging.DEBUG))

    def _step(self, scheduler: Scheduler) -> None:
        began = time.perf_counter()
        try:
            try:
                events = scheduler.step()
            finally:
                self._use_model()  # idle time begins now, before clients get the events
        except Exception as error:
            log.error("step failed: %s", _line(error), exc_info=log.isEnabledFor(logging.DEBUG))
            self._fail_running(scheduler)
            return
        now = time.perf_counter()
        self.latency.step.observe(now - began)
        deliveries: list[tuple[Stream, int, Event]] = []
        heavy: set[Stream] = set()
        for sequence, event in events:
            state = self._states.get(id(sequence))
            if state is not None:
                is_first = not state.last_token
                self._observe(state, event, now)
                if isinstance(event, Token) and event.prob is not None:
                    state.stream.weight += event.prob.weight
                    if state.stream.most is not None:
                        heavy.add(state.stream)
                if state.stream.whole and isinstance(event, Token) and not is_first:
                    state.buffer.append(event)
                    state.stream.latest[state.index] = event
                    continue
                deliveries += [(state.stream, state.index, buffer) for buffer in state.buffer]
                deliveries.append((state.stream, state.index, event))
        if heavy:  # before the delivery: who reads the last event sees that the stream is held
            self._bound(heavy)
        if deliveries:
            self._tell(_deliver, deliveries)

    def _observe(self, state: _RequestState, event: Event, now: float) -> None:
        if isinstance(event, Token):
            if state.last_token:
                self.latency.inter_token.observe(now - state.last_token)
            else:
                self.latency.first_token.observe(now - state.submitted)
            state.last_token = now
        elif isinstance(event, Finished | Failed):
            del self._states[id(state.sequence)]
            if isinstance(event, Finished):
                worked = (event.timings.prompt_ms + event.timings.predicted_ms) / 1000
                self.latency.queue.observe(max(0.0, now - state.submitted - worked))

    def _fail_running(self, scheduler: Scheduler) -> None:
        """End the running requests with error 500 after an unexpected error of a step."""
        failed = Failed(500, "server_error", "the step that computed this request failed")
        states = [state for state in self._states.values() if state.sequence.slot is not None]
        states = states or list(self._states.values())
        for state in states:
            del self._states[id(state.sequence)]
            self._drop(scheduler, state)
        self._tell(_deliver, [(state.stream, state.index, failed) for state in states])


_NO_ROOM = "the log-probabilities of all answers take too much memory now; try again later"


def _too_many_logprobs(most: int) -> InvalidRequest:
    return InvalidRequest(
        f"log-probabilities: one answer has room for {most} (results × tokens × likely tokens); ask for fewer"
    )


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _deliver(deliveries: list[tuple[Stream, int, Event]]) -> None:
    for stream, index, event in deliveries:
        stream.push(index, event)


async def _outcome(future: asyncio.Future[T]) -> T:
    """The future's result. Its error keeps nothing: no frame of the error's traceback has the future."""
    try:
        return await future
    finally:
        del future


def _resolve(future: asyncio.Future[Any], value: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Sizes and file type of the loaded model."""

    n_ctx: int  # tokens of the longest sequence of one slot
    n_ctx_train: int = 0
    n_vocab: int = 0
    n_embd: int = 0
    n_params: int = 0
    nbytes: int = 0
    vocab_type: int = 0
    ftype: str = ""
    generates: bool = True  # False: the model only makes embeddings
    n_start: int = 0  # tokens that the engine puts behind a prompt: an encoder's decoder goes on from one
    untrainable: str = ""  # why no text can be scored or trained on

    def check_trainable(self) -> None:
        """InvalidRequest: the model scores no texts and cannot be trained."""
        if self.untrainable:
            raise InvalidRequest(f"this model {self.untrainable}: it scores no texts and cannot be fine-tuned")

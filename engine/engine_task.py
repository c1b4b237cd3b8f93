"""Off-thread task: a call on its own thread that hands device work to the engine thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from logitless.engine.errors import is_full

log = logging.getLogger("logitless.training")
T = TypeVar("T")
RETRY = 1.0  # seconds between attempts to write to a full disk
GIVEN_UP = "the engine has ended"


class EngineTask:
    """Call that runs on its own thread. The engine thread executes its `ask` calls in `serve`."""

    def __init__(
        self, call: Callable[[], Any], wake: Callable[[], None], waits: Callable[[], object] = lambda: False
    ) -> None:
        """`wake`: called when the engine thread has something to do: a question, or the end of the
        call. `waits()`: a call for which the disk is full is repeated, as long as it is true."""
        self._call, self._wake, self._waits = call, wake, waits
        self._questions: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._outcome: Future[Any] = Future()
        self._given_up = False
        self._thread = threading.Thread(target=self._run, name="engine-task", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome.set_result(self._patient_call())
        except BaseException as error:
            self._outcome.set_exception(error)
        self._wake()

    def _patient_call(self) -> Any:
        waited = False
        while True:
            try:
                return self._call()
            except OSError as error:
                if not is_full(error) or self._given_up or not self._waits():
                    raise
                if not waited:
                    log.error("training waits, because the disk is full: %s", error)
                waited = True
            time.sleep(RETRY)

    def ask(self, question: Callable[[], T]) -> T:
        """Run `question` on the engine thread and return its result. Only the call itself may ask.

        Raises OSError if the engine has ended."""
        answer: Future[T] = Future()
        self._questions.put((question, answer))
        self._wake()
        while not self._given_up:
            try:
                return answer.result(1.0)
            except TimeoutError:
                if answer.done():  # the question itself raised it
                    raise
        raise OSError(GIVEN_UP)

    @property
    def is_here(self) -> bool:
        """True on the task's own thread."""
        return threading.current_thread() is self._thread

    @property
    def over(self) -> bool:
        return self._outcome.done()

    @property
    def wants(self) -> bool:
        """True if there is something for the engine thread to do."""
        return self.over or not self._questions.empty()

    def serve(self, patience: float = 0.0) -> None:
        """Answer one question; wait up to `patience` seconds for it."""
        try:
            question, answer = self._questions.get(patience > 0, patience)
        except queue.Empty:
            return
        try:
            answer.set_result(question())
        except BaseException as error:
            answer.set_exception(error)

    def finish(self, seconds: float) -> bool:
        """Serve the task for at most `seconds`; True if it ended. Later questions get no answer."""
        until = time.monotonic() + seconds
        while not self.over and time.monotonic() < until:
            self.serve(0.01)
        self._given_up = True
        return self.over

    def result(self) -> Any:
        """Result or error of the call, which is over."""
        return self._outcome.result()

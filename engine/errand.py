"""Work for the engine's thread that need not be done there, but for what it asks of the device."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
GIVEN_UP = "the engine has ended"


class Errand:
    """A call that runs beside the engine's thread. What it hands to `ask` is done by that thread, in `serve`."""

    def __init__(self, call: Callable[[], Any], wake: Callable[[], None]) -> None:
        """`wake`: the engine's thread should look, because something is asked or the call is over."""
        self._call, self._wake = call, wake
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._outcome: Future[Any] = Future()
        self._given_up = False
        self._thread = threading.Thread(target=self._run, name="errand", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome.set_result(self._call())
        except BaseException as error:
            self._outcome.set_exception(error)
        self._wake()

    def ask(self, question: Callable[[], T]) -> T:
        """What `question` returns on the engine's thread. Only the call itself may ask."""
        answer: Future[T] = Future()
        self._asked.put((question, answer))
        self._wake()
        while not self._given_up:
            try:
                return answer.result(1.0)
            except TimeoutError:
                if answer.done():  # it was the question's own
                    raise
        raise OSError(GIVEN_UP)

    @property
    def is_here(self) -> bool:
        """Whether it is the thread that asks."""
        return threading.current_thread() is self._thread

    @property
    def over(self) -> bool:
        return self._outcome.done()

    @property
    def wants(self) -> bool:
        """Whether there is something for the engine's thread to do."""
        return self.over or not self._asked.empty()

    def serve(self, patience: float = 0.0) -> None:
        """Answer one question, waiting so many seconds for it."""
        try:
            question, answer = self._asked.get(patience > 0, patience)
        except queue.Empty:
            return
        try:
            answer.set_result(question())
        except BaseException as error:
            answer.set_exception(error)

    def finish(self, seconds: float) -> bool:
        """Serve it to its end, for so long at most: whether it came to an end. It gets no answers any more."""
        until = time.monotonic() + seconds
        while not self.over and time.monotonic() < until:
            self.serve(0.01)
        self._given_up = True
        return self.over

    def result(self) -> Any:
        """What the call returned, or raised. For one that is over."""
        return self._outcome.result()

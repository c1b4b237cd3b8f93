"""Requests that wait for a seat: who is next, and when there are too many."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator

from server.errors import TooManyRequests, Unavailable
from server.requests import CompletionRequest
from server.sequence import Sequence

Line = tuple[int, str]  # (priority, client)


class WaitingRoom:
    """A line for each client and priority. The least priority is served first; of several clients the one with the
    fewest seats is; of one client's requests the oldest is.

    `max_requests` and `max_tokens` (of prompts) bound what may wait beyond the free seats; -1: no bound.
    """

    def __init__(self, max_requests: int = -1, max_tokens: int = -1) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.n_tokens = 0
        self._lines: dict[Line, deque[Sequence]] = {}
        self._seconds = 1.0  # that a request has its seat, on average

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for line in self._lines.values() for seq in line)

    def check(self, request: CompletionRequest, client: str, n_free: int, n_seats: int) -> None:
        """429 or 503 where one more request would be too many: the client's own fault, or that of others."""
        n_waiting = len(self) + 1 - n_free
        if n_waiting <= 0:
            return
        if 0 <= self.max_requests < n_waiting:
            reason = f"{n_waiting - 1} requests wait already, and no more than {self.max_requests} may"
        elif 0 <= self.max_tokens < self.n_tokens + len(request.prompt):
            reason = f"prompts of {self.n_tokens} tokens wait already, and no more than {self.max_tokens} may"
        else:
            return
        own = any(line for (_, of), line in self._lines.items() if of == client)
        error = (TooManyRequests if own else Unavailable)(f"the queue is full: {reason}; try again later")
        error.retry_after = min(600, max(1, math.ceil(self._seconds * n_waiting / n_seats)))
        raise error

    def push(self, seq: Sequence) -> None:
        """The youngest of its line."""
        self._lines.setdefault(_line(seq), deque()).append(seq)
        self.n_tokens += seq.n_prompt

    def remove(self, seq: Sequence) -> None:
        """It has a seat, or wants none any more."""
        line = self._lines[_line(seq)]
        line.remove(seq)
        self.n_tokens -= seq.n_prompt
        if not line:
            del self._lines[_line(seq)]

    def next(self, seated: list[Sequence], can_sit: Callable[[Sequence], bool]) -> Sequence | None:
        """Who gets a free seat, among those that can (a request may want a certain one)."""
        seats = Counter(seq.client for seq in seated)
        lines = sorted(self._lines.items(), key=lambda item: (item[0][0], seats[item[0][1]], item[1][0].id))
        return next((seq for _, line in lines for seq in line if can_sit(seq)), None)

    def left(self, seconds: float) -> None:
        """A request has left its seat after so long."""
        self._seconds += (seconds - self._seconds) / 16


def _line(seq: Sequence) -> Line:
    return seq.request.priority, seq.client

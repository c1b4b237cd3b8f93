"""Waiting queue: requests without a slot, their order, and the bound on their number."""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterator, Set

from logitless.engine.errors import TooManyRequests, Unavailable
from logitless.engine.requests import BATCH_PRIORITY, CompletionRequest
from logitless.engine.sequence import Sequence

Line = tuple[int, str]  # (priority, client)
REMEMBERED = 1000  # clients whose last turn is kept


class WaitingQueue:
    """A queue for each client and priority, which share slots fairly.

    The priority whose oldest request has the smallest rank comes first; then the client with the
    fewest slots; then the client whose last turn is longest ago; of one client the oldest request.
    `max_requests` and `max_tokens` (of prompts) bound the requests beyond the free slots; -1: no
    bound. Requests of batches do not count: they give way."""

    def __init__(self, max_requests: int = -1, max_tokens: int = -1) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.n_tokens = 0
        self._lines: dict[Line, deque[Sequence]] = {}
        self._turns: dict[str, int] = {}  # number of a client's last turn, the oldest first
        self._n_turns = 0
        self._seconds = 1.0  # moving average of a request's time in its slot

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for line in self._lines.values() for seq in line)

    def check(self, request: CompletionRequest, client: str, n_free: int, n_seats: int) -> None:
        """Raise 429 or 503 if one more request would be too many: by the client's own requests, or
        others'. `n_free`: slots that are free or held by requests that give way."""
        if request.gives_way:
            return
        n_waiting = self.n_urgent + 1 - n_free
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

    @property
    def n_urgent(self) -> int:
        """Waiting requests to which those of batches give way."""
        return sum(len(line) for (priority, _), line in self._lines.items() if priority < BATCH_PRIORITY)

    def push(self, seq: Sequence) -> None:
        """Add a request to its queue: behind the older ones."""
        insort(self._lines.setdefault(_line(seq), deque()), seq, key=lambda seq: seq.rank)
        self.n_tokens += 0 if seq.request.gives_way else seq.n_prompt

    def remove(self, seq: Sequence) -> None:
        """Remove a request that was cancelled or got a slot."""
        line = self._lines[_line(seq)]
        line.remove(seq)
        self.n_tokens -= 0 if seq.request.gives_way else seq.n_prompt
        if not line:
            del self._lines[_line(seq)]

    def take(self, seated: list[Sequence], slots: Set[int]) -> Sequence | None:
        """Remove and return the next request, among those whose `id_slot` is one of these."""
        first: dict[Line, Sequence] = {}
        for line, seqs in self._lines.items():
            if seq := next((seq for seq in seqs if seq.request.id_slot in slots), None):
                first[line] = seq
        best: dict[int, tuple[int, int]] = {}  # rank by priority
        for (priority, _), seq in first.items():
            best[priority] = min(best.get(priority, seq.rank), seq.rank)
        seats = Counter(seq.client for seq in seated)
        order = {
            line: (best[line[0]], seats[line[1]], self._turns.get(line[1], 0), seq.id) for line, seq in first.items()
        }
        if not order:
            return None
        seq = first[min(order, key=order.__getitem__)]
        self.remove(seq)
        self._note_turn(seq.client)
        return seq

    def _note_turn(self, client: str) -> None:
        self._n_turns += 1
        self._turns.pop(client, None)
        self._turns[client] = self._n_turns
        if len(self._turns) > REMEMBERED:  # a forgotten client comes first, as a new one does
            del self._turns[next(iter(self._turns))]

    def left(self, seconds: float) -> None:
        """Note the seconds that a request had its slot."""
        self._seconds += (seconds - self._seconds) / 16


def _line(seq: Sequence) -> Line:
    return seq.request.priority, seq.client

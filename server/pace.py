"""How many tokens a step with prompts may have without making the streams beside them stutter."""

from __future__ import annotations

import statistics
from collections import deque

STRETCH = 2.75  # a step with prompts may take so many times as long as one without; clients see a little more
LEAST = 7  # tokens of prompts: they go on, however slow they are beside the streams; with one stream a batch of 8
REMEMBERED = 7  # steps: their median forgets an outlier, such as the first step of a new size


class Pace:
    """Learns from the steps that ran what streams are used to, and what a token of a prompt costs them."""

    def __init__(self, most: int) -> None:
        self.most = most  # tokens of prompts in a step with streams
        self._plain: deque[float] = deque(maxlen=REMEMBERED)  # seconds of steps without prompts
        self._token = 0.0  # seconds that each token of a prompt took or added, last time
        self._tried = 0  # the tokens of that step, if streams were in it

    def observe(self, n_prompt: int, n_tokens: int, seconds: float) -> None:
        """A step took `seconds` for `n_tokens`, of which `n_prompt` belong to prompts."""
        if not n_prompt:
            self._plain.append(seconds)
        elif n_prompt == n_tokens:
            self._token, self._tried = seconds / n_prompt, 0
        elif self._plain:
            self._token, self._tried = max(0.0, seconds - statistics.median(self._plain)) / n_prompt, n_tokens

    def tokens(self, n_streams: int) -> int:
        """The tokens that the next step may have, `n_streams` of them for streams.

        A power of two where it can be, for every size needs a plan of its own when it comes first. At most twice as
        many as last time, because what a token costs depends on how many there are.
        """
        most = n_streams + self.most
        if self._plain and self._token:
            spare = (STRETCH - 1) * statistics.median(self._plain)
            most = min(most, n_streams + int(spare / self._token), 2 * self._tried or most)
        return max(1 << most.bit_length() - 1, n_streams + min(LEAST, self.most))

"""Results of the Python API: completions, chat messages, chunks of streams, scores, rankings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class TokenLogprob:
    """A token with its log-probability before sampling; `top` has the likeliest as (id, value)."""

    id: int
    text: str
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Completion:
    """A generated text. `finish_reason`: "stop" (end token or stop text) or "length"."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int  # of the prompt, taken from the prefix cache
    seconds: float  # of prefill and decode
    seed: int
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # if asked for; the first token has none

    others: tuple[Completion, ...] = ()  # further results of the prompt (SamplingParams.n)

    @property
    def outputs(self) -> tuple[Completion, ...]:
        """All results of the prompt, as vLLM has them: `outputs[0].text` is that of the completion itself."""
        return (self, *self.others)


@dataclass(frozen=True)
class Chunk:
    """Text of a stream. The last one has the `finish_reason`, and perhaps no text."""

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """An assistant's message: its answer, the reasoning before it, and calls of tools."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    role: str = "assistant"


@dataclass(frozen=True)
class ChatCompletion:
    """A message as the answer to others. `finish_reason`: "stop", "length" or "tool_calls"."""

    message: Message
    finish_reason: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    seed: int
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # if asked for; the first token has none

    others: tuple[ChatCompletion, ...] = ()  # further answers (SamplingParams.n)

    @property
    def outputs(self) -> tuple[ChatCompletion, ...]:
        """All answers, as vLLM has them; the first is the answer itself."""
        return (self, *self.others)

    @property
    def text(self) -> str:
        """The answer's text."""
        return self.message.content


@dataclass(frozen=True)
class ChatChunk:
    """Part of a streamed message: text, reasoning, or a call of a tool that has begun or goes on.

    A part of a call has the call's `tool_index`; its first part has `tool_id` and `tool_name`."""

    text: str = ""
    reasoning: str = ""
    tool_index: int | None = None
    tool_id: str = ""
    tool_name: str = ""
    tool_arguments: str = ""
    finish_reason: str | None = None


@dataclass(frozen=True)
class Score:
    """Log-probabilities of a given text: `logprobs[i]` is of `token_ids[i + 1]`, natural logarithm.

    `loss` is the mean of -log p over the `n_counted` tokens that training would learn."""

    token_ids: tuple[int, ...]
    logprobs: npt.NDArray[np.float32] = field(repr=False)
    loss: float
    n_counted: int
    gradient_norm: float | None = None


@dataclass(frozen=True)
class Ranking:
    """A document's relevance to a query; `index` is its place in the list that was given."""

    index: int
    score: float
    document: str


@dataclass(frozen=True)
class Pooled:
    """Embedding of a text in the shape of vLLM's results: `outputs.data`."""

    data: npt.NDArray[np.float32] = field(repr=False)
    prompt_token_ids: tuple[int, ...]
    finished: bool = True

    @property
    def outputs(self) -> Pooled:
        return self


@dataclass(frozen=True)
class BeamSearchSequence:
    """A sequence that beam search found; `tokens` and `text` begin with the prompt, as vLLM's."""

    tokens: tuple[int, ...]
    text: str
    cum_logprob: float  # of the tokens after the prompt
    finish_reason: str  # "stop" (end token) or "length"


@dataclass(frozen=True)
class BeamSearchOutput:
    """Sequences of one prompt, the best first."""

    sequences: tuple[BeamSearchSequence, ...]

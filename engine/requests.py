"""Requests and events: input of the scheduler from a client, and its output to the client."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Final, Literal, overload

from msgspec import Struct

from logitless.engine.sampling.params import SamplingParams
from logitless.engine.sampling.reasoning_budget import ReasoningLimit
from logitless.engine.speculation.settings import SpeculationParams
from logitless.models.media.prompt_media import PromptMedia

Lora = tuple[tuple[int, float], ...]
StopType = Literal["eos", "limit", "word"]
WEIGHT: Final = 8  # of a token's probability without alternatives, in alternatives
BATCH_PRIORITY: Final = 1 << 31  # of requests that give way to all others; no client can ask for it


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Request for one generation: the prompt's token ids (never empty) and how to continue it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    # most tokens to generate; -1: until a stop or a full context; 0: prefill only
    n_predict: int = -1
    stop: tuple[str, ...] = ()  # stop strings, not part of the text
    turn_end: str = ""  # text that ends a turn as an end token does, which the vocabulary lacks
    ignore_eos: bool = False  # end tokens are also in sampling.logit_bias with -inf
    cache_prompt: bool = True
    # cached prefixes are shared by requests of equal salt only; its owner is in front of a "/"
    cache_salt: str = ""
    n_cache_reuse: int = 0  # cache reuse: shortest chunk of tokens to move; 0: off
    id_slot: int = -1
    priority: int = 0  # smaller values are served first
    n_keep: int = 0  # context shift: tokens of the prompt that stay; -1: all
    n_discard: int = 0  # context shift: tokens that are dropped; 0: half of the rest
    n_indent: int = 0
    # 0: no limit; checked after the first newline, as llama-server does
    t_max_predict_ms: float = 0
    # n: log-probabilities of each prompt token and of the n likeliest ones
    prompt_logprobs: int | None = None
    return_progress: bool = False
    lora: Lora | None = None  # adapters by id with their scales; None: the server's default scales
    special: bool = False  # show special tokens as text
    end_text: bool | None = None  # show the text of the token that ends it; None: as `special` says
    stop_text: bool = False  # the stop string is part of the text
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    verify: bool = False  # end at the first token that differs from the client's draft
    reasoning: ReasoningLimit | None = None
    # special tokens that are shown even if `special` is False
    preserved: frozenset[int] = frozenset()
    background: bool = False  # of training: computed in the time that users leave (Scheduler.step_background)
    media: PromptMedia | None = None  # tiles in the prompt, whose tokens there are negative
    n_source: int = 0  # leading tokens of the prompt that an encoder reads, all together

    @property
    def gives_way(self) -> bool:
        """True for a request of a batch or of training: it leaves its slot when another request waits."""
        return self.priority >= BATCH_PRIORITY

    @property
    def is_batch(self) -> bool:
        """True for a request of a batch: users' streams have the device first."""
        return self.gives_way and not self.background

    @property
    def text_ids(self) -> tuple[int, ...]:
        """The prompt without the rows of its images."""
        return self.prompt if self.media is None else tuple(id for id in self.prompt if id >= 0)

    def behind_encoder(self, start: int) -> CompletionRequest:
        """The request to a decoder that goes on from `start`. Only equal prompts share what they have in the cache."""
        digest = blake2b(array("i", self.prompt).tobytes(), digest_size=16).hexdigest()
        salt = f"{self.cache_salt}/{digest}"
        return replace(self, prompt=(*self.prompt, start), n_source=len(self.prompt), cache_salt=salt)

    @property
    def prompt_weight(self) -> int:
        """Memory of the prompt's log-probabilities, as TokenProb.weight."""
        return 0 if self.prompt_logprobs is None else len(self.prompt) * (WEIGHT + self.prompt_logprobs)

    @property
    def shows_end(self) -> bool:
        """True if the token that ends the generation has a text."""
        return self.special if self.end_text is None else self.end_text


class Ranking(Sequence[tuple[int, float]]):
    """The likeliest tokens as (id, value), best first, in arrays: a pair of Python numbers takes 15 times
    as much memory."""

    __slots__ = ("_ids", "_values")

    def __init__(self, ids: array[int], values: array[float]) -> None:
        self._ids, self._values = ids, values

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self._ids, self._values, strict=True)

    @overload
    def __getitem__(self, at: int) -> tuple[int, float]: ...
    @overload
    def __getitem__(self, at: slice) -> Ranking: ...
    def __getitem__(self, at: int | slice) -> tuple[int, float] | Ranking:
        if isinstance(at, slice):
            return Ranking(self._ids[at], self._values[at])
        return self._ids[at], self._values[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ranking({list(self)})"


class TokenProb(Struct, frozen=True):
    """Token with its log-probability before sampling, or with its probability after the filters.

    The latter is for `post_sampling_probs`."""

    id: int
    value: float
    top: Sequence[tuple[int, float]] = ()  # (id, value), best first

    @property
    def weight(self) -> int:
        """Its memory, in alternatives of 8 bytes."""
        return WEIGHT + len(self.top)


class Timings(Struct, frozen=True, gc=False):
    """Milliseconds and counts of one generation (llama-server's `timings`)."""

    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    draft_n: int = 0  # draft tokens that were verified
    draft_n_accepted: int = 0  # draft tokens that were accepted

    @property
    def n_prompt(self) -> int:
        return self.cache_n + self.prompt_n


class Progress(Struct, frozen=True, gc=False):
    """Progress of the prefill (`return_progress`), in tokens."""

    total: int
    cache: int
    processed: int
    time_ms: float
    id_slot: int = -1


class Token(Struct, frozen=True):
    """One sampled token.

    `text`: the text to show now; "" while a character or a stop string is incomplete.
    `prompt_probs`: with the first token, if they are asked for; as in Finished."""

    id: int
    text: str
    prob: TokenProb | None = None
    timings: Timings | None = None
    id_slot: int = -1
    prompt_probs: tuple[TokenProb | None, ...] = ()


class Finished(Struct, frozen=True):
    """The last event of a generation."""

    stop_type: StopType
    stopping_word: str = ""
    text: str = ""  # buffered text that did not become a stop string
    truncated: bool = False  # the context was full
    has_new_line: bool = False
    n_prompt: int = 0
    n_cached: int = 0  # prompt tokens from the prefix cache
    n_predicted: int = 0
    n_in_cache: int = 0  # tokens of this sequence in the KV cache (llama-server's tokens_cached)
    id_slot: int = -1
    seed: int = 0  # effective seed
    timings: Timings = Timings()
    rng_used: tuple[int, int] = (0, 0)  # see SamplingParams
    prediction: tuple[int, int] = (0, 0)  # tokens of the client's draft: accepted, rejected
    # one per prompt token if asked for; the first is None
    prompt_probs: tuple[TokenProb | None, ...] = ()
    stop_token: int | None = None  # of the request's stop_token_ids


class Failed(Struct, frozen=True, gc=False):
    """Error that ended the request; `code` and `type` as in logitless.engine.errors."""

    code: int
    type: str
    message: str


Event = Progress | Token | Finished | Failed

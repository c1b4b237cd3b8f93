"""What a client asks for, and what it gets back: the types between HTTP (or the command line) and the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from logitless.engine.sampling.params import SamplingParams
from logitless.engine.sampling.reasoning_budget import ReasoningLimit
from logitless.engine.speculation.settings import SpeculationParams

Lora = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One generation: the prompt's token ids (never empty) and how to continue it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n_predict: int = -1  # -1: until a stop or the context is full; 0: only evaluate the prompt
    stop: tuple[str, ...] = ()  # texts that end the generation and are not part of it
    ignore_eos: bool = False  # end tokens are also in sampling.logit_bias with -inf
    cache_prompt: bool = True
    n_cache_reuse: int = 0  # the fewest tokens worth moving from where they were in the slot; 0: none are
    id_slot: int = -1
    priority: int = 0  # the less, the sooner
    n_keep: int = 0  # context shift: tokens of the prompt that stay; -1: all
    n_discard: int = 0  # tokens that go; 0: half of the rest
    n_indent: int = 0
    t_max_predict_ms: float = 0  # 0: no limit; checked after the first newline, as llama-server does
    prompt_logprobs: int | None = None  # n: log-probabilities of every prompt token and of the top n beside it
    return_progress: bool = False
    lora: Lora | None = None  # adapters by id with their scales; None: the server's default scales
    special: bool = False  # show special tokens as text
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    verify: bool = False  # end with the first token that is not the client's draft's
    reasoning: ReasoningLimit | None = None
    preserved: frozenset[int] = frozenset()  # special tokens that are shown nevertheless


@dataclass(frozen=True, slots=True)
class TokenProb:
    """A token with its log-probability before sampling, or (post_sampling_probs) its probability after the filters."""

    id: int
    value: float
    top: tuple[tuple[int, float], ...] = ()  # (id, value), best first


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds and counts of one generation (llama-server's `timings`)."""

    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    draft_n: int = 0  # tokens that were guessed, tried and...
    draft_n_accepted: int = 0  # ...came true


@dataclass(frozen=True, slots=True)
class Progress:
    """The prompt is being evaluated (`return_progress`)."""

    total: int
    cache: int
    processed: int
    time_ms: float
    id_slot: int = -1


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token. `text` is what became safe to show with it: "" while a character or a stop text is open."""

    id: int
    text: str
    prob: TokenProb | None = None
    timings: Timings | None = None
    id_slot: int = -1


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a generation."""

    stop_type: str  # "eos" | "limit" | "word"
    stopping_word: str = ""
    text: str = ""  # what was held back and turned out not to be a stop text
    truncated: bool = False  # the context was full
    has_new_line: bool = False
    n_prompt: int = 0
    n_cached: int = 0  # prompt tokens that were not evaluated again
    n_predicted: int = 0
    n_in_cache: int = 0  # tokens of this sequence in the KV cache (llama-server's tokens_cached)
    id_slot: int = -1
    seed: int = 0  # the seed that was used
    timings: Timings = field(default_factory=Timings)
    rng_used: tuple[int, int] = (0, 0)  # see SamplingParams
    prediction: tuple[int, int] = (0, 0)  # tokens of the client's draft: accepted, rejected
    prompt_probs: tuple[TokenProb | None, ...] = ()  # one per prompt token when asked for; the first is None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended with an error; `code` and `type` as in logitless.engine.errors."""

    code: int
    type: str
    message: str


Event = Progress | Token | Finished | Failed

"""Sequence: the tokens and the state of one generation; Slot: the place that it runs in."""

from __future__ import annotations

from typing import Protocol

from logitless.engine.kv_cache.block_table import BlockTable
from logitless.engine.kv_cache.prefix_cache import Node
from logitless.engine.requests import CompletionRequest, Timings, TokenProb
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.sampling.reasoning_budget import ReasoningBudget
from logitless.engine.sampling.sampler import F32, Row
from logitless.engine.sampling.stop_filter import StopFilter
from logitless.engine.speculation.draft_state import Drafts
from logitless.models.adapters.stacked_lora import BASE, AdapterChoice

MOST_TOKENS = 1 << 31
# warm-up of a stream: prompts that arrive during it count as arrived together with its own
FIRST_TOKENS = 8
PLACES_PER_PRIORITY = 100  # later requests that a level of priority overtakes


class Sampler(Protocol):
    """Sampler of one sequence (engine/sampling/sampler.py). `feeds` does not change until `accept`."""

    seed: int
    stateful: bool  # the device keeps state from row to row: no drafts
    problem: str  # reason that no token can be sampled any more; "": none
    ended: bool  # the reason is that the grammar's text is complete, and end tokens are ruled out

    @property
    def ready(self) -> bool: ...

    @property
    def rng_used(self) -> tuple[int, int]: ...

    def begin(self, prompt: tuple[int, ...], /) -> None: ...

    def move(self, state: tuple[float, ...], /) -> None: ...

    def feeds(self) -> Row: ...

    def draft_feeds(self, draft: list[int], /) -> list[Row]: ...

    def feeds_after(self, draft: list[int], n_dist: int, n_xtc: int, /) -> Row: ...

    # tokens that the device gives `choose`; 0: the device chooses, and `accept` is called
    n_candidates: int
    on_host: bool  # the device gives `process` all logits, and `accept` is not called
    # candidates after `choose`: ids, probabilities, the chosen one's
    left: tuple[list[int], list[float], float] | None

    def accept(self, word: int, /) -> int: ...

    def choose(self, word: int, n_left: int, ids: list[int], p: F32, /) -> int: ...

    def process(self, prompt: list[int], generated: list[int], logits: F32, /) -> int: ...

    def force(self, id: int, /) -> None: ...


class Sequence:
    """One request being generated. Its *uncomputed* tokens are not in the KV cache yet; each step
    computes some.

    A sequence is started while it has blocks: a preempted one has lost its blocks and nothing else,
    and all of its tokens are uncomputed again."""

    __slots__ = (
        "choice",
        "client",
        "done",
        "drafts",
        "has_new_line",
        "id",
        "is_held",
        "kv",
        "late",
        "n_cached",
        "n_computed",
        "n_encoded",
        "n_lost",
        "n_probs",
        "n_prompt",
        "not_preemptible",
        "post_sampling_probs",
        "prompt_probs",
        "rank",
        "reasoning",
        "refused_at",
        "request",
        "resumed",
        "sampler",
        "samples",
        "served",
        "slot",
        "started",
        "stop_filter",
        "t_first",
        "t_last",
        "t_start",
        "throttled",
        "tokens",
    )

    def __init__(
        self,
        id: int,
        request: CompletionRequest,
        stop_filter: StopFilter,
        root: Node,
        choice: AdapterChoice = BASE,
        client: str = "",
    ) -> None:
        self.id = id  # grows with arrival
        self.request = request
        self.client = client  # the client's key: clients take turns
        # priority key: the smallest goes first
        self.rank = id + PLACES_PER_PRIORITY * request.priority, id
        self.tokens = list(request.prompt)
        self.n_prompt = len(request.prompt)
        self.n_computed = 0  # leading tokens whose keys and values are in the cache
        self.n_cached = 0  # tokens of the prompt that came from the prefix cache
        self.n_encoded = MOST_TOKENS if request.media is None else 0  # leading tokens before the first missing image
        self.sampler: Sampler  # from when it has a slot: a sampler takes time and memory
        self.stop_filter = stop_filter
        self.slot: Slot | None = None
        self.done = False
        self.has_new_line = False
        self.prompt_probs: list[TokenProb | None] = [None]
        self.samples = request.n_predict != 0
        self.n_probs = max(0, request.sampling.n_probs)
        self.post_sampling_probs = request.sampling.post_sampling_probs
        self.reasoning: ReasoningBudget | None = None  # reasoning budget, if there is one
        # Speculation.
        self.drafts: Drafts | None = None  # drafters and the draft, if it has drafters
        self.choice = choice  # weights and adapters
        self.kv = BlockTable(root)
        # Scheduling.
        self.started = False
        self.late = False  # its grammar mask is pending
        self.is_held = False  # it waits until its client has read what is computed
        self.resumed = False  # has been preempted
        # its prefill is throttled: it is long, or streams were past their warm-up before it
        self.throttled = True
        self.n_lost = 0  # tokens computed when it lost its blocks
        self.refused_at = -1  # RunningSet.n_released when it last found too few blocks to start
        self.served = 0  # step of its last turn, if not all sequences have one in each step
        self.not_preemptible = False  # a preemptible prefill chunk has failed: no further ones
        # Seconds by the scheduler's clock.
        self.t_start = 0.0  # first batch
        self.t_first = 0.0  # end of prefill
        self.t_last = 0.0  # last token

    @property
    def n_uncomputed(self) -> int:
        return len(self.tokens) - self.n_computed

    def hold(self, *, is_held: bool) -> None:
        """Let a decoding sequence wait for its client, or go on."""
        self.is_held = is_held and self.n_generated > 0

    @property
    def n_schedulable(self) -> int:
        """Tokens that may be computed now; those that would fill the context wait for its shift."""
        assert self.slot is not None
        if self.is_held:
            return 0
        return min(len(self.tokens), self.slot.n_computable, self.n_encoded) - self.n_computed

    def chunk(self, n: int) -> int:
        """Tokens of a prefill chunk of about n: some images are computed whole, and what an encoder reads."""
        if self.n_computed < self.request.n_source:
            return self.request.n_source + 1
        return n if self.request.media is None else self.request.media.chunk(self.n_computed, n)

    @property
    def n_generated(self) -> int:
        return len(self.tokens) + self.kv.n_dropped - self.n_prompt

    @property
    def is_decoding(self) -> bool:
        """True for a decoding stream: a client sees the time between its tokens. A batch is no stream."""
        return self.n_generated > 1 and not self.request.is_batch

    @property
    def past_warmup(self) -> bool:
        """True if it is past its warm-up."""
        return self.n_generated > FIRST_TOKENS and not self.request.is_batch

    @property
    def is_processing(self) -> bool:
        return self.slot is not None and not self.done

    @property
    def n_remain(self) -> int:
        """Tokens that may still be generated; -1: no limit but the context's."""
        limit = self.request.n_predict
        return -1 if limit < 0 else max(0, limit - self.n_generated)

    @property
    def takes_inexact(self) -> bool:
        """True if it may use cells moved from other positions (`n_cache_reuse`)."""
        return self.kv.shifted if self.resumed else self.request.cache_prompt and self.request.n_cache_reuse > 0

    def discard(self, n_keep: int, n_discard: int) -> None:
        """Remove n_discard computed tokens after the first n_keep: a context shift."""
        del self.tokens[n_keep : n_keep + n_discard]
        self.n_computed -= n_discard
        self.n_lost = 0

    def timings(self) -> Timings:
        n_prompt = self.n_prompt
        drafts = self.drafts
        return Timings(
            self.n_cached,
            n_prompt - self.n_cached,
            (self.t_first - self.t_start) * 1000,
            self.n_generated,
            (self.t_last - self.t_first) * 1000,
            0 if drafts is None else drafts.n_drafted,
            0 if drafts is None else drafts.n_accepted,
        )


class Slot:
    """The place of one running sequence. It keeps the last one: its cached tokens, and its state for /slots."""

    __slots__ = ("cached", "choice", "id", "last_used", "n_computable", "n_ctx", "salt", "sequence")

    def __init__(self, id: int, n_ctx: int, *, shifts: bool = False) -> None:
        """`shifts`: a full context is shifted before its last cell is used."""
        self.id = id
        self.n_ctx = n_ctx
        self.n_computable = n_ctx - shifts  # tokens of a sequence that may be computed
        self.sequence: Sequence | None = None  # the running one, else the last one
        self.cached: list[int] = []  # tokens of the last one that were in the cache at its end
        self.choice = BASE  # weights and adapters that computed them
        self.salt = ""  # cache salt of the last one
        self.last_used = 0  # grows with use

    def is_of(self, owner: str | None) -> bool:
        """True if the slot's content is this owner's, by the cache salt. None: any owner's."""
        salts = (self.salt,) if self.sequence is None else (self.salt, self.sequence.request.cache_salt)
        return owner is None or all(salt.partition("/")[0] == owner for salt in salts)

    @property
    def is_processing(self) -> bool:
        return self.sequence is not None and not self.sequence.done

    @property
    def id_task(self) -> int:
        return -1 if self.sequence is None else self.sequence.id

    @property
    def params(self) -> SamplingParams | None:
        return None if self.sequence is None else self.sequence.request.sampling

    @property
    def has_next_token(self) -> bool:
        return self.is_processing

    @property
    def has_new_line(self) -> bool:
        return self.sequence is not None and self.is_processing and self.sequence.has_new_line

    @property
    def n_decoded(self) -> int:
        return self.sequence.n_generated if self.sequence is not None and self.is_processing else 0

    @property
    def n_remain(self) -> int:
        """Tokens that the running sequence may still generate; -1: no limit, or none runs."""
        return self.sequence.n_remain if self.sequence is not None and self.is_processing else -1

    @property
    def n_prompt_tokens(self) -> int:
        return 0 if self.sequence is None else self.sequence.n_prompt

    @property
    def n_prompt_tokens_cache(self) -> int:
        return 0 if self.sequence is None else self.sequence.n_cached

    @property
    def n_prompt_tokens_processed(self) -> int:
        if self.sequence is None:
            return 0
        n_computed = max(self.sequence.n_computed, self.sequence.n_lost)
        return max(0, min(n_computed, self.sequence.n_prompt) - self.sequence.n_cached)

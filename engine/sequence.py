"""The tokens of one generation, and the seat that it runs in."""

from __future__ import annotations

from typing import Protocol

from logitless.engine.kv_cache.block_table import BlockTable
from logitless.engine.kv_cache.prefix_cache import Node
from logitless.engine.requests import CompletionRequest, Timings, TokenProb
from logitless.engine.sampling.reasoning_budget import Thoughts
from logitless.engine.sampling.sampler import F32, Row, SamplingParams
from logitless.engine.sampling.stop_filter import Decoder
from logitless.engine.speculation.draft_state import Drafts
from logitless.models.adapters.adapter_bank import BASE, Choice

FIRST_TOKENS = 8  # of a stream: requests that come as early as these have come together with its own
PATIENCE = 100  # places in the line that a level of priority is worth: many later ones may go first, not all


class Sampler(Protocol):
    """What a sequence needs of logitless.engine.sampling.sampler.RowSampler. `feeds` is the same until `accept`."""

    seed: int
    stateful: bool  # the device remembers something of each row: no drafts
    problem: str  # why nothing can be sampled any more; "": nothing is wrong
    ended: bool  # the reason is that a grammar's text is whole, and end tokens are ruled out

    @property
    def ready(self) -> bool: ...

    @property
    def rng_used(self) -> tuple[int, int]: ...

    def begin(self, prompt: tuple[int, ...], /) -> None: ...

    def feeds(self) -> Row: ...

    def draft_feeds(self, draft: list[int], /) -> list[Row]: ...

    def guess_feeds(self, draft: list[int], n_dist: int, n_xtc: int, /) -> Row: ...

    n_candidates: int  # that `choose` is told of a row; 0: `accept` it is
    left: tuple[list[int], list[float], float] | None  # by `choose`

    def accept(self, word: int, /) -> int: ...

    def choose(self, word: int, n_left: int, ids: list[int], p: F32, /) -> int: ...

    def force(self, id: int, /) -> None: ...


class Sequence:
    """One request on its way: it *owes* tokens that are not in the cache yet, and every step pays some.

    A sequence is started while it has blocks: a preempted one has lost its blocks and nothing else, and all of its
    tokens are uncomputed again.
    """

    __slots__ = (
        "choice",
        "client",
        "decoder",
        "done",
        "drafts",
        "has_new_line",
        "id",
        "kv",
        "late",
        "n_cached",
        "n_computed",
        "n_lost",
        "n_probs",
        "n_prompt",
        "paced",
        "post_sampling_probs",
        "prompt_probs",
        "rank",
        "refused_at",
        "request",
        "resumed",
        "sampler",
        "samples",
        "served",
        "slot",
        "started",
        "t_first",
        "t_last",
        "t_start",
        "thoughts",
        "tokens",
        "undivided",
    )

    def __init__(
        self, id: int, request: CompletionRequest, decoder: Decoder, root: Node, choice: Choice = BASE, client: str = ""
    ) -> None:
        self.id = id  # grows with arrival: the smaller the older
        self.request = request
        self.client = client  # who asks: clients take turns
        self.rank = id + PATIENCE * request.priority, id  # the smaller goes first, whatever is scarce
        self.tokens = list(request.prompt)
        self.n_prompt = len(request.prompt)
        self.n_computed = 0  # leading tokens whose K and V are in the cache
        self.n_cached = 0  # those of the prompt that were there when it began
        self.sampler: Sampler  # from when it has a seat: many may wait, and a sampler takes time and memory
        self.decoder = decoder
        self.slot: Slot | None = None
        self.done = False
        self.has_new_line = False
        self.prompt_probs: list[TokenProb | None] = [None]
        self.samples = request.n_predict != 0
        self.n_probs = max(0, request.sampling.n_probs)
        self.post_sampling_probs = request.sampling.post_sampling_probs
        self.thoughts: Thoughts | None = None  # where its reasoning may have to end
        # Speculation.
        self.drafts: Drafts | None = None  # its drafters, where it has some
        self.choice = choice  # its weights and adapters
        self.kv = BlockTable(root)
        # Scheduling.
        self.started = False
        self.late = False  # its mask did not come in time
        self.resumed = False  # has been preempted
        self.paced = True  # its prompt must not hold up streams, for they flowed before it began, or it is long
        self.n_lost = 0  # tokens that it had computed when it lost its pages
        self.refused_at = -1  # when it last found too few pages to start
        self.served = 0  # the step in which it last had its turn, where not all have one in each
        self.undivided = False  # a step of its prompt that others may interrupt has failed
        # Seconds by the scheduler's clock.
        self.t_start = 0.0  # its first tokens went to the device
        self.t_first = 0.0  # the prompt was done
        self.t_last = 0.0  # the last token came

    @property
    def owed(self) -> int:
        return len(self.tokens) - self.n_computed

    @property
    def n_schedulable(self) -> int:
        """Tokens that may be computed now; those that would fill the context wait for its shift."""
        assert self.slot is not None
        return min(len(self.tokens), self.slot.n_computable) - self.n_computed

    @property
    def n_generated(self) -> int:
        return len(self.tokens) + self.kv.n_dropped - self.n_prompt

    @property
    def flows(self) -> bool:
        """Whether its client knows a pace: a first token has set none yet."""
        return self.n_generated > 1

    @property
    def settled(self) -> bool:
        """Whether it has flowed for so long that short prompts have not come with its own."""
        return self.n_generated > FIRST_TOKENS

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
        """Whether its cells may be what is left of another text."""
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
    """A seat for one sequence. It remembers the last one: which tokens of it were cached, and what /slots shows."""

    __slots__ = ("cached", "choice", "id", "last_used", "n_computable", "n_ctx", "sequence")

    def __init__(self, id: int, n_ctx: int, *, shifts: bool = False) -> None:
        """`shifts`: a full context is shifted before its last cell is used."""
        self.id = id
        self.n_ctx = n_ctx
        self.n_computable = n_ctx - shifts  # tokens of a sequence that may be computed
        self.sequence: Sequence | None = None  # the one that runs here, or the last one that did
        self.cached: list[int] = []  # tokens of the last one that were in the cache when it ended
        self.choice = BASE  # the weights and adapters that they were computed with
        self.last_used = 0  # the larger the later

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
        return self.sequence is not None and self.sequence.has_new_line

    @property
    def n_decoded(self) -> int:
        return 0 if self.sequence is None else self.sequence.n_generated

    @property
    def n_remain(self) -> int:
        return -1 if self.sequence is None else self.sequence.n_remain

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

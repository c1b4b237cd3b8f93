"""Sampler of a sequence: the sampler chain's parameters, random numbers, penalties and grammar state."""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from logitless.engine.sampling.grammar_mask import TokenBitmask, TokenBitmasks
from logitless.engine.sampling.infill_sampler import N_CANDIDATES, candidates, infill
from logitless.engine.sampling.logits_processors import HostSampler, process
from logitless.engine.sampling.params import DEFAULT_SAMPLERS, MAX_CHAIN, SamplingParams
from logitless.engine.sampling.penalties import Dry, Penalties, TokenBans, find_breakers
from logitless.graph.ops.sampling import samplers as s
from logitless.models.tokenizer import Tokenizer

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]

CODES = dict(
    zip(
        DEFAULT_SAMPLERS,
        (s.PENALTIES, s.DRY, s.TOP_N_SIGMA, s.TOP_K, s.TYP_P, s.TOP_P, s.MIN_P, s.XTC, s.TEMPERATURE),
        strict=True,
    )
)
RANDOM_SEED = 0xFFFFFFFF  # llama.cpp's default: a random seed


def chain_codes(p: SamplingParams) -> list[int]:
    """The sampler chain as codes of the op, without samplers that do nothing; a selection is last.

    With infill: up to that sampler; the device then returns candidates (see `codes_after_infill`).
    """
    cold = p.temperature <= 0
    if p.mirostat:
        if cold:
            return [s.GREEDY]
        heat = [s.TEMPERATURE] if p.temperature != 1 else []
        return [*heat, s.MIROSTAT_1 if p.mirostat == 1 else s.MIROSTAT_2]
    names = p.active_samplers()
    if "infill" in names:
        return [*(CODES[name] for name in names[: names.index("infill")]), s.DIST]
    codes = [CODES[name] for name in names if name != "adaptive_p"]
    if "adaptive_p" in names:
        return [*codes, s.ADAPTIVE]
    if cold and p.dynatemp_range <= 0 and s.TEMPERATURE in codes and not {s.TYP_P, s.XTC} & set(codes):
        # The likeliest token passes every filter, so only samplers that change
        # logits matter, and the samplers before them.
        while codes and codes[-1] not in (s.PENALTIES, s.DRY):
            codes.pop()
        return [*codes, s.GREEDY]
    return [*codes, s.DIST]


def codes_after_infill(p: SamplingParams) -> list[int]:
    """The rest of a chain with infill, with the selection that counts; [] without one."""
    names = p.active_samplers()
    if p.mirostat or "infill" not in names:
        return []
    return [*(CODES[name] for name in names[names.index("infill") + 1 :]), s.DIST]


def params_vector(p: SamplingParams) -> F32:
    """The op's row of parameters; the state is kept."""
    q = np.zeros(s.N_PARAMS, np.float32)
    q[s.TEMP], q[s.RANGE], q[s.EXPONENT] = p.temperature, 0 if p.mirostat else p.dynatemp_range, p.dynatemp_exponent
    q[s.K], q[s.P], q[s.LEAST_P], q[s.N_SIGMA] = min(p.top_k, 1 << 24), p.top_p, p.min_p, p.top_n_sigma
    q[s.XTC_PROBABILITY], q[s.XTC_THRESHOLD], q[s.TYPICAL] = p.xtc_probability, p.xtc_threshold, p.typical_p
    q[s.REPEAT], q[s.FREQUENCY], q[s.PRESENCE] = p.repeat_penalty, p.frequency_penalty, p.presence_penalty
    q[s.MIN_KEEP], q[s.TAU], q[s.ETA] = min(p.min_keep, 1 << 24), p.mirostat_tau, p.mirostat_eta
    q[s.TARGET], q[s.DECAY] = p.adaptive_target, min(max(p.adaptive_decay, 0.0), 0.99)
    q[s.RESET :] = np.nan
    return q


class Row(Struct, frozen=True):
    """Sampling inputs of one row of the logits."""

    params: F32  # (N_PARAMS,)
    chain: I32  # (MAX_CHAIN,)
    draws: tuple[int, ...]  # four random words; eight with a grammar, which may need a second draw
    kinds: Sequence[int] = ()
    ids: Sequence[int] = ()
    values: Sequence[float] = ()
    mask: TokenBitmask | None = None  # token bitmask; None: every token is allowed


class History:
    """Tokens so far, as far as the next row's biases and penalties depend on them."""

    __slots__ = ("bans", "dry", "penalties")

    def __init__(self, penalties: Penalties | None, dry: Dry | None, bans: TokenBans | None) -> None:
        self.penalties, self.dry, self.bans = penalties, dry, bans

    def begin(self, prompt: Sequence[int]) -> None:
        """Add the prompt's tokens; bans are about generated ones."""
        if self.penalties:
            for token in prompt[-self.penalties.last.maxlen :] if self.penalties.last.maxlen else ():
                self.penalties.push(token)
        if self.dry:
            self.dry.begin(prompt)

    def push(self, token: int) -> None:
        """Add a generated token."""
        if self.penalties:
            self.penalties.push(token)
        if self.dry:
            self.dry.push(token)
        if self.bans:
            self.bans.push(token)

    def copy(self) -> History:
        """Independent copy of the state."""
        return History(
            self.penalties.copy() if self.penalties else None,
            self.dry.copy() if self.dry else None,
            self.bans.copy() if self.bans else None,
        )

    def after(self, tokens: Iterable[int]) -> History:
        """The state after further tokens."""
        other = self.copy()
        for token in tokens:
            other.push(token)
        return other

    def add_to(self, kinds: list[int], ids: list[int], values: list[float]) -> None:
        """Add the sparse entries of the next row."""
        if self.bans:
            banned = self.bans.ids()
            ids += banned
            values += [-math.inf] * len(banned)
            kinds += [s.BIAS_ENTRY] * len(banned)
        if self.penalties:
            ids += self.penalties.counts
            values += self.penalties.counts.values()
            kinds += [s.PENALTY_ENTRY] * len(self.penalties.counts)
        if self.dry:
            entries = self.dry.penalties()
            ids += entries
            values += entries.values()
            kinds += [s.DRY_ENTRY] * len(entries)


class RowSampler:
    """Sampler of one sequence. Call `begin` with the prompt, then `feeds` and `accept` in turn.

    `n_ctx` is what -1 means for the penalties' and DRY's windows. Tokens that the vocabulary
    suppresses have a bias of -∞, as in llama.cpp."""

    def __init__(self, params: SamplingParams, vocab: Tokenizer, n_ctx: int) -> None:
        p = self.params = params
        self.seed = choose_seed(p.seed)
        codes = chain_codes(p)
        self._chain = np.zeros(MAX_CHAIN, np.int32)
        self._chain[: len(codes)] = codes
        self._rest = codes_after_infill(p)
        self._vocab = vocab
        self.n_candidates = 0  # candidates that `choose` needs; 0: call `accept`
        # candidates of the last choice: ids, p, the chosen one's p
        self.left: tuple[list[int], list[float], float] | None = None
        if self._rest:
            self.n_candidates = min(N_CANDIDATES, p.top_k if s.TOP_K in codes else N_CANDIDATES, vocab.n_vocab)
            codes += self._rest
        # rejected drafts would change mu
        self.stateful = bool({s.MIROSTAT_1, s.MIROSTAT_2, s.ADAPTIVE} & set(codes))
        self._vector = self._first = params_vector(p)
        if self.stateful:
            self._first = self._vector.copy()
            rest = np.float32(1) - self._vector[s.DECAY]
            adaptive = s.ADAPTIVE in codes
            self._first[s.RESET] = np.float32(p.adaptive_target) / rest if adaptive else 2 * p.mirostat_tau
            self._first[s.RESET + 1] = np.float32(1) / rest if adaptive else 0
        self.on_host = bool(p.logits_processors)  # call `process` with the logits
        self._host = HostSampler() if self.on_host else None
        self.stateful = self.stateful or self.on_host
        self._dist = Generator(self.seed) if codes[-1] != s.GREEDY else None
        self._xtc = Generator(self.seed) if s.XTC in codes else None
        if self._dist:
            self._dist.advance(p.rng_used[0])
        if self._xtc:
            self._xtc.advance(p.rng_used[1])
        biases = (*p.logit_bias, *((id, -math.inf) for id in vocab.suppressed_ids))
        if p.allowed_token_ids is not None:
            allowed = frozenset(p.allowed_token_ids)
            biases += tuple((id, -math.inf) for id in range(vocab.n_vocab) if id not in allowed)
        self._bias_ids = [id for id, _ in biases]
        self._bias_values = [value for _, value in biases]
        self._bias_kinds = [s.BIAS_ENTRY] * len(biases)
        penalties, dry, bans = None, None, None
        if s.PENALTIES in codes:
            penalties = Penalties(n_ctx if p.repeat_last_n < 0 else p.repeat_last_n)
        if s.DRY in codes:
            window = n_ctx if p.dry_penalty_last_n < 0 else min(p.dry_penalty_last_n, n_ctx)
            breakers = find_breakers(vocab, p.dry_sequence_breakers)
            dry = Dry(p.dry_multiplier, p.dry_base, p.dry_allowed_length, window, breakers)
        if p.min_tokens > 0 or p.bad_words:
            ends = {*vocab.eog_ids, *p.stop_token_ids} if p.min_tokens > 0 else ()
            bans = TokenBans(p.min_tokens, ends, p.bad_words)
        self._history = History(penalties, dry, bans) if penalties or dry or bans else None
        self._masks = TokenBitmasks(p.grammar) if p.grammar else None
        self.ended = False  # the grammar's text is complete
        self.problem = ""  # why the grammar cannot continue
        self._started = False

    @property
    def ready(self) -> bool:
        """True if the token bitmask of the next row is not pending."""
        return self._masks is None or self._masks.ready

    @property
    def rng_used(self) -> tuple[int, int]:
        """Value of `SamplingParams.rng_used` that resumes from here."""
        dist, xtc = self.params.rng_used
        return self._dist.n_used if self._dist else dist, self._xtc.n_used if self._xtc else xtc

    def begin(self, prompt: Sequence[int]) -> None:
        """Add the prompt's tokens to the history."""
        if self._history:
            self._history.begin(prompt)

    def move(self, state: Sequence[float]) -> None:
        """Go on in another slot, with the device's state of this one, if it has sampled there."""
        if not self._started:
            return
        self._first = self._vector.copy()
        self._first[s.RESET : s.RESET + 2] = state[:2]
        self._started = False

    def feeds(self) -> Row:
        """Row of the next token."""
        return self._row(0, self._history, self._masks.rows()[0] if self._masks else None)

    def draft_feeds(self, draft: Sequence[int]) -> list[Row]:
        """Rows of the next token and after each draft token, contiguous in one step.

        Accept the results in order, up to the first token that differs from the draft. Not for
        `stateful` samplers."""
        masks = self._masks.rows(draft) if self._masks else [None] * (1 + len(draft))
        rows = [self._row(0, self._history, masks[0])]
        history = self._history.copy() if self._history else None
        for i, token in enumerate(draft):
            if history:
                history.push(token)
            rows.append(self._row(i + 1, history, masks[i + 1]))
        return rows

    def feeds_after(self, draft: Sequence[int], n_dist: int, n_xtc: int) -> Row:
        """Row after draft tokens that have used so many draws, without the token bitmask.

        Not for `stateful` samplers."""
        history = self._history.after(draft) if self._history and draft else self._history
        return self._drawn(self._draw(n_dist, n_xtc), history, None)

    def _draw(self, i: int, of_xtc: int | None = None) -> tuple[int, int, int, int]:
        """Unused draw number `i`. `of_xtc`: its number in the XTC generator, if different."""
        low, high = self._dist.peek(2, 2 * i) if self._dist else (0, 0)
        return low, high, self._xtc.peek(1, i if of_xtc is None else of_xtc)[0] if self._xtc else 0, 0

    def _row(self, skip: int, history: History | None, mask: TokenBitmask | None) -> Row:
        draws: tuple[int, ...] = self._draw(skip)
        if self._masks:
            draws = (*self._draw(2 * skip), *self._draw(2 * skip + 1))
        return self._drawn(draws, history, mask)

    def _drawn(self, draws: tuple[int, ...], history: History | None, mask: TokenBitmask | None) -> Row:
        vector = self._vector if self._started else self._first
        kinds, ids, values = self._bias_kinds, self._bias_ids, self._bias_values
        if history is not None:
            kinds, ids, values = kinds.copy(), ids.copy(), values.copy()
            history.add_to(kinds, ids, values)
        return Row(vector, self._chain, draws, kinds, ids, values, mask)

    def accept(self, word: int) -> int:
        """Accept the packed result (token id and flags) of the sequence's row; returns the token."""
        word = int(word)
        return self._accept(word & s.ID, *s.used(word))

    def choose(self, word: int, n_left: int, ids: Sequence[int], p: F32) -> int:
        """Choose among the device's candidates with the infill sampler, and accept that token.

        `n_left` candidates; of the likeliest ids (n_candidates or more; -1: no more) and
        probabilities."""
        row = self.feeds()
        c = candidates(ids[: self.n_candidates], p)
        if not len(c):  # no candidate: accept the device's token
            self.left = [int(word) & s.ID], [1.0], 1.0
            return self.accept(word)
        infill(c, n_left, self._vocab)
        entries = list(zip(row.kinds, row.ids, row.values, strict=True))
        low, high, xtc, _ = row.draws
        state = np.zeros(s.N_STATE, np.float32)
        chosen, flags = s.run_chain(c, row.params, self._rest, (low, high), xtc, entries, state, self._vocab.n_vocab)
        assert c.p is not None
        self.left = c.ids.tolist(), c.p.tolist(), float(c.p[chosen])
        n_xtc = max(s.used(int(word))[1], s.used(flags)[1])
        return self._accept(int(c.ids[chosen]), 1, n_xtc)

    def process(self, prompt: Sequence[int], generated: Sequence[int], logits: F32) -> int:
        """Run the logits processors and the chain on the row's logits (n_vocab,); accept the token."""
        assert self._host is not None
        changed = process(self.params.logits_processors, prompt, generated, logits)
        return self.accept(self._host.sample(changed, self.feeds()))

    def _accept(self, token: int, n_dist: int, n_xtc: int) -> int:
        self._started = True
        if self._dist and n_dist:
            self._dist.advance(2 * n_dist)
        if self._xtc and n_xtc:
            self._xtc.advance(n_xtc)
        if self._masks and not self._masks.accept(token):
            self.ended = self._masks.ended
            self.problem = "the other settings rule out every token that the grammar allows"
        if self._history:
            self._history.push(token)
        return token

    def force(self, id: int) -> None:
        """Accept a forced token, which was not sampled."""
        if self._masks:
            self._masks.force(id)
        if self._history:
            self._history.push(id)


def split_probs(out: I32, n_probs: int) -> tuple[I32, F32, I32, F32]:
    """Split the result of the op `sample`, (R, 3 + 2n).

    Returns candidates left (R,), probability of the chosen token (R,), likeliest ids (R, n; -1:
    none) and their probabilities (R, n)."""
    numbers = out.view(np.float32)
    return out[:, 1], numbers[:, 2], out[:, 3 : 3 + n_probs], numbers[:, 3 + n_probs :]


def split_log_probs(out: F32, n: int) -> tuple[F32, I32, F32]:
    """Split the result of the op `log_probs`, (R, 1 + 2n).

    Returns the targets' values (R,), likeliest ids (R, n; -1: none) and their values (R, n)."""
    return out[:, 0], out[:, 1 : 1 + n].astype(np.int32), out[:, 1 + n :]


def choose_seed(seed: int) -> int:
    """Seed modulo 2³², or a random one for -1 and 4294967295."""
    seed &= 0xFFFFFFFF
    return secrets.randbelow(RANDOM_SEED) if seed == RANDOM_SEED else seed


_BLOCK = 128  # words that are made at once
_FIRST_SOURCE = np.random.MT19937(0)  # of each generator's first block: a source of its own takes 0.14 ms
_seeding = threading.Lock()


def _begun(source: np.random.MT19937, seed: int) -> list[int]:
    """The first block of words after seeding by init_genrand, as the C++ standard prescribes."""
    source._legacy_seeding(seed)
    words: list[int] = source.random_raw(_BLOCK).tolist()
    return words


class Generator:
    """Words of std::mt19937(seed). `peek` consumes nothing, `advance` consumes words."""

    __slots__ = ("_at", "_seed", "_source", "_words", "n_used")

    def __init__(self, seed: int) -> None:
        self._seed = seed & 0xFFFFFFFF
        self._source: np.random.MT19937 | None = None
        with _seeding:
            self._words = _begun(_FIRST_SOURCE, self._seed)
        self._at = 0
        self.n_used = 0

    def peek(self, n: int, skip: int = 0) -> list[int]:
        """Return the n words after the next `skip` words."""
        start = self._at + skip
        while start + n > len(self._words):
            del self._words[: self._at]
            start -= self._at
            self._at = 0
            if self._source is None:
                self._source = np.random.MT19937(0)
                _begun(self._source, self._seed)
            self._words += self._source.random_raw(_BLOCK).tolist()
        return self._words[start : start + n]

    def advance(self, n: int) -> None:
        """Consume n words."""
        self.peek(n)
        self._at += n
        self.n_used += n

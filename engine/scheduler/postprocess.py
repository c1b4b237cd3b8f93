"""Output processor: turns the result of a batch into tokens, text, probabilities and stop reasons."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Container
from dataclasses import dataclass

import numpy as np
from msgspec import Struct

from logitless.engine.batch import BLOCK_SIZE, StepResult
from logitless.engine.kv_cache.manager import KVCacheManager
from logitless.engine.requests import Event, Failed, Finished, Progress, Ranking, StopType, Token, TokenProb
from logitless.engine.scheduler.batch_builder import draft_part, prompt_rows
from logitless.engine.sequence import Sequence
from logitless.engine.stats import SchedulerStats

log = logging.getLogger("logitless.scheduler")

# log-probability that OpenAI's API gives for a token outside the most likely ones
UNLIKELY = -9999.0


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop reason of a sequence."""

    type: StopType
    word: str = ""
    token: int | None = None  # of the request's stop_token_ids
    truncated: bool = False


class _Run(Struct, frozen=True):
    """Result of a batch, its time in seconds, and the list that receives the events."""

    result: StepResult
    ids: list[int]
    now: float
    events: list[tuple[Sequence, Event]]


class OutputProcessor:
    """Turns the results of batches into tokens, text and events."""

    __slots__ = ("_cache", "_eog_ids", "_shifts", "_stats")

    def __init__(self, cache: KVCacheManager, eog_ids: Container[int], stats: SchedulerStats, *, shifts: bool) -> None:
        """`shifts`: a full context does not end a sequence."""
        self._shifts = shifts
        self._cache = cache
        self._eog_ids = eog_ids
        self._stats = stats

    def process(
        self, group: list[tuple[Sequence, int]], result: StepResult, now: float, events: list[tuple[Sequence, Event]]
    ) -> list[tuple[Sequence, Stop | Failed]]:
        """Count the group's tokens as computed and add its events; returns the sequences that are done."""
        stats = self._stats
        stats.n_decode += 1
        stats.busy_slots += len(group)
        stats.bytes_read += result.bytes_read
        stats.bytes_written += result.bytes_written
        run = _Run(result, result.ids.tolist(), now, events)
        done: list[tuple[Sequence, Stop | Failed]] = []
        row = 0
        for seq, n in group:
            if seq.request.prompt_logprobs is not None:
                for p in prompt_rows(seq, n):
                    n_top = seq.request.prompt_logprobs
                    seq.prompt_probs.append(_pre_sampling(result, row, n_top, seq.tokens[p + 1]))
                    row += 1
            draft = draft_part(seq, n)
            late = seq.samples and row in result.unsampled and seq.n_computed + n - len(draft) == len(seq.tokens)
            states = self._cache.states
            # A row whose mask was pending is computed again; with recurrent state, from the state
            # before it.
            seq.n_computed += n - len(draft) - late if states is None or not late else 0
            kv = seq.kv
            if not kv.uploaded:
                self._cache.table_uploaded(seq)
            if not seq.n_generated:
                self._prompt(seq, run)
            stop: Stop | Failed | None = None
            if late:
                stop = self._late(seq, result.unsampled[row])
                row += 1 + len(draft)
            elif seq.n_computed == len(seq.tokens):
                if seq.samples:
                    try:
                        stop = self._tokens(seq, draft, row, run)
                    except Exception as error:
                        # error of a sampler or stop filter: it ends its own request
                        seq.n_computed = min(seq.n_computed, len(seq.tokens))
                        stop = failure(error)
                    row += 1 + len(draft)
                else:
                    stop = Stop("limit")
            if seq.n_computed - kv.n_committed >= BLOCK_SIZE:
                assert seq.slot is not None
                self._cache.cache_full_blocks(seq, seq.slot)
            if self._cache.auxiliary is not None:
                self._cache.auxiliary.commit(seq)
            if seq.drafts is not None:
                self._cache.free_rejected(seq)
            if stop is not None:
                done.append((seq, stop))
        return done

    def _late(self, seq: Sequence, problem: str) -> Failed | None:
        """The grammar mask of the next token is pending, or has failed."""
        seq.late = True
        if seq.drafts is not None:
            seq.drafts.clear()
        return Failed(400, "invalid_request_error", f"the grammar: {problem}") if problem else None

    def _tokens(self, seq: Sequence, draft: list[int], row: int, run: _Run) -> Stop | Failed | None:
        """Take the next token, the accepted draft tokens, and forced tokens that end the reasoning."""
        stop = self._verified(seq, draft, row, run)
        if stop is None and seq.reasoning is not None:
            for id in seq.reasoning.take():
                stop = stop or self._forced(seq, id, run)
        return stop

    def _verified(self, seq: Sequence, draft: list[int], row: int, run: _Run) -> Stop | Failed | None:
        """Take the next token and the accepted draft tokens.

        Cells of rejected draft tokens are not counted: the next tokens are written over them."""
        stop = self._token(seq, row, run)
        if seq.drafts is None:
            return stop
        n_accepted = 0
        for drafted in draft:
            if seq.tokens[-1] != drafted:
                break
            n_accepted += 1
            row += 1
            if stop is not None or row in run.result.unsampled or (seq.reasoning is not None and seq.reasoning.due):
                break
            seq.n_computed += 1
            stop = self._token(seq, row, run)
        if draft:
            seq.drafts.record_outcome(len(draft), n_accepted)
            self._stats.count_draft(len(draft), n_accepted)
        seq.drafts.clear()
        return stop

    def _prompt(self, seq: Sequence, run: _Run) -> None:
        now = run.now
        seq.t_first = seq.t_last = now
        if seq.request.return_progress:
            time_ms = (now - seq.t_start) * 1000
            id_slot = -1 if seq.slot is None else seq.slot.id
            run.events.append((seq, Progress(seq.n_prompt, seq.n_cached, seq.n_computed, time_ms, id_slot)))
        if seq.n_computed == seq.n_prompt:
            self._stats.prompt_tokens += seq.n_prompt - seq.n_cached
            self._stats.prompt_seconds += now - seq.t_start

    def _token(self, seq: Sequence, row: int, run: _Run) -> Stop | Failed | None:
        request, stats, now = seq.request, self._stats, run.now
        assert seq.slot is not None
        id = _chosen(seq, row, run)
        seq.late = False
        if seq.sampler.problem:
            if seq.sampler.ended:
                return Stop("eos")
            return Failed(400, "invalid_request_error", f"the grammar: {seq.sampler.problem}")
        if seq.reasoning is not None:
            seq.reasoning.push(id)
        seq.tokens.append(id)
        n_tokens = len(seq.tokens)
        stats.tokens_predicted += 1
        stats.tokens_decoded += seq.n_generated > 1
        stats.predicted_seconds += now - seq.t_last
        if n_tokens > stats.n_tokens_max:
            stats.n_tokens_max = n_tokens
        seq.t_last = now
        prob: TokenProb | None = None
        if seq.n_probs:
            if seq.sampler.n_candidates or seq.sampler.on_host:
                prob = _of_chosen(seq, run.result, row, id)
            else:
                prob = (_post_sampling if seq.post_sampling_probs else _pre_sampling)(run.result, row, seq.n_probs, id)
        is_stop = id in request.sampling.stop_token_ids
        is_end = is_stop or (id in self._eog_ids and not request.ignore_eos)
        text, word_found = ("", None) if is_end and not request.shows_end else seq.stop_filter.push(id)
        run.events.append((seq, Token(id, text, prob, seq.timings(), seq.slot.id, _of_prompt(seq))))
        if is_end:
            return Stop("eos", token=id if is_stop else None)
        return self._stop(seq, text, word_found, now)

    def _forced(self, seq: Sequence, id: int, run: _Run) -> Stop | None:
        """Append a token that is forced, not sampled."""
        assert seq.slot is not None
        seq.sampler.force(id)
        seq.tokens.append(id)
        text, word_found = seq.stop_filter.push(id)
        run.events.append((seq, Token(id, text, None, seq.timings(), seq.slot.id, _of_prompt(seq))))
        return self._stop(seq, text, word_found, run.now)

    def _stop(self, seq: Sequence, text: str, word_found: str | None, now: float) -> Stop | None:
        """The stop reason after the last token, if there is one."""
        request = seq.request
        assert seq.slot is not None
        stop: Stop | None
        if word_found is not None:
            stop = Stop("eos") if word_found == request.turn_end else Stop("word", word_found)
        elif len(seq.tokens) >= seq.slot.n_ctx and not self._shifts:
            stop = Stop("limit", truncated=True)
        elif seq.n_generated == request.n_predict or seq.stop_filter.ended or (request.verify and _departs(seq)):
            stop = Stop("limit")
        else:
            stop = None
        if "\n" in text:
            seq.has_new_line = True
            if stop is None and 0 < request.t_max_predict_ms < (now - seq.t_first) * 1000:
                stop = Stop("limit")
        return stop


def _chosen(seq: Sequence, row: int, run: _Run) -> int:
    """The next token: the device's choice, or the host's among the device's candidates or all tokens."""
    word, sampler = run.ids[row], seq.sampler
    if sampler.on_host:
        assert run.result.logits is not None
        n_before = max(0, len(seq.tokens) - seq.n_generated)
        return sampler.process(seq.tokens[:n_before], seq.tokens[n_before:], run.result.logits[row])
    if not sampler.n_candidates:
        return sampler.accept(word)
    assert run.result.probs is not None
    n_left, _, ids, p = run.result.probs
    return sampler.choose(word, int(n_left[row]), ids[row].tolist(), p[row])


def _departs(seq: Sequence) -> bool:
    """True if the last token differs from the client's draft."""
    return seq.tokens[-1] != seq.request.speculation.draft[seq.n_generated - 1]


def failure(error: Exception) -> Failed:
    """The last event of a sequence that cannot be computed."""
    log.error("a request failed: %s: %s", type(error).__name__, error, exc_info=log.isEnabledFor(logging.DEBUG))
    return Failed(500, "server_error", f"this request could not be computed: {error or type(error).__name__}")


def finished(seq: Sequence, stop: Stop) -> Finished:
    """The last event of a sequence, which still has its cells."""
    text = seq.stop_filter.finish()
    seq.has_new_line = seq.has_new_line or "\n" in text
    return Finished(
        stop_type=stop.type,
        stopping_word=stop.word,
        stop_token=stop.token,
        text=text,
        truncated=stop.truncated or seq.kv.n_dropped > 0,
        has_new_line=seq.has_new_line,
        n_prompt=seq.n_prompt,
        n_cached=seq.n_cached,
        n_predicted=seq.n_generated,
        n_in_cache=seq.n_computed,
        id_slot=-1 if seq.slot is None else seq.slot.id,
        seed=seq.sampler.seed,
        timings=seq.timings(),
        rng_used=seq.sampler.rng_used,
        prediction=(0, 0)
        if seq.drafts is None
        else (
            seq.drafts.n_prediction_accepted,
            seq.drafts.n_prediction_drafted - seq.drafts.n_prediction_accepted,
        ),
        prompt_probs=() if seq.request.prompt_logprobs is None else tuple(seq.prompt_probs),
    )


def _of_prompt(seq: Sequence) -> tuple[TokenProb | None, ...]:
    """The prompt's probabilities, which the first token tells, if they are asked for."""
    return tuple(seq.prompt_probs) if seq.request.prompt_logprobs is not None and seq.n_generated == 1 else ()


def _pre_sampling(result: StepResult, row: int, n: int, id: int) -> TokenProb:
    """Log-probabilities of the row's target and of the n best tokens, before any filter."""
    assert result.logprobs is not None
    assert result.top_ids is not None
    values = result.logprobs[row, : n + 1]
    top = Ranking(array("i", result.top_ids[row, :n].tobytes()), array("f", values[1:].tobytes()))
    return TokenProb(id, float(values[0]), top)


def _post_sampling(result: StepResult, row: int, n: int, id: int) -> TokenProb:
    """Probabilities after the filters; tokens that they removed are not among the n best."""
    assert result.probs is not None
    _, chosen, ids, probs = result.probs
    there = probs[row, :n] > 0
    top = Ranking(array("i", ids[row, :n][there].tobytes()), array("f", probs[row, :n][there].tobytes()))
    return TokenProb(id, float(chosen[row]), top)


def _of_chosen(seq: Sequence, result: StepResult, row: int, id: int) -> TokenProb:
    """Probability or log-probability of a token that the host chose."""
    if seq.post_sampling_probs:
        assert seq.sampler.left is not None
        ids, p, chosen = seq.sampler.left
        likeliest = sorted(zip(ids, p, strict=True), key=lambda each: -each[1])[: seq.n_probs]
        top = Ranking(array("i", [id for id, _ in likeliest]), array("d", [p for _, p in likeliest]))
        return TokenProb(id, chosen, top)
    if seq.sampler.on_host:
        assert result.logits is not None
        logits = result.logits[row].astype(np.float64)
        value = logits[id] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        return TokenProb(id, float(value), _pre_sampling(result, row, seq.n_probs, id).top)
    known = _pre_sampling(result, row, max(seq.n_probs, seq.sampler.n_candidates), id).top
    return TokenProb(id, dict(known).get(id, UNLIKELY), known[: seq.n_probs])

"""Replies of generation endpoints: collect a job's results, show them whole or as a stream."""

from __future__ import annotations

import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

from logitless.engine.async_engine import LoadedModel
from logitless.engine.errors import RequestError
from logitless.engine.requests import CompletionRequest, Event, Failed, Finished, Progress, Timings, Token, TokenProb
from logitless.engine.sampling.params import SamplerParams
from logitless.engine.stream import MOST_WHOLE
from logitless.frontend.answers.generation import (
    AdapterScale,
    CompletionTokensDetails,
    GenerationSettings,
    LogitBias,
    NativeCompletion,
    ProgressObject,
    PromptTokensDetails,
    TimingsObject,
    Usage,
)
from logitless.frontend.config import BUILD_INFO, FrontendConfig
from logitless.frontend.parser import GenerationJob
from logitless.frontend.replies.encoding import error_object, lazy, sse
from logitless.frontend.replies.probabilities import TextTokens, by_id
from logitless.models.chat.tool_calls.deltas import Delta, Message, Reasoning
from logitless.models.chat.tool_calls.parser import Parser

SAMPLER_FIELDS = SamplerParams.__struct_fields__
MANY, LONG = 8, 8192  # results, and tokens of their prompts: what a reply tells of more takes a millisecond


class Result:
    """Result of one generation so far."""

    __slots__ = (
        "finished", "index", "n_tokens", "number", "opened", "pending", "pending_weight", "prefix", "prompt_probs",
        "request", "tokens", "untold", "untold_ids", "wrapping",
    )  # fmt: skip

    def __init__(self, index: int, request: CompletionRequest, prefix: str) -> None:
        self.index = index  # as it is shown
        self.number = index  # of the job's requests
        self.request = request
        self.prefix = prefix  # echo
        self.prompt_probs: tuple[TokenProb | None, ...] = ()  # streams: of a prefix's tokens
        self.tokens: list[Token] = []  # not kept for streams
        self.pending: list[Token] = []  # streams: told with the text that they are in
        self.pending_weight = 0  # memory of their log-probabilities
        self.untold = ""  # that text, as far as it has come
        self.untold_ids: list[int] = []  # return_token_ids: told with the next chunk
        self.n_tokens = 0
        self.opened = False
        self.wrapping = b"", b""  # a chunk before and after its text
        self.finished = Finished("limit")

    @property
    def content(self) -> str:
        """The generated text."""
        return "".join([token.text for token in self.tokens]) + self.finished.text


class Answers:
    """The parsers of a job's answers: whole messages, or more deltas as more text comes."""

    def __init__(self, reply: Reply) -> None:
        self._reply, self._style = reply, reply.job.style
        self._shows_reasoning = reply.job.reasoning
        self._parsers = [Parser(self._style) for _ in reply.results]
        self._n_tokens = [0] * len(reply.results)
        self._n_reasoning = [0] * len(reply.results)

    def message(self, result: Result) -> Message:
        """A whole answer."""
        return Message(result.prefix).add(self.parts(result))

    def parts(self, result: Result) -> list[Delta]:
        """The deltas of a whole answer; its text is parsed once."""
        deltas = [delta for token in result.tokens for delta in self.deltas(result, token.text, last=False)]
        return deltas + self.deltas(result, result.finished.text, last=True)

    def deltas(self, result: Result, text: str, *, last: bool) -> list[Delta]:
        """The deltas that one more token's text adds; with the last text, when the result has finished, those of the
        end."""
        parser, i = self._parsers[result.number], result.number
        thought, began = parser.thinking, time.perf_counter()
        deltas = parser.push(text)
        self._n_tokens[i] += not last
        if thought or parser.thinking:
            self._n_reasoning[i] = self._n_tokens[i]
        if last:
            is_cut = result.finished.stop_type == "limit"
            deltas = deltas + parser.finish(is_cut=is_cut, by_model=not is_cut)
        self._reply.parse_seconds += time.perf_counter() - began
        return deltas if self._shows_reasoning else [delta for delta in deltas if not isinstance(delta, Reasoning)]

    @property
    def n_reasoning(self) -> int:
        """Tokens of reasoning, with its tags, in what was parsed so far."""
        return sum(self._n_reasoning)

    def plain(self, result: Result) -> bool:
        """True if the rest of the answer is nothing but text."""
        return self._parsers[result.number].plain

    def n_calls(self, result: Result) -> int:
        """The number of tool calls that have begun."""
        return self._parsers[result.number].n_calls


class Reply(ABC):
    """One HTTP reply: the job's results, in the order of its prompts."""

    content_type = "text/event-stream"  # of a stream
    id_prefix = ""
    most_logprobs = MOST_WHOLE  # memory of a whole answer's log-probabilities
    keeps_logprobs = False  # a stream keeps them, too, until its end
    parse_seconds = 0.0  # of finding tool calls and reasoning in the answers

    def __init__(self, job: GenerationJob, served: LoadedModel, config: FrontendConfig) -> None:
        self.job, self.params = job, job.params
        self.tokenizer = served.tokenizer
        self.created = int(time.time())
        self.id = self.id_prefix + secrets.token_urlsafe(24)
        prefixes = job.prefixes
        self.results = [
            Result(i, request, prefixes[i // job.best_of] if prefixes else "") for i, request in enumerate(job.requests)
        ]
        self.model = job.model or config.model
        self.head: dict[str, Any] = {
            "created": self.created,
            "id": self.id,
            "model": self.model,
            "system_fingerprint": BUILD_INFO,
        }

    @cached_property
    def answers(self) -> Answers:
        """Parsers of the answers of a chat."""
        return Answers(self)

    # -- as a whole

    def add(self, index: int, event: Event) -> None:
        """Take in one event; a Failed one is raised."""
        result = self.results[index]
        if isinstance(event, Token):
            result.tokens.append(event)
        elif isinstance(event, Finished):
            result.finished = event
        elif isinstance(event, Failed):
            raise failure(event)

    @abstractmethod
    def whole(self) -> object:
        """The reply when everything has finished."""

    @property
    def is_large(self) -> bool:
        """True if `whole` takes so long that other streams should not wait for it."""
        n_prompt = sum(len(result.request.prompt) for result in self.results)
        has_logprobs = self.job.top is not None or self.job.prompt_top is not None
        return len(self.results) > MANY or n_prompt > LONG or has_logprobs

    def chosen(self) -> list[Result]:
        """The results to show: the best `n` of the `best_of` of every prompt."""
        n, best_of = self.job.n, self.job.best_of
        if n == best_of:
            return self.results
        groups = [self.results[i : i + best_of] for i in range(0, len(self.results), best_of)]
        chosen = [r for group in groups for r in sorted(group, key=_mean_logprob, reverse=True)[:n]]
        for i, result in enumerate(chosen):
            result.index = i
        return chosen

    def probable(self, result: Result) -> list[Token]:
        """The tokens whose probabilities belong to the shown text."""
        tokens = result.tokens
        if result.finished.stop_type == "word":
            tokens = TextTokens(self.tokenizer, result.request).take(tokens, result.content)
        return [token for token in tokens if token.prob is not None]

    def without_end(self, tokens: list[Token], result: Result) -> list[Token]:
        """The tokens less the one that ended the generation without a text: OpenAI's shapes tell of text only."""
        done = result.finished
        ended = done.stop_type == "eos" and tokens and tokens[-1].id in {*self.tokenizer.eog_ids, done.stop_token}
        return tokens[:-1] if ended and not result.request.shows_end else tokens

    # -- as a stream of server-sent events; each method returns the bytes to send, perhaps none

    @abstractmethod
    def token(self, result: Result, token: Token) -> bytes:
        """The event of one token."""

    def progress(self, result: Result, progress: Progress) -> bytes:
        """The prompt is being evaluated."""
        return b""

    @abstractmethod
    def finish(self, result: Result, finished: Finished) -> bytes:
        """One result is complete."""

    def ending(self) -> bytes:
        """All results are complete."""
        return b""

    def failed(self, error: RequestError) -> bytes:
        """The generation failed after the stream had begun."""
        return sse(error_object(error))

    # -- pieces of both

    def settings(self, request: CompletionRequest) -> GenerationSettings:
        """`generation_settings`: the request's parameters, with every default filled in."""
        params = self.params
        others = {**self.job.settings, "stream": params.stream, "timings_per_token": params.timings_per_token}
        return generation_settings(request, others)

    def native(self, result: Result) -> NativeCompletion:
        """The final object of /completion (also `__verbose` of the others)."""
        done, request, stream = result.finished, result.request, self.params.stream
        target = self.params.return_tokens and not stream
        return NativeCompletion(
            index=result.index,
            content="" if stream else result.content,
            tokens=[token.id for token in result.tokens] if target else [],
            id_slot=done.id_slot,
            model=self.model,
            tokens_predicted=done.n_predicted,
            tokens_evaluated=done.n_prompt or len(request.prompt),
            generation_settings=self.settings(request),
            prompt=self.tokenizer.pieces(request.text_ids).decode("utf-8", "replace"),
            has_new_line=done.has_new_line,
            truncated=done.truncated,
            stop_type=done.stop_type,
            stopping_word=done.stopping_word,
            tokens_cached=done.n_in_cache,
            timings=timings(done.timings),
            **self.of_prompt(result),
        )

    def of_prompt(self, result: Result) -> dict[str, Any]:
        """vLLM's fields about the prompt, where they are asked for."""
        fields: dict[str, Any] = {}
        if self.job.prompt_top is not None:
            probs, top = result.finished.prompt_probs, self.job.prompt_top
            of = partial(by_id, top=top, tokenizer=self.tokenizer)
            fields["prompt_logprobs"] = lazy(lambda: (None if p is None else of(p) for p in probs))
        if self.params.return_token_ids:
            fields["prompt_token_ids"] = list(result.request.prompt)
        return fields

    @property
    def caches(self) -> bool:
        """True if the KV cache keeps the prompts for later requests."""
        return self.results[0].request.cache_prompt

    def usage(self) -> Usage:
        """Token counts; a prompt with several results counts once."""
        prompts = [result.finished for result in self.results[:: self.job.best_of]]
        n_prompt = sum(done.n_prompt for done in prompts)
        n_predicted = sum(result.finished.n_predicted for result in self.results)
        n_cached = sum(done.n_cached for done in prompts)
        n_written = n_prompt - n_cached if self.caches else 0
        usage = Usage(
            completion_tokens=n_predicted,
            prompt_tokens=n_prompt,
            total_tokens=n_predicted + n_prompt,
            prompt_tokens_details=PromptTokensDetails(n_cached, n_written),
        )
        if any(result.request.speculation.draft for result in self.results):
            accepted, rejected = zip(*(result.finished.prediction for result in self.results), strict=True)
            usage.completion_tokens_details = CompletionTokensDetails(sum(accepted), sum(rejected))
        return usage


def failure(event: Failed) -> RequestError:
    """The exception of a Failed event."""
    error = RequestError(event.message)
    error.code, error.type = event.code, event.type
    return error


def timings(t: Timings) -> TimingsObject:
    """llama-server's `timings`. The first token costs no decode step, so the rates are of the later tokens."""
    n_steps = max(0, t.predicted_n - 1)
    times = TimingsObject(
        cache_n=t.cache_n,
        prompt_n=t.prompt_n,
        prompt_ms=t.prompt_ms,
        prompt_per_token_ms=t.prompt_ms / t.prompt_n if t.prompt_n else 0.0,
        prompt_per_second=1e3 * t.prompt_n / t.prompt_ms if t.prompt_ms else 0.0,
        predicted_n=t.predicted_n,
        predicted_ms=t.predicted_ms,
        predicted_per_token_ms=t.predicted_ms / n_steps if n_steps else 0.0,
        predicted_per_second=1e3 * n_steps / t.predicted_ms if t.predicted_ms else 0.0,
    )
    if t.draft_n:
        times.draft_n, times.draft_n_accepted = t.draft_n, t.draft_n_accepted
    return times


def progress_fields(progress: Progress) -> dict[str, Any]:
    """llama-server's `prompt_progress` and `timings` while the prompt is evaluated."""
    so_far = Timings(progress.cache, progress.processed - progress.cache, progress.time_ms)
    entry = ProgressObject(progress.total, progress.cache, progress.processed, progress.time_ms)
    return {"prompt_progress": entry, "timings": timings(so_far)}


def generation_settings(request: CompletionRequest, others: Mapping[str, Any]) -> GenerationSettings:
    """The parameters of a request by llama-server's names; `others`: fields of which the request knows nothing."""
    s, drafts = request.sampling, request.speculation
    samplers = {name: getattr(s, name) for name in SAMPLER_FIELDS} | {"seed": s.seed & 0xFFFFFFFF}
    return GenerationSettings(
        min_tokens=s.min_tokens,
        stop_token_ids=s.stop_token_ids,
        include_stop_str_in_output=request.stop_text,
        stop=tuple(request.stop),
        max_tokens=request.n_predict,
        n_predict=request.n_predict,
        n_keep=request.n_keep,
        n_discard=request.n_discard,
        n_cache_reuse=request.n_cache_reuse,
        ignore_eos=request.ignore_eos,
        logit_bias=[LogitBias(b if math.isfinite(b) else None, t) for t, b in s.logit_bias],
        n_probs=s.n_probs,
        grammar=s.grammar.text if s.grammar else "",
        grammar_lazy=s.grammar is not None and s.grammar.lazy,
        grammar_triggers=tuple(s.grammar.triggers) if s.grammar else (),
        preserved_tokens=sorted(request.preserved),
        samplers=s.samplers,
        speculative_type=",".join(drafts.kinds) or "none",
        speculative_n_max=drafts.n_max,
        speculative_n_min=drafts.n_min,
        speculative_p_min=drafts.p_min,
        post_sampling_probs=s.post_sampling_probs,
        lora=[AdapterScale(id, scale) for id, scale in request.lora or ()],
        **samplers,
        **others,
    )


def _mean_logprob(result: Result) -> float:
    values = [token.prob.value for token in result.tokens if token.prob is not None]
    if result.request.sampling.post_sampling_probs:
        values = [math.log(max(value, 1e-38)) for value in values]
    return sum(values) / len(values) if values else 0.0

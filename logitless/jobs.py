"""Jobs of the Python API: prompts and messages become requests, events outputs; and beam search."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import structs

from logitless.engine.requests import Event, Failed, Finished, Token, TokenProb
from logitless.engine.sampling.params import SamplerParams, params_of
from logitless.engine.sampling.params import SamplingParams as EngineParams
from logitless.errors import RequestError
from logitless.frontend.chat.chat import ChatGeneration, parse_chat
from logitless.frontend.chat.messages import Chat
from logitless.frontend.parser import GenerationJob, RequestParser, varied
from logitless.models.chat.tool_calls.deltas import CallBegin, Content, Delta, Reasoning
from logitless.models.chat.tool_calls.deltas import Message as ParsedMessage
from logitless.models.chat.tool_calls.parser import Parser
from logitless.models.tokenizer import Tokenizer
from logitless.outputs import (
    BeamSearchSequence,
    ChatChunk,
    ChatCompletion,
    Chunk,
    Completion,
    Message,
    TokenLogprob,
    ToolCall,
)
from logitless.params import BeamSearchParams, SamplingParams

log = logging.getLogger("logitless")
Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]


def plain_prompt(label: str, prompt: Any) -> str | list[int]:
    """A text or token ids; vLLM's {"prompt": …} and {"prompt_token_ids": …} are these.

    RequestError with the label for anything else."""
    if isinstance(prompt, Mapping):
        names = [name for name in ("prompt", "prompt_token_ids") if name in prompt]
        if len(names) != 1 or len(prompt) != 1:
            wrong = next((name for name in prompt if name not in names), "two of them")
            raise RequestError(f"{label}: expected 'prompt' or 'prompt_token_ids', not {wrong!r}")
        prompt = prompt[names[0]]
    if isinstance(prompt, str):
        return prompt
    ids = prompt.tolist() if isinstance(prompt, np.ndarray) else prompt
    if not isinstance(ids, Sequence) or isinstance(ids, bytes):
        raise RequestError(f"{label}: expected a text or token ids, not {type(prompt).__name__}")
    for i, id in enumerate(ids):
        if not isinstance(id, int | np.integer) or isinstance(id, bool):
            raise RequestError(f"{label}: token {i}: expected a whole number, not {id!r}")
    return [int(id) for id in ids]


def one_params(params: Any, sampling_params: Any = None) -> SamplingParams | None:
    """The parameters of one request, by our name or vLLM's. RequestError for both, or another type."""
    if params is not None and sampling_params is not None:
        raise RequestError("params and sampling_params are the same: give one of them")
    params = sampling_params if params is None else params
    if params is not None and not isinstance(params, SamplingParams):
        raise RequestError(f"params: expected SamplingParams, not {type(params).__name__}")
    return params


def completion_job(parser: RequestParser, prompt: Prompt, params: SamplingParams | None) -> GenerationJob:
    """The request of a text or token ids."""
    body = _body(parser, params)
    if (n := body.pop("logprobs", None)) is not None:
        body["n_probs"] = max(1, n)
    return _of_program(parser.native({**body, "prompt": plain_prompt("prompt", prompt)}), params)


def one_result(job: GenerationJob) -> GenerationJob:
    """The job of a stream. RequestError: it has several results."""
    if len(job.requests) > 1:
        raise RequestError(f"field 'n': a stream has one result, not {len(job.requests)}")
    return job


def _of_program(job: GenerationJob, params: SamplingParams | None) -> GenerationJob:
    """The job with what only a program can ask for: any number of results, and logits processors."""
    if params is None:
        return job
    requests = job.requests
    if params.logits_processors:
        _warn_of_processors()
        functions = tuple(params.logits_processors)
        requests = tuple(
            replace(request, sampling=structs.replace(request.sampling, logits_processors=functions))
            for request in requests
        )
    return replace(job, requests=tuple(varied(request, i) for request in requests for i in range(params.n or 1)))


@cache
def _warn_of_processors() -> None:
    log.warning("logits_processors are slow: they and the samplers of their requests run on the host")


def chat_job(
    parser: RequestParser,
    messages: Messages,
    params: SamplingParams | None,
    fields: Mapping[str, Any],
) -> GenerationJob:
    """The request of a conversation; `fields` are further ones of POST /v1/chat/completions.

    RequestError for one that there is not."""
    for name in fields.keys() - chat_fields():
        import difflib

        near = difflib.get_close_matches(name, chat_fields(), 1)
        raise RequestError(f"field {name!r}: there is none{f' (did you mean {near[0]}?)' if near else ''}")
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise RequestError(f"field 'messages': expected a list of messages, not {type(messages).__name__}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"field 'messages': item {i}: expected an object, not {type(message).__name__}")
    body = _body(parser, params)
    if (n := body.pop("logprobs", None)) is not None:
        body |= {"logprobs": True, "top_logprobs": max(1, n)}
    plain = [dict(message) for message in messages]
    return _of_program(parse_chat({**body, **_plain(fields), "messages": _plain(plain)}, parser), params)


@cache
def chat_fields() -> frozenset[str]:
    """The fields of a chat's body, by all their names, but those of a reply over HTTP."""
    kinds = (Chat, ChatGeneration)
    names = {field.encode_name for kind in kinds for field in msgspec.structs.fields(kind)}
    aliases = {alias for kind in kinds for _, param in params_of(kind).values() for alias in param.aliases}
    return frozenset((names | aliases | {"functions", "function_call"}) - {"stream", "stream_options", "messages"})


def _body(parser: RequestParser, params: SamplingParams | None) -> dict[str, Any]:
    """The fields of a request's body."""
    params = one_params(params)
    body = {} if params is None else {**_beside_defaults(params, parser.config.defaults), **params.fields()}
    for name in ("n", "logits_processors"):  # see _of_program
        body.pop(name, None)
    if (scales := body.pop("adapters", None)) is not None:
        body["lora"] = [{"id": _adapter_id(parser, name), "scale": scale} for name, scale in scales.items()]
    if (bias := body.get("logit_bias")) is not None:
        body["logit_bias"] = [[id, False if value == -math.inf else value] for id, value in bias.items()]
    if (speculation := body.pop("speculation", None)) is not None:
        body["speculative"] = speculation
    plain: dict[str, Any] = _plain(body)
    return plain


def _beside_defaults(params: SamplingParams, defaults: EngineParams) -> dict[str, Any]:
    """The samplers' numbers and chain where a model's own defaults differ."""
    names = [*SamplerParams.__struct_fields__, "samplers"]
    if params.repetition_penalty is not None and "repeat_last_n" not in params.fields():
        names.remove("repeat_last_n")
    return {name: value for name in names if (value := getattr(params, name)) != getattr(defaults, name)}


def _plain(value: Any) -> Any:
    """The value as JSON would have it: lists for tuples, dicts for mappings."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _adapter_id(parser: RequestParser, name: str) -> int:
    entries = parser.adapters.entries if parser.adapters is not None else []
    for entry in entries:
        if name in (entry.path, entry.name) and not entry.whole:
            return entry.id
    known = ", ".join(repr(entry.path) for entry in entries if not entry.whole)
    raise RequestError(f"adapters: there is no adapter {name!r}; loaded are {known or 'none'}")


class CompletionResult:
    """One generation: chunks as tokens come, a Completion at the end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[Token] = []
        self.finished: Finished | None = None

    def add(self, event: Event) -> None:
        """Take in one event. RequestError: the request has failed."""
        if isinstance(event, Failed):
            raise RequestError(event.message, event.code)
        if isinstance(event, Token):
            self._tokens.append(event)
        elif isinstance(event, Finished):
            self.finished = event

    def chunks(self, event: Event) -> list[Chunk]:
        """Chunks that an event adds to a stream."""
        self.add(event)
        if isinstance(event, Token):
            return [Chunk(event.text, (event.id,), None, self._logprobs([event]))]
        return [Chunk(event.text, (), self.finish_reason)] if isinstance(event, Finished) else []

    @property
    def finish_reason(self) -> str:
        return "length" if self.finished is None or self.finished.stop_type == "limit" else "stop"

    @property
    def text(self) -> str:
        ended = self.finished.text if self.finished is not None else ""
        return "".join([token.text for token in self._tokens]) + ended

    @property
    def texts(self) -> list[str]:
        return [token.text for token in self._tokens]

    def completion(self) -> Completion:
        """The whole result."""
        return Completion(self.text, finish_reason=self.finish_reason, **self.facts())

    def facts(self) -> dict[str, Any]:
        """The fields that completions and chat completions share."""
        ended = self.finished or Finished("limit")
        return {
            "token_ids": tuple(token.id for token in self._tokens),
            "prompt_tokens": ended.n_prompt,
            "cached_tokens": ended.n_cached,
            "seconds": (ended.timings.prompt_ms + ended.timings.predicted_ms) / 1000,
            "seed": ended.seed,
            "logprobs": self._logprobs(self._tokens),
            "prompt_logprobs": tuple(None if prob is None else self._logprob(prob) for prob in ended.prompt_probs),
        }

    def _logprobs(self, tokens: Sequence[Token]) -> tuple[TokenLogprob, ...]:
        return tuple(self._logprob(token.prob) for token in tokens if token.prob is not None)

    def _logprob(self, prob: TokenProb) -> TokenLogprob:
        text = self._tokenizer.piece(prob.id).decode("utf-8", "replace")
        return TokenLogprob(prob.id, text, prob.value, tuple(prob.top))


class ChatResult(CompletionResult):
    """One answer of a chat: parsed into reasoning, text and tool calls."""

    def __init__(self, job: GenerationJob, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._parser = Parser(job.style)
        self._message = ParsedMessage()

    def chat_chunks(self, event: Event) -> list[ChatChunk]:
        """Chunks that an event adds to a stream."""
        self.add(event)
        if isinstance(event, Token):
            return [_chunk(delta) for delta in self._take(event.text)]
        if isinstance(event, Finished):
            ended = ChatChunk(finish_reason=self.chat_finish_reason)
            return [*(_chunk(delta) for delta in self._take(event.text, last=True)), ended]
        return []

    def chat_completion(self) -> ChatCompletion:
        """The whole answer."""
        for text in self.texts:
            self._take(text)
        self._take(self.finished.text if self.finished is not None else "", last=True)
        calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in self._message.calls)
        message = Message(self._message.content, self._message.reasoning, calls)
        return ChatCompletion(message, self.chat_finish_reason, **self.facts())

    @property
    def chat_finish_reason(self) -> str:
        return "tool_calls" if self._parser.n_calls and self.finish_reason == "stop" else self.finish_reason

    def _take(self, text: str, *, last: bool = False) -> list[Delta]:
        deltas = self._parser.push(text)
        if last:
            reason = self.finish_reason
            deltas = deltas + self._parser.finish(is_cut=reason == "length", by_model=reason == "stop")
        self._message.add(deltas)
        return deltas


C = TypeVar("C", Completion, ChatCompletion)


def first_of(results: Sequence[C]) -> C:
    """The first result of a prompt, with the others in it."""
    return replace(results[0], others=tuple(results[1:])) if len(results) > 1 else results[0]


class Beam(NamedTuple):
    """A sequence of a beam search."""

    tokens: tuple[int, ...]
    cum_logprob: float = 0.0


class BeamSearch:
    """Beam search of one prompt: in each step the beams' 2 · beam_width likeliest tokens compete."""

    def __init__(self, prompt: Sequence[int], params: BeamSearchParams, ends: Collection[int]) -> None:
        self.beams = [Beam(tuple(prompt))]
        self._params, self._ends = params, ends
        self._ended: list[Beam] = []

    def extend(self, likeliest: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Go on with the best beams; `likeliest` has (token, log-probability) of each beam's next token."""
        longer: list[Beam] = []
        for beam, top in zip(self.beams, likeliest, strict=True):
            for id, logprob in top[: 2 * self._params.beam_width]:
                kind = self._ended if id in self._ends else longer
                kind.append(Beam((*beam.tokens, id), beam.cum_logprob + logprob))
        self.beams = self._best(longer)

    def result(self, text_of: Callable[[Sequence[int]], str]) -> tuple[BeamSearchSequence, ...]:
        """The best sequences, ended or not."""
        return tuple(
            BeamSearchSequence(
                beam.tokens, text_of(beam.tokens), beam.cum_logprob, "stop" if self._has_ended(beam) else "length"
            )
            for beam in self._best([*self._ended, *self.beams])
        )

    def _best(self, beams: list[Beam]) -> list[Beam]:
        return sorted(beams, key=self._rank)[: self._params.beam_width]

    def _rank(self, beam: Beam) -> tuple[float, tuple[int, ...]]:
        """The best is first. The length counts the prompt, and not the end token."""
        length = len(beam.tokens) - self._has_ended(beam)
        return -beam.cum_logprob / max(1, length) ** self._params.length_penalty, beam.tokens

    def _has_ended(self, beam: Beam) -> bool:
        return beam.tokens[-1] in self._ends


def _chunk(delta: Delta) -> ChatChunk:
    if isinstance(delta, Content):
        return ChatChunk(text=delta.text)
    if isinstance(delta, Reasoning):
        return ChatChunk(reasoning=delta.text)
    if isinstance(delta, CallBegin):
        return ChatChunk(tool_index=delta.index, tool_id=delta.id, tool_name=delta.name)
    return ChatChunk(tool_index=delta.index, tool_arguments=delta.text)

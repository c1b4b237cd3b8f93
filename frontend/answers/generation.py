"""Answer parts that all APIs share, and llama-server's answer to POST /completion."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Struct, field

from logitless.engine.sampling.params import SamplerParams
from logitless.frontend.answers import UNSET, Opt, doc


class TimingsObject(Struct, kw_only=True):
    """Times of one generation."""

    cache_n: Annotated[int, doc("prompt tokens found in the KV cache")]
    prompt_n: Annotated[int, doc("prompt tokens computed")]
    prompt_ms: Annotated[float, doc("milliseconds of the prefill")]
    prompt_per_token_ms: float
    prompt_per_second: Annotated[float, doc("tokens")]
    predicted_n: Annotated[int, doc("tokens generated")]
    predicted_ms: Annotated[float, doc("milliseconds of all decode steps")]
    predicted_per_token_ms: float
    predicted_per_second: Annotated[float, doc("tokens; the first costs no decode step and does not count")]
    draft_n: Annotated[Opt[int], doc("draft tokens verified")] = UNSET
    draft_n_accepted: Annotated[Opt[int], doc("draft tokens accepted")] = UNSET


class ProgressObject(Struct):
    """Progress of the prefill, in tokens."""

    total: int
    cache: Annotated[int, doc("found in the KV cache")]
    processed: Annotated[int, doc("in the KV cache now")]
    time_ms: float


class PromptTokensDetails(Struct):
    """Prompt tokens and the KV cache."""

    cached_tokens: Annotated[int, doc("found in the KV cache")]
    cache_write_tokens: Annotated[int, doc("computed, and kept in the KV cache")]


class CompletionTokensDetails(Struct):
    """Tokens of the client's draft (`prediction`)."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Struct, kw_only=True):
    """Token counts; a prompt with several results counts once."""

    completion_tokens: int
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: Annotated[Opt[CompletionTokensDetails], doc("of requests with a draft")] = UNSET


class TokenLogprob(Struct):
    """A token's probability. With post_sampling_probs it is `prob`, else `logprob`, its natural logarithm."""

    id: int
    token: Annotated[str, doc("its text, as far as it is whole characters")]
    bytes: Annotated[list[int], doc("its UTF-8")]
    logprob: Opt[float] = UNSET
    prob: Opt[float] = UNSET
    top_logprobs: Annotated[Opt[list[TokenLogprob]], doc("the likeliest tokens in its place")] = UNSET
    top_probs: Annotated[Opt[list[TokenLogprob]], doc("the likeliest tokens in its place")] = UNSET


class RankedLogprob(Struct):
    """A token's log-probability in vLLM's form."""

    logprob: float
    rank: Annotated[int | None, doc("from 1; null: none of the likeliest")]
    decoded_token: str


PromptLogprobs = list[dict[str, RankedLogprob] | None]


class LogitBias(Struct):
    """A bias on a token's logit; null: -∞, the token never comes."""

    bias: float | None
    token: int


class AdapterScale(Struct):
    """The scale of a LoRA adapter."""

    id: int
    scale: float


class GenerationSettings(SamplerParams, frozen=True, kw_only=True):
    """The request's fields, with every default filled in."""

    min_tokens: int
    stop_token_ids: tuple[int, ...]
    include_stop_str_in_output: bool
    stop: tuple[str, ...]
    max_tokens: int
    n_predict: int
    n_keep: int
    n_discard: int
    n_cache_reuse: int
    ignore_eos: bool
    stream: bool = False
    logit_bias: list[LogitBias]
    n_probs: int
    grammar: Annotated[str, doc("its text, also of a JSON schema")]
    grammar_lazy: Annotated[bool, doc("the grammar holds from a trigger on")]
    grammar_triggers: tuple[dict[str, Any], ...]
    preserved_tokens: Annotated[list[int], doc("special tokens that are shown")]
    chat_format: Annotated[str, doc("how the model writes tool calls")] = "Content-only"
    reasoning_format: str = "none"
    reasoning_in_content: bool = False
    samplers: tuple[str, ...]
    speculative_type: Annotated[str, doc("drafts' sources, or none")] = field(name="speculative.type")
    speculative_n_max: int | None = field(name="speculative.n_max")
    speculative_n_min: int = field(name="speculative.n_min")
    speculative_p_min: float = field(name="speculative.p_min")
    timings_per_token: bool = False
    post_sampling_probs: bool
    backend_sampling: Annotated[bool, doc("accepted: sampling is on the device in any case")] = True
    lora: list[AdapterScale]


class NativeChunk(Struct):
    """An event of a stream of /completion; the last one is a NativeCompletion."""

    index: Annotated[int, doc("of the result")]
    content: str
    tokens: list[int]
    stop: Literal[False]
    id_slot: int
    tokens_predicted: Annotated[int, doc("so far")]
    tokens_evaluated: Annotated[int, doc("tokens of the prompt")]
    completion_probabilities: Opt[list[TokenLogprob]] = UNSET
    prompt_progress: Annotated[Opt[ProgressObject], doc("with return_progress")] = UNSET
    timings: Annotated[Opt[TimingsObject], doc("with timings_per_token")] = UNSET


class NativeCompletion(Struct, kw_only=True):
    """One result of /completion; with `response_fields` only those."""

    index: int
    content: Annotated[str, doc("the generated text; empty at the end of a stream")]
    tokens: Annotated[list[int], doc("with return_tokens: the generated ids")]
    id_slot: int
    stop: Literal[True] = True
    model: str
    tokens_predicted: Annotated[int, doc("tokens generated")]
    tokens_evaluated: Annotated[int, doc("tokens of the prompt")]
    generation_settings: GenerationSettings
    prompt: Annotated[str, doc("as it was tokenized")]
    has_new_line: Annotated[bool, doc("the text has a line break")]
    truncated: Annotated[bool, doc("the context was full")]
    stop_type: Annotated[Literal["none", "eos", "limit", "word"], doc("why it ended")]
    stopping_word: Annotated[str, doc("the stop string that ended it")]
    tokens_cached: Annotated[int, doc("tokens of the sequence in the KV cache")]
    prompt_logprobs: Annotated[Opt[PromptLogprobs], doc("of each prompt token, by ids; of the first null")] = UNSET
    prompt_token_ids: Annotated[Opt[list[int]], doc("with return_token_ids")] = UNSET
    timings: TimingsObject
    completion_probabilities: Annotated[Opt[list[TokenLogprob]], doc("with n_probs")] = UNSET


class Verification(Struct, kw_only=True):
    """Answer of /v1/verify."""

    created: Annotated[int, doc("Unix time in seconds")]
    id: str
    model: str
    system_fingerprint: str
    object: Literal["verification"] = "verification"
    n_draft: Annotated[int, doc("draft tokens")]
    n_accepted: Annotated[int, doc("accepted draft tokens")]
    tokens: Annotated[list[int], doc("the accepted tokens, and the model's own next one")]
    content: Annotated[str, doc("their text")]
    stop_type: Literal["none", "eos", "limit"]
    id_slot: int
    tokens_evaluated: Annotated[int, doc("tokens of the prompt")]
    tokens_cached: Annotated[int, doc("tokens of the sequence in the KV cache")]
    seed: Annotated[int, doc("the effective one")]
    rng_used: Annotated[list[int], doc("random numbers used up, for the next request")]
    usage: Usage
    timings: TimingsObject
    completion_probabilities: Annotated[Opt[list[TokenLogprob]], doc("with n_probs")] = UNSET


Selected = dict[str, Any]
"""With `response_fields`: a NativeCompletion's fields by their paths."""

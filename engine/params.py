"""Generation fields: common fields of every request that generates text, beside prompt or messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from logitless.engine.sampling.params import INT_MAX, Param, SamplerParams
from logitless.engine.speculation.settings import MAX_DRAFT

Text = str | list[str]
FORMS = ("text", "json_object", "json_schema", "grammar", "regex")  # of response_format
_SCHEMA = ("object", "boolean", "string")
_PREDICTION = {"type": {"enum": ["content"]}, "content": {"type": "string"}}


class StreamOptions(Struct, frozen=True, kw_only=True):
    """`stream_options`."""

    include_usage: Annotated[bool, Param("end the stream with a chunk that has the token counts")] = False


class LoraScale(Struct, frozen=True, kw_only=True):
    """An adapter by its id, and its scale."""

    id: int
    scale: float | None = None


class Speculative(Struct, frozen=True, kw_only=True):
    """`speculative`: {n_max: 4}, or `speculative.n_max: 4` in the body itself."""

    type: Annotated[str | None, Param("kinds of drafts, separated by commas; none: no drafts")] = None
    n_max: Annotated[int | None, Param("most tokens of a draft", 0, MAX_DRAFT, hard=True)] = None
    n_min: Annotated[int, Param("fewest tokens of a draft", 0, MAX_DRAFT, hard=True)] = 0
    p_min: Annotated[float, Param("least probability of a drafted token", 0, 1, hard=True)] = 0.0


def _count(doc: str, low: int = 0, high: int = INT_MAX, *aliases: str) -> Param:
    return Param(doc, low, high, hard=True, aliases=aliases)


def _says(**schema: Any) -> Meta:
    """More of the field's JSON schema than its type says."""
    return Meta(extra_json_schema=schema)


class Generation(SamplerParams, frozen=True, kw_only=True):
    """Common fields of requests that generate text."""

    # Length
    n_predict: Annotated[
        int, _count("most tokens of the answer; -1: until it ends", -1, INT_MAX, "max_completion_tokens", "max_tokens")
    ] = -1
    stop: Annotated[Text, Param("texts that end the answer and are not part of it", most=256)] = ""
    stop_token_ids: Annotated[Sequence[int], Param("tokens that end the answer, beside end tokens", most=1024)] = ()
    include_stop_str_in_output: Annotated[bool, Param("keep the stop string in the text")] = False
    min_tokens: Annotated[
        int,
        _count("tokens before which no end token or stop ends the answer", 0, INT_MAX, "min_new_tokens"),
    ] = 0
    ignore_eos: Annotated[bool, Param("go on after end tokens")] = False
    t_max_predict_ms: Annotated[
        float, Param("milliseconds after which the answer ends at a line's end; 0: any", -1, 1e38, hard=True)
    ] = 0.0
    n_indent: Annotated[int, _count("end at a line with less indentation than this")] = 0
    # Sampling
    samplers: Annotated[Text | None, Param("the chain: names in order, or llama.cpp's letters")] = None
    logit_bias: Annotated[
        dict[str, Any] | list[Any] | None, Param("[token or text, number or false] pairs, or an object of the same")
    ] = None
    repetition_penalty: Annotated[
        float | None, Param("as repeat_penalty, of the whole prompt and answer unless repeat_last_n says less")
    ] = None
    allowed_token_ids: Annotated[Sequence[int] | None, Param("tokens that may be sampled; null: all")] = None
    bad_words: Annotated[Sequence[str], Param("texts that must not be generated", most=1024)] = ()
    post_sampling_probs: Annotated[bool, Param("show probabilities after the sampler chain")] = False
    backend_sampling: Annotated[bool, Param("sample on the device; it always does here")] = True
    n_cmpl: Annotated[int, _count("answers to each prompt", 1, INT_MAX, "n")] = 1
    best_of: Annotated[int | None, Param("answers to compute, of which the likeliest n are shown")] = None
    # Structured output
    grammar: Annotated[str | None, Param("a GBNF grammar that the answer follows")] = None
    grammar_lazy: Annotated[bool, Param("follow the grammar from the first trigger on")] = False
    grammar_triggers: Annotated[
        Sequence[dict[str, Any]], Param("triggers of a lazy grammar: {type, value} or {type, token}", most=256)
    ] = ()
    json_schema: Annotated[
        Any, Param("a JSON schema that the answer follows, or its text"), _says(type=[*_SCHEMA, "null"])
    ] = None
    response_format: Annotated[
        Mapping[str, Any],
        Param("{type}: text, json_object, json_schema, grammar or regex, and its source"),
        _says(properties={"type": {"enum": FORMS}}),
    ] = {}
    guided_json: Annotated[Any, Param("a JSON schema, or its text"), _says(type=[*_SCHEMA, "null"])] = None
    guided_regex: Annotated[str | None, Param("a regular expression of the whole answer", aliases=("regex",))] = None
    guided_choice: Annotated[Sequence[str] | None, Param("the answer is one of these", least=1, most=4096)] = None
    guided_grammar: Annotated[str | None, Param("a grammar in GBNF or Lark", aliases=("ebnf",))] = None
    structured_outputs: Annotated[
        Mapping[str, Any] | None, Param("{json}, {regex}, {choice}, {grammar} or {json_object: true}: as guided_…")
    ] = None
    preserved_tokens: Annotated[Sequence[str], Param("special tokens that are shown as text", most=4096)] = ()
    # Speculative decoding
    speculative: Annotated[
        Mapping[str, Any], Param("drafts: type, n_max, n_min, p_min"), _says(additionalProperties=False)
    ] = {}
    draft_tokens: Annotated[Sequence[int], Param("token ids that may follow the prompt")] = ()
    prediction: Annotated[
        Mapping[str, Any],
        Param("OpenAI's predicted output: {type: content, content}"),
        _says(properties=_PREDICTION, required=[*_PREDICTION]),
    ] = {}
    # Cache and scheduling
    cache_prompt: Annotated[bool, Param("reuse cached tokens of the prompt")] = True
    cache_salt: Annotated[str, Param("prompts share cached tokens only with prompts of equal salt")] = ""
    n_cache_reuse: Annotated[int, _count("fewest cached tokens worth moving to another position; 0: never")] = 0
    id_slot: Annotated[int, _count("slot; -1: any", -1)] = -1
    priority: Annotated[int, Param("lower values are scheduled first", -INT_MAX - 1, INT_MAX, hard=True)] = 0
    n_keep: Annotated[int, _count("context shift: tokens of the prompt that stay; -1: all", -1)] = 0
    n_discard: Annotated[int, _count("context shift: tokens that go; 0: half")] = 0
    # Prompt
    truncate_prompt_tokens: Annotated[
        int | None, _count("keep so many tokens of the prompt; -1: as many as fit beside the answer", -1)
    ] = None
    truncation_side: Annotated[
        str,
        Param(
            "side that truncate_prompt_tokens drops: the first tokens (left) or the last",
            choices=("left", "right"),
        ),
    ] = "left"
    # Model
    model: Annotated[str, Param("the model's name, or that of an adapter or a fine-tuned model")] = ""
    lora: Annotated[list[LoraScale] | None, Param("adapters by id, with their scales")] = None
    # Reply
    stream: Annotated[bool, Param("answer with server-sent events")] = False
    stream_options: Annotated[StreamOptions, Param("include_usage")] = StreamOptions()
    skip_special_tokens: Annotated[bool, Param("special tokens have no text")] = True
    spaces_between_special_tokens: Annotated[bool, Param("accepted without effect")] = True
    prompt_logprobs: Annotated[
        int | None, _count("show log-probabilities of the prompt's tokens, and of so many likely ones; -1: all", -1)
    ] = None
    return_token_ids: Annotated[bool, Param("show token ids of prompt and answer, as vLLM does")] = False
    return_tokens_as_token_ids: Annotated[bool, Param("name tokens token_id:7 beside log-probabilities")] = False
    return_tokens: Annotated[bool, Param("show token ids")] = False
    return_progress: Annotated[bool, Param("stream the progress of prefill")] = False
    timings_per_token: Annotated[bool, Param("stream timings with every token")] = False
    response_fields: Annotated[Sequence[str], Param("fields to show, in llama-server's reply")] = ()
    verbose: Annotated[bool, Param("add llama-server's reply as __verbose")] = False
    sse_ping_interval: Annotated[int, _count("seconds of silence before a comment; -1: never", -1)] = 30
    safety_identifier: Annotated[str, Param("end user of the request; users take turns", aliases=("user",))] = ""
    metadata: Annotated[Any, Param("accepted without effect")] = None

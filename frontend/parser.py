"""Completion requests: bodies to engine requests and reply options. Every 400 names its field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from msgspec.structs import replace as replace_struct

from logitless.engine.adapters import Adapters
from logitless.engine.errors import InvalidRequest, exceeds_context
from logitless.engine.params import Generation
from logitless.engine.requests import CompletionRequest
from logitless.engine.sampling.params import Param, SamplerParams
from logitless.frontend.config import FrontendConfig
from logitless.frontend.fields import article, as_integer, as_text, bad_request, limited, read
from logitless.frontend.grammar import Grammars, parse_constraint, preserved_ids, response_kind
from logitless.frontend.lora import parse_lora
from logitless.frontend.media.media import Media, Medium
from logitless.frontend.media.sources import MediaSources
from logitless.frontend.sampling import parse_sampling
from logitless.frontend.speculation import DOTTED, parse_speculation
from logitless.frontend.workers import check
from logitless.models.chat.tool_calls.parser import Style
from logitless.models.media.prompt_media import PromptMedia
from logitless.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from logitless.engine.async_engine import LoadedModel
    from logitless.models.chat.template import ChatTemplate
    from logitless.models.media.media_input import MediaInput

MAX_SALT = 256  # characters of cache_salt
MAX_TOP = 1024  # log-probabilities beside the chosen token
MAX_BEST_OF = 20
MAX_RESULTS = 2048  # of one HTTP request
MAX_TOKENS = 1 << 20  # of the prompts of one HTTP request together, or of the only one
MAX_PREDICTED = 1 << 22  # characters of a prediction, times the prompts
_AS_THEY_ARE = (  # fields of a CompletionRequest that are those of its body
    *("ignore_eos", "cache_prompt", "cache_salt", "n_cache_reuse", "id_slot", "priority"),
    *("n_keep", "n_discard", "n_indent", "return_progress"),
)
LONG_TEXT = 1 << 16  # characters of a prompt, from where on a look before tokenizing is worth it


class Completion(Generation, frozen=True, kw_only=True):
    """POST /completion."""

    prompt: Annotated[Any, Param("a text, token ids, both mixed, or an array of these", required=True)] = None
    n_probs: Annotated[int, Param("log-probabilities of so many likely tokens", 0, MAX_TOP, aliases=("logprobs",))] = 0
    add_special_tokens: Annotated[bool, Param("begin the prompt with BOS, where the vocabulary wants it")] = True


class OpenAICompletion(Completion, frozen=True, kw_only=True):
    """POST /v1/completions."""

    n_probs: Annotated[int | None, Param("as logprobs, where 0 is none", 0, MAX_TOP)] = None  # type: ignore[assignment]
    logprobs: Annotated[int | None, Param("log-probabilities of so many likely tokens", 0, MAX_TOP)] = None
    echo: Annotated[bool, Param("begin the text with the prompt")] = False
    suffix: Annotated[str, Param("the text after the gap, for models with infill tokens")] = ""


G = TypeVar("G", bound=Generation)


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """The generations of one request: `best_of` for each prompt, prompt by prompt, and the form of their reply."""

    requests: tuple[CompletionRequest, ...]
    params: Generation  # the body's fields over the server's defaults, without its prompt
    n: int = 1  # results shown for each prompt
    best_of: int = 1  # results computed for each prompt
    model: str = ""  # the adapter's name that the request gave; "": the base model
    many: bool = False  # native: reply with an array even for one result
    top: int | None = None  # log-probabilities to show beside the chosen token; None: no probabilities at all
    prompt_top: int | None = None  # vLLM's prompt_logprobs
    prefixes: tuple[str, ...] = ()  # echo: what every prompt's results start with
    style: Style = field(default_factory=Style)  # chat: the parts that an answer may have
    reasoning: bool = True  # chat: show the reasoning
    functions: bool = False  # chat: tell of a call in OpenAI's first form
    skipped_tools: tuple[str, ...] = ()  # chat: types of tools that a provider's service would run
    settings: Mapping[str, Any] = field(default_factory=dict)  # accepted fields that only generation_settings shows


class Prompt(NamedTuple):
    """Token ids of a prompt, and its media, whose rows have negative ids."""

    ids: tuple[int, ...]
    media: PromptMedia | None = None


class RequestParser:
    """Knows the model's vocabulary and the server's defaults. Keeps no state: any thread may call it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: FrontendConfig,
        n_ctx: int,
        adapters: Adapters | None = None,
        media: MediaInput | None = None,
        n_start: int = 0,
        template: ChatTemplate | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.adapters = adapters
        self.config = config
        self.n_ctx = n_ctx
        self.n_start = n_start  # tokens that the engine puts behind a prompt
        self.template = template
        self.grammars = Grammars(tokenizer)
        self.media = Media(media, config.max_body, marker=config.media_marker, max_seconds=config.audio_max_seconds)
        settings = ("n_predict", "cache_prompt", "n_cache_reuse", "n_keep", "verbose", "sse_ping_interval")
        self._drafts = parse_speculation(Generation(), config, tokenizer, n_ctx)  # of requests that name nothing of it
        self._defaults = {name: getattr(config, name) for name in (*settings, "backend_sampling", "ignore_eos")}
        self._defaults |= {name: getattr(config.defaults, name) for name in SamplerParams.__struct_fields__}

    @classmethod
    def of(cls, served: LoadedModel, config: FrontendConfig) -> RequestParser:
        """The parser of requests for a loaded model."""
        info = served.info
        return cls(served.tokenizer, config, info.n_ctx, served.adapters, served.media, info.n_start, served.template)

    def reading(self, sources: MediaSources) -> RequestParser:
        """The parser of a request that may name media of these sources."""
        other = copy(self)
        other.media = self.media.of(sources)
        return other

    def read(self, kind: type[G], body: Mapping[str, Any]) -> G:
        """The body of a request that generates text, over the server's settings. InvalidRequest names the field."""
        n = self.config.n_parallel
        refuse_unsupported(body)
        return read(kind, _nested(body), defaults=self._defaults, n_cmpl=n, id_slot=n - 1)

    def text(self, kind: type[G], body: Mapping[str, Any]) -> G:
        """The body of a request without a conversation."""
        for name in ("tools", "functions"):
            if body.get(name):
                bad_request(name, "needs a chat: POST /v1/chat/completions")
        return self.read(kind, body)

    def native(self, body: Mapping[str, Any]) -> GenerationJob:
        """POST /completion."""
        params = self.text(Completion, _counted(body))
        prompts, many = self.prompts(params.prompt, n=_n_results(params))
        room, most, special = self.room_of(params), most_tokens(params), params.add_special_tokens
        tokens = [room.take(self.prompt(prompt, add_special=special, most=most)) for prompt in prompts]
        return self.job(replace_struct(params, prompt=None), tokens, many=many, top=params.n_probs or None)

    def openai(self, body: Mapping[str, Any]) -> GenerationJob:
        """POST /v1/completions, with fields that llama-server refuses: echo, best_of, suffix."""
        params = self.text(OpenAICompletion, _counted(body))
        top = params.n_probs if params.n_probs is not None else params.logprobs
        if params.n_probs == 0:
            top = None
        echo, suffix = params.echo, params.suffix
        prompts, many = self.prompts(params.prompt, n=_n_results(params))
        room, most, special = self.room_of(params), most_tokens(params), params.add_special_tokens
        tokens = [room.take(Prompt(self.tokens(p, add_special=special, most=most))).ids for p in prompts]
        if suffix:
            if echo and top is not None:
                bad_request("suffix", "cannot be combined with echo and logprobs")
            after = self.encode(suffix)
            tokens = [self._gap(before, after) for before in tokens]
        prefixes = tuple(self._text_of(*pair) for pair in zip(prompts, tokens, strict=True)) if echo else ()
        params = replace_struct(params, prompt=None)
        return self.job(params, map(Prompt, tokens), many=many, top=top, prefixes=prefixes, prompt_probs=echo)

    def job(
        self,
        params: Generation,
        prompts: Iterable[Prompt],
        *,
        many: bool = False,
        top: int | None = None,
        prefixes: tuple[str, ...] = (),
        prompt_probs: bool = False,
    ) -> GenerationJob:
        """The requests for these prompts, with every field that all endpoints share."""
        n, best_of, prompt_top = params.n_cmpl, params.n_cmpl, None
        if params.best_of is not None:
            best_of = int(limited("best_of", params.best_of, n, max(n, MAX_BEST_OF), True))
        if params.prompt_logprobs is not None:
            prompt_top = self._prompt_top(params.prompt_logprobs, stream=params.stream)
        if best_of > n and params.stream:
            bad_request("best_of", "cannot be streamed when it is more than n")
        prompts = list(prompts)
        n_probs = max(1, top or 0) if top is not None or best_of > n else 0
        counts = [count for count in (prompt_top, top if prompt_probs else None) if count is not None]
        name, lora = "", None
        if params.model or params.lora is not None:
            name, lora = parse_lora(params.model, params.lora, self.adapters)
        speculation = self._drafts
        if params.speculative or params.draft_tokens or params.prediction:
            speculation = parse_speculation(params, self.config, self.tokenizer, self.n_ctx)
        fields = self._fields(params, n_probs, max(counts) if counts else None)
        if len(prompts) * len(speculation.prediction) > MAX_PREDICTED:
            bad_request("prediction", f"has more than {MAX_PREDICTED} characters for all prompts")
        requests: list[CompletionRequest] = []
        for ids, media in prompts:
            if requests:  # there are many
                check()
            if media is None and params.truncate_prompt_tokens is not None:
                ids = self._truncated(ids, params, params.truncate_prompt_tokens)
            drafts = speculation.params
            if speculation.prediction:
                drafts = speculation.after(ids if media is None else (), self.tokenizer)
            of_prompt = CompletionRequest(prompt=ids, media=media, speculation=drafts, lora=lora, **fields)
            requests += [of_prompt, *(varied(of_prompt, i) for i in range(1, best_of))]
        return GenerationJob(
            tuple(requests),
            params,
            n,
            best_of,
            model=name,
            many=many or n > 1,
            top=top,
            prompt_top=prompt_top,
            prefixes=prefixes,
            settings={"backend_sampling": params.backend_sampling},
        )

    def _fields(self, params: Generation, n_probs: int, n_prompt_probs: int | None) -> dict[str, Any]:
        """Fields of a CompletionRequest that do not depend on its prompt."""
        config = self.config
        sampling = parse_sampling(params, config.defaults, self.tokenizer, min(n_probs, self.tokenizer.n_vocab))
        constraint = parse_constraint(params, self.grammars)
        if constraint is not None or params.grammar == "":  # "" takes the server's default away
            sampling = replace_struct(sampling, grammar=constraint)
        n = params.n_predict if params.n_predict >= 0 else config.n_predict
        if 0 <= n < params.min_tokens:
            bad_request("min_tokens", f"must be at most max_tokens, which is {n}")
        stop = [params.stop] if isinstance(params.stop, str) else params.stop
        if len(params.cache_salt) > MAX_SALT:
            bad_request("cache_salt", f"must have at most {MAX_SALT} characters")
        return {name: getattr(params, name) for name in _AS_THEY_ARE} | {
            "sampling": sampling,
            "n_predict": n,
            "stop": tuple(text for text in stop if text) or config.reverse_prompts,
            "t_max_predict_ms": max(0.0, params.t_max_predict_ms),
            "prompt_logprobs": n_prompt_probs,
            "special": config.special or not params.skip_special_tokens,
            "end_text": config.special or params.include_stop_str_in_output,
            "stop_text": params.include_stop_str_in_output,
            "preserved": preserved_ids(params, self.tokenizer) if params.preserved_tokens else frozenset(),
        }

    def _prompt_top(self, n: int, *, stream: bool) -> int:
        """Log-probabilities beside each token of the prompt (`prompt_logprobs`)."""
        if stream:
            bad_request("prompt_logprobs", "cannot be streamed")
        n = self.tokenizer.n_vocab if n < 0 else min(n, self.tokenizer.n_vocab)
        if n > MAX_TOP:
            bad_request("prompt_logprobs", f"at most {MAX_TOP} are possible")
        return n

    # -- prompts

    def _truncated(self, prompt: tuple[int, ...], params: Generation, n: int) -> tuple[int, ...]:
        """The part of the prompt that `truncate_prompt_tokens` keeps."""
        if n == 0:
            bad_request("truncate_prompt_tokens", "must be -1 or at least 1")
        if n < 0:
            n = max(1, self.n_ctx - max(1, params.n_predict))
        return prompt[-n:] if params.truncation_side == "left" else prompt[:n]

    def prompts(self, value: object, name: str = "prompt", *, n: int = 1) -> tuple[list[object], bool]:
        """The prompts in the value of the field `name`, each with `n` results, and whether it was a list of them."""
        if value is None:
            bad_request(name, "is required")
        if not isinstance(value, list):
            return [value], False
        if not value:
            bad_request(name, "must not be an empty array")
        kinds = set(map(type, value))
        if not kinds & {list, dict} and kinds != {str}:  # tokens, or tokens and texts: one prompt
            return [value], False
        if len(value) * n > MAX_RESULTS:
            bad_request(name, f"one request has at most {MAX_RESULTS} results, not {len(value) * n}")
        return value, True

    def rendered(self, text: str, media: Sequence[Medium], params: Generation | None = None) -> Prompt:
        """The prompt of a rendered conversation, with its media."""
        if media:
            return Prompt(*self.media.prompt("messages", text, list(media)))
        return Prompt(self.tokens(text, most=MAX_TOKENS if params is None else most_tokens(params)))

    def room_of(self, params: Generation) -> Room:
        """The room of a request's prompts: that of the context, where they are not cut to it."""
        return Room(self.n_ctx, spare=1) if params.truncate_prompt_tokens is None else Room(MAX_TOKENS)

    def prompt(
        self, prompt: object, name: str = "prompt", *, add_special: bool = True, most: int | None = None
    ) -> Prompt:
        """One prompt, which may be a text with media: {prompt_string, multimodal_data}."""
        if not isinstance(prompt, dict) or not prompt.get("multimodal_data"):
            return Prompt(self.tokens(prompt, name, add_special=add_special, most=most))
        return self.multimodal(prompt, name, add_special=add_special)

    def multimodal(self, prompt: Mapping[str, Any], name: str, *, add_special: bool = True) -> Prompt:
        """The prompt of llama-server's {prompt_string, multimodal_data} in the field `name`."""
        text, data = as_text(name, prompt.get("prompt_string")), prompt["multimodal_data"]
        if not isinstance(data, list):
            bad_request(name, f"multimodal_data: expected an array, got {article(data)}")
        result: list[Medium] = []
        for i, item in enumerate(data):
            self.media.add(f"{name}.multimodal_data[{i}]", item, result)
        return Prompt(*self.media.prompt(name, text, result, add_special=add_special))

    def tokens(
        self, prompt: object, name: str = "prompt", *, add_special: bool = True, most: int | None = None
    ) -> tuple[int, ...]:
        """The token ids of one prompt, which stands in the field `name`; an empty one becomes the BOS where the
        vocabulary has it. Texts: see `encode`."""
        ids: list[int] = []
        if isinstance(prompt, dict):
            if prompt.get("multimodal_data"):
                bad_request(name, "multimodal_data is not possible here")
            prompt = as_text(name, prompt.get("prompt_string"))
        if isinstance(prompt, str):
            ids = self.encode(prompt, add_special=add_special, parse_special=True, most=most)
        elif isinstance(prompt, list) and self._all_known(prompt):
            ids = prompt
        elif isinstance(prompt, list):
            for i, item in enumerate(prompt):
                if len(ids) > (self.n_ctx if most is None else most):
                    raise exceeds_context(len(ids), self.n_ctx, at_least=True)
                if isinstance(item, str):
                    ids += self.encode(item, add_special=add_special and i == 0, parse_special=True, most=most)
                    continue
                id = as_integer(name, item)
                if not 0 <= id < self.tokenizer.n_vocab:
                    bad_request(name, f"token {str(id)[:20]} is outside the vocabulary of {self.tokenizer.n_vocab}")
                ids.append(id)
        else:
            bad_request(name, f"expected a string or an array of tokens, got {article(prompt)}")
        if not ids and self.tokenizer.bos_id is not None:
            ids = [self.tokenizer.bos_id]
        if not ids:
            bad_request(name, "must not be empty: this vocabulary has no BOS token to start with")
        return tuple(ids)

    def _all_known(self, items: list[Any]) -> bool:
        """True if these are ids of the vocabulary; eight times faster than a look at each."""
        return set(map(type, items)) == {int} and min(items) >= 0 and max(items) < self.tokenizer.n_vocab

    def _gap(self, before: tuple[int, ...], after: Sequence[int]) -> tuple[int, ...]:
        """The prompt of a gap between two texts, in the form of /infill."""
        tokenizer = self.tokenizer
        pre, suf, mid = tokenizer.fim_pre_id, tokenizer.fim_suf_id, tokenizer.fim_mid_id
        if pre is None or suf is None or mid is None:
            bad_request("suffix", "this model's vocabulary has no tokens for infill")
        n_bos = 1 if tokenizer.add_bos and before[:1] == (tokenizer.bos_id,) else 0
        return (*before[:n_bos], pre, *before[n_bos:], suf, *after, mid)

    def encode(
        self, text: str, *, add_special: bool = False, parse_special: bool = False, most: int | None = None
    ) -> list[int]:
        """The ids of a text. A long one that has more than `most` (None: the context) by any count is refused first;
        tokenizing ends where there are more, or when the client leaves."""
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)
        most = self.n_ctx if most is None else most
        if (n_least := len(text) // _longest(self.tokenizer)) > most:
            raise exceeds_context(n_least, self.n_ctx, at_least=True)
        ids: list[int] = []
        for part in self.tokenizer.encode_parts(text, add_special=add_special, parse_special=parse_special):
            check()
            ids += part
            if len(ids) > most:
                raise exceeds_context(len(ids), self.n_ctx, at_least=True)
        return ids

    def _text_of(self, prompt: object, ids: tuple[int, ...]) -> str:
        """Text that `echo` puts in front: as it was given, or that of the tokens."""
        if isinstance(prompt, dict):
            prompt = prompt["prompt_string"]
        return prompt if isinstance(prompt, str) else self.tokenizer.pieces(ids).decode("utf-8", "replace")


class Room:
    """Room of the prompts of one request, which are tokenized one by one: the first that does not
    fit is refused, and later prompts are not looked at."""

    def __init__(self, n_ctx: int, *, spare: int = 0, what: str = "request") -> None:
        """`spare`: more tokens that a context of `n_ctx` has to take; `what`: a prompt's name in errors."""
        self._n_ctx, self._spare, self._what = n_ctx, spare, what
        self._n_tokens = 0

    def take(self, prompt: Prompt) -> Prompt:
        """The prompt, if it fits alone and all together have at most MAX_TOKENS."""
        check()
        n = len(prompt.ids)
        if n + self._spare > self._n_ctx:
            raise exceeds_context(n, self._n_ctx, what=self._what)
        if self._n_tokens and self._n_tokens + n > MAX_TOKENS:
            raise InvalidRequest(f"one request has at most {MAX_TOKENS} tokens in all its prompts")
        self._n_tokens += n
        return prompt


@lru_cache(1)
def _longest(tokenizer: Tokenizer) -> int:
    """The bytes of the longest token."""
    return max(len(tokenizer.piece(id)) for id in range(tokenizer.n_vocab))


def most_tokens(params: Generation) -> int | None:
    """Tokens of a prompt that are worth computing; None: those of the context."""
    return None if params.truncate_prompt_tokens is None else MAX_TOKENS


def _n_results(params: Generation) -> int:
    """Results for each prompt."""
    return max(params.n_cmpl, params.best_of or 0)


def _counted(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body with `logprobs` as a number: some clients send chat's form, a boolean and `top_logprobs`."""
    target = body.get("logprobs")
    if not isinstance(target, bool):
        return body
    return {**body, "logprobs": body.get("top_logprobs") or 1 if target else None}


def _nested(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body with `speculative` as an object: it may be written as `speculative.n_max`."""
    dotted = {key.removeprefix(DOTTED): value for key, value in body.items() if key.startswith(DOTTED)}
    inner = body.get("speculative") or {}
    return {**body, "speculative": {**inner, **dotted}} if dotted and isinstance(inner, dict) else body


def varied(request: CompletionRequest, i: int) -> CompletionRequest:
    """Result i of a prompt: the seeds count up, as llama-server's."""
    sampling = request.sampling
    if sampling.seed in (-1, 0xFFFFFFFF):
        return request
    return replace(request, sampling=replace_struct(sampling, seed=(sampling.seed + i) & 0xFFFFFFFF))


_REFUSED = {  # fields of other servers that change the output: better refused than ignored
    "web_search_options": "web_search is not there; tools that the client runs are",
    "mcp_servers": "this server calls no other ones; tools that the client runs are there",
    "container": "this server runs no code",
    "use_beam_search": "beam search is not there; best_of is",
    "logits_processors": "clients' code does not run here; logit_bias, allowed_token_ids and bad_words are there",
    "custom_logit_processor": "clients' code does not run here; logit_bias, allowed_token_ids and bad_words are there",
    "chat_template": "a request brings none of its own: the server has one by --chat-template-file",
    "guided_whitespace_pattern": "is not there; a guided_regex or guided_grammar says all of the text",
    "structural_tag": "is not there; guided_grammar is",
    "repetition_detection": "is not there; dry_multiplier and repeat_penalty are",
    "stop_regex": "is not there; stop is",
    "watermarking": "is not there",
    "watermark": "is not there",
    "prompt_embeds": "a prompt is text or token ids",
    "image_data": "needs a model with media, which this is not",
    "audio": "needs a model with media, which this is not",
    "logprob_token_ids": "is not there; logprobs and top_logprobs are",
}


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """400 for missing features that would change the result."""
    for name, why in _REFUSED.items():
        if body.get(name) not in (None, False, "", []):  # `web_search_options: {}` asks for a search
            bad_request(name, why)
    modalities = body.get("modalities")
    if isinstance(modalities, list) and modalities not in ([], ["text"]):
        bad_request("modalities", "this model writes text only")
    if body.get("response_format") is not None:
        response_kind(body["response_format"])

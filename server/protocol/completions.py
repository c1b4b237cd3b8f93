"""JSON bodies of completion requests → typed requests and what the reply must look like. Every 400 names its field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from msgspec.structs import replace as replace_struct

from logitless.engine.adapters import Adapters
from logitless.engine.errors import ExceedsContext
from logitless.engine.requests import CompletionRequest
from logitless.models.chat.tool_calls import Style
from logitless.models.tokenizer import Tokenizer
from logitless.server.config import ServerConfig
from logitless.server.protocol.fields import INT_MAX, Fields, article, as_integer, as_text, limited, refuse, unsupported
from logitless.server.protocol.grammar import Grammars, parse_constraint, preserved_ids, response_kind
from logitless.server.protocol.lora import parse_lora, tuned_name
from logitless.server.protocol.sampling import parse_sampling
from logitless.server.protocol.speculation import parse_speculation

MAX_TOP = 1024  # log-probabilities beside the chosen token
MAX_BEST_OF = 20
MAX_RESULTS = 2048  # of one HTTP request
LONG_TEXT = 1 << 20  # characters of a prompt, from where on a look before tokenizing is worth it
MAX_STOPS = 256  # every one is looked for in every token's text


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """How the results are to be shown."""

    stream: bool = False
    model: str = ""  # the adapter's name that the request gave; "": the base model
    include_usage: bool = False
    many: bool = False  # native: reply with an array even for one result
    n: int = 1  # results shown per prompt
    best_of: int = 1  # results computed per prompt
    top: int | None = None  # log-probabilities to show beside the chosen token; None: no probabilities at all
    return_tokens: bool = False
    timings_per_token: bool = False
    return_progress: bool = False
    response_fields: tuple[str, ...] = ()
    verbose: bool = False
    sse_ping_interval: int = 30
    prefixes: tuple[str, ...] = ()  # echo: what every prompt's results start with
    style: Style = field(default_factory=Style)  # chat: what an answer may consist of
    user: str = ""  # whom the client asks for; users take turns
    settings: Mapping[str, Any] = field(default_factory=dict)  # accepted fields that only generation_settings shows


@dataclass(frozen=True, slots=True)
class Job:
    """The generations of one HTTP request: `options.best_of` for each prompt, prompt by prompt."""

    requests: tuple[CompletionRequest, ...]
    options: ReplyOptions


class RequestParser:
    """Knows the model's vocabulary and the server's defaults. Keeps no state: any thread may call it."""

    def __init__(
        self, tokenizer: Tokenizer, config: ServerConfig, n_ctx: int, adapters: Adapters | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.adapters = adapters
        self.config = config
        self.n_ctx = n_ctx
        self.grammars = Grammars(tokenizer)

    def native(self, body: Mapping[str, Any]) -> Job:
        """POST /completion."""
        fields = Fields(body)
        _refuse_tools(fields)
        top = fields.integer("n_probs", "logprobs", default=0, low=0, high=MAX_TOP)
        prompts, many = self.prompts(body.get("prompt"))
        return self.job(fields, [self.tokens(prompt) for prompt in prompts], many=many, top=top or None)

    def openai(self, body: Mapping[str, Any]) -> Job:
        """POST /v1/completions, with what llama-server refuses: echo, best_of, suffix."""
        fields = Fields(body)
        _refuse_tools(fields)
        if body.get("logprobs") is False:  # some clients send chat's form
            body = {**body, "logprobs": None}
            fields = Fields(body)
        name, value = fields.find("n_probs", "logprobs")
        top = None if value is None else int(limited(name, as_integer(name, value), 0, MAX_TOP, False))
        if name == "n_probs" and top == 0:
            top = None
        n = self._n(fields)
        best_of = fields.integer("best_of", default=n, low=n, high=max(n, MAX_BEST_OF), hard=True)
        if best_of > n and fields.boolean("stream"):
            refuse("best_of", "cannot be streamed when it is more than n")
        echo = fields.boolean("echo")
        if echo and top is not None and fields.boolean("stream"):
            refuse("echo", "with logprobs cannot be streamed: the prompt's are known when it has been evaluated")
        prompts, many = self.prompts(body.get("prompt"))
        tokens = [self.tokens(prompt) for prompt in prompts]
        suffix = fields.text("suffix")
        if suffix:
            if echo and top is not None:
                refuse("suffix", "cannot be combined with echo and logprobs")
            after = self.encode(suffix)
            tokens = [self._gap(before, after) for before in tokens]
        prefixes = tuple(self._shown(*pair) for pair in zip(prompts, tokens, strict=True)) if echo else ()
        return self.job(fields, tokens, many=many, top=top, best_of=best_of, prefixes=prefixes, prompt_probs=echo)

    def job(
        self,
        fields: Fields,
        prompts: Sequence[tuple[int, ...]],
        *,
        many: bool = False,
        top: int | None = None,
        best_of: int | None = None,
        prefixes: tuple[str, ...] = (),
        prompt_probs: bool = False,
    ) -> Job:
        """The requests for these prompts, with every field that all endpoints share."""
        refuse_unsupported(fields)
        n = self._n(fields)
        best_of = best_of or n
        if len(prompts) * best_of > MAX_RESULTS:
            refuse("prompt", f"one request has at most {MAX_RESULTS} results, not {len(prompts) * best_of}")
        n_probs = 0 if top is None else max(1, top)
        if best_of > n:
            n_probs = max(1, n_probs)
        request = replace(self._request(fields, n_probs), prompt_logprobs=top if prompt_probs else None)
        options = replace(self._reply(fields), many=many or n > 1, n=n, best_of=best_of, top=top, prefixes=prefixes)
        speculation = parse_speculation(fields, self.config, self.tokenizer, self.n_ctx)
        requests: list[CompletionRequest] = []
        for prompt in prompts:
            of_prompt = replace(request, prompt=prompt, speculation=speculation.after(prompt, self.tokenizer))
            requests += [of_prompt, *(_varied(of_prompt, i) for i in range(1, best_of))]
        return Job(tuple(requests), options)

    def _request(self, fields: Fields, n_probs: int) -> CompletionRequest:
        """What is to be generated, of a prompt that is to come."""
        config = self.config
        sampling = parse_sampling(fields, config.defaults, self.tokenizer, min(n_probs, self.tokenizer.n_vocab))
        constraint = parse_constraint(fields, self.grammars)
        if constraint is not None or fields.body.get("grammar") == "":  # "" takes the server's default away
            sampling = replace_struct(sampling, grammar=constraint)
        return CompletionRequest(
            prompt=(),
            sampling=sampling,
            n_predict=self._n_predict(fields),
            stop=self._stop(fields),
            ignore_eos=fields.boolean("ignore_eos"),
            cache_prompt=fields.boolean("cache_prompt", config.cache_prompt),
            n_cache_reuse=fields.integer("n_cache_reuse", default=config.n_cache_reuse, low=0, hard=True),
            id_slot=fields.integer("id_slot", default=-1, low=-1, high=config.n_parallel - 1, hard=True),
            priority=fields.integer("priority", default=0, hard=True),
            n_keep=fields.integer("n_keep", default=config.n_keep, low=-1, hard=True),
            n_discard=fields.integer("n_discard", default=0, low=0, hard=True),
            n_indent=fields.integer("n_indent", default=0, low=0, hard=True),
            t_max_predict_ms=max(0.0, fields.number("t_max_predict_ms", default=0.0, low=-1, hard=True)),
            return_progress=fields.boolean("return_progress"),
            lora=parse_lora(fields, self.adapters),
            special=config.special,
            preserved=preserved_ids(fields, self.tokenizer),
        )

    def _reply(self, fields: Fields) -> ReplyOptions:
        """How it is to be shown, as far as that does not depend on the number of results."""
        config = self.config
        return ReplyOptions(
            stream=fields.boolean("stream"),
            model=tuned_name(fields, self.adapters),
            include_usage=fields.inside("stream_options").boolean("include_usage"),
            return_tokens=fields.boolean("return_tokens"),
            timings_per_token=fields.boolean("timings_per_token"),
            return_progress=fields.boolean("return_progress"),
            response_fields=tuple(as_text("response_fields", f) for f in fields.array("response_fields") or ()),
            verbose=fields.boolean("verbose", config.verbose),
            sse_ping_interval=fields.integer(
                "sse_ping_interval", default=config.sse_ping_interval, low=-1, high=INT_MAX, hard=True
            ),
            user=fields.text("safety_identifier") or fields.text("user"),
            settings={
                "backend_sampling": fields.boolean("backend_sampling", config.backend_sampling),
            },
        )

    def _n_predict(self, fields: Fields) -> int:
        most = self.config.n_predict
        n = fields.integer("n_predict", "max_completion_tokens", "max_tokens", default=most, low=-1, hard=True)
        return n if most < 0 or 0 <= n <= most else most

    # -- prompts

    def prompts(self, value: object, name: str = "prompt") -> tuple[list[object], bool]:
        """The prompts in the value of the field `name`, and whether it was a list of them."""
        if value is None:
            refuse(name, "is required")
        if not isinstance(value, list):
            return [value], False
        if not value:
            refuse(name, "must not be an empty array")
        kinds = set(map(type, value))
        if not kinds & {list, dict} and kinds != {str}:  # tokens, or tokens and texts: one prompt
            return [value], False
        return value, True

    def tokens(self, prompt: object, name: str = "prompt") -> tuple[int, ...]:
        """The token ids of one prompt, which stands in the field `name`; an empty one becomes the BOS where the
        vocabulary has it."""
        ids: list[int] = []
        if isinstance(prompt, dict):
            if prompt.get("multimodal_data"):
                unsupported(name, "multimodal_data needs a model with media, which this is not")
            prompt = as_text(name, prompt.get("prompt_string"))
        if isinstance(prompt, str):
            ids = self.encode(prompt, add_special=True, parse_special=True)
        elif isinstance(prompt, list) and self._all_known(prompt):
            ids = prompt
        elif isinstance(prompt, list):
            for i, item in enumerate(prompt):
                if isinstance(item, str):
                    ids += self.encode(item, add_special=i == 0, parse_special=True)
                    continue
                id = as_integer(name, item)
                if not 0 <= id < self.tokenizer.n_vocab:
                    refuse(name, f"token {str(id)[:20]} is outside the vocabulary of {self.tokenizer.n_vocab}")
                ids.append(id)
        else:
            refuse(name, f"expected a string or an array of tokens, got {article(prompt)}")
        if not ids and self.tokenizer.bos_id is not None:
            ids = [self.tokenizer.bos_id]
        if not ids:
            refuse(name, "must not be empty: this vocabulary has no BOS token to start with")
        return tuple(ids)

    def _all_known(self, items: list[Any]) -> bool:
        """Whether these are ids of the vocabulary, in an eighth of the time of a look at each."""
        return set(map(type, items)) == {int} and min(items) >= 0 and max(items) < self.tokenizer.n_vocab

    def _gap(self, before: tuple[int, ...], after: Sequence[int]) -> tuple[int, ...]:
        """The prompt of a gap between two texts, in the form of /infill."""
        tokenizer = self.tokenizer
        pre, suf, mid = tokenizer.fim_pre_id, tokenizer.fim_suf_id, tokenizer.fim_mid_id
        if pre is None or suf is None or mid is None:
            unsupported("suffix", "this model's vocabulary has no tokens for infill")
        n_bos = 1 if tokenizer.add_bos and before[:1] == (tokenizer.bos_id,) else 0
        return (*before[:n_bos], pre, *before[n_bos:], suf, *after, mid)

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """The ids of a text. One of megabytes that cannot fit by any count is refused first: tokenizing it takes many
        seconds, and some tokenizers let nobody else run meanwhile."""
        if len(text) >= LONG_TEXT and (n_least := len(text) // self._longest) > self.n_ctx:
            raise ExceedsContext(
                f"request (at least {n_least} tokens) exceeds the available context size ({self.n_ctx} tokens), "
                "try increasing it",
                n_prompt_tokens=n_least,
                n_ctx=self.n_ctx,
            )
        return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    @cached_property
    def _longest(self) -> int:
        """The bytes of the longest token."""
        return max(len(self.tokenizer.piece(id)) for id in range(self.tokenizer.n_vocab))

    def _shown(self, prompt: object, ids: tuple[int, ...]) -> str:
        """What `echo` puts in front: the text as it was given, or that of the tokens."""
        if isinstance(prompt, dict):
            prompt = prompt["prompt_string"]
        return prompt if isinstance(prompt, str) else self.tokenizer.pieces(ids).decode("utf-8", "replace")

    def _n(self, fields: Fields) -> int:
        return fields.integer("n_cmpl", "n", default=1, low=1, high=self.config.n_parallel, hard=True)

    def _stop(self, fields: Fields) -> tuple[str, ...]:
        _, value = fields.find("stop")
        words: Sequence[object] = value if isinstance(value, list) else [] if value is None else [value]
        if len(words) > MAX_STOPS:
            refuse("stop", f"at most {MAX_STOPS} are allowed, got {len(words)}")
        return tuple(text for word in words if (text := as_text("stop", word))) or self.config.reverse_prompts


def _varied(request: CompletionRequest, i: int) -> CompletionRequest:
    """Result i of a prompt: the seeds count up, as llama-server's."""
    sampling = request.sampling
    if sampling.seed in (-1, 0xFFFFFFFF):
        return request
    return replace(request, sampling=replace_struct(sampling, seed=(sampling.seed + i) & 0xFFFFFFFF))


def _refuse_tools(fields: Fields) -> None:
    if fields.body.get("tools"):
        refuse("tools", "needs a chat: POST /v1/chat/completions")


def refuse_unsupported(fields: Fields) -> None:
    """501 for what would change the result and is not there yet: better than a silent ignore."""
    for name in ("functions", "function_call"):
        if fields.body.get(name):
            unsupported(name)
    response_kind(fields)

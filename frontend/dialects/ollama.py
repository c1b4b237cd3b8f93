"""Ollama's requests → the equivalent chat or completion request. Refusals name the field."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta, Struct

from logitless.engine.errors import InvalidRequest, exceeds_context
from logitless.engine.requests import CompletionRequest
from logitless.engine.sampling.params import INT_MAX, Param
from logitless.frontend.chat.chat import parse_chat
from logitless.frontend.dialects.ollama_names import seconds
from logitless.frontend.dialects.ollama_template import prompt_of
from logitless.frontend.dialects.translate import Translated
from logitless.frontend.fields import as_object, as_text, bad_request, read
from logitless.frontend.media.media import is_audio
from logitless.frontend.parser import MAX_TOKENS, GenerationJob, RequestParser
from logitless.models.chat.template import ChatTemplate

MAX_TOP = 20  # Ollama's
_SCHEMA = "response_format.json_schema.schema"
EFFORTS = ("low", "medium", "high", "max")
_FORMAT = {"anyOf": [{"enum": ["", "json", None]}, {"type": "object"}]}
_THINK = {"anyOf": [{"enum": [True, False, *EFFORTS, None]}]}
_KEEP = {"type": ["number", "string", "null"]}
_COUNT = {"low": -INT_MAX, "high": INT_MAX, "hard": True}


class Options(Struct, frozen=True, kw_only=True):
    """`options`. Options of loading (num_batch, num_gpu, num_thread, …) are the server's flags here."""

    num_ctx: Annotated[int | None, Param("most tokens of prompt and answer; the server's, where that is less", 1)] = (
        None
    )
    num_predict: Annotated[int | None, Param("most tokens of the answer; below 1: any number", **_COUNT)] = None
    num_keep: Annotated[int | None, Param("first tokens of the prompt that stay where it is cut", **_COUNT)] = None
    seed: Annotated[int | None, Param("of the random numbers; -1: a random one")] = None
    stop: Annotated[str | Sequence[str] | None, Param("texts that end the answer", most=256)] = None
    temperature: Annotated[float | None, Param("0: the likeliest token")] = None
    top_k: Annotated[int | None, Param("sample from so many likely tokens", **_COUNT)] = None
    top_p: Annotated[float | None, Param("sample from tokens of this much probability")] = None
    min_p: Annotated[float | None, Param("least probability, relative to the likeliest")] = None
    typical_p: Annotated[float | None, Param("locally typical sampling; 1: off")] = None
    repeat_last_n: Annotated[int | None, Param("tokens that penalties look at; -1: all", -1, INT_MAX, hard=True)] = None
    repeat_penalty: Annotated[float | None, Param("penalty of repeated tokens; 1: off")] = None
    presence_penalty: Annotated[float | None, Param("penalty of tokens that are there")] = None
    frequency_penalty: Annotated[float | None, Param("penalty of tokens, for each time")] = None
    mirostat: Annotated[int | None, Param("0: off, 1 or 2: its version", 0, 2)] = None
    mirostat_tau: Annotated[float | None, Param("Mirostat: wanted surprise")] = None
    mirostat_eta: Annotated[float | None, Param("Mirostat: learning rate")] = None


OURS = {"num_predict": "n_predict", "num_keep": "n_keep"}  # of the options that have another name here


class Named(Struct, frozen=True, kw_only=True):
    """A request about one model."""

    model: Annotated[str, Param("the model's name; a tag of `latest` may be left out", aliases=("name",))]


class ShowBody(Named, frozen=True, kw_only=True):
    """POST /api/show."""

    verbose: Annotated[bool, Param("with the vocabulary")] = False


class PullBody(Named, frozen=True, kw_only=True):
    """POST /api/pull."""

    stream: Annotated[bool, Param("tell the progress line by line")] = True
    insecure: Annotated[bool, Param("accepted without effect")] = False


class OllamaChatMessage(Struct, frozen=True, kw_only=True):
    """A message: text, images in base64, reasoning, calls with arguments as objects."""

    role: Annotated[str, Meta(extra_json_schema={"minLength": 1})]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class CreateBody(Named, frozen=True, kw_only=True):
    """POST /api/create."""

    source: Annotated[str, Param("the model that this one is made from", aliases=("from",))] = ""
    files: Annotated[Mapping[str, str], Param("digests of uploaded GGUF files, by name")] = {}
    adapters: Annotated[Mapping[str, str], Param("digests of uploaded LoRA adapters in GGUF, by name")] = {}
    system: Annotated[str, Param("the system message of conversations without one")] = ""
    template: Annotated[str, Param("the chat template: Jinja, or Go with variables, `if` and `range .Messages`")] = ""
    parameters: Annotated[Mapping[str, Any], Param("options of requests that do not say")] = {}
    messages: Annotated[list[OllamaChatMessage], Param("messages in front of every conversation")] = []
    license: Annotated[str | Sequence[str], Param("texts of licences", most=64)] = ()
    quantize: Annotated[str, Param("the type of the model's weights, as q4_K_M", aliases=("quantization",))] = ""
    stream: Annotated[bool, Param("tell the steps line by line")] = True


class CopyBody(Struct, frozen=True, kw_only=True):
    """POST /api/copy."""

    source: Annotated[str, Param("the name of a model")]
    destination: Annotated[str, Param("the name of its copy")]


class Lasting(Named, frozen=True, kw_only=True):
    """Common fields of requests that compute."""

    keep_alive: Annotated[
        Any,
        Param(
            "0: the model is unloaded after it, until the next one; other times have no effect (--sleep-idle-seconds)"
        ),
        Meta(extra_json_schema=_KEEP),
    ] = None
    options: Annotated[Mapping[str, Any], Param("sampling and lengths: " + ", ".join(Options.__struct_fields__))] = {}
    truncate: Annotated[bool, Param("cut prompts longer than the context; false: refuse them")] = True


class Written(Lasting, frozen=True, kw_only=True):
    """Common fields of requests that generate text."""

    stream: Annotated[bool, Param("answer line by line")] = True
    format: Annotated[Any, Param("json, or a JSON schema of the answer"), Meta(extra_json_schema=_FORMAT)] = None
    think: Annotated[
        Any, Param("reason first: true, false, low, medium, high or max"), Meta(extra_json_schema=_THINK)
    ] = None
    logprobs: Annotated[bool, Param("show log-probabilities")] = False
    top_logprobs: Annotated[int, Param("of so many likely tokens", 0, MAX_TOP, hard=True)] = 0
    shift: Annotated[bool, Param("accepted; --context-shift decides")] = True


class GenerateBody(Written, frozen=True, kw_only=True):
    """POST /api/generate."""

    prompt: Annotated[str, Param("the text to answer; empty: load the model")] = ""
    suffix: Annotated[str, Param("the text after the gap, for models with infill tokens")] = ""
    images: Annotated[Sequence[str], Param("images in base64", most=256)] = ()
    system: Annotated[str, Param("a system message before the prompt")] = ""
    template: Annotated[str, Param("Ollama's template in the place of the model's: variables and `if`")] = ""
    context: Annotated[Sequence[int], Param("tokens of an earlier answer, to go on from")] = ()
    raw: Annotated[bool, Param("the prompt as it is, without a template")] = False


class ChatBody(Written, frozen=True, kw_only=True):
    """POST /api/chat."""

    messages: Annotated[list[OllamaChatMessage], Param("the conversation; empty: load the model")] = []
    tools: Annotated[Sequence[dict[str, Any]], Param("functions: {type, function: {name, parameters}}", most=256)] = ()


class EmbedBody(Lasting, frozen=True, kw_only=True):
    """POST /api/embed."""

    input: Annotated[str | Sequence[str], Param("a text, or an array of texts", most=2048)] = ""
    dimensions: Annotated[int | None, Param("numbers of a vector", 1, INT_MAX, hard=True)] = None


class EmbeddingsBody(Lasting, frozen=True, kw_only=True):
    """POST /api/embeddings."""

    prompt: Annotated[str, Param("the text")] = ""


@dataclass(frozen=True, slots=True)
class OllamaJob:
    """A parsed request. `job` None: the model is to be loaded, or unloaded (`keep` 0)."""

    job: GenerationJob | None
    model: str  # as the client calls it
    stream: bool = False
    keep: float | None = None


def parse_generate(body: Mapping[str, Any], parser: RequestParser, model: Callable[[str], str]) -> OllamaJob:
    """POST /api/generate. `model`: our name for the client's (NotFound)."""
    params, keep, ours = _read(GenerateBody, body, model)
    if params.raw and (params.template or params.system or params.context):
        bad_request("raw", "cannot be combined with template, system or context")
    if not params.prompt and not params.images and not params.suffix and not params.system:
        return OllamaJob(None, params.model, keep=keep)
    options, fields, names = _fields(params, body, parser.template, ours)
    if params.suffix:
        if params.images:
            bad_request("suffix", "cannot be combined with images")
        completion = {**fields, "prompt": params.prompt, "suffix": params.suffix}
        job = Translated(completion, names).read(parser.openai)
    elif params.raw or params.template or parser.template is None:
        job = Translated({**fields, "prompt": _plain_prompt(params, parser, names)}, names).read(parser.native)
    else:
        messages: list[dict[str, Any]] = [{"role": "system", "content": params.system}] if params.system else []
        names[f"messages[{len(messages)}].content"] = "images"
        messages.append({"role": "user", "content": _parts(params.prompt, params.images)})
        for k in range(len(params.images)):
            names[f"messages[{len(messages) - 1}].content[{k}].image_url.url"] = f"images[{k}]"
        job = Translated({**fields, "messages": messages}, names).read(lambda chat: parse_chat(chat, parser))
    if params.context:
        job = _after(params.context, job, parser)
    job = _fitted(job, options, parser, params.truncate)
    return OllamaJob(_logged(job, params), params.model, params.stream, keep)


def parse_ollama_chat(body: Mapping[str, Any], parser: RequestParser, model: Callable[[str], str]) -> OllamaJob:
    """POST /api/chat. `model`: our name for the client's (NotFound)."""
    params, keep, ours = _read(ChatBody, body, model)
    if not params.messages:
        return OllamaJob(None, params.model, keep=keep)
    options, fields, names = _fields(params, body, parser.template, ours)
    if params.tools:
        fields["tools"] = list(params.tools)
    messages = _messages(params.messages, names)

    def job_of(entries: Sequence[dict[str, Any]]) -> GenerationJob:
        chat = {**fields, "messages": list(entries)}
        return Translated(chat, names).read(lambda value: parse_chat(value, parser))

    limit, job = _limit(options, parser), job_of(messages)
    if len(job.requests[0].prompt) >= limit and params.truncate:
        job = _without_oldest(messages, limit, job_of)
    return OllamaJob(_logged(_fitted(job, options, parser, params.truncate), params), params.model, params.stream, keep)


def _read(kind: type[Any], body: Mapping[str, Any], model: Callable[[str], str]) -> tuple[Any, float | None, str]:
    """(the body, seconds of keep_alive, our name of the model)."""
    params = read(kind, body)
    keep = None if params.keep_alive is None else seconds("keep_alive", params.keep_alive)
    return params, keep, model(params.model)


def options_of(body: Lasting) -> Options:
    """The request's options, checked."""
    return read(Options, body.options, within="options.")


def _fields(
    params: Written, body: Mapping[str, Any], template: ChatTemplate | None, model: str
) -> tuple[Options, dict[str, Any], dict[str, str]]:
    """(options, fields of the chat or completion, where these stood in the request)."""
    options = options_of(params)
    fields: dict[str, Any] = {"model": model, "stream": params.stream, "reasoning_format": "auto"}
    if params.truncate:
        fields["truncate_prompt_tokens"] = MAX_TOKENS  # it is cut here
    names = {}
    for name in Options.__struct_fields__:
        value = getattr(options, name)
        if name != "num_ctx" and value is not None:
            ours = OURS.get(name, name)
            fields[ours], names[ours] = value, f"options.{name}"
    if options.num_predict is not None:
        fields["n_predict"] = options.num_predict if options.num_predict > 0 else -1
    if options.num_keep is not None:
        fields["n_keep"] = max(-1, options.num_keep)
    if isinstance(params.format, dict):
        names |= dict.fromkeys(("response_format", _SCHEMA), "format")
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": params.format}}
    elif params.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif params.format not in (None, ""):
        bad_request("format", "must be json or a JSON schema")
    if params.logprobs:
        fields |= {"logprobs": True, "top_logprobs": params.top_logprobs}
    elif body.get("top_logprobs"):
        bad_request("top_logprobs", "needs logprobs to be true")
    _think(fields, params.think, template)
    return options, fields, names


def _think(fields: dict[str, Any], think: object, template: ChatTemplate | None) -> None:
    if think is None or think == "":
        return
    if think is False:
        fields["reasoning_budget_tokens"] = 0
        return
    if think is not True and think not in EFFORTS:
        bad_request("think", f"must be true, false, {', '.join(EFFORTS[:-1])} or {EFFORTS[-1]}")
    if template is None or template.reasoning is None:
        bad_request("think", "this model does not support thinking")
    fields["chat_template_kwargs"] = {"enable_thinking": True}
    if think is not True:
        fields["reasoning_effort"] = think


def _parts(text: str, images: Sequence[str]) -> str | list[dict[str, Any]]:
    """A message's content: images come before the text, as Ollama puts them."""
    if not images:
        return text
    entries = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    return [*entries, {"type": "text", "text": text}] if text else list(entries)


def _plain_prompt(body: GenerateBody, parser: RequestParser, names: dict[str, str]) -> object:
    """The prompt of a request that the model's own template does not write."""
    text = prompt_of(body.template, body.prompt, body.system) if body.template else body.prompt
    if body.system and not body.template:
        text = f"{body.system}\n\n{text}"
    if not body.images:
        return text
    for k, image in enumerate(body.images):
        names[f"prompt.multimodal_data[{k}]"] = f"images[{k}]"
        if is_audio(image):
            bad_request(f"images[{k}]", "is audio, which this API does not take")
    marked = parser.media.marker * len(body.images) + text
    return {"prompt_string": marked, "multimodal_data": list(body.images)}


def _messages(values: Sequence[OllamaChatMessage], names: dict[str, str]) -> list[dict[str, Any]]:
    """The messages of a chat; a tool's result gets the id of the call that it answers."""
    messages: list[dict[str, Any]] = []
    open_calls = _OpenCalls()
    for i, message in enumerate(values):
        built: dict[str, Any] = {"role": message.role, "content": _parts(message.content or "", message.images or ())}
        for k in range(len(message.images or ())):
            names[f"messages[{i}].content[{k}].image_url.url"] = f"messages[{i}].images[{k}]"
        if message.thinking:
            built["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [_call(f"messages[{i}].tool_calls[{k}]", call, i, k) for k, call in enumerate(message.tool_calls)]
            built["tool_calls"] = calls
            for called in calls:
                open_calls.add(called["function"]["name"], called["id"])
        if message.role == "tool":
            if message.tool_name:
                built["name"] = message.tool_name
            answered = open_calls.take(message.tool_name)
            built["tool_call_id"] = message.tool_call_id or answered or "call_0"
        messages.append(built)
    return messages


class _OpenCalls:
    """Calls without a result."""

    def __init__(self) -> None:
        self._ids: OrderedDict[int, str] = OrderedDict()  # by number of the call
        self._named: defaultdict[str, deque[int]] = defaultdict(deque)  # numbers, also of calls that are answered
        self._n = 0

    def add(self, name: str, id: str) -> None:
        self._ids[self._n] = id
        self._named[name].append(self._n)
        self._n += 1

    def take(self, name: str | None) -> str | None:
        """The id of the first call of this name, else of the first call; None if there is none."""
        named = self._named.get(name or "", ())
        while named and named[0] not in self._ids:
            named.popleft()
        if not self._ids:
            return None
        return self._ids.pop(named.popleft()) if named else self._ids.popitem(last=False)[1]


def _call(name: str, call: Mapping[str, Any], i: int, k: int) -> dict[str, Any]:
    function = as_object(f"{name}.function", call.get("function"))
    arguments = function.get("arguments")
    if arguments is not None:
        as_object(f"{name}.function.arguments", arguments)
    called = as_text(f"{name}.function.name", function.get("name"))
    id = call.get("id")
    known = id if isinstance(id, str) and id else f"call_{i}_{k}"
    return {"id": known, "type": "function", "function": {"name": called, "arguments": arguments or {}}}


# -- lengths


def _limit(options: Options, parser: RequestParser) -> int:
    return min(options.num_ctx or parser.n_ctx, parser.n_ctx)


def _without_oldest(
    messages: list[dict[str, Any]], limit: int, job_of: Callable[[Any], GenerationJob]
) -> GenerationJob:
    """The job of the most of the last messages that fit; system messages and the last one always stay."""
    low, high = 1, len(messages) - 1
    while low < high:
        middle = (low + high) // 2
        if len(job_of(_last(messages, middle)).requests[0].prompt) < limit:
            high = middle
        else:
            low = middle + 1
    return job_of(_last(messages, min(low, len(messages) - 1)))


def _last(messages: list[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    """The messages without the first n, less the system's of these."""
    return [message for i, message in enumerate(messages) if i >= n or message["role"] == "system"]


def _after(context: Sequence[int], job: GenerationJob, parser: RequestParser) -> GenerationJob:
    """The job after the tokens of an earlier answer."""
    n_vocab, bos = parser.tokenizer.n_vocab, parser.tokenizer.bos_id
    for i, id in enumerate(context):
        if not 0 <= id < n_vocab:
            bad_request("context", f"item {i}: token {str(id)[:20]} is outside the vocabulary of {n_vocab}")
    if job.requests[0].media is not None:
        bad_request("context", "cannot be combined with images")

    def joined(request: CompletionRequest) -> CompletionRequest:
        prompt = request.prompt[1:] if request.prompt[:1] == (bos,) else request.prompt
        return replace(request, prompt=(*context, *prompt))

    return replace(job, requests=tuple(map(joined, job.requests)))


def _fitted(job: GenerationJob, options: Options, parser: RequestParser, truncate: bool) -> GenerationJob:
    """The job with a prompt and an answer of at most num_ctx tokens together. A prompt that is cut
    leaves a quarter for the answer, or the tokens that the request asks for."""
    (request,), limit = job.requests, _limit(options, parser)
    n = len(request.prompt)
    if n >= limit and truncate and request.media is None:
        room = request.n_predict if 0 < request.n_predict <= limit // 2 else max(1, limit // 4)
        keep = min(max(4, options.num_keep or 0) if (options.num_keep or 0) >= 0 else n, limit // 2)
        last = max(0, limit - room - keep)
        request = replace(request, prompt=(*request.prompt[:keep], *request.prompt[n - last :]))
        n = len(request.prompt)
    if n >= limit:
        raise exceeds_context(n, limit)
    if options.num_ctx is not None and limit < parser.n_ctx and not 0 <= request.n_predict <= limit - n:
        request = replace(request, n_predict=limit - n)
    return replace(job, requests=(request,))


def _logged(job: GenerationJob, body: Written) -> GenerationJob:
    """The job, which shows log-probabilities if they are asked for."""
    return replace(job, top=body.top_logprobs if body.logprobs else None)


def embed_texts(values: str | Sequence[str], name: str, parser: RequestParser, n_ctx: int, truncate: bool) -> list[Any]:
    """Token ids of the texts in the field `name`, each cut to the context or refused."""
    texts = [values] if isinstance(values, str) else list(values)
    result = []
    for text in texts:
        ids = parser.tokens(text, name, most=MAX_TOKENS)
        if len(ids) > n_ctx:
            if not truncate:
                raise InvalidRequest(f"field '{name}': the input length exceeds the context length of {n_ctx} tokens")
            ends = ids[-1] in {parser.tokenizer.eos_id, getattr(parser.tokenizer, "sep_id", None)}
            ids = (*ids[: n_ctx - 1], ids[-1]) if ends else ids[:n_ctx]
        result.append(ids)
    return result

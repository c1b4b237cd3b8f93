"""Ollama's API on a server of one model: answers, vectors, the list of models; LM Studio's list."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import PurePath
from typing import Any

from aiohttp import web

from logitless.engine.errors import Forbidden, NotFound, NotSupported
from logitless.frontend.answers import UNSET
from logitless.frontend.answers.models import LMStudioModel, LMStudioModels
from logitless.frontend.answers.ollama import (
    ListedModel,
    ListedModels,
    ModelDetails,
    OllamaAnswer,
    OllamaVector,
    OllamaVectors,
    OllamaVersion,
    ShownModel,
)
from logitless.frontend.dialects.ollama import (
    EmbedBody,
    EmbeddingsBody,
    OllamaJob,
    ShowBody,
    embed_texts,
    options_of,
    parse_generate,
    parse_ollama_chat,
)
from logitless.frontend.dialects.ollama_names import candidates, seconds, tagged, timestamp
from logitless.frontend.fields import bad_request, read
from logitless.frontend.lora import parse_lora
from logitless.frontend.replies.encoding import lazy
from logitless.frontend.replies.ollama import OllamaReply, nanoseconds, text_fields
from logitless.frontend.texts.embeddings import normalized
from logitless.frontend.workers import to_thread
from logitless.server.api.context import CONTEXT, Context, json_response
from logitless.server.api.generate import run, send_json
from logitless.server.api.ollama.model_file import ModelFile, model_file, shown_size, whole_info
from logitless.server.api.openai.embeddings import embedder_for_texts, vectors_of
from logitless.server.clients import CLIENT
from logitless.server.config import ServerConfig

_LONG = 1 << 10  # tokens of texts whose vectors take long to write

Parse = Callable[..., OllamaJob]


async def generate(request: web.Request) -> web.StreamResponse:
    """POST /api/generate."""
    return await _generated(request, parse_generate, chat=False)


async def chat(request: web.Request) -> web.StreamResponse:
    """POST /api/chat."""
    return await _generated(request, parse_ollama_chat, chat=True)


async def _generated(request: web.Request, parse: Parse, *, chat: bool) -> web.StreamResponse:
    context = request.app[CONTEXT]
    params = await context.read(request, partial(parse, model=partial(model_of, context)), slow=True)
    if params.job is None:
        return await _loaded(request, params, chat=chat)
    reply = OllamaReply(params.job, params.model, context.served, context.config, chat=chat)
    response = await run(request, reply)
    if params.keep == 0 and _may_unload(request):
        _unload(request)
    return response


async def _loaded(request: web.Request, job: OllamaJob, *, chat: bool) -> web.Response:
    """The answer to an empty prompt, which loads the model, or unloads it."""
    if job.keep == 0:
        _unload(request)
    else:
        await request.app[CONTEXT].service.ask(lambda _: None)
    reason = "unload" if job.keep == 0 else "load"
    return json_response(OllamaAnswer(job.model, timestamp(), **text_fields(chat), done=True, done_reason=reason))


def _unload(request: web.Request) -> None:
    """Put the model to sleep unless others use it; a router does so itself. Forbidden: the client may not."""
    context = request.app[CONTEXT]
    if not _may_unload(request):
        raise Forbidden("unloading a model needs the admin key")
    if not context.config.behind_router:
        context.service.unload()


def _may_unload(request: web.Request) -> bool:
    return request[CLIENT].is_admin or not request.app[CONTEXT].config.admin_api_key


async def embed(request: web.Request) -> web.StreamResponse:
    """POST /api/embed: vectors of length 1."""
    began = time.monotonic()

    def texts(body: dict[str, Any]) -> tuple[EmbedBody, str | list[str]]:
        params = read(EmbedBody, body)
        return params, params.input if isinstance(params.input, str) else list(params.input)

    params, n_tokens, result = await _vectors(request, texts, "input", 2)
    total = nanoseconds((time.monotonic() - began) * 1e3)
    count = n_tokens if result else UNSET
    vectors = OllamaVectors(params.model, result, total, 0, count)
    if n_tokens > _LONG:
        return await send_json(request, lambda: vectors)
    return json_response(vectors)


async def embeddings(request: web.Request) -> web.Response:
    """POST /api/embeddings: one vector, as the model makes it."""

    def text(body: dict[str, Any]) -> tuple[EmbeddingsBody, str]:
        params = read(EmbeddingsBody, body)
        return params, params.prompt

    _, _, result = await _vectors(request, text, "prompt", -1)
    return json_response(OllamaVector(next(iter(result), [])))


async def _vectors(
    request: web.Request, texts: Callable[[dict[str, Any]], Any], name: str, norm: int
) -> tuple[Any, int, list[list[float]]]:
    """(body, tokens, a vector for each text); none for an empty text, which asks to load the model."""
    context = request.app[CONTEXT]
    embedder, pooling = embedder_for_texts(context)
    parser = context.parser_for(request)

    def parse(body: dict[str, Any]) -> Any:
        params, value = texts(body)
        ours = model_of(context, params.model)
        keep = None if params.keep_alive is None else seconds("keep_alive", params.keep_alive)
        options_of(params)
        dimensions = getattr(params, "dimensions", None)
        if dimensions is not None and dimensions > embedder.n_embd:
            bad_request("dimensions", f"must be at most {embedder.n_embd}, the size of the model's vectors")
        ids = embed_texts(value, name, parser, embedder.n_ctx, params.truncate) if value else []
        return params, ids, parse_lora(ours, None, parser.adapters)[1], dimensions, keep

    params, ids, lora, dimensions, keep = await context.parsed(request, parse)
    await context.embeds(request, "", ids)
    built = await vectors_of(context, embedder, ids, pooling, lora) if ids else []
    if keep == 0 and (not ids or _may_unload(request)):
        _unload(request)

    entries: list[list[float]] = lazy(lambda: (normalized(vector[:dimensions], norm).tolist() for vector in built))
    return params, sum(map(len, ids)), entries if built else []


VERSION = "0.14.2"  # of Ollama, in January 2026, whose API this is: Codex asks for 0.13.4 or newer
FOREVER = "2318-01-01T00:00:00Z"  # when a model that stays is unloaded


def listed(name: str, file: ModelFile, **more: Any) -> ListedModel:
    """The item of a model by its name here and its file."""
    return ListedModel(tagged(name), tagged(name), file.modified_at, file.size, file.digest, file.details, **more)


def show_answer(name: str, file: ModelFile, info: dict[str, Any], parameters: str = "") -> ShownModel:
    """The answer of /api/show of a model: its name, its file, its metadata."""
    license = info.get("general.license")
    return ShownModel(
        f"FROM {PurePath(name).name}\n",
        parameters,
        file.template,
        file.details,
        info,
        list(file.capabilities),
        file.modified_at,
        license if isinstance(license, str) else UNSET,
    )


def model_of(context: Context, name: str) -> str:
    """Our name of a client's model. NotFound: this server does not have it. Behind a router it has."""
    adapters, known = context.served.adapters, context.config.names
    for candidate in candidates(name):
        if candidate in known or (adapters is not None and adapters.find(candidate) is not None):
            return candidate
    if context.config.behind_router:
        return context.config.model
    raise NotFound(f"model '{name[:200]}' not found")


async def tags(request: web.Request) -> web.Response:
    """GET /api/tags: the model, and its finetunes that have names."""
    context = request.app[CONTEXT]
    file = await _file(context)
    names = [context.config.model]
    if context.served.adapters is not None:
        names += [e.name for e in context.served.adapters.entries if e.name and not e.removed and e.listed]
    return json_response(ListedModels([listed(name, file, capabilities=list(file.capabilities)) for name in names]))


async def lmstudio_models(request: web.Request) -> web.Response:
    """GET /api/v0/models: LM Studio's list, with the model."""
    context = request.app[CONTEXT]
    state, n_ctx = ("not-loaded", None) if context.service.asleep else ("loaded", context.served.info.n_ctx)
    name, file = context.config.model, await _file(context)
    return json_response(LMStudioModels([lmstudio_item(name, file, state, n_ctx)]))


def lmstudio_item(name: str, file: ModelFile, state: str, n_ctx: int | None = None) -> LMStudioModel:
    """LM Studio's item of a model by its name here and its file. `n_ctx`: tokens of its context, if it is loaded."""
    can, details = file.capabilities, file.details
    trained = file.info.get(f"{details.family}.context_length")
    return LMStudioModel(
        id=name,
        type="vlm" if "vision" in can else "embeddings" if "completion" not in can else "llm",
        publisher=name.rpartition("/")[0],
        arch=details.family,
        quantization=details.quantization_level,
        state=state,
        max_context_length=trained if isinstance(trained, int) else n_ctx or 0,
        loaded_context_length=UNSET if n_ctx is None else n_ctx,
        capabilities=["tool_use"] if "tools" in can else [],
    )


async def ps(request: web.Request) -> web.Response:
    """GET /api/ps: the model, unless it sleeps."""
    context = request.app[CONTEXT]
    if context.service.asleep:
        return json_response(ListedModels([]))
    file, n_ctx = await _file(context), context.served.info.n_ctx
    return json_response(
        ListedModels(
            [listed(context.config.model, file, expires_at=FOREVER, size_vram=0, context_length=n_ctx)],
        )
    )


async def show(request: web.Request) -> web.Response:
    """POST /api/show."""
    context = request.app[CONTEXT]
    params = await context.parsed(request, lambda body: read(ShowBody, body))
    name, path = model_of(context, params.model), context.config.model_path
    file = await _file(context)
    info = await to_thread(lambda: whole_info(path)) if params.verbose else file.info
    return json_response(show_answer(name, file, info, _parameters(context.config)))


async def version(request: web.Request) -> web.Response:
    """GET /api/version."""
    return json_response(OllamaVersion(VERSION))


async def only_in_router(request: web.Request) -> web.StreamResponse:
    """Downloads and creation of models, and their end."""
    raise NotSupported(
        f"{request.method} {request.path}: this server has one model; "
        "a router (logitless serve without -m) downloads and deletes models, and with --models-dir FOLDER makes them"
    )


async def not_here(request: web.Request) -> web.StreamResponse:
    """Uploads to Ollama's registry."""
    raise NotSupported(f"{request.method} {request.path}: models are files here, which are not pushed anywhere")


async def _file(context: Context) -> ModelFile:
    """The loaded model: details of its file, and facts of the loaded one."""
    served, path = context.served, context.config.model_path
    file = await to_thread(lambda: model_file(path))
    info, template = served.info, served.template
    can = ["completion"] if info.generates else []
    if template is not None and info.generates:
        can += ["tools"] if template.caps.get("supports_tools") else []
        can += ["thinking"] if template.reasoning is not None else []
    can += ["insert"] if served.tokenizer.fim_mid_id is not None else []
    can += ["vision"] if served.media is not None and served.media.reads_images else []
    can += ["embedding"] if context.config.embeddings or not info.generates else []
    details = file.details
    if not details.parameter_size:
        details = ModelDetails(parameter_size=shown_size(info.n_params), quantization_level=info.ftype)
    source = template.source if template is not None else ""
    known = file.info or {"general.parameter_count": info.n_params}
    return ModelFile(file.size or info.nbytes, file.modified, file.digest, details, known, source, tuple(can))


def _parameters(config: ServerConfig) -> str:
    """The server's defaults of sampling, one a line."""
    names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n")
    lines = [f"{name:<30} {getattr(config.defaults, name):g}" for name in names]
    return "\n".join([*lines, *(f'{"stop":<30} "{text}"' for text in config.reverse_prompts)])

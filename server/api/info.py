"""Information endpoints: health, models, properties."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath

from aiohttp import web
from msgspec.structs import replace

from logitless.engine.errors import NotFound, NotSupported
from logitless.engine.requests import CompletionRequest
from logitless.frontend.answers.llamacpp import DefaultSettings, Done, Modalities, Props
from logitless.frontend.answers.models import Health, Modality, ModelEntry, ModelMeta, Models, NativeModel
from logitless.frontend.config import BUILD_INFO
from logitless.frontend.dialects import anthropic
from logitless.frontend.replies.reply import generation_settings
from logitless.server.api.context import CONTEXT, STARTED, Context, is_anthropics, json_response
from logitless.server.api.llamacpp.routes import special_text
from logitless.server.auth import ApiKeys
from logitless.server.clients import CLIENT
from logitless.server.config import ServerConfig
from logitless.server.routes import routes


async def health(request: web.Request) -> web.Response:
    """GET /health: 503 while loading."""
    _ = request.app[CONTEXT].served
    return json_response(Health())


async def models(request: web.Request) -> web.Response:
    """GET /v1/models: the model, and its finetunes that have names; with ?checkpoints=true those of epochs, too."""
    context = request.app[CONTEXT]
    entries = [_model(context), *_tuned(context, checkpoints=asks_checkpoints(request))]
    return models_response(request, entries, embeds=context.config.embeddings)


def models_response(request: web.Request, models: Iterable[ModelEntry], *, embeds: bool = False) -> web.Response:
    """A list of models, in the shape that the client reads. `embeds`: embeddings were prepared at the start."""
    if is_anthropics(request):
        return json_response(anthropic.listed(models, request.query))
    data = list(models)
    return json_response(Models(models=[_native(each, embeds=embeds) for each in data], data=data))


def _native(model: ModelEntry, *, embeds: bool) -> NativeModel:
    reads_media = len(model.architecture.input_modalities) > 1
    capabilities = ("completion", *(["embedding"] if embeds else []), *(["multimodal"] if reads_media else []))
    return NativeModel(name=model.id, model=model.id, capabilities=capabilities)


def model_response(request: web.Request, model: ModelEntry) -> web.Response:
    """One model, in the shape that the client reads."""
    return json_response(anthropic.model_info(model) if is_anthropics(request) else model)


async def model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}."""
    context = request.app[CONTEXT]
    id = request.match_info["id"]
    data = next((tuned for tuned in _tuned(context, checkpoints=True) if tuned.id == id), _model(context))
    if id not in {data.id, *context.config.names}:
        raise NotFound(f"no such model: {id}")
    return model_response(request, data)


def asks_checkpoints(request: web.Request) -> bool:
    """True if a listing of models is to have the checkpoints of fine-tuning jobs, too."""
    return request.query.get("checkpoints", "").lower() in ("1", "true")


def _tuned(context: Context, *, checkpoints: bool) -> list[ModelEntry]:
    """Adapters and whole finetunes that have the name of a model."""
    known = context.served.adapters
    base = _model(context)
    return [
        replace(base, id=entry.name, aliases=[], tags=[], root=base.id, parent=base.id)
        for entry in (known.entries if known is not None else ())
        if entry.name and not entry.removed and (entry.listed or checkpoints)
    ]


def _model(context: Context) -> ModelEntry:
    info, config, modalities = context.served.info, context.config, _modalities(context)
    return ModelEntry(
        id=config.model,
        aliases=list(config.aliases or ([config.alias] if config.alias else [])),
        tags=list(config.tags),
        created=STARTED,
        architecture=architecture(images=modalities.vision, audio=modalities.audio),
        meta=ModelMeta(
            vocab_type=info.vocab_type,
            n_vocab=info.n_vocab,
            n_ctx_train=info.n_ctx_train,
            n_embd=info.n_embd,
            n_params=info.n_params,
            size=info.nbytes,
        ),
    )


def architecture(*, images: bool, audio: bool = False) -> Modality:
    """Modalities of a model in OpenAI's list, as llama-server tells them."""
    return Modality(["text", *(["image"] if images else []), *(["audio"] if audio else [])])


def _modalities(context: Context) -> Modalities:
    """Inputs that the model reads beside text."""
    media = context.served.media
    return Modalities(media is not None and media.reads_images, media is not None and media.reads_audio)


async def props(request: web.Request) -> web.Response:
    """GET /props."""
    context = request.app[CONTEXT]
    served, config, tokenizer = context.served, context.config, context.served.tokenizer
    whole = request[CLIENT].is_admin or not config.behind_router

    default = CompletionRequest(
        (),
        config.defaults,
        n_predict=config.n_predict,
        stop=config.reverse_prompts,
        ignore_eos=config.ignore_eos,
        n_keep=config.n_keep,
    )
    others = {"backend_sampling": config.backend_sampling}
    return json_response(
        Props(
            default_generation_settings=DefaultSettings(generation_settings(default, others), served.info.n_ctx),
            total_slots=config.n_parallel,
            model_alias=config.model,
            model_path=config.model_path if whole else PurePath(config.model_path).name,
            model_ftype=served.info.ftype,
            modalities=_modalities(context),
            media_marker=context.parser.media.marker,
            endpoint_slots=bool(config.slots),
            endpoint_props=bool(config.props),
            endpoint_metrics=bool(config.metrics),
            endpoint_tools=bool(config.tools),
            ui=bool(config.ui),
            webui=bool(config.ui),
            ui_settings=config.ui_settings,
            webui_settings=config.ui_settings,
            chat_template=served.template.source if served.template else "",
            chat_template_caps=dict(served.template.caps) if served.template else {},
            bos_token=special_text(tokenizer, tokenizer.bos_id) or "",
            eos_token=special_text(tokenizer, tokenizer.eos_id) or "",
            build_info=BUILD_INFO,
            is_sleeping=context.service.asleep,
        )
    )


async def change_props(request: web.Request) -> web.Response:
    """POST /props: allowed by --props; there is nothing to change yet."""
    context = request.app[CONTEXT]
    if not context.config.props:
        raise NotSupported("this server does not allow changing its properties; start it with --props")
    await context.parsed(request, lambda body: body)
    return json_response(Done())


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics."""
    from logitless.server.observing.metrics import metrics  # prometheus_client is imported when someone asks

    return await metrics(request)


async def openapi(request: web.Request) -> web.Response:
    """GET /openapi.json."""
    return description(request.app[CONTEXT].config, request.app[CONTEXT].keys)


def description(config: ServerConfig, keys: ApiKeys) -> web.Response:
    """All routes as an OpenAPI document."""
    from logitless.server.openapi.document import document  # its tables are made when someone asks

    entry = ((each.method, path) for each in routes() if each.summary for path in each.paths)
    plain = ((method, re.sub(r"{(\w+):[^}]*}", r"{\1}", path)) for method, path in entry)
    return json_response(document(BUILD_INFO, plain, prefix=config.api_prefix.rstrip("/"), keys=keys.exist))

"""Creation of models by Ollama's API: from uploaded files or another model, with settings of their own."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace

from logitless.engine.errors import InvalidRequest
from logitless.extras.ollama_store.manifest import ADAPTER, FLAGS, MODEL, PROJECTOR, Manifest
from logitless.extras.ollama_store.model_store import CreatedModels, check_adapter, file_kind, files_of
from logitless.frontend.answers.ollama import PullProgress
from logitless.frontend.dialects.ollama import CreateBody, Options
from logitless.frontend.dialects.ollama_template import jinja_of
from logitless.frontend.fields import bad_request, read
from logitless.frontend.workers import compute, to_thread
from logitless.models.chat.errors import ChatTemplateError
from logitless.models.chat.jinja import Renderer
from logitless.models.errors import ModelFileError
from logitless.models.quantization.presets import PresetError, preset
from logitless.router.catalog import CatalogError
from logitless.router.fleet import Entry, Fleet
from logitless.router.process import ServerProcess

_NAME = re.compile(
    r"[A-Za-z0-9_][\w.-]{0,79}(?:/[A-Za-z0-9_][\w.-]{0,79}){0,3}(?::[A-Za-z0-9_][\w.-]{0,79})?", re.ASCII
)
MAX_TEMPLATE = 1 << 18  # characters: compiling more would hold up other requests
_ROLES = ("system", "user", "assistant")
_ELSEWHERE = {
    "modelfile": "its lines are fields here: from, template, system, parameters, …",
    "path": "files are uploaded: POST /api/blobs/sha256:…",
    "renderer": "the template writes the prompt",
    "parser": "the template tells the form of tool calls",
    "remote_host": "a model's files are here",
}


@dataclass
class _Plan:
    """A checked request for a model. `files` and `adapters`: sources by their names in its folder."""

    manifest: Manifest
    files: dict[str, Path]
    adapters: dict[str, Path]
    uploads: dict[str, str] = field(default_factory=dict)  # digests by names in the folder
    quantize: str = ""


class Creation:
    """Creates and copies models. `ours` maps a client's name of a model to ours (NotFound); `read_again` updates
    the fleet from the catalog."""

    def __init__(
        self,
        fleet: Fleet[ServerProcess],
        created: CreatedModels,
        read_again: Callable[[], Awaitable[None]],
        ours: Callable[[str], str],
    ) -> None:
        self._fleet, self._created, self._read_again, self._ours = fleet, created, read_again, ours

    async def plan(self, params: CreateBody, body: Mapping[str, Any]) -> _Plan:
        """The checked request. RequestError names the field that is wrong."""
        for name, reason in _ELSEWHERE.items():
            if body.get(name):
                bad_request(name, f"is not supported: {reason}")
        name = self._free("model", params.model)
        if bool(params.source) == bool(params.files):
            bad_request("from", "give the model that this one is made from, or files, and not both")
        manifest = Manifest(name=name, created=time.time())
        if params.source:
            plan = await self._plan_from(params.source, manifest)
        else:
            plan = await self._plan_of(params.files, manifest)
        model = plan.files[plan.manifest.model]
        for digest in params.adapters.values():
            place = ADAPTER.format(len(plan.adapters) + 1)
            plan.adapters[place], plan.uploads[place] = self._upload("adapters", digest), digest
            await self._check("adapters", partial(check_adapter, plan.adapters[place], model))
        if params.quantize:
            if len(plan.files) - (PROJECTOR in plan.files) > 1:
                bad_request("quantize", "a model in parts is not quantized here: logitless quantize does it")
            try:
                plan.quantize = preset(params.quantize)
            except PresetError as error:
                bad_request("quantize", str(error))
        plan.manifest = replace(plan.manifest, **await self._settings(params), adapters=list(plan.adapters))
        return plan

    async def copy(self, source: str, destination: str) -> None:
        """POST /api/copy. The copy has the files of the other model, as hard links."""
        plan = await self._plan_from(source, Manifest(name="", created=0))
        name = self._free("destination", destination)
        plan.manifest = replace(plan.manifest, name=name, created=time.time())
        async for _ in self.steps(plan):
            pass

    async def steps(self, plan: _Plan) -> AsyncGenerator[PullProgress, None]:
        """Build the model; a line for each step. RequestError: it cannot be built."""
        with self._created.building() as folder:
            for place, source in (plan.files | plan.adapters).items():
                digest = plan.uploads.get(place, "")
                yield PullProgress(
                    f"using existing layer {digest}" if digest else f"using {place} of {plan.manifest.base}"
                )
                if plan.quantize and place == plan.manifest.model:
                    yield PullProgress(f"quantizing model to {plan.quantize}")
                    try:
                        await self._created.quantize(source, folder / place, plan.quantize)
                    except ModelFileError as error:
                        raise InvalidRequest(f"field 'quantize': {error.problem}") from None
                else:
                    await self._created.take(source, folder / place)
            yield PullProgress("writing manifest")
            await self._created.keep(folder, plan.manifest)
        try:
            await self._read_again()
        except CatalogError as error:
            raise InvalidRequest(f"the model was made, but the models stay as they were: {error}") from None
        yield PullProgress("success")

    def _free(self, field: str, name: str) -> str:
        """The name of a new model. InvalidRequest: it cannot be one, or is of a model that was not created."""
        if not _NAME.fullmatch(name) or len(name) > 200:
            bad_request(field, f"{name[:80]!r} is no name: letters, digits, '_', '-', '.', a ':' before the tag")
        name = name.removesuffix(":latest")
        model = self._fleet.get(name)
        if model is not None and model.entry.created is None:
            bad_request(field, f"model {name!r} exists already, and was not created here")
        return name

    async def _plan_from(self, source: str, manifest: Manifest) -> _Plan:
        """A model with the files and the settings of another one."""
        name = self._ours(source)
        model = self._fleet.get(name)
        if model is None:
            bad_request("from", f"model {name[:80]!r} is a finetune: give its base, and its adapter in 'adapters'")
        entry: Entry = model.entry
        path = Path(entry.path)
        if not entry.path or not await to_thread(path.is_file):
            bad_request("from", f"the file of model {entry.name!r} is not here yet: load the model first")
        if entry.created is None:
            files = await to_thread(lambda: files_of(path, images=entry.images or entry.audio))
            return _Plan(replace(manifest, base=entry.name, model=next(iter(files))), files, {})
        assert isinstance(entry.created, Manifest)
        built = replace(
            entry.created, name=manifest.name, created=manifest.created, base=entry.created.base or entry.name
        )
        adapters = {place: path.parent / place for place in built.adapters}
        files = await to_thread(lambda: files_of(path, images=(path.parent / PROJECTOR).is_file()))
        return _Plan(built, files, adapters)

    async def _plan_of(self, value: Mapping[str, str], manifest: Manifest) -> _Plan:
        """A model of uploaded files."""
        plan = _Plan(manifest, {}, {})
        places = {"model": MODEL, "projector": PROJECTOR}
        for name, digest in value.items():
            path = self._upload("files", digest)
            kind = await self._check("files", partial(file_kind, path), name)
            place = places.get(kind) or ADAPTER.format(len(plan.adapters) + 1)
            if place in plan.files:
                bad_request("files", f"{name[:80]!r}: there is a {kind} already; a model in parts is joined first")
            (plan.adapters if kind == "adapter" else plan.files)[place] = path
            plan.uploads[place] = digest
        if MODEL not in plan.files:
            bad_request("files", "have no model; an adapter goes to 'adapters', with its base in 'from'")
        for path in plan.adapters.values():
            await self._check("files", partial(check_adapter, path, plan.files[MODEL]))
        return plan

    def _upload(self, field: str, digest: str) -> Path:
        path = self._created.blobs.path(digest)
        if path is None:
            bad_request(field, f"{digest[:80]} is not here: upload it (POST /api/blobs/{digest[:80]})")
        return path

    async def _check(self, field: str, work: Callable[[], Any], name: str = "") -> Any:
        try:
            return await to_thread(work)
        except ModelFileError as error:
            bad_request(field, f"{name[:80]!r}: {error.problem}" if name else error.problem)

    async def _settings(self, body: CreateBody) -> dict[str, Any]:
        """The members of the manifest that the request gives."""
        fields: dict[str, Any] = {}
        if body.system:
            fields["system"] = body.system
        if body.template:
            if len(body.template) > MAX_TEMPLATE:
                bad_request("template", f"has more than {MAX_TEMPLATE} characters")
            try:
                await compute(lambda: Renderer(jinja_of(body.template)))
            except ChatTemplateError as error:
                bad_request("template", str(error))
            fields["template"] = body.template
        if body.parameters:
            fields["parameters"] = _parameters(body.parameters)
        if body.license:
            fields["licenses"] = [body.license] if isinstance(body.license, str) else list(body.license)
        messages = []
        for i, message in enumerate(body.messages):
            if message.role not in _ROLES:
                bad_request(f"messages[{i}].role", f"must be one of {', '.join(_ROLES)}")
            if message.images or message.tool_calls:
                bad_request(f"messages[{i}]", "must be a text: images and calls are for requests")
            messages.append({"role": message.role, "content": message.content or ""})
        system = [message["content"] for message in messages if message["role"] == "system"]
        if system and not body.system:
            fields["system"] = "\n\n".join(system)
        if messages:
            fields["messages"] = [message for message in messages if message["role"] != "system"]
        return fields


def _parameters(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that are given, checked as the options of a request."""
    for name in fields:
        if name not in FLAGS:
            bad_request(
                f"parameters.{name[:40]}", f"is unknown; known: {', '.join(FLAGS)}; others are flags of the server"
            )
    options = to_builtins(read(Options, fields, within="parameters."))
    result = {name: value for name in FLAGS if (value := options.get(name)) is not None}
    if "stop" in result:
        result["stop"] = [
            text for text in ([result["stop"]] if isinstance(result["stop"], str) else result["stop"]) if text
        ]
    if "num_predict" in result and result["num_predict"] < 1:
        result["num_predict"] = -1
    if "num_keep" in result:
        result["num_keep"] = max(-1, result["num_keep"])
    if result.get("seed", -1) != -1:
        result["seed"] %= 1 << 32
    return result

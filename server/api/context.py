"""Request context of handlers: service, settings, body reading, JSON replies."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from aiohttp import web
from msgspec import Struct
from multidict import CIMultiDict

from logitless.engine.async_engine import AsyncEngine, LoadedModel
from logitless.engine.errors import InvalidRequest, RequestError, Unavailable, UnsupportedEncoding
from logitless.engine.stats import SchedulerStats
from logitless.engine.stream import Stream
from logitless.frontend.media.sources import MediaSources, Unfetched
from logitless.frontend.parser import GenerationJob, RequestParser
from logitless.frontend.replies.encoding import anthropics_error, encode_json, error_object, ollamas_error
from logitless.frontend.replies.reply import Reply
from logitless.frontend.workers import compute
from logitless.models.vision.images import MAX_BYTES
from logitless.server.api.llamacpp.sessions import StreamSession, StreamSessions
from logitless.server.api.openai.stored import StoredConversations, StoredResponses
from logitless.server.auth import ApiKeys
from logitless.server.bodies.json_body import json_object
from logitless.server.bodies.room import BODIES
from logitless.server.clients import CLIENT
from logitless.server.config import ServerConfig
from logitless.server.observing.prompts import PromptFiles
from logitless.server.observing.record import RECORD
from logitless.server.observing.tracing import TRACE
from logitless.server.outgoing.fetch import fetch_all
from logitless.server.routes import OLLAMA, all_routes
from logitless.server.slashes import canonical

T = TypeVar("T")
R = TypeVar("R", bound=Reply)
Parse = Callable[[Any, RequestParser], T]
_LARGE = 1 << 12  # bytes of a body whose parsing (tokenizing, mostly) would hold up the streams of others
# Words of bodies that may compile a grammar, decode an image, or render a chat template in another process.
_GRAMMARS = (
    *(b"grammar", b"guided", b"structured", b"regex", b"ebnf", b"schema", b"format"),
    *(b"tools", b"functions", b"\\u"),
)
_HUGE = 1 << 22  # bytes of a body whose memory is returned to the system
_IMAGES = (b"image", b"multimodal")
_CHATS = (b"messages", b"input")

KEY_HEADERS = ("X-Api-Key", "Api-Key")  # beside Authorization
CLIENT_KEY, CLIENT_ADDRESS = "X-Logitless-Key", "X-Logitless-Address"  # client headers of a router

STARTED = int(time.time())  # of the server, Unix time in seconds

_JSON = CIMultiDict({"Content-Type": "application/json; charset=utf-8"})


class Context:
    """The application's state: one per server."""

    def __init__(self, service: AsyncEngine, config: ServerConfig) -> None:
        self.service = service
        self.config = config
        self.keys = ApiKeys(config.api_keys, config.api_key_file)
        self._parser: RequestParser | None = None
        self.sessions = StreamSessions()
        self.stored = StoredResponses()
        self.conversations = StoredConversations()
        # sessions of responses in the background, by key and the response's id
        self.background: WeakValueDictionary[tuple[str, str], StreamSession] = WeakValueDictionary()
        self.last_metrics = SchedulerStats()  # as /metrics told them last
        self._prompt_files = PromptFiles(config.log_prompts_dir) if config.log_prompts_dir else None
        self.running: dict[str, tuple[str, Stream]] = {}  # (key, job that generates) by the id of its reply

    @property
    def served(self) -> LoadedModel:
        """The loaded model, or 503."""
        if self.service.served is None:
            raise Unavailable("Loading model")
        return self.service.served

    @property
    def writer(self) -> LoadedModel:
        """The loaded model, or 400 if it does not write."""
        if not self.served.info.generates:
            raise InvalidRequest("this model makes vectors of texts (POST /v1/embeddings), it does not write")
        return self.served

    @property
    def parser(self) -> RequestParser:
        """The parser of requests for the loaded model."""
        if self._parser is None:
            self._parser = RequestParser.of(self.served, self.config)
        return self._parser

    def parser_for(self, request: web.Request) -> RequestParser:
        """Parser of one request, which may name the uploaded files of its client."""
        if self.served.media is None:  # there are none
            return self.parser
        tuning, client = self.served.tuning, request[CLIENT]

        def upload(id: str) -> Path:
            assert tuning is not None
            return tuning.store.media_path(id, client.may_see)

        of_files = None if tuning is None else upload
        return self.parser.reading(MediaSources(self.config.media_urls, self.config.media_path, of_files))

    async def keep_prompts(self, request: web.Request, prompts: Sequence[Sequence[int]]) -> None:
        """Write the token ids' text to --log-prompts-dir, if there is one."""
        if self._prompt_files is not None:
            await self._prompt_files.write(request[RECORD], prompts, self.served.tokenizer)

    async def embeds(self, request: web.Request, model: str, texts: Sequence[Sequence[int]]) -> None:
        """Note the texts of a request that generates nothing; `model`: "" for the server's."""
        request[RECORD].embeds(model or self.config.model, sum(map(len, texts)))
        await self.keep_prompts(request, texts)

    async def parsed(self, request: web.Request, parse: Callable[[dict[str, Any]], T], *, slow: bool = False) -> T:
        """`parse` of the request's JSON body; beside the event loop when that may take long. `slow`: it always may."""
        values: list[dict[str, Any]] = []  # of a huge body, whose bytes do not stay beside them

        def work(raw: bytearray) -> T:
            if len(raw) > _HUGE:
                values.append(json_object(raw))
                raw.clear()
            return parse(values[0] if values else json_object(raw))

        return await self.parsed_value(request, work, slow=slow)

    async def read(self, request: web.Request, parse: Parse[T], *, slow: bool = False) -> T:
        """`parsed` with the request's parser."""
        parser = self.parser_for(request)
        return await self.parsed(request, lambda body: parse(body, parser), slow=slow)

    async def reply(self, request: web.Request, parse: Parse[GenerationJob], kind: type[R]) -> R:
        """The reply of a request with the job that `parse` reads; nothing is generated yet."""
        return kind(await self.read(request, parse), self.served, self.config)

    async def parsed_value(self, request: web.Request, parse: Callable[[bytearray], T], *, slow: bool = False) -> T:
        """The same of its raw body. Addresses that it names are fetched in between, when no worker waits for them."""
        client, bodies = client_of(request), request.app[BODIES]
        async with bodies.read(request, client) as raw:
            if len(raw) > _HUGE:
                self.service.trim_soon()
            work: Callable[[], T] = partial(parse, raw)
            if (trace := request.get(TRACE)) is not None:
                work = trace.timing(work)
            try:
                return await compute(work, client) if slow or self._is_slow(raw) else work()
            except Unfetched as stopped:
                sources = stopped.sources
            with bodies.more(client) as take:
                sources.fetched |= await fetch_all(sources.missing, MAX_BYTES, take)
                sources.missing.clear()
                return await compute(work, client)

    def _is_slow(self, raw: bytearray) -> bool:
        """True if the parsing of a body may take long."""
        return len(raw) >= _LARGE or any(word in raw for word in self._slow)

    @cached_property
    def _slow(self) -> tuple[bytes, ...]:
        """Words of bodies that may take long to parse."""
        served = self.served
        images = served.media is not None
        chats = images or (served.template is not None and served.template.is_sandboxed)
        return (*_GRAMMARS, *(_CHATS if chats else ()), *(_IMAGES if images else ()))


CONTEXT: web.AppKey[Context] = web.AppKey("context", Context)


def api_key(request: web.Request) -> str:
    """The key that the client gives, "" if none: OpenAI's header, Anthropic's, or Azure's."""
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return bearer.strip()
    return next((request.headers[name] for name in KEY_HEADERS if name in request.headers), "")


def client_key(request: web.Request) -> str:
    """The key of the client that owns a stream. Behind a router all requests have the router's key;
    it passes on the client's."""
    return request.headers.get(CLIENT_KEY, "") if _behind_router(request) else api_key(request)


def client_address(request: web.Request) -> str:
    """The client's address."""
    return (request.headers.get(CLIENT_ADDRESS) if _behind_router(request) else request.remote) or ""


def _behind_router(request: web.Request) -> bool:
    return CONTEXT in request.app and request.app[CONTEXT].config.behind_router


def client_of(request: web.Request) -> str:
    """Whom a request counts for when clients take turns: its key, or its address without one."""
    return client_key(request) or client_address(request)


def json_response(data: object, status: int = 200) -> web.Response:
    """`data` as JSON."""
    return raw_json_response(encode_json(data), status)


def raw_json_response(body: bytes, status: int = 200) -> web.Response:
    """An answer of encoded JSON."""
    return web.Response(body=body, status=status, headers=_JSON)


_OLLAMAS = re.compile(  # LM Studio's route has OpenAI's errors
    "|".join(
        each.path.replace("{id}", "[^/]*") for each in all_routes() if each.tag == OLLAMA and "/v0/" not in each.path
    )
)


def is_ollamas(request: web.BaseRequest) -> bool:
    """True if the client is one of Ollama's API."""
    path = canonical(request.path)
    at = path.rfind("/api/")
    return at >= 0 and _OLLAMAS.fullmatch(path, at) is not None


def is_anthropics(request: web.BaseRequest) -> bool:
    """True if the client is one of Anthropic's API."""
    path = request.path
    return "anthropic-version" in request.headers or ("messages" in path and "/v1/messages" in canonical(path))


def _shape(request: web.BaseRequest) -> Callable[[RequestError], Struct]:
    if is_anthropics(request):
        return anthropics_error
    return ollamas_error if is_ollamas(request) else error_object


def error_response(error: RequestError, request: web.BaseRequest | None = None) -> web.Response:
    """A refusal of a request, in the shape that its client reads."""
    shape = error_object if request is None else _shape(request)
    response = json_response(shape(error), error.code)
    if error.code == 501:  # clients of OpenAI and Anthropic repeat every other 5xx
        response.headers["x-should-retry"] = "false"
    if error.code == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, UnsupportedEncoding):
        response.headers["Accept-Encoding"] = "gzip, deflate"
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    return response

"""HTTP on a model that is open already: OpenAI's and llama-server's API, beside the Python API."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import fields
from types import TracebackType
from typing import Any

from logitless.async_llm import AsyncLLM
from logitless.errors import OptionError
from logitless.llm import LLM
from logitless.server.app import listening, make_app
from logitless.server.asgi import ASGIApp
from logitless.server.config import ServerConfig
from logitless.server.observing.start_block import log_start


def serve(llm: LLM, *, host: str = "127.0.0.1", port: int = 8080, **settings: Any) -> Server:
    """Serve a model over HTTP from a thread of its own; returns when it listens.

    `port` 0: any free one. `settings` are fields of ServerConfig: `api_keys`, `metrics`, `alias`,
    `ui`, … The process's signals, loops and logging stay as they are.

    >>> import json, urllib.request
    >>> from logitless import LLM, serve
    >>> with LLM() as llm, serve(llm, port=0) as server:
    ...     with urllib.request.urlopen(f"{server.url}/health") as reply:
    ...         json.load(reply)
    {'status': 'ok'}

    OptionError: a setting is wrong, or the address cannot be listened on."""
    return Server(llm, host, port, settings)


def asgi_app(llm: AsyncLLM, **settings: Any) -> ASGIApp:
    """The HTTP server as an ASGI application, for uvicorn, hypercorn, Starlette or Ray Serve.

    The host starts the model with its lifespan, or by its first request, and closes it at its end; it
    listens, and terminates TLS. `settings` are those of `serve`. One process of a host has one model:
    several workers load it several times.

    >>> from logitless import AsyncLLM, asgi_app
    >>> app = asgi_app(AsyncLLM(parallel=4), api_keys=("secret",))  # uvicorn module:app

    OptionError: a setting is wrong."""
    if not isinstance(llm, AsyncLLM):
        raise OptionError("asgi_app: wants an AsyncLLM; an LLM runs on a thread of its own")
    config = _config(llm, settings)

    async def start() -> None:
        await llm.start()
        log_start(await llm.service.loaded(), config)

    return ASGIApp(make_app(llm.service, config), start, llm.close)


def _config(llm: AsyncLLM, settings: dict[str, Any]) -> ServerConfig:
    try:
        return ServerConfig(**{f.name: getattr(llm.config, f.name) for f in fields(llm.config)} | settings)
    except TypeError as error:
        raise OptionError(f"serve: {str(error).partition('() ')[2]}") from None


class Server:
    """A model's HTTP server. Closing it leaves the model open."""

    def __init__(self, llm: LLM, host: str, port: int, settings: dict[str, Any]) -> None:
        self._llm = llm
        self._stack = AsyncExitStack()
        config = _config(llm.async_llm, {**settings, "host": host, "port": port})
        self.host, self.port = host, llm._run(self._start(config))

    @property
    def url(self) -> str:
        """The address, without a slash at its end."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def _start(self, config: ServerConfig) -> int:
        try:
            return await self._stack.enter_async_context(listening(self._llm.async_llm.service, config))
        except OSError as error:
            reason = (error.strerror or str(error)).split(":")[-1].strip()
            raise OptionError(f"port: cannot listen on {config.host}:{config.port}: {reason}") from None

    def wait(self) -> None:
        """Wait until the model is closed, or its engine has ended."""
        self._llm._run(self._llm.async_llm.service.ended())

    def close(self) -> None:
        """Accept no more requests, and end the running ones."""
        self._llm._run(self._stack.aclose())

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""Connection to an MCP server, over a child's standard streams or streamable HTTP, with bounds on messages and bytes.

The module imports the package mcp, which takes a second: import it beside the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import anyio
import httpx2
import mcp
import mcp_types
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from logitless.extras.tools.config import McpSettings
from logitless.extras.tools.processes import MARK, end, environment, start

logging.getLogger("mcp").setLevel(logging.CRITICAL)  # a traceback for each line that is no message
logging.getLogger("httpx2").setLevel(logging.CRITICAL)

WINDOW = 10.0  # seconds in which a server may send so much:
MAX_MESSAGES, MAX_BYTES = 2000, 32 << 20
MAX_LINE = 4 << 20  # bytes of a message
TAIL = 400  # characters of what a server said last of its troubles
_ENDED = "it ended"  # the reason where there is no better one
GRACE = 1.0  # seconds from the end of its input to the end of a child


class Flood(Exception):
    """A server that sends more than the bounds."""


class Meter:
    """Messages and bytes that a server sent of late. Raises Flood."""

    def __init__(self) -> None:
        self._since, self._n, self._nbytes = time.monotonic(), 0, 0

    def take(self, nbytes: int, n: int = 0) -> None:
        """Count bytes and messages."""
        if time.monotonic() - self._since > WINDOW:
            self._since, self._n, self._nbytes = time.monotonic(), 0, 0
        self._n += n
        self._nbytes += nbytes
        if self._n > MAX_MESSAGES or self._nbytes > MAX_BYTES:
            raise Flood(f"it sent more than {MAX_MESSAGES} messages or {MAX_BYTES} bytes in {WINDOW:g} seconds")


class McpLink:
    """One connection from its beginning to its end. It lives in a task of its own, as the package wants it."""

    def __init__(self, settings: McpSettings, seconds: float, changed: Callable[[], None]) -> None:
        """`seconds`: of the beginning; `changed` is called when the server's tools have changed."""
        self._settings, self._changed = settings, changed
        self._meter, self._ending = Meter(), asyncio.Event()
        self._reason = ""
        self._begun: asyncio.Future[mcp.Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(seconds), name=f"MCP server {settings.name}")

    @property
    def ended(self) -> bool:
        return self._ending.is_set() or self._task.done()

    @property
    def reason(self) -> str:
        """Why it ended: what it or its transport did wrong, else that it did; "": it lives."""
        return self._reason or (self._with_complaint(_ENDED) if self.ended else "")

    async def client(self) -> mcp.Client:
        """The package's client, once the server has greeted. ConnectionError: why it cannot be had."""
        try:
            return await asyncio.shield(self._begun)
        except Exception as error:
            raise ConnectionError(self.reason or str(error) or type(error).__name__) from None

    async def close(self) -> None:
        """End the connection, and the child."""
        self._ending.set()
        if not self._begun.done():
            self._task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self._task

    async def _live(self, seconds: float) -> None:
        try:
            transport = self._metered(self._http() if self._settings.url else self._stdio())
            begun = mcp.Client(transport, message_handler=self._hear, mode="auto", cache=None)
            async with asyncio.timeout(seconds) as limit, begun as client:
                limit.reschedule(None)
                self._begun.set_result(client)
                await self._ending.wait()
        except TimeoutError:
            self._over(f"it did not greet within {seconds:g} seconds")
        except Exception as error:
            self._over(_message(error))
        finally:
            self._ending.set()
            if not self._begun.done():
                self._begun.set_exception(ConnectionError(self.reason))
                self._begun.exception()  # seen, also when nobody waits

    def _over(self, reason: str) -> None:
        self._reason = self._reason or self._with_complaint(reason)

    def _with_complaint(self, reason: str) -> str:
        return f"{reason} ({self._last_line})" if self._last_line and self._last_line not in reason else reason

    _last_line = ""

    async def _hear(self, message: object) -> None:
        """A message that answers nothing."""
        if isinstance(message, mcp_types.ToolListChangedNotification):
            self._changed()

    @asynccontextmanager
    async def _metered(self, transport: AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
        """The transport, which ends the link with itself."""
        async with transport as (reading, writing), anyio.create_task_group() as tasks:
            send, receive = anyio.create_memory_object_stream[Any](0)

            async def pump() -> None:
                try:
                    async with send:
                        async for message in reading:
                            self._meter.take(0, 1)
                            await send.send(message)
                except Flood as flood:
                    self._over(str(flood))
                except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                    pass
                finally:
                    self._ending.set()

            tasks.start_soon(pump)
            try:
                yield receive, writing
            finally:
                tasks.cancel_scope.cancel()
                receive.close()

    @asynccontextmanager
    async def _stdio(self) -> AsyncIterator[Any]:
        """A child's standard streams: a message is a line."""
        settings = self._settings
        environ = environment({**get_default_environment(), **settings.env})
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        process = await start(settings.command, environ, settings.cwd or None, limit=MAX_LINE, **pipes)
        send, receive = anyio.create_memory_object_stream[Any](0)
        outgoing, taken = anyio.create_memory_object_stream[SessionMessage](0)
        tasks = [asyncio.create_task(work) for work in (self._read(process, send), _write(process, taken))]
        tasks.append(asyncio.create_task(self._complaints(process)))
        try:
            yield receive, outgoing
        finally:
            for stream in (send, receive, outgoing, taken):
                stream.close()
            assert process.stdin is not None
            process.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(GRACE):
                    await tasks[0]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await end(process, environ[MARK])

    async def _read(self, process: asyncio.subprocess.Process, send: Any) -> None:
        assert process.stdout is not None
        try:
            async with send:
                while line := await process.stdout.readline():
                    self._meter.take(len(line))
                    if not line.strip():
                        continue
                    try:
                        message = mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                    except ValueError:  # a line of a log
                        self._meter.take(0, 1)
                        continue
                    await send.send(SessionMessage(message))
        except ValueError:
            self._over(f"it sent a line of more than {MAX_LINE} bytes")
        except Flood as flood:
            self._over(str(flood))
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, ConnectionError):
            pass

    async def _complaints(self, process: asyncio.subprocess.Process) -> None:
        """Keep the end of what it says on its standard error."""
        assert process.stderr is not None
        text = b""
        while piece := await process.stderr.read(1 << 14):
            text = (text + piece)[-TAIL:]
            lines = text.decode("utf-8", "replace").split("\n")
            self._last_line = next((line.strip() for line in reversed(lines) if line.strip()), "")

    @asynccontextmanager
    async def _http(self) -> AsyncIterator[Any]:
        """Streamable HTTP."""
        settings = self._settings
        timeout = httpx2.Timeout(settings.seconds, connect=10.0)
        transport = _Metered(self._meter)
        async with (
            httpx2.AsyncClient(
                headers=dict(settings.headers), timeout=timeout, transport=transport, trust_env=False
            ) as client,
            streamable_http_client(settings.url, http_client=client) as streams,
        ):
            yield streams


async def _write(process: asyncio.subprocess.Process, taken: Any) -> None:
    assert process.stdin is not None
    with suppress(ConnectionError, anyio.ClosedResourceError):
        async for message in taken:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(text.encode() + b"\n")
            await process.stdin.drain()


class _Metered(httpx2.AsyncHTTPTransport):
    """HTTP whose bodies are metered."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _MeteredStream(response.stream, self._meter)
        return response


class _MeteredStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, meter: Meter) -> None:
        self._stream, self._meter = stream, meter

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            try:
                self._meter.take(len(piece))
            except Flood as flood:
                raise httpx2.ReadError(str(flood)) from None
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


def _message(error: BaseException) -> str:
    """The first cause of an error, on one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, FileNotFoundError):
        return f"there is no {error.filename!r}"
    if isinstance(error, mcp.MCPError) and error.code == mcp_types.CONNECTION_CLOSED:
        return _ENDED
    return " ".join(str(error).split())[:TAIL] or type(error).__name__


async def limited(work: Awaitable[Any], seconds: float) -> Any:
    """The result of `work` within its time. TimeoutError."""
    async with asyncio.timeout(seconds):
        return await work

"""Fetches of addresses that clients name: public ones, bounded in bytes, time and redirects.

The check lies where a socket is made, for the address that it will connect to. So names that
resolve to something else a moment later (DNS rebinding), redirects and odd spellings of an
address gain nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from logitless.frontend.workers import Workers
from logitless.training.graders.public import is_public

SECONDS: Final = 10.0  # of one address, with its redirects
TOGETHER: Final = 30.0  # seconds of all addresses of a request
REDIRECTS: Final = 3
AT_ONCE: Final = 4  # addresses of a request
PIECE: Final = 1 << 16
_NAMES = Workers(4, "names")


class FetchError(Exception):
    """An address that cannot be fetched; the text says why, without the address."""


async def fetch_all(
    urls: Iterable[str], most: int, take: Callable[[int], None] = lambda nbytes: None
) -> Mapping[str, bytes | FetchError]:
    """The bytes at each address, at most `most`, or why they cannot be had. `take` is told of
    the bytes that arrive, and raises where they have no room."""
    result: dict[str, bytes | FetchError] = {}
    room = asyncio.Semaphore(AT_ONCE)

    async def get(session: aiohttp.ClientSession, url: str) -> None:
        async with room:
            try:
                result[url] = await _fetch(session, url, most, take)
            except FetchError as error:
                result[url] = error

    connector = aiohttp.TCPConnector(
        resolver=_Resolver(), socket_factory=_socket, use_dns_cache=False, force_close=True, limit=AT_ONCE
    )
    target = list(dict.fromkeys(urls))
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=SECONDS),
        headers={"User-Agent": "logitless", "Accept": "image/*, audio/*", "Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    ) as session:
        try:
            async with asyncio.timeout(TOGETHER), asyncio.TaskGroup() as tasks:
                for url in target:
                    tasks.create_task(get(session, url))
        except TimeoutError:
            pass
        except BaseExceptionGroup as group:  # the first of `take`'s refusals
            raise group.exceptions[0] from None
    late = FetchError(f"the request's addresses took more than {TOGETHER:g} seconds together")
    return {url: result.get(url, late) for url in target}


async def _fetch(session: aiohttp.ClientSession, url: str, most: int, take: Callable[[int], None]) -> bytes:
    data = bytearray()
    try:
        async with session.get(url, max_redirects=REDIRECTS) as reply:
            if reply.status != 200:
                raise FetchError(f"its server answers {reply.status}")
            if (reply.content_length or 0) > most:
                raise FetchError(f"it has more than {most} bytes")
            async for piece in reply.content.iter_chunked(PIECE):
                if len(data) + len(piece) > most:
                    raise FetchError(f"it has more than {most} bytes")
                take(len(piece))
                data += piece
    except TimeoutError:
        raise FetchError(f"it took more than {SECONDS:g} seconds") from None
    except aiohttp.TooManyRedirects:
        raise FetchError(f"it has more than {REDIRECTS} redirects") from None
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):  # also of a redirect
        raise FetchError("it leads to no http:// or https:// address") from None
    except aiohttp.ClientConnectorError as error:
        raise FetchError(str(error.os_error) if _is_ours(error.os_error) else "its server cannot be reached") from None
    except (aiohttp.ClientError, OSError, ValueError):
        raise FetchError("its server does not answer as HTTP demands") from None
    return bytes(data)


class _NotPublicError(OSError):
    """A host of this machine or of a local network."""

    def __init__(self) -> None:
        super().__init__("its host has no public address")


def _is_ours(error: BaseException) -> bool:
    """True if an address was refused, be it one of several that were tried."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_is_ours, error.exceptions))
    return isinstance(error, _NotPublicError)


def _socket(info: tuple[Any, ...]) -> socket.socket:
    """A socket for an address that getaddrinfo has told, if that is public."""
    family, kind, protocol, _, where = info
    if not is_public(str(where[0])):
        raise _NotPublicError
    return socket.socket(family, kind, protocol)


class _Resolver(AbstractResolver):
    """The system's resolver, on threads that nothing else waits for."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        ask = partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM)
        try:
            result = await _NAMES.do(ask, host)
        except UnicodeError:
            raise OSError("no name of a host") from None
        return [
            ResolveResult(
                hostname=host, host=str(where[0]), port=int(where[1]), family=of, proto=protocol,
                flags=socket.AI_NUMERICHOST,
            )
            for of, _, protocol, _, where in result
        ]  # fmt: skip

    async def close(self) -> None:
        """Nothing is open."""

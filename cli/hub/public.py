"""Requests to public addresses only: not to this machine, its networks or a cloud's metadata, also by a redirect.

A client of a router names addresses to fetch from, and a redirect may name any. A host is judged
after it was resolved, and once more when its connection stands: a name may change in between.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from logitless.cli.flags.flags import CliError
from logitless.server.outgoing.public import is_public


class NotPublic(CliError):
    """A host of this machine or of a local network."""

    def __init__(self, host: str, address: str) -> None:
        super().__init__(
            f"{host} is at {address}, which is no public address: downloads from this machine and local networks need "
            "--allow-private-addresses"
        )


def is_private(url: str) -> bool:
    """True if the URL's host resolves to an address that is not public; False: it does not resolve."""
    with suppress(OSError, ValueError):
        return any(not is_public(address) for address in _addresses(url))
    return False


def open_url(request: urllib.request.Request, timeout: float, *, public_only: bool) -> Any:
    """`urlopen`, or the same with public addresses only. Raises NotPublic and urlopen's errors."""
    if not public_only:
        return urllib.request.urlopen(request, timeout=timeout)
    return urllib.request.build_opener(_Resolved, _Http, _Https).open(request, timeout=timeout)


def _addresses(url: str) -> list[str]:
    host = urlsplit(url).hostname or ""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]


class _Resolved(urllib.request.BaseHandler):
    """Judges the host of each request, and of each redirect, before a connection is made."""

    def http_request(self, request: urllib.request.Request) -> urllib.request.Request:
        try:
            addresses = _addresses(request.full_url)
        except (OSError, ValueError) as error:
            if request.type in urllib.request.getproxies():  # the proxy may know the name
                return request
            raise urllib.error.URLError(error if isinstance(error, OSError) else str(error)) from None
        for address in addresses:
            if not is_public(address):
                raise NotPublic(urlsplit(request.full_url).hostname or "", address)
        return request

    https_request = ftp_request = http_request


def _is_proxied(request: urllib.request.Request) -> bool:
    """True if the connection is to a proxy, which the user has chosen."""
    return request.host != urlsplit(request.full_url).netloc


def _judge(connection: http.client.HTTPConnection) -> None:
    address = str(connection.sock.getpeername()[0])
    if not is_public(address):
        connection.close()
        raise NotPublic(connection.host, address)


class _HttpConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        _judge(self)


class _HttpsConnection(http.client.HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        _judge(self)


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return super().http_open(request) if _is_proxied(request) else self.do_open(_HttpConnection, request)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        if _is_proxied(request):
            return super().https_open(request)
        return self.do_open(_HttpsConnection, request, context=ssl.create_default_context())

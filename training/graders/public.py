"""Public addresses: not this machine, its networks or a cloud's metadata, also behind a redirect.

A client names addresses to ask or to fetch from, and a redirect may name any. A host is judged after
it was resolved, and once more when its connection stands: a name may change in between."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import urllib.error
import urllib.request
from contextlib import suppress
from urllib.parse import urlsplit

_PROTOCOLS = ipaddress.ip_network("192.0.0.0/24")  # IANA's, partly global to older Pythons
_GLOBAL = ipaddress.ip_network("2000::/3")  # all of the internet's IPv6
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """True for an IP address of the internet, by itself or behind NAT64, 6to4 or an IPv4-mapped address."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        within = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else ip.ipv4_mapped or ip.sixtofour
        if within is not None:
            return is_public(str(within))
        if ip not in _GLOBAL:
            return False
    return ip.is_global and ip not in _PROTOCOLS and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


class PrivateAddress(ValueError):
    """A host of this machine or of a local network."""

    def __init__(self, host: str, address: str) -> None:
        super().__init__(f"{host} is at {address}, which is no public address")


def is_private(url: str) -> bool:
    """True if the URL's host resolves to an address that is not public; False: it does not resolve."""
    with suppress(OSError, ValueError):
        return any(not is_public(address) for address in _addresses(url))
    return False


def names_private(url: str) -> bool:
    """True if the URL's host is such an address, or this machine's name. Nothing is resolved."""
    with suppress(OSError, ValueError):
        host = (urlsplit(url).hostname or "").rstrip(".")
        if host.endswith("localhost"):
            return True
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        return any(not is_public(str(each[4][0])) for each in infos)
    return False


def public_opener(*handlers: type[urllib.request.BaseHandler]) -> urllib.request.OpenerDirector:
    """An opener with these handlers that raises PrivateAddress for hosts that are not public."""
    return urllib.request.build_opener(_Resolved, _Http, _Https, *handlers)


def _addresses(url: str) -> list[str]:
    host = urlsplit(url).hostname or ""
    return [str(infos[4][0]) for infos in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]


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
                raise PrivateAddress(urlsplit(request.full_url).hostname or "", address)
        return request

    https_request = ftp_request = http_request


def _is_proxied(request: urllib.request.Request) -> bool:
    """True if the connection is to a proxy, which the user has chosen."""
    return request.host != urlsplit(request.full_url).netloc


def _judge(connection: http.client.HTTPConnection) -> None:
    address = str(connection.sock.getpeername()[0])
    if not is_public(address):
        connection.close()
        raise PrivateAddress(connection.host, address)


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

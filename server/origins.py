"""Origin checks of a server without keys: host names and web pages that may send requests.

Any page that a user visits can send requests to this machine, and can point a name of its own at
127.0.0.1 (DNS rebinding). A key keeps such pages out; without keys the headers Host, Origin and
Sec-Fetch-Site, which a page cannot forge, tell them from programs and from our own page."""

from __future__ import annotations

import ipaddress
import re
import socket
from contextlib import suppress
from functools import lru_cache
from urllib.parse import SplitResult, urlsplit

from aiohttp import web

from logitless.engine.errors import Forbidden, RequestError
from logitless.server.auth import ApiKeys
from logitless.server.config import ServerConfig
from logitless.server.sockets import UNIX_SUFFIX

FORMS = frozenset({"/v1/files", "/v1/audio/transcriptions", "/v1/audio/translations"})  # their bodies are forms
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_LOCAL_SUFFIXES = (".localhost", ".internal")  # never names of the public DNS (host.docker.internal)
_SIMPLE = frozenset({"text/plain", "multipart/form-data"})  # content types that a page may send without asking
_CURL = "application/x-www-form-urlencoded"  # a form's, too, and what `curl -d` says of any body
_ELSEWHERE = frozenset({"cross-site", "same-site"})
_MAX_NAMES = 64  # hosts and addresses that were judged
_PORTS = {"http": 80, "https": 443}
_APPS = frozenset({"app", "tauri", "vscode-file", "vscode-webview"})  # installed apps', no web page's
_ORIGIN = re.compile(r"[a-z*][a-z0-9*+.-]*://[^\s/?#@]+", re.IGNORECASE)
_ALONE = ("*", "localhost", "null")  # what --cors-origins may name beside origins


def check_origins(text: str) -> str:
    """The list of --cors-origins. ValueError: an entry is no origin and no pattern of one."""
    for item in _entries(text):
        if item not in _ALONE and not _ORIGIN.fullmatch(item):
            raise ValueError(f"{item!r} is no origin: scheme://host or scheme://host:port, where * stands for any part")
    return text


def lets_any_page_in(text: str) -> bool:
    """True if a list of origins has a pattern that web pages of strangers match."""
    return any(_matcher(_entries(text)).fullmatch(page) for page in ("https://a.example", "http://a.example:9"))


def _entries(text: str) -> list[str]:
    return [item.strip().removesuffix("/") for item in text.split(",") if item.strip()]


def _matcher(entries: list[str]) -> re.Pattern[str]:
    """Pattern of the origins that a list names. `*` is any text within the host or the scheme, any
    port or none behind a colon, and any origin alone."""
    forms = []
    for item in entries:
        rest, port = (item[:-2], r"(:\d+)?") if item.endswith(":*") else (item, "")
        forms.append(".*" if item == "*" else re.escape(rest).replace(r"\*", "[^/]*") + port)
    return re.compile("|".join(forms) or "(?!)", re.IGNORECASE)


class UnsupportedMediaType(RequestError):
    """415: a body that a web page's form could have sent."""

    code = 415


class Origins:
    """Check of Host and Origin, and the origin that a response allows."""

    def __init__(self, config: ServerConfig, keys: ApiKeys) -> None:
        self._keys = keys
        self._origins = _entries(config.cors_origins)
        self._named = _matcher(self._origins)
        self._hosts = frozenset(name.lower() for name in config.allowed_hosts)
        own = socket.gethostname().lower()
        listening = (name.strip().lower() for name in config.host.split(",") if not name.endswith(UNIX_SUFFIX))
        self._names = frozenset({*_LOCAL, own, f"{own}.local", *listening, *self._hosts})
        self._knows = lru_cache(_MAX_NAMES)(
            lambda host: self._is_known(_split(f"//{host}"))
        )  # most requests name the same

    def check(self, request: web.Request, path: str) -> None:
        """Forbidden, UnsupportedMediaType: a web page of somebody else may have sent the request, and
        there is no key. `path`: the route's, without a prefix."""
        if self._keys.exist:
            return
        headers = request.headers
        for host in headers.getall("Host", ()):
            if not self._knows(host) and "*" not in self._hosts and (self._hosts or _is_loopback(request)):
                raise Forbidden(f"header 'Host': this server has no such name: {host[:100]!r} (--allowed-hosts)")
        if request.method == "OPTIONS":
            return
        origin, fetched = headers.get("Origin", ""), headers.get("Sec-Fetch-Site", "")
        if origin and not self._allows(request, origin):
            raise Forbidden(f"header 'Origin': pages of {origin[:100]!r} may not call this server (--cors-origins)")
        if not origin and fetched in _ELSEWHERE and not _is_visit(request) and not self._allows(request, "null"):
            raise Forbidden("header 'Sec-Fetch-Site': pages of other sites may not call this server (--cors-origins)")
        if request.can_read_body and path not in FORMS:
            kind = request.content_type if "Content-Type" in headers else ""
            if kind in _SIMPLE or (kind in ("", _CURL) and (origin or fetched)):
                raise UnsupportedMediaType(f"header 'Content-Type': must be application/json, not {kind[:100]!r}")

    def allowed(self, request: web.Request) -> str:
        """The value of Access-Control-Allow-Origin, or "" where none is allowed."""
        origin = request.headers.get("Origin", "")
        return origin if origin and self._allows(request, origin) else ""

    def _allows(self, request: web.Request, origin: str) -> bool:
        """True for the server's own page and for --cors-origins. By default any page may call a server
        with keys, or one that listens to other machines, and pages of installed apps may call any."""
        if self._named.fullmatch(origin):
            return True
        if not self._origins and (self._keys.exist or not is_local(request)):
            return True
        parts = _split(origin if "//" in origin else f"//{origin}")
        if not self._origins and parts is not None and parts.scheme in _APPS:
            return True
        if "localhost" in self._origins and parts is not None and parts.hostname in _LOCAL:
            return True
        return self._is_own(request, parts)

    def _is_own(self, request: web.Request, origin: SplitResult | None) -> bool:
        """True if the page comes from this server: the browser says so, or Origin and Host are equal."""
        if request.headers.get("Sec-Fetch-Site") == "same-origin":
            return True
        host = _split(f"//{request.headers.get('Host', '')}")
        if origin is None or host is None or origin.scheme not in _PORTS or not origin.hostname:
            return False
        default = _PORTS[origin.scheme]
        same = (origin.hostname, origin.port or default) == (host.hostname, host.port or default)
        return same or origin.hostname in self._hosts

    def _is_known(self, host: SplitResult | None) -> bool:
        """True for names that a stranger cannot point here: those of this machine and its network,
        which may lack a dot, those of --allowed-hosts, and addresses, which are no names."""
        if host is None:
            return False
        name = (host.hostname or "").removesuffix(".")
        if "." not in name or name in self._names or name.endswith(_LOCAL_SUFFIXES):
            return True
        with suppress(ValueError):
            return bool(ipaddress.ip_address(name))
        return False


def _split(url: str) -> SplitResult | None:
    """Parts of a URL; None: it is none."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    return parts


def _is_visit(request: web.Request) -> bool:
    """True if a link or the address bar leads here; nothing happens and the page before sees nothing."""
    return request.method in ("GET", "HEAD") and request.headers.get("Sec-Fetch-Mode") == "navigate"


def is_local(request: web.Request) -> bool:
    """True if the connection comes from this machine: over loopback or a Unix socket."""
    return _is_loopback(request) or isinstance(_address(request), str)


def _is_loopback(request: web.Request) -> bool:
    address = _address(request)
    return isinstance(address, tuple) and _is_loopback_address(address[0])


@lru_cache(_MAX_NAMES)
def _is_loopback_address(address: str) -> bool:
    if address == "localhost":  # an ASGI host may tell a name
        return True
    with suppress(ValueError):
        ip = ipaddress.ip_address(address.partition("%")[0])
        return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback
    return False


def _address(request: web.Request) -> object:
    """Address of the server's end: (host, port, …), the path of a Unix socket, None without a connection."""
    return request.transport.get_extra_info("sockname") if request.transport is not None else None

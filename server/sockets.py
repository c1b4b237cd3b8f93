"""Listening sockets: IPv4, IPv6 and Unix addresses of `--host`, separated by commas."""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress

BACKLOG = 128  # connections that wait to be accepted
UNIX_SUFFIX = ".sock"


def bind(hosts: str, port: int, *, reuse_port: bool = False) -> list[socket.socket]:
    """Sockets bound to every host of a list, not listening yet.

    A host is a name, an address (IPv6 with or without brackets; `::` takes IPv4 as well) or the path
    of a Unix socket that ends with `.sock`. Port 0 is chosen by the system, one for all hosts. Raises
    OSError, with all sockets closed, if one host cannot be bound."""
    sockets: list[socket.socket] = []
    try:
        for host in [part.strip() for part in hosts.split(",")]:
            if host.endswith(UNIX_SUFFIX):
                sockets.append(_bind_unix(host))
            else:
                new = _bind_host(host.removeprefix("[").removesuffix("]"), port, reuse_port=reuse_port)
                port = port or int(new[0].getsockname()[1])
                sockets += new
    except BaseException:
        close(sockets)
        raise
    return sockets


def close(sockets: list[socket.socket]) -> None:
    """Close sockets, and remove the files of Unix sockets."""
    remove_files(sockets)
    for sock in sockets:
        sock.close()


def remove_files(sockets: list[socket.socket]) -> None:
    """Remove the files of open Unix sockets: no client connects any more."""
    for sock in sockets:
        if sock.family == socket.AF_UNIX and sock.fileno() >= 0 and sock.getsockname():
            with suppress(OSError):
                os.unlink(sock.getsockname())


def address(sock: socket.socket, *, tls: bool = False) -> str:
    """The URL of a bound socket; `unix:PATH` for Unix sockets."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _bind_host(host: str, port: int, *, reuse_port: bool) -> list[socket.socket]:
    """One socket for each address of a host; addresses that this machine lacks are left out, unless all are."""
    infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    problem: OSError | None = None
    try:
        for family, kind, protocol, _, where in dict.fromkeys(infos):
            try:
                sock = socket.socket(family, kind, protocol)
            except OSError as error:  # the system has no IPv6
                problem = error
                continue
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(where[0] != "::"))
            try:
                sock.bind((where[0], port, *where[2:]))
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                problem = error
                sockets.pop().close()
                continue
            port = port or int(sock.getsockname()[1])
    except BaseException:
        close(sockets)
        raise
    if not sockets:
        raise problem or OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    return sockets


def _bind_unix(path: str) -> socket.socket:
    """A Unix socket. The file of a server that has ended is replaced, that of a running one is not."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(path).st_mode) and not _answers(path):
                os.unlink(path)
        sock.bind(path)
    except BaseException:
        sock.close()
        raise
    return sock


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(path)
        except OSError:
            return False
    return True
